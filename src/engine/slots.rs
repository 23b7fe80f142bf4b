//! Messages: who may change which row, and what a reader is told.
//!
//! The bytes themselves never come here: the driver moves them between its
//! connections and the [`Payload`], for as long as the claim stands that it
//! got here. Locks: session, catalog, then those of the payload's claims, and
//! none behind these.

use super::actor::Actor;
use super::session::Session;
use super::{Brought, Engine, Out};
use crate::auth::Access;
use crate::catalog::Entry;
use crate::cell::is_waiting;
use crate::segment::{Claim, Payload};
use crate::slot::Version;
use crate::wire::slots::{KEEP, REMOTE, SlotRefusal, SlotReply, SlotRequest};
use crate::wire::{Refusal, Violation};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Memory for messages: how much there may be, and how much is taken.
#[derive(Debug)]
pub(super) struct Budget {
    pub limit: u64,
    pub used: Arc<AtomicU64>,
    /// Where it comes from, if it is to outlive the engine.
    pub shelf: Option<Box<dyn super::Shelf>>,
    /// The serial number of the last claim.
    claims: AtomicU64,
}

impl Budget {
    pub fn new(limit: u64) -> Budget {
        Budget { limit, used: Arc::default(), shelf: None, claims: AtomicU64::new(0) }
    }
}

/// A row of an array of slots.
#[derive(Clone, Debug)]
pub struct SlotRow {
    entry: Arc<Entry>,
    /// The memory of its array.
    pub payload: Arc<Payload>,
    /// Which it is.
    pub row: u32,
    /// Its version word.
    place: u32,
}

/// A write that is under way.
#[derive(Debug)]
pub struct Writing {
    /// Where.
    pub row: SlotRow,
    /// The client's number of it.
    pub write: u64,
    /// The number of the claim.
    pub serial: u64,
}

/// How a write has begun.
#[derive(Debug)]
pub enum Begun {
    /// The row is claimed: its bytes may be changed.
    Claimed(Writing),
    /// It was committed before: the version word that it made.
    Before(u64),
}

impl<A: Actor> Engine<A> {
    /// Bytes that messages take up, and the most that they may.
    #[cfg(feature = "metrics")]
    pub(super) fn payload(&self) -> [u64; 2] {
        // Relaxed: a number for people.
        [self.budget.used.load(Ordering::Relaxed), self.budget.limit]
    }

    fn slot_row(&self, session: &Session, array: u16, row: u32) -> Result<SlotRow, Refusal> {
        let entry = session.binding(array).ok_or(Refusal::NoArray)?;
        let Some(payload) = entry.payload.get() else {
            return Err(Refusal::WrongKind(entry.form.kind));
        };
        let offset = entry.form.shape.offset(row, 0).ok_or(Refusal::OutOfRange)?;
        let (entry, payload) = (entry.clone(), payload.clone());
        Ok(SlotRow { place: entry.base + offset, entry, payload, row })
    }

    /// Swaps the version, whether someone waits for it or not. `Ok`: whether
    /// someone did; otherwise the word that is there instead.
    fn swap_version(&self, place: u32, from: Version, to: Version) -> Result<bool, u64> {
        let mut word = self.actor.load(place);
        while Version::of(word) == from {
            match self.actor.compare_exchange(place, word, to.word()) {
                Ok(old) => {
                    // Release: that a row is claimed is seen before what is put there
                    // and before its new place, as in `seqlock::claim`.
                    fence(Ordering::Release);
                    return Ok(is_waiting(old));
                }
                Err(found) => word = found,
            }
        }
        Err(word)
    }

    fn tell(&self, place: u32, waited: bool, out: &mut Out) {
        if waited {
            self.ring(place, out);
        }
    }

