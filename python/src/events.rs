//! Events and views of many.

use crate::array::Shared;
use crate::errors::{OrRaise, exception};
use crate::pickled::{self, CellArgs, Numbers, Reduced, ViewArgs};
use crate::session::{Origin, Session};
use crate::view::{Axis, Found, View};
use crate::waiting::{self, Pending, Then, timeout};
use farcell::EventArray;
use pyo3::basic::CompareOp;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyIterator, PyList};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// The events of an array, or some of them.
#[pyclass(frozen, module = "farcell._native", sequence)]
pub struct Events {
    array: Arc<Shared<EventArray>>,
    view: View,
}

/// One event.
#[pyclass(frozen, module = "farcell._native")]
pub struct Event {
    array: Arc<Shared<EventArray>>,
    row: usize,
    col: usize,
}

/// A view's cells as the library takes them.
fn select(array: &EventArray, view: &View) -> farcell::Result<farcell::Events> {
    let whole = |axis: &Axis, len| *axis == Axis::all(len);
    match view {
        View::Grid(rows, cols) if whole(rows, array.rows()) && whole(cols, array.cols()) => {
            Ok(array.all())
        }
        View::Flat(rows, cols, part)
            if whole(rows, array.rows())
                && whole(cols, array.cols())
                && whole(part, array.rows() * array.cols()) =>
        {
            Ok(array.all())
        }
        View::Row(row, cols) if whole(cols, array.cols()) => array.row(*row),
        View::Column(rows, col) if whole(rows, array.rows()) => array.column(*col),
        view => array.cells(&view.list()),
    }
}

impl Events {
    fn wrap(&self, py: Python<'_>, found: Found) -> PyResult<Py<PyAny>> {
        let array = self.array.clone();
        match found {
            Found::Cell(row, col) => Ok(Py::new(py, Event { array, row, col })?.into_any()),
            Found::View(view) => Ok(Py::new(py, Events { array, view })?.into_any()),
        }
    }

    /// Does something with all cells, without the interpreter's lock. A view
    /// without cells has `nothing`.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        nothing: T,
        work: impl FnOnce(farcell::Events) -> farcell::Result<T> + Send,
    ) -> PyResult<T> {
        if self.view.cells() == 0 {
            return Ok(nothing);
        }
        let array = self.array.get(py)?;
        py.detach(|| select(&array, &self.view).and_then(work)).or_raise(py)
    }

    fn woken(
        &self,
        py: Python<'_>,
        need: usize,
        seconds: Option<f64>,
        peers: Option<Vec<String>>,
    ) -> PyResult<Option<Vec<(usize, usize)>>> {
        let time = timeout(seconds)?;
        let array = self.array.get(py)?;
        let woken = waiting::wait(py, |cancel| {
            select(&array, &self.view)?
                .wait_with_options(need, &waiting::options(time, cancel, peers))
        })?;
        let cells = woken.cells().iter().map(|cell| (cell.row, cell.col)).collect();
        Ok(woken.is_satisfied().then_some(cells))
    }

    fn place(&self, row: isize, col: isize) -> PyResult<Event> {
        let (View::Grid(..) | View::Row(..)) = &self.view else {
            return Err(PyIndexError::new_err("row and column are those of a whole array"));
        };
        let side = |n: isize, most: usize| usize::try_from(n).ok().filter(|&n| n < most);
        let (rows, cols) = (self.array.rows, self.array.cols);
        match (side(row, rows), side(col, cols)) {
            (Some(row), Some(col)) => Ok(Event { array: self.array.clone(), row, col }),
            _ => Err(PyIndexError::new_err(format!(
                "({row}, {col}) is outside of array {:?} with {rows} rows and {cols} columns",
                self.array.name
            ))),
        }
    }
}

#[pymethods]
impl Events {
    /// Opens or creates an array; `flat`: it is indexed as a list.
    #[new]
    #[pyo3(signature = (session, name, rows, cols, flat))]
    fn new(
        py: Python<'_>,
        session: &Session,
        name: String,
        rows: usize,
        cols: usize,
        flat: bool,
    ) -> PyResult<Events> {
        let array = Shared::new(session.origin.clone(), name, rows, cols);
        array.get(py)?;
        Ok(Events { array, view: View::whole(rows, cols, flat) })
    }

