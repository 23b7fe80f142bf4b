//! The server's own changes of cells: by the CPU, or through the adapter where
//! the clients' changes go through it.

use super::rdma::Rdma;
use super::shm::Shm;
use crate::auth::Domain;
use crate::cell::{WAITING, is_waiting};
use crate::engine::{Actor, Swap, lock};
use crate::layout::CELLS_AT;
use crate::rdma::random_psn;
use crate::segment::{Segment, wake_all};
use crate::verbs::{
    Access, Completion, CompletionChannel, CompletionQueue, Connect, Error, Gid, Memory, Notify,
    ProtectionDomain, QueuePair, QueuePairConfig, Receive, Region, Remote, Request,
    UnconnectedQueuePair,
};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// How long the end of the server's own change is looked for without sleeping.
/// A device takes some microseconds; soft-RoCE works on this very core, and can
/// do so only when we sleep.
const SPIN: Duration = Duration::from_micros(20);

/// Changes that a lane has under way together.
const DEPTH: usize = 64;
/// Changes that are given to the adapter with one call.
const LIST: usize = 16;

thread_local! {
    static UNCLEAR: Cell<bool> = const { Cell::new(false) };
}

/// Whether a change that this thread has asked for since the last call may have
/// happened or not. What it returned says nothing then.
pub(super) fn take_unclear() -> bool {
    UNCLEAR.take()
}

/// What became of a change.
enum Change {
    /// Done; the word before it.
    Done(u64),
    /// Not done: the adapter has failed, and the CPU is to do it.
    Undone,
    /// The adapter failed in the middle of it.
    Unclear,
}

/// Who carries out the server's own changes of cells.
#[derive(Debug)]
pub(super) struct ServerActor {
    segment: Arc<Segment>,
    /// In the `hca` domain: the server's own way to the adapter.
    loopback: Option<Loopback>,
    /// For tests: the CPU changes cells that the adapter changes too.
    break_rule: bool,
    /// Those who work in the segment's memory.
    shm: Option<Arc<Shm>>,
}

impl ServerActor {
    /// The CPU alone.
    pub fn alone(segment: Arc<Segment>) -> ServerActor {
        ServerActor { segment, loopback: None, break_rule: false, shm: None }
    }

    /// An actor for the domain that `rdma` has, unless told to `break_rule`.
    pub fn new(rdma: &Arc<Rdma>, lanes: usize, break_rule: bool) -> Result<ServerActor, Error> {
        let by_adapter = rdma.domain == Domain::Hca && !break_rule;
        let loopback = by_adapter.then(|| Loopback::open(rdma, lanes)).transpose()?;
        Ok(ServerActor { segment: rdma.segment.clone(), loopback, break_rule, shm: None })
    }

    /// Here are those who work in the segment's memory.
    pub fn with_shm(mut self, shm: Option<Arc<Shm>>) -> ServerActor {
        self.shm = shm;
        self
    }

    fn by_cpu(&self, place: u32, current: u64, new: u64) -> Result<u64, u64> {
        let done = self.segment.compare_exchange(place, current, new);
        if done.is_ok() && !is_waiting(new) && self.loopback.is_none() {
            self.changed(place, current, false);
        }
        done
    }

    /// The CPU's own change of a cell, whose word was `old`: those who sleep on
    /// it in the segment's memory are woken when the bit is dropped that stands
    /// for them too. With `keeps_bit` the change has left it.
    fn changed(&self, place: u32, old: u64, keeps_bit: bool) {
        if !is_waiting(old) {
            return;
        }
        if !self.shm.as_ref().is_some_and(|shm| shm.has_sleepers()) {
            return;
        }
        let cell = &self.segment.cells()[place as usize];
        if keeps_bit {
            // The engine sets it again for its own waiters. AcqRel: as every
            // change of a cell.
            cell.fetch_and(!WAITING, Ordering::AcqRel);
        }
        wake_all(cell);
    }
}

impl Actor for ServerActor {
    /// The CPU's load also in the `hca` domain: loads are fine, the adapter
    /// writes whole aligned words.
    fn load(&self, place: u32) -> u64 {
        self.segment.load(place)
    }

