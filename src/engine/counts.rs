//! What the engine counts: numbers for people, which nothing else hangs on.
//!
//! What happens often is counted by each thread that drives the engine, in a
//! [`Counts`] of its own, so that no two of them share a cache line. What happens
//! seldom is counted in one place, [`Events`]. All is Relaxed: a number that is
//! read a moment late is as good.

use super::peers::Way;
use crate::catalog::Kind;
use crate::cell::Op;
use crate::wire::FellReason;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// One more than the largest code of an operation, of a kind and of a way.
const OPS: usize = Op::ALL.len() + 1;
const KINDS: usize = Kind::ALL.len() + 1;
const WAYS: usize = 4;

/// Adds to a number that only this thread changes: no atomic addition is needed.
#[inline]
fn bump(number: &AtomicU64, by: u64) {
    number.store(number.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// What one thread has done. Only that thread changes it.
#[derive(Debug, Default)]
pub struct Counts {
    /// By way of the session, kind of the array and operation.
    operations: [[[AtomicU64; OPS]; KINDS]; WAYS],
    /// Numbered requests.
    requests: AtomicU64,
    /// Waits and claims.
    waits: AtomicU64,
    /// Cells changed in shared memory and rung for over a connection.
    rings: AtomicU64,
}

impl Counts {
    #[inline]
    pub(super) fn operations(&self, way: u8, kind: Kind, op: Op, by: u64) {
        bump(&self.operations[usize::from(way & 3)][kind as usize][op as usize], by);
    }

    /// Operations of sessions of this way, on arrays of this kind.
    #[must_use]
    pub fn of(&self, way: Way, kind: Kind, op: Op) -> u64 {
        self.operations[way as usize][kind as usize][op as usize].load(Ordering::Relaxed)
    }

    /// Numbered requests, waits and claims, and cells that were rung for.
    #[must_use]
    pub fn frames(&self) -> (u64, u64, u64) {
        let read = |number: &AtomicU64| number.load(Ordering::Relaxed);
        (read(&self.requests), read(&self.waits), read(&self.rings))
    }
}

/// What one session has asked. Changed under the session's lock alone.
#[derive(Debug)]
pub struct Tally {
    /// The session's [`Way`].
    way: AtomicU8,
    /// Operations on cells.
    pub operations: AtomicU64,
    /// Numbered requests.
    pub requests: AtomicU64,
    /// Waits and claims.
    pub waits: AtomicU64,
    /// Cells rung for.
    pub rings: AtomicU64,
    /// When the last of these came, in nanoseconds; 0: there was none.
    pub last: AtomicU64,
}

impl Default for Tally {
    fn default() -> Tally {
        Tally {
            way: AtomicU8::new(Way::Tcp as u8),
            operations: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            rings: AtomicU64::new(0),
            last: AtomicU64::new(0),
        }
    }
}

impl Tally {
    /// By which way the session's operations go from here on.
    pub fn set_way(&self, way: Way) {
        self.way.store(way as u8, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn way(&self) -> u8 {
        self.way.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn operations(&self, by: u64) {
        bump(&self.operations, by);
    }

    /// A numbered request came.
    #[inline]
    pub(super) fn request(&self, counts: &Counts, now: u64) {
        bump(&self.requests, 1);
        bump(&counts.requests, 1);
        self.last.store(now, Ordering::Relaxed);
    }

    /// A wait or a claim came.
    #[inline]
    pub(super) fn wait(&self, counts: &Counts, now: u64) {
        bump(&self.waits, 1);
        bump(&counts.waits, 1);
        self.last.store(now, Ordering::Relaxed);
    }

    /// A cell was rung for.
    #[inline]
    pub(super) fn ring(&self, counts: &Counts, now: u64) {
        bump(&self.rings, 1);
        bump(&counts.rings, 1);
        self.last.store(now, Ordering::Relaxed);
    }
}

/// What happens seldom, whoever drives the engine.
#[derive(Debug, Default)]
pub struct Events {
    /// Sessions that began.
    pub begun: AtomicU64,
    /// Sessions that ended, by [`Gone`](super::Gone).
    pub ended: [AtomicU64; 4],
    /// Sessions that came back over another connection.
    pub resumed: AtomicU64,
    /// Locks taken from sessions that had ended.
    pub abandoned: AtomicU64,
    /// Barriers broken by parties that had gone.
    pub broken: AtomicU64,
    /// Peers with a name that were lost.
    pub lost: AtomicU64,
    /// Waits that ended because a peer was lost.
    pub told: AtomicU64,
    /// Transports that clients do not have, by [`Way`] and [`FellReason`].
    pub fell: [[AtomicU64; FellReason::ALL.len()]; WAYS],
}

/// Counts in one of the [`Events`].
pub(super) fn add(number: &AtomicU64, by: u64) {
    number.fetch_add(by, Ordering::Relaxed);
}

/// How it stands with an engine at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Sessions, by their [`Way`]: those that may write, those that may not.
    pub sessions: [[u64; 2]; WAYS],
    /// Sessions of which nothing was heard for more than half of their lease.
    pub silent: u64,
    /// Waits that are parked.
    pub parked: u64,
    /// Waits that sleep in shared memory, as their clients say.
    pub sleeping: u64,
    /// Of the parked ones: claims of locks and of permits.
    pub queued: [u64; 2],
    /// Cells of the segment, those that no array has, and those of the largest
    /// free piece.
    pub cells: [u64; 3],
    /// Arrays, by the code of their kind.
    pub arrays: [u64; KINDS],
    /// Locks that are held.
    pub locks_held: u64,
    /// Barriers that are broken.
    pub barriers_broken: u64,
    /// Bytes of messages: taken, and the most.
    pub payload: [u64; 2],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_place() {
        let counts = Counts::default();
        for (i, op) in Op::ALL.into_iter().enumerate() {
            for kind in Kind::ALL {
                counts.operations(Way::Shm as u8, kind, op, i as u64 + 1);
                assert_eq!(counts.of(Way::Shm, kind, op), i as u64 + 1);
                assert_eq!(counts.of(Way::Tcp, kind, op), 0);
            }
        }
    }
}
