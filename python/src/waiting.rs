//! Waits from Python: without the interpreter's lock, and ended by Ctrl-C.

use crate::errors::exception;
use crate::session::lock;
use farcell::{Canceller, Error, WaitOptions};
use farcell_sys::fork::{self, Generation};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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
        let looked = Python::try_attach(|py| match py.check_signals() {
            Ok(()) => false,
            Err(error) => {
                lock(&told).get_or_insert(error);
                true
            }
        });
        looked.unwrap_or(false)
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

/// How many functions have yet to be told of the end of a wait. A number and no
/// lock: a process can fork at any moment.
static UNTOLD: AtomicUsize = AtomicUsize::new(0);

/// A Python function that will be told what became of a wait.
pub struct Then {
    call: Py<PyAny>,
    born: Generation,
}

impl Then {
    pub fn new(call: Py<PyAny>) -> Then {
        // Relaxed here and below: it is a count, and nothing is read by its means.
        UNTOLD.fetch_add(1, Ordering::Relaxed);
        Then { call, born: fork::generation() }
    }

    /// Calls it: with `(True, value)`, with `(False, None)` when the wait was given
    /// up, or with `(False, exception)`. Nobody is told where the interpreter has ended.
    pub fn tell<T>(self, ended: farcell::Result<T>)
    where
        T: for<'py> IntoPyObject<'py>,
    {
        Python::try_attach(|py| {
            let called = match ended {
                Ok(value) => self.call.call1(py, (true, value)),
                Err(Error::Cancelled) => self.call.call1(py, (false, py.None())),
                Err(error) => self.call.call1(py, (false, exception(py, &error))),
            };
            if let Err(error) = called {
                error.write_unraisable(py, None);
            }
        });
    }
}

impl Drop for Then {
    fn drop(&mut self) {
        // Not those of a parent: a child counts its own.
        if self.born == fork::generation() {
            UNTOLD.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A forked child begins to count anew: no thread of its own has anything to tell.
#[pyfunction]
pub fn forget_untold() {
    UNTOLD.store(0, Ordering::Relaxed);
}

/// Lets the threads of sessions that were closed tell what they have to, since none
/// may enter an interpreter that ends. A second is much more than they need.
pub fn let_tell(py: Python<'_>) {
    let ends = Instant::now() + Duration::from_secs(1);
    while UNTOLD.load(Ordering::Relaxed) > 0 && Instant::now() < ends {
        py.detach(|| std::thread::sleep(Duration::from_millis(1)));
    }
}
