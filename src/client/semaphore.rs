//! Semaphores.

use super::array::{Array, array_handle};
use crate::cell::{self, Op, is_waiting, sync};
use crate::error::{Error, Result};
use crate::transport::tcp::{Canceller, Patience};
use crate::wire::AcquireRecord;
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
/// taker has died does not come back by itself. Where that matters, use a
/// [`Lock`](crate::Lock).
#[derive(Clone, Debug)]
pub struct Semaphore {
    array: Arc<Array>,
    offset: u32,
    row: usize,
    col: usize,
}

impl Semaphore {
    /// Takes a permit, or sleeps until it can. If there is one and nobody
    /// queues that is one round trip, over RDMA one atomic.
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
        let word = self.array.execute(Op::Down, self.offset, 0, 0)?;
        if cell::value(word) > 0 && !is_waiting(word) {
            return Ok(true);
        }
        if timeout.is_some_and(|time| time.is_zero()) {
            return Ok(false);
        }
        let link = &self.array.client.core.link;
        let (array, offset) = (self.array.number, self.offset);
        let record = AcquireRecord { array, offset, ..AcquireRecord::default() };
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        let got = link
            .queue(record, &Patience { timeout: left, cancel, bound: false })
            .map_err(|f| self.array.explain(f, "acquire"))?;
        // At once: the server gives a permit back of which it has not heard that
        // it arrived when the session ends.
        link.tell_done();
        Ok(got.is_some())
    }

    /// Gives a permit back. One round trip, over RDMA one atomic.
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
