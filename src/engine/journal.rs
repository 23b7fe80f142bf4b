//! What outlives the engine: which arrays there are, noted as they come and go.

use super::actor::Actor;
use super::{Engine, lock};
use crate::catalog::{CatalogError, Entry};
use std::fmt::Debug;

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
}
