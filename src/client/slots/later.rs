//! Messages without a thread that waits for them.

use super::Slot;
use crate::error::Result;
use crate::transport::tcp::Pending;

impl Slot {
    /// As [`wait_newer`](Self::wait_newer), without a time and without a thread:
    /// `then` is called once there is a newer message, as by
    /// [`Event::wait_then`](crate::Event::wait_then).
    ///
    /// # Errors
    /// As [`Event::wait_then`](crate::Event::wait_then).
    pub fn wait_newer_then(
        &self,
        than: u64,
        then: impl FnOnce(Result<()>) + Send + 'static,
    ) -> Result<Pending> {
        let record = self.newer_than(than);
        let row = self.row;
        let ended = |woken: Result<_>| then(woken.map(drop));
        self.array.wait_then(1, &[record], None, move |_| (row, 0), ended)
    }
}
