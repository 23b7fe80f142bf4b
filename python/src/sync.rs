//! Locks and semaphores, as `threading` has them.

use crate::array::{Opens, Shared};
use crate::errors::{OrRaise, raise};
use crate::pickled::Reduced;
use crate::session::{Origin, Session, lock};
use crate::taken::Taken;
use crate::waiting::{self, Pending, Then, timeout};
use farcell::{BarrierArray, Client, LockArray, LockGuard, SemaphoreArray};
use farcell_sys::fork::{self, Generation};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

/// Semaphores have their permits, and barriers their parties, beside the shape:
/// they are opened with them.
impl Opens for LockArray {
    fn open(
        client: &Client,
        name: &str,
        rows: usize,
        cols: usize,
        _: u64,
    ) -> farcell::Result<Self> {
        client.locks(name, rows, cols)
    }
}

impl Opens for BarrierArray {
    fn open(
        client: &Client,
        name: &str,
        rows: usize,
        cols: usize,
        param: u64,
    ) -> farcell::Result<Self> {
        client.barriers(name, rows, cols, usize::try_from(param).unwrap_or(usize::MAX))
    }
}

impl Opens for SemaphoreArray {
    fn open(
        client: &Client,
        name: &str,
        rows: usize,
        cols: usize,
        param: u64,
    ) -> farcell::Result<Self> {
        client.semaphores(name, rows, cols, (param >> 32) as u32, param as u32)
    }
}

/// What a handle of these needs to be made again: origin, array, its rows and
/// columns, its parameter, row and column, and one number more.
type Args = (String, String, usize, usize, u64, usize, usize, u64);

fn args<A>(array: &Shared<A>, row: usize, col: usize, more: u64) -> Args {
    let Shared { origin, name, rows, cols, param, .. } = array;
    (origin.id.clone(), name.clone(), *rows, *cols, *param, row, col, more)
}

fn check(rows: usize, cols: usize, row: usize, col: usize) -> PyResult<()> {
    match row < rows && col < cols {
        true => Ok(()),
        false => Err(PyValueError::new_err("this pickle of a handle makes no sense")),
    }
}

/// `blocking` and `timeout` of an acquire, as `threading` and
/// `multiprocessing` take them: a negative timeout is none in the one and
/// nothing in the other, and here it is none only as -1.
fn acquire_time(blocking: bool, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match (blocking, seconds) {
        (false, None) => Ok(Some(Duration::ZERO)),
        (false, Some(-1.0)) => Ok(Some(Duration::ZERO)),
        (false, Some(_)) => {
            Err(PyValueError::new_err("can't specify a timeout for a non-blocking call"))
        }
        (true, Some(-1.0)) => Ok(None),
        (true, seconds) => timeout(seconds),
    }
}

/// `acquire` of a lock or a semaphore, to be awaited.
fn acquire_async(handle: &Bound<'_, PyAny>, seconds: Option<f64>) -> PyResult<Py<PyAny>> {
    timeout(seconds)?;
    let aio = handle.py().import("farcell._aio")?;
    Ok(aio.call_method1("acquire", (handle, seconds))?.unbind())
}

fn release_async(handle: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
    let aio = handle.py().import("farcell._aio")?;
    Ok(aio.call_method1("release", (handle,))?.unbind())
}

/// How a lock is held through a handle of this process.
struct Held {
    guard: ManuallyDrop<LockGuard>,
    born: Generation,
    by: ThreadId,
    depth: usize,
}

/// A lock. Held by one of all processes, and by one thread of it.
#[pyclass(frozen, module = "farcell._native")]
pub struct Lock {
    array: Arc<Shared<LockArray>>,
    row: usize,
    col: usize,
    reentrant: bool,
    held: Mutex<Option<Held>>,
}

impl Lock {
    /// The hold of this handle, unless it was that of a parent.
    fn held(&self) -> std::sync::MutexGuard<'_, Option<Held>> {
        let mut held = lock(&self.held);
        if held.as_ref().is_some_and(|held| held.born != fork::generation()) {
            // Its guard is the parent's and must not be dropped here.
            *held = None;
        }
        held
    }
}

