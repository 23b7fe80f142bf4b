//! Counters.

use super::array::{Array, array_handle};
use super::options::WaitOptions;
use super::select::{Cell, Selection, Woken};
use crate::cell::{self, Comparison, Condition, Op, pack};
use crate::error::{Error, Result};
use crate::layout::Run;
use crate::transport::shm::Place;
use crate::transport::tcp::{Canceller, Pending};
use crate::wire::WaitRecord;
use std::sync::Arc;
use std::time::Duration;

/// A named array of counters, `rows` x `cols`. A handle: cheap to clone, and
/// indexing it is arithmetic.
#[derive(Clone, Debug)]
pub struct CounterArray {
    array: Arc<Array>,
}

array_handle!(CounterArray, Counter, Counters, "counter");

/// One counter: a signed number of 63 bits, -2^62 to 2^62 - 1. Adding wraps;
/// an operand that does not fit is an error and never cut. All operations are
/// one round trip, and acquire and release.
#[derive(Clone, Debug)]
pub struct Counter {
    pub(super) place: Place,
    pub(super) array: Arc<Array>,
    row: usize,
    col: usize,
}

impl Counter {
    fn new(array: &Arc<Array>, offset: u32, row: usize, col: usize) -> Counter {
        Counter { place: Place::new(array.slot, offset), array: array.clone(), row, col }
    }

    #[inline(always)]
    fn execute(&self, op: Op, a: i64, b: i64) -> Result<i64> {
        fits(a)?;
        fits(b)?;
        Ok(cell::value(self.array.execute_at(&self.place, op, a, b)?))
    }

    /// Its value.
    ///
    /// # Errors
    /// As [`Event::is_set`](crate::Event::is_set).
    #[inline]
    pub fn load(&self) -> Result<i64> {
        self.execute(Op::Load, 0, 0)
    }

    /// Puts a value. Safe to repeat, so a restarted server gets it too.
    ///
    /// # Errors
    /// As [`Event::set`](crate::Event::set); [`Error::ValueTooLarge`].
    #[inline]
    pub fn store(&self, value: i64) -> Result<()> {
        self.execute(Op::Store, value, 0).map(drop)
    }

    /// Adds, wrapping in 63 bits, and returns the value before.
    ///
    /// # Errors
    /// As [`Event::take`](crate::Event::take); [`Error::ValueTooLarge`].
    #[inline]
    pub fn fetch_add(&self, delta: i64) -> Result<i64> {
        self.execute(Op::Add, delta, 0)
    }

    /// Puts `new` if the value is `expected`. The inner result is as that of
    /// `std::sync::atomic`: `Ok` with the value before, or `Err` with the one
    /// that was found instead.
    ///
    /// # Errors
    /// As [`Event::take`](crate::Event::take); [`Error::ValueTooLarge`].
    #[inline]
    pub fn compare_exchange(&self, expected: i64, new: i64) -> Result<Result<i64, i64>> {
        let found = self.execute(Op::CompareExchange, expected, new)?;
        Ok(if found == expected { Ok(found) } else { Err(found) })
    }

    /// Puts a value and returns the one before.
    ///
    /// # Errors
    /// As [`fetch_add`](Self::fetch_add).
    #[inline]
    pub fn swap(&self, value: i64) -> Result<i64> {
        self.execute(Op::Swap, value, 0)
    }

    /// Bitwise and; returns the value before.
    ///
    /// # Errors
    /// As [`fetch_add`](Self::fetch_add).
    #[inline]
    pub fn fetch_and(&self, mask: i64) -> Result<i64> {
        self.execute(Op::And, mask, 0)
    }

    /// Bitwise or; returns the value before.
    ///
    /// # Errors
    /// As [`fetch_add`](Self::fetch_add).
    #[inline]
    pub fn fetch_or(&self, mask: i64) -> Result<i64> {
        self.execute(Op::Or, mask, 0)
    }

    /// Bitwise exclusive or; returns the value before.
    ///
    /// # Errors
    /// As [`fetch_add`](Self::fetch_add).
    #[inline]
    pub fn fetch_xor(&self, mask: i64) -> Result<i64> {
        self.execute(Op::Xor, mask, 0)
    }

