//! Protection domains: which regions work on which queue pairs.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use farcell_sys as sys;

use super::device::Context;
use super::error::Error;
use super::hint;

/// A protection domain. A remote key works on the queue pairs of its own
/// domain only: the HCA refuses it on any other with a remote access error.
pub struct ProtectionDomain {
    context: Arc<Context>,
    raw: NonNull<sys::ibv_pd>,
}

// SAFETY: libibverbs locks what its objects share; its functions may be called
// from any thread, verbs(7).
unsafe impl Send for ProtectionDomain {}
// SAFETY: as above.
unsafe impl Sync for ProtectionDomain {}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain")
            .field("device", &self.context.name())
            .finish_non_exhaustive()
    }
}

impl ProtectionDomain {
    /// Makes one. A system call. See `ibv_alloc_pd(3)`.
    ///
    /// # Errors
    /// [`Error::Call`]: ENOMEM (the device is out of domains), ENODEV.
    /// [`Error::Forked`].
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, Error> {
        context.check()?;
        // SAFETY: open until drop; the domain keeps it open.
        let raw = unsafe { context.library().alloc_pd(context.raw()) }
            .map_err(|error| hint::explain(error, context, None))?;
        Ok(Arc::new(Self { context: Arc::clone(context), raw }))
    }

    /// The device it is of.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> NonNull<sys::ibv_pd> {
        self.raw
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        let library = self.context.library();
        // SAFETY: whatever was made from it held an Arc to it and is gone.
        self.context.destroy(|| unsafe { library.dealloc_pd(self.raw) });
    }
}
