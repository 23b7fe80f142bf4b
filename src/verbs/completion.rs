//! Completion queues: what became of the requests.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use farcell_sys as sys;

use super::channel::CompletionChannel;
use super::device::Context;
use super::error::Error;
use super::hint;
use super::work::WorkId;

/// Which completions raise the channel after [`CompletionQueue::arm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// The next one, whatever it is.
    Any,
    /// The next receive whose sender asked for it, or the next failure.
    Solicited,
}

/// A completion queue.
pub struct CompletionQueue {
    context: Arc<Context>,
    channel: Option<Arc<CompletionChannel>>,
    raw: NonNull<sys::ibv_cq>,
    entries: u32,
    reserved: AtomicU32,
}

// SAFETY: libibverbs locks what its objects share; its functions may be called
// from any thread, verbs(7).
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("device", &self.context.name())
            .field("entries", &self.entries)
            .field("reserved", &self.reserved)
            .finish_non_exhaustive()
    }
}

impl CompletionQueue {
    /// Makes a queue of at least `entries` entries. With a channel, an event of
    /// this queue carries `token`. A system call. See `ibv_create_cq(3)`.
    ///
    /// # Errors
    /// [`Error::Limit`]; [`Error::Mismatch`] for another device's channel;
    /// [`Error::Call`]: EINVAL, ENOMEM, ENODEV. [`Error::Forked`].
    pub fn new(
        context: &Arc<Context>,
        entries: u32,
        channel: Option<(&Arc<CompletionChannel>, u64)>,
    ) -> Result<Arc<Self>, Error> {
        context.check()?;
        let limit = context.attributes().max_completions;
        if entries == 0 || entries > limit {
            return Err(Error::Limit {
                what: "entries of a completion queue",
                place: context.place(None),
                wanted: u64::from(entries),
                limit: u64::from(limit),
            });
        }
        if channel.is_some_and(|(channel, _)| !Arc::ptr_eq(channel.context(), context)) {
            return Err(Error::Mismatch {
                what: "a completion channel of another open device",
                place: context.place(None),
            });
        }
        let token = channel.map_or(0, |(_, token)| token);
        let token = std::ptr::without_provenance_mut(
            usize::try_from(token).unwrap_or_default(), // 64-bit only, asserted in `sys`
        );
        // SAFETY: device and channel are kept alive by the queue. The context
        // pointer is a number that nobody follows.
        let raw = unsafe {
            context.library().create_cq(
                context.raw(),
                entries.cast_signed(),
                token,
                channel.map(|(channel, _)| channel.raw()),
                0,
            )
        }
        .map_err(|error| hint::explain(error, context, None))?;
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            channel: channel.map(|(channel, _)| Arc::clone(channel)),
            raw,
            entries,
            reserved: AtomicU32::new(0),
        }))
    }

    /// Takes completions into `out`, as many as there are and fit; answers how
    /// many. Does not block and makes no system call on most devices (soft-RoCE
    /// neither). See `ibv_poll_cq(3)`.
    ///
    /// What the device wrote for a completed request is visible to this thread
    /// once its completion was taken: the provider puts the barrier between the
    /// completion entry and the data that the architecture needs.
    ///
    /// # Errors
    /// [`Error::Call`] where the queue has overrun or the device is gone;
    /// [`Error::Unsupported`]; [`Error::Forked`].
    #[inline]
    pub fn poll(&self, out: &mut [Completion]) -> Result<usize, Error> {
        self.context.check()?;
        // SAFETY: `Completion` is transparent over the C structure.
        let raw = unsafe { &mut *(std::ptr::from_mut(out) as *mut [sys::ibv_wc]) };
        // SAFETY: alive until drop.
        unsafe { self.context.library().poll_cq(self.raw, raw) }
            .map_err(|error| hint::explain(error, &self.context, None))
    }

    /// Asks for one channel event for the next completion. What is already in
    /// the queue raises none: arm, then poll until empty, then wait. Does not
    /// block. See `ibv_req_notify_cq(3)`.
    ///
    /// # Errors
    /// [`Error::Call`], [`Error::Unsupported`], [`Error::Forked`].
    pub fn arm(&self, notify: Notify) -> Result<(), Error> {
        self.context.check()?;
        // SAFETY: alive until drop.
        unsafe { self.context.library().req_notify_cq(self.raw, notify == Notify::Solicited) }
            .map_err(|error| hint::explain(error, &self.context, None))
    }

    /// The channel that it raises.
    #[must_use]
    pub fn channel(&self) -> Option<&Arc<CompletionChannel>> {
        self.channel.as_ref()
    }

    /// The device it is of.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> NonNull<sys::ibv_cq> {
        self.raw
    }

    /// Sets entries aside for a queue whose completions come here. A queue that
    /// overruns is lost with everything on it, so nobody may attach more than
    /// fits.
    pub(super) fn reserve(&self, entries: u32) -> Result<(), Error> {
        // Relaxed: a count, which orders no other memory.
        self.reserved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |reserved| {
                reserved.checked_add(entries).filter(|&sum| sum <= self.entries)
            })
            .map(drop)
            .map_err(|reserved| Error::Limit {
                what: "free entries of a completion queue",
                place: self.context.place(None),
                wanted: u64::from(entries),
                limit: u64::from(self.entries.saturating_sub(reserved)),
            })
    }

    pub(super) fn release(&self, entries: u32) {
        self.reserved.fetch_sub(entries, Ordering::Relaxed);
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let library = self.context.library();
        self.context
            // SAFETY: every queue pair on it held an Arc to it and is gone, and
            // every event was acknowledged where it was taken.
            .destroy(|| unsafe { library.destroy_cq(self.raw) });
    }
}