    fn compare_exchange(&self, place: u32, current: u64, new: u64) -> Result<u64, u64> {
        let Some(loopback) = &self.loopback else {
            return self.by_cpu(place, current, new);
        };
        match loopback.run(place, |old, at| Request::compare_swap(old, at, current, new)) {
            Change::Done(old) if old == current => Ok(old),
            Change::Done(old) => Err(old),
            Change::Undone => self.segment.compare_exchange(place, current, new),
            Change::Unclear => {
                UNCLEAR.set(true);
                // So that nobody tries again. A waiting bit that is not there
                // for it is found by the sweep.
                Ok(current)
            }
        }
    }

    fn compare_exchange_all(&self, swaps: &[Swap], found: &mut Vec<u64>) {
        found.clear();
        if let Some(loopback) = &self.loopback {
            let unclear = loopback.swap_all(swaps, found);
            if unclear > 0 {
                UNCLEAR.set(true);
                // As above.
                let those = &swaps[found.len()..][..unclear];
                found.extend(those.iter().map(|swap| swap.current));
            }
        }
        // The CPU does those that the adapter has not done since it failed.
        found.extend(swaps[found.len()..].iter().map(|swap| {
            let Swap { place, current, new } = *swap;
            let (Ok(word) | Err(word)) = self.by_cpu(place, current, new);
            word
        }));
    }

    fn fetch_add(&self, place: u32, delta: u64) -> u64 {
        let Some(loopback) = &self.loopback else {
            if self.break_rule {
                // The moment in which the adapter can lose one is short: many,
                // which come to nothing if each counts.
                for _ in 0..256 {
                    self.segment.fetch_add(place, delta);
                    self.segment.fetch_add(place, delta.wrapping_neg());
                }
            }
            let old = self.segment.fetch_add(place, delta);
            self.changed(place, old, true);
            return old;
        };
        match loopback.run(place, |old, at| Request::fetch_add(old, at, delta)) {
            Change::Done(old) => old,
            Change::Undone => self.segment.fetch_add(place, delta),
            Change::Unclear => {
                UNCLEAR.set(true);
                self.segment.load(place)
            }
        }
    }

    fn watch(&self, place: u32, yes: bool) -> bool {
        self.shm.as_ref().is_some_and(|shm| shm.watch(place, yes))
    }

    fn is_shared(&self) -> bool {
        self.loopback.is_none() && self.shm.as_ref().is_some_and(|shm| shm.has_sleepers())
    }

    fn sleeps_of(&self, session: u64) -> Vec<u32> {
        self.shm.as_ref().map_or(Vec::new(), |shm| shm.sleeps_of(session))
    }

    fn sleepers(&self, place: Option<u32>) -> usize {
        self.shm.as_ref().map_or(0, |shm| shm.sleepers(place))
    }
}

/// Queue pairs that are connected to each other, two a lane.
#[derive(Debug)]
struct Loopback {
    lanes: Vec<Mutex<LoopLane>>,
    next: AtomicUsize,
    remote: Remote,
    rdma: Arc<Rdma>,
}

#[derive(Debug)]
pub(super) struct LoopLane {
    /// The one that asks and the one that does it; `None`: the adapter has
    /// failed. One that is connected to itself would do, but on soft-RoCE takes
    /// ten times as long and more.
    pub(super) queues: Option<(QueuePair, QueuePair)>,
    completions: Arc<CompletionQueue>,
    channel: Arc<CompletionChannel>,
    scratch: Arc<Region>,
    _region: Arc<Region>,
}

