//! Events.

use super::array::{Array, array_handle};
use super::options::WaitOptions;
use super::select::{Cell, Selection, Woken};
use crate::cell::{self, Comparison, Op};
use crate::error::Result;
use crate::layout::Run;
use crate::transport::shm::Place;
use crate::transport::tcp::{Canceller, Pending};
use crate::wire::{UNTIL_SET, WaitRecord};
use std::sync::Arc;
use std::time::Duration;

/// A named array of events, `rows` x `cols`. A handle: cheap to clone, and
/// indexing it is arithmetic.
#[derive(Clone, Debug)]
pub struct EventArray {
    array: Arc<Array>,
}

array_handle!(EventArray, Event, Events, "event");

impl EventArray {
    /// As [`all`](Self::all)`().snapshot()`.
    ///
    /// # Errors
    /// As [`Events::snapshot`].
    pub fn snapshot(&self) -> Result<Vec<bool>> {
        self.all().snapshot()
    }

    /// As [`all`](Self::all)`().set_all()`.
    ///
    /// # Errors
    /// As [`Events::set_all`].
    pub fn set_all(&self) -> Result<usize> {
        self.all().set_all()
    }

    /// As [`all`](Self::all)`().clear_all()`.
    ///
    /// # Errors
    /// As [`Events::clear_all`].
    pub fn clear_all(&self) -> Result<usize> {
        self.all().clear_all()
    }
}

/// One event. It behaves as Python's `threading.Event`, across machines, and
/// loses nothing: it counts its transitions, so a set that was cleared at once
/// still ends every wait that was there.
///
/// What a thread did before `set` is visible to whoever has seen the event
/// set (release and acquire).
#[derive(Clone, Debug)]
pub struct Event {
    pub(super) place: Place,
    pub(super) array: Arc<Array>,
    row: usize,
    col: usize,
}

impl Event {
    fn new(array: &Arc<Array>, offset: u32, row: usize, col: usize) -> Event {
        Event { place: Place::new(array.slot, offset), array: array.clone(), row, col }
    }

    #[inline(always)]
    fn execute(&self, op: Op) -> Result<u64> {
        self.array.execute_at(&self.place, op, 0, 0)
    }

    /// Sets it and wakes all who wait. `false`: it was set before, and nothing
    /// changed. One round trip.
    ///
    /// # Errors
    /// [`Error::ReadOnly`](crate::Error::ReadOnly),
    /// [`Error::ArrayRemoved`](crate::Error::ArrayRemoved),
    /// [`Error::Unreachable`](crate::Error::Unreachable) or
    /// [`Error::OutcomeUnknown`](crate::Error::OutcomeUnknown) when the server
    /// stays away, [`Error::ServerGoingAway`](crate::Error::ServerGoingAway).
    #[inline]
    pub fn set(&self) -> Result<bool> {
        Ok(!cell::event_is_set(self.execute(Op::Set)?))
    }

    /// Clears it. `false`: it was clear before, and nothing changed. One round
    /// trip.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    #[inline]
    pub fn clear(&self) -> Result<bool> {
        Ok(cell::event_is_set(self.execute(Op::Clear)?))
    }

    /// Whether it is set. One round trip.
    ///
    /// # Errors
    /// As [`set`](Self::set), but never that the outcome is unknown.
    #[inline]
    pub fn is_set(&self) -> Result<bool> {
        Ok(cell::event_is_set(self.execute(Op::Load)?))
    }

    /// Clears it if it is set, and says whether it was: `true` for exactly one
    /// of all who take the same set. One round trip.
    ///
    /// # Errors
    /// As [`set`](Self::set). Unlike set and clear it is never done twice, so
    /// when the server dies under it the outcome is unknown.
    #[inline]
    pub fn take(&self) -> Result<bool> {
        Ok(cell::event_is_set(self.execute(Op::Take)?))
    }

    /// How many transitions it has made: odd means set, and half of it, rounded
    /// up, is how often it was set. One round trip.
    ///
    /// # Errors
    /// As [`is_set`](Self::is_set).
    #[inline]
    pub fn transitions(&self) -> Result<u64> {
        Ok(cell::value(self.execute(Op::Load)?) as u64)
    }

    /// Sleeps until it is set; returns at once if it is. Also returns if it
    /// was set and cleared again meanwhile.
    ///
    /// # Errors
    /// As [`is_set`](Self::is_set).
    pub fn wait(&self) -> Result<()> {
        let mut seen = None;
        // Any transition will do, behind a look at which it was clear.
        let comes = |word| {
            let value = cell::value(word);
            cell::event_is_set(word) || *seen.get_or_insert(value) != value
        };
        if self.array.spin(&self.place, comes).is_some() {
            return Ok(());
        }
        self.wait_with(None, None).map(drop)
    }

