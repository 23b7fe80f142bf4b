//! What the engine does with each frame of a client.

use super::actor::{Actor, change_all, execute, replace_all};
use super::parking::{Target, TooMany, WaitId};
use super::peers::{Gone, nanos};
use super::session::{Arrival, Session};
use super::{Done, Engine, Out, deliver, lock, push_ended};
use crate::auth::Access;
use crate::catalog::{Catalog, CatalogError, Entry, Form, Kind};
use crate::cell::{Change, Condition, Op, TOMBSTONE, change, must_ring, pack, sync};
use crate::layout::{Run, Shape};
use crate::wire::{
    self, Header, OpRecord, OpenRecord, OpenedRecord, Refusal, RunRecord, RunsHead, Tag, Violation,
    WaitHead, WaitRecord,
};
use std::sync::{Arc, PoisonError, RwLockReadGuard};
use std::time::Duration;

/// What the driver must do after a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Go on with the next frame.
    Continue,
    /// What the next frame asks for takes long to make: have
    /// [`Engine::prepare`] called elsewhere, and go on with that frame behind it and
    /// with [`Session::prepared`] set.
    Prepare,
    /// The client has ended its session: close the connection.
    Close,
    /// The client asks for another way to the cells, or gives it up. The engine
    /// knows nothing about that: the frame is the driver's to answer.
    Way {
        /// [`Tag::RdmaOpen`], [`Tag::RdmaClose`] or [`Tag::ShmOpen`].
        tag: Tag,
        /// The frame's id.
        id: u64,
        /// Bytes of its payload, which are the last ones of those used.
        len: usize,
    },
}

/// Bytes of replies after which [`Engine::handle`] pauses: small requests can
/// have large replies, and they must not pile up faster than they are sent.
pub const ENOUGH: usize = 1 << 20;

pub(super) type Refused = (Refusal, u32);
pub(super) type Catalogued<'e> = RwLockReadGuard<'e, Catalog>;

/// What one call of [`Engine::handle`] gathers on the way.
#[derive(Default)]
pub(super) struct Gathered {
    /// Cells changed under their waiting bit.
    pub rung: Vec<u32>,
    /// Waits that have ended by other means.
    pub done: Vec<Done>,
    /// The client said goodbye.
    bye: bool,
    /// A frame that is the driver's to answer.
    way: Option<Next>,
}

impl<A: Actor> Engine<A> {
    /// Handles the whole frames at the front of `bytes`, in order, and says
    /// how many bytes those were. It stops early when the replies have grown
    /// past [`ENOUGH`]: send them, then call again with the rest. Replies and
    /// wake-ups are in `out` also when a later frame is in violation. Of a
    /// session that has ended no frame is handled.
    ///
    /// # Errors
    /// The client broke the protocol: the connection must end. What came
    /// before the bad frame was carried out and stays so.
    pub fn handle(
        &self,
        now: Duration,
        session: &mut Session,
        bytes: &[u8],
        out: &mut Out,
    ) -> (usize, Result<Next, Violation>) {
        if session.ended {
            return (0, Ok(Next::Close));
        }
        session.hear(now);
        let mut gathered = Gathered::default();
        let mut used = 0;
        let result = loop {
            let (header, payload) = match wire::split(&bytes[used..]) {
                Ok(Some(frame)) => frame,
                Ok(None) => break Ok(Next::Continue),
                Err(violation) => break Err(violation),
            };
            let opens = header.tag == Tag::Open as u8;
            if opens && session.prepared.is_none() && self.takes_long(session, header.id, payload) {
                break Ok(Next::Prepare);
            }
            used += wire::HEADER + payload.len();
            if let Err(violation) = self.frame(session, &header, payload, out, &mut gathered) {
                break Err(violation);
            }
            if opens {
                session.prepared = None;
            }
            if gathered.bye {
                break Ok(Next::Close);
            }
            if let Some(next) = gathered.way.take() {
                break Ok(next);
            }
            if out.reply.len() > ENOUGH {
                break Ok(Next::Continue);
            }
        };
        if !gathered.rung.is_empty() {
            // Once for each cell, however often it was added to.
            gathered.rung.sort_unstable();
            gathered.rung.dedup();
            let mut parking = lock(&self.parking);
            for place in gathered.rung {
                parking.ring(&self.actor, place, &mut gathered.done);
            }
            self.count(&parking);
        }
        deliver(gathered.done, out);
        if gathered.bye {
            let how = if session.released { Gone::Released } else { Gone::Closed };
            self.end(session, how, out);
        }
        (used, result)
    }

