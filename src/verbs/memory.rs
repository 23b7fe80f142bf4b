//! Memory that can be registered.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use farcell_sys as sys;
use memmap2::{MmapMut, MmapOptions};
use sys::fork::Generation;

/// The size of a page, in bytes.
#[must_use]
pub fn page_size() -> usize {
    sys::page_size()
}

/// Memory that a device may be given.
///
/// # Safety
/// From the first call on until the value is dropped:
/// - `address()` and `len()` always answer the same, and name memory that is
///   mapped readable and writable;
/// - the memory begins at a page boundary, and nothing else lives between its
///   end and the next page boundary;
/// - no `&` or `&mut` to plain (non-atomic) data in it exists, since the
///   device and other processes may write to it at any time.
///
/// In a child forked after registration the pages may be gone. Dropping the
/// value there must not unmap them: other memory may have taken their place.
pub unsafe trait Memory: Send + Sync {
    /// Where it begins.
    fn address(&self) -> NonNull<u8>;

    /// Its size in bytes; not zero.
    fn len(&self) -> usize;

    /// Whether it has no bytes. It always has.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Anonymous pages of this process, zero at first.
pub struct Pages {
    map: ManuallyDrop<MmapMut>,
    generation: Generation,
}

impl Pages {
    /// Maps at least `bytes` bytes, rounded up to whole pages. A system call;
    /// the pages themselves come when they are registered or touched.
    ///
    /// # Errors
    /// From `mmap(2)`: ENOMEM; EINVAL for a size past the address space.
    pub fn new(bytes: usize) -> std::io::Result<Self> {
        let size = bytes
            .max(1)
            .checked_next_multiple_of(page_size())
            .ok_or(std::io::ErrorKind::InvalidInput)?;
        Ok(Self {
            map: ManuallyDrop::new(MmapOptions::new().len(size).map_anon()?),
            generation: sys::fork::generation(),
        })
    }
}

// SAFETY: an anonymous map has one place and size for its life, is whole pages,
// and this type hands out no reference into it. A child does not unmap it.
unsafe impl Memory for Pages {
    fn address(&self) -> NonNull<u8> {
        NonNull::new(self.map.as_ptr().cast_mut()).unwrap_or(NonNull::dangling())
    }

    fn len(&self) -> usize {
        self.map.len()
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if sys::fork::generation() == self.generation {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.map) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_whole_and_aligned() {
        let pages = Pages::new(1).unwrap();
        assert_eq!(pages.len(), page_size());
        assert_eq!(pages.address().as_ptr().addr() % page_size(), 0);
        assert_eq!(Pages::new(page_size() + 1).unwrap().len(), 2 * page_size());
        assert!(Pages::new(usize::MAX).is_err());
    }
}
