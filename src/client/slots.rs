//! Slots: messages of any size, one writer and many readers a row.

mod later;

use super::Client;
use super::array::Array;
use super::options::WaitOptions;
use super::registered::Registered;
use crate::catalog::Kind;
use crate::cell::{Comparison, Op};
use crate::error::{Error, Result};
use crate::layout::Run;
use crate::slot::MAX_BYTES;
use crate::slot::Version;
use crate::transport::Failure;
use crate::transport::rdma::{SlotFrom, SlotInto, SlotWay, slot_put};
use crate::transport::shm::{Message, Messages, Put, Shm, Which};
use crate::transport::tcp::{Canceller, Claimed, Look, SlotAt};
use crate::wire::slots::SlotRefusal;
use crate::wire::{Refusal, WaitRecord};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long a reader tries to find a moment in which nobody writes.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// It tries this often at least.
pub(super) const TRIES: u32 = 4;

/// A named array of slots, one a row. A handle: cheap to clone, and indexing
/// it is arithmetic.
#[derive(Clone, Debug)]
pub struct SlotArray {
    array: Arc<Array>,
    way: Arc<Way>,
}

/// The ways of an array's messages: found out when first needed.
#[derive(Debug, Default)]
struct Way {
    rdma: OnceLock<Option<SlotWay>>,
    memory: Messages,
}

impl SlotArray {
    pub(super) fn new(array: Arc<Array>) -> SlotArray {
        SlotArray { array, way: Arc::default() }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.array.name
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.array.rows()
    }

    /// Most bytes of a message.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.array.form.param
    }

    /// One slot. No I/O.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn at(&self, row: usize) -> Result<Slot> {
        let offset = self.array.offset(row, 0)?;
        Ok(Slot { array: self.array.clone(), way: self.way.clone(), offset, row })
    }

    /// The versions of all rows. Each is read atomically, all of them not at
    /// one instant.
    ///
    /// # Errors
    /// As [`Slot::version`].
    pub fn versions(&self) -> Result<Vec<u64>> {
        let shape = self.array.form.shape;
        let run = Run { offset: 0, count: shape.rows, stride: shape.pitch() as u32 };
        let words = self.array.execute_runs(Op::Load, &[run])?;
        Ok(words.into_iter().map(|word| Version::of(word).number()).collect())
    }
}

impl Client {
    /// Opens an array of slots, or creates it with none of them written: `rows`
    /// messages of up to `bytes` bytes each.
    ///
    /// # Errors
    /// As [`events`](Self::events); [`Error::SlotsFull`]; [`Error::BadSetting`]
    /// for no bytes, or more than 16 GiB.
    pub fn slots(&self, name: &str, rows: usize, bytes: u64) -> Result<SlotArray> {
        if !(1..=MAX_BYTES).contains(&bytes) {
            let what =
                format!("slots {name:?} of {bytes} bytes: from 1 to {MAX_BYTES} are possible");
            return Err(Error::BadSetting { what });
        }
        self.open_or_create(name, Kind::Slots, rows, 1, bytes).map(SlotArray::new)
    }

    /// Opens an array of slots of whatever size it has.
    ///
    /// # Errors
    /// As [`open_events`](Self::open_events).
    pub fn open_slots(&self, name: &str) -> Result<SlotArray> {
        self.open_existing(name, Kind::Slots).map(SlotArray::new)
    }

    /// Memory for messages, registered with the adapter if operations go by
    /// RDMA. Pins it, which takes time and counts against the memlock limit: do
    /// it once and use it for many messages.
    #[must_use]
    pub fn register(&self, bytes: usize) -> Registered {
        Registered::new(self.core.shared_rdma(), bytes)
    }
}

/// What was read of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Which message it is: how many were written to the row. 0: none yet.
    pub version: u64,
    /// How many bytes were put into the buffer, from its start.
    pub len: usize,
    /// How long the whole message is.
    pub total: u64,
}

