//! Opening locks, barriers and semaphores.

use super::{BarrierArray, Client, LockArray, SemaphoreArray};
use crate::catalog::Kind;
use crate::error::{Error, Result};

impl Client {
    /// Opens an array of locks, or creates it with all of them free.
    ///
    /// # Errors
    /// As [`events`](Self::events).
    pub fn locks(&self, name: &str, rows: usize, cols: usize) -> Result<LockArray> {
        self.open_or_create(name, Kind::Lock, rows, cols, 0).map(LockArray::new)
    }

    /// Opens an array of barriers that `parties` pass together, or creates it.
    ///
    /// # Errors
    /// As [`events`](Self::events); [`Error::BadSetting`] for no parties or more
    /// than 4,294,967,295.
    pub fn barriers(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        parties: usize,
    ) -> Result<BarrierArray> {
        let param = barrier_param(name, parties)?;
        self.open_or_create(name, Kind::Barrier, rows, cols, param).map(BarrierArray::new)
    }

    /// Opens an array of semaphores with `bound` permits each, or creates it with
    /// `initial` of them there to be had.
    ///
    /// # Errors
    /// As [`events`](Self::events); [`Error::BadSetting`] for a bound of 0 or more
    /// than 2,147,483,647, or more permits at first than the bound.
    pub fn semaphores(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        initial: u32,
        bound: u32,
    ) -> Result<SemaphoreArray> {
        let param = semaphore_param(name, initial, bound)?;
        self.open_or_create(name, Kind::Semaphore, rows, cols, param).map(SemaphoreArray::new)
    }

    /// Opens an array of locks of whatever shape it has.
    ///
    /// # Errors
    /// As [`open_events`](Self::open_events).
    pub fn open_locks(&self, name: &str) -> Result<LockArray> {
        self.open_existing(name, Kind::Lock).map(LockArray::new)
    }

    /// Opens an array of barriers of whatever shape, and for as many parties, as
    /// it has.
    ///
    /// # Errors
    /// As [`open_events`](Self::open_events).
    pub fn open_barriers(&self, name: &str) -> Result<BarrierArray> {
        self.open_existing(name, Kind::Barrier).map(BarrierArray::new)
    }

    /// Opens an array of semaphores of whatever shape and bound it has.
    ///
    /// # Errors
    /// As [`open_events`](Self::open_events).
    pub fn open_semaphores(&self, name: &str) -> Result<SemaphoreArray> {
        self.open_existing(name, Kind::Semaphore).map(SemaphoreArray::new)
    }
}

/// The parameter of barriers for this many parties.
fn barrier_param(name: &str, parties: usize) -> Result<u64> {
    let param = parties as u64;
    match Kind::Barrier.first_word(param) {
        Some(_) => Ok(param),
        None => Err(Error::BadSetting {
            what: format!(
                "array {name:?}: a barrier has from 1 to 4294967295 parties, not {parties}"
            ),
        }),
    }
}

/// The parameter of semaphores with these permits.
fn semaphore_param(name: &str, initial: u32, bound: u32) -> Result<u64> {
    let param = u64::from(bound) << 32 | u64::from(initial);
    match Kind::Semaphore.first_word(param) {
        Some(_) => Ok(param),
        None => Err(Error::BadSetting {
            what: format!(
                "array {name:?}: a semaphore has a bound from 1 to 2147483647 and no more permits \
                 at first than that, not {initial} of {bound}"
            ),
        }),
    }
}
