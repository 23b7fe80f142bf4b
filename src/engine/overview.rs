//! What a server has, who waits and who holds: lists and numbers for people.

use super::actor::Actor;
use super::counts::add;
use super::peers::{Fell, Way};
use super::request::{Refused, finish_words};
use super::session::Session;
use super::sync::{arrays, millis, owner};
use super::{Engine, Out, lock};
use crate::catalog::{Entry, Form, Kind};
use crate::cell::sync::{Barrier, Lock, permits};
use crate::cell::{Condition, value};
use crate::wire::{
    self, FellReason, FellRecord, HeldRecord, HoldersHead, InfoRecord, ListRecord, PartyAtRecord,
    Tag, TallyRecord, Violation, WaitedRecord, WaitingRecord, WaitsAfter,
};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Waits of one session that are looked at together.
const TOGETHER: usize = 1024;

/// Row and column of a cell of an array.
fn spot(entry: &Entry, place: u32) -> (u32, u32) {
    let (offset, pitch) = (u64::from(place - entry.base), entry.form.shape.pitch());
    ((offset / pitch) as u32, (offset % pitch) as u32)
}

/// Appends a wait.
fn push_waiting(
    out: &mut Vec<u8>,
    mut record: WaitingRecord,
    cells: impl Iterator<Item = (u32, Option<Condition>, bool)>,
    peers: &[Arc<str>],
    arrays: &BTreeMap<u32, Arc<Entry>>,
) {
    let head = out.len();
    out.extend_from_slice(bytemuck::bytes_of(&record));
    for (place, condition, fired) in cells {
        let Some(entry) = owner(arrays, place) else {
            continue;
        };
        let (row, col) = spot(entry, place);
        let waited = WaitedRecord {
            row,
            col,
            kind: entry.form.kind as u8,
            comparison: condition.map_or(0, |c| c.comparison as u8),
            name_len: entry.name.len() as u8,
            fired: fired.into(),
            reserved: 0,
            value: condition.map_or(0, |c| c.value),
        };
        record.cells += 1;
        out.extend_from_slice(bytemuck::bytes_of(&waited));
        out.extend_from_slice(entry.name.as_bytes());
    }
    record.all_peers = peers.len() as u32;
    // A name of a peer that nobody can have may be longer than any.
    for peer in peers.iter().filter(|peer| peer.len() <= 255).take(wire::WAITING_PEERS) {
        record.peers += 1;
        out.push(peer.len() as u8);
        out.extend_from_slice(peer.as_bytes());
    }
    out[head..head + size_of::<WaitingRecord>()].copy_from_slice(bytemuck::bytes_of(&record));
}

impl<A: Actor> Engine<A> {
    pub(super) fn list(
        &self,
        id: u64,
        payload: &[u8],
        out: &mut Out,
    ) -> Result<Result<(), Refused>, Violation> {
        let after = wire::name(Tag::List, payload)?;
        wire::push(&mut out.reply, Tag::Listed, id, &[]);
        let head = out.reply.len() - wire::HEADER;
        for entry in self.catalogued().list(after, 1024) {
            let Form { kind, shape, param } = entry.form;
            let record = ListRecord {
                kind: kind as u8,
                name_len: entry.name.len() as u8,
                reserved: 0,
                rows: shape.rows,
                cols: shape.cols,
                reserved_too: 0,
                param,
            };
            out.reply.extend_from_slice(bytemuck::bytes_of(&record));
            out.reply.extend_from_slice(entry.name.as_bytes());
        }
        finish_words(&mut out.reply, head);
        Ok(Ok(()))
    }

    pub(super) fn info(
        &self,
        id: u64,
        payload: &[u8],
        out: &mut Out,
    ) -> Result<Result<(), Refused>, Violation> {
        if !payload.is_empty() {
            return Err(Violation::Size(Tag::GetInfo as u8, payload.len()));
        }
        let sessions = self.sessions() as u32;
        let catalog = self.catalogued();
        let (free, largest) = catalog.free_cells();
        let record = InfoRecord {
            capacity: catalog.capacity().into(),
            free,
            largest,
            sessions,
            arrays: catalog.len() as u32,
            parked: (self.parked() + self.actor.sleepers(None)) as u32,
            reserved: 0,
        };
        wire::push(&mut out.reply, Tag::Info, id, &[bytemuck::bytes_of(&record)]);
        Ok(Ok(()))
    }

