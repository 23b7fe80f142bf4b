//! Semaphores.

mod later;

use super::array::{Array, array_handle};
use crate::cell::{self, Op, is_waiting, sync};
use crate::error::{Error, Result};
use crate::transport::tcp::{Canceller, Grant, Patience};
use crate::transport::{CellOp, Failure, Transport};
use crate::wire::{AcquireRecord, Refusal};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A named array of semaphores, `rows` x `cols`, all with the same bound. A
/// handle: cheap to clone, and indexing it is arithmetic.
#[derive(Clone, Debug)]
pub struct SemaphoreArray {
    array: Arc<Array>,
}

array_handle!(SemaphoreArray, Semaphore, "semaphore");

/// One semaphore: a number of permits, with a bound. Those who queue for one get
/// it in the order in which they came to the server.
///
/// Permits belong to nobody: whoever likes can give one back, and one whose
/// taker has died does not come back by itself; nor does one that the server had
/// handed out to one who queued when it was killed, and that had not arrived.
/// Where that matters, use a [`Lock`](crate::Lock).
#[derive(Clone, Debug)]
pub struct Semaphore {
    array: Arc<Array>,
    offset: u32,
    row: usize,
    col: usize,
}

impl Semaphore {
    fn new(array: &Arc<Array>, offset: u32, row: usize, col: usize) -> Semaphore {
        Semaphore { array: array.clone(), offset, row, col }
    }

    /// Takes a permit, or sleeps until it can. If there is one and nobody
    /// queues that is one round trip, over RDMA and in shared memory one atomic;
    /// one that was queued for is confirmed by a round trip more.
    ///
    /// # Errors
    /// As [`Event::take`](crate::Event::take); [`Error::Limit`] when the session
    /// queues as often as it may.
    pub fn acquire(&self) -> Result<()> {
        while !self.acquire_with(None, None)? {}
        Ok(())
    }

    /// Takes a permit if there is one and nobody queues. One round trip.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn try_acquire(&self) -> Result<bool> {
        self.acquire_with(Some(Duration::ZERO), None)
    }

    /// As [`acquire`](Self::acquire), for this long at most. `false`: the time
    /// was over.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_timeout(&self, timeout: Duration) -> Result<bool> {
        self.acquire_with(Some(timeout), None)
    }

    /// As [`acquire`](Self::acquire), with a time and a way to cancel, both
    /// optional. `false`: the time was over.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), and [`Error::Cancelled`].
    pub fn acquire_with(
        &self,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<bool> {
        if cancel.is_some_and(Canceller::is_cancelled) {
            return Err(Error::Cancelled);
        }
        let deadline = timeout.and_then(|time| Instant::now().checked_add(time));
        let link = &self.array.client.core.link;
        let at_once = timeout.is_some_and(|time| time.is_zero());
        // Without a connection it would wait for one, whatever the time.
        if at_once || timeout.is_none() || link.is_connected() {
            let word = self.array.execute(Op::Down, self.offset, 0, 0)?;
            if cell::value(word) > 0 && !is_waiting(word) {
                return Ok(true);
            }
        }
        if at_once {
            return Ok(false);
        }
        loop {
            let (array, offset, seat) = (self.array.number, self.offset, link.welcome().seat);
            if seat == 0 {
                let what = "the server has more sessions than can queue".to_owned();
                return Err(Error::Limit { addr: link.addr(), what });
            }
            let record = AcquireRecord { array, offset, seat, ..AcquireRecord::default() };
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            match link.queue(record, &Patience { timeout: left, cancel, bound: None }) {
                Ok(Some(grant)) => return self.arrived(&grant).map(|()| true),
                Ok(None) => return Ok(false),
                // The session is another one since: once more, with its seat.
                Err(Failure::Refused(Refusal::StaleSeat, _)) => {}
                Err(failure) => return Err(self.array.explain(failure, "acquire")),
            }
        }
    }

    /// A permit that was queued for has come.
    fn arrived(&self, grant: &Grant) -> Result<()> {
        // It was written down as if it were a lock.
        let token = sync::Lock::of(grant.word).taken(grant.seat, true).token;
        self.array.client.core.link.let_go(self.array.number, self.offset, token);
        // Another session may have come while we queued.
        self.confirm(grant.session)
    }

    /// Tells the server that a permit has arrived, and makes sure that it has
    /// heard it: one that never arrived is given back when the session ends, and
    /// the answer may have lain here for longer than that.
    fn confirm(&self, session: u64) -> Result<()> {
        let link = &self.array.client.core.link;
        link.tell_done();
        let op = CellOp { op: Op::Load, array: self.array.number, offset: self.offset, a: 0, b: 0 };
        Transport::execute(&**link, op).map_err(|f| self.array.explain(f, "acquire"))?;
        if link.welcome().session == session {
            return Ok(());
        }
        let why = "our lease was over when the permit came".to_owned();
        Err(Error::OutcomeUnknown { addr: link.addr(), op: "acquire", why })
    }

    /// Gives a permit back. One round trip, over RDMA and in shared memory one
    /// atomic.
    ///
    /// # Errors
    /// [`Error::TooManyPermits`] if none is missing; as
    /// [`acquire`](Self::acquire).
    pub fn release(&self) -> Result<()> {
        self.release_many(1)
    }

    /// Gives this many permits back at once.
    ///
    /// # Errors
    /// As [`release`](Self::release): then none was given back.
    pub fn release_many(&self, count: u32) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let bound = u64::from(self.bound());
        let word =
            self.array.execute(Op::Up, self.offset, i64::from(count), i64::from(self.bound()))?;
        if cell::value(word) as u64 + u64::from(count) <= bound {
            return Ok(());
        }
        let (name, row, col) = (self.array.name.clone(), self.row, self.col);
        Err(Error::TooManyPermits { name, row, col, count, bound: self.bound() })
    }

    /// How many permits can be had now. One round trip.
    ///
    /// # Errors
    /// As [`Event::is_set`](crate::Event::is_set).
    pub fn available(&self) -> Result<u32> {
        let word = self.array.execute(Op::Load, self.offset, 0, 0)?;
        Ok(u32::try_from(cell::value(word)).unwrap_or(0))
    }

    /// How many there are.
    #[must_use]
    pub fn bound(&self) -> u32 {
        sync::permits(self.array.form.param).1 as u32
    }
}
