//! The inside of a queue pair: its parts, what it has outstanding, and how a
//! request gets to the device and is accounted for.
//!
//! The requests of a reliable connection complete in the order in which they
//! were posted (InfiniBand specification, "transport service: ordering rules").
//! So one count of retired requests says of each whether it is complete, and a
//! completion stands for all requests before it, signalled or not.

use std::fmt;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use farcell_sys as sys;

use super::completion::{Completion, CompletionQueue};
use super::domain::ProtectionDomain;
use super::error::{Error, Place};
use super::hint;
use super::receive::{COUNT_BITS, SharedReceiveQueue, Slots};
use super::region::Region;
use super::work::{EMPTY, Request, WorkId};

/// How many requests go to the device with one call.
pub(super) const CHUNK: usize = 16;

/// How many idle regions a queue pair keeps hold of before it looks whether
/// they are still needed.
const IDLE_REGIONS: usize = 8;

/// What a queue pair has outstanding.
pub(super) struct Sender {
    /// Requests posted since the last signalled one.
    pub(super) unsignalled: u32,
    /// Regions in use, and the request that used each last.
    pub(super) regions: Vec<(Arc<Region>, u64)>,
}

/// A queue pair and all that it needs to live.
pub(super) struct Inner {
    pub(super) domain: Arc<ProtectionDomain>,
    pub(super) completions: Arc<CompletionQueue>,
    pub(super) receive_completions: Arc<CompletionQueue>,
    pub(super) shared: Option<Arc<SharedReceiveQueue>>,
    pub(super) slots: Option<Slots>,
    pub(super) raw: NonNull<sys::ibv_qp>,
    pub(super) number: u32,
    pub(super) psn: u32,
    pub(super) port: u8,
    pub(super) depth: u32,
    pub(super) max_inline: u32,
    pub(super) serial: u64,
    /// Requests posted so far. Changed under the lock of `sender` only.
    pub(super) posted: AtomicU64,
    /// Requests known to be complete: all before this one. Grows only.
    ///
    /// Acquire and release between the one who retires and the one who posts:
    /// the device's place is free, and a region idle, only after the completion
    /// was taken.
    pub(super) retired: AtomicU64,
    pub(super) sender: Mutex<Sender>,
}

// SAFETY: libibverbs locks what its objects share; its functions may be called
// from any thread, verbs(7).
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Sender {
    pub(super) fn new() -> Self {
        Self { unsignalled: 0, regions: Vec::with_capacity(IDLE_REGIONS) }
    }
}

