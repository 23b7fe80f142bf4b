//! A client's doorbells, which have a queue pair of their own.
//!
//! A doorbell takes one of the receives that the server has posted for this
//! session. While the server's CPU does not come to post them again, since it is
//! stopped or has much to do, the adapter asks again and again, and all that
//! stands behind the doorbell in its queue pair has to wait: so nothing else is
//! in this one. When it is full, further doorbells are left out. The server
//! looks at all cells that are waited for every few milliseconds, and finds them
//! by itself when it runs again.

use crate::verbs::{Completion, CompletionQueue, Error, QueuePair, Request};
use std::sync::Arc;

/// Doorbells that may be under way.
pub(super) const DOORBELLS: u32 = 64;

/// The queue pair of the doorbells.
#[derive(Debug)]
pub(super) struct Doorbells {
    pub(super) queue: Arc<QueuePair>,
    pub(super) completions: Arc<CompletionQueue>,
}

impl Doorbells {
    /// Tells the server's CPU that a cell with waiters was changed. Does not
    /// wait until it has got there, and does not block.
    ///
    /// # Errors
    /// The queue pair is broken.
    pub(super) fn ring(&self, place: u32) -> Result<(), Error> {
        let mut batch = [Completion::default(); 4];
        let taken = self.completions.poll(&mut batch)?;
        for completion in &batch[..taken] {
            self.queue.retire(completion)?;
        }
        match self.queue.post(Request::doorbell(place).unsignalled()) {
            Ok(_) | Err(Error::QueueFull { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}
