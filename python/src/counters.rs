//! Counters with the syntax of lists, and one counter as a handle.

use crate::array::Shared;
use crate::errors::OrRaise;
use crate::pickled::{self, CellArgs, Numbers, Reduced, ViewArgs};
use crate::session::{Origin, Session};
use crate::view::{Axis, Found, View};
use crate::waiting::{self, Pending, Then, timeout};
use farcell::{Comparison, CounterArray};
use pyo3::basic::CompareOp;
use pyo3::exceptions::{PyIndexError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyIterator, PyList, PySlice, PyTuple};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// The counters of an array, or some of them.
#[pyclass(frozen, module = "farcell._native", sequence)]
pub struct Counters {
    array: Arc<Shared<CounterArray>>,
    view: View,
}

/// One counter.
#[pyclass(frozen, module = "farcell._native")]
pub struct Counter {
    array: Arc<Shared<CounterArray>>,
    row: usize,
    col: usize,
}

fn select(array: &CounterArray, view: &View) -> farcell::Result<farcell::Counters> {
    let whole = |axis: &Axis, len| *axis == Axis::all(len);
    match view {
        View::Grid(rows, cols) if whole(rows, array.rows()) && whole(cols, array.cols()) => {
            Ok(array.all())
        }
        View::Row(row, cols) if whole(cols, array.cols()) => array.row(*row),
        View::Column(rows, col) if whole(rows, array.rows()) => array.column(*col),
        view => array.cells(&view.list()),
    }
}

fn comparison(text: &str) -> PyResult<Comparison> {
    Ok(match text {
        "==" => Comparison::Eq,
        "!=" => Comparison::Ne,
        ">" => Comparison::Gt,
        ">=" => Comparison::Ge,
        "<" => Comparison::Lt,
        "<=" => Comparison::Le,
        other => {
            let text = format!("{other:?} is no comparison; use ==, !=, <, <=, > or >=");
            return Err(PyValueError::new_err(text));
        }
    })
}

/// That an array does not change its shape, and what does.
fn fixed() -> PyErr {
    PyTypeError::new_err(
        "an array of counters has a fixed size: make it as large as it gets, or begin with an \
         empty list of a Manager, mng.list(), and append to that",
    )
}

impl Counters {
    fn counter(&self, row: usize, col: usize) -> Counter {
        Counter { array: self.array.clone(), row, col }
    }

    fn one(&self, item: &Bound<'_, PyAny>) -> PyResult<Counter> {
        match self.view.index(item)? {
            Found::Cell(row, col) => Ok(self.counter(row, col)),
            Found::View(_) => Err(PyTypeError::new_err(
                "this names several counters; name one, with as many indices as there are dimensions",
            )),
        }
    }

    fn values(&self, py: Python<'_>) -> PyResult<Vec<i64>> {
        if self.view.cells() == 0 {
            return Ok(Vec::new());
        }
        let array = self.array.get(py)?;
        py.detach(|| select(&array, &self.view)?.snapshot()).or_raise(py)
    }

    /// Stores a value into each cell, on one trip.
    fn store_all(&self, py: Python<'_>, values: &[i64]) -> PyResult<()> {
        let array = self.array.get(py)?;
        let client = self.array.origin.client(py)?;
        py.detach(|| {
            let mut batch = client.batch();
            for (at, &value) in values.iter().enumerate() {
                let (row, col) = self.view.cell(at);
                batch.store(&array.at(row, col)?, value);
            }
            batch.run().map(drop)
        })
        .or_raise(py)
    }
}

