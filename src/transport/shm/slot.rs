//! The way of one operation that needs nobody: a pointer, an atomic, two looks.

#![allow(unsafe_code)] // One of the few places: a pointer becomes a cell.

use crate::cell::{self, Change, Op, is_suspect, is_waiting};
use crate::engine::lock;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
use std::io;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Bytes that are taken for slots at a time: a page.
const PAGE: usize = 4096;

/// Where the cells of an array are in this process: null where they cannot be
/// reached, so that an operation has to go another way.
///
/// Slots are in pages that read as zero in a forked child (madvise(2),
/// `MADV_WIPEONFORK`), so there they are null without anyone's doing.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    read: AtomicPtr<AtomicU64>,
    write: AtomicPtr<AtomicU64>,
}

/// What an operation came to in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fast {
    /// Done, and nobody need hear of it; the word before it.
    Done(u64),
    /// It is done, perhaps under the waiting bit, or on a cell that may be that
    /// of a removed array; the word before it, and the address of the cell.
    Told(u64, usize),
    /// There was nothing to change; the word, which has the waiting bit.
    Same(u64),
    /// It was done when the way was closed: in memory that was given up at that
    /// moment, or while the array was being opened once more. As [`Fast::Told`].
    Stale(u64, usize),
    /// Nothing was done.
    Not,
}

/// The slot of arrays that are reached otherwise.
static NOWHERE: Slot = Slot::nowhere();

impl Slot {
    const fn nowhere() -> Slot {
        Slot { read: AtomicPtr::new(ptr::null_mut()), write: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The slot of arrays that are reached otherwise.
    pub fn none() -> &'static Slot {
        &NOWHERE
    }

    /// Carries out an operation on the cell at this offset of the array.
    ///
    /// Loads acquire, changes acquire and release, as `engine::Actor` says.
    #[inline(always)]
    pub fn execute(&self, op: Op, offset: u32, a: u64, b: u64) -> Fast {
        let way = self.way(op);
        // Acquire: pairs with the release in `put`, so that the mapping is there.
        let base = way.load(Ordering::Acquire);
        if base.is_null() {
            return Fast::Not;
        }
        run(way, base, base.wrapping_add(offset as usize), op, a, b)
    }

    #[inline(always)]
    fn way(&self, op: Op) -> &AtomicPtr<AtomicU64> {
        match op {
            Op::Load => &self.read,
            Op::Set
            | Op::Clear
            | Op::Take
            | Op::Store
            | Op::Add
            | Op::CompareExchange
            | Op::Swap
            | Op::And
            | Op::Or
            | Op::Xor
            | Op::Release
            | Op::Down
            | Op::Up
            | Op::Break
            | Op::Reset => &self.write,
            // The server counts those who wait; and what a session alone may do
            // takes more than a look at the cell, see `protocol::change`.
            Op::Waiters | Op::Acquire | Op::Arrive => &NOWHERE.write,
        }
    }

    /// Whether an operation can be tried.
    pub fn takes(&self, op: Op) -> bool {
        !self.way(op).load(Ordering::Relaxed).is_null()
    }

    /// Opens the way to an array's cells.
    ///
    /// # Safety
    /// From `cells` on there are as many cells as the array has, in memory that
    /// can be read, and written if `writable`, and that stays mapped as long as
    /// anyone has a handle by which this slot is used.
    pub unsafe fn put(&self, cells: *mut AtomicU64, writable: bool) {
        // Release: pairs with the acquire in `execute`.
        let write = if writable { cells } else { ptr::null_mut() };
        self.write.store(write, Ordering::Release);
        self.read.store(cells, Ordering::Release);
    }

    /// Closes it. Operations that are under way find out.
    pub fn clear(&self) {
        // SeqCst: what is done to the memory after this must not be seen
        // by one who does not see this, and it is no store of ours but a system
        // call, which is ordered behind it anyway.
        self.write.store(ptr::null_mut(), Ordering::SeqCst);
        self.read.store(ptr::null_mut(), Ordering::SeqCst);
    }
}

/// Carries out an operation on a cell of the array whose first one `way` said to
/// be at `base`.
#[inline(always)]
fn run(
    way: &AtomicPtr<AtomicU64>,
    base: *mut AtomicU64,
    at: *mut AtomicU64,
    op: Op,
    a: u64,
    b: u64,
) -> Fast {
    // SAFETY: as `put` demands, from `base` on there are at least as many cells
    // as the array has, and the offset of `at` comes from the array's own shape.
    // The memory stays mapped as long as the client lives, also when the server
    // has gone and the slot is null by now; whoever calls this has a handle, and
    // with it the client.
    let cell = unsafe { &*at };
    let old = match op {
        Op::Load => {
            let word = cell.load(Ordering::Acquire);
            // One look for both: a tombstone has the bit, too.
            if is_waiting(word) && is_suspect(word) {
                return Fast::Not;
            }
            word
        }
        Op::Add => {
            let old = cell.fetch_add(a << 1, Ordering::AcqRel);
            if is_waiting(old) {
                return Fast::Told(old, at.addr());
            }
            old
        }
        _ => {
            // Relaxed would do for the first look: the swap decides. But it is
            // the answer where there is nothing to change.
            let word = cell.load(Ordering::Acquire);
            if is_waiting(word) {
                return contend(way, base, cell, op, a, b);
            }
            if let Change::Swap(new) = cell::change(op, word, a, b)
                && cell.compare_exchange(word, new, Ordering::AcqRel, Ordering::Acquire).is_err()
            {
                return contend(way, base, cell, op, a, b);
            }
            word
        }
    };
    // Relaxed: behind the acquire above.
    match way.load(Ordering::Relaxed) == base {
        true => Fast::Done(old),
        false if op == Op::Load => Fast::Not,
        false => Fast::Stale(old, at.addr()),
    }
}

/// The same where others are at work on the cell, or wait.
#[cold]
#[inline(never)]
fn contend(
    way: &AtomicPtr<AtomicU64>,
    base: *mut AtomicU64,
    cell: &AtomicU64,
    op: Op,
    a: u64,
    b: u64,
) -> Fast {
    let address = ptr::from_ref(cell).addr();
    let mut word = cell.load(Ordering::Acquire);
    loop {
        if is_suspect(word) {
            return Fast::Not;
        }
        let Change::Swap(new) = cell::change(op, word, a, b) else {
            return Fast::Same(word);
        };
        match cell.compare_exchange(word, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(old) if way.load(Ordering::Relaxed) == base => return Fast::Told(old, address),
            Ok(old) => return Fast::Stale(old, address),
            Err(found) => word = found,
        }
    }
}

/// A cell of an array, for its handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    slot: &'static Slot,
    offset: u32,
}

