//! Regions: memory that a device may reach.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{BitOr, Range};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use farcell_sys as sys;

use super::domain::ProtectionDomain;
use super::error::Error;
use super::hint;
use super::memory::{Memory, Pages, page_size};

/// What a device may do with a region, or a peer with a queue pair. Reading by
/// the local side is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access(u32);

impl Access {
    /// Local reading alone: what is sent or written from.
    pub const NONE: Self = Self(0);
    /// What local requests READ into, and atomics answer into.
    pub const LOCAL: Self = Self(sys::IBV_ACCESS_LOCAL_WRITE);
    /// Peers may READ and nothing else.
    pub const REMOTE_READ: Self = Self(sys::IBV_ACCESS_REMOTE_READ);
    /// Peers may WRITE. A region needs [`Access::LOCAL`] with it.
    pub const REMOTE_WRITE: Self = Self(sys::IBV_ACCESS_REMOTE_WRITE);
    /// Peers may use atomics. A region needs [`Access::LOCAL`] with it.
    pub const REMOTE_ATOMIC: Self = Self(sys::IBV_ACCESS_REMOTE_ATOMIC);

    /// Whether all of `other` is in here.
    #[must_use]
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    pub(super) const fn raw(self) -> u32 {
        self.0
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Memory that a device may reach, pinned for as long as this lives.
pub struct Region {
    domain: Arc<ProtectionDomain>,
    raw: NonNull<sys::ibv_mr>,
    memory: ManuallyDrop<Arc<dyn Memory>>,
    address: NonNull<u8>,
    len: usize,
    local_key: u32,
    remote_key: u32,
    access: Access,
}

// SAFETY: the memory is reached through atomics only; libibverbs' functions may
// be called from any thread, verbs(7).
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("address", &self.address)
            .field("len", &self.len)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl Region {
    /// Registers memory. Pins every page of it, which takes time (about a
    /// quarter of a millisecond a MiB) and counts against the memlock limit.
    /// The same memory may be registered in several domains. See
    /// `ibv_reg_mr(3)`.
    ///
    /// # Errors
    /// [`Error::Memlock`] for ENOMEM under a memlock limit, or EPERM under one of
    /// 0. [`Error::Call`]:
    /// ENOMEM, EFAULT (not mapped so, or an ordinary file's shared map), EINVAL
    /// (access or size), EOPNOTSUPP. [`Error::Unaligned`], [`Error::Limit`]
    /// (past the device's largest region), [`Error::Forked`].
    pub fn register(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        access: Access,
    ) -> Result<Arc<Self>, Error> {
        let all = 0..memory.len();
        Self::register_part(domain, memory, all, access)
    }

    /// Registers these bytes of a memory, which must begin at a page.
    ///
    /// # Errors
    /// Those of [`Region::register`]; [`Error::Range`] for bytes that the memory
    /// has not.
    pub fn register_part(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<dyn Memory>,
        part: Range<usize>,
        access: Access,
    ) -> Result<Arc<Self>, Error> {
        let context = domain.context();
        context.check()?;
        if part.is_empty() || part.end > memory.len() {
            let reason = if part.is_empty() { "empty" } else { "not inside it" };
            let (start, end) = (part.start, part.end);
            return Err(Error::Range { start, end, len: memory.len(), reason });
        }
        // SAFETY: inside of the memory, which is one mapping: `Memory`'s promise.
        let address = unsafe { memory.address().add(part.start) };
        let len = part.len();
        if !address.as_ptr().addr().is_multiple_of(page_size()) {
            return Err(Error::Unaligned { address: address.as_ptr().addr() });
        }
        let most = context.attributes().max_region_bytes;
        if len as u64 > most {
            return Err(Error::Limit {
                what: "bytes of one region",
                place: context.place(None),
                wanted: len as u64,
                limit: most,
            });
        }
        // SAFETY: the domain lives as long as the region, which also keeps the
        // memory mapped until it is off the device: `Memory`'s promise.
        let raw = unsafe {
            context.library().reg_mr(domain.raw(), address.as_ptr().cast(), len, access.raw())
        }
        .map_err(|error| match hint::memlock_limit() {
            // EPERM is the kernel's word for a limit of nothing at all.
            Some(limit)
                if error.errno() == sys::libc::ENOMEM
                    || limit == 0 && error.errno() == sys::libc::EPERM =>
            {
                Error::Memlock {
                    place: context.place(None),
                    limit,
                    needed: len.next_multiple_of(page_size()) as u64,
                    pinned: hint::pinned_bytes(),
                    errno: error.errno(),
                }
            }
            _ => hint::explain(error, context, None),
        })?;
        // SAFETY: registered above.
        let (local_key, remote_key) = unsafe { ((*raw.as_ptr()).lkey, (*raw.as_ptr()).rkey) };
        Ok(Arc::new(Self {
            domain: Arc::clone(domain),
            raw,
            memory: ManuallyDrop::new(memory),
            address,
            len,
            local_key,
            remote_key,
            access,
        }))
    }

    /// Registers new anonymous pages of at least `bytes` bytes.
    ///
    /// # Errors
    /// Those of [`Region::register`] and [`Pages::new`].
    pub fn pages(
        domain: &Arc<ProtectionDomain>,
        bytes: usize,
        access: Access,
    ) -> Result<Arc<Self>, Error> {
        let pages = Pages::new(bytes)
            .map_err(|error| Error::system("mmap", domain.context().place(None), &error))?;
        Self::register(domain, Arc::new(pages), access)
    }

    /// The domain it is in.
    #[must_use]
    #[inline]
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// Its size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes. It always has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What the device may do with it.
    #[must_use]
    #[inline]
    pub fn access(&self) -> Access {
        self.access
    }

    /// The address by which peers name its first byte.
    #[must_use]
    #[inline]
    pub fn remote_address(&self) -> u64 {
        self.address.as_ptr().expose_provenance() as u64
    }

    /// The key that peers need for it.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        self.remote_key
    }

    #[inline]
    pub(super) fn local_key(&self) -> u32 {
        self.local_key
    }

    /// A piece of it, for a request to read from or write into.
    ///
    /// # Errors
    /// [`Error::Range`] if it is not inside, or longer than 2^31 bytes, the most
    /// that one request moves.
    #[inline]
    pub fn slice(self: &Arc<Self>, range: Range<usize>) -> Result<Local<'_>, Error> {
        let len = self.check(&range, 1)?;
        if len > 1 << 31 {
            return Err(self.range(&range, "longer than one request can move"));
        }
        Ok(Local {
            region: self,
            offset: range.start,
            #[allow(clippy::cast_possible_truncation, reason = "checked above")]
            len: len as u32,
        })
    }

