//! Queue pairs: connected ends of a reliable channel.

use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use farcell_sys as sys;

use super::completion::{Completion, CompletionQueue};
use super::connect::{Connect, Endpoint};
use super::domain::ProtectionDomain;
use super::error::Error;
use super::gid::Gid;
use super::hint;
use super::receive::{Received, SharedReceiveQueue, Slots, serial};
use super::region::Access;
use super::send_queue::{CHUNK, Inner, Sender};
use super::work::{Request, WorkId};

/// Where a queue pair's receives come from.
#[derive(Clone, Copy, Debug)]
pub enum Receive<'a> {
    /// Nothing is ever received (its peer READs, WRITEs and uses atomics, or
    /// does nothing at all).
    Nothing,
    /// From a shared receive queue of the same domain.
    Shared(&'a Arc<SharedReceiveQueue>),
    /// From slots of its own, for devices without shared receive queues.
    Own {
        /// Where the completions go.
        completions: &'a Arc<CompletionQueue>,
        /// How many slots.
        slots: u32,
        /// The size of each.
        bytes: u32,
    },
}

/// What a queue pair is made with.
#[derive(Clone, Copy, Debug)]
pub struct QueuePairConfig<'a> {
    /// The port, counted from 1.
    pub port: u8,
    /// How many requests may be outstanding.
    pub depth: u32,
    /// The most bytes of a request that is copied as it is posted. A wish: see
    /// [`QueuePair::max_inline`] for what the device granted.
    pub inline_bytes: u32,
    /// What the peer may do.
    pub access: Access,
    /// The number of the first packet, 24 bits. Should be random, so that late
    /// packets of an older connection do not fit.
    pub psn: u32,
    /// Where the requests' completions go.
    pub completions: &'a Arc<CompletionQueue>,
    /// Where receives come from.
    pub receive: Receive<'a>,
}

/// What a queue pair is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuePairState {
    /// Just made.
    Reset,
    /// Has a port, takes receives.
    Init,
    /// Ready to receive.
    Receiving,
    /// Ready to receive and send.
    Sending,
    /// Broken, or broken on purpose: everything is flushed.
    Error,
    /// Another state.
    Other(u32),
}

/// A queue pair that has a port and takes receives, but no peer yet.
pub struct UnconnectedQueuePair(Inner);

/// A connected queue pair.
pub struct QueuePair(Inner);

impl fmt::Debug for UnconnectedQueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("UnconnectedQueuePair", f)
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe("QueuePair", f)
    }
}