    /// A client that changed this cell by itself found its waiting bit, and
    /// rings.
    pub fn ring(&self, place: u32, out: &mut Out) {
        let mut done = Vec::new();
        let mut parking = lock(&self.parking);
        parking.ring(&self.actor, place, &mut done);
        self.count(&parking);
        drop(parking);
        deliver(done, out);
    }

    fn frame(
        &self,
        session: &mut Session,
        header: &Header,
        payload: &[u8],
        out: &mut Out,
        gathered: &mut Gathered,
    ) -> Result<(), Violation> {
        let tag = Tag::from_code(header.tag).ok_or(Violation::Tag(header.tag))?;
        match tag {
            Tag::Ops | Tag::Runs | Tag::Open | Tag::Remove | Tag::List | Tag::GetInfo => {
                self.request(session, tag, header, payload, out, gathered)
            }
            Tag::Members | Tag::Join | Tag::SetWill | Tag::Party | Tag::WhoBroke | Tag::Release => {
                self.request(session, tag, header, payload, out, gathered)
            }
            Tag::Keep | Tag::Waits | Tag::Holders | Tag::Tallies => {
                self.request(session, tag, header, payload, out, gathered)
            }
            Tag::Fell => self.fell(session, payload),
            Tag::Acquire => {
                session.tally.wait(&out.counts, nanos(session.last_heard));
                self.acquire(session, header.id, payload, out)
            }
            Tag::Forfeit => {
                let id = WaitId { session: session.id, wait: header.id };
                let mut parking = lock(&self.parking);
                parking.forfeit(&self.actor, id, &mut gathered.done);
                self.count(&parking);
                Ok(())
            }
            Tag::Wait => {
                session.tally.wait(&out.counts, nanos(session.last_heard));
                self.wait(session, header.id, payload, out)
            }
            Tag::Cancel => {
                let id = WaitId { session: session.id, wait: header.id };
                let mut parking = lock(&self.parking);
                let ended = parking.cancel(&self.actor, id);
                self.count(&parking);
                push_ended(&mut out.reply, header.id, &ended);
                Ok(())
            }
            Tag::WaitDone => {
                let id = WaitId { session: session.id, wait: header.id };
                lock(&self.parking).acknowledge(id);
                Ok(())
            }
            Tag::Heartbeat => {
                wire::push(&mut out.reply, Tag::Heartbeat, 0, &[]);
                Ok(())
            }
            Tag::RdmaOpen | Tag::RdmaClose | Tag::RdmaSlots | Tag::ShmOpen | Tag::ShmSlots => {
                gathered.way = Some(Next::Way { tag, id: header.id, len: payload.len() });
                Ok(())
            }
            Tag::Ring => {
                let (place, rest) = wire::take::<u32>(tag, payload)?;
                if !rest.is_empty() {
                    return Err(Violation::Size(tag as u8, payload.len()));
                }
                if u64::from(place) >= u64::from(self.capacity) {
                    return Err(Violation::Field("place"));
                }
                gathered.rung.push(place);
                session.tally.ring(&out.counts, nanos(session.last_heard));
                Ok(())
            }
            Tag::Bye => {
                gathered.bye = true;
                Ok(())
            }
            _ => Err(Violation::Tag(header.tag)),
        }
    }

