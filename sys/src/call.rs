//! How a C call went wrong, and the three ways in which C says so.

use std::ffi::c_int;
use std::fmt;
use std::io;
use std::ptr::NonNull;

/// A call of libibverbs that did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallError {
    /// The C name of the call.
    pub call: &'static str,
    /// What went wrong.
    pub failure: Failure,
}

/// What went wrong in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The call said so, with this errno.
    Errno(i32),
    /// The provider of this device left the function's slot null.
    NullSlot,
    /// This version of libibverbs has no such function.
    NoSymbol,
}

impl CallError {
    /// The errno of this failure. A function that is not there counts as
    /// `EOPNOTSUPP`, which is what the C inline functions answer.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self.failure {
            Failure::Errno(errno) => errno,
            Failure::NullSlot | Failure::NoSymbol => libc::EOPNOTSUPP,
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.failure {
            Failure::Errno(errno) => {
                write!(f, "{}: {}", self.call, io::Error::from_raw_os_error(errno))
            }
            Failure::NullSlot => {
                write!(f, "{}: this device's provider has no such call", self.call)
            }
            Failure::NoSymbol => {
                write!(f, "{}: this version of libibverbs has no such call", self.call)
            }
        }
    }
}

impl std::error::Error for CallError {}

/// Forgets the thread's errno, so that a C function that fails without
/// setting it is not blamed for an older failure.
pub(crate) fn clear_errno() {
    // SAFETY: __errno_location always returns this thread's own errno cell.
    unsafe { *libc::__errno_location() = 0 }
}

fn last_errno() -> i32 {
    // SAFETY: as above.
    match unsafe { *libc::__errno_location() } {
        0 => libc::EIO,
        errno => errno,
    }
}

pub(crate) fn failed(call: &'static str, errno: i32) -> CallError {
    CallError { call, failure: Failure::Errno(errno) }
}

/// The convention "null and errno".
pub(crate) fn pointer<T>(call: &'static str, answer: *mut T) -> Result<NonNull<T>, CallError> {
    NonNull::new(answer).ok_or_else(|| failed(call, last_errno()))
}

/// The conventions "the errno itself" and "-1 and errno". Some providers
/// answer with a negative errno; -1 is then taken as "see errno", since EPERM
/// is not an answer that they give this way.
pub(crate) fn status(call: &'static str, answer: c_int) -> Result<(), CallError> {
    match answer {
        0 => Ok(()),
        -1 => Err(failed(call, last_errno())),
        errno => Err(failed(call, errno.saturating_abs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_convention_yields_the_errno() {
        assert_eq!(status("x", 0), Ok(()));
        assert_eq!(status("x", libc::EINVAL).unwrap_err().errno(), libc::EINVAL);
        assert_eq!(status("x", -libc::ENOMEM).unwrap_err().errno(), libc::ENOMEM);
        clear_errno();
        assert_eq!(status("x", -1).unwrap_err().errno(), libc::EIO);
        // SAFETY: this thread's own errno cell.
        unsafe { *libc::__errno_location() = libc::EAGAIN };
        assert_eq!(status("x", -1).unwrap_err().errno(), libc::EAGAIN);
        let null: *mut u8 = std::ptr::null_mut();
        assert_eq!(pointer("x", null).unwrap_err().errno(), libc::EAGAIN);
        assert_eq!(status("x", c_int::MIN).unwrap_err().errno(), c_int::MAX);
    }

    #[test]
    fn the_message_names_call_and_reason() {
        let text = failed("ibv_reg_mr", libc::ENOMEM).to_string();
        assert!(text.starts_with("ibv_reg_mr: "), "{text}");
        assert!(text.contains("memory"), "{text}");
    }
}
