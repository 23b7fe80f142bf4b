//! The ABI of libibverbs, found at run time.
//!
//! One binary has to start on nodes with and without RDMA, so nothing here is
//! linked: [`Library::load`] opens `libibverbs.so.1`, and a machine without
//! that file gets a [`LoadError`] that says so. The types are written by hand
//! from the published C interface (`<infiniband/verbs.h>`, whose layout is
//! frozen by the symbol version `IBVERBS_1.1`); the workspace member
//! `abi-check` compares each size, offset and constant with what the system's
//! own headers say.
//!
//! All foreign `unsafe` of farcell lives here. The functions keep their C
//! names and C meaning, with three differences:
//!
//! - every call answers with a [`CallError`] that names the call and the
//!   errno, whichever of the three conventions the C function has (a null
//!   pointer with errno, -1 with errno, or the errno as the value);
//! - a function-pointer slot that a provider leaves null is
//!   [`Failure::NullSlot`], not a jump to address zero;
//! - buffers that the library fills are zeroed first, and
//!   [`ibv_port_attr`], which grew between versions of the library, is read
//!   into a larger buffer.

#![allow(
    unsafe_code,
    reason = "this crate is the boundary to a C library: calling it is its purpose"
)]

#[cfg(not(all(target_os = "linux", target_endian = "little", target_pointer_width = "64")))]
compile_error!("farcell-sys describes the verbs ABI of 64-bit little-endian Linux only");

/// The size of a page, in bytes. See `sysconf(3)`; reads no file, so it answers
/// where no descriptor is left.
#[must_use]
pub fn page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

mod call;
pub mod constants;
pub mod fork;
mod library;
mod ops;
mod types;

pub use call::{CallError, Failure};
pub use constants::*;
pub use libc;
pub use library::{Functions, LIBRARY_NAME, Library, LoadError};
pub use types::*;
