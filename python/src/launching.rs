//! How this process was started, for `farcell.launch`.

use crate::errors::OrRaise;
use farcell::launch::{self, Launch as Native};
use pyo3::prelude::*;
use std::path::{Path, PathBuf};

/// A process that a launcher started together with others.
#[pyclass(frozen, module = "farcell._native")]
pub struct Launch(Native);

#[pymethods]
impl Launch {
    /// The launch that the environment tells of, if any does.
    #[staticmethod]
    fn from_env() -> Option<Launch> {
        Native::from_env().map(Launch)
    }

    /// `torchrun`, `Open MPI`, `Hydra` or `srun`.
    #[getter]
    fn launcher(&self) -> &'static str {
        self.0.launcher
    }

    /// Which of them this is.
    #[getter]
    fn rank(&self) -> usize {
        self.0.rank
    }

    /// How many they are.
    #[getter]
    fn size(&self) -> usize {
        self.0.size
    }

    /// Whether all of them run on this machine.
    #[getter]
    fn one_machine(&self) -> bool {
        self.0.one_machine
    }

    /// What tells this launch from every other one.
    #[getter]
    fn job(&self) -> &str {
        &self.0.job
    }

    /// Where rank 0's server listens.
    fn bind(&self) -> &'static str {
        self.0.bind()
    }

    /// The host on which rank 0 runs, if the launcher says.
    #[getter]
    fn first_host(&self) -> Option<&str> {
        self.0.first_host.as_deref()
    }

    /// Where rank 0 leaves its address.
    fn address_file(&self, py: Python<'_>) -> PyResult<PathBuf> {
        self.0.address_file().or_raise(py)
    }

    fn __repr__(&self) -> String {
        format!("<Launch by {}, rank {} of {}>", self.0.launcher, self.0.rank, self.0.size)
    }
}

/// Leaves an address in a file, whole or not at all.
#[pyfunction]
pub fn publish_address(py: Python<'_>, path: PathBuf, address: &str) -> PyResult<()> {
    launch::publish(Path::new(&path), address).or_raise(py)
}

/// The address in a file, if there is one.
#[pyfunction]
pub fn read_address(path: PathBuf) -> Option<String> {
    launch::read_address(&path)
}

/// The address file that the environment names, or the user's own.
#[pyfunction]
pub fn named_address_file() -> Option<PathBuf> {
    launch::named_address_file()
}

/// Variables of the environment that mean nothing, a sentence for each with the
/// likely meant one. The caller shows them.
#[pyfunction]
pub fn unknown_variables() -> Vec<String> {
    farcell::diagnose::unknown_variables()
}

/// What connecting without an argument would do here, a sentence a step.
#[pyfunction]
pub fn explain() -> Vec<String> {
    launch::explain()
}