    /// Begins a write: claims the row for it.
    ///
    /// # Errors
    /// The client keeps the ends of too many writes unacknowledged.
    pub fn slot_begin(
        &self,
        session: &mut Session,
        request: &SlotRequest,
        out: &mut Out,
    ) -> Result<Result<Begun, Refusal>, Violation> {
        if session.access == Access::ReadOnly {
            return Ok(Err(Refusal::ReadOnly));
        }
        if let Some(word) = session.written(request.write, request.oldest)? {
            return Ok(Ok(Begun::Before(word)));
        }
        let catalog = self.catalogued();
        let row = match self.slot_row(session, request.array, request.row) {
            Ok(row) => row,
            Err(refusal) => return Ok(Err(refusal)),
        };
        // Relaxed: a number that differs from all others.
        let serial = self.budget.claims.fetch_add(1, Ordering::Relaxed) + 1;
        let (write, remote) = (request.write, request.flags & REMOTE != 0);
        let mut claims = row.payload.claims(row.row);
        let busy = |word| Ok(Err(Refusal::Slot(SlotRefusal::Busy(word))));
        if let Some(claim) = claims.get_mut(&row.row) {
            if (claim.session, claim.write) != (session.id, write) {
                return busy(claim.claimed.word());
            }
            // Its connection was lost; what still comes by it counts no more.
            claim.serial = serial;
            claim.touched |= remote;
            claim.remote |= remote;
            drop(claims);
            return Ok(Ok(Begun::Claimed(Writing { row, write, serial })));
        }
        let mut before = Version::of(self.actor.load(row.place));
        let (claimed, waited) = loop {
            if before.is_writing() {
                return busy(before.word());
            }
            let claimed = before.claimed(session.seat);
            match self.swap_version(row.place, before, claimed) {
                Ok(waited) => break (claimed, waited),
                Err(found) => before = Version::of(found),
            }
        };
        let session = session.id;
        let claim = Claim { session, write, serial, before, claimed, touched: remote, remote };
        claims.insert(row.row, claim);
        drop(claims);
        drop(catalog);
        self.tell(row.place, waited, out);
        Ok(Ok(Begun::Claimed(Writing { row, write, serial })))
    }

    /// Makes the row's message whole, `total` bytes long, of which this write
    /// has brought those. A row that was torn before becomes whole by nothing
    /// less than all of them: in between are bytes of who knows which message.
    pub fn slot_commit(
        &self,
        session: &mut Session,
        writing: &Writing,
        total: u64,
        brought: &Brought,
        out: &mut Out,
    ) -> Result<SlotReply, Refusal> {
        let Writing { row, write, serial } = writing;
        let catalog = self.catalogued();
        if !row.entry.is_alive() {
            return Err(Refusal::NoArray);
        }
        let lost = |word| Refusal::Slot(SlotRefusal::NotClaimed(word));
        let mut claims = row.payload.claims(row.row);
        let Some(claim) = claims.get(&row.row).filter(|claim| claim.serial == *serial).copied()
        else {
            return Err(lost(self.actor.load(row.place)));
        };
        let length = row.payload.length(row.row);
        let most = row.payload.bytes();
        let total = match total {
            // Relaxed, here and below: ordered by the version word.
            KEEP => length.load(Ordering::Relaxed).min(most).max(brought.reached()),
            total if total > most => return Err(Refusal::Slot(SlotRefusal::TooLong(most))),
            total => total,
        };
        if claim.before.is_torn() && !brought.is_all(total) {
            return Err(Refusal::Slot(SlotRefusal::Torn(claim.before.word())));
        }
        length.store(total, Ordering::Relaxed);
        // The system has put the bytes into the row; whoever takes the next
        // version takes all of them. The swap itself releases.
        fence(Ordering::SeqCst);
        let next = claim.claimed.next();
        claims.remove(&row.row);
        let swapped = self.swap_version(row.place, claim.claimed, next);
        drop(claims);
        drop(catalog);
        let waited = swapped.map_err(lost)?;
        session.has_written(*write, next.word());
        self.tell(row.place, waited, out);
        Ok(SlotReply { word: next.word(), total, ..SlotReply::default() })
    }

