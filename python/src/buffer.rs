//! Bytes of Python's objects, without a copy.
//!
//! The one place here with `unsafe`. `PyObject_GetBuffer` is in every Python,
//! but its struct is part of the stable interface only from 3.11 on, so PyO3
//! does not have it for 3.10; the layout (`Include/pybuffer.h`) has been the
//! same since 3.0.

#![expect(unsafe_code, reason = "this module is the boundary to the buffer protocol")]

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;

#[repr(C)]
struct RawBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

/// One piece of memory without gaps (`PyBUF_SIMPLE`).
const SIMPLE: c_int = 0;
const WRITABLE: c_int = 1;
/// With what its items are (`PyBUF_ND | PyBUF_FORMAT`).
const DESCRIBED: c_int = 8 | 4;

unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
}

/// A buffer that an object lends, until this is dropped. As long as it is lent
/// the object neither moves nor frees it.
pub struct Lent {
    /// In a box: some exporters remember where it is.
    raw: Box<RawBuffer>,
}

// SAFETY: the pointers are those of memory that stays where it is; what must be
// done with the interpreter attached, the release, attaches.
unsafe impl Send for Lent {}
// SAFETY: as above, and shared use only reads the fields.
unsafe impl Sync for Lent {}

impl Lent {
    /// Borrows the bytes of an object: bytes, bytearray, memoryview, array,
    /// numpy array, and with the help of `farcell._buffers` a CPU tensor.
    pub fn new(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Lent> {
        match Lent::of(object, writable) {
            Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => {
                let helper = object.py().import("farcell._buffers")?;
                Lent::of(&helper.call_method1("of", (object,))?, writable)
            }
            result => result,
        }
    }

    fn of(object: &Bound<'_, PyAny>, writable: bool) -> PyResult<Lent> {
        let lent = Lent::with(object, if writable { WRITABLE } else { SIMPLE })?;
        // One that cannot be described, as numpy's dates, holds no objects.
        if Lent::with(object, DESCRIBED).is_ok_and(|described| described.has_objects()) {
            // Not a TypeError, which says that something is no buffer.
            return Err(PyValueError::new_err(
                "its items are Python objects, whose addresses mean nothing elsewhere: give an \
                 array of numbers, or pickle it and give the bytes",
            ));
        }
        Ok(lent)
    }

    fn with(object: &Bound<'_, PyAny>, flags: c_int) -> PyResult<Lent> {
        let mut raw = Box::new(MaybeUninit::<RawBuffer>::zeroed());
        // SAFETY: the object is alive and the interpreter attached, as `Bound`
        // says; the view is writable memory of the right size.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), raw.as_mut_ptr(), flags) } != 0 {
            return Err(PyErr::fetch(object.py()));
        }
        // SAFETY: zeroed, which every field may be, and filled in since.
        Ok(Lent { raw: unsafe { raw.assume_init() } })
    }

    /// Whether there are pointers to Python's objects among its bytes. Only of one
    /// that was lent with its description.
    fn has_objects(&self) -> bool {
        if self.raw.format.is_null() {
            return false;
        }
        // SAFETY: a C string of the exporter's, which is there until the release.
        let format = unsafe { CStr::from_ptr(self.raw.format) };
        // Names of fields stand between colons.
        let types = format.to_bytes().split(|&byte| byte == b':').step_by(2);
        types.flatten().any(|&byte| byte == b'O')
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        let len = usize::try_from(self.raw.len).unwrap_or(0);
        if len == 0 {
            return &[];
        }
        // SAFETY: the exporter lends `len` bytes there until the release. Python
        // programs can write to them from other threads meanwhile, as to any
        // buffer that is being written to a socket: they then get a mix of old
        // and new bytes, which are numbers for all that is done here.
        unsafe { std::slice::from_raw_parts(self.raw.buf.cast(), len) }
    }

    /// Its bytes, to be written. Only of one that was lent writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = usize::try_from(self.raw.len).unwrap_or(0);
        if len == 0 || self.raw.readonly != 0 {
            return &mut [];
        }
        // SAFETY: as above; the exporter was asked for memory to write to.
        unsafe { std::slice::from_raw_parts_mut(self.raw.buf.cast(), len) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // SAFETY: filled in by PyObject_GetBuffer, and released once, attached.
        Python::attach(|_| unsafe { PyBuffer_Release(&raw mut *self.raw) });
    }
}