impl Place {
    /// The cell at this offset of an array.
    pub fn new(slot: &'static Slot, offset: u32) -> Place {
        Place { slot, offset }
    }

    /// Its place, counted from the start of the array.
    pub fn offset(&self) -> u32 {
        self.offset
    }

    /// As [`Slot::execute`].
    #[inline(always)]
    pub fn execute(&self, op: Op, a: u64, b: u64) -> Fast {
        self.slot.execute(op, self.offset, a, b)
    }
}

/// Slots that no array uses. Their pages are kept for good.
static FREE: Mutex<Vec<&'static Slot>> = Mutex::new(Vec::new());

/// A slot for an array, null.
///
/// # Errors
/// As mmap(2) and madvise(2): `EINVAL` before Linux 4.14.
pub(crate) fn take() -> io::Result<&'static Slot> {
    let mut free = lock(&FREE);
    if let Some(slot) = free.pop() {
        return Ok(slot);
    }
    let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new mapping touches nothing that there is.
    let page = unsafe { mmap_anonymous(ptr::null_mut(), PAGE, access, kind) }?;
    // SAFETY: the page is ours, and nothing is in it yet.
    unsafe { madvise(page, PAGE, Advice::LinuxWipeOnFork) }?;
    let first = page.cast::<Slot>();
    for i in 0..PAGE / size_of::<Slot>() {
        // SAFETY: a page-aligned page has room for so many; it is zero, which
        // is a valid slot (null), before and after a fork; it is never unmapped
        // and from here on only used by these references.
        free.push(unsafe { &*first.add(i) });
    }
    free.pop().ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Gives a slot back.
pub(crate) fn give(slot: &'static Slot) {
    slot.clear();
    lock(&FREE).push(slot);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::{TOMBSTONE, WAITING};

    fn over(cells: &'static [AtomicU64], writable: bool) -> &'static Slot {
        let slot = take().unwrap();
        // SAFETY: the cells are static.
        unsafe { slot.put(cells.as_ptr().cast_mut(), writable) };
        slot
    }

    #[test]
    fn operations_are_those_of_a_cell() {
        static CELLS: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];
        let slot = over(&CELLS, true);
        assert_eq!(slot.execute(Op::Set, 1, 0, 0), Fast::Done(0));
        assert_eq!(slot.execute(Op::Set, 1, 0, 0), Fast::Done(2));
        assert_eq!(slot.execute(Op::Load, 1, 0, 0), Fast::Done(2));
        assert_eq!(slot.execute(Op::Add, 2, 5, 0), Fast::Done(0));
        assert_eq!(slot.execute(Op::CompareExchange, 2, 5, 6), Fast::Done(10));
        assert_eq!(slot.execute(Op::Waiters, 2, 0, 0), Fast::Not);
        let place = Place::new(slot, 2);
        for before in [12, 20, 28] {
            assert_eq!(place.execute(Op::Add, 4, 0), Fast::Done(before));
        }
        assert_eq!(place.execute(Op::Load, 0, 0), Fast::Done(36));
        CELLS[3].store(WAITING, Ordering::Relaxed);
        assert_eq!(slot.execute(Op::Clear, 3, 0, 0), Fast::Same(WAITING), "nothing changed");
        let at = |cell: &AtomicU64| ptr::from_ref(cell).addr();
        assert_eq!(slot.execute(Op::Set, 3, 0, 0), Fast::Told(WAITING, at(&CELLS[3])));
        assert_eq!(slot.execute(Op::Load, 0, 0, 0), Fast::Done(0));
        CELLS[0].store(TOMBSTONE, Ordering::Relaxed);
        assert_eq!(slot.execute(Op::Load, 0, 0, 0), Fast::Not);
        assert_eq!(slot.execute(Op::Set, 0, 0, 0), Fast::Not);
        assert_eq!(slot.execute(Op::Add, 0, 1, 0), Fast::Told(TOMBSTONE, at(&CELLS[0])));
        slot.clear();
        assert_eq!(slot.execute(Op::Load, 1, 0, 0), Fast::Not);
        assert_eq!(place.execute(Op::Add, 4, 0), Fast::Not);
        assert_eq!(Place::new(Slot::none(), 0).execute(Op::Load, 0, 0), Fast::Not);
        give(slot);
    }

    #[test]
    fn one_who_may_read_does_not_change() {
        static CELLS: [AtomicU64; 1] = [const { AtomicU64::new(4) }; 1];
        let slot = over(&CELLS, false);
        assert_eq!(slot.execute(Op::Load, 0, 0, 0), Fast::Done(4));
        assert_eq!(slot.execute(Op::Add, 0, 1, 0), Fast::Not);
        assert!(slot.takes(Op::Load) && !slot.takes(Op::Set));
        give(slot);
    }
}
