//! What the engine does about locks, barriers and peers: the requests, and what
//! is to be done when a session has ended.

use super::actor::{Actor, execute};
use super::counts::add;
use super::overview::begin_list;
use super::parking::{Ended, Parking, WaitId};
use super::peers::{Bequest, Breach, Gone, Loss, NameRefused, Way};
use super::request::{Gathered, Refused, check, check_operands, finish_words};
use super::session::Session;
use super::{Done, Engine, Out, deliver, lock, push_ended};
use crate::auth::Access;
use crate::catalog::{Catalog, Entry, Kind};
use crate::cell::sync::{Barrier, Claim, Lock};
use crate::cell::{Op, WAITING, is_waiting};
use crate::layout::Run;
use crate::wire::{
    self, AcquireRecord, BrokenRecord, HoldRecord, MemberRecord, OpRecord, PartyRecord, Refusal,
    Tag, Violation,
};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// Some of the locks of a seat, by cell and token, and how many it has.
type Held = (Vec<(u32, u64)>, usize);

pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// The arrays of these kinds, by their first cells.
pub(super) fn arrays(catalog: &Catalog, kinds: &[Kind]) -> BTreeMap<u32, Arc<Entry>> {
    let all = catalog.list("", usize::MAX);
    all.filter(|e| kinds.contains(&e.form.kind)).map(|e| (e.base, e.clone())).collect()
}

/// The array that has this cell.
pub(super) fn owner(arrays: &BTreeMap<u32, Arc<Entry>>, place: u32) -> Option<&Arc<Entry>> {
    let (_, entry) = arrays.range(..=place).next_back()?;
    (place - entry.base < entry.extent).then_some(entry)
}

impl<A: Actor> Engine<A> {
    /// The requests about peers.
    pub(super) fn peer_request(
        &self,
        session: &mut Session,
        tag: Tag,
        id: u64,
        payload: &[u8],
        out: &mut Out,
        gathered: &mut Gathered,
    ) -> Result<Result<(), Refused>, Violation> {
        let done = match tag {
            Tag::Members => return self.members(session, id, payload, out),
            Tag::WhoBroke => return self.who_broke(session, id, payload, out),
            Tag::Waits => return self.list_waits(session, id, payload, out),
            Tag::Holders => return self.list_holders(id, payload, out),
            Tag::Tallies => return self.list_tallies(session, id, payload, out),
            Tag::Join => self.join(session, payload)?,
            Tag::SetWill => self.set_will(session, payload)?,
            Tag::Party => self.party(session, payload)?,
            Tag::Keep => self.keep(session, payload, gathered)?,
            _ => self.hand_over(session, payload, gathered)?,
        };
        if done.is_ok() {
            wire::push(&mut out.reply, Tag::Words, id, &[]);
        }
        Ok(done)
    }

    fn join(&self, session: &Session, payload: &[u8]) -> Result<Result<(), Refused>, Violation> {
        let name = std::str::from_utf8(payload).map_err(|_| Violation::Field("name"))?;
        if session.access == Access::ReadOnly {
            return Ok(Err((Refusal::ReadOnly, 0)));
        }
        let joined = lock(&self.peers).join(session.seat, name);
        Ok(joined.map_err(|why| match why {
            NameRefused::Bad => (Refusal::BadPeer, 0),
            NameRefused::Taken(seat) => (Refusal::NameTaken(seat), 0),
        }))
    }

    fn set_will(
        &self,
        session: &Session,
        payload: &[u8],
    ) -> Result<Result<(), Refused>, Violation> {
        let mut will = Vec::new();
        if !payload.is_empty() {
            let records = wire::records::<OpRecord>(Tag::SetWill, payload, wire::MAX_WILL)?;
            let _catalog = self.catalogued();
            for (index, record) in records.enumerate() {
                let op = wire::op(record.op)?;
                let (a, b, offset) = (record.a, record.b, record.offset);
                let checked = check(session, op, record.array, Run::one(offset))
                    .and_then(|entry| check_operands(session, entry, op, a, b).map(|()| entry));
                let mine = matches!(op, Op::Acquire | Op::Release | Op::Down | Op::Arrive);
                match checked {
                    Ok(_) if op.is_read() || mine => {
                        return Ok(Err((Refusal::BadOperand, index as u32)));
                    }
                    Ok(entry) => {
                        let entry = entry.clone();
                        will.push(Bequest { op, entry, offset, a, b });
                    }
                    Err(refusal) => return Ok(Err((refusal, index as u32))),
                }
            }
        }
        lock(&self.peers).leave_will(session.seat, will);
        Ok(Ok(()))
    }