    /// The whole words of the region, shared with the device.
    ///
    /// Loads that must see what a completed request wrote need no ordering of
    /// their own: taking the completion orders them, see
    /// [`CompletionQueue::poll`](super::CompletionQueue::poll).
    #[must_use]
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        if !self.is_ours() {
            return &[];
        }
        // SAFETY: mapped for as long as `self` (`Memory`), page-aligned, and
        // reached by atomics only. In a forked child, where the pages may be
        // gone, the slice is empty.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr().cast(), self.len / 8) }
    }

    /// Copies bytes out. They are a mix if the device writes meanwhile.
    ///
    /// # Errors
    /// [`Error::Range`], [`Error::Forked`].
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), Error> {
        self.domain.context().check()?;
        self.check(&(offset..offset.saturating_add(into.len())), 1)?;
        let start = self.address.as_ptr();
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            if at.is_multiple_of(8) && rest.len() >= 8 {
                let (words, tail) = rest.as_chunks_mut::<8>();
                for word in words {
                    // SAFETY: inside the region (checked), aligned, mapped;
                    // atomic, since the device may write. Relaxed: a plain
                    // copy, ordered by whoever told that the bytes are there.
                    let value = unsafe { &*start.add(at).cast::<AtomicU64>() };
                    *word = value.load(Ordering::Relaxed).to_ne_bytes();
                    at += 8;
                }
                rest = tail;
            } else {
                // SAFETY: as above.
                let value = unsafe { &*start.add(at).cast::<AtomicU8>() };
                rest[0] = value.load(Ordering::Relaxed);
                rest = &mut rest[1..];
                at += 1;
            }
        }
        Ok(())
    }

    /// Copies bytes in. A peer that reads meanwhile sees a mix.
    ///
    /// # Errors
    /// [`Error::Range`], [`Error::Forked`].
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), Error> {
        self.domain.context().check()?;
        self.check(&(offset..offset.saturating_add(from.len())), 1)?;
        let start = self.address.as_ptr();
        let mut at = offset;
        let mut rest = from;
        while let Some(&first) = rest.first() {
            if at.is_multiple_of(8) && rest.len() >= 8 {
                let (words, tail) = rest.as_chunks::<8>();
                for word in words {
                    // SAFETY: inside the region (checked), aligned, mapped;
                    // atomic, since the device may read. Relaxed: the call
                    // that posts the request orders it before the doorbell.
                    let value = unsafe { &*start.add(at).cast::<AtomicU64>() };
                    value.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
                    at += 8;
                }
                rest = tail;
            } else {
                // SAFETY: as above.
                let value = unsafe { &*start.add(at).cast::<AtomicU8>() };
                value.store(first, Ordering::Relaxed);
                rest = &rest[1..];
                at += 1;
            }
        }
        Ok(())
    }

    #[inline]
    fn is_ours(&self) -> bool {
        self.domain.context().is_ours()
    }

    #[inline]
    fn check(&self, range: &Range<usize>, least: usize) -> Result<usize, Error> {
        if range.end > self.len || range.start > range.end {
            return Err(self.range(range, "not inside it"));
        }
        let len = range.end - range.start;
        if len < least {
            return Err(self.range(range, "empty"));
        }
        Ok(len)
    }

    fn range(&self, range: &Range<usize>, reason: &'static str) -> Error {
        Error::Range { start: range.start, end: range.end, len: self.len, reason }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let library = self.domain.context().library();
        let off = self
            .domain
            .context()
            // SAFETY: registered in `register`, and nobody else knows it.
            .destroy(|| unsafe { library.dereg_mr(self.raw) });
        if off {
            // SAFETY: dropped here and nowhere else. The device can no longer
            // reach it. Otherwise it is leaked: a device that still writes to
            // it, or a child's unmapping of what is not there, would be worse.
            unsafe { ManuallyDrop::drop(&mut self.memory) }
        }
    }
}

/// A piece of a region.
#[derive(Clone, Copy, Debug)]
pub struct Local<'region> {
    pub(super) region: &'region Arc<Region>,
    offset: usize,
    len: u32,
}

impl Local<'_> {
    /// Its size in bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether it has no bytes. It always has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where it begins in its region.
    #[must_use]
    #[inline]
    pub fn offset(&self) -> usize {
        self.offset
    }

    #[inline]
    pub(super) fn entry(&self) -> sys::ibv_sge {
        sys::ibv_sge {
            addr: self.region.remote_address() + self.offset as u64,
            length: self.len,
            lkey: self.region.local_key(),
        }
    }
}
