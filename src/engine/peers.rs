//! Who is here, by what name, and what they leave behind: seats, names,
//! barrier parties, wills. Pure bookkeeping, under one lock.

use super::counts::Tally;
use super::former::{Note, Roster};
use crate::auth::Access;
use crate::catalog::Entry;
use crate::cell::Op;
use crate::cell::sync::MAX_SEAT;
use crate::wire::FellReason;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Longest name of a peer, in bytes.
pub const MAX_PEER_NAME: usize = 128;

/// Most names of lost peers that are remembered; the oldest go first.
pub const MAX_LOST: usize = 1 << 16;

/// Most barriers that one session can be a party of.
pub const MAX_PARTIES: usize = 1 << 12;

/// How a session ended. The number is its code on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Gone {
    /// Nothing was heard of it for its lease.
    Silent = 1,
    /// It was closed without being released.
    Closed = 2,
    /// It was released.
    Released = 3,
}

impl Gone {
    /// The end with this wire code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Gone> {
        Some(match code {
            1 => Gone::Silent,
            2 => Gone::Closed,
            3 => Gone::Released,
            _ => return None,
        })
    }
}

/// How and when a peer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// How.
    pub how: Gone,
    /// How long ago when it was told.
    pub ago: Duration,
}

/// What a session leaves to be done when it ends without being released.
#[derive(Clone, Debug)]
pub struct Bequest {
    /// The operation.
    pub op: Op,
    /// Its array.
    pub entry: Arc<Entry>,
    /// The cell, counted from the start of the array.
    pub offset: u32,
    /// First operand.
    pub a: u64,
    /// Second operand.
    pub b: u64,
}

/// By which way a session's operations go. The number is its code on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Way {
    /// Requests over TCP.
    #[default]
    Tcp = 1,
    /// One-sided RDMA.
    Rdma = 2,
    /// The CPU's own atomics in the segment's memory.
    Shm = 3,
}

impl Way {
    /// The way with this wire code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Way> {
        Some(match code {
            1 => Way::Tcp,
            2 => Way::Rdma,
            3 => Way::Shm,
            _ => return None,
        })
    }
}

/// A way that a client does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fell {
    /// Which.
    pub wanted: Way,
    /// Why.
    pub reason: FellReason,
    /// The same in words.
    pub text: String,
}

/// What is known of one session.
#[derive(Debug)]
pub struct Member {
    /// Its session.
    pub session: u64,
    /// What it called itself.
    pub name: Option<Arc<str>>,
    /// When it began.
    pub began: Duration,
    /// When something was last heard of it, in nanoseconds.
    pub heard: Arc<AtomicU64>,
    /// By which way its operations go.
    pub way: Way,
    /// What it has asked for.
    pub tally: Arc<Tally>,
    /// The ways that it does not have, and why.
    pub fell: Vec<Fell>,
    /// It may read only.
    pub reads_only: bool,
    /// It has had locks open, so it may hold some.
    pub may_hold: bool,
    /// The barriers that it is a party of, by their cells.
    pub parties: HashSet<u32>,
    /// Those of them at which it waited when it ended.
    pub arrived: HashSet<u32>,
    /// What is to be done if it ends without being released.
    pub will: Vec<Bequest>,
    /// It has ended, and is to be settled.
    pub gone: Option<Gone>,
    /// It had a connection then, so its process lives, or is stopped.
    pub connected: bool,
}

impl Member {
    /// One who has just come.
    #[must_use]
    pub fn new(session: u64, reads_only: bool, now: Duration) -> Member {
        Member {
            session,
            name: None,
            began: now,
            heard: Arc::new(AtomicU64::new(nanos(now))),
            way: Way::Tcp,
            tally: Arc::default(),
            fell: Vec::new(),
            reads_only,
            may_hold: false,
            parties: HashSet::new(),
            arrived: HashSet::new(),
            will: Vec::new(),
            gone: None,
            connected: true,
        }
    }

    /// When something was last heard of it.
    #[must_use]
    pub fn last_heard(&self) -> Duration {
        // Relaxed: a time for people to read.
        Duration::from_nanos(self.heard.load(Ordering::Relaxed))
    }
}

/// A time as a number that fits an atomic: for 500 years.
#[must_use]
pub fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Who broke a barrier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breach {
    /// In which epoch.
    pub epoch: u64,
    /// What the party called itself, or its seat.
    pub by: String,
    /// How it ended.
    pub how: Gone,
}

/// The table. See the [module](self).
#[derive(Debug, Default)]
pub struct Peers {
    /// By their seats.
    members: BTreeMap<u32, Member>,
    seats: HashMap<u64, u32>,
    last_seat: u32,
    names: HashMap<Arc<str>, u32>,
    lost: HashMap<Arc<str>, (Gone, Duration)>,
    lost_in_order: VecDeque<Arc<str>>,
    /// By the cells of the barriers.
    pub breaches: HashMap<u32, Breach>,
    /// Where sessions are noted, if they are to outlive the server.
    pub roster: Option<Box<dyn Roster>>,
}