    fn barrier_of(
        &self,
        session: &Session,
        tag: Tag,
        payload: &[u8],
    ) -> Result<Result<(u32, u64), Refused>, Violation> {
        let (record, rest) = wire::take::<PartyRecord>(tag, payload)?;
        if !rest.is_empty() {
            return Err(Violation::Size(tag as u8, payload.len()));
        }
        let entry = match check(session, Op::Load, record.array, Run::one(record.offset)) {
            Ok(entry) => entry,
            Err(refusal) => return Ok(Err((refusal, 0))),
        };
        if entry.form.kind != Kind::Barrier {
            return Ok(Err((Refusal::WrongKind(entry.form.kind), 0)));
        }
        Ok(Ok((entry.base + record.offset, record.epoch)))
    }

    fn party(&self, session: &Session, payload: &[u8]) -> Result<Result<(), Refused>, Violation> {
        let _catalog = self.catalogued();
        let place = match self.barrier_of(session, Tag::Party, payload)? {
            Ok((place, _)) => place,
            Err(refused) => return Ok(Err(refused)),
        };
        if session.access == Access::ReadOnly {
            return Ok(Err((Refusal::ReadOnly, 0)));
        }
        if !lock(&self.peers).be_party(session.seat, place) {
            return Ok(Err((Refusal::TooMuchLeft, 0)));
        }
        Ok(Ok(()))
    }

    fn who_broke(
        &self,
        session: &Session,
        id: u64,
        payload: &[u8],
        out: &mut Out,
    ) -> Result<Result<(), Refused>, Violation> {
        let _catalog = self.catalogued();
        let (place, epoch) = match self.barrier_of(session, Tag::WhoBroke, payload)? {
            Ok(asked) => asked,
            Err(refused) => return Ok(Err(refused)),
        };
        let peers = lock(&self.peers);
        let breach = peers.breaches.get(&place).filter(|breach| breach.epoch == epoch);
        let how = breach.map_or(0, |breach| breach.how as u8);
        let by = breach.map_or("", |breach| breach.by.as_str());
        let record = BrokenRecord { how, ..BrokenRecord::default() };
        let parts = [bytemuck::bytes_of(&record), by.as_bytes()];
        wire::push(&mut out.reply, Tag::Broken, id, &parts);
        Ok(Ok(()))
    }

    /// The client hands over what it has, and is missed by nobody.
    fn hand_over(
        &self,
        session: &mut Session,
        payload: &[u8],
        gathered: &mut Gathered,
    ) -> Result<Result<(), Refused>, Violation> {
        if !payload.is_empty() {
            return Err(Violation::Size(Tag::Release as u8, payload.len()));
        }
        session.released = true;
        if session.may_hold {
            let mine = |_, held: Lock| held.seat == session.seat;
            self.free_locks(mine, false, &mut gathered.rung);
        }
        let parties = {
            let parking = lock(&self.parking);
            let mut peers = lock(&self.peers);
            let Some(member) = peers.at(session.seat) else {
                return Ok(Ok(()));
            };
            member.will.clear();
            let parties = std::mem::take(&mut member.parties);
            let sleeps = self.actor.sleeps_of(session.id);
            let waits_at =
                |place: &&u32| sleeps.contains(place) || parking.is_parked_on(session.id, **place);
            let arrived: HashSet<u32> = parties.iter().filter(waits_at).copied().collect();
            (parties, arrived)
        };
        self.leave_barriers(session.seat, &parties.0, &parties.1, Gone::Released, gathered);
        lock(&self.peers).hand_over(session.seat);
        Ok(Ok(()))
    }

