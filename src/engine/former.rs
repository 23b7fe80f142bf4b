//! Sessions that outlive the engine: what is noted of them while they live, and
//! how those of a former life go on.
//!
//! At the start of a life each of them is there as if its client had just gone:
//! its seat, its name, its barriers and its will are its own for one lease. A
//! client that comes back takes it up; one that does not is lost as any other.

use super::actor::{Actor, replace_all};
use super::counts::add;
use super::peers::{Bequest, Gone, MAX_PARTIES, Member};
use super::request::{Gathered, Refused, check, fits};
use super::session::Session;
use super::{Attached, Engine, Newcomer, Out, deliver, lock};
use crate::auth::Access;
use crate::catalog::Kind;
use crate::cell::sync::Barrier;
use crate::cell::{Op, sync};
use crate::layout::Run;
use crate::wire::{self, KeepRecord, MAX_KEPT, Tag, Violation};
use std::collections::{HashMap, HashSet};
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What is noted of sessions, as it happens.
#[derive(Clone, Copy, Debug)]
pub enum Note<'n> {
    /// One has begun.
    Began {
        /// Its number.
        session: u64,
        /// What it may do.
        access: Access,
        /// Its seat.
        seat: u32,
    },
    /// One has ended, and all that was to be done about that is done.
    Ended {
        /// Its seat.
        seat: u32,
        /// How.
        how: Gone,
    },
    /// One has a name, in place of the one that it had.
    Named {
        /// Its seat.
        seat: u32,
        /// The name.
        name: &'n str,
    },
    /// One is a party of a barrier.
    Party {
        /// Its seat.
        seat: u32,
        /// The cell of the barrier.
        place: u32,
    },
    /// One has left a will, in place of the one before.
    Will {
        /// Its seat.
        seat: u32,
        /// What is to be done.
        will: &'n [Bequest],
    },
    /// One has handed over: no name, no barriers, no will.
    Released {
        /// Its seat.
        seat: u32,
    },
    /// The array with these cells is gone.
    Cleared {
        /// Its first cell.
        base: u32,
        /// How many.
        extent: u32,
    },
}

/// Where sessions are noted, so that they are there after the engine's end.
/// Called under the lock of the peers, one note after the other.
pub trait Roster: Debug + Send {
    /// Notes it. What cannot be noted is the roster's to report: the session
    /// goes on, and ends with this life of the server.
    fn note(&mut self, note: &Note<'_>);
}

/// An operation of a will, with its array by the first cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// The operation.
    pub op: Op,
    /// First cell of its array.
    pub base: u32,
    /// The cell, counted from there.
    pub offset: u32,
    /// First operand.
    pub a: u64,
    /// Second operand.
    pub b: u64,
}

/// A session of a former life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Former {
    /// Its number.
    pub session: u64,
    /// What it may do.
    pub access: Access,
    /// What it was called.
    pub name: Option<Arc<str>>,
    /// The cells of the barriers that it is a party of.
    pub parties: HashSet<u32>,
    /// What is to be done if it is lost.
    pub will: Vec<Left>,
}

/// All that is known of sessions of a former life.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Formers {
    /// Those that lived, by their seats.
    pub sessions: HashMap<u32, Former>,
    /// Names of peers that were lost, the oldest first.
    pub lost: Vec<(Arc<str>, Gone)>,
    /// The seat that was taken last.
    pub last_seat: u32,
}

impl<A: Actor> Engine<A> {
    /// To be called at the start, with cells and sessions of a former life.
    /// Whoever of these comes back within a lease finds what it had; locks that
    /// none of them holds are free, and a barrier that nobody is a party of any
    /// more would never have all together again: it is broken.
    pub fn take_over(&self, formers: Formers, roster: Option<Box<dyn Roster>>) {
        let mut attended = HashSet::new();
        {
            let catalog = self.catalogued();
            let by_base: HashMap<u32, _> =
                catalog.list("", usize::MAX).map(|entry| (entry.base, entry)).collect();
            let mut peers = lock(&self.peers);
            let mut table = lock(&self.sessions);
            for (seat, former) in formers.sessions {
                let Former { session: id, access, name, parties, will } = former;
                let mut member = Member::new(id, access == Access::ReadOnly, Duration::ZERO);
                let mut session = Session::new(id, access, 1, Duration::ZERO);
                session.seat = seat;
                session.heard = member.heard.clone();
                // It is not known, and looking costs little.
                session.may_hold = true;
                attended.extend(parties.iter().copied());
                member.parties = parties;
                // An array that is not there any more needs no will.
                let will = will.into_iter().filter_map(|left| {
                    let Left { op, base, offset, a, b } = left;
                    let entry = *by_base.get(&base)?;
                    let whole = fits(entry, op, Run::one(offset)).is_ok();
                    let left = || Bequest { op, entry: entry.clone(), offset, a, b };
                    (whole && may_be_left(entry.form.param, op, a, b)).then(left)
                });
                member.will = will.collect();
                table.insert(id, Arc::new(Mutex::new(session)));
                peers.take_up(seat, member, name);
            }
            peers.remember(formers.lost, formers.last_seat);
            peers.roster = roster;
        }
        let mut nobody_waits = Vec::new();
        self.free_orphans(&mut nobody_waits);
        let catalog = self.catalogued();
        for entry in catalog.list("", usize::MAX).filter(|e| e.form.kind == Kind::Barrier) {
            for place in entry.base..entry.base + entry.extent {
                let word = self.actor.load(place);
                let barrier = Barrier::of(word);
                let half_full = barrier.index(entry.form.param) > 0 && !barrier.broken;
                if half_full && !attended.contains(&place) {
                    replace_all(
                        &self.actor,
                        [place],
                        Barrier { broken: true, ..barrier }.value() << 1,
                    );
                }
            }
        }
    }

