//! The waiting bits in the cells: set for those who park, taken away behind them.

use super::{Fired, Parked, Parking, Waiter};
use crate::cell::{self, WAITING};
use crate::engine::actor::{Actor, TOGETHER, change_all};
use crate::engine::parking::Done;

impl Parking {
    /// Sets the waiting bit for these targets and enters each into its cell's
    /// list, or counts it as satisfied if it has become so. Of many, most get
    /// their bit by [`mend`](Self::mend).
    pub(super) fn arm<A: Actor>(
        &mut self,
        actor: &A,
        key: usize,
        indexes: impl Iterator<Item = u32>,
    ) {
        let Waiter { targets, fired, .. } = &mut self.waiters[key];
        let (cells, untidy) = (&mut self.cells, &mut self.untidy);
        let at = |index: u32| targets[index as usize];
        let mut indexes = indexes.map(|index| (index, at(index).0));
        let first: Vec<_> = indexes
            .by_ref()
            .take(TOGETHER)
            .map(|(index, place)| (index, place, !cells.contains_key(&place)))
            .collect();
        // Watched before it is looked at, if nobody waits on it yet.
        let first = first
            .into_iter()
            .map(|(index, place, fresh)| ((index, fresh && actor.watch(place, true)), place));
        let mut passed = Vec::new();
        change_all(actor, first, |(index, shared), word, done| {
            let (place, want) = at(index);
            if !done && want.holds(word) {
                fired.push(Fired { index, word });
                passed.push(place);
                return None;
            }
            // The bit may be that of another waiter. It cannot go away unnoticed:
            // whoever drops it must ring, and the ring waits for the lock that we
            // hold. (The bit of one who sleeps without the server's doing is
            // swapped for itself: whoever drops it after that has seen the watch.)
            if !done && (shared || !cell::is_waiting(word)) {
                return Some(word | WAITING);
            }
            cells.entry(place).or_default().push(Parked { waiter: key, index });
            None
        });
        for (index, place) in indexes {
            let shared = !cells.contains_key(&place) && actor.watch(place, true);
            let word = actor.load(place);
            if at(index).1.holds(word) {
                fired.push(Fired { index, word });
                passed.push(place);
                continue;
            }
            cells.entry(place).or_default().push(Parked { waiter: key, index });
            if shared || !cell::is_waiting(word) {
                untidy.push_back(place);
            }
        }
        for place in passed {
            if !cells.contains_key(&place) {
                actor.watch(place, false);
            }
        }
    }

    /// Puts some of the waiting bits right that were left for later: large waits
    /// begin and end with many of them, and others have their turn in between. A
    /// cell without its bit is looked at here and by the sweep; one that has it
    /// with nobody parked costs whoever changes it a ring for nothing.
    pub fn mend<A: Actor>(&mut self, actor: &A, done: &mut Vec<Done>) {
        let some = self.untidy.len().min(TOGETHER);
        let places: Vec<u32> = self.untidy.drain(..some).collect();
        let (cells, waiters) = (&self.cells, &self.waiters);
        let mut satisfied = Vec::new();
        // For why it is watched, and swapped for itself, see `arm`.
        let places = places.into_iter().map(|place| {
            let shared = cells.contains_key(&place) && actor.watch(place, true);
            ((place, shared), place)
        });
        change_all(actor, places, |(place, shared), word, done| {
            let parked = cells.get(&place);
            let mut wants =
                parked.into_iter().flatten().map(|p| waiters[p.waiter].targets[p.index as usize].1);
            if done {
                None
            } else if parked.is_none() {
                cell::is_waiting(word).then_some(word & !WAITING)
            } else if wants.any(|want| want.holds(word)) {
                satisfied.push(place);
                None
            } else {
                (shared || !cell::is_waiting(word)).then_some(word | WAITING)
            }
        });
        for place in satisfied {
            self.ring(actor, place, done);
        }
    }

    /// Whether there is something for [`mend`](Self::mend) to do.
    #[must_use]
    pub fn is_untidy(&self) -> bool {
        !self.untidy.is_empty()
    }

    /// Takes the waiting bit from a cell on which nobody is parked any more.
    pub(super) fn clear_bit<A: Actor>(&self, actor: &A, place: u32) {
        self.clear_bits(actor, [place]);
    }

    /// Takes the waiting bit from cells on which nobody is parked any more.
    pub(super) fn clear_bits<A: Actor>(&self, actor: &A, places: impl IntoIterator<Item = u32>) {
        let cells = places.into_iter().map(|place| ((), place));
        change_all(actor, cells, |(), word, done| {
            (!done && cell::is_waiting(word)).then_some(word & !WAITING)
        });
    }
}