/// Why a session cannot have a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameRefused {
    /// It is none.
    Bad,
    /// The living session with this seat has it.
    Taken(u32),
}

impl Peers {
    fn note(&mut self, note: &Note<'_>) {
        if let Some(roster) = &mut self.roster {
            roster.note(note);
        }
    }

    /// A session of a former life has its seat, which is free, and its name.
    pub fn take_up(&mut self, seat: u32, mut member: Member, name: Option<Arc<str>>) {
        if let Some(name) = &name {
            self.names.insert(name.clone(), seat);
        }
        member.name = name;
        self.seats.insert(member.session, seat);
        self.members.insert(seat, member);
    }

    /// These peers were lost in a former life, in which this seat was taken last.
    pub fn remember(&mut self, lost: Vec<(Arc<str>, Gone)>, last_seat: u32) {
        self.last_seat = last_seat;
        for (name, how) in lost {
            self.miss(name, how, Duration::ZERO);
        }
    }

    fn miss(&mut self, name: Arc<str>, how: Gone, now: Duration) {
        self.lost.insert(name.clone(), (how, now));
        self.lost_in_order.push_back(name);
        if self.lost_in_order.len() > MAX_LOST
            && let Some(oldest) = self.lost_in_order.pop_front()
        {
            self.lost.remove(&oldest);
        }
    }

    /// A session is a party of the barrier on this cell. `false`: it is one of
    /// as many as it may.
    pub fn be_party(&mut self, seat: u32, place: u32) -> bool {
        let Some(member) = self.members.get_mut(&seat) else {
            return true;
        };
        if member.parties.contains(&place) {
            return true;
        }
        if member.parties.len() >= MAX_PARTIES {
            return false;
        }
        member.parties.insert(place);
        self.note(&Note::Party { seat, place });
        true
    }

    /// A session leaves this to be done, and nothing else.
    pub fn leave_will(&mut self, seat: u32, will: Vec<Bequest>) {
        let Some(member) = self.members.get_mut(&seat) else {
            return;
        };
        member.will = will;
        if let Some(roster) = &mut self.roster {
            roster.note(&Note::Will { seat, will: &member.will });
        }
    }

    /// A session has handed over what it had: nobody misses it.
    pub fn hand_over(&mut self, seat: u32) {
        self.withdraw(seat);
        self.note(&Note::Released { seat });
    }

    /// A seat for a new session, or 0 if every one is taken. It is not given
    /// to another one soon.
    pub fn sit_down(&mut self, member: Member) -> u32 {
        for _ in 0..MAX_SEAT {
            self.last_seat = self.last_seat % MAX_SEAT + 1;
            if !self.members.contains_key(&self.last_seat) {
                let (session, seat) = (member.session, self.last_seat);
                let access = if member.reads_only { Access::ReadOnly } else { Access::ReadWrite };
                self.seats.insert(session, seat);
                self.members.insert(seat, member);
                self.note(&Note::Began { session, access, seat });
                return seat;
            }
        }
        0
    }

    /// Whether a session sits there, be it that it has ended and is to be
    /// settled.
    #[must_use]
    pub fn sits(&self, seat: u32) -> bool {
        self.members.contains_key(&seat)
    }

    /// The seat of a session.
    #[must_use]
    pub fn seat_of(&self, session: u64) -> Option<u32> {
        self.seats.get(&session).copied()
    }

    /// Who sits there.
    pub fn at(&mut self, seat: u32) -> Option<&mut Member> {
        self.members.get_mut(&seat)
    }

    /// Those whose seats come after this one.
    pub fn after(&self, seat: u32) -> impl Iterator<Item = (u32, &Member)> {
        use std::ops::Bound::{Excluded, Unbounded};
        self.members.range((Excluded(seat), Unbounded)).map(|(seat, member)| (*seat, member))
    }

    /// Gives a session a name, in place of the one that it had.
    ///
    /// # Errors
    /// The name is none, or a living session has it.
    pub fn join(&mut self, seat: u32, name: &str) -> Result<(), NameRefused> {
        if name.is_empty() || name.len() > MAX_PEER_NAME || name.chars().any(char::is_control) {
            return Err(NameRefused::Bad);
        }
        if let Some(&holder) = self.names.get(name)
            && holder != seat
            && self.members.get(&holder).is_some_and(|m| m.gone.is_none())
        {
            return Err(NameRefused::Taken(holder));
        }
        self.withdraw(seat);
        let name: Arc<str> = name.into();
        if self.lost.remove(&name).is_some() {
            self.lost_in_order.retain(|lost| *lost != name);
        }
        self.names.insert(name.clone(), seat);
        self.note(&Note::Named { seat, name: &name });
        if let Some(member) = self.members.get_mut(&seat) {
            member.name = Some(name);
        }
        Ok(())
    }

