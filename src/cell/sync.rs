//! What the cells of locks, barriers and semaphores mean.
//!
//! * A **lock** holds, from the top, a fencing token of 40 bits, which counts
//!   the holders; whether the server handed it to one who queued; whether the
//!   last holder's session ended before it unlocked; and the seat of the holder,
//!   20 bits, 0 while it is free.
//! * A **barrier** holds an epoch of 17 bits, which counts the resets; whether
//!   it is broken; and 44 bits of arrivals. The generation is the arrivals
//!   divided by the parties, so an arrival is one addition. Broken or reset, the
//!   value is larger than any that was waited for.
//! * A **semaphore** holds the permits that can be had.
//!
//! Who may not have a lock or a permit now queues at the server, which hands
//! them out in order. While anyone queues the waiting bit is there, and nobody
//! takes anything under it.

use super::{Change, Op, WAITING, is_waiting, value};

/// Largest seat. Seats are numbers of living sessions, from 1 on.
pub const MAX_SEAT: u32 = (1 << 20) - 1;

/// Largest fencing token; the count begins anew behind it.
pub const MAX_TOKEN: u64 = (1 << 40) - 1;

/// Most permits that a semaphore can have.
pub const MAX_PERMITS: u64 = (1 << 31) - 1;

/// As operand of [`Op::Break`]: wherever the barrier is.
pub const ANY_STAGE: u64 = u64::MAX;

const ABANDONED: u64 = 1 << 20;
const GRANTED: u64 = 1 << 21;
const TOKEN_AT: u32 = 22;

const ARRIVALS_BITS: u32 = 44;
const ARRIVALS: u64 = (1 << ARRIVALS_BITS) - 1;
const EPOCH_AT: u32 = ARRIVALS_BITS + 1;
const EPOCHS: u64 = 1 << 17;

/// What the word of a lock says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// The number of the holder, or of the last one. It only grows.
    pub token: u64,
    /// The holder got it from the server, for which it had queued.
    pub granted: bool,
    /// The last holder's session ended before it unlocked.
    pub abandoned: bool,
    /// The holder's seat; 0: free.
    pub seat: u32,
}

impl Lock {
    /// What `word` says, its waiting bit aside.
    #[must_use]
    pub const fn of(word: u64) -> Lock {
        let v = word >> 1;
        Lock {
            token: (v >> TOKEN_AT) & MAX_TOKEN,
            granted: v & GRANTED != 0,
            abandoned: v & ABANDONED != 0,
            seat: (v & MAX_SEAT as u64) as u32,
        }
    }

    /// The word that says this, with nobody waiting.
    #[must_use]
    pub const fn word(self) -> u64 {
        let flags =
            if self.granted { GRANTED } else { 0 } | if self.abandoned { ABANDONED } else { 0 };
        (self.token << TOKEN_AT | flags | self.seat as u64) << 1
    }

    /// Held by the next one.
    #[must_use]
    pub const fn taken(self, seat: u32, granted: bool) -> Lock {
        Lock { token: (self.token + 1) & MAX_TOKEN, granted, abandoned: false, seat }
    }

    /// Free again.
    #[must_use]
    pub const fn freed(self, abandoned: bool) -> Lock {
        Lock { token: self.token, granted: false, abandoned, seat: 0 }
    }
}

/// What the word of a barrier says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Barrier {
    /// How often it was reset.
    pub epoch: u64,
    /// Nobody can pass it before it is reset.
    pub broken: bool,
    /// How often someone has arrived since the last reset.
    pub arrivals: u64,
}

impl Barrier {
    /// What `word` says, its waiting bit aside.
    #[must_use]
    pub const fn of(word: u64) -> Barrier {
        let v = word >> 1;
        Barrier {
            epoch: (v >> EPOCH_AT) & (EPOCHS - 1),
            broken: v >> ARRIVALS_BITS & 1 != 0,
            arrivals: v & ARRIVALS,
        }
    }

    /// The value that says this.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.epoch << EPOCH_AT | (self.broken as u64) << ARRIVALS_BITS | self.arrivals
    }

    /// How many have arrived in this generation.
    #[must_use]
    pub const fn index(self, parties: u64) -> u64 {
        if parties == 0 { 0 } else { self.arrivals % parties }
    }

    /// The value with which this generation began.
    #[must_use]
    pub const fn stage(self, parties: u64) -> u64 {
        let start = self.arrivals - self.index(parties);
        Barrier { epoch: self.epoch, broken: false, arrivals: start }.value()
    }

    /// The value from which on those who wait in this generation go on.
    #[must_use]
    pub const fn goal(self, parties: u64) -> u64 {
        self.stage(parties) + parties
    }
}

/// Of the parameter of a semaphore: permits at first, and at most.
#[must_use]
pub const fn permits(param: u64) -> (u64, u64) {
    (param & 0xffff_ffff, param >> 32)
}

