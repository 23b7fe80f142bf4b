//! The memory that the cells live in.

#![allow(unsafe_code)] // One of the few places: a mapping becomes a slice of atomics.

use crate::layout::CELLS_AT;
use crate::verbs::Memory;
use farcell_sys::fork::{self, Generation};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// A page of header, and a flat array of cells behind it, all 0 at first, in
/// a memory file of its own, so that other processes can be given it.
#[derive(Debug)]
pub struct Segment {
    map: ManuallyDrop<MmapRaw>,
    bytes: usize,
    generation: Generation,
}

impl Segment {
    /// Bytes of a segment of that many cells: whole pages.
    ///
    /// # Errors
    /// `InvalidInput` for no cells at all or more bytes than an address has.
    pub fn bytes_of(cells: u32) -> io::Result<usize> {
        (cells as usize)
            .checked_mul(size_of::<AtomicU64>())
            .filter(|&n| n > 0)
            .and_then(|n| n.checked_add(CELLS_AT)?.checked_next_multiple_of(4096))
            .ok_or(io::ErrorKind::InvalidInput.into())
    }

    /// Maps a segment of `cells` cells that lives in this file, which has the
    /// size for it, all pages, and an owner who does not shorten it: such a
    /// file cannot be sealed, and touching cells that it has lost ends the
    /// process (SIGBUS). Give its descriptor to nobody but that owner.
    ///
    /// # Errors
    /// From mmap(2): `ENOMEM`; `InvalidInput` as [`bytes_of`](Self::bytes_of).
    pub fn in_file(file: File, cells: u32) -> io::Result<Segment> {
        Segment::map(&file, Segment::bytes_of(cells)?)
    }

    /// Maps a segment of `cells` cells. Pages are taken when first touched.
    /// The file (memfd_create(2)) has no name in any directory, and can be
    /// neither shortened nor lengthened by anyone.
    ///
    /// # Errors
    /// `ENOMEM` when the system has not that much memory, `EMFILE` when the
    /// process has all the files that it may have, and `InvalidInput` for no
    /// cells at all or more bytes than an address has.
    pub fn anonymous(cells: u32) -> io::Result<Segment> {
        let bytes = Segment::bytes_of(cells)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(c"farcell", flags)?);
        file.set_len(bytes as u64)?;
        // A mapping of a file that has been cut short ends in SIGBUS.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Segment::map(&file, bytes)
    }

    fn map(file: &File, bytes: usize) -> io::Result<Segment> {
        let map = MmapOptions::new().len(bytes).map_raw(file)?;
        let generation = fork::generation();
        Ok(Segment { map: ManuallyDrop::new(map), bytes, generation })
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is `bytes` bytes long, page-aligned (so 8-byte
        // aligned), readable and writable, zeroed (0 is a valid AtomicU64) and
        // lives as long as `self`, which the slice borrows. Nothing makes a
        // non-atomic reference into it: `MmapRaw` hands out raw pointers
        // alone, and this method and `Memory` are the only users.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), self.bytes / 8) }
    }

    /// The words of the header.
    #[must_use]
    pub fn header(&self) -> &[AtomicU64] {
        &self.words()[..CELLS_AT / 8]
    }

    /// Every cell of the segment, and the padding up to a whole page.
    #[must_use]
    pub fn cells(&self) -> &[AtomicU64] {
        &self.words()[CELLS_AT / 8..]
    }
}

// SAFETY: a map of a sealed memory file, or of one in a state folder that its
// owner leaves as it is, has one place and size for its life and is whole pages; all references into it are to atomics. A forked child, where the
// pages may be gone, does not unmap them.
unsafe impl Memory for Segment {
    fn address(&self) -> NonNull<u8> {
        NonNull::new(self.map.as_mut_ptr()).unwrap_or(NonNull::dangling())
    }

    fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if fork::generation() == self.generation {
            // SAFETY: dropped here and nowhere else.
            unsafe { ManuallyDrop::drop(&mut self.map) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn cells_start_at_zero_and_are_shared() {
        let segment = Segment::anonymous(100).unwrap();
        assert!(segment.cells().len() >= 100);
        assert!(segment.cells().iter().all(|c| c.load(Ordering::Relaxed) == 0));
        segment.cells()[99].store(7, Ordering::Relaxed);
        assert_eq!(segment.cells()[99].load(Ordering::Relaxed), 7);
        assert_eq!(segment.cells().as_ptr() as usize % 4096, 0);
        assert!(segment.header().iter().all(|c| c.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn no_cells_is_an_error() {
        assert!(Segment::anonymous(0).is_err());
    }
}
