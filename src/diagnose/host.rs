//! Locked memory: what this process may have, and what is needed.

use crate::segment::Segment;
use crate::transport::rdma;
use crate::verbs;

/// How much memory this process may pin for an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memlock {
    /// `RLIMIT_MEMLOCK` in bytes (getrlimit(2)); `None`: no limit.
    pub limit: Option<u64>,
    /// The process has CAP_IPC_LOCK and is not held to the limit.
    pub is_free: bool,
    /// What it has pinned so far, in bytes, where the kernel tells.
    pub pinned: Option<u64>,
}

impl Memlock {
    /// How many bytes more can be pinned; `None`: any number.
    #[must_use]
    pub fn left(&self) -> Option<u64> {
        let limit = self.limit.filter(|_| !self.is_free)?;
        Some(limit.saturating_sub(self.pinned.unwrap_or(0)))
    }
}

/// Asks the system. Does not block.
#[must_use]
pub fn memlock() -> Memlock {
    Memlock {
        limit: verbs::memlock_limit(),
        is_free: verbs::may_lock_freely(),
        pinned: verbs::pinned_bytes(),
    }
}

/// What a client over RDMA with this many queue pairs
/// ([`ClientBuilder::queue_pairs`](crate::ClientBuilder::queue_pairs)) registers
/// when it connects, in bytes. Slots and the adapter's own queues come on top.
#[must_use]
pub fn client_pins(queue_pairs: usize) -> u64 {
    rdma::pinned_bytes(queue_pairs)
}

/// What a server that offers RDMA registers for this many cells, in bytes: once
/// for itself and once for each client that has RDMA.
#[must_use]
pub fn segment_bytes(cells: u32) -> u64 {
    // A capacity that has no size is refused by the server that is given it.
    Segment::bytes_of(cells).map_or(u64::MAX, |bytes| bytes as u64)
}
