//! Barriers, as `threading` has them.
//!
//! One with an action is two, side by side: all parties meet at the first, the
//! last of them runs the action, and then all meet at the second. So nobody goes
//! on before the action is done, and the server notices if who runs it dies.

use crate::array::Shared;
use crate::errors::{OrRaise, exception};
use crate::pickled::Reduced;
use crate::session::{Origin, Session};
use crate::waiting::{self, Pending, Then};
use farcell::{BarrierArray, BarrierWait};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// What a handle needs to be made again: origin, array, how many barriers it
/// has, the parties, action and timeout.
type Args = (String, String, usize, u64, Option<Py<PyAny>>, Option<f64>);

/// A barrier, with the methods of `threading.Barrier`.
#[pyclass(frozen, module = "farcell._native")]
pub struct Barrier {
    array: Arc<Shared<BarrierArray>>,
    action: Option<Py<PyAny>>,
    timeout: Option<f64>,
}

/// Where all parties meet first, and where they wait for the action.
const MEETING: usize = 0;
const ACTION: usize = 1;

impl Barrier {
    fn made(
        py: Python<'_>,
        array: Arc<Shared<BarrierArray>>,
        action: Option<Py<PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Barrier> {
        if let Some(action) = &action
            && !action.bind(py).is_callable()
        {
            return Err(PyTypeError::new_err("the action of a barrier is a callable"));
        }
        // Said now, not by the first wait.
        waiting::timeout(timeout)?;
        Ok(Barrier { array, action, timeout })
    }

    /// One of its two, or the only one.
    fn native(&self, py: Python<'_>, which: usize) -> PyResult<farcell::Barrier> {
        self.array.get(py)?.at(0, which).or_raise(py)
    }

    /// Something with one of the two; `nothing` where there is no second one.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        which: usize,
        nothing: T,
        work: impl FnOnce(farcell::Barrier) -> farcell::Result<T> + Send,
    ) -> PyResult<T> {
        if which >= self.array.cols {
            return Ok(nothing);
        }
        let native = self.native(py, which)?;
        py.detach(|| work(native)).or_raise(py)
    }

    fn meet(&self, py: Python<'_>, which: usize, time: Option<Duration>) -> PyResult<BarrierWait> {
        let native = self.native(py, which)?;
        waiting::wait(py, |cancel| native.wait_with_options(&waiting::options(time, cancel, None)))
    }

    fn run_action(&self, py: Python<'_>) -> PyResult<()> {
        let Some(action) = &self.action else { return Ok(()) };
        let ended = action.call0(py).map(drop);
        if ended.is_err() {
            // What the action has raised is what counts.
            let _ = self.abort(py);
        }
        ended
    }
}