/// One message that is replaced as a whole: one writer, many readers.
///
/// A reader never gets a mix of two messages: it takes the version before and
/// after the bytes, and tries again when they differ. Nobody but a second
/// writer is kept from anything by it, so a writer that never rests can keep
/// readers of long messages from ever finding a whole one: let them take turns,
/// by an event or by [`read_newer`](Slot::read_newer).
///
/// What a writer does after [`write`](Slot::write) has returned, such as to set
/// an event, is never seen before the message: its version is released behind
/// the bytes, and a reader acquires it before it takes them.
#[derive(Clone, Debug)]
pub struct Slot {
    array: Arc<Array>,
    way: Arc<Way>,
    offset: u32,
    row: usize,
}

impl Slot {
    /// Its row.
    #[must_use]
    pub fn row(&self) -> usize {
        self.row
    }

    /// Most bytes of a message.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.array.form.param
    }

    fn at(&self) -> SlotAt {
        // Rows of an array that exists fit.
        SlotAt { array: self.array.number, row: self.row as u32 }
    }

    /// The way by RDMA, if there is one.
    fn way(&self) -> Option<&SlotWay> {
        let rdma = self.array.client.core.shared_rdma()?;
        let find = || {
            let found = rdma.slot_way(self.array.number, self.bytes());
            let name = &self.array.name;
            found.inspect_err(|why| tracing::info!(name, why, "messages go over TCP")).ok()
        };
        self.way.rdma.get_or_init(find).as_ref()
    }

    /// Whether the message can be looked at where it is.
    pub(crate) fn is_in_memory(&self) -> Result<bool> {
        self.check()?;
        Ok(self.in_memory().is_some())
    }

    /// The message in memory, if it is there.
    pub(super) fn in_memory(&self) -> Option<(Arc<Shm>, Message)> {
        let shm = self.array.client.core.shm.as_ref()?;
        let which = Which {
            array: self.array.number,
            cell: self.offset,
            row: self.row as u32,
            rows: self.array.form.shape.rows,
            bytes: self.bytes(),
        };
        Some((shm.clone(), shm.message(&self.way.memory, which)?))
    }

    /// One look at the message, by the way that there is.
    pub(super) fn look(&self, offset: u64, mut into: SlotInto<'_>) -> Result<Look> {
        // Before the way, which a thread of a forked child's parent may have
        // been about to find.
        self.check()?;
        if let SlotInto::Buffer(buffer) = &mut into
            && let Some((shm, message)) = self.in_memory()
            && let Some(look) = shm.look(&message, offset, buffer)
        {
            return Ok(look);
        }
        if let Some(look) =
            self.way().and_then(|w| w.look(self.offset, self.row as u32, offset, &mut into))
        {
            return Ok(look);
        }
        let link = &self.array.client.core.link;
        let looked = match into {
            SlotInto::Buffer(buffer) => link.slot_look(self.at(), offset, buffer),
            SlotInto::Region(region, range) => {
                let mut buffer = vec![0; range.len()];
                link.slot_look(self.at(), offset, &mut buffer).and_then(|look| {
                    let copied = region.write(range.start, &buffer);
                    copied.map(|()| look).map_err(|e| broke(e).into())
                })
            }
        };
        looked.map_err(|f| self.explain(f, "read"))
    }

    /// Refuses in a forked child, before any lock.
    pub(super) fn check(&self) -> Result<()> {
        self.array.client.core.link.check()
    }

    pub(super) fn name(&self) -> String {
        self.array.name.clone()
    }

    fn explain(&self, failure: Failure, op: &'static str) -> Error {
        let (name, row) = (self.name(), self.row);
        match failure {
            Failure::Refused(Refusal::Slot(refusal), _) => match refusal {
                SlotRefusal::Busy(_) => Error::SlotBusy { name, row, op },
                SlotRefusal::NotClaimed(_) => Error::WriteLost { name, row },
                SlotRefusal::TooLong(most) => self.too_long(most),
                SlotRefusal::Torn(word) => {
                    Error::PartOfTorn { name, row, version: Version::of(word).number() }
                }
            },
            other => self.array.explain(other, op),
        }
    }

    fn too_long(&self, most: u64) -> Error {
        let what = format!(
            "the message would go past the row's end at {most} bytes; make an array with larger slots"
        );
        Error::SlotSize { name: self.name(), row: self.row, what }
    }

    /// Refuses what does not fit before anything is sent.
    fn fits(&self, offset: u64, len: usize) -> Result<()> {
        match offset.checked_add(len as u64).filter(|&end| end <= self.bytes()) {
            Some(_) => Ok(()),
            None => Err(self.too_long(self.bytes())),
        }
    }

    /// How many messages were written to it. Does not say whether one is being
    /// written now.
    ///
    /// # Errors
    /// As [`Event::is_set`](crate::Event::is_set).
    pub fn version(&self) -> Result<u64> {
        let word = self.array.execute(Op::Load, self.offset, 0, 0)?;
        Ok(Version::of(word).number())
    }

    /// Replaces the message and returns its version. Blocks until it is whole
    /// for every reader. Over a connection that is lost it is begun again, and
    /// happens once.
    ///
    /// # Errors
    /// [`Error::SlotBusy`]: another one is writing it; nothing was changed.
    /// [`Error::SlotSize`], [`Error::ReadOnly`], [`Error::ArrayRemoved`],
    /// [`Error::Unreachable`]. [`Error::WriteLost`]: its claim was taken away.
    pub fn write(&self, message: &[u8]) -> Result<u64> {
        self.put(0, &SlotFrom::Buffer(message), Some(message.len() as u64), "write")
    }

    /// Replaces a part of the message, which the rest stays as it is, as one
    /// message of a new version: as long as it was, or as this part makes it.
    /// What lies between the old end and this part may be anything.
    ///
    /// # Errors
    /// As [`write`](Self::write). [`Error::PartOfTorn`]: there is no whole
    /// message that it could be a part of.
    pub fn write_at(&self, offset: u64, part: &[u8]) -> Result<u64> {
        self.put(offset, &SlotFrom::Buffer(part), None, "write_at")
    }

    pub(super) fn put(
        &self,
        offset: u64,
        bytes: &SlotFrom<'_>,
        total: Option<u64>,
        op: &'static str,
    ) -> Result<u64> {
        self.check()?;
        let link = &self.array.client.core.link;
        self.fits(offset, bytes.len())?;
        let memory = match bytes {
            SlotFrom::Buffer(buffer) => self.in_memory().map(|(shm, m)| (shm, m, *buffer)),
            SlotFrom::Region(..) => None,
        };
        if let Some((shm, message, buffer)) = &memory
            && shm.claims(message)
        {
            let refused = |refusal| self.explain(Failure::Refused(Refusal::Slot(refusal), 0), op);
            match shm.put(message, offset, buffer, total) {
                Put::Done(version) => return Ok(version.number()),
                Put::Busy(word) => return Err(refused(SlotRefusal::Busy(word))),
                Put::Lost(word) => return Err(refused(SlotRefusal::NotClaimed(word))),
                Put::Torn(word) => return Err(refused(SlotRefusal::Torn(word))),
                Put::Not => {}
            }
        }
        let written = match (&memory, self.way(), bytes) {
            (Some((shm, message, buffer)), ..) if shm.may_fill(message) => {
                let fill = || shm.fill(message, offset, buffer);
                slot_put(link, fill, self.at(), offset, bytes, total)
            }
            (_, Some(way), _) => {
                let fill = || way.write(self.row as u32, offset, bytes);
                slot_put(link, fill, self.at(), offset, bytes, total)
            }
            (_, None, SlotFrom::Buffer(buffer)) => {
                link.slot_put(self.at(), offset, buffer, total).map_err(Some)
            }
            (_, None, SlotFrom::Region(region, range)) => {
                let mut copy = vec![0; range.len()];
                region.read(range.start, &mut copy).map_err(broke)?;
                link.slot_put(self.at(), offset, &copy, total).map_err(Some)
            }
        };
        written.map(Version::number).map_err(|failure| match failure {
            Some(failure) => self.explain(failure, op),
            None => Error::WriteLost { name: self.name(), row: self.row },
        })
    }

    /// Claims the row, to write its message in parts. Readers wait until it is
    /// committed or dropped.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn writer(&self) -> Result<SlotWrite> {
        let claimed = self.array.client.core.link.slot_begin(self.at());
        let claimed = claimed.map_err(|f| self.explain(f, "writer"))?;
        Ok(SlotWrite { slot: self.clone(), claimed, begun: false })
    }

    /// Reads the message into a buffer that is large enough for it. Of a slot
    /// that was never written it reads nothing, version 0. While someone writes
    /// it waits, two seconds at most.
    ///
    /// # Errors
    /// [`Error::SlotBusy`]: no whole message was found in that time.
    /// [`Error::Torn`]: the last writer has gone in the middle.
    /// [`Error::SlotSize`] when the buffer is too small, and then its content
    /// means nothing; [`Error::ArrayRemoved`], [`Error::Unreachable`].
    pub fn read(&self, buffer: &mut [u8]) -> Result<Received> {
        let room = buffer.len();
        let received = self.read_at(0, buffer)?;
        self.all_of(received, room)
    }

    /// Refuses a message that had more bytes than there was room for.
    pub(super) fn all_of(&self, received: Received, room: usize) -> Result<Received> {
        if received.total > room as u64 {
            let what = format!(
                "the message has {} bytes, the buffer {room}; give it {} to fit any",
                received.total,
                self.bytes()
            );
            return Err(Error::SlotSize { name: self.name(), row: self.row, what });
        }
        Ok(received)
    }

    /// Reads what there is of the message from `offset` on, as much as fits.
    /// Two parts are of one message if their versions are the same.
    ///
    /// # Errors
    /// As [`read`](Self::read), but for the size.
    pub fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<Received> {
        self.settle(|| self.look(offset, SlotInto::Buffer(buffer)))
    }

    /// Looks until there is a whole message.
    pub(super) fn settle(&self, mut look: impl FnMut() -> Result<Look>) -> Result<Received> {
        let begun = Instant::now();
        let mut tries = 0;
        loop {
            let version = match look()? {
                Look::Got { version, total, bytes } => {
                    return Ok(Received { version: version.number(), len: bytes, total });
                }
                Look::Unsettled(version) => version,
            };
            if !version.is_writing() {
                if version.is_torn() {
                    let version = version.number();
                    return Err(Error::Torn { name: self.name(), row: self.row, version });
                }
                if version.number() == 0 {
                    return Ok(Received { version: 0, len: 0, total: 0 });
                }
            }
            tries += 1;
            let left = PATIENCE.saturating_sub(begun.elapsed());
            if left.is_zero() && tries >= TRIES {
                return Err(self.busy("read"));
            }
            if version.is_writing() {
                let changed = self.wait_record(Comparison::Ne, version.value());
                self.wait(changed, &WaitOptions::of(Some(left), None))?;
            }
        }
    }

    /// Waits until there is a message with a higher version than that, and
    /// reads it as [`read`](Self::read) does. `None`: the time was over.
    /// Without a time it waits for ever. A torn message is not waited for: the
    /// next whole one is.
    ///
    /// # Errors
    /// As [`read`](Self::read), and those of a wait.
    pub fn read_newer(
        &self,
        than: u64,
        buffer: &mut [u8],
        timeout: Option<Duration>,
    ) -> Result<Option<Received>> {
        match self.wait_newer(than, timeout, None)? {
            true => self.read(buffer).map(Some),
            false => Ok(None),
        }
    }

    /// Waits until there is a message with a higher version than that. Not so:
    /// the time was over.
    ///
    /// # Errors
    /// As [`Event::wait_with`](crate::Event::wait_with).
    pub fn wait_newer(
        &self,
        than: u64,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<bool> {
        self.wait_newer_with_options(than, &WaitOptions::of(timeout, cancel))
    }

    /// As [`wait_newer`](Self::wait_newer), with options, which can name peers.
    ///
    /// # Errors
    /// As [`wait_newer`](Self::wait_newer), and [`Error::PeerLost`].
    pub fn wait_newer_with_options(&self, than: u64, options: &WaitOptions) -> Result<bool> {
        self.wait(self.newer_than(than), options)
    }

    fn wait(&self, record: WaitRecord, options: &WaitOptions) -> Result<bool> {
        let woken = self.array.wait(1, &[record], options, |_| (self.row, 0))?;
        Ok(woken.is_satisfied())
    }

    fn newer_than(&self, than: u64) -> WaitRecord {
        self.wait_record(Comparison::Ge, Version::whole(than).next().value())
    }

    fn wait_record(&self, comparison: Comparison, value: i64) -> WaitRecord {
        let run = Run::one(self.offset).into();
        let array = self.array.number;
        WaitRecord { array, comparison: comparison as u8, reserved: 0, run, value }
    }
}

