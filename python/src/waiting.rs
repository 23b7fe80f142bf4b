//! Waits from Python: without the interpreter's lock, and ended by Ctrl-C.

use crate::errors::exception;
use crate::session::lock;
use farcell::{Canceller, Error, WaitOptions};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How often a wait looks whether a signal has come. A person does not notice
/// more, and 20 looks a second cost nothing.
const LOOK: Duration = Duration::from_millis(50);

/// The timeout of a call as `threading` takes it: `None` is for ever, and
/// less than nothing is nothing.
pub fn timeout(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        None => Ok(None),
        Some(seconds) if seconds.is_nan() => Err(PyValueError::new_err("the timeout is no number")),
        Some(seconds) => Ok(Duration::try_from_secs_f64(seconds.max(0.0)).ok()),
    }
}

/// Waits without the interpreter's lock. In the main thread, the only one that
/// handles signals in Python, a handler that raises ends the wait.
pub fn wait<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce(Option<&Canceller>) -> farcell::Result<T> + Send,
) -> PyResult<T> {
    // The main thread of a process has the process's number.
    let main = rustix::thread::gettid() == rustix::process::getpid();
    if !main {
        return py.detach(|| wait(None)).map_err(|e| exception(py, &e));
    }
    let raised: Arc<Mutex<Option<PyErr>>> = Arc::default();
    let told = raised.clone();
    let canceller = Canceller::watched(LOOK, move || {
        Python::attach(|py| match py.check_signals() {
            Ok(()) => false,
            Err(error) => {
                lock(&told).get_or_insert(error);
                true
            }
        })
    });
    let waited = py.detach(|| wait(Some(&canceller)));
    match (waited, lock(&raised).take()) {
        (_, Some(error)) => Err(error),
        (Err(Error::Cancelled), None) => {
            py.check_signals()?;
            Err(exception(py, &Error::Cancelled))
        }
        (waited, None) => waited.map_err(|e| exception(py, &e)),
    }
}

/// What a wait is told: its time, what cancels it, and whose loss ends it.
pub fn options(
    time: Option<Duration>,
    cancel: Option<&Canceller>,
    peers: Option<Vec<String>>,
) -> WaitOptions {
    let mut options = WaitOptions::new().peers(peers.unwrap_or_default());
    if let Some(time) = time {
        options = options.timeout(time);
    }
    if let Some(canceller) = cancel {
        options = options.cancel(canceller);
    }
    options
}

/// A wait under way whose end a function will be told.
#[pyclass(frozen, module = "farcell._native")]
pub struct Pending(pub farcell::Pending);

#[pymethods]
impl Pending {
    /// Gives the wait up; the function is called all the same.
    fn cancel(&self, py: Python<'_>) {
        py.detach(|| self.0.cancel());
    }
}

/// Calls a Python function with what became of a wait: `(True, value)`,
/// `(False, None)` when it was given up, or the exception.
pub fn tell<T>(then: &Py<PyAny>, ended: farcell::Result<T>)
where
    T: for<'py> IntoPyObject<'py>,
{
    Python::attach(|py| {
        let called = match ended {
            Ok(value) => then.call1(py, (true, value)),
            Err(Error::Cancelled) => then.call1(py, (false, py.None())),
            Err(error) => then.call1(py, (false, exception(py, &error))),
        };
        if let Err(error) = called {
            error.write_unraisable(py, None);
        }
    });
}