#[pymethods]
impl Counters {
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
    ) -> PyResult<Counters> {
        let array = Shared::new(session.origin.clone(), name, rows, cols);
        array.get(py)?;
        Ok(Counters { array, view: View::whole(rows, cols, flat) })
    }

    #[staticmethod]
    fn _unpickle(
        id: &str,
        name: String,
        rows: usize,
        cols: usize,
        view: Numbers,
    ) -> PyResult<Counters> {
        let view = pickled::view(&view, rows, cols)?;
        Ok(Counters { array: Shared::new(Origin::by_id(id), name, rows, cols), view })
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
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.view.shape())
    }

    /// How many dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.view.shape().len()
    }

    /// How many counters.
    #[getter]
    fn size(&self) -> usize {
        self.view.cells()
    }

    /// The same counters as a list, row by row.
    #[getter]
    fn flat(&self) -> Counters {
        Counters { array: self.array.clone(), view: self.view.flat() }
    }

    fn __len__(&self) -> usize {
        self.view.len()
    }

    /// The value of a counter, or a view of several. Reading and writing back,
    /// as `counters[i] += 1` does, are two steps, between which others come
    /// in: use `add`.
    fn __getitem__(&self, py: Python<'_>, item: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        match self.view.index(item)? {
            Found::Cell(row, col) => {
                let value = self.counter(row, col).load(py)?;
                Ok(value.into_pyobject(py)?.into_any().unbind())
            }
            Found::View(view) => {
                let array = self.array.clone();
                Ok(Py::new(py, Counters { array, view })?.into_any())
            }
        }
    }

    /// Its values, read with one request, or its rows.
    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        if self.view.shape().len() == 1 {
            return PyList::new(py, self.values(py)?)?.try_iter();
        }
        let items = (0..self.view.len())
            .map(|at| self.__getitem__(py, at.into_pyobject(py)?.as_any()))
            .collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, items)?.try_iter()
    }

    /// Stores a value, or as many as the view has counters, row by row.
    fn __setitem__(
        &self,
        py: Python<'_>,
        item: &Bound<'_, PyAny>,
        value: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        match self.view.index(item)? {
            Found::Cell(row, col) => self.counter(row, col).store(py, value.extract()?),
            Found::View(view) => {
                let many = Counters { array: self.array.clone(), view };
                let cells = many.view.cells();
                let values: Vec<i64> = match value.try_iter() {
                    // One more than fits, of those that never end.
                    Ok(each) => {
                        each.take(cells + 1).map(|v| v?.extract()).collect::<PyResult<_>>()?
                    }
                    Err(_) => vec![value.extract()?; cells],
                };
                if values.len() > cells {
                    let text = format!("more values than the {cells} counters");
                    return Err(PyValueError::new_err(text));
                }
                if values.len() < cells {
                    let text = format!("{} values for {cells} counters", values.len());
                    return Err(PyValueError::new_err(text));
                }
                many.store_all(py, &values)
            }
        }
    }

    /// Refuses: an array has as many counters as it was made with.
    fn __delitem__(&self, _item: &Bound<'_, PyAny>) -> PyResult<()> {
        Err(fixed())
    }

    /// As `__delitem__`.
    #[pyo3(signature = (*_args))]
    fn append(&self, _args: &Bound<'_, PyTuple>) -> PyResult<()> {
        Err(fixed())
    }

    /// As `__delitem__`.
    #[pyo3(signature = (*_args))]
    fn extend(&self, _args: &Bound<'_, PyTuple>) -> PyResult<()> {
        Err(fixed())
    }

    /// As `__delitem__`.
    #[pyo3(signature = (*_args))]
    fn insert(&self, _args: &Bound<'_, PyTuple>) -> PyResult<()> {
        Err(fixed())
    }

    /// As `__delitem__`.
    #[pyo3(signature = (*_args))]
    fn pop(&self, _args: &Bound<'_, PyTuple>) -> PyResult<()> {
        Err(fixed())
    }

    /// A handle to one counter.
    fn at(&self, row: isize, col: isize, py: Python<'_>) -> PyResult<Counter> {
        self.one((row, col).into_pyobject(py)?.as_any())
    }

    /// A handle to one counter: `counter(i)`, or `counter(row, col)`.
    #[pyo3(signature = (*index))]
    fn counter_at(&self, index: &Bound<'_, PyTuple>) -> PyResult<Counter> {
        match index.len() {
            1 => self.one(&index.get_item(0)?),
            _ => self.one(index.as_any()),
        }
    }

    /// Adds to one counter, atomically, and returns the value before.
    fn add(&self, py: Python<'_>, index: &Bound<'_, PyAny>, delta: i64) -> PyResult<i64> {
        self.one(index)?.add(py, delta)
    }

    /// A row, as a view.
    fn row(&self, py: Python<'_>, row: isize) -> PyResult<Py<PyAny>> {
        let pair = (row, PySlice::full(py)).into_pyobject(py)?;
        self.__getitem__(py, pair.as_any())
    }

    /// A column, as a view.
    fn column(&self, py: Python<'_>, col: isize) -> PyResult<Py<PyAny>> {
        let pair = (PySlice::full(py), col).into_pyobject(py)?;
        self.__getitem__(py, pair.as_any())
    }

    /// The values, as a numpy array, or a memoryview where there is no numpy.
    /// One request.
    fn snapshot(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let bytes: Vec<u8> = self.values(py)?.into_iter().flat_map(i64::to_ne_bytes).collect();
        let arrays = py.import("farcell._arrays")?;
        let made = arrays.call_method1("ints", (PyByteArray::new(py, &bytes), self.shape(py)?))?;
        Ok(made.unbind())
    }

    /// The values as a list, row by row. One request.
    fn tolist(&self, py: Python<'_>) -> PyResult<Vec<i64>> {
        self.values(py)
    }

    /// Sleeps until at least `need` of them compare like this, and returns
    /// those that did, as `(row, column)`; an empty list when the time was
    /// over.
    #[pyo3(signature = (need, comparison, value, timeout=None))]
    fn wait_some(
        &self,
        py: Python<'_>,
        need: usize,
        comparison: &str,
        value: i64,
        timeout: Option<f64>,
    ) -> PyResult<Vec<(usize, usize)>> {
        let time = waiting::timeout(timeout)?;
        let comparison = self::comparison(comparison)?;
        let array = self.array.get(py)?;
        let woken = waiting::wait(py, |cancel| {
            select(&array, &self.view)?.wait_some(need, comparison, value, time, cancel)
        })?;
        Ok(match woken.is_satisfied() {
            true => woken.cells().iter().map(|cell| (cell.row, cell.col)).collect(),
            false => Vec::new(),
        })
    }

    /// As `wait_some`, to be awaited.
    #[pyo3(signature = (need, comparison, value, timeout=None))]
    fn wait_some_async(
        slf: &Bound<'_, Self>,
        need: usize,
        comparison: &str,
        value: i64,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        waiting::timeout(timeout)?;
        let aio = slf.py().import("farcell._aio")?;
        Ok(aio.call_method1("wait_counters", (slf, need, comparison, value, timeout))?.unbind())
    }

    /// Waits without a thread; `then` is called with what became of it.
    fn _start_wait(
        &self,
        py: Python<'_>,
        need: usize,
        comparison: &str,
        value: i64,
        then: Py<PyAny>,
    ) -> PyResult<Pending> {
        let then = Then::new(then);
        let comparison = self::comparison(comparison)?;
        let array = self.array.get(py)?;
        let told = move |ended: farcell::Result<farcell::Woken>| {
            let cells = |woken: farcell::Woken| {
                woken.cells().iter().map(|cell| (cell.row, cell.col)).collect::<Vec<_>>()
            };
            then.tell(ended.map(cells));
        };
        let started =
            py.detach(|| select(&array, &self.view)?.wait_some_then(need, comparison, value, told));
        started.map(Pending).or_raise(py)
    }

    fn __richcmp__(&self, other: &Bound<'_, PyAny>, op: CompareOp) -> PyResult<Py<PyAny>> {
        let py = other.py();
        let Ok(other) = other.cast::<Counters>() else {
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
        format!("<Counters {} of {}>", shape.join(" x "), self.array.name)
    }
}

