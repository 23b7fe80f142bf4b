//! Work requests: what a queue pair is asked to do.

use std::ptr;

use farcell_sys as sys;

use super::region::{Access, Local};

/// A request that was posted, by the order in which its queue pair got it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WorkId(pub(super) u64);

/// A place in a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The address, as the peer knows it.
    pub address: u64,
    /// The key of the region that it is in.
    pub key: u32,
}

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub enum Work<'a> {
    /// Read the peer's memory. The peer's CPU has no part in it.
    Read {
        /// Where the bytes go, as many as it is long.
        into: Local<'a>,
        /// Where they are.
        from: Remote,
    },
    /// Write the peer's memory.
    Write {
        /// The bytes.
        from: Local<'a>,
        /// Where they go.
        to: Remote,
    },
    /// Write the peer's memory with bytes that are copied as this is posted.
    WriteInline {
        /// The bytes.
        bytes: &'a [u8],
        /// Where they go.
        to: Remote,
    },
    /// Use up one of the peer's receives and hand it a value: a write with
    /// immediate of no bytes.
    Doorbell {
        /// The value.
        immediate: u32,
    },
    /// Write the peer's memory, then use up one of its receives and hand it a
    /// value.
    WriteImmediate {
        /// The bytes.
        from: Local<'a>,
        /// Where they go.
        to: Remote,
        /// The value.
        immediate: u32,
    },
    /// Put bytes into one of the peer's receives.
    Send {
        /// The bytes.
        from: Local<'a>,
        /// A value that goes with them.
        immediate: Option<u32>,
    },
    /// Put bytes into one of the peer's receives; they are copied as this is
    /// posted.
    SendInline {
        /// The bytes.
        bytes: &'a [u8],
        /// A value that goes with them.
        immediate: Option<u32>,
    },
    /// Swap the peer's word if it is what is expected.
    CompareSwap {
        /// Where the old word goes: 8 aligned bytes.
        old: Local<'a>,
        /// The word, aligned.
        at: Remote,
        /// What it must be.
        compare: u64,
        /// What it becomes.
        swap: u64,
    },
    /// Add to the peer's word.
    FetchAdd {
        /// Where the old word goes: 8 aligned bytes.
        old: Local<'a>,
        /// The word, aligned.
        at: Remote,
        /// What is added; it wraps.
        add: u64,
    },
}

/// A [`Work`] and how it is done. By default signalled and nothing more.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    pub(super) work: Work<'a>,
    pub(super) signalled: bool,
    flags: u32,
}

impl<'a> From<Work<'a>> for Request<'a> {
    fn from(work: Work<'a>) -> Self {
        Self { work, signalled: true, flags: 0 }
    }
}

impl<'a> Request<'a> {
    /// A request for `work`.
    #[must_use]
    pub fn new(work: Work<'a>) -> Self {
        work.into()
    }

    /// [`Work::Read`].
    #[must_use]
    #[inline]
    pub fn read(into: Local<'a>, from: Remote) -> Self {
        Work::Read { into, from }.into()
    }

    /// [`Work::CompareSwap`].
    #[must_use]
    #[inline]
    pub fn compare_swap(old: Local<'a>, at: Remote, compare: u64, swap: u64) -> Self {
        Work::CompareSwap { old, at, compare, swap }.into()
    }

    /// [`Work::FetchAdd`].
    #[must_use]
    #[inline]
    pub fn fetch_add(old: Local<'a>, at: Remote, add: u64) -> Self {
        Work::FetchAdd { old, at, add }.into()
    }

    /// [`Work::Doorbell`], solicited, so that it raises the channel of a peer
    /// that waits for solicited events only.
    #[must_use]
    pub fn doorbell(immediate: u32) -> Self {
        Self::new(Work::Doorbell { immediate }).solicited()
    }

    /// No completion of its own: the next signalled request's completion stands
    /// for it too. The queue pair signals one now and then all the same, as
    /// its send queue would never drain otherwise. A failure always completes.
    #[must_use]
    pub fn unsignalled(mut self) -> Self {
        self.signalled = false;
        self
    }

    /// Not before every READ and atomic posted earlier is done.
    #[must_use]
    pub fn fenced(mut self) -> Self {
        self.flags |= sys::IBV_SEND_FENCE;
        self
    }

    /// The peer's completion counts as solicited, see
    /// [`Notify::Solicited`](super::Notify::Solicited).
    #[must_use]
    pub fn solicited(mut self) -> Self {
        self.flags |= sys::IBV_SEND_SOLICITED;
        self
    }