    /// Ends this wait, if it is parked, should one of these peers be lost, or
    /// now, if one is lost already.
    pub(super) fn watch(
        &self,
        parking: &mut Parking,
        session: &Session,
        id: WaitId,
        names: &[&str],
    ) -> Option<Ended> {
        let peers = lock(&self.peers);
        let lost =
            names.iter().find_map(|name| Some((*name, peers.loss(name, session.last_heard)?)));
        if let Some((name, loss)) = lost {
            add(&self.events.told, 1);
            return parking.lost_before(&self.actor, id, name.into(), loss);
        }
        let mut named: Vec<Arc<str>> = names.iter().map(|&name| name.into()).collect();
        named.sort_unstable();
        named.dedup();
        // Still under the lock of the peers: none can be lost in between.
        parking.watch(id, named.into());
        None
    }

    /// Queues for a lock or a permit.
    pub(super) fn acquire(
        &self,
        session: &Session,
        wait: u64,
        payload: &[u8],
        out: &mut Out,
    ) -> Result<(), Violation> {
        let (record, rest) = wire::take::<AcquireRecord>(Tag::Acquire, payload)?;
        if !rest.is_empty() {
            return Err(Violation::Size(Tag::Acquire as u8, payload.len()));
        }
        let id = WaitId { session: session.id, wait };
        let _catalog = self.catalogued();
        let mut parking = lock(&self.parking);
        parking.set_time(session.last_heard);
        let claimed = if parking.knows(id) {
            // Asked again after a reconnect; see `wait`.
            Ok((0, Claim::Permit))
        } else {
            claim(session, &record)
        };
        let answer = claimed.and_then(|(place, claim)| {
            parking
                .acquire(&self.actor, id, session.route, place, claim)
                .map_err(|_| Refusal::TooManyWaits)
        });
        self.count(&parking);
        match answer {
            Ok(Some(ended)) => push_ended(&mut out.reply, wait, &ended),
            Ok(None) => {}
            Err(refusal) => {
                let record = refusal.record(0);
                let bytes = bytemuck::bytes_of(&record);
                wire::push(&mut out.reply, Tag::WaitRefused, wait, &[bytes]);
            }
        }
        Ok(())
    }

    /// Frees the locks of which this is so, by their cell. The cells to ring for
    /// go into `rung`.
    pub(super) fn free_locks(
        &self,
        of: impl Fn(u32, Lock) -> bool,
        abandoned: bool,
        rung: &mut Vec<u32>,
    ) -> usize {
        let catalog = self.catalogued();
        let mut freed = 0;
        for entry in catalog.list("", usize::MAX).filter(|e| e.form.kind == Kind::Lock) {
            for place in entry.base..entry.base + entry.extent {
                let mut word = self.actor.load(place);
                while Lock::of(word).seat != 0 && of(place, Lock::of(word)) {
                    let free = Lock::of(word).freed(abandoned).word() | word & WAITING;
                    match self.actor.compare_exchange(place, word, free) {
                        Ok(old) => {
                            freed += 1;
                            if is_waiting(old) {
                                rung.push(place);
                            }
                            break;
                        }
                        Err(found) => word = found,
                    }
                }
            }
        }
        if abandoned {
            add(&self.events.abandoned, freed as u64);
        }
        freed
    }

    /// A party leaves these barriers. Those that it breaks by that know its name.
    fn leave_barriers(
        &self,
        seat: u32,
        parties: &HashSet<u32>,
        arrived: &HashSet<u32>,
        how: Gone,
        gathered: &mut Gathered,
    ) {
        if parties.is_empty() {
            return;
        }
        let catalog = self.catalogued();
        let barriers = arrays(&catalog, &[Kind::Barrier]);
        let mut peers = lock(&self.peers);
        let by = peers.called(seat);
        for &place in parties {
            let Some(entry) = owner(&barriers, place) else {
                continue;
            };
            let mut word = self.actor.load(place);
            loop {
                let barrier = Barrier::of(word);
                // Who says goodbye while nobody waits, or waits itself, leaves
                // nobody alone.
                let missed = how == Gone::Silent
                    || barrier.index(entry.form.param) > 0 && !arrived.contains(&place);
                if barrier.broken || !missed {
                    break;
                }
                // Before the change: who is woken by it asks for the name.
                let breach = Breach { epoch: barrier.epoch, by: by.clone(), how };
                peers.breaches.insert(place, breach);
                let broken = Barrier { broken: true, ..barrier }.value() << 1;
                match self.actor.compare_exchange(place, word, broken) {
                    Ok(old) => {
                        add(&self.events.broken, 1);
                        if is_waiting(old) {
                            gathered.rung.push(place);
                        }
                        break;
                    }
                    Err(found) => word = found,
                }
            }
        }
    }