impl Counter {
    fn native(&self, py: Python<'_>) -> PyResult<farcell::Counter> {
        self.array.get(py)?.at(self.row, self.col).or_raise(py)
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(farcell::Counter) -> farcell::Result<T> + Send,
    ) -> PyResult<T> {
        let counter = self.native(py)?;
        py.detach(|| work(counter)).or_raise(py)
    }
}

#[pymethods]
impl Counter {
    #[staticmethod]
    fn _unpickle(
        id: &str,
        name: String,
        rows: usize,
        cols: usize,
        row: usize,
        col: usize,
    ) -> PyResult<Counter> {
        if row >= rows || col >= cols {
            return Err(PyIndexError::new_err("this pickle of a counter makes no sense"));
        }
        Ok(Counter { array: Shared::new(Origin::by_id(id), name, rows, cols), row, col })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py, CellArgs>> {
        let this = slf.get();
        let array = &this.array;
        let make = slf.get_type().getattr("_unpickle")?;
        let origin = array.origin.id.clone();
        Ok((make, (origin, array.name.clone(), array.rows, array.cols, this.row, this.col)))
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

    /// Its value.
    fn load(&self, py: Python<'_>) -> PyResult<i64> {
        self.with(py, |counter| counter.load())
    }

    /// Puts a value.
    fn store(&self, py: Python<'_>, value: i64) -> PyResult<()> {
        self.with(py, |counter| counter.store(value))
    }

    /// As `load` and `store`, as `multiprocessing.Value` has it.
    #[getter]
    fn get_value(&self, py: Python<'_>) -> PyResult<i64> {
        self.load(py)
    }

    #[setter]
    fn set_value(&self, py: Python<'_>, value: i64) -> PyResult<()> {
        self.store(py, value)
    }

    /// As `load`.
    fn get(&self, py: Python<'_>) -> PyResult<i64> {
        self.load(py)
    }

    /// As `store`.
    fn set(&self, py: Python<'_>, value: i64) -> PyResult<()> {
        self.store(py, value)
    }

    /// Adds, atomically, and returns the value before.
    fn add(&self, py: Python<'_>, delta: i64) -> PyResult<i64> {
        self.with(py, |counter| counter.fetch_add(delta))
    }

    /// Puts `new` if the value is `expected`; whether it was.
    fn compare_exchange(&self, py: Python<'_>, expected: i64, new: i64) -> PyResult<bool> {
        self.with(py, |counter| counter.compare_exchange(expected, new)).map(|r| r.is_ok())
    }

    /// Puts a value and returns the one before.
    fn swap(&self, py: Python<'_>, value: i64) -> PyResult<i64> {
        self.with(py, |counter| counter.swap(value))
    }

    /// Sleeps until its value compares like this (`"=="`, `"!="`, `"<"`,
    /// `"<="`, `">"`, `">="`), and returns it; `None` when the time was over.
    #[pyo3(signature = (comparison, value, timeout=None))]
    fn wait_until(
        &self,
        py: Python<'_>,
        comparison: &str,
        value: i64,
        timeout: Option<f64>,
    ) -> PyResult<Option<i64>> {
        let time = self::timeout(timeout)?;
        let comparison = self::comparison(comparison)?;
        let counter = self.native(py)?;
        waiting::wait(py, |cancel| counter.wait_until(comparison, value, time, cancel))
    }

    /// As `wait_until`, to be awaited.
    #[pyo3(signature = (comparison, value, timeout=None))]
    fn wait_until_async(
        slf: &Bound<'_, Self>,
        comparison: &str,
        value: i64,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        waiting::timeout(timeout)?;
        let aio = slf.py().import("farcell._aio")?;
        Ok(aio.call_method1("wait_counter", (slf, comparison, value, timeout))?.unbind())
    }

    /// Waits without a thread; `then` is called with the value.
    fn _start_wait(
        &self,
        py: Python<'_>,
        comparison: &str,
        value: i64,
        then: Py<PyAny>,
    ) -> PyResult<Pending> {
        let then = Then::new(then);
        let comparison = self::comparison(comparison)?;
        let counter = self.native(py)?;
        let told = move |ended: farcell::Result<i64>| then.tell(ended);
        py.detach(|| counter.wait_until_then(comparison, value, told)).map(Pending).or_raise(py)
    }

    fn __richcmp__(&self, other: &Bound<'_, PyAny>, op: CompareOp) -> PyResult<Py<PyAny>> {
        let py = other.py();
        let Ok(other) = other.cast::<Counter>() else {
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

    fn __repr__(&self) -> String {
        format!("<Counter at {}[{}, {}]>", self.array.name, self.row, self.col)
    }
}