/// Acquire and release.
pub(super) const fn change_lock(op: Op, word: u64, a: u64, b: u64) -> Change {
    let lock = Lock::of(word);
    match op {
        Op::Acquire if lock.seat == 0 && !is_waiting(word) && a >= 1 && a <= MAX_SEAT as u64 => {
            Change::Swap(lock.taken(a as u32, false).word())
        }
        // The waiting bit stays: the lock goes to the first in the queue.
        Op::Release if lock.seat != 0 && lock.seat as u64 == b && lock.token == a => {
            Change::Swap(lock.freed(false).word() | word & WAITING)
        }
        _ => Change::None,
    }
}

/// Down and up.
pub(super) const fn change_semaphore(op: Op, word: u64, a: u64, b: u64) -> Change {
    let count = value(word);
    match op {
        Op::Down if count > 0 && !is_waiting(word) => Change::Swap(word - 2),
        // The waiting bit stays: permits go to the first in the queue.
        Op::Up if a >= 1 && b <= MAX_PERMITS && a <= b && count >= 0 && count as u64 <= b - a => {
            Change::Swap(word + (a << 1))
        }
        _ => Change::None,
    }
}

/// Arrive, break and reset.
pub(super) const fn change_barrier(op: Op, word: u64, a: u64, b: u64) -> Change {
    let now = Barrier::of(word);
    let next = match op {
        Op::Arrive => return Change::Add(2),
        Op::Break if !now.broken && (a == ANY_STAGE || b > 0 && now.stage(b) == a) => {
            Barrier { broken: true, ..now }
        }
        Op::Reset if now.epoch == a && (now.broken || now.index(b) != 0) => {
            Barrier { epoch: (now.epoch + 1) % EPOCHS, broken: false, arrivals: 0 }
        }
        _ => return Change::None,
    };
    Change::Swap(next.value() << 1)
}

/// Whether an arrival that finds this word completes a generation.
#[must_use]
pub const fn completes(word: u64, parties: u64) -> bool {
    parties == 0 || Barrier::of(word).index(parties) + 1 == parties
}

/// The word behind an arrival that finds this one, for those who put it there by
/// a swap: the waiting bit stays as long as those for whom it stands must wait.
#[must_use]
pub const fn arrived(word: u64, parties: u64) -> u64 {
    let next = word.wrapping_add(2);
    if completes(word, parties) { next & !WAITING } else { next }
}

/// What one who queues wants of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Claim {
    /// The lock, for this seat.
    Lock {
        /// The seat.
        seat: u32,
    },
    /// One permit.
    Permit,
}

impl Claim {
    /// The word that the cell is to hold when the claim is met, its waiting
    /// bit left as it is. `None`: it cannot be met now.
    #[must_use]
    pub const fn take(self, word: u64) -> Option<u64> {
        match self {
            Claim::Lock { seat } => {
                let lock = Lock::of(word);
                if lock.seat != 0 {
                    return None;
                }
                Some(lock.taken(seat, true).word() | word & WAITING)
            }
            Claim::Permit if value(word) > 0 => Some(word - 2),
            Claim::Permit => None,
        }
    }