    /// A request with a number: carried out once, whatever the connection does.
    fn request(
        &self,
        session: &mut Session,
        tag: Tag,
        header: &Header,
        payload: &[u8],
        out: &mut Out,
        gathered: &mut Gathered,
    ) -> Result<(), Violation> {
        // A frame of operations counts as reading only if all of them are;
        // for one that was seen before, the kept reply tells.
        let reads = match tag {
            Tag::List | Tag::GetInfo | Tag::Members | Tag::WhoBroke => true,
            Tag::Waits | Tag::Holders | Tag::Tallies => true,
            Tag::Runs => wire::op(wire::take::<RunsHead>(tag, payload)?.0.op)?.is_read(),
            Tag::Ops => {
                let records = wire::records::<OpRecord>(tag, payload, wire::MAX_OPS)?;
                records
                    .map(|r| wire::op(r.op))
                    .try_fold(true, |all, op| Ok(all && op?.is_read()))?
            }
            _ => false,
        };
        session.tally.request(&out.counts, nanos(session.last_heard));
        match session.arrive(header.id, header.span, reads)? {
            Arrival::New | Arrival::Again => {}
            Arrival::Word(word) => {
                wire::push(&mut out.reply, Tag::Words, header.id, &[&word.to_le_bytes()]);
                return Ok(());
            }
            Arrival::Frame(frame) => {
                out.reply.extend_from_slice(&frame);
                return Ok(());
            }
        }
        let start = out.reply.len();
        let result = match tag {
            Tag::Ops => self.ops(session, header.id, payload, out, gathered)?,
            Tag::Runs => self.runs(session, header.id, payload, out, gathered)?,
            Tag::Open => self.open_for(session, header.id, payload, out)?,
            Tag::Remove => self.remove(session, header.id, payload, out, gathered)?,
            Tag::List => self.list(header.id, payload, out)?,
            Tag::GetInfo => self.info(header.id, payload, out)?,
            _ => self.peer_request(session, tag, header.id, payload, out, gathered)?,
        };
        if let Err((refusal, index)) = result {
            let record = refusal.record(index);
            wire::push(&mut out.reply, Tag::Refused, header.id, &[bytemuck::bytes_of(&record)]);
        }
        if !reads && header.id != 0 {
            let frame = &out.reply[start..];
            match (frame.len() - wire::HEADER, frame[4] == Tag::Words as u8) {
                (8, true) => {
                    let word = bytemuck::pod_read_unaligned(&frame[wire::HEADER..]);
                    session.keep_word(header.id, word);
                }
                _ => session.keep_frame(header.id, frame)?,
            }
        }
        Ok(())
    }

    pub(super) fn catalogued(&self) -> Catalogued<'_> {
        self.catalog.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Single operations. All are checked before the first is carried out, so
    /// a refused frame changes nothing.
    fn ops(
        &self,
        session: &Session,
        id: u64,
        payload: &[u8],
        out: &mut Out,
        gathered: &mut Gathered,
    ) -> Result<Result<(), Refused>, Violation> {
        let records = wire::records::<OpRecord>(Tag::Ops, payload, wire::MAX_OPS)?;
        // Held to the end: an array cannot be removed, and its cells given to
        // another one, while we are at work on it.
        let _catalog = self.catalogued();
        for (index, record) in records.clone().enumerate() {
            let op = wire::op(record.op)?;
            if let Err(refusal) = check(session, op, record.array, Run::one(record.offset))
                .and_then(|entry| check_operands(session, entry, op, record.a, record.b))
            {
                return Ok(Err((refusal, index as u32)));
            }
        }
        let len = records.len() * 8;
        let header = Header::new(Tag::Words, id, len);
        out.reply.extend_from_slice(bytemuck::bytes_of(&header));
        let start = out.reply.len();
        out.reply.resize(start + len, 0);
        let words = out.reply[start..].chunks_exact_mut(8);
        let way = session.tally.way();
        session.tally.operations(words.len() as u64);
        // Most frames stay in one array.
        let mut last = None;
        for (record, word) in records.zip(words) {
            let op = wire::op(record.op)?;
            let (base, kind) = match last {
                Some((array, base, kind)) if array == record.array => (base, kind),
                _ => {
                    let Some(entry) = session.binding(record.array) else {
                        unreachable!("checked above, and the catalog is locked since")
                    };
                    last = Some((record.array, entry.base, entry.form.kind));
                    (entry.base, entry.form.kind)
                }
            };
            let place = base + record.offset;
            out.counts.operations(way, kind, op, 1);
            let before = self.one(op, place, record.a, record.b, gathered);
            word.copy_from_slice(&before.to_le_bytes());
        }
        Ok(Ok(()))
    }

