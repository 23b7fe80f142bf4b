//! Messages by RDMA: the bytes by READ and WRITE, in pieces of which some are
//! under way together, between the server's memory and memory of ours that is
//! registered: the caller's own, or a staging ring that is copied from and to.
//!
//! Who may write a row is the server's to say: claim and commit are requests,
//! so the server knows every writer and can take a row away from one that has
//! gone. Readers look at the version word themselves.

use super::lane::{Lane, Trouble};
use super::rails::Rails;
use super::{OPEN_TIMEOUT, Rdma};
use crate::cell::is_suspect;
use crate::slot::{HEAD, Version, pitch};
use crate::transport::Failure;
use crate::transport::tcp::{Claimed, Link, Look, SlotAt, SlotBegun};
use crate::verbs::{Access, Local, Region, Remote, Request, WorkId};
use crate::wire::slots::{RdmaSlotsAnswer, SlotsRecord};
use crate::wire::{self, Tag};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of one READ or WRITE.
const PIECE: usize = 1 << 20;
/// How many of them are under way together.
const RING: usize = 4;

/// Where the messages of an array of slots are.
#[derive(Debug)]
pub(crate) struct SlotWay {
    rdma: Arc<Rdma>,
    rails: Arc<Rails>,
    /// The first version word, in the segment.
    base: u32,
    payload: Remote,
    bytes: u64,
    /// Bytes of one piece, within what the adapter's port can do.
    piece: usize,
}

/// Memory on our side that a message goes into.
#[derive(Debug)]
pub(crate) enum Into<'a> {
    /// Anywhere: by way of the staging ring.
    Buffer(&'a mut [u8]),
    /// Registered, so that the adapter puts it there.
    Region(&'a Arc<Region>, Range<usize>),
}

/// Memory on our side that a message comes from.
#[derive(Clone, Debug)]
pub(crate) enum From<'a> {
    /// Anywhere: by way of the staging ring.
    Buffer(&'a [u8]),
    /// Registered, so that the adapter takes it from there.
    Region(&'a Arc<Region>, Range<usize>),
}

impl Into<'_> {
    fn len(&self) -> usize {
        match self {
            Into::Buffer(buffer) => buffer.len(),
            Into::Region(_, range) => range.len(),
        }
    }
}

impl From<'_> {
    /// How many bytes there are.
    pub(crate) fn len(&self) -> usize {
        match self {
            From::Buffer(buffer) => buffer.len(),
            From::Region(_, range) => range.len(),
        }
    }
}

fn before(error: &crate::verbs::Error) -> Trouble {
    Trouble::before(error)
}

impl Lane {
    /// The ring that messages go through, made when it is first needed.
    fn ring(&self) -> Result<&Arc<Region>, crate::verbs::Error> {
        if let Some(ring) = self.staging.get() {
            return Ok(ring);
        }
        let ring = Region::pages(self.buffer.domain(), RING * PIECE, Access::LOCAL)?;
        Ok(self.staging.get_or_init(|| ring))
    }

    /// Carries out `count` requests in their order, a few under way together.
    /// `make` is called when there is room for the request with that number,
    /// `done` when it is done.
    fn pump<'a>(
        &'a self,
        count: usize,
        mut make: impl FnMut(usize) -> Result<Request<'a>, Trouble>,
        mut done: impl FnMut(usize) -> Result<(), Trouble>,
    ) -> Result<(), Trouble> {
        self.attempt(|| {
            let mut under_way: VecDeque<WorkId> = VecDeque::with_capacity(RING);
            let (mut next, mut finished) = (0, 0);
            while finished < count {
                while next < count && under_way.len() < RING {
                    let posted = self.queue.post(make(next)?);
                    under_way.push_back(posted.map_err(|e| Trouble::unclear(&e))?);
                    next += 1;
                }
                let mut ended = 0;
                self.completed(false, |work| {
                    if let Some(at) = under_way.iter().position(|w| *w == work) {
                        ended = ended.max(at + 1);
                    }
                })?;
                for _ in under_way.drain(..ended) {
                    done(finished)?;
                    finished += 1;
                }
            }
            Ok(())
        })
    }
}

impl SlotWay {
    fn row(&self, row: u32) -> u64 {
        self.payload.address + u64::from(row) * pitch(self.bytes)
    }

    fn at(&self, address: u64) -> Remote {
        Remote { address, key: self.payload.key }
    }

    /// The pieces of a part of a row: where it is there, and which bytes here.
    fn pieces(&self, row: u32, offset: u64, len: usize) -> Vec<(Remote, Range<usize>)> {
        let start = self.row(row) + HEAD + offset;
        (0..len)
            .step_by(self.piece)
            .map(|at| (self.at(start + at as u64), at..len.min(at + self.piece)))
            .collect()
    }