/// A completion: one request, or the last of several, is done or has failed.
#[repr(transparent)]
#[derive(Clone, Copy, Default)]
pub struct Completion(sys::ibv_wc);

/// The bit of a `wr_id` that marks receives; the rest of it is theirs to use.
pub(super) const RECEIVE: u64 = 1 << 63;

impl Completion {
    /// The request, where it is one that was posted to a send queue. Hand the
    /// completion to [`QueuePair::retire`](super::QueuePair::retire).
    #[must_use]
    #[inline]
    pub fn work(&self) -> Option<WorkId> {
        (!self.is_receive()).then_some(WorkId(self.0.wr_id))
    }

    /// Whether something was received (or a receive failed). Hand the
    /// completion to the shared receive queue or queue pair that it is of.
    #[must_use]
    pub fn is_receive(&self) -> bool {
        self.0.wr_id & RECEIVE != 0
    }

    /// The local queue pair's number.
    #[must_use]
    pub fn queue_pair(&self) -> u32 {
        self.0.qp_num
    }

    /// How it went.
    #[must_use]
    #[inline]
    pub fn status(&self) -> WorkStatus {
        WorkStatus::new(self.0.status)
    }

    /// The immediate value that came with it. Only after success.
    #[must_use]
    pub fn immediate(&self) -> Option<u32> {
        (self.0.wc_flags & sys::IBV_WC_WITH_IMM != 0).then_some(u32::from_be(self.0.imm_data))
    }

    /// The bytes that were received. Only after success.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.0.byte_len
    }

    #[inline]
    pub(super) fn id(&self) -> u64 {
        self.0.wr_id
    }

    /// `Ok` after success.
    #[inline]
    pub(super) fn result(&self, context: &Context, port: Option<u8>) -> Result<(), Error> {
        match self.status() {
            WorkStatus::Success => Ok(()),
            status => Err(Error::Work {
                place: context.place(port),
                queue_pair: self.queue_pair(),
                status,
                vendor: self.0.vendor_err,
            }),
        }
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completion")
            .field("id", &format_args!("{:#x}", self.0.wr_id))
            .field("status", &self.status())
            .field("queue_pair", &self.0.qp_num)
            .finish_non_exhaustive()
    }
}