impl Inner {
    pub(super) fn describe(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name)
            .field("device", &self.domain.context().name())
            .field("port", &self.port)
            .field("number", &self.number)
            .finish_non_exhaustive()
    }

    pub(super) fn place(&self) -> Place {
        self.domain.context().place(Some(self.port))
    }

    pub(super) fn no_receives(&self) -> Error {
        Error::Mismatch { what: "a queue pair that was made without receives", place: self.place() }
    }

    #[inline]
    pub(super) fn sender(&self) -> MutexGuard<'_, Sender> {
        // Nothing that runs under this lock panics half-way.
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn modify(&self, mut attr: sys::ibv_qp_attr, mask: u32) -> Result<(), Error> {
        let context = self.domain.context();
        context.check()?;
        // SAFETY: alive until drop.
        unsafe { context.library().modify_qp(self.raw, &mut attr, mask) }
            .map_err(|error| hint::explain(error, context, Some(self.port)))
    }

    pub(super) fn repost(&self, slot: u32) -> Result<(), Error> {
        let context = self.domain.context();
        let slots = self.slots.as_ref().ok_or_else(|| self.no_receives())?;
        slots.post(slot, context, |request| {
            let mut bad = ptr::null_mut();
            // SAFETY: alive until drop; the slot's memory is the queue pair's
            // own and outlives it.
            unsafe { context.library().post_recv(self.raw, request, &mut bad) }
        })
    }

    #[inline]
    fn check(&self, request: &Request<'_>) -> Result<(), Error> {
        let mismatch = |what| Error::Mismatch { what, place: self.place() };
        if let Some((local, _)) = request.local() {
            if !Arc::ptr_eq(local.region.domain(), &self.domain) {
                return Err(mismatch("a region of another protection domain"));
            }
            if let Some(flaw) = request.flaw() {
                return Err(mismatch(flaw));
            }
        }
        match request.inline() {
            Some(bytes) if bytes.len() > self.max_inline as usize => Err(Error::Limit {
                what: "bytes of an inline request",
                place: self.place(),
                wanted: bytes.len() as u64,
                limit: u64::from(self.max_inline),
            }),
            _ => Ok(()),
        }
    }

    /// Posts up to `N` requests with one call.
    #[inline]
    pub(super) fn post<const N: usize>(
        &self,
        requests: &[Request<'_>],
        mut posted: impl FnMut(WorkId),
    ) -> Result<(), Error> {
        let context = self.domain.context();
        context.check()?;
        let mut wrs = [EMPTY; N];
        let mut entries = [sys::ibv_sge::default(); N];
        let mut idle = Vec::new();
        let mut sender = self.sender();
        // Relaxed: changed under the lock that is held here.
        let next = self.posted.load(Ordering::Relaxed);
        let retired = self.retired.load(Ordering::Acquire);
        // The requests before the first that is flawed, or has no room, go.
        let mut stopped = Ok(());
        let mut count = 0;
        let mut unsignalled = sender.unsignalled;
        for (index, request) in requests.iter().take(N).enumerate() {
            if let Err(error) = self.check(request) {
                stopped = Err(error);
                break;
            }
            let sequence = next + index as u64;
            if sequence - retired >= u64::from(self.depth) {
                stopped = Err(Error::QueueFull { place: self.place(), depth: self.depth });
                break;
            }
            request.fill(&mut wrs[index], &mut entries[index], self.id(sequence).0);
            // Unsignalled requests hold their places until a signalled one
            // after them completes: half the queue is the most that may wait.
            unsignalled += 1;
            if request.signalled || unsignalled >= self.depth.div_ceil(2) {
                wrs[index].send_flags |= sys::IBV_SEND_SIGNALED;
                unsignalled = 0;
            }
            count = index + 1;
        }
        if count == 0 {
            return stopped;
        }
        let first = wrs.as_mut_ptr();
        for index in 1..count {
            // SAFETY: both are inside `wrs`, which outlives the call below.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        // The regions are held before the device can know of them.
        for (index, request) in requests[..count].iter().enumerate() {
            if let Some((local, _)) = request.local() {
                sender.hold(local.region, next + index as u64, retired, &mut idle);
            }
        }
        // Before the call: another thread may take a completion before it
        // returns. Release: pairs with the load in `retire`.
        self.posted.store(next + count as u64, Ordering::Release);
        let mut bad = ptr::null_mut();
        // SAFETY: alive until drop. Each request points to its entry in
        // `entries`; entries point into regions, held above, or into inline
        // bytes, which the call copies.
        let result = unsafe { context.library().post_send(self.raw, &mut *first, &mut bad) };
        let mut unclear = false;
        let accepted = match &result {
            Ok(()) => count,
            Err(error) if error.failure == sys::Failure::NullSlot => 0,
            // Where the provider names none, the requests are in its queue and
            // only the doorbell failed: they may be carried out.
            Err(_) if bad.is_null() => {
                unclear = true;
                count
            }
            Err(_) => {
                (0..count).find(|&index| ptr::eq(bad, first.wrapping_add(index))).unwrap_or(0)
            }
        };
        for index in 0..accepted {
            posted(self.id(next + index as u64));
        }
        if accepted < count {
            // What the device refused never completes.
            self.posted.store(next + accepted as u64, Ordering::Release);
        }
        sender.unsignalled = if accepted == count {
            unsignalled
        } else {
            // Which of them were signalled no longer matters: counting too many
            // signals one early.
            sender.unsignalled.saturating_add(u32::try_from(accepted).unwrap_or(u32::MAX))
        };
        drop(sender);
        drop(idle);
        result.map_err(|error| {
            if unclear {
                Error::Unclear { place: self.place(), errno: error.errno() }
            } else {
                hint::explain(error, context, Some(self.port))
            }
        })?;
        stopped
    }

    #[inline]
    fn id(&self, sequence: u64) -> WorkId {
        WorkId(self.serial | (sequence & ((1 << COUNT_BITS) - 1)))
    }

    #[inline]
    pub(super) fn retire(&self, completion: &Completion) -> Result<(), Error> {
        let count = (1 << COUNT_BITS) - 1;
        if completion.id() & !count != self.serial {
            return Err(Error::Mismatch {
                what: "a completion of another queue pair",
                place: self.place(),
            });
        }
        let retired = self.retired.load(Ordering::Acquire);
        let posted = self.posted.load(Ordering::Acquire);
        // The count wraps after 2^40 requests; far fewer are outstanding.
        let ahead = (completion.id() & count).wrapping_sub(retired) & count;
        // Otherwise a later completion, which another thread took, stood for
        // this one already.
        if ahead < posted.saturating_sub(retired) {
            // The greatest counts, should two threads retire at a time.
            self.retired.fetch_max(retired + ahead + 1, Ordering::AcqRel);
        }
        completion.result(self.domain.context(), Some(self.port))
    }
}

impl Sender {
    pub(super) fn take_idle(&mut self, retired: u64) -> Vec<(Arc<Region>, u64)> {
        self.regions.extract_if(.., |(_, last)| *last < retired).collect()
    }

    /// Keeps `region` alive until request `sequence` is retired.
    #[inline]
    fn hold(
        &mut self,
        region: &Arc<Region>,
        sequence: u64,
        retired: u64,
        idle: &mut Vec<(Arc<Region>, u64)>,
    ) {
        if let Some((_, last)) = self.regions.iter_mut().find(|(held, _)| Arc::ptr_eq(held, region))
        {
            *last = sequence;
            return;
        }
        if self.regions.len() >= IDLE_REGIONS {
            // Dropped by the caller outside the lock: it may deregister.
            idle.append(&mut self.take_idle(retired));
        }
        self.regions.push((Arc::clone(region), sequence));
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let library = self.domain.context().library();
        let gone = self
            .domain
            .context()
            // SAFETY: made in `new`, and nobody else knows it.
            .destroy(|| unsafe { library.destroy_qp(self.raw) });
        let sender = self.sender.get_mut().unwrap_or_else(PoisonError::into_inner);
        if gone {
            self.completions.release(self.depth);
            self.receive_completions.release(self.slots.as_ref().map_or(0, Slots::count));
        } else {
            // It may still be at work on them.
            mem::forget(mem::take(&mut sender.regions));
            mem::forget(self.slots.take());
        }
    }
}
