//! Changing, sleeping and waking in memory: a futex on the cell itself.
//!
//! Pure: all that the protocol shares comes in by [`Ground`], so that it can be
//! tried under every schedule of its steps (`engine::tests::local`). For one
//! cell:
//!
//! 1. Who wants to sleep sets the waiting bit with a compare-and-swap from a
//!    word that does not satisfy it, and sleeps only while the cell's low half
//!    is that of this word ([`wait`]).
//! 2. Who changes the word and finds the bit in the word before the change
//!    drops the bit (a swap has done so), wakes all who sleep on the cell, and
//!    then, if the server has waiters on it, rings the server ([`answer`]).
//!    Those who are not satisfied begin again with 1.
//! 3. Who leaves without being satisfied does the same as if it had changed the
//!    word, so that the bit does not stay on its account ([`leave`]).
//! 4. The server marks a cell as watched before it swaps its own bit in, also
//!    where the bit is set already. The swap publishes the mark, so whoever
//!    takes the bit away after that sees it. When the server itself drops a bit
//!    it wakes those who sleep here.
//! 5. Who changes a cell can die between its change and what follows. So nobody
//!    sleeps for longer than [`LONGEST_SLEEP`] without a look, and the server
//!    sweeps the cells that its own waiters are on.
//!
//! The low half holds the bit and 31 bits of value. A change by a multiple of
//! 2^31 leaves it as it is, and is found all the same: it either drops the bit,
//! which is in the low half, before it wakes, or wakes who sleeps already.

use crate::cell::sync::arrived;
use crate::cell::{self, Change, Condition, Op, WAITING, is_suspect, is_waiting, must_ring};
use crate::segment::Slept;
use std::time::Duration;

/// Longest time between two looks of a sleeper at its cell.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// One cell in memory, and who else is to be told of it.
pub(crate) trait Ground {
    /// Reads the word. Acquire.
    fn load(&self) -> u64;

    /// Puts `new` if the word is `current`; the word found otherwise. Acquire
    /// and release.
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64>;

    /// Adds to the word, wrapping. Acquire and release.
    fn fetch_add(&self, delta: u64) -> u64;

    /// Takes the waiting bit from the word, as one step. Acquire and release.
    fn drop_bit(&self) -> u64;

    /// Sleeps while the low half of the cell is that of `word`, until it is
    /// woken, and not for long.
    fn sleep(&self, word: u64) -> Slept;

    /// Wakes all who sleep on the cell.
    fn wake(&self);

    /// Whether the server has waiters on the cell.
    fn is_watched(&self) -> bool;

    /// Tells the server that the cell was changed under its waiting bit.
    fn ring(&self);

    /// Whether the server has ended the session. Acquire.
    fn is_over(&self) -> bool;
}

/// What became of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Changed {
    /// Done; the word before it.
    Done(u64),
    /// The cell holds what those of a removed array hold. Nothing was done.
    Suspect,
    /// The session is over. Nothing was done.
    Over,
}

/// Does what a session alone may do, as long as it lives: takes a lock, or arrives
/// at a barrier.
///
/// The look at the session comes behind the one at the word. The server says that
/// a session is over before it breaks the session's barriers, so from a word that
/// was there before that nobody swaps behind it; and who sees a later word sees
/// that the session is over, too. An addition would come at any time, and count
/// where the process was stopped in front of it until the barrier was made whole
/// again. A lock that was free is taken all the same, and found by its seat.
pub(crate) fn change(ground: &impl Ground, op: Op, a: u64, b: u64) -> Changed {
    let mut word = ground.load();
    loop {
        if is_suspect(word) {
            return Changed::Suspect;
        }
        if ground.is_over() {
            return Changed::Over;
        }
        let new = match cell::change(op, word, a, b) {
            Change::None => return Changed::Done(word),
            Change::Swap(new) => new,
            Change::Add(_) => arrived(word, b),
        };
        match ground.compare_exchange(word, new) {
            Ok(old) => {
                if must_ring(op, old, b) {
                    answer(ground, old);
                }
                return Changed::Done(old);
            }
            Err(found) => word = found,
        }
    }
}

/// What is left to do when `a` has been added to a cell that held `old`.
pub(crate) fn added(ground: &impl Ground, old: u64, a: u64) -> Changed {
    if is_suspect(old) {
        // The server decides; others are to know the cell by its value.
        ground.fetch_add((a << 1).wrapping_neg());
        return Changed::Suspect;
    }
    if is_waiting(old) {
        ground.drop_bit();
        answer(ground, old);
    }
    Changed::Done(old)
}

/// The word `old` was changed, or its waiting bit taken away, and the bit is
/// not there any more on its account: tells all whom it stood for.
pub(crate) fn answer(ground: &impl Ground, old: u64) {
    if is_waiting(old) {
        ground.wake();
        if ground.is_watched() {
            ground.ring();
        }
    }
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// The cell held this word, which satisfies it.
    Satisfied(u64),
    /// Its time was over, or it was called off.
    Over,
    /// The cell holds what those of a removed array hold.
    Suspect,
}

/// Sleeps until the word satisfies the condition, or `over` says to stop; it is
/// asked before each sleep.
pub(crate) fn wait(
    ground: &impl Ground,
    condition: Condition,
    mut over: impl FnMut() -> bool,
) -> Waited {
    // A bit that is found by one who was not woken for it may be nobody's: its
    // mutator may have died, or the sleeper that set it.
    let mut woken = true;
    loop {
        let mut word = ground.load();
        if is_suspect(word) {
            return Waited::Suspect;
        }
        if condition.holds(word) {
            if is_waiting(word) && !woken {
                leave(ground);
            }
            return Waited::Satisfied(word);
        }
        if over() {
            leave(ground);
            return Waited::Over;
        }
        if !is_waiting(word) {
            if ground.compare_exchange(word, word | WAITING).is_err() {
                continue;
            }
            word |= WAITING;
        }
        woken = ground.sleep(word) == Slept::Woken;
    }
}

/// Takes the waiting bit away, if it is there. Those for whom it stood as well
/// are told, and set it again.
pub(crate) fn leave(ground: &impl Ground) {
    let mut word = ground.load();
    while is_waiting(word) && !is_suspect(word) {
        match ground.compare_exchange(word, word & !WAITING) {
            Ok(old) => return answer(ground, old),
            Err(found) => word = found,
        }
    }
}
