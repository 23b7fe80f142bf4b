//! Receives: slots of memory that wait for a peer's message or doorbell.

use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use farcell_sys as sys;

use super::completion::{Completion, CompletionQueue, RECEIVE};
use super::device::Context;
use super::domain::ProtectionDomain;
use super::error::Error;
use super::hint;
use super::region::{Access, Region};

/// The bits of a `wr_id` that count within one queue; those above, up to
/// [`RECEIVE`], tell the queues of a process apart, so that a completion of a
/// queue that is gone is not taken for one of its successor's.
pub(super) const COUNT_BITS: u32 = 40;

/// The next queue's number, in its place within a `wr_id`.
pub(super) fn serial() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: only the number matters.
    (NEXT.fetch_add(1, Ordering::Relaxed) << COUNT_BITS) & (RECEIVE - 1)
}

/// Something that was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The slot that it is in. Nothing comes into it until it is reposted.
    pub slot: u32,
    /// Its size in bytes: 0 for a doorbell.
    pub bytes: u32,
    /// The value that came with it.
    pub immediate: Option<u32>,
    /// The number of the local queue pair that it came by.
    pub queue_pair: u32,
}

/// The slots of one receive queue.
pub(super) struct Slots {
    region: Option<Arc<Region>>,
    bytes: u32,
    serial: u64,
    /// Whether each slot is the device's. Acquire and release between the one
    /// who received into a slot and the one who reposts it: the copying out
    /// stays before the device may write again.
    posted: Box<[AtomicBool]>,
}

impl Slots {
    pub(super) fn new(
        domain: &Arc<ProtectionDomain>,
        count: u32,
        bytes: u32,
    ) -> Result<Self, Error> {
        let region = match (count as usize).checked_mul(bytes as usize) {
            Some(0) => None,
            Some(size) => Some(Region::pages(domain, size, Access::LOCAL)?),
            None => {
                return Err(Error::Limit {
                    what: "bytes of receive slots",
                    place: domain.context().place(None),
                    wanted: u64::MAX,
                    limit: domain.context().attributes().max_region_bytes,
                });
            }
        };
        Ok(Self {
            region,
            bytes,
            serial: RECEIVE | serial(),
            posted: (0..count).map(|_| AtomicBool::new(false)).collect(),
        })
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.posted.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn post(
        &self,
        slot: u32,
        context: &Context,
        post: impl FnOnce(&mut sys::ibv_recv_wr) -> Result<(), sys::CallError>,
    ) -> Result<(), Error> {
        context.check()?;
        let posted = self.slot(slot, context)?;
        if posted.swap(true, Ordering::AcqRel) {
            return Err(Error::Mismatch {
                what: "a receive slot that is already posted",
                place: context.place(None),
            });
        }
        // Here, so that it outlives the call.
        let mut entry: sys::ibv_sge;
        let mut request = sys::ibv_recv_wr {
            wr_id: self.serial | u64::from(slot),
            next: ptr::null_mut(),
            sg_list: ptr::null_mut(),
            num_sge: 0,
        };
        if let Some(region) = &self.region {
            let start = slot as usize * self.bytes as usize;
            entry = region.slice(start..start + self.bytes as usize)?.entry();
            request.sg_list = &raw mut entry;
            request.num_sge = 1;
        }
        post(&mut request).map_err(|error| {
            posted.store(false, Ordering::Release);
            hint::explain(error, context, None)
        })
    }

    pub(super) fn received(
        &self,
        completion: &Completion,
        context: &Context,
    ) -> Result<Received, Error> {
        let foreign = || Error::Mismatch {
            what: "a completion of another receive queue",
            place: context.place(None),
        };
        let count = (1 << COUNT_BITS) - 1;
        if completion.id() & !count != self.serial {
            return Err(foreign());
        }
        let slot = u32::try_from(completion.id() & count).map_err(|_| foreign())?;
        self.slot(slot, context)?.store(false, Ordering::Release);
        completion.result(context, None)?;
        Ok(Received {
            slot,
            // A doorbell's length is that of its (empty) write.
            bytes: completion.bytes().min(self.bytes),
            immediate: completion.immediate(),
            queue_pair: completion.queue_pair(),
        })
    }

    pub(super) fn read(&self, received: &Received, into: &mut Vec<u8>) -> Result<(), Error> {
        into.clear();
        if let Some(region) = &self.region {
            into.resize(received.bytes.min(self.bytes) as usize, 0);
            region.read(received.slot as usize * self.bytes as usize, into)?;
        }
        Ok(())
    }

    fn slot(&self, slot: u32, context: &Context) -> Result<&AtomicBool, Error> {
        self.posted.get(slot as usize).ok_or_else(|| Error::Limit {
            what: "slots of a receive queue",
            place: context.place(None),
            wanted: u64::from(slot) + 1,
            limit: self.posted.len() as u64,
        })
    }
}

/// A shared receive queue: receives that any queue pair made on it may use.
/// All its completions go to one completion queue.
pub struct SharedReceiveQueue {
    domain: Arc<ProtectionDomain>,
    completions: Arc<CompletionQueue>,
    raw: NonNull<sys::ibv_srq>,
    slots: Slots,
}

// SAFETY: libibverbs locks what its objects share; its functions may be called
// from any thread, verbs(7).
unsafe impl Send for SharedReceiveQueue {}
// SAFETY: as above.
unsafe impl Sync for SharedReceiveQueue {}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceiveQueue")
            .field("device", &self.domain.context().name())
            .field("slots", &self.slots.count())
            .finish_non_exhaustive()
    }
}