impl UnconnectedQueuePair {
    /// Makes a reliable-connected queue pair, gives it its port, and posts its
    /// own receive slots if it has any. A few system calls. See
    /// `ibv_create_qp(3)`, `ibv_modify_qp(3)`.
    ///
    /// # Errors
    /// [`Error::Limit`] past the device's depth or a completion queue's free
    /// entries; [`Error::Mismatch`] for parts of another device or domain;
    /// [`Error::Call`]: EINVAL, ENOMEM, EPERM, ENODEV; [`Error::Forked`].
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        config: &QueuePairConfig<'_>,
    ) -> Result<Self, Error> {
        let context = domain.context();
        context.check()?;
        let place = || context.place(Some(config.port));
        let limit = context.attributes().max_queue_depth;
        if config.depth == 0 || config.depth > limit {
            return Err(Error::Limit {
                what: "requests outstanding on a queue pair",
                place: place(),
                wanted: u64::from(config.depth),
                limit: u64::from(limit),
            });
        }
        let mismatch = |what| Error::Mismatch { what, place: place() };
        let (receive_completions, shared, slots) = match config.receive {
            Receive::Nothing => (config.completions, None, None),
            Receive::Shared(queue) => {
                if !Arc::ptr_eq(queue.domain(), domain) {
                    return Err(mismatch("a shared receive queue of another protection domain"));
                }
                (queue.completions(), Some(queue), None)
            }
            Receive::Own { completions, slots, bytes } => {
                (completions, None, Some(Slots::new(domain, slots, bytes)?))
            }
        };
        if [config.completions, receive_completions]
            .iter()
            .any(|queue| !Arc::ptr_eq(queue.context(), context))
        {
            return Err(mismatch("a completion queue of another open device"));
        }
        let receives = slots.as_ref().map_or(0, Slots::count);
        config.completions.reserve(config.depth)?;
        let made = receive_completions.reserve(receives).and_then(|()| {
            let mut attr = sys::ibv_qp_init_attr {
                qp_context: ptr::null_mut(),
                send_cq: config.completions.raw().as_ptr(),
                recv_cq: receive_completions.raw().as_ptr(),
                srq: shared.map_or(ptr::null_mut(), |queue| queue.raw().as_ptr()),
                cap: sys::ibv_qp_cap {
                    max_send_wr: config.depth,
                    // Some providers refuse a queue of none.
                    max_recv_wr: receives.max(u32::from(shared.is_none())),
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: config.inline_bytes,
                },
                qp_type: sys::IBV_QPT_RC,
                sq_sig_all: 0,
            };
            let library = context.library();
            // SAFETY: the queue pair keeps all that it is made from alive.
            let made = unsafe { library.create_qp(domain.raw(), &mut attr) };
            let made = match made {
                Err(error) if error.errno() == sys::libc::EINVAL && config.inline_bytes > 0 => {
                    attr.cap.max_inline_data = 0;
                    attr.cap.max_send_wr = config.depth;
                    // SAFETY: as above.
                    unsafe { library.create_qp(domain.raw(), &mut attr) }
                }
                made => made,
            };
            made.map(|raw| (raw, attr.cap.max_inline_data))
                .map_err(|error| hint::explain(error, context, Some(config.port)))
                .inspect_err(|_| receive_completions.release(receives))
        });
        let (raw, max_inline) = made.inspect_err(|_| config.completions.release(config.depth))?;
        let queue = Self(Inner {
            domain: Arc::clone(domain),
            completions: Arc::clone(config.completions),
            receive_completions: Arc::clone(receive_completions),
            shared: shared.map(Arc::clone),
            slots,
            raw,
            // SAFETY: made above.
            number: unsafe { (*raw.as_ptr()).qp_num },
            psn: config.psn & 0x00ff_ffff,
            port: config.port,
            depth: config.depth,
            max_inline,
            serial: serial(),
            posted: AtomicU64::new(0),
            retired: AtomicU64::new(0),
            sender: Mutex::new(Sender::new()),
        });
        queue.0.modify(
            sys::ibv_qp_attr {
                qp_state: sys::IBV_QPS_INIT,
                port_num: config.port,
                qp_access_flags: config.access.raw(),
                ..Default::default()
            },
            sys::IBV_QP_STATE
                | sys::IBV_QP_PKEY_INDEX
                | sys::IBV_QP_PORT
                | sys::IBV_QP_ACCESS_FLAGS,
        )?;
        for slot in 0..receives {
            queue.0.repost(slot)?;
        }
        Ok(queue)
    }

    /// What the peer must know to connect to it, with the GID that it shall
    /// use. A system call.
    ///
    /// # Errors
    /// Those of [`Context::port`](super::Context::port).
    pub fn endpoint(&self, gid: Gid) -> Result<Endpoint, Error> {
        Ok(Endpoint {
            queue_pair: self.0.number,
            psn: self.0.psn,
            lid: self.0.domain.context().port(self.0.port)?.lid,
            gid,
        })
    }

    /// Connects it. System calls; on RoCE the kernel may look up the peer's
    /// hardware address, which blocks for up to some seconds where it does not
    /// answer. On failure the queue pair is gone: make another one for another
    /// GID. See `ibv_modify_qp(3)`.
    ///
    /// # Errors
    /// [`Error::Call`]: EINVAL, ENETUNREACH, EHOSTUNREACH, ENODEV, ETIMEDOUT.
    /// [`Error::Forked`].
    pub fn connect(self, to: &Connect) -> Result<QueuePair, Error> {
        let global = !to.peer.gid.is_zero();
        self.0.modify(
            sys::ibv_qp_attr {
                qp_state: sys::IBV_QPS_RTR,
                path_mtu: to.mtu.raw(),
                dest_qp_num: to.peer.queue_pair,
                rq_psn: to.peer.psn & 0x00ff_ffff,
                max_dest_rd_atomic: to.responder_depth,
                min_rnr_timer: to.receiver_delay,
                ah_attr: sys::ibv_ah_attr {
                    grh: sys::ibv_global_route {
                        dgid: sys::ibv_gid { raw: to.peer.gid.0 },
                        flow_label: 0,
                        sgid_index: to.gid_index,
                        hop_limit: to.hop_limit,
                        traffic_class: to.traffic_class,
                    },
                    dlid: to.peer.lid,
                    sl: to.service_level,
                    is_global: u8::from(global),
                    port_num: self.0.port,
                    ..Default::default()
                },
                ..Default::default()
            },
            sys::IBV_QP_STATE
                | sys::IBV_QP_AV
                | sys::IBV_QP_PATH_MTU
                | sys::IBV_QP_DEST_QPN
                | sys::IBV_QP_RQ_PSN
                | sys::IBV_QP_MAX_DEST_RD_ATOMIC
                | sys::IBV_QP_MIN_RNR_TIMER,
        )?;
        self.0.modify(
            sys::ibv_qp_attr {
                qp_state: sys::IBV_QPS_RTS,
                sq_psn: self.0.psn,
                timeout: to.ack_timeout.min(31),
                retry_cnt: to.retries.min(7),
                rnr_retry: to.receiver_retries.min(7),
                max_rd_atomic: to.initiator_depth,
                ..Default::default()
            },
            sys::IBV_QP_STATE
                | sys::IBV_QP_SQ_PSN
                | sys::IBV_QP_TIMEOUT
                | sys::IBV_QP_RETRY_CNT
                | sys::IBV_QP_RNR_RETRY
                | sys::IBV_QP_MAX_QP_RD_ATOMIC,
        )?;
        Ok(QueuePair(self.0))
    }
}