    /// Who waits, session by session in the order of their seats.
    pub(super) fn list_waits(
        &self,
        session: &Session,
        id: u64,
        payload: &[u8],
        out: &mut Out,
    ) -> Result<Result<(), Refused>, Violation> {
        let (after, head) =
            begin_list::<WaitsAfter>([Tag::Waits, Tag::WaitsListed], id, payload, out)?;
        let now = session.last_heard;
        let catalog = self.catalogued();
        let arrays = arrays(&catalog, &Kind::ALL);
        let parking = lock(&self.parking);
        let peers = lock(&self.peers);
        'members: for (seat, member) in peers.after(after.seat.saturating_sub(1)) {
            if member.gone.is_some() {
                continue;
            }
            let behind = (seat == after.seat).then_some(after.wait);
            if behind.is_none() {
                for place in self.actor.sleeps_of(member.session) {
                    let record = WaitingRecord {
                        seat,
                        what: 3,
                        need: 1,
                        all_cells: 1,
                        since_ms: wire::SINCE_UNKNOWN,
                        ..WaitingRecord::default()
                    };
                    let cell = std::iter::once((place, None, false));
                    push_waiting(&mut out.reply, record, cell, &[], &arrays);
                }
            }
            for waiting in parking.waits_behind(member.session, behind, TOGETHER) {
                if out.reply.len() - head > wire::MEMBERS_BYTES {
                    break 'members;
                }
                let record = WaitingRecord {
                    seat,
                    what: if waiting.queues() { 2 } else { 1 },
                    need: waiting.need as u32,
                    all_cells: waiting.len() as u32,
                    wait: waiting.wait,
                    since_ms: millis(now.saturating_sub(waiting.since)),
                    ..WaitingRecord::default()
                };
                let cells = waiting.cells(wire::WAITING_CELLS);
                push_waiting(&mut out.reply, record, cells, waiting.peers, &arrays);
            }
            // There may be more of this session.
            if out.reply.len() - head > wire::MEMBERS_BYTES {
                break;
            }
        }
        finish_words(&mut out.reply, head);
        Ok(Ok(()))
    }

    /// The locks, barriers and semaphores that anyone holds or wants.
    pub(super) fn list_holders(
        &self,
        id: u64,
        payload: &[u8],
        out: &mut Out,
    ) -> Result<Result<(), Refused>, Violation> {
        let (first, rest) = wire::take::<u32>(Tag::Holders, payload)?;
        if !rest.is_empty() {
            return Err(Violation::Size(Tag::Holders as u8, payload.len()));
        }
        wire::push(&mut out.reply, Tag::HoldersListed, id, &[&[0; size_of::<HoldersHead>()]]);
        let head = out.reply.len() - wire::HEADER - size_of::<HoldersHead>();
        let catalog = self.catalogued();
        let arrays = arrays(&catalog, &[Kind::Lock, Kind::Barrier, Kind::Semaphore]);
        let parking = lock(&self.parking);
        let peers = lock(&self.peers);
        let mut parties: HashMap<u32, Vec<(u32, u64)>> = HashMap::new();
        for (seat, member) in peers.after(0).filter(|(_, member)| member.gone.is_none()) {
            for &place in &member.parties {
                parties.entry(place).or_default().push((seat, member.session));
            }
        }
        let (mut next, mut looked) = (0, 0);
        'arrays: for entry in arrays.values().filter(|e| e.base + e.extent > first) {
            for place in entry.base.max(first)..entry.base + entry.extent {
                let long = out.reply.len() - head > wire::MEMBERS_BYTES;
                if looked == wire::LOOKED_AT || long {
                    next = place;
                    break 'arrays;
                }
                looked += 1;
                let here = parties.get(&place).map_or(&[][..], Vec::as_slice);
                let Some(mut record) = self.held_at(entry, place, here.len()) else {
                    continue;
                };
                record.queued = parking.queued_on(place) as u32;
                let idle = record.seat == 0 && record.broken == 0 && record.queued == 0;
                if idle && !matches!(entry.form.kind, Kind::Barrier) {
                    let used = entry.form.kind == Kind::Semaphore && record.value < record.most;
                    if !used {
                        continue;
                    }
                }
                out.reply.extend_from_slice(bytemuck::bytes_of(&record));
                out.reply.extend_from_slice(entry.name.as_bytes());
                for &(seat, session) in here.iter().take(wire::LISTED_PARTIES) {
                    let sleeps = || self.actor.sleeps_of(session).contains(&place);
                    let arrived = parking.is_parked_on(session, place) || sleeps();
                    let party = PartyAtRecord { seat, arrived: arrived.into() };
                    out.reply.extend_from_slice(bytemuck::bytes_of(&party));
                }
            }
        }
        let begin = head + wire::HEADER;
        let told = HoldersHead { next, reserved: 0 };
        out.reply[begin..begin + size_of::<HoldersHead>()]
            .copy_from_slice(bytemuck::bytes_of(&told));
        finish_words(&mut out.reply, head);
        Ok(Ok(()))
    }

    /// What the cell of a lock, a barrier or a semaphore says, if that is worth a
    /// word; `parties` sessions are known to be parties.
    fn held_at(&self, entry: &Entry, place: u32, parties: usize) -> Option<HeldRecord> {
        let word = self.actor.load(place);
        let (row, col) = spot(entry, place);
        let shape = entry.form.shape;
        // The cells between the rows are nobody's.
        if row >= shape.rows || col >= shape.cols {
            return None;
        }
        let record = HeldRecord {
            kind: entry.form.kind as u8,
            name_len: entry.name.len() as u8,
            row,
            col,
            ..HeldRecord::default()
        };
        match entry.form.kind {
            Kind::Lock => {
                let Lock { token, abandoned, seat, .. } = Lock::of(word);
                Some(HeldRecord { seat, value: token, broken: abandoned.into(), ..record })
            }
            Kind::Barrier => {
                let barrier = Barrier::of(word);
                let arrived = barrier.index(entry.form.param) as u32;
                (arrived > 0 || barrier.broken || parties > 0).then(|| HeldRecord {
                    value: barrier.epoch,
                    most: entry.form.param,
                    broken: barrier.broken.into(),
                    arrived,
                    parties: parties.min(wire::LISTED_PARTIES) as u32,
                    all_parties: parties as u32,
                    ..record
                })
            }
            _ => {
                let most = permits(entry.form.param).1;
                Some(HeldRecord { value: value(word).max(0) as u64, most, ..record })
            }
        }
    }

    /// How busy every session is, in the order of their seats.
    pub(super) fn list_tallies(
        &self,
        session: &Session,
        id: u64,
        payload: &[u8],
        out: &mut Out,
    ) -> Result<Result<(), Refused>, Violation> {
        let (after, head) =
            begin_list::<u32>([Tag::Tallies, Tag::TalliesListed], id, payload, out)?;
        let now = session.last_heard;
        let peers = lock(&self.peers);
        for (seat, member) in peers.after(after).filter(|(_, member)| member.gone.is_none()) {
            // Relaxed: numbers for people.
            let read = |number: &AtomicU64| number.load(Ordering::Relaxed);
            let tally = &member.tally;
            let last = read(&tally.last);
            let idle = millis(now.saturating_sub(Duration::from_nanos(last)));
            let record = TallyRecord {
                seat,
                fallbacks: member.fell.len() as u32,
                operations: read(&tally.operations),
                requests: read(&tally.requests),
                waits: read(&tally.waits),
                rings: read(&tally.rings),
                idle_ms: if last == 0 { wire::SINCE_UNKNOWN } else { idle },
            };
            out.reply.extend_from_slice(bytemuck::bytes_of(&record));
            for Fell { wanted, reason, text } in &member.fell {
                let (wanted, reason) = (*wanted as u8, *reason as u8);
                let record = FellRecord { wanted, reason, text: text.len() as u16, reserved: 0 };
                out.reply.extend_from_slice(bytemuck::bytes_of(&record));
                out.reply.extend_from_slice(text.as_bytes());
            }
            if out.reply.len() - head > wire::MEMBERS_BYTES {
                break;
            }
        }
        finish_words(&mut out.reply, head);
        Ok(Ok(()))
    }

    /// A client says that it does not have a transport, and why.
    pub(super) fn fell(&self, session: &Session, payload: &[u8]) -> Result<(), Violation> {
        let (record, text) = wire::take::<FellRecord>(Tag::Fell, payload)?;
        if text.len() > wire::MAX_FELL_TEXT {
            return Err(Violation::Size(Tag::Fell as u8, payload.len()));
        }
        let way = Way::from_code(record.wanted).filter(|way| *way != Way::Tcp);
        let wanted = way.ok_or(Violation::Field("wanted"))?;
        let (reason, text) = (FellReason::from_code(record.reason), wire::plain_text(text));
        add(&self.events.fell[wanted as usize][reason as usize], 1);
        let (id, why) = (session.id, &*text);
        tracing::debug!(session = id, ?wanted, reason = reason.name(), why, "a way is not had");
        if let Some(member) = lock(&self.peers).at(session.seat) {
            // One for each.
            member.fell.retain(|fell| fell.wanted != wanted);
            member.fell.push(Fell { wanted, reason, text });
        }
        Ok(())
    }
}

/// Begins the answer to a request for a list, whose payload is where it is to begin and
/// no more: that, and where in the reply the header is.
pub(super) fn begin_list<T: bytemuck::Pod>(
    [asked, listed]: [Tag; 2],
    id: u64,
    payload: &[u8],
    out: &mut Out,
) -> Result<(T, usize), Violation> {
    let (after, rest) = wire::take::<T>(asked, payload)?;
    if !rest.is_empty() {
        return Err(Violation::Size(asked as u8, payload.len()));
    }
    wire::push(&mut out.reply, listed, id, &[]);
    Ok((after, out.reply.len() - wire::HEADER))
}
