//! How it stands with an engine, in numbers: for metrics.

use super::actor::Actor;
use super::counts::{Counts, KINDS, WAYS};
use super::peers::{Way, nanos};
use super::{Engine, lock};
use crate::catalog::Kind;
use crate::cell::Op;
use crate::cell::sync::{Barrier, Lock};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

impl Counts {
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

impl<A: Actor> Engine<A> {
    /// How it stands. Looks at every lock and barrier, and takes each of the
    /// engine's locks for a moment.
    pub fn standing(&self, now: Duration) -> Standing {
        let mut standing = Standing {
            sleeping: self.actor.sleepers(None) as u64,
            payload: self.payload(),
            ..Standing::default()
        };
        for (_, member) in lock(&self.peers).after(0) {
            if member.gone.is_none() {
                standing.sessions[member.way as usize][usize::from(member.reads_only)] += 1;
                let silent = nanos(now).saturating_sub(nanos(member.last_heard()));
                standing.silent += u64::from(u128::from(silent) * 2 > self.lease.as_nanos());
            }
        }
        {
            let catalog = self.catalogued();
            let (free, largest) = catalog.free_cells();
            standing.cells = [catalog.capacity().into(), free, largest];
            for entry in catalog.list("", usize::MAX) {
                standing.arrays[entry.form.kind as usize] += 1;
                for place in entry.base..entry.base + entry.extent {
                    match entry.form.kind {
                        Kind::Lock => {
                            let held = Lock::of(self.actor.load(place)).seat != 0;
                            standing.locks_held += u64::from(held);
                        }
                        Kind::Barrier => {
                            let broken = Barrier::of(self.actor.load(place)).broken;
                            standing.barriers_broken += u64::from(broken);
                        }
                        _ => break,
                    }
                }
            }
        }
        let parking = lock(&self.parking);
        standing.parked = parking.len() as u64;
        standing.queued = parking.queued();
        standing
    }
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