/// A message that is being written in parts. Dropping it gives the write up:
/// then the row is as it was before if no part was written, and torn until the
/// next whole message otherwise.
#[derive(Debug)]
pub struct SlotWrite {
    slot: Slot,
    claimed: Claimed,
    /// A part was written, or may have been.
    begun: bool,
}

impl SlotWrite {
    fn explain(&self, failure: Option<Failure>) -> Error {
        lost(&self.slot, failure)
    }

    /// Writes a part, by the way that the client's operations go: in shared memory
    /// a copy, over RDMA WRITEs and a READ behind them. Parts may come in any order;
    /// where none is written, the bytes of the message before stay. The first part
    /// that does not go over TCP takes one round trip more.
    ///
    /// # Errors
    /// [`Error::SlotSize`]; [`Error::WriteLost`] when the connection or the
    /// session was lost: the row is torn then.
    pub fn write_at(&mut self, offset: u64, part: &[u8]) -> Result<()> {
        self.slot.check()?;
        self.slot.fits(offset, part.len())?;
        self.put(offset, part).map_err(|failure| self.explain(failure))
    }

    fn put(&mut self, offset: u64, part: &[u8]) -> std::result::Result<(), Option<Failure>> {
        let memory = self.slot.in_memory().filter(|(shm, message)| shm.may_fill(message));
        let way = if memory.is_none() { self.slot.way() } else { None };
        let begun = std::mem::replace(&mut self.begun, true);
        if !begun && (memory.is_some() || way.is_some()) {
            self.claimed.go_elsewhere()?;
        }
        let moved = self.claimed.is_elsewhere()
            && match (&memory, way) {
                (Some((shm, message)), _) => shm.fill(message, offset, part),
                (None, Some(way)) => {
                    way.write(self.slot.row as u32, offset, &SlotFrom::Buffer(part))
                }
                (None, None) => false,
            };
        match moved {
            true => self.claimed.arrived(offset, part.len() as u64),
            false => self.claimed.write(offset, part),
        }
    }

    /// Makes the message whole, `total` bytes long, and returns its version.
    ///
    /// # Errors
    /// As [`write_at`](Self::write_at). [`Error::PartOfTorn`]: the row was torn
    /// before, and the parts are not all of these bytes.
    pub fn commit(self, total: u64) -> Result<u64> {
        self.slot.fits(total, 0)?;
        let SlotWrite { slot, claimed, .. } = self;
        claimed.commit(Some(total)).map(Version::number).map_err(|failure| lost(&slot, failure))
    }
}

fn lost(slot: &Slot, failure: Option<Failure>) -> Error {
    match failure {
        Some(failure) => slot.explain(failure, "write"),
        None => Error::WriteLost { name: slot.name(), row: slot.row },
    }
}

/// An error of memory that is registered.
pub(super) fn broke(error: crate::verbs::Error) -> Error {
    Error::Rdma { what: error.to_string() }
}