    /// The connection of a write is lost, and its client may not know yet: gives
    /// it up, unless bytes may still come by RDMA. Then the row is claimed until
    /// the client begins again, or its session ends and RDMA with it.
    pub fn slot_lost(&self, writing: &Writing, out: &mut Out) {
        let remote = {
            let row = &writing.row;
            let claims = row.payload.claims(row.row);
            claims.get(&row.row).is_some_and(|c| c.serial == writing.serial && c.remote)
        };
        if !remote {
            self.slot_abandon(writing, out);
        }
    }

    /// Gives a write up. The row is as it was before if no byte of it was
    /// touched, and torn otherwise. Nothing happens if the claim has gone.
    pub fn slot_abandon(&self, writing: &Writing, out: &mut Out) {
        let Writing { row, serial, .. } = writing;
        let catalog = self.catalogued();
        if !row.entry.is_alive() {
            return;
        }
        let mut claims = row.payload.claims(row.row);
        let Some(claim) = claims.get(&row.row).filter(|claim| claim.serial == *serial).copied()
        else {
            return;
        };
        claims.remove(&row.row);
        let to = if claim.touched { claim.claimed.left() } else { claim.before };
        let waited = self.swap_version(row.place, claim.claimed, to).unwrap_or(false);
        drop(claims);
        drop(catalog);
        self.tell(row.place, waited, out);
    }

    /// What a reader gets of a row: its state, and how many bytes follow.
    pub fn slot_read(
        &self,
        session: &Session,
        request: &SlotRequest,
    ) -> Result<(SlotRow, SlotReply), Refusal> {
        let _catalog = self.catalogued();
        let row = self.slot_row(session, request.array, request.row)?;
        // Acquire: the bytes are taken after the word.
        let word = self.actor.load(row.place);
        let version = Version::of(word);
        let mut reply = SlotReply { word, ..SlotReply::default() };
        if !version.is_writing() && !version.is_torn() && version.number() > 0 {
            // Relaxed: if it changes meanwhile, so does the version.
            reply.total = row.payload.length(row.row).load(Ordering::Relaxed);
            reply.total = reply.total.min(row.payload.bytes());
            reply.bytes = reply.total.saturating_sub(request.offset).min(request.bytes);
        }
        Ok((row, reply))
    }

    /// The version word behind the bytes that were taken: the same as before
    /// them if they are of one message. Of a removed array it is never the same.
    pub fn slot_check(&self, row: &SlotRow, before: u64) -> u64 {
        // The bytes were taken by the system. Acquire: they were taken before
        // the word is.
        fence(Ordering::SeqCst);
        let _catalog = self.catalogued();
        if row.entry.is_alive() { self.actor.load(row.place) } else { !before }
    }

    /// To be called when nothing that this session has sent can change a row
    /// any more: the rows that it was writing are torn.
    pub fn end_writes(&self, session: u64, out: &mut Out) {
        // Relaxed: who has written to an array has seen it made.
        if self.budget.used.load(Ordering::Relaxed) == 0 {
            return;
        }
        // Still there, since the session is not settled.
        let (seat, moves) = {
            let mut peers = super::lock(&self.peers);
            let seat = peers.seat_of(session).unwrap_or(0);
            let member = peers.at(seat);
            (seat, member.is_some_and(|m| m.connected && m.way == super::Way::Shm))
        };
        let mut waited = Vec::new();
        let catalog = self.catalogued();
        for entry in catalog.slots() {
            let Some(payload) = entry.payload.get() else { continue };
            for (row, claim) in payload.take_claims(session) {
                let place = entry.base + entry.form.shape.offset(row, 0).unwrap_or(0);
                let to = if claim.touched { claim.claimed.left() } else { claim.before };
                if claim.remote && moves {
                    self.relocate(entry, payload, row);
                }
                // The claim was taken away, so nobody else changes the word,
                // and a writer that comes now finds the row busy until it is
                // changed here.
                if self.swap_version(place, claim.claimed, to) == Ok(true) {
                    waited.push(place);
                }
            }
        }
        drop(catalog);
        for place in waited {
            self.ring(place, out);
        }
        if seat != 0 {
            self.tear_rows(|writer| writer == seat, moves, out);
        }
    }