    /// The local memory that it uses until it is complete, and whether the
    /// device writes to it.
    #[inline]
    pub(super) fn local(&self) -> Option<(Local<'a>, bool)> {
        match self.work {
            Work::Read { into, .. } => Some((into, true)),
            Work::CompareSwap { old, .. } | Work::FetchAdd { old, .. } => Some((old, true)),
            Work::Write { from, .. }
            | Work::WriteImmediate { from, .. }
            | Work::Send { from, .. } => Some((from, false)),
            Work::WriteInline { .. } | Work::SendInline { .. } | Work::Doorbell { .. } => None,
        }
    }

    /// The bytes that are copied as it is posted.
    #[inline]
    pub(super) fn inline(&self) -> Option<&'a [u8]> {
        match self.work {
            Work::WriteInline { bytes, .. } | Work::SendInline { bytes, .. } => Some(bytes),
            _ => None,
        }
    }

    /// What is wrong with it whatever the queue pair, if anything.
    #[inline]
    pub(super) fn flaw(&self) -> Option<&'static str> {
        let (local, writes) = self.local()?;
        if writes && !local.region.access().contains(Access::LOCAL) {
            return Some("registered without local writing, which the answer needs");
        }
        match self.work {
            Work::CompareSwap { old, at, .. } | Work::FetchAdd { old, at, .. } => {
                if old.len() != 8 || !old.offset().is_multiple_of(8) {
                    Some("an atomic answers into 8 aligned bytes")
                } else if !at.address.is_multiple_of(8) {
                    Some("an atomic's remote word must be aligned to 8 bytes")
                } else {
                    None
                }
            }
            _ => None,
        }
    }

    /// Fills in what goes to the device. The answer's pointers are those of
    /// `self` and `entry`.
    #[inline]
    pub(super) fn fill(&self, wr: &mut sys::ibv_send_wr, entry: &mut sys::ibv_sge, id: u64) {
        *wr = EMPTY;
        wr.wr_id = id;
        wr.send_flags = self.flags;
        if let Some((local, _)) = self.local() {
            *entry = local.entry();
            wr.sg_list = entry;
            wr.num_sge = 1;
        } else if let Some(bytes) = self.inline() {
            wr.send_flags |= sys::IBV_SEND_INLINE;
            if !bytes.is_empty() {
                *entry = sys::ibv_sge {
                    addr: bytes.as_ptr().expose_provenance() as u64,
                    // Checked against the queue pair's inline limit before.
                    length: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
                    lkey: 0,
                };
                wr.sg_list = entry;
                wr.num_sge = 1;
            }
        }
        let mut rdma = |remote: Remote| {
            wr.wr.rdma = sys::ibv_send_wr_rdma { remote_addr: remote.address, rkey: remote.key };
        };
        wr.opcode = match self.work {
            Work::Read { from, .. } => {
                rdma(from);
                sys::IBV_WR_RDMA_READ
            }
            Work::Write { to, .. } | Work::WriteInline { to, .. } => {
                rdma(to);
                sys::IBV_WR_RDMA_WRITE
            }
            Work::WriteImmediate { to, immediate, .. } => {
                rdma(to);
                wr.imm_data = immediate.to_be();
                sys::IBV_WR_RDMA_WRITE_WITH_IMM
            }
            Work::Doorbell { immediate } => {
                wr.imm_data = immediate.to_be();
                sys::IBV_WR_RDMA_WRITE_WITH_IMM
            }
            Work::Send { immediate, .. } | Work::SendInline { immediate, .. } => {
                wr.imm_data = immediate.unwrap_or(0).to_be();
                match immediate {
                    Some(_) => sys::IBV_WR_SEND_WITH_IMM,
                    None => sys::IBV_WR_SEND,
                }
            }
            Work::CompareSwap { at, compare, swap, .. } => {
                wr.wr.atomic = atomic(at, compare, swap);
                sys::IBV_WR_ATOMIC_CMP_AND_SWP
            }
            Work::FetchAdd { at, add, .. } => {
                wr.wr.atomic = atomic(at, add, 0);
                sys::IBV_WR_ATOMIC_FETCH_AND_ADD
            }
        };
    }
}

fn atomic(at: Remote, compare_add: u64, swap: u64) -> sys::ibv_send_wr_atomic {
    sys::ibv_send_wr_atomic { remote_addr: at.address, compare_add, swap, rkey: at.key }
}

pub(super) const EMPTY: sys::ibv_send_wr = sys::ibv_send_wr {
    wr_id: 0,
    next: ptr::null_mut(),
    sg_list: ptr::null_mut(),
    num_sge: 0,
    opcode: 0,
    send_flags: 0,
    imm_data: 0,
    wr: sys::ibv_send_wr_wr {
        atomic: sys::ibv_send_wr_atomic { remote_addr: 0, compare_add: 0, swap: 0, rkey: 0 },
    },
    xrc_remote_srqn: 0,
    unused: [0; 6],
};
