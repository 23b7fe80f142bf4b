//! The server's memory in this process.

#![allow(unsafe_code)] // One of the few places: mappings, and slots into them.

use super::slot::Slot;
use crate::layout::{CELLS_AT, MAGIC_WORD, header};
use crate::segment::{Slept, sleep_on, wake_all};
use crate::server::{DESK_PLACES, WATCHED_IN_WORD};
use crate::wire::ShmRecord;
use farcell_sys::fork::{self, Generation};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ffi::c_void;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A file in memory: a header of a page, and words behind it.
#[derive(Debug)]
pub(super) struct Map {
    start: *mut c_void,
    bytes: usize,
    generation: Generation,
}

// SAFETY: an address and a length of memory that is only used by atomics.
unsafe impl Send for Map {}
// SAFETY: as above.
unsafe impl Sync for Map {}

impl Map {
    /// Maps so many bytes of a file, whole pages.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn new(file: &OwnedFd, bytes: u64, writable: bool) -> io::Result<Map> {
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let access = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice touches
        // nothing that there is.
        let start = unsafe { mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, file, 0) }?;
        Ok(Map { start, bytes, generation: fork::generation() })
    }

    /// Its words. They must not be changed where it was mapped to be read.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: `bytes` bytes, whole pages, mapped as long as `self` lives; any
        // bits are a valid AtomicU64. It is only ever read where it was mapped
        // to be read: the methods of `Window` and `Rows` see to that.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.bytes / 8) }
    }

    /// Puts empty memory in the place of the file's, which then is free to go,
    /// while the addresses stay.
    fn empty(&self) {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let kind = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: exactly the mapping made in `new`. Whoever is at work in it
        // with atomics goes on in the new one.
        let done = unsafe { mmap_anonymous(self.start, self.bytes, access, kind) };
        if let Err(error) = done {
            tracing::debug!(target: "farcell::shm", %error, "memory of a server that has gone is kept");
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // A child of the process that made it may have no such mapping.
        if fork::generation() == self.generation {
            // SAFETY: the mapping made in `new`, which nobody uses any more:
            // see `Slot::execute` for those who have a bare pointer.
            let _ = unsafe { munmap(self.start, self.bytes) };
        }
    }
}

/// The memory of one server: its segment, where it has waiters, and where we
/// say that we sleep.
#[derive(Debug)]
pub(super) struct Window {
    segment: Map,
    watched: Map,
    desk: Option<Map>,
    capacity: u32,
    /// We may change cells.
    pub writable: bool,
}

/// Whether the file is as the server said, and cannot become shorter.
pub(super) fn check(file: &OwnedFd, bytes: u64, sealed: bool) -> Result<(), String> {
    let size = fstat(file).map_err(|e| format!("fstat: {e}"))?.st_size;
    if u64::try_from(size) != Ok(bytes) || !bytes.is_multiple_of(4096) || bytes == 0 {
        return Err(format!("a file of {size} bytes came, {bytes} were announced"));
    }
    // Memory that is cut off under our feet would end this process.
    let seals = fcntl_get_seals(file).unwrap_or(SealFlags::empty());
    if sealed && !seals.contains(SealFlags::SHRINK) {
        return Err("the file that came can be cut short".to_owned());
    }
    Ok(())
}

impl Window {
    /// Maps the files that the server has sent.
    ///
    /// # Errors
    /// What is wrong with them, in words.
    pub fn open(
        files: &[OwnedFd],
        record: &ShmRecord,
        capacity: u64,
        incarnation: u64,
    ) -> Result<Window, String> {
        let writable = record.writable != 0;
        let [segment, watched, rest @ ..] = files else {
            return Err("the server sent too few files".to_owned());
        };
        if rest.len() != usize::from(writable) {
            return Err("the server sent another number of files than it said".to_owned());
        }
        let capacity = u32::try_from(capacity).map_err(|_| "the segment is too large")?;
        let fits = |bytes: u64, words: u32| {
            bytes.checked_sub(CELLS_AT as u64).is_some_and(|b| b / 8 >= u64::from(words))
        };
        if !fits(record.segment, capacity)
            || !fits(record.watched, capacity.div_ceil(WATCHED_IN_WORD))
            || writable && !fits(record.desk, DESK_PLACES)
        {
            return Err("the server's memory is smaller than its cells".to_owned());
        }
        let sealed = record.sealed != 0;
        check(segment, record.segment, sealed)?;
        check(watched, record.watched, true)?;
        let map = |file, bytes, writable| {
            Map::new(file, bytes, writable).map_err(|e| format!("mapping the memory: {e}"))
        };
        let desk = match rest.first() {
            Some(desk) => {
                check(desk, record.desk, true)?;
                Some(map(desk, record.desk, true)?)
            }
            None => None,
        };
        let window = Window {
            segment: map(segment, record.segment, writable)?,
            watched: map(watched, record.watched, false)?,
            desk,
            capacity,
            writable,
        };
        window.recognise(incarnation)?;
        Ok(window)
    }