    /// One operation on many cells of an array.
    fn runs(
        &self,
        session: &Session,
        id: u64,
        payload: &[u8],
        out: &mut Out,
        gathered: &mut Gathered,
    ) -> Result<Result<(), Refused>, Violation> {
        let (head, rest) = wire::take::<RunsHead>(Tag::Runs, payload)?;
        let runs = wire::records::<RunRecord>(Tag::Runs, rest, wire::MAX_RUNS)?;
        let op = wire::op(head.op)?;
        if !matches!(op, Op::Load | Op::Waiters | Op::Set | Op::Clear) {
            return Err(Violation::Field("op"));
        }
        let _catalog = self.catalogued();
        let mut cells = 0u64;
        for run in runs.clone() {
            cells += u64::from(run.count);
            if cells > wire::MAX_CELLS as u64 {
                return Err(Violation::Limit("cells of a request"));
            }
            if let Err(refusal) = check(session, op, head.array, run.into()) {
                return Ok(Err((refusal, 0)));
            }
        }
        let Some(entry) = session.binding(head.array) else {
            unreachable!("there is a run, and it was checked")
        };
        session.tally.operations(cells);
        out.counts.operations(session.tally.way(), entry.form.kind, op, cells);
        wire::push(&mut out.reply, Tag::Words, id, &[]);
        let at = out.reply.len() - wire::HEADER;
        let places = runs.flat_map(|run| Run::from(run).offsets().map(|at| entry.base + at));
        if op.is_read() {
            for place in places {
                let word = self.one(op, place, 0, 0, gathered);
                out.reply.extend_from_slice(&word.to_le_bytes());
            }
        } else {
            let first = out.reply.len();
            out.reply.resize(first + cells as usize * 8, 0);
            let numbered = places.enumerate().map(|(i, place)| ((i, place), place));
            change_all(&self.actor, numbered, |(i, place), word, done| {
                out.reply[first + i * 8..][..8].copy_from_slice(&word.to_le_bytes());
                if done && must_ring(op, word, 0) {
                    gathered.rung.push(place);
                }
                match change(op, word, 0, 0) {
                    Change::Swap(new) if !done => Some(new),
                    _ => None,
                }
            });
        }
        finish_words(&mut out.reply, at);
        Ok(Ok(()))
    }

    #[inline]
    fn one(&self, op: Op, place: u32, a: u64, b: u64, gathered: &mut Gathered) -> u64 {
        if op == Op::Waiters {
            return self.waiters(place);
        }
        let (word, ring) = execute(&self.actor, place, op, a, b);
        if ring {
            gathered.rung.push(place);
        }
        word
    }

    #[cold]
    fn waiters(&self, place: u32) -> u64 {
        (lock(&self.parking).waiters_on(place) + self.actor.sleepers(Some(place))) as u64
    }

    fn open_for(
        &self,
        session: &mut Session,
        id: u64,
        payload: &[u8],
        out: &mut Out,
    ) -> Result<Result<(), Refused>, Violation> {
        let (record, rest) = wire::take::<OpenRecord>(Tag::Open, payload)?;
        let name = wire::name(Tag::Open, rest)?;
        // First of all: nothing may be made under a number that cannot be, and
        // when this is refused the number means nothing any more.
        session.bind(record.array, None)?;
        let opened = match record.kind {
            0 => self.catalogued().get(name).map(|entry| (entry, false)),
            code => {
                let kind = Kind::from_code(code).ok_or(Violation::Field("kind"))?;
                let shape = Shape { rows: record.rows, cols: record.cols };
                let form = Form { kind, shape, param: record.param };
                let make = session.access == Access::ReadWrite && record.existing == 0;
                self.open_as(make, name, form)
            }
        };
        let (entry, created) = match opened {
            Ok((entry, created)) => (entry, created || session.prepared == Some(true)),
            Err(CatalogError::Missing) if record.kind != 0 && record.existing == 0 => {
                return Ok(Err((Refusal::ReadOnly, 0)));
            }
            Err(e) => return Ok(Err((Refusal::Catalog(e), 0))),
        };
        let (Form { kind, shape, param }, base) = (entry.form, entry.base);
        session.bind(record.array, Some(entry))?;
        let record = OpenedRecord {
            kind: kind as u8,
            created: created.into(),
            reserved: 0,
            rows: shape.rows,
            cols: shape.cols,
            base,
            param,
        };
        wire::push(&mut out.reply, Tag::Opened, id, &[bytemuck::bytes_of(&record)]);
        Ok(Ok(()))
    }

