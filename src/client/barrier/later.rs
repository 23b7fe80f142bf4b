//! Barriers without a thread that waits.

use super::super::select::Woken;
use super::{Barrier, BarrierWait};
use crate::error::Result;
use crate::transport::tcp::Pending;

impl Barrier {
    /// As [`wait`](Self::wait), without a thread: `then` is called once all
    /// parties have come, on a thread of the client's that must not be kept for
    /// long. There is one such thread for all waits of a client. The arrival
    /// itself is made before this returns, as by [`wait`](Self::wait), and who
    /// comes last has `then` called before as well. [`Pending::cancel`] breaks
    /// the barrier.
    ///
    /// # Errors
    /// As [`wait`](Self::wait); `then` gets those that come later, and
    /// [`Error::Cancelled`](crate::Error::Cancelled).
    pub fn wait_then(
        &self,
        then: impl FnOnce(Result<BarrierWait>) + Send + 'static,
    ) -> Result<Pending> {
        let (session, found, passed) = self.arrive()?;
        if passed.is_last() {
            then(Ok(passed));
            return Ok(Pending::over());
        }
        let (row, col) = (self.row, self.col);
        let barrier = self.clone();
        let ended = move |woken: Result<Woken>| {
            let word =
                woken.map(|w| w.cells().first().filter(|_| w.is_satisfied()).map(|c| c.word));
            then(barrier.conclude(session, found, passed, word));
        };
        let record = self.wait_record(found);
        let started = self.array.wait_then(1, &[record], Some(session), move |_| (row, col), ended);
        if started.is_err() {
            // The others must not wait for one that has gone.
            let _ = self.abort();
        }
        started
    }
}
