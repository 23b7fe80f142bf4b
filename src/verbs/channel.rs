//! Completion channels: a file descriptor that says "look at your queue".

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farcell_sys as sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::device::Context;
use super::error::Error;
use super::hint;

/// A completion channel. Its descriptor (see [`AsFd`]) becomes readable when an
/// armed completion queue gets a completion, so it fits into an event loop.
pub struct CompletionChannel {
    context: Arc<Context>,
    raw: NonNull<sys::ibv_comp_channel>,
}

// SAFETY: libibverbs locks what its objects share; its functions may be called
// from any thread, verbs(7).
unsafe impl Send for CompletionChannel {}
// SAFETY: as above.
unsafe impl Sync for CompletionChannel {}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionChannel")
            .field("device", &self.context.name())
            .finish_non_exhaustive()
    }
}

impl CompletionChannel {
    /// Makes one, with a descriptor that does not block. A few system calls.
    /// See `ibv_create_comp_channel(3)`.
    ///
    /// # Errors
    /// [`Error::Call`]: EMFILE, ENFILE, ENOMEM, ENODEV. [`Error::Forked`].
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, Error> {
        context.check()?;
        // SAFETY: open until drop; the channel keeps it open.
        let raw = unsafe { context.library().create_comp_channel(context.raw()) }
            .map_err(|error| hint::explain(error, context, None))?;
        let channel = Self { context: Arc::clone(context), raw };
        rustix::io::ioctl_fionbio(channel.as_fd(), true)
            .map_err(|error| Error::system("ioctl", context.place(None), &error.into()))?;
        Ok(Arc::new(channel))
    }

    /// Takes the next event, if there is one: the token of the completion queue
    /// that has something. The queue is no longer armed then. Does not block;
    /// one system call. See `ibv_get_cq_event(3)`.
    ///
    /// # Errors
    /// [`Error::Call`]: ENODEV or EIO for a device that is gone.
    /// [`Error::Forked`].
    pub fn next(&self) -> Result<Option<u64>, Error> {
        self.context.check()?;
        let library = self.context.library();
        // SAFETY: made in `new`, alive until drop.
        match unsafe { library.get_cq_event(self.raw) } {
            Ok((queue, token)) => {
                // SAFETY: the queue lives at least until this event, which the
                // line above took, is acknowledged: destroying it waits for
                // that. So it cannot be gone here, whoever drops it meanwhile.
                unsafe { library.ack_cq_events(queue, 1) };
                Ok(Some(token.expose_provenance() as u64))
            }
            Err(error) if matches!(error.errno(), sys::libc::EAGAIN | sys::libc::EINTR) => Ok(None),
            Err(error) => Err(hint::explain(error, &self.context, None)),
        }
    }

    /// Waits for the next event, for at most `timeout` (`None`: for ever).
    /// Blocks.
    ///
    /// # Errors
    /// Those of [`CompletionChannel::next`], and of `poll(2)`: ENOMEM.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<Option<u64>, Error> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            if let Some(token) = self.next()? {
                return Ok(Some(token));
            }
            let left = match deadline {
                None => None,
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(None);
                    }
                    Timespec::try_from(left).ok()
                }
            };
            match poll(&mut [PollFd::new(self, PollFlags::IN)], left.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    return Err(Error::system("poll", self.context.place(None), &error.into()));
                }
            }
        }
    }

    pub(super) fn raw(&self) -> NonNull<sys::ibv_comp_channel> {
        self.raw
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the library keeps it open until the channel is destroyed,
        // which needs `self` gone.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        let library = self.context.library();
        self.context
            // SAFETY: every queue on it held an Arc to it and is gone.
            .destroy(|| unsafe { library.destroy_comp_channel(self.raw) });
    }
}