    /// Gives a client its session of a former life, if that is there and has the
    /// same access. Its arrays and replies are not known any more. The
    /// connection that had taken it up before is to be closed: its client has
    /// not heard of that.
    pub fn take_up(&self, newcomer: &Newcomer, now: Duration, out: &mut Out) -> Option<Attached> {
        let id = newcomer.resume?;
        let session = lock(&self.sessions).get(&id).cloned()?;
        let mut locked = lock(&session);
        if locked.ended || locked.access != newcomer.access {
            return None;
        }
        let mut done = Vec::new();
        {
            let mut parking = lock(&self.parking);
            parking.end_session(&self.actor, id, &mut done);
            self.count(&parking);
        }
        deliver(done, out);
        out.close.extend(locked.route);
        let mut fresh = Session::new(id, newcomer.access, newcomer.next_request, now);
        fresh.route = Some(newcomer.route);
        (fresh.seat, fresh.heard) = (locked.seat, locked.heard.clone());
        fresh.tally = locked.tally.clone();
        add(&self.events.resumed, 1);
        (fresh.released, fresh.may_hold) = (locked.released, true);
        fresh.hear(now);
        *locked = fresh;
        let seat = locked.seat;
        drop(locked);
        Some(Attached { session, id, resumed: false, seat })
    }

    /// A client whose session goes on in another life says which locks it holds:
    /// what else has its seat was on its way to it when the life before ended,
    /// and is free. Whether the holder before had abandoned it is not known any
    /// more: the next one is told the worse.
    pub(super) fn keep(
        &self,
        session: &Session,
        payload: &[u8],
        gathered: &mut Gathered,
    ) -> Result<Result<(), Refused>, Violation> {
        let mut held = HashMap::new();
        if !payload.is_empty() {
            let records = wire::records::<KeepRecord>(Tag::Keep, payload, MAX_KEPT)?;
            let _catalog = self.catalogued();
            for KeepRecord { array, offset, token, .. } in records {
                // One that was removed meanwhile holds nothing.
                if let Ok(entry) = check(session, Op::Load, array, Run::one(offset)) {
                    held.insert(entry.base + offset, token);
                }
            }
        }
        if session.seat != 0 {
            let seat = session.seat;
            let lost = |place, lock: sync::Lock| {
                lock.seat == seat && held.get(&place) != Some(&lock.token)
            };
            let freed = self.free_locks(lost, true, &mut gathered.rung);
            if freed > 0 {
                let session = session.id;
                tracing::info!(session, freed, "freed locks that had not reached their holder");
            }
        }
        Ok(Ok(()))
    }
}

/// Whether the operands are those of an operation that a will can have.
fn may_be_left(param: u64, op: Op, a: u64, b: u64) -> bool {
    let nobodys = !op.is_read() && !matches!(op, Op::Acquire | Op::Release | Op::Down | Op::Arrive);
    nobodys && super::request::operands_fit(param, op, a, b).is_ok()
}

/// A session of a former life, checked as far as it goes without the arrays.
///
/// # Errors
/// What is wrong with it.
pub fn check_former(former: &Former, capacity: u32) -> Result<(), &'static str> {
    if former.session == 0 {
        return Err("a session has no number");
    }
    if former.parties.len() > MAX_PARTIES {
        return Err("a session is a party of too many barriers");
    }
    if former.parties.iter().any(|place| *place >= capacity) {
        return Err("a session is a party of a barrier outside of the segment");
    }
    if former.will.len() > wire::MAX_WILL {
        return Err("a will is too long");
    }
    Ok(())
}