    /// Opens for a session, and makes the array if it may. If not, one that
    /// does not exist is `Missing`.
    fn open_as(
        &self,
        make: bool,
        name: &str,
        form: Form,
    ) -> Result<(Arc<Entry>, bool), CatalogError> {
        if make {
            return self.open(name, form);
        }
        let entry = self.catalogued().get(name)?;
        if entry.form != form {
            return Err(CatalogError::Mismatch(entry.form));
        }
        Ok((entry, false))
    }

    fn remove(
        &self,
        session: &Session,
        id: u64,
        payload: &[u8],
        out: &mut Out,
        gathered: &mut Gathered,
    ) -> Result<Result<(), Refused>, Violation> {
        let name = wire::name(Tag::Remove, payload)?;
        if session.access == Access::ReadOnly {
            return Ok(Err((Refusal::ReadOnly, 0)));
        }
        let mut catalog = self.catalog.write().unwrap_or_else(PoisonError::into_inner);
        let noted = catalog.get(name).and_then(|e| self.note_removed(&e, self.one_sided));
        let entry = match noted.and_then(|()| catalog.remove(name, self.one_sided)) {
            Ok(entry) => entry,
            Err(e) => return Ok(Err((Refusal::Catalog(e), 0))),
        };
        // Until the tombstones are in.
        let _held = entry.hold();
        // Still under the catalog's lock: the cells cannot be given to another
        // array before the last waiter has left them.
        let mut parking = lock(&self.parking);
        let cells = entry.base..entry.base + entry.extent;
        lock(&self.peers).remove_cells(&cells);
        parking.remove_cells(&self.actor, cells, &mut gathered.done);
        self.count(&parking);
        drop(parking);
        drop(catalog);
        if self.one_sided {
            self.bury(&entry);
        }
        wire::push(&mut out.reply, Tag::Words, id, &[]);
        Ok(Ok(()))
    }

    /// Tells those who reach the cells of a removed array without asking that
    /// it is gone. Nobody else changes the cells by now: who asks is refused,
    /// and they belong to no other array as long as the entry is held. So no
    /// lock is, although this may take a while.
    fn bury(&self, entry: &Entry) {
        let shape = entry.form.shape;
        let cells = (0..shape.rows).flat_map(|row| (0..shape.cols).map(move |col| (row, col)));
        let offsets = cells.filter_map(|(row, col)| shape.offset(row, col));
        replace_all(&self.actor, offsets.map(|offset| entry.base + offset), TOMBSTONE);
    }

    fn wait(
        &self,
        session: &Session,
        wait: u64,
        payload: &[u8],
        out: &mut Out,
    ) -> Result<(), Violation> {
        let (head, rest) = wire::take::<WaitHead>(Tag::Wait, payload)?;
        let (peers, rest) = wire::peers(Tag::Wait, head.peers, rest)?;
        let records = wire::records::<WaitRecord>(Tag::Wait, rest, wire::MAX_WAIT_CELLS)?;
        let id = WaitId { session: session.id, wait };
        let _catalog = self.catalogued();
        let mut parking = lock(&self.parking);
        parking.set_time(session.last_heard);
        let answer = if parking.knows(id) {
            // Asked again after a reconnect: the answer does not depend on
            // what the cells or the array look like by now.
            parking.wait(&self.actor, id, session.route, 1, &[])
        } else {
            let targets = match targets(session, records)? {
                Ok(targets) => targets,
                Err(refusal) => {
                    let record = refusal.record(0);
                    let bytes = bytemuck::bytes_of(&record);
                    wire::push(&mut out.reply, Tag::WaitRefused, wait, &[bytes]);
                    return Ok(());
                }
            };
            let need = head.need as usize;
            if need == 0 || need > targets.len() {
                return Err(Violation::Field("need"));
            }
            let answer = match parking.has_room(session.id, targets.len() + peers.len()) {
                // One that is satisfied already may need less.
                false if !peers.is_empty() => Err(TooMany),
                _ => parking.wait(&self.actor, id, session.route, need, &targets),
            };
            match answer {
                Ok(None) if !peers.is_empty() => Ok(self.watch(&mut parking, session, id, &peers)),
                other => other,
            }
        };
        self.count(&parking);
        match answer {
            Ok(Some(ended)) => push_ended(&mut out.reply, wait, &ended),
            Ok(None) => {}
            Err(_) => {
                let record = Refusal::TooManyWaits.record(0);
                let bytes = bytemuck::bytes_of(&record);
                wire::push(&mut out.reply, Tag::WaitRefused, wait, &[bytes]);
            }
        }
        Ok(())
    }
}

