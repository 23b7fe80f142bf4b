//! Waits on one cell in memory.

use super::map::Window;
use super::protocol::{self, Ground, LONGEST_SLEEP, Waited as Ended};
use super::{Failure, Shm};
use crate::cell::{Comparison, Condition, event_is_set, is_suspect, value};
use crate::engine::lock;
use crate::error::Error;
use crate::segment::Slept;
use crate::transport::tcp::{Canceller, Cancels};
use crate::wire::WaitRecord;
use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A cell in memory, as the protocol wants it.
pub(super) struct Here<'s> {
    shm: &'s Shm,
    window: &'s Window,
    cell: &'s AtomicU64,
    place: u32,
    until: Option<Instant>,
    /// No sleep without a look is longer.
    longest: Duration,
    epoch: u64,
}

impl<'s> Here<'s> {
    /// The cell with this index. `None`: there is none, or it may only be read.
    pub fn new(shm: &'s Shm, window: &'s Window, place: u32) -> Option<Here<'s>> {
        let cell = window.cell(place).filter(|_| window.writable)?;
        Some(Here { shm, window, cell, place, until: None, longest: LONGEST_SLEEP, epoch: 0 })
    }

    /// The cell itself.
    pub fn word(&self) -> &AtomicU64 {
        self.cell
    }

    /// The same, of the memory that counts so.
    pub fn since(self, epoch: u64) -> Here<'s> {
        Here { epoch, ..self }
    }

    /// Whether what was read before this was in the memory of our session.
    pub fn is_ours(&self) -> bool {
        // Acquire at the least, behind the reading, which acquires too: the
        // number changes before the memory is emptied.
        self.shm.epoch.load(Ordering::Acquire) == self.epoch
    }
}

/// Orderings as `engine::Actor` has them.
impl Ground for Here<'_> {
    fn load(&self) -> u64 {
        self.cell.load(Ordering::Acquire)
    }

    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.cell.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }

    fn fetch_add(&self, delta: u64) -> u64 {
        self.cell.fetch_add(delta, Ordering::AcqRel)
    }

    fn drop_bit(&self) -> u64 {
        self.cell.fetch_and(!crate::cell::WAITING, Ordering::AcqRel)
    }

    fn sleep(&self, word: u64) -> Slept {
        let left = self.until.map(|at| at.saturating_duration_since(Instant::now()));
        self.window.sleep(self.place, word, left.map_or(self.longest, |l| l.min(self.longest)))
    }

    fn wake(&self) {
        self.window.wake(self.place);
    }

    fn is_watched(&self) -> bool {
        self.window.is_watched(self.place)
    }

    fn ring(&self) {
        self.shm.link.ring(self.place);
    }

    fn is_over(&self) -> bool {
        self.window.is_over()
    }
}

/// Those of a client that sleep in memory.
#[derive(Debug, Default)]
pub(super) struct Sleepers {
    next: AtomicU64,
    /// The cell of each, and whether it was called off.
    all: Mutex<HashMap<u64, (u32, bool)>>,
}

impl Sleepers {
    fn enter(&self, place: u32) -> u64 {
        // Relaxed: numbers, no more.
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        lock(&self.all).insert(id, (place, false));
        id
    }

    fn is_cancelled(&self, id: u64) -> bool {
        lock(&self.all).get(&id).is_some_and(|(_, cancelled)| *cancelled)
    }

    /// Wakes all of them, so that they look what has become of the memory.
    pub fn wake_all(&self, window: Option<&Window>) {
        let places: Vec<u32> = lock(&self.all).values().map(|(place, _)| *place).collect();
        for place in places {
            if let Some(window) = window {
                window.wake(place);
            }
        }
    }
}

impl Cancels for Shm {
    fn cancel_wait(&self, id: u64) {
        let place = match lock(&self.sleepers.all).get_mut(&id) {
            Some((place, cancelled)) => {
                *cancelled = true;
                *place
            }
            None => return,
        };
        let window = self.read().window.clone();
        if let Some(here) = window.as_deref().and_then(|w| Here::new(self, w, place)) {
            // Without the bit it does not go to sleep either, if it is about to.
            protocol::leave(&here);
        }
    }
}

/// Why a sleep was broken off.
enum Broken {
    Time,
    Cancelled,
    /// The memory is no longer that of our session.
    Gone,
    /// The connection has been down for too long.
    Unreachable(Error),
}