impl SharedReceiveQueue {
    /// Makes a queue of `slots` slots of `bytes` bytes each (0 bytes: doorbells
    /// only) and posts them all. System calls, and pins the slots' memory. See
    /// `ibv_create_srq(3)`, `ibv_post_srq_recv(3)`.
    ///
    /// # Errors
    /// [`Error::Limit`] past the device's limits (also for a device without
    /// shared receive queues) or the completion queue's free entries;
    /// [`Error::Mismatch`] for another device's completion queue; those of
    /// [`Region::register`]; [`Error::Call`]: EINVAL, ENOMEM, ENODEV;
    /// [`Error::Unsupported`]; [`Error::Forked`].
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        completions: &Arc<CompletionQueue>,
        slots: u32,
        bytes: u32,
    ) -> Result<Arc<Self>, Error> {
        let context = domain.context();
        context.check()?;
        let limit = match context.attributes().max_shared_receive_queues {
            0 => 0,
            _ => context.attributes().max_shared_receives,
        };
        if slots == 0 || slots > limit {
            return Err(Error::Limit {
                what: "receives of a shared receive queue",
                place: context.place(None),
                wanted: u64::from(slots),
                limit: u64::from(limit),
            });
        }
        if !Arc::ptr_eq(completions.context(), context) {
            return Err(Error::Mismatch {
                what: "a completion queue of another open device",
                place: context.place(None),
            });
        }
        let slots = Slots::new(domain, slots, bytes)?;
        completions.reserve(slots.count())?;
        let mut attr = sys::ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: sys::ibv_srq_attr { max_wr: slots.count(), max_sge: 1, srq_limit: 0 },
        };
        // SAFETY: the queue keeps its domain alive.
        let raw = unsafe { context.library().create_srq(domain.raw(), &mut attr) };
        let raw = match raw {
            Ok(raw) => raw,
            Err(error) => {
                completions.release(slots.count());
                return Err(hint::explain(error, context, None));
            }
        };
        let queue =
            Self { domain: Arc::clone(domain), completions: Arc::clone(completions), raw, slots };
        for slot in 0..queue.slots.count() {
            queue.repost(slot)?;
        }
        Ok(Arc::new(queue))
    }

    /// What a completion of this queue brought. Its slot is the caller's until
    /// [`SharedReceiveQueue::repost`]. Does not block.
    ///
    /// # Errors
    /// [`Error::Work`] for a receive that failed (its slot is the caller's all
    /// the same); [`Error::Mismatch`] for another queue's completion.
    pub fn received(&self, completion: &Completion) -> Result<Received, Error> {
        self.slots.received(completion, self.domain.context())
    }

    /// Copies the bytes of what was received.
    ///
    /// # Errors
    /// [`Error::Range`], [`Error::Forked`].
    pub fn read(&self, received: &Received, into: &mut Vec<u8>) -> Result<(), Error> {
        self.slots.read(received, into)
    }

    /// Gives a slot back to the device. Does not block.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a slot that the device still has;
    /// [`Error::Limit`]; [`Error::Call`]: ENOMEM, EINVAL;
    /// [`Error::Unsupported`]; [`Error::Forked`].
    pub fn repost(&self, slot: u32) -> Result<(), Error> {
        let context = self.domain.context();
        self.slots.post(slot, context, |request| {
            let mut bad = ptr::null_mut();
            // SAFETY: alive until drop; the slot's memory is the queue's own
            // and outlives it.
            unsafe { context.library().post_srq_recv(self.raw, request, &mut bad) }
        })
    }

    /// Where its completions go.
    #[must_use]
    pub fn completions(&self) -> &Arc<CompletionQueue> {
        &self.completions
    }

    /// The domain it is in.
    #[must_use]
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    pub(super) fn raw(&self) -> NonNull<sys::ibv_srq> {
        self.raw
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        let library = self.domain.context().library();
        let gone = self
            .domain
            .context()
            // SAFETY: every queue pair on it held an Arc to it and is gone.
            .destroy(|| unsafe { library.destroy_srq(self.raw) });
        if gone {
            self.completions.release(self.slots.count());
        }
    }
}
