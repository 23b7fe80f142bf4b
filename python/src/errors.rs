//! Errors of the library as exceptions, whose classes are Python's own
//! (`farcell/_errors.py`): some have two bases.

use crate::waiting;
use farcell::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

/// The name of the class for an error.
fn class(error: &Error) -> &'static str {
    match error {
        Error::Unreachable { .. } | Error::NotFarcell { .. } | Error::ServerFull { .. } => {
            "Unreachable"
        }
        Error::BadAddress { .. } => "BadAddress",
        Error::ServerGoingAway { .. } => "ServerGoingAway",
        Error::OutcomeUnknown { .. } => "OutcomeUnknown",
        Error::AuthenticationFailed { .. } | Error::Impostor { .. } | Error::Intercepted { .. } => {
            "AuthenticationError"
        }
        Error::Tls { .. } => "NotEncrypted",
        Error::VersionMismatch { .. } | Error::Protocol { .. } => "ProtocolError",
        Error::OtherJob { .. } => "OtherJob",
        Error::ArrayMismatch { .. } | Error::WrongKind { .. } => "ArrayMismatch",
        Error::NoSuchArray { .. } => "NoSuchArray",
        Error::ArrayRemoved { .. } => "ArrayRemoved",
        Error::OutOfRange { .. } => "OutOfRange",
        Error::ValueTooLarge { .. } => "ValueTooLarge",
        Error::BadName { .. }
        | Error::BadShape { .. }
        | Error::BadSelection { .. }
        | Error::BadSetting { .. } => "BadArgument",
        Error::SegmentFull { .. } | Error::Limit { .. } => "LimitReached",
        Error::ReadOnly { .. } => "ReadOnly",
        Error::BadKey { .. } | Error::KeyFile { .. } | Error::NoKey { .. } => "NoKey",
        Error::SlotBusy { .. } => "SlotBusy",
        Error::Torn { .. } | Error::PartOfTorn { .. } | Error::WriteLost { .. } => "Torn",
        Error::SlotSize { .. } => "BadArgument",
        Error::SlotsFull { .. } => "LimitReached",
        Error::PeerLost { .. } => "PeerLost",
        Error::LeaseLost { .. } => "LeaseLost",
        Error::BarrierBroken { .. } => "BrokenBarrierError",
        Error::NameTaken { .. } | Error::BadPeerName { .. } | Error::TooManyPermits { .. } => {
            "BadArgument"
        }
        Error::Closed | Error::Forked { .. } => "Closed",
        Error::Bind { .. } | Error::Os { .. } => "SystemRefused",
        Error::Rdma { .. } => "NoRdma",
        Error::Shm { .. } => "NoSharedMemory",
        _ => "FarcellError",
    }
}

/// The exception for an error, or what a signal handler raised meanwhile.
pub fn exception(py: Python<'_>, error: &Error) -> PyErr {
    match waiting::raised(error) {
        Some(raised) => raised,
        None => raise(py, class(error), &error.to_string()),
    }
}

/// The exception of this class of `farcell/_errors.py`.
pub fn raise(py: Python<'_>, class: &str, text: &str) -> PyErr {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let made = MODULE
        .get_or_try_init(py, || Ok::<_, PyErr>(py.import("farcell._errors")?.unbind()))
        .and_then(|module| module.bind(py).getattr(class))
        .and_then(|class| class.call1((text,)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(_) => PyRuntimeError::new_err(text.to_owned()),
    }
}

/// Results of the library as those of Python.
pub trait OrRaise<T> {
    /// The value, or the exception.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for farcell::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, &error))
    }
}