    /// As [`wait`](Self::wait), for this long at most. `false`: the time was
    /// over. With a time of 0 it says whether the event is set. While the
    /// connection is lost, or the server is slow to answer, the time may be over
    /// with the event set.
    ///
    /// # Errors
    /// As [`is_set`](Self::is_set).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        self.wait_with(Some(timeout), None)
    }

    /// As [`wait`](Self::wait), with a time and a way to cancel, both optional.
    /// `false`: the time was over.
    ///
    /// # Errors
    /// As [`is_set`](Self::is_set), and
    /// [`Error::Cancelled`](crate::Error::Cancelled).
    pub fn wait_with(&self, timeout: Option<Duration>, cancel: Option<&Canceller>) -> Result<bool> {
        self.wait_with_options(&WaitOptions::of(timeout, cancel))
    }

    /// Sleeps until the transition count is another one than `seen`, and
    /// returns it; returns at once if it is. Who starts with
    /// [`transitions`](Self::transitions) and goes on with what this returns
    /// can count every set.
    ///
    /// # Errors
    /// As [`is_set`](Self::is_set).
    pub fn wait_after(&self, seen: u64) -> Result<u64> {
        let comes = |word| cell::value(word) as u64 != seen;
        if let Some(word) = self.array.spin(&self.place, comes) {
            return Ok(cell::value(word) as u64);
        }
        loop {
            if let Some(now) = self.wait_after_with(seen, None, None)? {
                return Ok(now);
            }
        }
    }

    /// As [`wait_after`](Self::wait_after), with a time and a way to cancel.
    /// `None`: the time was over.
    ///
    /// # Errors
    /// As [`wait_with`](Self::wait_with).
    pub fn wait_after_with(
        &self,
        seen: u64,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Option<u64>> {
        let word =
            self.wait_for(Comparison::Ne as u8, seen as i64, &WaitOptions::of(timeout, cancel))?;
        Ok(word.map(|word| cell::value(word) as u64))
    }

    /// As [`wait`](Self::wait), with options, which can name peers. `false`: the
    /// time was over.
    ///
    /// # Errors
    /// As [`wait_with`](Self::wait_with), and
    /// [`Error::PeerLost`](crate::Error::PeerLost).
    pub fn wait_with_options(&self, options: &WaitOptions) -> Result<bool> {
        self.wait_for(UNTIL_SET, 0, options).map(|word| word.is_some())
    }

    /// Waits without a thread: `then` is called once it is set, on a thread of
    /// the client's that must not be kept for long. There is one such thread
    /// for all waits of a client.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); `then` gets those that come later, and
    /// [`Error::Cancelled`](crate::Error::Cancelled) after
    /// [`Pending::cancel`].
    pub fn wait_then(&self, then: impl FnOnce(Result<()>) + Send + 'static) -> Result<Pending> {
        let record = self.wait_record(UNTIL_SET, 0);
        let (row, col) = (self.row, self.col);
        let ended = |woken: Result<Woken>| then(woken.map(drop));
        self.array.wait_then(1, &[record], None, move |_| (row, col), ended)
    }

    /// As [`wait_after`](Self::wait_after), without a thread: `then` is called
    /// with the transition count, as by [`wait_then`](Self::wait_then).
    ///
    /// # Errors
    /// As [`wait_then`](Self::wait_then).
    pub fn wait_after_then(
        &self,
        seen: u64,
        then: impl FnOnce(Result<u64>) + Send + 'static,
    ) -> Result<Pending> {
        let record = self.wait_record(Comparison::Ne as u8, seen as i64);
        let (row, col) = (self.row, self.col);
        // One cell was waited for, so there is one.
        let ended = move |woken: Result<Woken>| {
            then(woken.map(|woken| woken.cells().first().map_or(seen, Cell::transitions)));
        };
        self.array.wait_then(1, &[record], None, move |_| (row, col), ended)
    }

    fn wait_record(&self, comparison: u8, value: i64) -> WaitRecord {
        let run = Run::one(self.place.offset()).into();
        WaitRecord { array: self.array.number, comparison, reserved: 0, run, value }
    }

    fn wait_for(&self, comparison: u8, value: i64, options: &WaitOptions) -> Result<Option<u64>> {
        let record = self.wait_record(comparison, value);
        self.array.wait_one(&self.place, record, options)
    }
}

/// Some events of an array. What is done with them is one request, however
/// many they are (up to 131,072; more are sent in parts, all at once).
#[derive(Clone, Debug)]
pub struct Events(Selection);