    /// A session has no name any more, and nobody misses it.
    pub fn withdraw(&mut self, seat: u32) {
        if let Some(name) = self.members.get_mut(&seat).and_then(|member| member.name.take())
            && self.names.get(&name) == Some(&seat)
        {
            self.names.remove(&name);
        }
    }

    /// Takes a session that has ended out of the table. If it had a name that
    /// is missed, that is lost from now on.
    pub fn leave(&mut self, seat: u32, now: Duration) -> Option<Member> {
        let member = self.members.remove(&seat)?;
        if self.seats.get(&member.session) == Some(&seat) {
            self.seats.remove(&member.session);
        }
        if let Some(name) = &member.name
            && self.names.get(name) == Some(&seat)
        {
            self.names.remove(name);
            if let Some(how) = member.gone.filter(|how| *how != Gone::Released) {
                self.miss(name.clone(), how, now);
            }
        }
        self.note(&Note::Ended { seat, how: member.gone.unwrap_or(Gone::Closed) });
        Some(member)
    }

    /// Whether the peer of this name is lost, and has not come back.
    #[must_use]
    pub fn loss(&self, name: &str, now: Duration) -> Option<Loss> {
        let &(how, when) = self.lost.get(name)?;
        Some(Loss { how, ago: now.saturating_sub(when) })
    }

    /// What to call a session.
    #[must_use]
    pub fn called(&self, seat: u32) -> String {
        match self.members.get(&seat).and_then(|member| member.name.as_ref()) {
            Some(name) => name.to_string(),
            None => format!("session {seat}"),
        }
    }

    /// No party of a barrier on these cells any more.
    pub fn remove_cells(&mut self, cells: &std::ops::Range<u32>) {
        for member in self.members.values_mut() {
            member.parties.retain(|place| !cells.contains(place));
        }
        self.breaches.retain(|place, _| !cells.contains(place));
        self.note(&Note::Cleared { base: cells.start, extent: cells.end - cells.start });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member() -> Member {
        Member::new(0, false, Duration::ZERO)
    }

    #[test]
    fn seats_are_not_used_again_soon() {
        let mut peers = Peers::default();
        assert_eq!(peers.sit_down(member()), 1);
        assert_eq!(peers.sit_down(member()), 2);
        peers.leave(1, Duration::ZERO);
        assert_eq!(peers.sit_down(member()), 3);
        peers.last_seat = MAX_SEAT;
        assert_eq!(peers.sit_down(member()), 1);
        peers.last_seat = MAX_SEAT;
        assert_eq!(peers.sit_down(member()), 4, "those who live keep theirs");
    }

    #[test]
    fn a_name_belongs_to_one_who_lives() {
        let mut peers = Peers::default();
        let (a, b) = (peers.sit_down(member()), peers.sit_down(member()));
        assert_eq!(peers.join(a, "rank 1"), Ok(()));
        assert_eq!(peers.join(a, "rank 1"), Ok(()));
        assert_eq!(peers.join(b, "rank 1"), Err(NameRefused::Taken(a)));
        for bad in ["", "a\nb", &"x".repeat(129)] {
            assert_eq!(peers.join(b, bad), Err(NameRefused::Bad));
        }
        peers.at(a).unwrap().gone = Some(Gone::Silent);
        peers.leave(a, Duration::from_secs(5));
        let loss = peers.loss("rank 1", Duration::from_secs(7)).unwrap();
        assert_eq!(loss, Loss { how: Gone::Silent, ago: Duration::from_secs(2) });
        assert_eq!(peers.join(b, "rank 1"), Ok(()));
        assert_eq!(peers.loss("rank 1", Duration::from_secs(7)), None);
        peers.at(b).unwrap().gone = Some(Gone::Released);
        peers.leave(b, Duration::from_secs(8));
        assert_eq!(peers.loss("rank 1", Duration::from_secs(9)), None);
    }

    #[test]
    fn lost_names_are_not_kept_without_end() {
        let mut peers = Peers::default();
        for i in 0..MAX_LOST + 10 {
            let seat = peers.sit_down(member());
            peers.join(seat, &format!("p{i}")).unwrap();
            peers.at(seat).unwrap().gone = Some(Gone::Closed);
            peers.leave(seat, Duration::ZERO);
        }
        assert_eq!(peers.lost.len(), MAX_LOST);
        assert!(peers.loss("p9", Duration::ZERO).is_none());
        assert!(peers.loss("p10", Duration::ZERO).is_some());
    }
}