    /// The word that undoes a claim that was met when the cell held `before`,
    /// now that it holds `word`. `None`: there is nothing to undo any more.
    #[must_use]
    pub const fn give_back(self, before: u64, word: u64) -> Option<u64> {
        match self {
            Claim::Lock { seat } => {
                let (was, lock) = (Lock::of(before), Lock::of(word));
                if lock.seat != seat || lock.token != was.taken(seat, true).token {
                    return None;
                }
                Some(lock.freed(was.abandoned).word() | word & WAITING)
            }
            Claim::Permit if value(word) >= 0 && (value(word) as u64) < MAX_PERMITS => {
                Some(word + 2)
            }
            Claim::Permit => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{change, must_ring};
    use super::*;
    use proptest::prelude::*;

    fn swapped(op: Op, word: u64, a: u64, b: u64) -> Option<u64> {
        match change(op, word, a, b) {
            Change::Swap(new) => Some(new),
            _ => None,
        }
    }

    #[test]
    fn a_lock_is_taken_and_freed_by_its_holder_only() {
        let held = swapped(Op::Acquire, 0, 7, 0).unwrap();
        assert_eq!(Lock::of(held), Lock { token: 1, granted: false, abandoned: false, seat: 7 });
        assert_eq!(swapped(Op::Acquire, held, 8, 0), None);
        for (token, seat) in [(1, 8), (2, 7), (0, 7), (1, 0)] {
            assert_eq!(swapped(Op::Release, held, token, seat), None, "{token} {seat}");
        }
        let free = swapped(Op::Release, held, 1, 7).unwrap();
        assert_eq!(swapped(Op::Release, free, 1, 7), None, "a late unlock changes nothing");
        assert_eq!(swapped(Op::Release, free, 1, 0), None);
        assert_eq!(Lock::of(swapped(Op::Acquire, free, 9, 0).unwrap()).token, 2);
    }

    #[test]
    fn nobody_overtakes_a_queue() {
        let held = Lock::of(0).taken(7, false).word() | WAITING;
        let free = swapped(Op::Release, held, 1, 7).unwrap();
        assert!(is_waiting(free) && must_ring(Op::Release, held, 7));
        assert_eq!(swapped(Op::Acquire, free, 8, 0), None);
        let granted = Claim::Lock { seat: 8 }.take(free).unwrap();
        assert!(is_waiting(granted));
        assert_eq!(Lock::of(granted), Lock { token: 2, granted: true, abandoned: false, seat: 8 });
        assert_eq!(Claim::Lock { seat: 9 }.take(granted), None);
        assert_eq!(swapped(Op::Down, 3 << 1 | WAITING, 0, 0), None);
        assert_eq!(Claim::Permit.take(3 << 1 | WAITING), Some(2 << 1 | WAITING));
    }

    #[test]
    fn a_semaphore_keeps_its_bounds() {
        assert_eq!(swapped(Op::Down, 0, 0, 0), None);
        assert_eq!(swapped(Op::Down, 2 << 1, 0, 0), Some(1 << 1));
        assert_eq!(swapped(Op::Up, 2 << 1, 1, 3), Some(3 << 1));
        assert_eq!(swapped(Op::Up, 3 << 1, 1, 3), None);
        assert_eq!(swapped(Op::Up, 0, 4, 3), None);
        assert_eq!(swapped(Op::Up, WAITING, 3, 3), Some(3 << 1 | WAITING));
        assert_eq!(swapped(Op::Up, 0, u64::MAX, u64::MAX), None);
    }

    #[test]
    fn a_generation_is_complete_with_its_last_party() {
        let two = 2 << 1;
        assert_eq!(Barrier::of(two).index(3), 2);
        assert!(must_ring(Op::Arrive, two | WAITING, 3));
        assert!(!must_ring(Op::Arrive, two, 3));
        assert!(!must_ring(Op::Arrive, 1 << 1 | WAITING, 3));
        assert_eq!(Barrier::of(two).goal(3), 3);
        assert_eq!(Barrier::of(3 << 1).goal(3), 6);
        assert_eq!(arrived(two | WAITING, 3), 3 << 1, "those who waited go on");
        assert_eq!(arrived(1 << 1 | WAITING, 3), two | WAITING, "they wait for one more");
    }

    #[test]
    fn a_break_is_meant_for_one_generation() {
        let word = 4 << 1;
        let stage = Barrier::of(word).stage(3);
        let broken = swapped(Op::Break, word, stage, 3).unwrap();
        assert!(Barrier::of(broken).broken);
        assert!(value(broken) as u64 >= Barrier::of(word).goal(3));
        assert_eq!(swapped(Op::Break, 6 << 1, stage, 3), None, "the next one has begun");
        assert_eq!(swapped(Op::Break, broken, stage, 3), None);
        assert!(swapped(Op::Break, 6 << 1, ANY_STAGE, 3).is_some());
    }

    #[test]
    fn a_reset_ends_what_is_waited_for_and_is_done_once() {
        let word = 4 << 1;
        let new = swapped(Op::Reset, word, 0, 3).unwrap();
        assert_eq!(Barrier::of(new), Barrier { epoch: 1, broken: false, arrivals: 0 });
        assert!(value(new) as u64 >= Barrier::of(word).goal(3));
        assert_eq!(swapped(Op::Reset, new, 0, 3), None);
        assert_eq!(swapped(Op::Reset, 3 << 1, 0, 3), None, "nobody is there");
    }

    #[test]
    fn what_was_handed_out_is_given_back_once() {
        let claim = Claim::Lock { seat: 5 };
        let before = Lock { token: 8, granted: false, abandoned: true, seat: 0 }.word() | WAITING;
        let held = claim.take(before).unwrap();
        let back = claim.give_back(before, held).unwrap();
        // The token is used up.
        assert_eq!(
            back,
            Lock { token: 9, granted: false, abandoned: true, seat: 0 }.word() | WAITING
        );
        assert_eq!(claim.give_back(before, back), None);
        assert_eq!(Claim::Permit.give_back(4, 2), Some(4));
    }

    proptest! {
        #[test]
        fn words_say_what_was_put_into_them(
            token in 0..=MAX_TOKEN, granted: bool, abandoned: bool, seat in 0..=MAX_SEAT,
            epoch in 0..EPOCHS, broken: bool, arrivals in 0..=ARRIVALS,
        ) {
            let lock = Lock { token, granted, abandoned, seat };
            prop_assert_eq!(Lock::of(lock.word()), lock);
            prop_assert_eq!(Lock::of(lock.word() | WAITING), lock);
            prop_assert!(value(lock.word()) >= 0);
            let barrier = Barrier { epoch, broken, arrivals };
            prop_assert_eq!(Barrier::of(barrier.value() << 1 | WAITING), barrier);
            prop_assert!(value(barrier.value() << 1) >= 0);
        }

        #[test]
        fn no_word_and_no_operand_is_too_much(word: u64, a: u64, b: u64, seat in 1..=MAX_SEAT) {
            for op in Op::ALL {
                let _ = change(op, word, a, b);
                let _ = must_ring(op, word, b);
            }
            for claim in [Claim::Permit, Claim::Lock { seat }] {
                if let Some(next) = claim.take(word) {
                    prop_assert_eq!(is_waiting(next), is_waiting(word));
                    let _ = claim.give_back(word, next);
                }
            }
        }
    }
}