    #[staticmethod]
    fn _unpickle(
        id: &str,
        name: String,
        rows: usize,
        cols: usize,
        view: Numbers,
    ) -> PyResult<Events> {
        let view = pickled::view(&view, rows, cols)?;
        Ok(Events { array: Shared::new(Origin::by_id(id), name, rows, cols), view })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py, ViewArgs>> {
        let this = slf.get();
        let array = &this.array;
        let make = slf.get_type().getattr("_unpickle")?;
        let view = pickled::numbers(&this.view);
        Ok((make, (array.origin.id.clone(), array.name.clone(), array.rows, array.cols, view)))
    }

    /// Name of the array.
    #[getter]
    fn name(&self) -> &str {
        &self.array.name
    }

    /// Length of each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        pyo3::types::PyTuple::new(py, self.view.shape())
    }

    /// How many dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.view.shape().len()
    }

    /// How many events.
    #[getter]
    fn size(&self) -> usize {
        self.view.cells()
    }

    /// The same events as a list, row by row.
    #[getter]
    fn flat(&self) -> Events {
        Events { array: self.array.clone(), view: self.view.flat() }
    }

    fn __len__(&self) -> usize {
        self.view.len()
    }

    fn __getitem__(&self, py: Python<'_>, item: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let found = self.view.index(item)?;
        self.wrap(py, found)
    }

    /// Its events, or its rows.
    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let items = (0..self.view.len())
            .map(|at| self.__getitem__(py, at.into_pyobject(py)?.as_any()))
            .collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, items)?.try_iter()
    }

    /// The event at a row and a column of the array.
    fn get_event(&self, row: isize, col: isize) -> PyResult<Event> {
        self.place(row, col)
    }

    /// Sets the event at a row and a column of the array.
    fn trigger_event(&self, py: Python<'_>, row: isize, col: isize) -> PyResult<()> {
        self.place(row, col)?.set(py)
    }

    /// Clears the event at a row and a column of the array.
    fn clear_event(&self, py: Python<'_>, row: isize, col: isize) -> PyResult<()> {
        self.place(row, col)?.clear(py)
    }

    /// A row, as a view.
    fn row(&self, py: Python<'_>, row: isize) -> PyResult<Py<PyAny>> {
        let pair = (row, pyo3::types::PySlice::full(py)).into_pyobject(py)?;
        self.__getitem__(py, pair.as_any())
    }

    /// A column, as a view.
    fn column(&self, py: Python<'_>, col: isize) -> PyResult<Py<PyAny>> {
        let pair = (pyo3::types::PySlice::full(py), col).into_pyobject(py)?;
        self.__getitem__(py, pair.as_any())
    }

    /// Which are set, as a numpy array of bools, or a memoryview of them where
    /// there is no numpy. One request.
    fn snapshot(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let set = self.with(py, Vec::new(), |events| events.snapshot())?;
        let bytes: Vec<u8> = set.into_iter().map(u8::from).collect();
        let arrays = py.import("farcell._arrays")?;
        let made = arrays.call_method1("bools", (PyByteArray::new(py, &bytes), self.shape(py)?))?;
        Ok(made.unbind())
    }

    /// As `snapshot`.
    fn is_set(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.snapshot(py)
    }

    /// Sets all of them; how many were clear. One request.
    fn set(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, 0, |events| events.set_all())
    }

    /// Clears all of them; how many were set. One request.
    fn clear(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, 0, |events| events.clear_all())
    }

    /// How many transitions each has made: odd means set.
    fn transitions(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.with(py, Vec::new(), |events| events.transitions())
    }

    /// Sleeps until one of them is set, and returns those that were, as
    /// `(row, column)`; an empty list when the time was over.
    #[pyo3(signature = (timeout=None, *, peers=None))]
    fn wait_any(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        peers: Option<Vec<String>>,
    ) -> PyResult<Vec<(usize, usize)>> {
        Ok(self.woken(py, 1, timeout, peers)?.unwrap_or_default())
    }

    /// Sleeps until each of them has been set since the call, or was before.
    #[pyo3(signature = (timeout=None, *, peers=None))]
    fn wait_all(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        peers: Option<Vec<String>>,
    ) -> PyResult<bool> {
        if self.view.cells() == 0 {
            return Ok(true);
        }
        Ok(self.woken(py, self.view.cells(), timeout, peers)?.is_some())
    }

    /// Sleeps until at least `need` of them are set, as `wait_any`.
    #[pyo3(signature = (need, timeout=None, *, peers=None))]
    fn wait_some(
        &self,
        py: Python<'_>,
        need: usize,
        timeout: Option<f64>,
        peers: Option<Vec<String>>,
    ) -> PyResult<Vec<(usize, usize)>> {
        Ok(self.woken(py, need, timeout, peers)?.unwrap_or_default())
    }

    /// As `wait_any`, to be awaited.
    #[pyo3(signature = (timeout=None))]
    fn wait_any_async(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        waiting::timeout(timeout)?;
        let aio = slf.py().import("farcell._aio")?;
        Ok(aio.call_method1("wait_cells", (slf, 1, timeout, false))?.unbind())
    }

    /// As `wait_some`, to be awaited.
    #[pyo3(signature = (need, timeout=None))]
    fn wait_some_async(
        slf: &Bound<'_, Self>,
        need: usize,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        waiting::timeout(timeout)?;
        let aio = slf.py().import("farcell._aio")?;
        Ok(aio.call_method1("wait_cells", (slf, need, timeout, false))?.unbind())
    }

    /// As `wait_all`, to be awaited.
    #[pyo3(signature = (timeout=None))]
    fn wait_all_async(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        waiting::timeout(timeout)?;
        let aio = slf.py().import("farcell._aio")?;
        let need = slf.get().view.cells();
        Ok(aio.call_method1("wait_cells", (slf, need, timeout, true))?.unbind())
    }

    /// Waits without a thread; `then` is called with what became of it.
    fn _start_wait(&self, py: Python<'_>, need: usize, then: Py<PyAny>) -> PyResult<Pending> {
        let then = Then::new(then);
        let array = self.array.get(py)?;
        let started = py.detach(|| {
            select(&array, &self.view)?.wait_then(need, move |ended| {
                let cells = ended
                    .map(|woken| woken.cells().iter().map(|c| (c.row, c.col)).collect::<Vec<_>>());
                then.tell(cells);
            })
        });
        started.map(Pending).or_raise(py)
    }

    fn __richcmp__(&self, other: &Bound<'_, PyAny>, op: CompareOp) -> PyResult<Py<PyAny>> {
        let py = other.py();
        let Ok(other) = other.cast::<Events>() else {
            return Ok(py.NotImplemented());
        };
        let other = other.get();
        let same = self.array.is_same(&other.array) && self.view == other.view;
        crate::compared(py, same, op)
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.array.origin.id, &self.array.name, &self.view).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        let shape: Vec<String> = self.view.shape().iter().map(ToString::to_string).collect();
        format!("<Events {} of {}>", shape.join(" x "), self.array.name)
    }
}