    /// Moves a row away from one who may still write to it.
    fn relocate(&self, entry: &Entry, payload: &Payload, row: u32) {
        if !payload.relocate(row) {
            let array = &*entry.name;
            tracing::warn!(
                array,
                row,
                "no area is left to move a row to; its last writer may still change it, if it lives"
            );
        }
    }

    /// Tears the rows that are being written in memory, without a claim here, by
    /// seats that have gone; how many there are. Nothing that they still put
    /// there is made whole by them: their last swap fails. `moves`: they may
    /// still put something there, so the rows move.
    pub(super) fn tear_rows(
        &self,
        gone: impl Fn(u32) -> bool,
        moves: bool,
        out: &mut Out,
    ) -> usize {
        // Relaxed: as in `end_writes`.
        if self.budget.used.load(Ordering::Relaxed) == 0 {
            return 0;
        }
        let (mut torn, mut waited) = (0, Vec::new());
        let catalog = self.catalogued();
        for entry in catalog.slots() {
            let Some(payload) = entry.payload.get() else { continue };
            for row in 0..entry.form.shape.rows {
                let place = entry.base + entry.form.shape.offset(row, 0).unwrap_or(0);
                let found = Version::of(self.actor.load(place));
                if !found.is_writing() || !gone(found.seat()) {
                    continue;
                }
                // Held, so that nobody claims it here meanwhile.
                let claims = payload.claims(row);
                if claims.contains_key(&row) {
                    continue;
                }
                // First it is nobody's, so that the one who has gone cannot make
                // it whole while it moves.
                let nobodys = found.left().claimed(0);
                let Ok(told) = self.swap_version(place, found, nobodys) else { continue };
                if moves {
                    self.relocate(entry, payload, row);
                }
                let again = self.swap_version(place, nobodys, nobodys.left());
                torn += 1;
                waited.extend((told || again == Ok(true)).then_some(place));
            }
        }
        drop(catalog);
        for place in waited {
            self.ring(place, out);
        }
        torn
    }

    /// Puts the version of a row of a former life right, of which the message is
    /// there or not.
    pub(super) fn restore_row(&self, entry: &Entry, payload: &Payload, row: u32, is_there: bool) {
        let place = entry.base + entry.form.shape.offset(row, 0).unwrap_or(0);
        let is_good = |found: Version| match is_there {
            true => !found.is_writing() && found.is_possible(),
            false => found == Version::whole(0),
        };
        let mut found = Version::of(self.actor.load(place));
        let was_good = is_good(found);
        while !is_good(found) {
            // Who was writing it is of no account any more, and may be nobody.
            let torn = Version::whole(found.number()).left();
            match self.swap_version(place, found, torn) {
                Ok(_) => break,
                Err(word) => found = Version::of(word),
            }
        }
        if !was_good && !is_there {
            // How long it was is not known either: no part of it is all.
            // Relaxed: ordered by whatever publishes the payload.
            payload.length(row).store(payload.bytes(), Ordering::Relaxed);
        }
    }

    /// The memory of the messages that a session calls by this number.
    pub fn slot_payload(&self, session: &Session, array: u16) -> Option<Arc<Payload>> {
        session.binding(array)?.payload.get().cloned()
    }

    /// One more connection for messages of this session. `None`: it does not
    /// live, has another access, or has as many as it may.
    pub fn beside(&self, id: u64, access: Access) -> Option<super::SharedSession> {
        let session = super::lock(&self.sessions).get(&id).cloned()?;
        let mut locked = super::lock(&session);
        if locked.ended || locked.access != access || !locked.take_beside() {
            return None;
        }
        drop(locked);
        Some(session)
    }
}
