//! Operations as frames on a TCP connection.

mod beside;
mod follow;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod holds;
mod later;
mod life;
mod link;
mod reading;
mod resume;
mod state;
mod sync;
mod waits;
mod writing;

pub(crate) use beside::{Begun as SlotBegun, Claimed, Look, SlotAt};
pub use later::Pending;
pub(crate) use later::Then;
pub(crate) use link::{Link, Settings};
pub(crate) use state::Grant;
pub(crate) use waits::Patience;

use super::{CellOp, Failure, Transport, Waited};
use crate::catalog::Form;
use crate::cell::Op;
use crate::engine::lock;
use crate::error::Error;
use crate::layout::Run;
use crate::wire::{
    self, HEADER, Header, OpRecord, OpenRecord, OpenedRecord, RunRecord, RunsHead, Tag, WaitRecord,
};
use state::{Frame, Reply, Request};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Ends waits from another thread. Clones are one and the same; once
/// cancelled it stays so, and further waits with it end at once.
#[derive(Clone, Debug, Default)]
pub struct Canceller {
    inner: Arc<Mutex<Cancelling>>,
    look: Option<Arc<Asking>>,
}

/// What a waiting thread asks from time to time.
pub(crate) struct Asking {
    /// How often.
    pub every: Duration,
    /// Whether to give up.
    pub stop: Box<dyn Fn() -> bool + Send + Sync>,
}

impl std::fmt::Debug for Asking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Asking").field("every", &self.every).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Cancelling {
    cancelled: bool,
    waits: Vec<(Weak<dyn Cancels>, u64)>,
}

/// One whose waits can be called off.
pub(crate) trait Cancels: Send + Sync + std::fmt::Debug {
    /// Calls off the wait that has this number there. Does not wait for it.
    fn cancel_wait(&self, id: u64);
}

impl Cancels for Link {
    fn cancel_wait(&self, id: u64) {
        Link::cancel_wait(self, id);
    }
}

/// Takes a wait out of its canceller when it has ended.
pub(crate) struct Entered<'c> {
    canceller: &'c Canceller,
    whose: Weak<dyn Cancels>,
    wait: u64,
}

impl Canceller {
    /// A canceller that has not been used.
    #[must_use]
    pub fn new() -> Canceller {
        Canceller::default()
    }

    /// A canceller that asks by itself: each thread that waits with it calls
    /// `stop` after every such time, and cancels when the answer is `true`.
    /// For a program whose signals must be looked at on a certain thread. The
    /// wait itself goes on meanwhile: nothing is sent, and nothing is missed.
    #[must_use]
    pub fn watched(every: Duration, stop: impl Fn() -> bool + Send + Sync + 'static) -> Canceller {
        let every = every.max(Duration::from_millis(1));
        let look = Asking { every, stop: Box::new(stop) };
        Canceller { inner: Arc::default(), look: Some(Arc::new(look)) }
    }

    pub(crate) fn look(&self) -> Option<&Asking> {
        self.look.as_deref()
    }

    /// Ends every wait that was given this canceller, now and later, with
    /// [`Error::Cancelled`]. Does not wait for them.
    pub fn cancel(&self) {
        let waits = {
            let mut inner = lock(&self.inner);
            inner.cancelled = true;
            std::mem::take(&mut inner.waits)
        };
        for (whose, wait) in waits {
            if let Some(whose) = whose.upgrade() {
                whose.cancel_wait(wait);
            }
        }
    }

    /// Whether [`cancel`](Self::cancel) was called.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        lock(&self.inner).cancelled
    }

    pub(crate) fn enter(&self, whose: Weak<dyn Cancels>, wait: u64) -> Entered<'_> {
        lock(&self.inner).waits.push((whose.clone(), wait));
        Entered { canceller: self, whose, wait }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        lock(&self.canceller.inner)
            .waits
            .retain(|(whose, wait)| *wait != self.wait || !whose.ptr_eq(&self.whose));
    }
}

/// A frame with room for its id.
fn frame(tag: Tag, parts: &[&[u8]]) -> Vec<u8> {
    let len: usize = parts.iter().map(|p| p.len()).sum();
    let mut frame = Vec::with_capacity(HEADER + len);
    wire::push(&mut frame, tag, 0, parts);
    frame
}

impl From<CellOp> for OpRecord {
    fn from(op: CellOp) -> OpRecord {
        OpRecord {
            op: op.op as u8,
            reserved: 0,
            array: op.array,
            offset: op.offset,
            a: op.a,
            b: op.b,
        }
    }
}