impl Shm {
    /// Waits for a cell here, or `by_server` where it cannot be.
    pub(super) fn wait_here(
        &self,
        target: WaitRecord,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
        by_server: impl Fn(Option<Duration>) -> Result<Option<u64>, Failure>,
    ) -> Result<Option<u64>, Failure> {
        // Before the window is found, so that a later one has a higher number.
        let epoch = self.epoch.load(Ordering::Acquire);
        let Some((window, place)) = self.here(target.array, target.run.offset) else {
            return by_server(timeout);
        };
        let Some(mut here) = Here::new(self, &window, place) else {
            return by_server(timeout);
        };
        if cancel.is_some_and(Canceller::is_cancelled) {
            return Err(Error::Cancelled.into());
        }
        here = here.since(epoch);
        let word = here.load();
        if is_suspect(word) || !here.is_ours() {
            return by_server(timeout);
        }
        let condition = match target.condition() {
            Ok(Some(condition)) => condition,
            _ if event_is_set(word) => return Ok(Some(word)),
            _ => Condition { comparison: Comparison::Ne, value: value(word) },
        };
        if condition.holds(word) {
            return Ok(Some(word));
        }
        if timeout.is_some_and(|t| t.is_zero()) {
            return Ok(None);
        }
        let begun = match self.spin(&here, condition, timeout) {
            Ok(word) => return Ok(Some(word)),
            Err(begun) => begun,
        };
        // A time beyond all clocks is none.
        here.until = timeout.and_then(|t| begun.checked_add(t));
        if let Some(look) = cancel.and_then(Canceller::look) {
            here.longest = here.longest.min(look.every);
        }
        match self.sleep(&here, &window, condition, begun, cancel) {
            // What was read counts only if the memory was still the server's.
            Ok(word) if here.is_ours() => Ok(Some(word)),
            Err(Broken::Time) => Ok(None),
            Err(Broken::Cancelled) => Err(Error::Cancelled.into()),
            Err(Broken::Unreachable(error)) => Err(error.into()),
            Ok(_) | Err(Broken::Gone) => {
                by_server(timeout.map(|t| t.saturating_sub(begun.elapsed())))
            }
        }
    }

    /// Looks at the cell without sleeping, as long as the client was told to;
    /// when it began to, otherwise.
    fn spin(
        &self,
        here: &Here<'_>,
        condition: Condition,
        timeout: Option<Duration>,
    ) -> Result<u64, Instant> {
        let time = self.link.spin();
        let time = timeout.map_or(time, |t| t.min(time));
        let mut begun = None;
        if time.is_zero() {
            return Err(Instant::now());
        }
        loop {
            for _ in 0..32 {
                let word = here.load();
                if condition.holds(word) && !is_suspect(word) && here.is_ours() {
                    return Ok(word);
                }
                std::hint::spin_loop();
            }
            // The clock only where it takes longer than to read it.
            let begun = *begun.get_or_insert_with(Instant::now);
            if begun.elapsed() >= time {
                return Err(begun);
            }
        }
    }

    fn sleep(
        &self,
        here: &Here<'_>,
        window: &Window,
        condition: Condition,
        begun: Instant,
        cancel: Option<&Canceller>,
    ) -> Result<u64, Broken> {
        let id = self.sleepers.enter(here.place);
        let _entry = cancel.map(|c| c.enter(self.me.clone(), id));
        let _announced = window.announce(here.place);
        let mut why = None;
        let mut asked = begun;
        let ended = protocol::wait(here, condition, || {
            // No sleep is longer than a program wants to be asked.
            if let Some(cancel) = cancel
                && let Some(look) = cancel.look()
                && asked.elapsed() >= look.every
            {
                if (look.stop)() {
                    cancel.cancel();
                }
                asked = Instant::now();
            }
            why = self.broken(here, id, begun, cancel);
            why.is_some()
        });
        lock(&self.sleepers.all).remove(&id);
        match (ended, why) {
            (Ended::Satisfied(word), _) => Ok(word),
            (Ended::Over, Some(why)) => Err(why),
            // The server says whether it is so.
            _ => Err(Broken::Gone),
        }
    }

    fn broken(
        &self,
        here: &Here<'_>,
        id: u64,
        begun: Instant,
        cancel: Option<&Canceller>,
    ) -> Option<Broken> {
        if here.until.is_some_and(|at| Instant::now() >= at) {
            return Some(Broken::Time);
        }
        if cancel.is_some() && self.sleepers.is_cancelled(id)
            || cancel.is_some_and(Canceller::is_cancelled)
        {
            return Some(Broken::Cancelled);
        }
        if !here.is_ours() {
            return Some(Broken::Gone);
        }
        if self.read().up {
            return None;
        }
        // While it is not known what has become of the server: if it lives, the
        // memory is still the right one.
        self.link.given_up_since(begun).map(Broken::Unreachable)
    }
}