#[pymethods]
impl Barrier {
    #[new]
    #[pyo3(signature = (session, name, parties, action=None, timeout=None))]
    fn new(
        py: Python<'_>,
        session: &Session,
        name: String,
        parties: u64,
        action: Option<Py<PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Barrier> {
        let cols = if action.is_some() { 2 } else { 1 };
        let array = Shared::with_param(session.origin.clone(), name, 1, cols, parties);
        let barrier = Barrier::made(py, array, action, timeout)?;
        barrier.array.get(py)?;
        Ok(barrier)
    }

    #[staticmethod]
    #[pyo3(signature = (id, name, cols, parties, action, timeout))]
    fn _unpickle(
        py: Python<'_>,
        id: &str,
        name: String,
        cols: usize,
        parties: u64,
        action: Option<Py<PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<Barrier> {
        if cols != 1 + usize::from(action.is_some()) {
            return Err(PyValueError::new_err("this pickle of a barrier makes no sense"));
        }
        let array = Shared::with_param(Origin::by_id(id), name, 1, cols, parties);
        Barrier::made(py, array, action, timeout)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py, Args>> {
        let this = slf.get();
        let make = slf.get_type().getattr("_unpickle")?;
        let Shared { origin, name, cols, param, .. } = &*this.array;
        let action = this.action.as_ref().map(|action| action.clone_ref(slf.py()));
        Ok((make, (origin.id.clone(), name.clone(), *cols, *param, action, this.timeout)))
    }

    /// Name of its array.
    #[getter]
    fn name(&self) -> &str {
        &self.array.name
    }

    /// Sleeps until all parties are here, and returns the place in which this
    /// one came, each one once. When the time is over the barrier is broken. The
    /// time is for the others to come, not for the action.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<usize> {
        let time = waiting::timeout(timeout.or(self.timeout))?;
        let passed = self.meet(py, MEETING, time)?;
        if self.array.cols > 1 {
            if passed.is_last() {
                self.run_action(py)?;
            }
            let done = self.meet(py, ACTION, None);
            if let Err(error) = done {
                // What has ended the wait is what counts.
                let _ = self._left(py, error.value(py).as_any());
                return Err(error);
            }
        }
        Ok(passed.index())
    }

    /// As `wait`, to be awaited. Who is cancelled breaks it.
    #[pyo3(signature = (timeout=None))]
    fn wait_async(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        let aio = slf.py().import("farcell._aio")?;
        let time = timeout.or(slf.get().timeout);
        waiting::timeout(time)?;
        Ok(aio.call_method1("wait_barrier", (slf, time))?.unbind())
    }

    /// Whether it has a second one, at which to wait for the action.
    #[getter]
    fn _has_action(&self) -> bool {
        self.array.cols > 1
    }

    /// Comes to one of the two without a thread; `then` is called with the place
    /// and whether this is the last one.
    fn _start_wait(&self, py: Python<'_>, which: usize, then: Py<PyAny>) -> PyResult<Pending> {
        let then = Then::new(then);
        let native = self.native(py, which)?;
        let told = move |ended: farcell::Result<BarrierWait>| {
            then.tell(ended.map(|passed| (passed.index(), passed.is_last())));
        };
        py.detach(|| native.wait_then(told)).map(Pending).or_raise(py)
    }

    /// Runs the action, and breaks the barrier if that raises.
    fn _act(&self, py: Python<'_>) -> PyResult<()> {
        self.run_action(py)
    }

    /// Whoever gives up while the action runs has broken the second, and nobody is
    /// to meet at the first either. If others have broken it that has been done.
    fn _left(&self, py: Python<'_>, error: &Bound<'_, PyAny>) -> PyResult<()> {
        let broken = py.import("threading")?.getattr("BrokenBarrierError")?;
        if error.is_instance(&broken)? {
            return Ok(());
        }
        self.with(py, MEETING, (), |barrier| barrier.abort())
    }

    /// Breaks it: whoever waits, and whoever comes, gets `BrokenBarrierError`.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, MEETING, (), |barrier| barrier.abort())?;
        self.with(py, ACTION, (), |barrier| barrier.abort())
    }

    /// Mends it: whoever waits gets `BrokenBarrierError`, and it is empty. Those
    /// for whom the action runs at that moment go on when it is done.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, ACTION, (), |barrier| match barrier.is_broken()? {
            true => barrier.reset(),
            false => Ok(()),
        })?;
        self.with(py, MEETING, (), |barrier| barrier.reset())
    }

    /// How many pass it together.
    #[getter]
    fn parties(&self) -> u64 {
        self.array.param
    }

    /// How many wait at it.
    #[getter]
    fn n_waiting(&self, py: Python<'_>) -> PyResult<usize> {
        let coming = self.with(py, MEETING, 0, |barrier| barrier.n_waiting())?;
        Ok(coming + self.with(py, ACTION, 0, |barrier| barrier.n_waiting())?)
    }

    /// Whether it is broken.
    #[getter]
    fn broken(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.with(py, MEETING, false, |barrier| barrier.is_broken())?
            || self.with(py, ACTION, false, |barrier| barrier.is_broken())?)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let state = match self.native(py, MEETING).map(|one| py.detach(|| one.n_waiting())) {
            Ok(Ok(waiting)) => format!("waiters={waiting}/{}", self.array.param),
            Ok(Err(error)) => exception(py, &error).to_string(),
            Err(error) => error.to_string(),
        };
        format!("<Barrier at {} {state}>", self.array.name)
    }
}
