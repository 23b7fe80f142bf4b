//! The mutating actor: the one party that may change cells.
//!
//! A NIC's atomics are atomic among themselves only, so every array has one
//! party that executes all its changes. In the `cpu` domain it is the server's
//! CPU. The engine knows only this trait, so the same engine can work through
//! another actor.

use crate::cell::{self, Change, Op};
use crate::segment::Segment;
use std::sync::atomic::Ordering;

/// Atomic access to the words of the segment. A `place` is an index into it,
/// always one that the catalog gave out.
pub trait Actor {
    /// Reads a word. Acquire: what the one who wrote the word did before is
    /// visible behind this.
    fn load(&self, place: u32) -> u64;

    /// Puts `new` if the word is `current`; the word found otherwise. Acquire
    /// and release.
    fn compare_exchange(&self, place: u32, current: u64, new: u64) -> Result<u64, u64>;

    /// Adds to the word, wrapping, and returns what it was. Acquire and
    /// release.
    fn fetch_add(&self, place: u32, delta: u64) -> u64;

    /// Says whether the server has waiters on this cell, before it sets the
    /// waiting bit for the first and behind the last, to those who change cells
    /// by themselves and ring only where it has. `true`: there may be such, so
    /// the waiting bit must be swapped in also where it is set already.
    fn watch(&self, _place: u32, _yes: bool) -> bool {
        false
    }

    /// Whether others change the cells by themselves, and wait for them, with
    /// this CPU.
    fn is_shared(&self) -> bool {
        false
    }

    /// The cells on which a session's client says that it waits by itself.
    fn sleeps_of(&self, _session: u64) -> Vec<u32> {
        Vec::new()
    }

    /// How many wait on this cell, or on any, without the server's doing.
    fn sleepers(&self, _place: Option<u32>) -> usize {
        0
    }

    /// Each of these as [`compare_exchange`](Self::compare_exchange), in their
    /// order where they are of one cell, several at a time where the actor can:
    /// one that is far away takes as long for many as for a few. The words found,
    /// in their order.
    fn compare_exchange_all(&self, swaps: &[Swap], found: &mut Vec<u64>) {
        found.clear();
        found.extend(swaps.iter().map(|swap| {
            let (Ok(word) | Err(word)) = self.compare_exchange(swap.place, swap.current, swap.new);
            word
        }));
    }
}

/// A compare-and-exchange of one cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swap {
    /// The cell.
    pub place: u32,
    /// The word that it must hold.
    pub current: u64,
    /// The word that it gets.
    pub new: u64,
}

/// Cells that are changed together: so many that an actor far away is kept busy,
/// and so few that what is known of them is still true.
pub const TOGETHER: usize = 256;

/// Changes many cells, each for a reason `T` of the caller's. `step` gets the
/// word of a cell and says what is to be put in its place, until that is done or
/// it has nothing to put; when it is done it gets the word before it, and `true`.
pub fn change_all<A: Actor, T: Copy>(
    actor: &A,
    cells: impl IntoIterator<Item = (T, u32)>,
    mut step: impl FnMut(T, u64, bool) -> Option<u64>,
) {
    let mut cells = cells.into_iter();
    let (mut tries, mut swaps, mut found) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        // Those that met another word than they had seen come first.
        while tries.len() < TOGETHER
            && let Some((what, place)) = cells.next()
        {
            let current = actor.load(place);
            if let Some(new) = step(what, current, false) {
                tries.push((what, Swap { place, current, new }));
            }
        }
        if tries.is_empty() {
            return;
        }
        swaps.clear();
        swaps.extend(tries.iter().map(|(_, swap)| *swap));
        actor.compare_exchange_all(&swaps, &mut found);
        let mut words = found.iter().copied();
        tries.retain_mut(|(what, swap)| {
            let Some(word) = words.next() else {
                return false;
            };
            if word == swap.current {
                step(*what, word, true);
                return false;
            }
            match step(*what, word, false) {
                Some(new) => {
                    (swap.current, swap.new) = (word, new);
                    true
                }
                None => false,
            }
        });
    }
}

/// Puts `new` into all of these cells, whatever they hold.
pub fn replace_all<A: Actor>(actor: &A, places: impl IntoIterator<Item = u32>, new: u64) {
    let cells = places.into_iter().map(|place| ((), place));
    change_all(actor, cells, |(), word, done| (!done && word != new).then_some(new));
}

/// The CPU as the actor.
///
/// Acquire and release suffice. All that a wait needs to know, value and
/// waiting bit, is in one word, and all changes of one word have one order
/// whatever the memory ordering is; no protocol here compares the order of
/// changes to two different words, which alone would need SeqCst. Acquire and
/// release make an event publish what its setter wrote elsewhere before.
impl Actor for Segment {
    fn load(&self, place: u32) -> u64 {
        self.cells()[place as usize].load(Ordering::Acquire)
    }

    fn compare_exchange(&self, place: u32, current: u64, new: u64) -> Result<u64, u64> {
        self.cells()[place as usize].compare_exchange(
            current,
            new,
            Ordering::AcqRel,
            Ordering::Acquire,
        )
    }

    fn fetch_add(&self, place: u32, delta: u64) -> u64 {
        self.cells()[place as usize].fetch_add(delta, Ordering::AcqRel)
    }
}

/// Carries out one operation and returns the word before it. `true` says that
/// the word was changed under its waiting bit: the caller must ring.
#[inline]
pub fn execute<A: Actor>(actor: &A, place: u32, op: Op, a: u64, b: u64) -> (u64, bool) {
    let mut word = if op.adds() { 0 } else { actor.load(place) };
    loop {
        let new = match cell::change(op, word, a, b) {
            Change::None => return (word, false),
            Change::Swap(new) => new,
            // Many wait at a barrier for the last who comes, and should not be
            // woken by each of the others.
            Change::Add(_) if op == Op::Arrive && actor.is_shared() => {
                word = actor.load(place);
                cell::sync::arrived(word, b)
            }
            // Whatever the word is.
            Change::Add(delta) => {
                let old = actor.fetch_add(place, delta);
                return (old, cell::must_ring(op, old, b));
            }
        };
        match actor.compare_exchange(place, word, new) {
            Ok(old) => return (old, cell::must_ring(op, old, b)),
            Err(found) => word = found,
        }
    }
}