    /// Sleeps until its value compares to `value` like this, and returns the
    /// value that did; returns at once if it does. `None`: the time was over.
    /// Without a time it waits for ever.
    ///
    /// # Errors
    /// As [`Event::wait_with`](crate::Event::wait_with);
    /// [`Error::ValueTooLarge`].
    pub fn wait_until(
        &self,
        comparison: Comparison,
        value: i64,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Option<i64>> {
        fits(value)?;
        let condition = Condition { comparison, value };
        if timeout.is_none()
            && cancel.is_none()
            && let Some(word) = self.array.spin(&self.place, |word| condition.holds(word))
        {
            return Ok(Some(cell::value(word)));
        }
        self.wait_until_with_options(comparison, value, &WaitOptions::of(timeout, cancel))
    }

    /// As [`wait_until`](Self::wait_until), with options, which can name peers.
    ///
    /// # Errors
    /// As [`wait_until`](Self::wait_until), and
    /// [`Error::PeerLost`](crate::Error::PeerLost).
    pub fn wait_until_with_options(
        &self,
        comparison: Comparison,
        value: i64,
        options: &WaitOptions,
    ) -> Result<Option<i64>> {
        let record = self.wait_record(comparison, value)?;
        let word = self.array.wait_one(&self.place, record, options)?;
        Ok(word.map(cell::value))
    }

    /// As [`wait_until`](Self::wait_until) without a time and without a thread:
    /// `then` is called with the value, as by
    /// [`Event::wait_then`](crate::Event::wait_then).
    ///
    /// # Errors
    /// As [`Event::wait_then`](crate::Event::wait_then);
    /// [`Error::ValueTooLarge`].
    pub fn wait_until_then(
        &self,
        comparison: Comparison,
        value: i64,
        then: impl FnOnce(Result<i64>) + Send + 'static,
    ) -> Result<Pending> {
        let record = self.wait_record(comparison, value)?;
        let (row, col) = (self.row, self.col);
        // One cell was waited for, so there is one.
        let ended = |woken: Result<Woken>| {
            then(woken.map(|woken| woken.cells().first().map_or(0, Cell::value)));
        };
        self.array.wait_then(1, &[record], None, move |_| (row, col), ended)
    }

    fn wait_record(&self, comparison: Comparison, value: i64) -> Result<WaitRecord> {
        fits(value)?;
        let run = Run::one(self.place.offset()).into();
        let array = self.array.number;
        Ok(WaitRecord { array, comparison: comparison as u8, reserved: 0, run, value })
    }
}

/// Some counters of an array. What is done with them is one request.
#[derive(Clone, Debug)]
pub struct Counters(Selection);

impl Counters {
    /// How many they are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none. There always are some.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their values, in their order. Each is read atomically, all of them not
    /// at one instant.
    ///
    /// # Errors
    /// As [`Counter::load`].
    pub fn snapshot(&self) -> Result<Vec<i64>> {
        Ok(self.0.execute(Op::Load)?.into_iter().map(cell::value).collect())
    }

    /// How many waits are parked on each, in their order.
    ///
    /// # Errors
    /// As [`Counter::load`].
    pub fn waiters(&self) -> Result<Vec<usize>> {
        Ok(self.0.execute(Op::Waiters)?.into_iter().map(|n| n as usize).collect())
    }

    /// Sleeps until at least `need` of them compare to `value` like this.
    ///
    /// # Errors
    /// As [`Counter::wait_until`]; [`Error::BadSelection`] when `need` is 0 or
    /// more than there are, or they are more than 40,960.
    pub fn wait_some(
        &self,
        need: usize,
        comparison: Comparison,
        value: i64,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Woken> {
        fits(value)?;
        self.0.wait(need, comparison as u8, value, &WaitOptions::of(timeout, cancel))
    }

    /// As [`wait_some`](Self::wait_some) without a time and without a thread:
    /// `then` is called with the answer, as by
    /// [`Event::wait_then`](crate::Event::wait_then).
    ///
    /// # Errors
    /// As [`wait_some`](Self::wait_some); `then` gets those that come later.
    pub fn wait_some_then(
        &self,
        need: usize,
        comparison: Comparison,
        value: i64,
        then: impl FnOnce(Result<Woken>) + Send + 'static,
    ) -> Result<Pending> {
        fits(value)?;
        self.0.wait_then(need, comparison as u8, value, then)
    }
}

/// Refuses what does not fit 63 bits.
#[inline]
pub(super) fn fits(value: i64) -> Result<()> {
    match pack(value) {
        Some(_) => Ok(()),
        None => Err(Error::ValueTooLarge { value }),
    }
}
