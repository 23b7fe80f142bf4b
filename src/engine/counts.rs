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
pub(super) const KINDS: usize = Kind::ALL.len() + 1;
pub(super) const WAYS: usize = 4;

/// Adds to a number that only this thread changes: no atomic addition is needed.
#[inline]
fn bump(number: &AtomicU64, by: u64) {
    number.store(number.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// What one thread has done. Only that thread changes it.
#[derive(Debug, Default)]
pub struct Counts {
    /// By way of the session, kind of the array and operation.
    pub(super) operations: [[[AtomicU64; OPS]; KINDS]; WAYS],
    /// Numbered requests.
    pub(super) requests: AtomicU64,
    /// Waits and claims.
    pub(super) waits: AtomicU64,
    /// Cells changed in shared memory and rung for over a connection.
    pub(super) rings: AtomicU64,
}

impl Counts {
    #[inline]
    pub(super) fn operations(&self, way: u8, kind: Kind, op: Op, by: u64) {
        bump(&self.operations[usize::from(way & 3)][kind as usize][op as usize], by);
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