#[pymethods]
impl Event {
    #[staticmethod]
    fn _unpickle(
        id: &str,
        name: String,
        rows: usize,
        cols: usize,
        row: usize,
        col: usize,
    ) -> PyResult<Event> {
        if row >= rows || col >= cols {
            return Err(PyIndexError::new_err("this pickle of an event makes no sense"));
        }
        Ok(Event { array: Shared::new(Origin::by_id(id), name, rows, cols), row, col })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py, CellArgs>> {
        let this = slf.get();
        let array = &this.array;
        let make = slf.get_type().getattr("_unpickle")?;
        let origin = array.origin.id.clone();
        Ok((make, (origin, array.name.clone(), array.rows, array.cols, this.row, this.col)))
    }

    /// What its session is known by.
    #[getter]
    fn _origin(&self) -> &str {
        &self.array.origin.id
    }

    /// Name of its array.
    #[getter]
    fn name(&self) -> &str {
        &self.array.name
    }

    /// Its row.
    #[getter]
    fn row(&self) -> usize {
        self.row
    }

    /// Its column.
    #[getter]
    fn col(&self) -> usize {
        self.col
    }

    /// Whether it is set.
    fn is_set(&self, py: Python<'_>) -> PyResult<bool> {
        let event = self.native(py)?;
        py.detach(|| event.is_set()).or_raise(py)
    }

    /// As `is_set`.
    #[pyo3(name = "isSet")]
    fn is_set_as_before(&self, py: Python<'_>) -> PyResult<bool> {
        self.is_set(py)
    }

    /// Sets it and wakes all who wait.
    fn set(&self, py: Python<'_>) -> PyResult<()> {
        let event = self.native(py)?;
        py.detach(|| event.set()).map(drop).or_raise(py)
    }

    /// Clears it.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        let event = self.native(py)?;
        py.detach(|| event.clear()).map(drop).or_raise(py)
    }