    /// A session has ended, and its client cannot reach the cells by itself any
    /// more: frees its locks, breaks its barriers, carries out its will, and
    /// ends the waits that name it, in this order. To be called once for each of
    /// [`Out::ended`].
    pub fn settle(&self, session: u64, now: Duration, out: &mut Out) {
        let mut gathered = Gathered::default();
        let (seat, how, may_hold, parties, arrived, will) = {
            let mut peers = lock(&self.peers);
            let Some(seat) = peers.seat_of(session) else {
                return;
            };
            let Some(member) = peers.at(seat) else {
                return;
            };
            let how = member.gone.unwrap_or(Gone::Closed);
            let parties = std::mem::take(&mut member.parties);
            let arrived = std::mem::take(&mut member.arrived);
            let will = std::mem::take(&mut member.will);
            (seat, how, member.may_hold, parties, arrived, will)
        };
        if may_hold {
            self.free_locks(|_, held| held.seat == seat, true, &mut gathered.rung);
        }
        self.leave_barriers(seat, &parties, &arrived, how, &mut gathered);
        if how != Gone::Released {
            let _catalog = self.catalogued();
            for Bequest { op, entry, offset, a, b } in will {
                if !entry.is_alive() {
                    continue;
                }
                let place = entry.base + offset;
                if execute(&self.actor, place, op, a, b).1 {
                    gathered.rung.push(place);
                }
            }
        }
        let mut parking = lock(&self.parking);
        for place in gathered.rung {
            parking.ring(&self.actor, place, &mut gathered.done);
        }
        let member = lock(&self.peers).leave(seat, now);
        if let Some(name) = member.and_then(|member| member.name)
            && how != Gone::Released
        {
            tracing::info!(session, peer = &*name, "a peer is lost");
            add(&self.events.lost, 1);
            let (loss, before) = (Loss { how, ago: Duration::ZERO }, gathered.done.len());
            parking.peer_lost(&self.actor, &name, loss, &mut gathered.done);
            let told = |done: &&Done| matches!(done.ended, Ended::PeerLost(..));
            add(&self.events.told, gathered.done[before..].iter().filter(told).count() as u64);
        }
        self.count(&parking);
        drop(parking);
        deliver(gathered.done, out);
    }

    /// Frees locks that are held by nobody who lives; how many.
    pub(super) fn free_orphans(&self, rung: &mut Vec<u32>) -> usize {
        // A seat is in the table before its session hears of it.
        self.free_locks(|_, held| !lock(&self.peers).sits(held.seat), true, rung)
    }

    /// To be called now and then: frees locks that are held by nobody who
    /// lives, and tears messages that are being written by nobody. Such a one can be left by a client that could change the cells by
    /// itself and went on after its end.
    pub fn tidy(&self, out: &mut Out) {
        let mut rung = Vec::new();
        let freed = self.free_orphans(&mut rung);
        if freed > 0 {
            tracing::warn!(freed, "freed locks of sessions that have ended before");
        }
        let mut done: Vec<Done> = Vec::new();
        if !rung.is_empty() {
            let mut parking = lock(&self.parking);
            for place in rung {
                parking.ring(&self.actor, place, &mut done);
            }
            self.count(&parking);
        }
        deliver(done, out);
        // Rows of one whose end is under way are torn by that.
        let is_nobodys = |seat| match lock(&self.peers).at(seat) {
            Some(member) => !self.claims_in_memory && member.gone.is_none(),
            None => true,
        };
        let torn = self.tear_rows(is_nobodys, self.claims_in_memory, out);
        if torn > 0 {
            tracing::warn!(torn, "tore messages that nobody was writing any more");
        }
    }

    /// By which way the operations of a session go from here on.
    pub fn set_way(&self, session: u64, way: Way) {
        let mut peers = lock(&self.peers);
        if let Some(seat) = peers.seat_of(session)
            && let Some(member) = peers.at(seat)
        {
            member.way = way;
            member.tally.set_way(way);
        }
    }