impl QueuePair {
    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.0.number
    }

    /// The most bytes that [`Work::SendInline`](super::Work::SendInline) and
    /// [`Work::WriteInline`](super::Work::WriteInline) take.
    #[must_use]
    pub fn max_inline(&self) -> u32 {
        self.0.max_inline
    }

    /// How many requests may be outstanding.
    #[must_use]
    pub fn depth(&self) -> u32 {
        self.0.depth
    }

    /// How many requests are outstanding, by what was retired so far.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        // In this order: what is retired was posted before.
        let retired = self.0.retired.load(Ordering::Acquire);
        let posted = self.0.posted.load(Ordering::Acquire);
        u32::try_from(posted.saturating_sub(retired)).unwrap_or(u32::MAX)
    }

    /// Posts one request. Does not block. See `ibv_post_send(3)`.
    ///
    /// Where another thread polls the completion queue, it may have the
    /// request's completion before this returns.
    ///
    /// # Errors
    /// [`Error::QueueFull`]; [`Error::Mismatch`] for a region of another domain
    /// or a request that no device could do; [`Error::Limit`] for too many
    /// inline bytes; [`Error::Call`]: EINVAL, ENOMEM; [`Error::Unsupported`];
    /// [`Error::Forked`]. The request was not posted then. It may have been
    /// after [`Error::Unclear`].
    #[inline]
    pub fn post(&self, request: Request<'_>) -> Result<WorkId, Error> {
        let mut id = WorkId(0);
        self.0.post::<1>(&[request], |posted| id = posted)?;
        Ok(id)
    }

    /// Posts requests in order, several with one ring of the device's doorbell.
    /// Does not block. `posted` gets the identity of each that was posted, also
    /// where a later one failed.
    ///
    /// # Errors
    /// Those of [`QueuePair::post`], for the first request that is not in
    /// `posted`; after [`Error::Unclear`] the last ones in `posted` are those
    /// that are in doubt.
    pub fn post_all(
        &self,
        requests: &[Request<'_>],
        posted: &mut Vec<WorkId>,
    ) -> Result<(), Error> {
        for chunk in requests.chunks(CHUNK) {
            self.0.post::<CHUNK>(chunk, |id| posted.push(id))?;
        }
        Ok(())
    }

    /// Notes that a request, and with it all that were posted before it, is
    /// complete. Until then its region is kept alive and its place in the send
    /// queue is taken. Does not block.
    ///
    /// # Errors
    /// [`Error::Work`] if the request failed: this queue pair is broken then,
    /// and what else is outstanding completes as flushed. [`Error::Mismatch`]
    /// for a completion of another queue pair, also of one that is gone and had
    /// the same number.
    #[inline]
    pub fn retire(&self, completion: &Completion) -> Result<(), Error> {
        self.0.retire(completion)
    }

    /// Lets go of the regions that no outstanding request uses. They are kept
    /// for the next request otherwise, a few of them. May make system calls.
    pub fn release_idle(&self) {
        let retired = self.0.retired.load(Ordering::Acquire);
        let idle = self.0.sender().take_idle(retired);
        // Outside the lock: it may deregister.
        drop(idle);
    }

    /// What a receive completion of this queue pair brought, from its shared
    /// receive queue or its own slots.
    ///
    /// # Errors
    /// As [`SharedReceiveQueue::received`].
    pub fn received(&self, completion: &Completion) -> Result<Received, Error> {
        match (&self.0.shared, &self.0.slots) {
            (Some(shared), _) => shared.received(completion),
            (None, Some(slots)) => slots.received(completion, self.0.domain.context()),
            (None, None) => Err(self.0.no_receives()),
        }
    }

    /// Copies the bytes of what was received.
    ///
    /// # Errors
    /// As [`SharedReceiveQueue::read`].
    pub fn read(&self, received: &Received, into: &mut Vec<u8>) -> Result<(), Error> {
        match (&self.0.shared, &self.0.slots) {
            (Some(shared), _) => shared.read(received, into),
            (None, Some(slots)) => slots.read(received, into),
            (None, None) => Err(self.0.no_receives()),
        }
    }

    /// Gives a slot back to the device.
    ///
    /// # Errors
    /// As [`SharedReceiveQueue::repost`].
    pub fn repost(&self, slot: u32) -> Result<(), Error> {
        match &self.0.shared {
            Some(shared) => shared.repost(slot),
            None => self.0.repost(slot),
        }
    }

    /// What it is doing. A system call. See `ibv_query_qp(3)`.
    ///
    /// # Errors
    /// [`Error::Call`]: ENOMEM, EINVAL. [`Error::Forked`].
    pub fn state(&self) -> Result<QueuePairState, Error> {
        let context = self.0.domain.context();
        context.check()?;
        // SAFETY: alive until drop.
        let (attr, _) = unsafe { context.library().query_qp(self.0.raw, sys::IBV_QP_STATE) }
            .map_err(|error| hint::explain(error, context, Some(self.0.port)))?;
        Ok(match attr.qp_state {
            sys::IBV_QPS_RESET => QueuePairState::Reset,
            sys::IBV_QPS_INIT => QueuePairState::Init,
            sys::IBV_QPS_RTR => QueuePairState::Receiving,
            sys::IBV_QPS_RTS => QueuePairState::Sending,
            sys::IBV_QPS_ERR => QueuePairState::Error,
            other => QueuePairState::Other(other),
        })
    }

    /// Breaks it on purpose: what is outstanding completes as flushed, and the
    /// peer's next request fails. A system call.
    ///
    /// # Errors
    /// [`Error::Call`], [`Error::Forked`].
    pub fn shut(&self) -> Result<(), Error> {
        self.0.modify(
            sys::ibv_qp_attr { qp_state: sys::IBV_QPS_ERR, ..Default::default() },
            sys::IBV_QP_STATE,
        )
    }
}
