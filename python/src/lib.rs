//! `farcell._native`: what the Python package `farcell` calls.
//!
//! Handles are here, since each call on one must cost next to nothing; what is
//! done once a program is Python, in `pysrc/farcell`.

mod array;
mod barrier;
mod buffer;
mod counters;
mod errors;
mod events;
mod launching;
mod pickled;
mod server;
mod session;
mod slots;
mod sync;
mod taken;
mod view;
mod waiting;

use pyo3::basic::CompareOp;
use pyo3::prelude::*;

/// The answer of a comparison that knows only whether two are the same.
fn compared(py: Python<'_>, same: bool, op: CompareOp) -> PyResult<Py<PyAny>> {
    let answer = match op {
        CompareOp::Eq => same,
        CompareOp::Ne => !same,
        _ => return Ok(py.NotImplemented()),
    };
    Ok(answer.into_pyobject(py)?.to_owned().into_any().unbind())
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::barrier::Barrier;
    #[pymodule_export]
    use crate::counters::{Counter, Counters};
    #[pymodule_export]
    use crate::events::{Event, Events};
    #[pymodule_export]
    use crate::launching::{
        Launch, explain, named_address_file, publish_address, read_address, unknown_variables,
    };
    #[pymodule_export]
    use crate::server::Server;
    #[pymodule_export]
    use crate::session::{Session, close_all, load_key, open_fds};
    #[pymodule_export]
    use crate::slots::{Slot, Slots};
    #[pymodule_export]
    use crate::sync::{Lock, Semaphore};
    #[pymodule_export]
    use crate::taken::Taken;
    #[pymodule_export]
    use crate::waiting::{Pending, forget_untold};
    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