    fn staged(ring: &Arc<Region>, n: usize, len: usize) -> Result<Local<'_>, Trouble> {
        let start = n % RING * PIECE;
        ring.slice(start..start + len).map_err(|e| before(&e))
    }

    /// Looks at a message once. `cell` is its version word, counted from the
    /// start of the array. `None`: it must go another way, since RDMA is over, or
    /// the array is gone.
    pub(crate) fn look(
        &self,
        cell: u32,
        row: u32,
        offset: u64,
        into: &mut Into<'_>,
    ) -> Option<Look> {
        self.works().then(|| self.try_look(cell, row, offset, into)).and_then(|looked| {
            looked.inspect_err(|trouble| self.rdma.give_up(&self.rails, trouble)).ok().flatten()
        })
    }

    fn works(&self) -> bool {
        self.rdma.rails().is_some_and(|now| Arc::ptr_eq(&now, &self.rails))
    }

    fn try_look(
        &self,
        cell: u32,
        row: u32,
        offset: u64,
        into: &mut Into<'_>,
    ) -> Result<Option<Look>, Trouble> {
        let lane = self.rails.lane();
        let word = self.rails.cell(self.base + cell);
        // In their order, the length being read after the word.
        lane.run_all(&mut [
            Request::read(lane.word(0)?, word),
            Request::read(lane.word(1)?, self.at(self.row(row))),
            Request::read(lane.word(2)?, self.at(self.row(row) + 8)),
        ])?;
        if is_suspect(lane.value(0)) || lane.value(2) != 0 {
            // The array is gone, and the server is to say so; or the row has
            // moved to where only the server reaches it.
            return Ok(None);
        }
        let version = Version::of(lane.value(0));
        if version.is_writing() || version.is_torn() || version.number() == 0 {
            return Ok(Some(Look::Unsettled(version)));
        }
        let total = lane.value(1).min(self.bytes);
        let left = usize::try_from(total.saturating_sub(offset)).unwrap_or(usize::MAX);
        let bytes = left.min(into.len());
        let pieces = self.pieces(row, offset, bytes);
        match into {
            Into::Region(region, range) => lane.pump(
                pieces.len(),
                |n| {
                    let (from, part) = pieces[n].clone();
                    let part = range.start + part.start..range.start + part.end;
                    Ok(Request::read(region.slice(part).map_err(|e| before(&e))?, from))
                },
                |_| Ok(()),
            )?,
            Into::Buffer(buffer) => {
                let ring = lane.ring().map_err(|e| before(&e))?;
                lane.pump(
                    pieces.len(),
                    |n| {
                        let (from, part) = pieces[n].clone();
                        Ok(Request::read(Self::staged(ring, n, part.len())?, from))
                    },
                    |n| {
                        let part = pieces[n].1.clone();
                        ring.read(n % RING * PIECE, &mut buffer[part]).map_err(|e| before(&e))
                    },
                )?;
            }
        }
        // Only when the bytes are here: READs that are under way together may
        // be served from memory in any order.
        lane.run(Request::read(lane.word(0)?, word))?;
        let after = Version::of(lane.value(0));
        Ok(Some(match after == version {
            true => Look::Got { version, total, bytes },
            false => Look::Unsettled(after),
        }))
    }

    /// Writes bytes of a row that is claimed. `false`: RDMA is over, or does
    /// not reach the row, and all of them must go another way; nothing of this arrives any more.
    pub(crate) fn write(&self, row: u32, offset: u64, bytes: &From<'_>) -> bool {
        if !self.works() {
            return false;
        }
        match self.try_write(row, offset, bytes) {
            Ok(done) => done,
            Err(trouble) => {
                self.rdma.give_up(&self.rails, &trouble);
                false
            }
        }
    }

    fn try_write(&self, row: u32, offset: u64, bytes: &From<'_>) -> Result<bool, Trouble> {
        let lane = self.rails.lane();
        lane.run(Request::read(lane.word(1)?, self.at(self.row(row) + 8)))?;
        if lane.value(1) != 0 {
            // It has moved: see `try_look`.
            return Ok(false);
        }
        let pieces = self.pieces(row, offset, bytes.len());
        let write = |from, to| Request::new(crate::verbs::Work::Write { from, to });
        match bytes {
            From::Region(region, range) => lane.pump(
                pieces.len(),
                |n| {
                    let (to, part) = pieces[n].clone();
                    let part = range.start + part.start..range.start + part.end;
                    Ok(write(region.slice(part).map_err(|e| before(&e))?, to))
                },
                |_| Ok(()),
            )?,
            From::Buffer(buffer) => {
                let ring = lane.ring().map_err(|e| before(&e))?;
                lane.pump(
                    pieces.len(),
                    |n| {
                        let (to, part) = pieces[n].clone();
                        let len = part.len();
                        // Its last use is done: no more than RING are under way.
                        ring.write(n % RING * PIECE, &buffer[part]).map_err(|e| before(&e))?;
                        Ok(write(Self::staged(ring, n, len)?, to))
                    },
                    |_| Ok(()),
                )?;
            }
        }
        // A WRITE that is acknowledged has reached the other adapter; a READ
        // behind it is answered when it has reached the memory (InfiniBand
        // specification, ordering of a reliable connection).
        lane.run(Request::read(lane.word(1)?, self.at(self.row(row)))).map(|()| true)
    }
}