impl Loopback {
    fn open(rdma: &Arc<Rdma>, lanes: usize) -> Result<Loopback, Error> {
        let adapter = &rdma.adapter;
        let context = &adapter.context;
        let mut made = Vec::new();
        let mut remote = Remote { address: 0, key: 0 };
        let pd = ProtectionDomain::new(context)?;
        let access = Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let memory: Arc<dyn Memory> = rdma.segment.clone();
        let region = Region::register(&pd, memory, access)?;
        for _ in 0..lanes.max(1) {
            let channel = CompletionChannel::new(context)?;
            let completions = CompletionQueue::new(context, 2 * DEPTH as u32, Some((&channel, 0)))?;
            let scratch = Region::pages(&pd, DEPTH * 8, Access::LOCAL)?;
            let end = |depth, access| {
                let config = QueuePairConfig {
                    port: adapter.port,
                    depth,
                    inline_bytes: 0,
                    access,
                    psn: random_psn(),
                    completions: &completions,
                    receive: Receive::Nothing,
                };
                UnconnectedQueuePair::new(&pd, &config)
            };
            let (near, far) = (end(DEPTH as u32, Access::NONE)?, end(1, access)?);
            let (gid, index) = if adapter.by_lid() {
                (Gid::default(), 0)
            } else {
                // Any that leads back here.
                let entry = adapter.addresses(None)?.into_iter().next();
                let none = || Error::NoAddress { what: adapter.no_address(None) };
                entry.map(|entry| (entry.gid, entry.index)).ok_or_else(none)?
            };
            let (to_near, to_far) = (near.endpoint(gid)?, far.endpoint(gid)?);
            let attributes = context.attributes();
            let depth = attributes.max_initiator_depth.min(attributes.max_responder_depth);
            let depth = depth.min(DEPTH as u8);
            let connect = |queue: UnconnectedQueuePair, to| {
                let mut connect = Connect::to(to, index as u8);
                connect.mtu = adapter.state.mtu;
                connect.initiator_depth = depth;
                connect.responder_depth = depth;
                queue.connect(&connect)
            };
            let (near, far) = (connect(near, to_far)?, connect(far, to_near)?);
            remote = Remote { address: region.remote_address(), key: region.remote_key() };
            made.push(Mutex::new(LoopLane {
                queues: Some((near, far)),
                completions,
                channel,
                scratch,
                _region: region.clone(),
            }));
        }
        Ok(Loopback { lanes: made, next: AtomicUsize::new(0), remote, rdma: rdma.clone() })
    }