    fn members(
        &self,
        session: &Session,
        id: u64,
        payload: &[u8],
        out: &mut Out,
    ) -> Result<Result<(), Refused>, Violation> {
        let (after, head) =
            begin_list::<u32>([Tag::Members, Tag::MembersListed], id, payload, out)?;
        let now = session.last_heard;
        let catalog = self.catalogued();
        let every = [Kind::Event, Kind::Counter, Kind::Lock, Kind::Barrier, Kind::Semaphore];
        let arrays = arrays(&catalog, &every);
        let held = self.held(&arrays);
        let parking = lock(&self.parking);
        let peers = lock(&self.peers);
        for (seat, member) in peers.after(after).filter(|(_, member)| member.gone.is_none()) {
            let (waits, parked) = parking.waits_of(member.session, wire::MAX_HOLDS);
            let (locks, count) = held.get(&seat).map_or((&[][..], 0), |(l, n)| (l, *n));
            let parties = member.parties.iter().map(|&place| (2, place, 0));
            let waits = waits.into_iter().map(|(place, queues)| (3 + u8::from(queues), place, 0));
            let sleeps = self.actor.sleeps_of(member.session);
            let parked = parked + sleeps.len();
            let waits = waits.chain(sleeps.into_iter().map(|place| (3, place, 0)));
            let holds = locks.iter().map(|&(place, token)| (1, place, token));
            let holds: Vec<_> = holds
                .chain(parties)
                .chain(waits)
                .filter_map(|(what, place, token)| {
                    Some((what, owner(&arrays, place)?, place, token))
                })
                .take(wire::MAX_HOLDS)
                .collect();
            let name = member.name.as_deref().unwrap_or("");
            let record = MemberRecord {
                seat,
                way: member.way as u8,
                reads_only: member.reads_only.into(),
                name_len: name.len() as u8,
                reserved: 0,
                age_ms: millis(now.saturating_sub(member.began)),
                silent_ms: millis(now.saturating_sub(member.last_heard())),
                holds: holds.len() as u32,
                all: (count + member.parties.len() + parked) as u32,
            };
            out.reply.extend_from_slice(bytemuck::bytes_of(&record));
            out.reply.extend_from_slice(name.as_bytes());
            for (what, entry, place, token) in holds {
                let (offset, pitch) = (u64::from(place - entry.base), entry.form.shape.pitch());
                let record = HoldRecord {
                    what,
                    name_len: entry.name.len() as u8,
                    reserved: 0,
                    row: (offset / pitch) as u32,
                    col: (offset % pitch) as u32,
                    reserved_too: 0,
                    token,
                };
                out.reply.extend_from_slice(bytemuck::bytes_of(&record));
                out.reply.extend_from_slice(entry.name.as_bytes());
            }
            if out.reply.len() - head > wire::MEMBERS_BYTES {
                break;
            }
        }
        finish_words(&mut out.reply, head);
        Ok(Ok(()))
    }

    /// The locks that each seat holds: some of them, and how many.
    fn held(&self, arrays: &BTreeMap<u32, Arc<Entry>>) -> HashMap<u32, Held> {
        let mut held: HashMap<u32, Held> = HashMap::new();
        for entry in arrays.values().filter(|e| e.form.kind == Kind::Lock) {
            for place in entry.base..entry.base + entry.extent {
                let lock = Lock::of(self.actor.load(place));
                if lock.seat != 0 {
                    let (list, count) = held.entry(lock.seat).or_default();
                    *count += 1;
                    if list.len() < wire::MAX_HOLDS {
                        list.push((place, lock.token));
                    }
                }
            }
        }
        held
    }
}

/// The cell and the claim that a record means.
fn claim(session: &Session, record: &AcquireRecord) -> Result<(u32, Claim), Refusal> {
    let entry = session.binding(record.array).ok_or(Refusal::NoArray)?;
    let (op, claim) = match entry.form.kind {
        Kind::Lock => (Op::Acquire, Claim::Lock { seat: session.seat }),
        Kind::Semaphore => (Op::Down, Claim::Permit),
        kind => return Err(Refusal::WrongKind(kind)),
    };
    check(session, op, record.array, Run::one(record.offset))?;
    if record.seat != session.seat || session.seat == 0 {
        return Err(Refusal::StaleSeat);
    }
    Ok((entry.base + record.offset, claim))
}
