//! The memory that the cells live in.

#![allow(unsafe_code)] // One of the few places: a mapping becomes a slice of atomics.

use memmap2::{MmapMut, MmapRaw};
use std::io;
use std::sync::atomic::AtomicU64;

/// A flat array of cells, all 0 at first, in page-aligned anonymous memory.
#[derive(Debug)]
pub struct Segment {
    map: MmapRaw,
    cells: usize,
}

impl Segment {
    /// Maps a segment of `cells` cells. Pages are taken when first touched.
    ///
    /// # Errors
    /// `ENOMEM` when the system has not that much memory, and
    /// `InvalidInput` for no cells at all or more bytes than an address has.
    pub fn anonymous(cells: u32) -> io::Result<Segment> {
        let cells = cells as usize;
        let bytes = cells
            .checked_mul(size_of::<AtomicU64>())
            .filter(|&n| n > 0)
            .ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Segment { map: MmapMut::map_anon(bytes)?.into(), cells })
    }

    /// Every cell of the segment.
    #[must_use]
    pub fn cells(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is `cells * 8` bytes long, page-aligned (so
        // 8-byte aligned), readable and writable, zeroed (0 is a valid
        // AtomicU64) and lives as long as `self`, which the slice borrows.
        // Nothing makes a non-atomic reference into it: `MmapRaw` hands out
        // raw pointers alone, and this method is the only user.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), self.cells) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn cells_start_at_zero_and_are_shared() {
        let segment = Segment::anonymous(100).unwrap();
        assert_eq!(segment.cells().len(), 100);
        assert!(segment.cells().iter().all(|c| c.load(Ordering::Relaxed) == 0));
        segment.cells()[99].store(7, Ordering::Relaxed);
        assert_eq!(segment.cells()[99].load(Ordering::Relaxed), 7);
        assert_eq!(segment.cells().as_ptr() as usize % 4096, 0);
    }

    #[test]
    fn no_cells_is_an_error() {
        assert!(Segment::anonymous(0).is_err());
    }
}
