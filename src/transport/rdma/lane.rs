//! One queue pair of a client: posting requests, and waiting for their end.

use crate::verbs::{
    Completion, CompletionChannel, CompletionQueue, Error, Local, Notify, QueuePair, Region,
    Request, WorkId,
};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Requests that are posted with one call.
const LIST: usize = 16;
/// Lists that are under way together.
const LISTS: usize = 7;
/// Requests that are under way together, a few less than fit.
pub(super) const PIPELINE: usize = LIST * LISTS;
/// A sleeper looks at its patience this often.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How often a completion is looked for before anyone else may have the core.
const LOOKS: u32 = 32;
/// How long a completion is looked for without sleeping.
const SPIN: Duration = Duration::from_micros(200);

/// An operation did not come to a good end, and the rails are of no use any
/// more.
#[derive(Debug)]
pub(super) struct Trouble {
    /// What happened.
    pub why: String,
    /// It is certain that the cell was not changed.
    pub undone: bool,
}

impl Trouble {
    pub(super) fn unclear(error: &Error) -> Trouble {
        Trouble { why: error.to_string(), undone: false }
    }

    pub(super) fn before(error: &Error) -> Trouble {
        Trouble { why: error.to_string(), undone: true }
    }

    /// It was in a READ, before the operation changed anything.
    pub(super) fn in_read(self) -> Trouble {
        Trouble { undone: true, ..self }
    }
}
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) queue: Arc<QueuePair>,
    pub(super) completions: Arc<CompletionQueue>,
    pub(super) channel: Arc<CompletionChannel>,
    pub(super) buffer: Arc<Region>,
    /// What messages go through that are not in registered memory.
    pub(super) staging: OnceLock<Arc<Region>>,
    /// One of the lanes is of no use any more, and so none is used.
    pub(super) broken: Arc<AtomicBool>,
    /// After this long the adapter has missed its own time to give up.
    pub(super) patience: Duration,
}

