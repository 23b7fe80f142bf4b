//! Memory of messages that outlives the engine.

use super::Engine;
use super::actor::Actor;
use super::session::Session;
use super::slots::Budget;
use crate::auth::Access;
use crate::catalog::{CatalogError, Entry, Form, Kind};
use crate::layout::Shape;
use crate::segment::{Payload, Segment};
use crate::slot::extent;
use crate::wire::{self, OpenRecord, Tag};
use std::collections::HashMap;
use std::fmt::Debug;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

/// Bytes of messages from which on they are made elsewhere than where clients wait:
/// some milliseconds' worth.
const LONG: u64 = 16 << 20;

/// Where the engine gets the memory of messages that is to outlive it. An array
/// is known there by its first cell.
pub trait Shelf: Debug + Send + Sync {
    /// Makes memory for such an array, all 0, that is not kept yet, and its
    /// number.
    ///
    /// # Errors
    /// The system's.
    fn draft(&self, form: Form) -> io::Result<(Segment, u64)>;

    /// A draft belongs to the array that begins at this cell.
    ///
    /// # Errors
    /// The system's. It is not kept then.
    fn keep(&self, draft: u64, form: Form, base: u32) -> io::Result<()>;

    /// A draft is not needed.
    fn discard(&self, draft: u64);

    /// The array is no more. Whoever has its memory mapped keeps that.
    fn remove(&self, base: u32);
}

/// Memory of former messages, by the first cell of their array.
pub type Kept = HashMap<u32, Segment>;

/// Memory for an array that is about to be made.
#[derive(Debug)]
pub(super) struct Drafted {
    payload: Arc<Payload>,
    /// If it is from the shelf.
    number: Option<u64>,
}

impl Drafted {
    pub fn payload(&self) -> Arc<Payload> {
        self.payload.clone()
    }
}

impl Budget {
    fn refused(&self, asked: u64, error: &io::Error) -> CatalogError {
        match error.raw_os_error() {
            Some(errno) => CatalogError::NoMemory { asked, errno: errno.unsigned_abs() },
            None => {
                // Relaxed: for a message.
                let free = self.limit.saturating_sub(self.used.load(Ordering::Relaxed));
                CatalogError::SlotsFull { asked, free }
            }
        }
    }

    /// Memory for a new array's messages, if it has any.
    pub fn draft(&self, form: Form) -> Result<Option<Drafted>, CatalogError> {
        let (rows, bytes) = (form.shape.rows, form.param);
        let possible = form.kind.first_word(bytes).is_some() && form.shape.cells() > 0;
        if form.kind != Kind::Slots || !possible || form.shape.cols != 1 {
            return Ok(None);
        }
        let mut number = None;
        let made = match &self.shelf {
            None => Payload::new(rows, bytes, &self.used, self.limit),
            Some(shelf) => Payload::in_memory(rows, bytes, &self.used, self.limit, || {
                let (memory, draft) = shelf.draft(form)?;
                number = Some(draft);
                Ok(memory)
            }),
        };
        let asked = extent(rows, bytes);
        let payload = Arc::new(made.map_err(|error| self.refused(asked, &error))?);
        Ok(Some(Drafted { payload, number }))
    }

    /// The array has been made, and begins there.
    pub fn keep(&self, drafted: &Drafted, form: Form, base: u32) -> Result<(), CatalogError> {
        let (Some(shelf), Some(number)) = (&self.shelf, drafted.number) else { return Ok(()) };
        shelf.keep(number, form, base).map_err(|error| {
            tracing::error!(%error, "cannot keep the memory of messages");
            CatalogError::Unkept(error.raw_os_error().unwrap_or(5))
        })
    }

    /// Nobody needs it.
    pub fn discard(&self, drafted: &Drafted) {
        if let (Some(shelf), Some(number)) = (&self.shelf, drafted.number) {
            shelf.discard(number);
        }
    }

    /// The array is no more.
    pub fn forget(&self, entry: &Entry) {
        if let (Some(shelf), Kind::Slots) = (&self.shelf, entry.form.kind) {
            shelf.remove(entry.base);
        }
    }

    /// The memory of an array of a former life.
    fn again(&self, form: Form, memory: Segment) -> Result<Arc<Payload>, CatalogError> {
        let (rows, bytes) = (form.shape.rows, form.param);
        let take = |memory| match self.shelf {
            // Written before anyone had it: rows may move as in any other.
            None => Payload::with_spares(rows, bytes, &self.used, self.limit, memory),
            Some(_) => Payload::in_memory(rows, bytes, &self.used, self.limit, || Ok(memory)),
        };
        let asked = extent(rows, bytes);
        take(memory).map(Arc::new).map_err(|error| self.refused(asked, &error))
    }
}