impl Events {
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

    /// Row and column of the event with this index in the selection.
    ///
    /// # Panics
    /// The index is [`len`](Self::len) or more.
    #[must_use]
    pub fn cell(&self, index: usize) -> (usize, usize) {
        assert!(index < self.len(), "index {index} of {} events", self.len());
        self.0.cell(index)
    }

    /// Which of them are set, in their order. Each is read atomically, all of
    /// them not at one instant.
    ///
    /// # Errors
    /// As [`Event::is_set`].
    pub fn snapshot(&self) -> Result<Vec<bool>> {
        Ok(self.0.execute(Op::Load)?.into_iter().map(cell::event_is_set).collect())
    }

    /// The transition count of each, in their order.
    ///
    /// # Errors
    /// As [`Event::is_set`].
    pub fn transitions(&self) -> Result<Vec<u64>> {
        Ok(self.0.execute(Op::Load)?.into_iter().map(|w| cell::value(w) as u64).collect())
    }

    /// How many waits are parked on each, in their order.
    ///
    /// # Errors
    /// As [`Event::is_set`].
    pub fn waiters(&self) -> Result<Vec<usize>> {
        Ok(self.0.execute(Op::Waiters)?.into_iter().map(|n| n as usize).collect())
    }

    /// Sets all of them, and says how many were clear before.
    ///
    /// # Errors
    /// As [`Event::set`].
    pub fn set_all(&self) -> Result<usize> {
        let before = self.0.execute(Op::Set)?;
        Ok(before.into_iter().filter(|&w| !cell::event_is_set(w)).count())
    }

    /// Clears all of them, and says how many were set before.
    ///
    /// # Errors
    /// As [`Event::set`].
    pub fn clear_all(&self) -> Result<usize> {
        let before = self.0.execute(Op::Clear)?;
        Ok(before.into_iter().filter(|&w| cell::event_is_set(w)).count())
    }

    /// Sleeps until one of them is set. The answer names all that were by
    /// then. Without a time it waits for ever.
    ///
    /// # Errors
    /// As [`Event::wait`].
    pub fn wait_any(&self, timeout: Option<Duration>) -> Result<Woken> {
        self.wait_with(1, timeout, None)
    }

    /// Sleeps until each of them has been set since the call, or was before;
    /// they need not be set at one instant.
    ///
    /// # Errors
    /// As [`Event::wait`].
    pub fn wait_all(&self, timeout: Option<Duration>) -> Result<Woken> {
        self.wait_with(self.len(), timeout, None)
    }

    /// Sleeps until at least `need` of them are set.
    ///
    /// # Errors
    /// As [`Event::wait`]; [`Error::BadSelection`](crate::Error::BadSelection)
    /// when `need` is 0 or more than there are, or they are more than 40,960.
    pub fn wait_some(&self, need: usize, timeout: Option<Duration>) -> Result<Woken> {
        self.wait_with(need, timeout, None)
    }

    /// As [`wait_some`](Self::wait_some), with a way to cancel.
    ///
    /// # Errors
    /// As [`wait_some`](Self::wait_some), and
    /// [`Error::Cancelled`](crate::Error::Cancelled).
    pub fn wait_with(
        &self,
        need: usize,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Woken> {
        self.wait_with_options(need, &WaitOptions::of(timeout, cancel))
    }

    /// As [`wait_some`](Self::wait_some), with options, which can name peers.
    ///
    /// # Errors
    /// As [`wait_with`](Self::wait_with), and
    /// [`Error::PeerLost`](crate::Error::PeerLost).
    pub fn wait_with_options(&self, need: usize, options: &WaitOptions) -> Result<Woken> {
        self.0.wait_set(need, options)
    }

    /// As [`wait_some`](Self::wait_some) without a time, but `then` is called
    /// with the answer, as by [`Event::wait_then`].
    ///
    /// # Errors
    /// As [`Event::wait_then`].
    pub fn wait_then(
        &self,
        need: usize,
        then: impl FnOnce(Result<Woken>) + Send + 'static,
    ) -> Result<Pending> {
        self.0.wait_then(need, UNTIL_SET, 0, then)
    }

    /// Sleeps until at least `need` of them have another transition count than
    /// the one in `seen`.
    ///
    /// # Errors
    /// As [`wait_with`](Self::wait_with).
    pub fn wait_after(
        &self,
        need: usize,
        seen: &[u64],
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Woken> {
        let seen: Vec<i64> = seen.iter().map(|&v| v as i64).collect();
        self.0.wait_changed(need, &seen, &WaitOptions::of(timeout, cancel))
    }
}