#[pymethods]
impl Lock {
    /// Opens or creates an array of locks: a handle to each, row by row.
    #[staticmethod]
    fn _all(
        py: Python<'_>,
        session: &Session,
        name: String,
        rows: usize,
        cols: usize,
        reentrant: bool,
    ) -> PyResult<Vec<Lock>> {
        let array = Shared::with_param(session.origin.clone(), name, rows, cols, 0);
        array.get(py)?;
        let lock = |at| Lock {
            array: array.clone(),
            row: at / cols,
            col: at % cols,
            reentrant,
            held: Mutex::default(),
        };
        Ok((0..rows * cols).map(lock).collect())
    }

    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "only pickle calls it")]
    fn _unpickle(
        id: &str,
        name: String,
        rows: usize,
        cols: usize,
        param: u64,
        row: usize,
        col: usize,
        reentrant: u64,
    ) -> PyResult<Lock> {
        check(rows, cols, row, col)?;
        let array = Shared::with_param(Origin::by_id(id), name, rows, cols, param);
        Ok(Lock { array, row, col, reentrant: reentrant != 0, held: Mutex::default() })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py, Args>> {
        let this = slf.get();
        let make = slf.get_type().getattr("_unpickle")?;
        Ok((make, args(&this.array, this.row, this.col, this.reentrant.into())))
    }

    /// Name of its array.
    #[getter]
    fn name(&self) -> &str {
        &self.array.name
    }

    /// Takes it, or sleeps until it can; `False` when the time was over. A
    /// reentrant one is taken again at once by the thread that holds it.
    #[pyo3(signature = (block=true, timeout=None, *, blocking=None))]
    fn acquire(
        &self,
        py: Python<'_>,
        block: bool,
        timeout: Option<f64>,
        blocking: Option<bool>,
    ) -> PyResult<bool> {
        // threading says blocking, multiprocessing block.
        let time = acquire_time(blocking.unwrap_or(block), timeout)?;
        let me = std::thread::current().id();
        if self.reentrant
            && let Some(held) = &mut *self.held()
            && held.by == me
        {
            held.depth += 1;
            return Ok(true);
        }
        let native = self.array.get(py)?.at(self.row, self.col).or_raise(py)?;
        let guard = waiting::wait(py, |cancel| native.lock_with(time, cancel))?;
        let Some(guard) = guard else {
            return Ok(false);
        };
        let held =
            Held { guard: ManuallyDrop::new(guard), born: fork::generation(), by: me, depth: 1 };
        *self.held() = Some(held);
        Ok(true)
    }

    /// As `acquire`, to be awaited. Cancelled, it holds nothing.
    #[pyo3(signature = (timeout=None))]
    fn acquire_async(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        acquire_async(slf.as_any(), timeout)
    }

    /// Queues without a thread; `then` is called with what was had.
    fn _start_acquire(&self, py: Python<'_>, then: Py<PyAny>) -> PyResult<Pending> {
        let then = Then::new(then);
        if self.reentrant {
            return Err(PyRuntimeError::new_err(
                "an RLock belongs to a thread, and tasks share theirs: use a lock",
            ));
        }
        let native = self.array.get(py)?.at(self.row, self.col).or_raise(py)?;
        let told = move |ended: farcell::Result<_>| then.tell(ended.map(Taken::lock));
        py.detach(|| native.lock_then(told)).map(Pending).or_raise(py)
    }

    /// Holds what was queued for.
    fn _adopt(&self, taken: &Taken) {
        if let Some(guard) = taken.guard() {
            let by = std::thread::current().id();
            *self.held() = Some(Held { guard, born: fork::generation(), by, depth: 1 });
        }
    }

    fn __aenter__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        acquire_async(slf.as_any(), None)
    }

    fn __aexit__(
        slf: &Bound<'_, Self>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        release_async(slf.as_any())
    }

    /// Frees it for the next one. Only who holds it can: a lock is released
    /// through the handle that took it, a reentrant one by the same thread.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let held = {
            let mut held = self.held();
            match &mut *held {
                None => return Err(PyRuntimeError::new_err("release unlocked lock")),
                Some(one) if self.reentrant && one.by != std::thread::current().id() => {
                    return Err(PyRuntimeError::new_err("cannot release un-acquired lock"));
                }
                Some(one) if one.depth > 1 => {
                    one.depth -= 1;
                    return Ok(());
                }
                Some(_) => held.take(),
            }
        };
        let Some(held) = held else { return Ok(()) };
        py.detach(|| ManuallyDrop::into_inner(held.guard).unlock()).or_raise(py)
    }

    /// Whether someone holds it, anywhere.
    fn locked(&self, py: Python<'_>) -> PyResult<bool> {
        let native = self.array.get(py)?.at(self.row, self.col).or_raise(py)?;
        py.detach(|| native.is_locked()).or_raise(py)
    }

    /// The fencing token of this hold: larger than that of every hold before.
    #[getter]
    fn token(&self, py: Python<'_>) -> PyResult<u64> {
        match &*self.held() {
            Some(held) => Ok(held.guard.token()),
            None => Err(raise(py, "BadArgument", "this handle does not hold the lock")),
        }
    }

    /// Whether the holder before ended without releasing: what the lock
    /// protects may be half done.
    #[getter]
    fn was_abandoned(&self, py: Python<'_>) -> PyResult<bool> {
        match &*self.held() {
            Some(held) => Ok(held.guard.was_abandoned()),
            None => Err(raise(py, "BadArgument", "this handle does not hold the lock")),
        }
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<bool> {
        self.acquire(py, true, None, None)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.release(py)
    }

    fn __repr__(&self) -> String {
        let kind = if self.reentrant { "RLock" } else { "Lock" };
        let held = if self.held().is_some() { " held here" } else { "" };
        format!("<{kind} at {}[{}, {}]{held}>", self.array.name, self.row, self.col)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let held = lock(&self.held).take();
        if let Some(held) = held
            && held.born == fork::generation()
        {
            let free = || drop(ManuallyDrop::into_inner(held.guard));
            Python::attach(|py| py.detach(free));
        }
    }
}