    /// Carries out an atomic on a cell and waits for it.
    fn run(
        &self,
        place: u32,
        request: impl Fn(crate::verbs::Local<'_>, Remote) -> Request<'_>,
    ) -> Change {
        let at = self.cell(place);
        match self.with_lane(|lane, queue| lane.run(queue, at, &request)) {
            Some(Ok(old)) => Change::Done(old),
            Some(Err(change)) => change,
            None => Change::Undone,
        }
    }

    /// Carries out compare-and-swaps, as many under way as there can be, in their
    /// order, and waits for them. `found` gets the words of those that are done;
    /// if that is not all of them, the adapter has failed, and as many behind
    /// them as is returned may have been done or not.
    fn swap_all(&self, swaps: &[Swap], found: &mut Vec<u64>) -> usize {
        let done = self.with_lane(|lane, queue| {
            lane.swap_all(queue, swaps, |swap| self.cell(swap.place), found)
        });
        match done {
            Some(Err(unclear)) => unclear,
            Some(Ok(())) | None => 0,
        }
    }

    fn cell(&self, place: u32) -> Remote {
        Remote {
            address: self.remote.address + CELLS_AT as u64 + u64::from(place) * 8,
            key: self.remote.key,
        }
    }

    /// Works on a lane. When that fails, the adapter has: the CPU takes over.
    /// `None`: it has before, and nothing was done.
    fn with_lane<T, E>(
        &self,
        work: impl FnOnce(&LoopLane, &QueuePair) -> Result<T, (E, Error)>,
    ) -> Option<Result<T, E>> {
        // Acquire: pairs with the release in `fail`, behind which no client
        // can reach the cells.
        if self.rdma.failed.load(Ordering::Acquire) {
            return None;
        }
        // Relaxed: any lane will do.
        let start = self.next.fetch_add(1, Ordering::Relaxed);
        let count = self.lanes.len();
        let lane = (0..count)
            .find_map(|i| self.lanes[(start + i) % count].try_lock().ok())
            .unwrap_or_else(|| lock(&self.lanes[start % count]));
        // Without: it failed while we waited for the lane, and whoever took the
        // queue pairs away has set `failed` before letting go of the lane.
        let (queue, _) = lane.queues.as_ref()?;
        let (what, error) = match work(&lane, queue) {
            Ok(done) => return Some(Ok(done)),
            Err(failed) => failed,
        };
        drop(lane);
        // All lanes, in their order, so that two who fail do not wait for each
        // other; and nobody is at work on any while the CPU takes over.
        let mut lanes: Vec<_> = self.lanes.iter().map(lock).collect();
        // Relaxed: changed under these locks only.
        if !self.rdma.failed.load(Ordering::Relaxed) {
            self.rdma.fail(&error, &mut lanes);
        }
        Some(Err(what))
    }
}

impl LoopLane {
    fn run(
        &self,
        queue: &QueuePair,
        at: Remote,
        request: impl Fn(crate::verbs::Local<'_>, Remote) -> Request<'_>,
    ) -> Result<u64, (Change, Error)> {
        let local = self.scratch.slice(0..8).map_err(|e| (Change::Undone, e))?;
        let id = queue.post(request(local, at)).map_err(|error| match error {
            Error::Unclear { .. } => (Change::Unclear, error),
            _ => (Change::Undone, error),
        })?;
        let mut batch = [Completion::default(); 4];
        let unclear = |e| (Change::Unclear, e);
        let begun = Instant::now();
        loop {
            let n = self.look(begun, &mut batch).map_err(unclear)?;
            for completion in &batch[..n] {
                // Also with an error of the local end: it may be the answer
                // that did not come through.
                let failed = || match completion.status().was_refused() {
                    true => Change::Undone,
                    false => Change::Unclear,
                };
                queue.retire(completion).map_err(|e| (failed(), e))?;
                if completion.work() == Some(id) {
                    return Ok(self.word(0));
                }
            }
        }
    }

    /// As [`Loopback::swap_all`].
    fn swap_all(
        &self,
        queue: &QueuePair,
        swaps: &[Swap],
        cell: impl Fn(&Swap) -> Remote,
        found: &mut Vec<u64>,
    ) -> Result<(), (usize, Error)> {
        let mut batch = [Completion::default(); 4];
        let (mut requests, mut ids) = (Vec::with_capacity(LIST), Vec::with_capacity(LIST));
        // Lists under way: the last request of each, and where they end.
        let mut lists = VecDeque::with_capacity(DEPTH / LIST);
        let mut posted = 0;
        let mut begun = Instant::now();
        while found.len() < swaps.len() {
            while posted < swaps.len() && posted + LIST <= found.len() + DEPTH {
                let end = swaps.len().min(posted + LIST);
                requests.clear();
                for (i, swap) in swaps[posted..end].iter().enumerate() {
                    let slot = (posted + i) % DEPTH * 8;
                    let old = self.scratch.slice(slot..slot + 8);
                    let old = old.map_err(|e| (posted - found.len(), e))?;
                    let request = Request::compare_swap(old, cell(swap), swap.current, swap.new);
                    // The last one stands for all.
                    requests.push(if posted + i + 1 < end {
                        request.unsignalled()
                    } else {
                        request
                    });
                }
                ids.clear();
                let result = queue.post_all(&requests, &mut ids);
                posted += ids.len();
                result.map_err(|e| (posted - found.len(), e))?;
                lists.extend(ids.last().map(|&last| (last, end)));
            }
            let n = self.look(begun, &mut batch).map_err(|e| (posted - found.len(), e))?;
            for completion in &batch[..n] {
                queue.retire(completion).map_err(|e| (posted - found.len(), e))?;
                begun = Instant::now();
                let done = lists.iter().position(|(last, _)| completion.work() == Some(*last));
                for (_, end) in lists.drain(..done.map_or(0, |at| at + 1)) {
                    let begin = found.len();
                    found.extend((begin..end).map(|i| self.word(i % DEPTH)));
                }
            }
        }
        Ok(())
    }

    /// Takes what has completed; waits a while, first awake and then asleep, if
    /// nothing has since `begun`.
    fn look(&self, begun: Instant, batch: &mut [Completion]) -> Result<usize, Error> {
        let n = self.completions.poll(batch)?;
        if n > 0 {
            return Ok(n);
        }
        if begun.elapsed() <= SPIN {
            std::hint::spin_loop();
            return Ok(0);
        }
        self.completions.arm(Notify::Any)?;
        // What came before it was armed raises no event.
        let n = self.completions.poll(batch)?;
        if n == 0 {
            self.channel.wait(Some(Duration::from_millis(5)))?;
        }
        Ok(n)
    }

    /// What was found by the request with this place for its answer. Relaxed:
    /// taking the completion orders it, see `CompletionQueue::poll`.
    fn word(&self, slot: usize) -> u64 {
        self.scratch.words().get(slot).map_or(0, |word| word.load(Ordering::Relaxed))
    }
}