impl Rdma {
    /// The way to the messages of an array, which the server registers for it.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn slot_way(self: &Arc<Self>, array: u16, bytes: u64) -> Result<SlotWay, String> {
        self.link.check().map_err(|forked| forked.to_string())?;
        let rails = self.rails().ok_or("RDMA was lost")?;
        let base = self.way(array).ok_or("RDMA was lost")?.base;
        rails.make_rings().map_err(|e| e.to_string())?;
        let record = SlotsRecord { array, ..SlotsRecord::default() };
        let answer = self
            .link
            .ask_later(Tag::RdmaSlots, bytemuck::bytes_of(&record), OPEN_TIMEOUT * 4)
            .map_err(|f| format!("{f:?}"))?;
        match answer {
            Some((Tag::RdmaSlotsOpened, answer)) => {
                let (answer, _) = wire::take::<RdmaSlotsAnswer>(Tag::RdmaSlotsOpened, &answer)
                    .map_err(|v| v.to_string())?;
                let payload = Remote { address: answer.address, key: answer.key };
                let piece = PIECE.min(rails.max_message as usize).max(4096);
                Ok(SlotWay { rdma: self.clone(), rails, base, payload, bytes, piece })
            }
            Some((_, why)) => Err(String::from_utf8_lossy(&why).into_owned()),
            None => Err("the server did not answer in time".to_owned()),
        }
    }

    /// Memory of at least that many bytes that the adapter reaches.
    pub(crate) fn register(&self, bytes: usize) -> Result<Arc<Region>, String> {
        self.link.check().map_err(|forked| forked.to_string())?;
        let rails = self.rails().ok_or("RDMA was lost")?;
        rails.region(bytes).map_err(|e| e.to_string())
    }
}

impl Rails {
    fn make_rings(&self) -> Result<(), crate::verbs::Error> {
        for lane in &self.lanes {
            crate::engine::lock(lane).ring()?;
        }
        Ok(())
    }

    fn region(&self, bytes: usize) -> Result<Arc<Region>, crate::verbs::Error> {
        let lane = self.lane();
        Region::pages(lane.buffer.domain(), bytes, Access::LOCAL)
    }
}

/// How often a write is begun whose connections are lost each time.
const TRIES: usize = 16;

/// Writes a whole message or a part: claims the row, moves the bytes with `fill`,
/// or over TCP where that says that it cannot, and commits. What is lost in between is begun again, under
/// the same number, so that it happens once. `Err(None)`: it was lost each time.
pub(crate) fn put(
    link: &Arc<Link>,
    fill: impl Fn() -> bool,
    at: SlotAt,
    offset: u64,
    bytes: &From<'_>,
    total: Option<u64>,
) -> Result<Version, Option<Failure>> {
    let number = link.slot_number().map_err(Some)?;
    for _ in 0..TRIES {
        let mut claimed = match link.slot_begin_as(&number, at, true).map_err(Some)? {
            SlotBegun::Claimed(claimed) => claimed,
            SlotBegun::Done(version) => return Ok(version),
        };
        let moved = if fill() {
            claimed.arrived(offset, bytes.len() as u64)
        } else {
            by_tcp(&mut claimed, offset, bytes)
        };
        match moved.and_then(|()| claimed.try_commit(total)) {
            Err(None) => {}
            done => return done,
        }
    }
    Err(None)
}

fn by_tcp(claimed: &mut Claimed, offset: u64, bytes: &From<'_>) -> Result<(), Option<Failure>> {
    match bytes {
        From::Buffer(buffer) => claimed.write(offset, buffer),
        From::Region(region, range) => {
            let mut copy = vec![0; range.len()];
            let copied = region.read(range.start, &mut copy);
            copied.map_err(|e| Some(crate::Error::Rdma { what: e.to_string() }.into()))?;
            claimed.write(offset, &copy)
        }
    }
}