impl Lane {
    #[inline]
    pub(super) fn word(&self, index: usize) -> Result<Local<'_>, Trouble> {
        self.buffer.slice(index * 8..index * 8 + 8).map_err(|e| Trouble::before(&e))
    }

    /// Relaxed: taking a request's completion orders what it wrote, see
    /// `CompletionQueue::poll`.
    #[inline]
    pub(super) fn value(&self, index: usize) -> u64 {
        self.buffer.words().get(index).map_or(0, |w| w.load(Ordering::Relaxed))
    }

    /// Posts one request and waits for it.
    #[inline]
    pub(super) fn run(&self, request: Request<'_>) -> Result<(), Trouble> {
        self.attempt(|| {
            let id = self.queue.post(request).map_err(|e| match e {
                Error::Unclear { .. } => Trouble::unclear(&e),
                _ => Trouble::before(&e),
            })?;
            // An adapter answers in a microsecond or two, and soft-RoCE mostly
            // within the call that posts.
            let mut one = [Completion::default()];
            for _ in 0..LOOKS {
                if self.completions.poll(&mut one).map_err(|e| Trouble::unclear(&e))? > 0 {
                    self.retire(&one[0], true)?;
                    if one[0].work() == Some(id) {
                        return Ok(());
                    }
                }
            }
            self.finish(id, true)
        })
    }

    /// Takes note of a completion. `alone`: see [`finish`](Self::finish).
    #[inline]
    fn retire(&self, completion: &Completion, alone: bool) -> Result<(), Trouble> {
        self.queue.retire(completion).map_err(|e| Trouble {
            undone: completion.status().was_refused() && alone,
            why: e.to_string(),
        })
    }

    /// Posts requests, all within the depth, and waits for the last of them,
    /// which is the last to complete and stands for all.
    pub(super) fn run_all(&self, requests: &mut [Request<'_>]) -> Result<(), Trouble> {
        self.attempt(|| {
            match self.post_list(requests, &mut Vec::with_capacity(requests.len()))? {
                Some(last) => self.finish(last, requests.len() == 1),
                None => Ok(()),
            }
        })
    }

    #[inline]
    pub(super) fn attempt(
        &self,
        work: impl FnOnce() -> Result<(), Trouble>,
    ) -> Result<(), Trouble> {
        let result = self.check().and_then(|()| work());
        if result.is_err() {
            // Relaxed, wherever it is used: a hint, which saves others from
            // sending what cannot arrive.
            self.broken.store(true, Ordering::Relaxed);
        }
        result
    }

    /// Whether a request that is posted now has a chance.
    #[inline]
    pub(super) fn check(&self) -> Result<(), Trouble> {
        // Relaxed: see `attempt`.
        if self.broken.load(Ordering::Relaxed) {
            let why = "it broke under another operation".to_owned();
            return Err(Trouble { why, undone: true });
        }
        Ok(())
    }

    /// Posts requests, of which only the last will have a completion.
    pub(super) fn post_list(
        &self,
        requests: &mut [Request<'_>],
        posted: &mut Vec<WorkId>,
    ) -> Result<Option<WorkId>, Trouble> {
        let before_last = requests.len().saturating_sub(1);
        for request in &mut requests[..before_last] {
            *request = request.unsignalled();
        }
        posted.clear();
        self.queue.post_all(requests, posted).map_err(|e| match e {
            Error::Unclear { .. } => Trouble::unclear(&e),
            _ if posted.is_empty() => Trouble::before(&e),
            _ => Trouble::unclear(&e),
        })?;
        Ok(posted.last().copied())
    }

    /// Waits for the completion of the one signalled request that is under way.
    /// `alone`: a refusal can only be its own.
    #[cold]
    pub(super) fn finish(&self, id: WorkId, alone: bool) -> Result<(), Trouble> {
        let mut done = false;
        while !done {
            self.completed(alone, |work| done |= work == id)?;
        }
        Ok(())
    }

    /// Waits until something has completed, and tells what. Completions come in
    /// the order of the requests.
    pub(super) fn completed(
        &self,
        alone: bool,
        mut tell: impl FnMut(WorkId),
    ) -> Result<(), Trouble> {
        let mut batch = [Completion::default(); 4];
        let (mut looked, mut begun, mut armed) = (0, None, false);
        loop {
            let n = self.completions.poll(&mut batch).map_err(|e| Trouble::unclear(&e))?;
            for completion in &batch[..n] {
                self.retire(completion, alone)?;
                if let Some(work) = completion.work() {
                    tell(work);
                }
            }
            if n > 0 {
                return Ok(());
            }
            // An adapter answers in a microsecond or two: a system call or a look
            // at the clock would come between.
            looked += 1;
            if looked < LOOKS {
                continue;
            }
            let waited = begun.get_or_insert_with(Instant::now).elapsed();
            if waited < SPIN {
                // soft-RoCE works on this very core.
                std::thread::yield_now();
            } else if waited > self.patience {
                let why = format!("no answer and no error for {:.1} s", waited.as_secs_f64());
                return Err(Trouble { why, undone: false });
            } else if !armed {
                // What has come by now raises no event: look once more.
                self.completions.arm(Notify::Any).map_err(|e| Trouble::unclear(&e))?;
                armed = true;
            } else {
                self.channel.wait(Some(LOOK_AGAIN)).map_err(|e| Trouble::unclear(&e))?;
                armed = false;
            }
        }
    }

    /// Carries out `count` requests in their order, with as many under way as
    /// there can be: when the oldest list of them is done, another one goes.
    /// `make` is told the request's number and where its answer goes; `done`
    /// gets number and answer of each that is done, in order.
    pub(super) fn stream<'a>(
        &'a self,
        count: usize,
        make: impl Fn(usize, Local<'a>) -> Request<'a>,
        done: impl FnMut(usize, u64),
    ) -> Result<(), Trouble> {
        self.attempt(|| self.stream_lists(count, make, done))
    }

    pub(super) fn stream_lists<'a>(
        &'a self,
        count: usize,
        make: impl Fn(usize, Local<'a>) -> Request<'a>,
        mut done: impl FnMut(usize, u64),
    ) -> Result<(), Trouble> {
        let mut requests = Vec::with_capacity(LIST);
        let mut posted = Vec::with_capacity(LIST);
        // Lists under way: the last request of each, and its numbers.
        let mut lists: VecDeque<(WorkId, Range<usize>)> = VecDeque::with_capacity(LISTS);
        let mut next = 0;
        loop {
            while next < count && lists.len() < LISTS {
                let end = count.min(next + LIST);
                requests.clear();
                for i in next..end {
                    requests.push(make(i, self.word(i % PIPELINE)?));
                }
                let last = self.post_list(&mut requests, &mut posted).map_err(|trouble| {
                    // Others may be done by now.
                    Trouble { undone: trouble.undone && lists.is_empty(), ..trouble }
                })?;
                lists.extend(last.map(|last| (last, next..end)));
                next = end;
            }
            if lists.is_empty() {
                return Ok(());
            }
            let mut ended = 0;
            let completed = self.completed(false, |work| {
                if let Some(at) = lists.iter().position(|(last, _)| *last == work) {
                    ended = ended.max(at + 1);
                }
            });
            for (_, numbers) in lists.drain(..ended) {
                for i in numbers {
                    done(i, self.value(i % PIPELINE));
                }
            }
            completed?;
        }
    }
}
