//! Who waits for what, for people to look at.

use super::{Parked, Parking, State, Waiter, Want};
use crate::cell::Condition;
#[cfg(feature = "metrics")]
use crate::cell::sync::Claim;
use std::sync::Arc;
use std::time::Duration;

/// A wait that is parked.
#[derive(Debug)]
pub struct Waiting<'p> {
    /// Its number in its session.
    pub wait: u64,
    /// When it was parked.
    pub since: Duration,
    /// How many of its cells must be satisfied.
    pub need: usize,
    /// The peers that it names.
    pub peers: &'p [Arc<str>],
    waiter: &'p Waiter,
}

impl Waiting<'_> {
    /// Whether it queues for a lock or a permit.
    #[must_use]
    pub fn queues(&self) -> bool {
        self.waiter.claim().is_some()
    }

    /// How many cells it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiter.targets.len()
    }

    /// The first of them: the cell, what it is waited for, and whether that is so.
    pub fn cells(&self, most: usize) -> impl Iterator<Item = (u32, Option<Condition>, bool)> {
        let targets = self.waiter.targets.iter().take(most).enumerate();
        targets.map(|(index, (place, want))| {
            let fired = self.waiter.fired.iter().any(|fired| fired.index == index as u32);
            let condition = match want {
                Want::When(condition) => Some(*condition),
                Want::Claim(_) => None,
            };
            (*place, condition, fired)
        })
    }
}

impl Parking {
    /// From here on it is so late: what is parked was parked then.
    pub fn set_time(&mut self, now: Duration) {
        self.now = now;
    }

    /// The waits of a session whose numbers come behind this one, in order, and
    /// `most` of them at most.
    #[must_use]
    pub fn waits_behind(&self, session: u64, behind: Option<u64>, most: usize) -> Vec<Waiting<'_>> {
        let states = self.sessions.get(&session).map(|session| &session.waits);
        let parked = states.into_iter().flatten().filter_map(|(&wait, state)| match state {
            State::Parked(key) if behind.is_none_or(|behind| wait > behind) => Some((wait, *key)),
            _ => None,
        });
        let mut parked: Vec<(u64, usize)> = parked.collect();
        if parked.len() > most {
            parked.select_nth_unstable(most);
            parked.truncate(most);
        }
        parked.sort_unstable();
        let found = parked.into_iter().filter_map(|(wait, key)| {
            let waiter = self.waiters.get(key)?;
            let (since, need, peers) = (waiter.since, waiter.need, &waiter.peers[..]);
            Some(Waiting { wait, since, need, peers, waiter })
        });
        found.collect()
    }

    /// How many queue for this cell.
    #[must_use]
    pub fn queued_on(&self, place: u32) -> usize {
        let claims = |p: &&Parked| self.waiters[p.waiter].claim().is_some();
        self.cells.get(&place).map_or(0, |parked| parked.iter().filter(claims).count())
    }

    /// How many queue for locks, and for permits.
    #[must_use]
    #[cfg(feature = "metrics")]
    pub fn queued(&self) -> [u64; 2] {
        let mut queued = [0; 2];
        for (_, waiter) in &self.waiters {
            match waiter.claim() {
                Some(Claim::Lock { .. }) => queued[0] += 1,
                Some(Claim::Permit) => queued[1] += 1,
                None => {}
            }
        }
        queued
    }
}