/// Operations that go in one frame.
fn ops_request(ops: &[CellOp]) -> Request {
    if let &[op] = ops {
        return Request {
            frame: Frame::one(&op.into()),
            name: op.op.name(),
            repeatable: op.op.is_repeatable(),
            reads: op.op.is_read(),
            reply_bytes: HEADER + 8,
        };
    }
    let size = size_of::<OpRecord>();
    let mut frame = vec![0; HEADER + ops.len() * size];
    let (head, records) = frame.split_at_mut(HEADER);
    head.copy_from_slice(bytemuck::bytes_of(&Header::new(Tag::Ops, 0, ops.len() * size)));
    let mut repeatable = true;
    let mut reads = true;
    for (&op, record) in ops.iter().zip(records.chunks_exact_mut(size)) {
        repeatable &= op.op.is_repeatable();
        reads &= op.op.is_read();
        record.copy_from_slice(bytemuck::bytes_of(&OpRecord::from(op)));
    }
    let name = "a batch";
    let reply_bytes = HEADER + ops.len() * 8;
    Request { frame: Frame::many(frame), name, repeatable, reads, reply_bytes }
}

impl Link {
    fn call(&self, request: Request) -> Result<Reply, Failure> {
        let id = self.submit(request)?;
        self.collect(id)
    }

    pub(super) fn senseless(&self, what: &str) -> Failure {
        let addr = self.settings.target.addr.clone();
        Error::Protocol { addr, what: what.to_owned() }.into()
    }

    /// Sends several requests, then collects their words in order.
    fn words_of(
        &self,
        requests: impl Iterator<Item = (Request, usize)>,
    ) -> Result<Vec<u64>, Failure> {
        let mut pending = Vec::new();
        let mut failed = None;
        for (request, count) in requests {
            match self.submit(request) {
                Ok(id) => pending.push((id, count)),
                Err(failure) => {
                    failed = Some(failure);
                    break;
                }
            }
        }
        let mut words = Vec::new();
        let mut behind = 0;
        for (id, count) in pending {
            // Also behind a failure: every answer has to be taken.
            match self.collect(id) {
                Ok(Reply::Word(word)) if count == 1 => words.push(word),
                Ok(Reply::Frame(Tag::Words, bytes)) if bytes.len() == count * 8 => {
                    words.extend(bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned::<u64>));
                }
                Ok(_) => {
                    failed.get_or_insert(self.senseless("a reply of another kind or size"));
                }
                Err(failure) => {
                    failed.get_or_insert(failure.behind(behind));
                }
            }
            behind += count;
        }
        match failed {
            Some(failure) => Err(failure),
            None => Ok(words),
        }
    }

    /// Opens an array under a number of the session's, to be given back with
    /// [`drop_binding`](Self::drop_binding). `None` opens whatever has the
    /// name.
    pub(crate) fn open(
        &self,
        name: &str,
        form: Option<Form>,
    ) -> Result<(u16, OpenedRecord), Failure> {
        self.check()?;
        let open = |array| {
            let blank = OpenRecord { array, ..Default::default() };
            let record = form.map_or(blank, |form| OpenRecord {
                kind: form.kind as u8,
                rows: form.shape.rows,
                cols: form.shape.cols,
                param: form.param,
                ..blank
            });
            frame(Tag::Open, &[bytemuck::bytes_of(&record), name.as_bytes()])
        };
        let Some(number) = self.add_binding(open) else {
            let what = format!("a client opens at most {} arrays", wire::MAX_ARRAYS_OPEN);
            return Err(Error::BadSelection { what }.into());
        };
        self.tell_reopening(number);
        let reply = self.call(Request {
            frame: Frame::many(open(number)),
            name: "open",
            repeatable: true,
            reads: form.is_none(),
            reply_bytes: HEADER + 64,
        });
        let opened = match reply {
            Ok(Reply::Frame(Tag::Opened, bytes)) => wire::take(Tag::Opened, &bytes)
                .map(|(record, _)| (number, record))
                .map_err(|v| self.senseless(&v.to_string())),
            Ok(_) => Err(self.senseless("a reply of another kind to an open")),
            Err(failure) => Err(failure),
        };
        if opened.is_err() {
            self.drop_binding(number);
        }
        opened
    }

    /// Sends a request whose payload is a name, and returns the reply's
    /// payload.
    pub(crate) fn ask(&self, tag: Tag, name: &str) -> Result<Vec<u8>, Failure> {
        let reads = tag != Tag::Remove;
        let reply = self.call(Request {
            frame: Frame::many(frame(tag, &[name.as_bytes()])),
            name: if reads { "list" } else { "remove" },
            repeatable: reads,
            reads,
            reply_bytes: HEADER + if tag == Tag::List { 256 << 10 } else { 64 },
        })?;
        match reply {
            Reply::Frame(_, bytes) => Ok(bytes),
            Reply::Word(_) => Err(self.senseless("a word in reply to a question")),
        }
    }
}

