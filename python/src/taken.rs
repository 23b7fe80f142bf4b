//! What was acquired without a thread that waits for it.

use crate::session::lock;
use farcell::LockGuard;
use farcell_sys::fork::{self, Generation};
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::sync::Mutex;

/// A lock or a permit that has come. It goes back unless someone keeps it.
#[pyclass(frozen, module = "farcell._native")]
pub struct Taken {
    what: Mutex<Option<What>>,
    born: Generation,
}

enum What {
    Guard(ManuallyDrop<LockGuard>),
    Permit(farcell::Semaphore),
}

impl Taken {
    pub fn lock(guard: LockGuard) -> Taken {
        Taken::new(What::Guard(ManuallyDrop::new(guard)))
    }

    pub fn permit(of: farcell::Semaphore) -> Taken {
        Taken::new(What::Permit(of))
    }

    fn new(what: What) -> Taken {
        Taken { what: Mutex::new(Some(what)), born: fork::generation() }
    }

    /// The guard of a lock, for the handle that keeps it.
    pub fn guard(&self) -> Option<ManuallyDrop<LockGuard>> {
        match lock(&self.what).take() {
            Some(What::Guard(guard)) => Some(guard),
            _ => None,
        }
    }

    fn back(&self) {
        let what = lock(&self.what).take();
        if self.born != fork::generation() {
            // It is the parent's, and must not be touched.
            return;
        }
        match what {
            Some(What::Guard(guard)) => drop(ManuallyDrop::into_inner(guard)),
            // The session is over, and with it what can be given back to.
            Some(What::Permit(semaphore)) => drop(semaphore.release()),
            None => {}
        }
    }

    /// The permit is kept.
    pub fn keep(&self) {
        lock(&self.what).take();
    }
}

#[pymethods]
impl Taken {
    /// Gives it back, if it is still here.
    fn give_back(&self, py: Python<'_>) {
        py.detach(|| self.back());
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if lock(&self.what).is_some() {
            // The interpreter may have ended before a thread of the session's.
            let told = Python::try_attach(|py| self.give_back(py));
            told.unwrap_or_else(|| self.back());
        }
    }
}