    /// Clears it if it is set, and says whether it was: `True` for exactly one
    /// of all who take the same set.
    fn take(&self, py: Python<'_>) -> PyResult<bool> {
        let event = self.native(py)?;
        py.detach(|| event.take()).or_raise(py)
    }

    /// How many transitions it has made: odd means set.
    fn transitions(&self, py: Python<'_>) -> PyResult<u64> {
        let event = self.native(py)?;
        py.detach(|| event.transitions()).or_raise(py)
    }

    /// Sleeps until it is set, and returns `True`; `False` when the time was
    /// over. Also returns if it was set and cleared again meanwhile. `PeerLost`
    /// when the session of one of the peers, named as by `Client.join`, is lost.
    #[pyo3(signature = (timeout=None, *, peers=None))]
    fn wait(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        peers: Option<Vec<String>>,
    ) -> PyResult<bool> {
        let time = waiting::timeout(timeout)?;
        let event = self.native(py)?;
        waiting::wait(py, |cancel| event.wait_with_options(&waiting::options(time, cancel, peers)))
    }

    /// Sleeps until the count of its transitions is another one than `seen`,
    /// and returns it; `None` when the time was over.
    #[pyo3(signature = (seen, timeout=None))]
    fn wait_after(&self, py: Python<'_>, seen: u64, timeout: Option<f64>) -> PyResult<Option<u64>> {
        let time = waiting::timeout(timeout)?;
        let event = self.native(py)?;
        waiting::wait(py, |cancel| event.wait_after_with(seen, time, cancel))
    }

    /// As `wait`, to be awaited. Hundreds of these need one thread.
    #[pyo3(signature = (timeout=None))]
    fn wait_async(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        waiting::timeout(timeout)?;
        let aio = slf.py().import("farcell._aio")?;
        Ok(aio.call_method1("wait_event", (slf, timeout))?.unbind())
    }

    /// As `wait_after`, to be awaited.
    #[pyo3(signature = (seen, timeout=None))]
    fn wait_after_async(
        slf: &Bound<'_, Self>,
        seen: u64,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        waiting::timeout(timeout)?;
        let aio = slf.py().import("farcell._aio")?;
        Ok(aio.call_method1("wait_after", (slf, seen, timeout))?.unbind())
    }

    /// Waits without a thread; `then` is called with the count.
    fn _start_wait_after(&self, py: Python<'_>, seen: u64, then: Py<PyAny>) -> PyResult<Pending> {
        let then = Then::new(then);
        let event = self.native(py)?;
        let told = move |ended: farcell::Result<u64>| then.tell(ended);
        py.detach(|| event.wait_after_then(seen, told)).map(Pending).or_raise(py)
    }

    /// Waits without a thread; `then` is called with what became of it.
    fn _start_wait(&self, py: Python<'_>, then: Py<PyAny>) -> PyResult<Pending> {
        let then = Then::new(then);
        let event = self.native(py)?;
        let started = py.detach(|| event.wait_then(move |ended| then.tell(ended.map(|()| true))));
        started.map(Pending).or_raise(py)
    }

    fn __richcmp__(&self, other: &Bound<'_, PyAny>, op: CompareOp) -> PyResult<Py<PyAny>> {
        let py = other.py();
        let Ok(other) = other.cast::<Event>() else {
            return Ok(py.NotImplemented());
        };
        let other = other.get();
        let same =
            self.array.is_same(&other.array) && (self.row, self.col) == (other.row, other.col);
        crate::compared(py, same, op)
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.array.origin.id, &self.array.name, self.row, self.col).hash(&mut hasher);
        hasher.finish()
    }

    /// As `multiprocessing.Event` shows itself: with its state.
    fn __repr__(&self, py: Python<'_>) -> String {
        let state = match self.native(py).map(|event| py.detach(|| event.is_set())) {
            Ok(Ok(true)) => "set".to_owned(),
            Ok(Ok(false)) => "unset".to_owned(),
            Ok(Err(error)) => exception(py, &error).to_string(),
            Err(error) => error.to_string(),
        };
        format!("<Event at {}[{}, {}] {state}>", self.array.name, self.row, self.col)
    }
}

impl Event {
    fn native(&self, py: Python<'_>) -> PyResult<farcell::Event> {
        self.array.get(py)?.at(self.row, self.col).or_raise(py)
    }
}
