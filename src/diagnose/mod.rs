//! What stands between this process and a server, looked at piece by piece: for
//! programs that tell a person why something does not work, as `farcell doctor`.
//!
//! Everything here does what the library itself does when it connects, and says
//! how far it came. Nothing changes a cell that belongs to an array.

mod adapter;
mod host;
mod reach;
mod variables;

pub use adapter::{
    Adapter, AdapterAddress, AdapterPort, SelfTest, adapters, fork_safety, self_test,
};
pub use host::{Memlock, client_pins, memlock, segment_bytes};
pub use reach::{Answer, WIRE_VERSION, probe, resolve};
pub(crate) use variables::warn_once;
pub use variables::{VARIABLES, unknown_variables};
