//! Waits from Python: without the interpreter's lock, and ended by Ctrl-C.

use crate::errors::exception;
use crate::session::lock;
use farcell::{Canceller, Error, WaitOptions};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::cell::Cell;
use std::sync::mpsc::{self, RecvTimeoutError};
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

/// Whether this is the main thread: it has the number of the process.
fn is_main() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

/// What a handler has raised while an operation was blocked, until the operation
/// has ended with it.
static RAISED: Mutex<Option<PyErr>> = Mutex::new(None);

/// Operations of the main thread that have no answer yet look whether a signal has
/// come. Cheap enough for each of them: all but the first find it done.
pub fn watch_signals() {
    thread_local! {
        static DONE: Cell<bool> = const { Cell::new(false) };
    }
    if !DONE.replace(true) && is_main() {
        farcell::ask_while_blocked(Some(handler_raises));
    }
}

fn handler_raises() -> bool {
    // Not so as the interpreter ends.
    let raised = Python::try_attach(|py| py.check_signals().err()).flatten();
    let ends = raised.is_some();
    if ends {
        *lock(&RAISED) = raised;
    }
    ends
}

/// What a handler has raised, if that is why an operation ended with this error.
pub fn raised(error: &Error) -> Option<PyErr> {
    match error {
        Error::Cancelled | Error::OutcomeUnknown { .. } if is_main() => lock(&RAISED).take(),
        _ => None,
    }
}

/// Waits without the interpreter's lock. In the main thread, the only one that
/// handles signals in Python, a handler that raises ends the wait.
pub fn wait<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce(Option<&Canceller>) -> farcell::Result<T> + Send,
) -> PyResult<T> {
    if !is_main() {
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

/// Does what knows no canceller. In the main thread it is done on another one,
/// which is left alone with it when a handler raises.
pub fn apart<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce() -> farcell::Result<T> + Send + 'static,
) -> PyResult<T> {
    if !is_main() {
        return py.detach(work).map_err(|e| exception(py, &e));
    }
    let (tell, mut told) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("farcell-connect".to_owned())
        // Nobody may be there any more to take it.
        .spawn(move || drop(tell.send(work())))
        .map_err(|e| PyRuntimeError::new_err(format!("cannot start a thread: {e}")))?;
    loop {
        let told = &mut told;
        match py.detach(move || told.recv_timeout(LOOK)) {
            Ok(done) => return done.map_err(|e| exception(py, &e)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(PyRuntimeError::new_err("the thread that was to connect has died"));
            }
        }
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