    /// Looks into the memory: it is that of this life of the server.
    ///
    /// # Errors
    /// What it is instead, in words.
    pub fn recognise(&self, incarnation: u64) -> Result<(), String> {
        // Relaxed: the server wrote it before it sent the file, and nobody else
        // can write there.
        let word = |at: usize| self.watched.words()[at].load(Ordering::Relaxed);
        if word(header::MAGIC) != MAGIC_WORD || word(header::CAPACITY) != u64::from(self.capacity) {
            return Err("what came is no segment".to_owned());
        }
        if word(header::INCARNATION) != incarnation {
            return Err("the memory is that of another server".to_owned());
        }
        Ok(())
    }

    /// Opens the way to so many cells from this one on. `false`: they are not
    /// all there. The window must not be dropped before the last handle by
    /// which the slot is used.
    pub fn show(&self, slot: &Slot, base: u32, extent: u32) -> bool {
        let Some(end) = base.checked_add(extent).filter(|end| *end <= self.capacity) else {
            return false;
        };
        let cells = &self.segment.words()[CELLS_AT / 8..][base as usize..end as usize];
        // SAFETY: so many cells are there, mapped as long as this lives.
        unsafe { slot.put(cells.as_ptr().cast_mut(), self.writable) };
        true
    }

    /// A cell. It must not be changed where we may only read.
    pub fn cell(&self, place: u32) -> Option<&AtomicU64> {
        let cells = self.segment.words().get(CELLS_AT / 8..)?;
        cells.get(..self.capacity as usize)?.get(place as usize)
    }

    /// The place of the cell that is at this address.
    pub fn place_of(&self, address: usize) -> Option<u32> {
        let first = std::ptr::from_ref(self.cell(0)?).addr();
        let place = u32::try_from(address.checked_sub(first)? / size_of::<AtomicU64>()).ok()?;
        (place < self.capacity).then_some(place)
    }

    /// Whether the server says that the session is over.
    pub fn is_over(&self) -> bool {
        // Acquire: see `protocol::change`.
        let over = |desk: &Map| desk.words()[header::OVER].load(Ordering::Acquire) != 0;
        self.desk.as_ref().is_some_and(over)
    }

    /// Whether the server has waiters on a cell.
    pub fn is_watched(&self, place: u32) -> bool {
        let words = &self.watched.words()[CELLS_AT / 8..];
        // Relaxed: the change of the cell that went before has published it,
        // see `protocol`.
        let word = words.get((place / WATCHED_IN_WORD) as usize);
        word.is_some_and(|w| w.load(Ordering::Relaxed) >> (place % WATCHED_IN_WORD) & 1 != 0)
    }

    /// Writes down that someone sleeps on a cell, as long as the answer lives.
    pub fn announce(&self, place: u32) -> Announced<'_> {
        let places = self.desk.as_ref().and_then(|d| d.words().get(CELLS_AT / 8..));
        // Relaxed: a number for people.
        let mine = places.and_then(|places| {
            places.iter().take(DESK_PLACES as usize).find(|at| {
                let (free, taken) = (0, u64::from(place) + 1);
                at.load(Ordering::Relaxed) == 0
                    && at
                        .compare_exchange(free, taken, Ordering::Relaxed, Ordering::Relaxed)
                        .is_ok()
            })
        });
        Announced(mine)
    }

    /// Sleeps on a cell while its low half is that of `word`.
    pub fn sleep(&self, place: u32, word: u64, time: Duration) -> Slept {
        self.cell(place).map_or(Slept::Not, |cell| sleep_on(cell, word, time))
    }

    /// Wakes all who sleep on a cell, in every process.
    pub fn wake(&self, place: u32) {
        if let Some(cell) = self.cell(place) {
            wake_all(cell);
        }
    }

    /// Lets go of the server's memory; what is read from here on means nothing.
    /// Addresses stay good as long as the window lives.
    pub fn empty(&self) {
        self.segment.empty();
        self.watched.empty();
        if let Some(desk) = &self.desk {
            desk.empty();
        }
    }
}

/// A sleep that is written down.
pub(super) struct Announced<'w>(Option<&'w AtomicU64>);

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        if let Some(place) = self.0 {
            place.store(0, Ordering::Relaxed);
        }
    }
}