/// A semaphore: as many hold it at a time as it has permits.
#[pyclass(frozen, module = "farcell._native")]
pub struct Semaphore {
    array: Arc<Shared<SemaphoreArray>>,
    row: usize,
    col: usize,
}

impl Semaphore {
    fn native(&self, py: Python<'_>) -> PyResult<farcell::Semaphore> {
        self.array.get(py)?.at(self.row, self.col).or_raise(py)
    }
}

#[pymethods]
impl Semaphore {
    #[new]
    #[pyo3(signature = (session, name, initial, bound))]
    fn new(
        py: Python<'_>,
        session: &Session,
        name: String,
        initial: u32,
        bound: u32,
    ) -> PyResult<Semaphore> {
        let (rows, cols, row, col) = (1, 1, 0, 0);
        let param = u64::from(initial) << 32 | u64::from(bound);
        let array = Shared::with_param(session.origin.clone(), name, rows, cols, param);
        array.get(py)?;
        Ok(Semaphore { array, row, col })
    }

    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "only pickle calls it")]
    fn _unpickle(
        id: &str,
        name: String,
        rows: usize,
        cols: usize,
        param: u64,
        row: usize,
        col: usize,
        _more: u64,
    ) -> PyResult<Semaphore> {
        check(rows, cols, row, col)?;
        let array = Shared::with_param(Origin::by_id(id), name, rows, cols, param);
        Ok(Semaphore { array, row, col })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py, Args>> {
        let this = slf.get();
        let make = slf.get_type().getattr("_unpickle")?;
        Ok((make, args(&this.array, this.row, this.col, 0)))
    }

    /// Name of its array.
    #[getter]
    fn name(&self) -> &str {
        &self.array.name
    }

    /// Takes a permit, or sleeps until it can; `False` when the time was over.
    #[pyo3(signature = (block=true, timeout=None, *, blocking=None))]
    fn acquire(
        &self,
        py: Python<'_>,
        block: bool,
        timeout: Option<f64>,
        blocking: Option<bool>,
    ) -> PyResult<bool> {
        // threading says blocking, multiprocessing block.
        let time = acquire_time(blocking.unwrap_or(block), timeout)?;
        let native = self.native(py)?;
        waiting::wait(py, |cancel| native.acquire_with(time, cancel))
    }

    /// As `acquire`, to be awaited. Cancelled, it has no permit.
    #[pyo3(signature = (timeout=None))]
    fn acquire_async(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        acquire_async(slf.as_any(), timeout)
    }

    /// Queues without a thread; `then` is called with what was had.
    fn _start_acquire(&self, py: Python<'_>, then: Py<PyAny>) -> PyResult<Pending> {
        let then = Then::new(then);
        let native = self.native(py)?;
        let of = native.clone();
        let told = move |ended: farcell::Result<()>| {
            then.tell(ended.map(|()| Taken::permit(of)));
        };
        py.detach(|| native.acquire_then(told)).map(Pending).or_raise(py)
    }

    /// Keeps what was queued for.
    fn _adopt(&self, taken: &Taken) {
        taken.keep();
    }

    fn __aenter__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        acquire_async(slf.as_any(), None)
    }

    fn __aexit__(
        slf: &Bound<'_, Self>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<Py<PyAny>> {
        release_async(slf.as_any())
    }

    /// Gives permits back; `ValueError` if there would be more than there can.
    #[pyo3(signature = (n=1))]
    fn release(&self, py: Python<'_>, n: u32) -> PyResult<()> {
        if n < 1 {
            return Err(PyValueError::new_err("n must be one or more"));
        }
        let native = self.native(py)?;
        py.detach(|| native.release_many(n)).or_raise(py)
    }

    /// How many permits can be had now.
    fn get_value(&self, py: Python<'_>) -> PyResult<u32> {
        let native = self.native(py)?;
        py.detach(|| native.available()).or_raise(py)
    }

    fn __enter__(&self, py: Python<'_>) -> PyResult<bool> {
        self.acquire(py, true, None, None)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.release(py, 1)
    }

    fn __repr__(&self) -> String {
        format!("<Semaphore at {}[{}, {}]>", self.array.name, self.row, self.col)
    }
}