/// How a request went, see `ibv_poll_cq(3)` and the InfiniBand specification,
/// "completion return status".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkStatus {
    /// Done.
    Success,
    /// A message longer than the receiver's buffer, or than a message may be.
    LocalLength,
    /// The local queue pair could not carry it out.
    LocalOperation,
    /// The local memory is not registered so.
    LocalProtection,
    /// The queue pair broke, or was broken, before this request's turn.
    Flushed,
    /// An answer did not fit into the local memory.
    LocalAccess,
    /// The peer does not do such requests.
    RemoteInvalid,
    /// The peer's memory is not registered so, or with another key or domain.
    RemoteAccess,
    /// The peer could not carry it out.
    RemoteOperation,
    /// The peer did not answer, however often it was asked.
    RetryExceeded,
    /// The peer had no receive posted, however often it was asked.
    ReceiverNotReady,
    /// The device is broken.
    Fatal,
    /// Another status.
    Other(u32),
}

impl WorkStatus {
    fn new(raw: sys::ibv_wc_status) -> Self {
        match raw {
            sys::IBV_WC_SUCCESS => Self::Success,
            sys::IBV_WC_LOC_LEN_ERR => Self::LocalLength,
            sys::IBV_WC_LOC_QP_OP_ERR => Self::LocalOperation,
            sys::IBV_WC_LOC_PROT_ERR => Self::LocalProtection,
            sys::IBV_WC_WR_FLUSH_ERR => Self::Flushed,
            sys::IBV_WC_LOC_ACCESS_ERR => Self::LocalAccess,
            sys::IBV_WC_REM_INV_REQ_ERR => Self::RemoteInvalid,
            sys::IBV_WC_REM_ACCESS_ERR => Self::RemoteAccess,
            sys::IBV_WC_REM_OP_ERR => Self::RemoteOperation,
            sys::IBV_WC_RETRY_EXC_ERR => Self::RetryExceeded,
            sys::IBV_WC_RNR_RETRY_EXC_ERR => Self::ReceiverNotReady,
            sys::IBV_WC_FATAL_ERR => Self::Fatal,
            other => Self::Other(other),
        }
    }

    /// Whether the peer is known not to have carried the request out: it
    /// refused it. Every other failure leaves that open, a flush too, since
    /// the request may have been under way when the queue pair broke.
    #[must_use]
    pub fn was_refused(self) -> bool {
        matches!(self, Self::RemoteInvalid | Self::RemoteAccess)
    }

    pub(super) fn advice(self) -> &'static str {
        match self {
            Self::RetryExceeded => {
                "the peer does not answer: it is gone, the path is cut, or the GID cannot reach it"
            }
            Self::ReceiverNotReady => "the peer posts no receives",
            Self::RemoteAccess => "wrong key, wrong protection domain, or not that access",
            Self::RemoteInvalid => "the peer's queue pair does not allow this operation",
            Self::Flushed => "an earlier failure broke the queue pair",
            Self::LocalOperation => "the link may be down",
            Self::LocalProtection | Self::LocalAccess => "local memory not registered for this",
            Self::LocalLength => "longer than the buffer",
            Self::RemoteOperation => "the peer's device could not carry it out",
            Self::Fatal => "the device must be reset",
            Self::Success | Self::Other(_) => "see the provider's documentation",
        }
    }
}

impl fmt::Display for WorkStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "success",
            Self::LocalLength => "local length error",
            Self::LocalOperation => "local queue pair operation error",
            Self::LocalProtection => "local protection error",
            Self::Flushed => "flushed",
            Self::LocalAccess => "local access error",
            Self::RemoteInvalid => "remote invalid request error",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::RetryExceeded => "retry exceeded",
            Self::ReceiverNotReady => "receiver not ready, retry exceeded",
            Self::Fatal => "fatal error",
            Self::Other(status) => match sys::Library::load() {
                Ok(library) => library.wc_status_str(*status),
                Err(_) => return write!(f, "status {status}"),
            },
        })
    }
}
