//! What is wrong on purpose in a run, to see that it is found.

use crate::cell::sync::Lock;
use crate::cell::{WAITING, is_waiting};
use crate::engine::actor::Actor;
use crate::segment::Segment;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// See the [module](self).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// An add is answered and not carried out, now and then.
    LostAdd,
    /// A compare-and-swap is answered as done and is not, now and then.
    LostSwap,
    /// Waiting bits are never taken back.
    BitStays,
    /// Nobody who changes a cell sees its waiting bit, so nobody rings.
    NoRing,
    /// A lock is handed on under the token that it had.
    OldToken,
    /// Whoever tries a lock does not see that others queue.
    Barging,
    /// A session that comes back has none of its replies kept.
    NoReplies,
    /// An answer of a wait is lost on its way, though the connection is whole.
    LostAnswer,
    /// Sessions that have ended are not settled: no will, no lock freed, nobody
    /// told.
    NotSettled,
    /// Leases never end.
    NoLease,
    /// Messages are committed twice where the answer was lost.
    TwiceWritten,
}

impl Fault {
    pub const ALL: [Fault; 11] = [
        Fault::LostAdd,
        Fault::LostSwap,
        Fault::BitStays,
        Fault::NoRing,
        Fault::OldToken,
        Fault::Barging,
        Fault::NoReplies,
        Fault::LostAnswer,
        Fault::NotSettled,
        Fault::NoLease,
        Fault::TwiceWritten,
    ];
}

/// The cells, changed as the server changes them, or by one who makes mistakes.
#[derive(Debug)]
pub struct Cells {
    pub segment: Segment,
    pub fault: Fault,
    /// Where the locks are.
    pub locks: Range<u32>,
    /// Changes so far.
    pub count: AtomicU64,
}

impl Cells {
    fn now_and_then(&self) -> bool {
        // Relaxed: one thread.
        self.count.fetch_add(1, Ordering::Relaxed) % 16 == 15
    }
}

impl Actor for Cells {
    fn load(&self, place: u32) -> u64 {
        let word = self.segment.load(place);
        match self.fault {
            Fault::Barging if self.locks.contains(&place) => word & !WAITING,
            _ => word,
        }
    }

    fn compare_exchange(&self, place: u32, current: u64, new: u64) -> Result<u64, u64> {
        let is_lock = self.locks.contains(&place);
        match self.fault {
            Fault::LostSwap if (current ^ new) & !WAITING != 0 && self.now_and_then() => {
                return if self.load(place) == current {
                    Ok(current)
                } else {
                    Err(self.load(place))
                };
            }
            Fault::BitStays if is_waiting(current) && new == current & !WAITING => {
                return Ok(current);
            }
            Fault::NoRing => {
                let done = self.segment.compare_exchange(place, current, new);
                let changes = (current ^ new) & !WAITING != 0;
                return if changes { done.map(|word| word & !WAITING) } else { done };
            }
            Fault::OldToken if is_lock && Lock::of(new).token > Lock::of(current).token => {
                let stale = Lock { token: Lock::of(current).token, ..Lock::of(new) };
                let new = stale.word() | new & WAITING;
                return self.segment.compare_exchange(place, current, new);
            }
            Fault::Barging if is_lock => {
                let bit = self.segment.load(place) & WAITING;
                let done = self.segment.compare_exchange(place, current | bit, new | bit);
                return done.map(|word| word & !WAITING).map_err(|word| word & !WAITING);
            }
            _ => {}
        }
        self.segment.compare_exchange(place, current, new)
    }

    fn fetch_add(&self, place: u32, delta: u64) -> u64 {
        match self.fault {
            Fault::LostAdd if self.now_and_then() => self.segment.load(place),
            Fault::NoRing => self.segment.fetch_add(place, delta) & !WAITING,
            _ => self.segment.fetch_add(place, delta),
        }
    }
}