/// The array of slots that a request opens, and makes if there is none.
fn wanted(payload: &[u8]) -> Option<(&str, Form)> {
    let (record, rest) = wire::take::<OpenRecord>(Tag::Open, payload).ok()?;
    if Kind::from_code(record.kind) != Some(Kind::Slots) || record.existing != 0 {
        return None;
    }
    let shape = Shape { rows: record.rows, cols: record.cols };
    let form = Form { kind: Kind::Slots, shape, param: record.param };
    Some((wire::name(Tag::Open, rest).ok()?, form))
}

impl<A: Actor> Engine<A> {
    /// The memory of messages comes from there.
    #[must_use]
    pub fn shelf(mut self, shelf: Box<dyn Shelf>) -> Engine<A> {
        self.budget.shelf = Some(shelf);
        self
    }

    /// Whether memory of messages comes from a shelf, so that it may take long.
    pub fn has_shelf(&self) -> bool {
        self.budget.shelf.is_some()
    }

    /// Whether this request opens an array whose memory takes long to be made. One
    /// that was carried out before does not: its answer was kept.
    pub(super) fn takes_long(&self, session: &Session, id: u64, payload: &[u8]) -> bool {
        self.has_shelf()
            && session.access == Access::ReadWrite
            && session.is_new(id)
            && wanted(payload).is_some_and(|(name, form)| {
                extent(form.shape.rows, form.param) >= LONG
                    && matches!(self.catalogued().get(name), Err(CatalogError::Missing))
            })
    }

    /// Makes the array of slots that this frame opens, and says whether it did. Takes
    /// long: pages of a file are taken at once. If it cannot be made, the frame itself
    /// will be answered so.
    pub fn prepare(&self, frame: &[u8]) -> bool {
        if let Ok(Some((_, payload))) = wire::split(frame)
            && let Some((name, form)) = wanted(payload)
        {
            let opened = self.open(name, form);
            if let Err(error) = &opened {
                tracing::debug!(name, ?error, "cannot make an array of slots");
            }
            return opened.is_ok_and(|(_, created)| created);
        }
        false
    }

    /// Memory for an array that is not there yet. Made before anyone has to wait
    /// for it: pages of a file are taken at once.
    pub(super) fn draft(&self, name: &str, form: Form) -> Result<Option<Drafted>, CatalogError> {
        let known = self.catalog.read().unwrap_or_else(PoisonError::into_inner).get(name);
        match known {
            Err(CatalogError::Missing) => self.budget.draft(form).or_else(|error| {
                if !matches!(error, CatalogError::SlotsFull { .. } | CatalogError::NoMemory { .. })
                {
                    return Err(error);
                }
                // What removed arrays had is taken until nobody reaches them.
                let mut catalog = self.catalog.write().unwrap_or_else(PoisonError::into_inner);
                catalog.release_held();
                drop(catalog);
                self.budget.draft(form)
            }),
            // What is wrong will be said.
            Ok(_) | Err(_) => Ok(None),
        }
    }

    /// Gives the arrays of slots that a catalog of a former life has their
    /// memory: what was kept of it, where messages are as they were, but for those
    /// that were being written. The others are torn, and without memory all are;
    /// versions go on from where they were.
    ///
    /// # Errors
    /// Name and form of the array for which there is not enough, and how much.
    pub fn restore_slots(&self, mut kept: Kept) -> Result<(), ((String, Form), CatalogError)> {
        let catalog = self.catalogued();
        for entry in catalog.slots() {
            if entry.payload.get().is_some() {
                continue;
            }
            let failed = |e| ((entry.name.clone(), entry.form), e);
            let memory = kept.remove(&entry.base);
            let has_messages = memory.is_some();
            let payload = match memory {
                Some(memory) => self.budget.again(entry.form, memory).map_err(failed)?,
                None => {
                    let Some(drafted) = self.budget.draft(entry.form).map_err(failed)? else {
                        continue;
                    };
                    self.budget.keep(&drafted, entry.form, entry.base).map_err(failed)?;
                    drafted.payload()
                }
            };
            for row in 0..entry.form.shape.rows {
                self.restore_row(entry, &payload, row, has_messages);
            }
            // Nobody else is there.
            let _ = entry.payload.set(payload);
        }
        Ok(())
    }
}
