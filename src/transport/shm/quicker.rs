//! Changes where an adapter makes them: by our own queue pairs, or by asking the
//! server, whichever has turned out to be faster.

use crate::cell::Op;
use crate::layout::Run;
use crate::transport::tcp::{Canceller, Link};
use crate::transport::{CellOp, Failure, Transport, Waited};
use crate::wire::WaitRecord;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Changes that go each way before it is decided.
const TRIALS: u32 = 16;

/// Two ways, of which one is found to be quicker by use. See the
/// [module](self).
#[derive(Debug)]
pub(crate) struct Quicker {
    ways: [Arc<dyn Transport>; 2],
    trials: AtomicU32,
    done: AtomicU32,
    /// Nanoseconds of the trials of each way.
    times: [AtomicU64; 2],
}

impl Quicker {
    /// The queue pairs, and the server.
    pub fn new(rdma: Arc<dyn Transport>, link: Arc<Link>) -> Quicker {
        let (trials, done) = (AtomicU32::new(0), AtomicU32::new(0));
        Quicker { ways: [rdma, link], trials, done, times: Default::default() }
    }

    fn times(&self) -> [Duration; 2] {
        // Relaxed: behind the acquire in `decided`, or for people.
        let mean = |sum: &AtomicU64| sum.load(Ordering::Relaxed) / u64::from(TRIALS);
        [&self.times[0], &self.times[1]].map(|sum| Duration::from_nanos(mean(sum)))
    }

    fn decided(&self) -> bool {
        // Acquire: pairs with the release of the last trial.
        self.done.load(Ordering::Acquire) >= 2 * TRIALS
    }

    fn best(&self) -> &dyn Transport {
        let [rdma, server] = self.times();
        &*self.ways[usize::from(self.decided() && server < rdma)]
    }

    /// What was found, in words.
    pub fn report(&self) -> String {
        if !self.decided() {
            return "changes by rdma and by the server in turn, to find the faster way".to_owned();
        }
        let [rdma, server] = self.times();
        let way = if server < rdma { "the server" } else { "rdma" };
        format!("changes by {way}: {rdma:.1?} by rdma, {server:.1?} by the server")
    }
}

impl Transport for Quicker {
    fn execute(&self, op: CellOp) -> Result<u64, Failure> {
        if op.op.is_read() || self.decided() {
            return self.best().execute(op);
        }
        // Relaxed: each trial has a number of its own.
        let trial = self.trials.fetch_add(1, Ordering::Relaxed);
        if trial >= 2 * TRIALS {
            self.trials.store(2 * TRIALS, Ordering::Relaxed);
            return self.ways[0].execute(op);
        }
        let way = (trial % 2) as usize;
        let begun = Instant::now();
        let done = self.ways[way].execute(op);
        let time = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.times[way].fetch_add(time, Ordering::Relaxed);
        self.done.fetch_add(1, Ordering::Release);
        done
    }

    fn execute_all(&self, ops: &[CellOp]) -> Result<Vec<u64>, Failure> {
        self.best().execute_all(ops)
    }

    fn execute_runs(&self, op: Op, array: u16, runs: &[Run]) -> Result<Vec<u64>, Failure> {
        self.best().execute_runs(op, array, runs)
    }

    fn wait(
        &self,
        need: u32,
        targets: &[WaitRecord],
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Waited, Failure> {
        self.ways[0].wait(need, targets, timeout, cancel)
    }
}
