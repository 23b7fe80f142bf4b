//! The memory that the cells live in.

#![allow(unsafe_code)] // One of the few places: a mapping becomes a slice of atomics.

mod payload;
pub(crate) mod words;

pub use payload::{Claim, Payload};

use crate::layout::{CELLS_AT, MAGIC_WORD, header};
use crate::verbs::Memory;
use farcell_sys::fork::{self, Generation};
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, memfd_create};
use rustix::thread::futex;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// A page of header, and a flat array of cells behind it, all 0 at first, in
/// a memory file of its own, so that other processes can be given it.
#[derive(Debug)]
pub struct Segment {
    map: ManuallyDrop<MmapRaw>,
    file: Option<File>,
    /// The file cannot become shorter.
    sealed: bool,
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
        Segment::map(file, Segment::bytes_of(cells)?)
    }

    /// Maps so many bytes, whole pages, of a file as for [`in_file`](Self::in_file).
    ///
    /// # Errors
    /// From mmap(2): `ENOMEM`; `InvalidInput` for no bytes or no whole pages.
    pub fn of_bytes(file: File, bytes: usize) -> io::Result<Segment> {
        if bytes == 0 || !bytes.is_multiple_of(4096) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Segment::map(file, bytes)
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
        Segment::make(cells, false)
    }

    /// As [`anonymous`](Self::anonymous), for memory that others are to read
    /// alone: nobody makes a further mapping by which it can be written (fcntl(2),
    /// `F_SEAL_FUTURE_WRITE`; before Linux 5.1 the file's mode has to do).
    ///
    /// # Errors
    /// As [`anonymous`](Self::anonymous).
    pub fn published(cells: u32) -> io::Result<Segment> {
        Segment::make(cells, true)
    }

    fn make(cells: u32, published: bool) -> io::Result<Segment> {
        let bytes = Segment::bytes_of(cells)?;
        Segment::sealed(c"farcell", bytes, published)
    }

    /// A memory file of at least that many bytes, whole pages, and a map of it.
    fn sealed(name: &CStr, bytes: usize, published: bool) -> io::Result<Segment> {
        let bytes = bytes.checked_next_multiple_of(4096).ok_or(io::ErrorKind::InvalidInput)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(name, flags)?);
        // Whoever is given a descriptor to read cannot make one to write of it.
        fchmod(&file, Mode::RUSR)?;
        file.set_len(bytes as u64)?;
        let mut segment = Segment::map(file, bytes)?;
        if published {
            let _ = fcntl_add_seals(segment.file()?, SealFlags::FUTURE_WRITE);
        }
        // A mapping of a file that has been cut short ends in SIGBUS.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(segment.file()?, seals)?;
        segment.sealed = true;
        Ok(segment)
    }

    /// Maps a file that another process may have as well. If it is cut short,
    /// whoever touches what is gone gets SIGBUS.
    ///
    /// # Errors
    /// As mmap(2), and `InvalidInput` for a file without a cell.
    pub fn of_file(file: File) -> io::Result<Segment> {
        let bytes = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
        if bytes <= CELLS_AT || !bytes.is_multiple_of(4096) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Segment::map(file, bytes)
    }

    fn map(file: File, bytes: usize) -> io::Result<Segment> {
        let map = MmapOptions::new().len(bytes).map_raw(&file)?;
        let generation = fork::generation();
        Ok(Segment {
            map: ManuallyDrop::new(map),
            file: Some(file),
            sealed: false,
            bytes,
            generation,
        })
    }

    /// The file that it is in.
    ///
    /// # Errors
    /// It was closed by [`close_file`](Self::close_file).
    pub fn file(&self) -> io::Result<&File> {
        self.file.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Whether nobody can make the file shorter, also who may write it.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.sealed
    }

    /// Closes the file; the memory stays.
    pub fn close_file(&mut self) {
        self.file = None;
    }

    /// Another descriptor of the file, by which it can only be read.
    ///
    /// # Errors
    /// As open(2) of `/proc/self/fd/N`, which is not there everywhere.
    pub fn read_only_file(&self) -> io::Result<File> {
        File::open(format!("/proc/self/fd/{}", self.file()?.as_raw_fd()))
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

    /// Writes down in the header what this is. Nobody else may see it yet.
    pub fn describe(&self, incarnation: u64, capacity: u32) {
        for (at, word) in [
            (header::MAGIC, MAGIC_WORD),
            (header::INCARNATION, incarnation),
            (header::CAPACITY, capacity.into()),
        ] {
            // Relaxed: whoever is given the segment later is so by a message.
            self.header()[at].store(word, Ordering::Relaxed);
        }
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

/// The half of a cell that a futex compares: waiting bit and the low 31 bits
/// of the value.
fn half(cell: &AtomicU64) -> &AtomicU32 {
    // SAFETY: the first 4 of the cell's 8 bytes, which are its low ones here
    // (little-endian), aligned, and borrowed as long as the cell is. Nothing
    // but the kernel looks through this reference, so no access of one size
    // races with one of another size.
    unsafe { AtomicU32::from_ptr(cell.as_ptr().cast()) }
}

/// How a sleep on a cell ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slept {
    /// Someone called [`wake_all`], or a signal came.
    Woken,
    /// The cell held another word, or the time was over.
    Not,
}

/// Sleeps while the cell's low half is that of `word`, until someone wakes it
/// or for `time` at most (futex(2), `FUTEX_WAIT`, shared between processes).
/// The kernel compares and goes to sleep as one step towards [`wake_all`].
pub fn sleep_on(cell: &AtomicU64, word: u64, time: Duration) -> Slept {
    let timeout = futex::Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    match futex::wait(half(cell), futex::Flags::empty(), word as u32, Some(&timeout)) {
        Ok(()) => Slept::Woken,
        Err(_) => Slept::Not,
    }
}

/// Wakes all who sleep on the cell, in every process.
pub fn wake_all(cell: &AtomicU64) {
    // It fails for an address that is none, and this is one.
    let _ = futex::wake(half(cell), futex::Flags::empty(), i32::MAX as u32);
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn who_may_only_read_cannot_map_to_write() {
        let segment = Segment::anonymous(8).unwrap();
        let file = segment.read_only_file().unwrap();
        let refused = MmapOptions::new().len(4096).map_raw(&file).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{refused}");
        assert!(file.set_len(0).is_err());
        assert!(MmapOptions::new().len(4096).map_raw_read_only(&file).is_ok());
        // Nobody maps what is published to write it, also not by its own file.
        let published = Segment::published(8).unwrap();
        let refused = MmapOptions::new().len(4096).map_raw(published.file().unwrap());
        assert!(refused.is_err(), "Linux 5.1 or newer knows F_SEAL_FUTURE_WRITE");
        published.cells()[0].store(5, Ordering::Relaxed);
        assert_eq!(published.cells()[0].load(Ordering::Relaxed), 5);
    }

    #[test]
    fn a_sleep_on_another_word_is_none() {
        let segment = Segment::anonymous(8).unwrap();
        let cell = &segment.cells()[1];
        assert_eq!(sleep_on(cell, 1, Duration::from_secs(20)), Slept::Not);
        let begun = std::time::Instant::now();
        assert_eq!(sleep_on(cell, 0, Duration::from_millis(30)), Slept::Not);
        assert!(begun.elapsed() >= Duration::from_millis(30));
    }

    #[test]
    fn no_cells_is_an_error() {
        assert!(Segment::anonymous(0).is_err());
    }
}
