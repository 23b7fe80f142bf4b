//! Slots: messages that are replaced as a whole.

use crate::array::{Opens, Shared};
use crate::buffer::Lent;
use crate::errors::OrRaise;
use crate::pickled::Reduced;
use crate::session::{Origin, Session};
use crate::waiting::{self, Pending, Then, timeout};
use farcell::{Client, SlotArray};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyList};
use std::sync::Arc;

impl Opens for SlotArray {
    fn open(
        client: &Client,
        name: &str,
        rows: usize,
        _: usize,
        param: u64,
    ) -> farcell::Result<SlotArray> {
        client.slots(name, rows, param)
    }
}

/// An array of slots.
#[pyclass(frozen, module = "farcell._native", sequence)]
pub struct Slots {
    array: Arc<Shared<SlotArray>>,
}

/// One message, replaced as a whole: one writer, many readers.
#[pyclass(frozen, module = "farcell._native")]
pub struct Slot {
    array: Arc<Shared<SlotArray>>,
    row: usize,
}

type Args = (String, String, usize, u64, usize);

fn reduce<'py, T>(
    slf: &Bound<'py, T>,
    array: &Shared<SlotArray>,
    row: usize,
) -> PyResult<Reduced<'py, Args>> {
    let make = slf.as_any().get_type().getattr("_unpickle")?;
    Ok((make, (array.origin.id.clone(), array.name.clone(), array.rows, array.param, row)))
}

#[pymethods]
impl Slots {
    #[new]
    #[pyo3(signature = (session, name, rows, nbytes))]
    fn new(
        py: Python<'_>,
        session: &Session,
        name: String,
        rows: usize,
        nbytes: u64,
    ) -> PyResult<Slots> {
        let array = Shared::with_param(session.origin.clone(), name, rows, 1, nbytes);
        array.get(py)?;
        Ok(Slots { array })
    }

    #[staticmethod]
    fn _unpickle(id: &str, name: String, rows: usize, nbytes: u64, _row: usize) -> Slots {
        Slots { array: Shared::with_param(Origin::by_id(id), name, rows, 1, nbytes) }
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py, Args>> {
        reduce(slf, &slf.get().array, 0)
    }

    /// Name of the array.
    #[getter]
    fn name(&self) -> &str {
        &self.array.name
    }

    /// Most bytes of a message.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.array.param
    }

    fn __len__(&self) -> usize {
        self.array.rows
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let slots = (0..self.array.rows as isize).map(|row| self.__getitem__(row));
        PyList::new(py, slots.collect::<PyResult<Vec<_>>>()?)?.try_iter()
    }

    fn __getitem__(&self, row: isize) -> PyResult<Slot> {
        let rows = self.array.rows;
        let at = if row < 0 { row + rows as isize } else { row };
        match usize::try_from(at) {
            Ok(row) if row < rows => Ok(Slot { array: self.array.clone(), row }),
            _ => {
                Err(PyIndexError::new_err(format!("slot {row} is out of range: there are {rows}")))
            }
        }
    }

    /// How many messages were written to each.
    fn versions(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let array = self.array.get(py)?;
        py.detach(|| array.versions()).or_raise(py)
    }

    fn __repr__(&self) -> String {
        let Shared { name, rows, param, .. } = &*self.array;
        format!("<Slots {rows} of {param} bytes, {name}>")
    }
}

impl Slot {
    fn native(&self, py: Python<'_>) -> PyResult<farcell::Slot> {
        self.array.get(py)?.at(self.row).or_raise(py)
    }
}

#[pymethods]
impl Slot {
    #[staticmethod]
    fn _unpickle(id: &str, name: String, rows: usize, nbytes: u64, row: usize) -> PyResult<Slot> {
        if row >= rows {
            return Err(PyValueError::new_err("this pickle of a slot makes no sense"));
        }
        Ok(Slot { array: Shared::with_param(Origin::by_id(id), name, rows, 1, nbytes), row })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py, Args>> {
        let this = slf.get();
        reduce(slf, &this.array, this.row)
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

    /// Most bytes of a message.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.array.param
    }

    /// How many messages were written to it.
    fn version(&self, py: Python<'_>) -> PyResult<u64> {
        let slot = self.native(py)?;
        py.detach(|| slot.version()).or_raise(py)
    }

    /// Replaces the message by the bytes of a contiguous CPU tensor, a numpy
    /// array or any other buffer, taken from where they are, and returns its
    /// version.
    fn write(&self, py: Python<'_>, message: &Bound<'_, PyAny>) -> PyResult<u64> {
        let slot = self.native(py)?;
        let lent = Lent::new(message, false)?;
        py.detach(|| slot.write(lent.bytes())).or_raise(py)
    }

    /// Reads the message into a contiguous CPU tensor, a numpy array or any
    /// other writable buffer, and returns its version; 0 if there is none yet.
    fn read_into(&self, py: Python<'_>, buffer: &Bound<'_, PyAny>) -> PyResult<u64> {
        let slot = self.native(py)?;
        let mut lent = Lent::new(buffer, true)?;
        py.detach(|| slot.read(lent.bytes_mut())).or_raise(py).map(|read| read.version)
    }

    /// Version and bytes of the message.
    fn read<'py>(&self, py: Python<'py>) -> PyResult<(u64, Bound<'py, PyBytes>)> {
        let slot = self.native(py)?;
        let read = || {
            let mut bytes = vec![0; usize::try_from(slot.bytes()).unwrap_or(usize::MAX)];
            let read = slot.read(&mut bytes)?;
            bytes.truncate(read.len);
            Ok((read.version, bytes))
        };
        let (version, bytes) = py.detach(read).or_raise(py)?;
        Ok((version, PyBytes::new(py, &bytes)))
    }

    /// Sleeps until there is a message with a higher version than that; `False`
    /// when the time was over.
    #[pyo3(signature = (than, timeout=None))]
    fn wait_newer(&self, py: Python<'_>, than: u64, timeout: Option<f64>) -> PyResult<bool> {
        let time = self::timeout(timeout)?;
        let slot = self.native(py)?;
        waiting::wait(py, |cancel| slot.wait_newer(than, time, cancel))
    }

    /// As `wait_newer`, to be awaited.
    #[pyo3(signature = (than, timeout=None))]
    fn wait_newer_async(
        slf: &Bound<'_, Self>,
        than: u64,
        timeout: Option<f64>,
    ) -> PyResult<Py<PyAny>> {
        waiting::timeout(timeout)?;
        let aio = slf.py().import("farcell._aio")?;
        Ok(aio.call_method1("wait_newer", (slf, than, timeout))?.unbind())
    }

    /// Waits without a thread; `then` is called with what became of it.
    fn _start_wait(&self, py: Python<'_>, than: u64, then: Py<PyAny>) -> PyResult<Pending> {
        let then = Then::new(then);
        let slot = self.native(py)?;
        let told = move |ended: farcell::Result<()>| then.tell(ended.map(|()| true));
        py.detach(|| slot.wait_newer_then(than, told)).map(Pending).or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("<Slot {} of {}, {} bytes>", self.row, self.array.name, self.array.param)
    }
}
