//! Semaphores without a thread that waits.

use super::Semaphore;
use crate::error::{Error, Result};
use crate::transport::tcp::{Pending, Then};
use crate::wire::AcquireRecord;

impl Semaphore {
    /// As [`acquire`](Self::acquire), without a thread: `then` is called once a
    /// permit was had, on a thread of the client's that must not be kept for
    /// long. There is one such thread for all waits of a client. After
    /// [`Pending::cancel`] it is called with [`Error::Cancelled`], or without an
    /// error if the permit was given at that moment; whoever does not want that
    /// [releases](Self::release) it.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire); `then` gets those that come later.
    pub fn acquire_then(&self, then: impl FnOnce(Result<()>) + Send + 'static) -> Result<Pending> {
        let link = &self.array.client.core.link;
        if link.welcome().seat == 0 {
            let what = "the server has more sessions than can queue".to_owned();
            return Err(Error::Limit { addr: link.addr(), what });
        }
        let (array, offset) = (self.array.number, self.offset);
        let record = AcquireRecord { array, offset, ..AcquireRecord::default() };
        // The array is kept: its number must mean the same until the end.
        let semaphore = self.clone();
        let ended = Then::Granted(Box::new(move |got| {
            then(match got {
                Ok(grant) => semaphore.arrived(&grant),
                Err(failure) => Err(semaphore.array.explain(failure, "acquire")),
            });
        }));
        link.queue_then(record, ended).map_err(|f| self.array.explain(f, "acquire"))
    }
}
