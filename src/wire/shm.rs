//! What is said about shared memory.

use crate::auth::Secret;
use bytemuck::{Pod, Zeroable};

/// Where a client on the server's machine gets the segment's memory.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct ShmRecord {
    /// Which start of which machine this is (`/proc/sys/kernel/random/boot_id`).
    pub boot: [u8; 16],
    /// Name of the server's socket, in the abstract namespace.
    pub name: [u8; 16],
    /// What the client says there: good once, and for seconds.
    pub token: Secret<16>,
    /// What the server says to it.
    pub echo: Secret<16>,
    /// Bytes of the segment's file.
    pub segment: u64,
    /// Bytes of the file that says where the server has waiters.
    pub watched: u64,
    /// Bytes of the file in which the client says where it sleeps; 0: there is
    /// none.
    pub desk: u64,
    /// 1: the client may change cells in memory.
    pub writable: u8,
    /// 1: the segment's file cannot become shorter (`F_SEAL_SHRINK`).
    pub sealed: u8,
    /// 0.
    pub reserved: [u8; 6],
}