/// The frame of a wait.
pub(crate) fn wait_frame(need: u32, targets: &[WaitRecord]) -> Vec<u8> {
    let head = wire::WaitHead { need, peers: 0 };
    frame(Tag::Wait, &[bytemuck::bytes_of(&head), bytemuck::cast_slice(targets)])
}

impl Transport for Link {
    fn execute(&self, op: CellOp) -> Result<u64, Failure> {
        match self.call(ops_request(&[op]))? {
            Reply::Word(word) => Ok(word),
            Reply::Frame(..) => Err(self.senseless("a frame in reply to one operation")),
        }
    }

    fn execute_all(&self, ops: &[CellOp]) -> Result<Vec<u64>, Failure> {
        let chunks = ops.chunks(wire::MAX_OPS);
        self.words_of(chunks.map(|chunk| (ops_request(chunk), chunk.len())))
    }

    fn execute_runs(&self, op: Op, array: u16, runs: &[Run]) -> Result<Vec<u64>, Failure> {
        let head = RunsHead { op: op as u8, reserved: [0; 5], array };
        self.words_of(parcels(runs).map(|(records, cells)| {
            let bytes = bytemuck::cast_slice(&records);
            let request = Request {
                frame: Frame::many(frame(Tag::Runs, &[bytemuck::bytes_of(&head), bytes])),
                name: op.name(),
                repeatable: op.is_repeatable(),
                reads: op.is_read(),
                reply_bytes: HEADER + cells * 8,
            };
            (request, cells)
        }))
    }

    fn wait(
        &self,
        need: u32,
        targets: &[WaitRecord],
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Waited, Failure> {
        let patience = Patience { timeout, cancel, ..Patience::default() };
        self.wait_for(need, targets, &[], &patience)
    }
}

/// Runs as they fit into frames, each with the number of its cells.
fn parcels(runs: &[Run]) -> impl Iterator<Item = (Vec<RunRecord>, usize)> {
    let mut rest = runs.iter().copied();
    let mut cut: Option<Run> = None;
    std::iter::from_fn(move || {
        let mut records = Vec::new();
        let mut cells = 0;
        while records.len() < wire::MAX_RUNS && cells < wire::MAX_CELLS {
            let Some(run) = cut.take().or_else(|| rest.next()) else {
                break;
            };
            let count = run.count.min((wire::MAX_CELLS - cells) as u32);
            records.push(Run { count, ..run }.into());
            cells += count as usize;
            if count < run.count {
                let offset = run.offset + count * run.stride;
                cut = Some(Run { offset, count: run.count - count, ..run });
            }
        }
        (!records.is_empty()).then_some((records, cells))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_selections_are_cut_without_loss() {
        let most = wire::MAX_CELLS as u32;
        let runs =
            [Run { offset: 0, count: most + 5, stride: 2 }, Run { offset: 7, count: 3, stride: 9 }];
        let want: Vec<u32> = runs.iter().flat_map(|r| r.offsets()).collect();
        let parcels: Vec<_> = parcels(&runs).collect();
        assert_eq!(parcels.len(), 2);
        let got: Vec<u32> = parcels
            .iter()
            .flat_map(|(records, _)| records.iter().flat_map(|&r| Run::from(r).offsets()))
            .collect();
        assert_eq!(got, want);
        assert!(parcels.iter().all(|(_, cells)| *cells <= wire::MAX_CELLS));
    }

    #[test]
    fn many_single_cells_are_cut_too() {
        let runs = vec![Run::one(1); wire::MAX_RUNS + 1];
        let sizes: Vec<usize> = parcels(&runs).map(|(_, cells)| cells).collect();
        assert_eq!(sizes, [wire::MAX_RUNS, 1]);
    }
}
