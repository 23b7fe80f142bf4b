//! What outlives the engine: which arrays there are, noted as they come and go,
//! and copies of their cells.

use super::actor::Actor;
use super::{Engine, lock};
use crate::catalog::{CatalogError, Entry};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

/// Where the engine notes arrays before it tells anyone of them, so that those
/// it has told of are there after its end. Called with the catalog locked for
/// writing, one change after the other.
pub trait Journal: Debug + Send {
    /// An array has been made; nobody can reach it yet.
    ///
    /// # Errors
    /// It could not be noted, and will not exist: the system's error number.
    fn created(&mut self, entry: &Entry) -> Result<(), i32>;

    /// An array is about to be removed. With `held` its cells are to stay out
    /// of use: some client may still reach them.
    ///
    /// # Errors
    /// It could not be noted, and the array will stay: the system's error
    /// number.
    fn removed(&mut self, entry: &Entry, held: bool) -> Result<(), i32>;
}

impl<A: Actor> Engine<A> {
    /// Notes arrays there.
    #[must_use]
    pub fn journal(mut self, journal: Box<dyn Journal>) -> Engine<A> {
        self.journal = Some(journal.into());
        self
    }

    pub(super) fn note_created(&self, entry: &Entry) -> Result<(), CatalogError> {
        let Some(journal) = &self.journal else { return Ok(()) };
        lock(journal).created(entry).map_err(CatalogError::Unkept)
    }

    pub(super) fn note_removed(&self, entry: &Entry, held: bool) -> Result<(), CatalogError> {
        if let Some(journal) = &self.journal {
            lock(journal).removed(entry, held).map_err(CatalogError::Unkept)?;
        }
        // Not before it is noted: an array that is there has its messages.
        self.budget.forget(entry);
        Ok(())
    }

    /// Every array that there is now.
    pub fn arrays(&self) -> Vec<Arc<Entry>> {
        let catalog = self.catalog.read().unwrap_or_else(PoisonError::into_inner);
        catalog.list("", usize::MAX).cloned().collect()
    }

    /// Appends the words of some cells of an array, counted from its start,
    /// each as it was at one moment during the call. `false`: the array has
    /// been removed, and nothing was appended. Holds the catalog's read lock,
    /// so ask for few at a time.
    pub fn copy(&self, entry: &Entry, cells: Range<u32>, words: &mut Vec<u64>) -> bool {
        // Held to the end: the cells cannot be given to another array.
        let _catalog = self.catalog.read().unwrap_or_else(PoisonError::into_inner);
        if !entry.is_alive() {
            return false;
        }
        words.extend(cells.map(|cell| self.actor.load(entry.base + cell)));
        true
    }

    /// Those arrays that have not been removed up to one moment during the
    /// call.
    pub fn alive<T>(&self, arrays: &mut Vec<T>, entry: impl Fn(&T) -> &Entry) {
        let _catalog = self.catalog.read().unwrap_or_else(PoisonError::into_inner);
        arrays.retain(|array| entry(array).is_alive());
    }
}