/// The cells of a wait, one by one.
fn targets(
    session: &Session,
    records: impl Iterator<Item = WaitRecord>,
) -> Result<Result<Vec<Target>, Refusal>, Violation> {
    let mut targets = Vec::new();
    for record in records {
        let run = Run::from(record.run);
        let condition: Option<Condition> = record.condition()?;
        if targets.len() + run.count as usize > wire::MAX_WAIT_CELLS {
            return Err(Violation::Limit("cells of a wait"));
        }
        let base = match check(session, Op::Load, record.array, run) {
            Ok(entry) if condition.is_none() && entry.form.kind != Kind::Event => {
                return Ok(Err(Refusal::WrongKind(entry.form.kind)));
            }
            Ok(entry) => entry.base,
            Err(refusal) => return Ok(Err(refusal)),
        };
        targets.extend(run.offsets().map(|offset| Target { place: base + offset, condition }));
    }
    Ok(Ok(targets))
}

/// Whether the session may do this to these cells of the array.
#[inline]
pub(super) fn check(
    session: &Session,
    op: Op,
    array: u16,
    run: Run,
) -> Result<&Arc<Entry>, Refusal> {
    let entry = session.binding(array).ok_or(Refusal::NoArray)?;
    if !op.is_read() && session.access == Access::ReadOnly {
        return Err(Refusal::ReadOnly);
    }
    fits(entry, op, run).map(|()| entry)
}

/// Whether the array is of a kind that has this operation, and has these cells.
#[inline]
pub(super) fn fits(entry: &Entry, op: Op, run: Run) -> Result<(), Refusal> {
    if !op.is_read() {
        let wants = match op {
            Op::Set | Op::Clear | Op::Take => Kind::Event,
            Op::Acquire | Op::Release => Kind::Lock,
            Op::Arrive | Op::Break | Op::Reset => Kind::Barrier,
            Op::Down | Op::Up => Kind::Semaphore,
            _ => Kind::Counter,
        };
        if entry.form.kind != wants {
            return Err(Refusal::WrongKind(entry.form.kind));
        }
    }
    if !run.fits(entry.extent) {
        return Err(Refusal::OutOfRange);
    }
    Ok(())
}

/// Whether these are operands of the operation on this array.
#[inline]
pub(super) fn check_operands(
    session: &Session,
    entry: &Entry,
    op: Op,
    a: u64,
    b: u64,
) -> Result<(), Refusal> {
    let seat = match op {
        Op::Acquire => a,
        Op::Release => b,
        // Of one who is a party of the barrier, if it says which session that is.
        Op::Arrive if a != 0 && a != session.id => return Err(Refusal::StaleSeat),
        _ => return operands_fit(entry.form.param, op, a, b),
    };
    if seat == u64::from(session.seat) { Ok(()) } else { Err(Refusal::StaleSeat) }
}

/// The same, of an operation that names no seat, on an array with this `param`.
#[inline]
pub(super) fn operands_fit(param: u64, op: Op, a: u64, b: u64) -> Result<(), Refusal> {
    let fits = |v: u64| pack(v as i64).is_some();
    let (fine, otherwise) = match op {
        Op::Arrive | Op::Break | Op::Reset => (b == param, Refusal::BadOperand),
        Op::Up => {
            let (_, bound) = sync::permits(param);
            (a >= 1 && b == bound, Refusal::BadOperand)
        }
        Op::CompareExchange => (fits(a) && fits(b), Refusal::TooLarge),
        _ => (op.is_read() || fits(a), Refusal::TooLarge),
    };
    if fine { Ok(()) } else { Err(otherwise) }
}

/// Enters the length of a frame whose payload was appended behind its header.
pub(super) fn finish_words(out: &mut [u8], head: usize) {
    let len = (out.len() - head - wire::HEADER) as u32;
    out[head..head + 4].copy_from_slice(&len.to_le_bytes());
}
