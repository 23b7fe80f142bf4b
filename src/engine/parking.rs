//! Who waits for which cell: the futex across machines.
//!
//! The table knows the waiters, the waiting bit in each cell tells mutators
//! that there are any. The protocol, for one cell:
//!
//! 1. [`Parking::wait`] puts the waiter into the table after it has set the
//!    waiting bit with a compare-and-swap from a word that does not satisfy
//!    the wait.
//! 2. Whoever changes the word and finds the bit in the word before the change
//!    calls [`Parking::ring`]. A swap drops the bit, an add leaves it.
//! 3. `ring` looks at the cell, finishes the waits that it satisfies, and sets
//!    the bit again from a word that satisfies none of the others.
//! 4. A mutator can die between its change and its ring. [`Parking::sweep`]
//!    finds what it left: a satisfied waiter, or a missing bit.
//!
//! Who claims a lock or a permit queues in the same lists: [`Parking::acquire`].
//! A claim does not only look at the word, it changes it, in the order in which
//! they came; and those who change such a cell leave the waiting bit, so that
//! nobody takes it past the queue.
//!
//! `&mut self` stands for the lock around the table: `wait` keeps it from the
//! bit to the entry, so a ring for the bit finds the entry. Nothing here knows
//! a thread or a clock.

use super::actor::{Actor, TOGETHER};
use super::peers::Loss;
use super::session::Route;
use crate::cell::sync::Claim;
use crate::cell::{self, Comparison, Condition, WAITING};
use slab::Slab;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Cells for each wait that a session may have: as many all its waits may have at
/// once. Those that they are parked on count, those in answers that are not yet
/// acknowledged, and as one cell each the peers that they name.
const CELLS_A_WAIT: usize = 4;

/// Most waits of one session unless told otherwise, those counted whose answer is
/// not yet acknowledged.
pub const MAX_WAITS: usize = 1 << 16;

/// Most cells of the waits of one session unless told otherwise.
#[cfg(test)]
pub const MAX_PARKED_CELLS: usize = MAX_WAITS * CELLS_A_WAIT;

/// Who waits: the session's number and its number for the wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WaitId {
    /// The session.
    pub session: u64,
    /// The wait in it.
    pub wait: u64,
}

/// A cell and what it is waited for. `None`: an event that is set when first
/// looked at, or any transition behind that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The cell.
    pub place: u32,
    /// The condition.
    pub condition: Option<Condition>,
}

/// A cell of a wait that satisfies it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fired {
    /// Which target of the wait.
    pub index: u32,
    /// The word that satisfied it.
    pub word: u64,
}

/// How a wait ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Enough cells satisfied it.
    Satisfied(Vec<Fired>),
    /// It was given up; these cells had satisfied it by then.
    Cancelled(Vec<Fired>),
    /// A cell of it is gone with its array.
    Removed,
    /// It was a claim, and is met.
    Granted(Grant),
    /// A peer that it named is lost.
    PeerLost(Arc<str>, Loss),
}

/// A claim that was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The cell; `None`: its array was removed since.
    place: Option<u32>,
    claim: Claim,
    /// The word before.
    pub word: u64,
}

impl Ended {
    /// How many cells the answer names.
    fn cells(&self) -> usize {
        match self {
            Ended::Satisfied(fired) | Ended::Cancelled(fired) => fired.len(),
            Ended::Granted(_) => 1,
            Ended::Removed | Ended::PeerLost(..) => 0,
        }
    }
}

/// What a waiter wants of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Want {
    When(Condition),
    Claim(Claim),
}

impl Want {
    /// Whether a cell that holds `word` satisfies it. A claim must be met first.
    fn holds(self, word: u64) -> bool {
        matches!(self, Want::When(condition) if condition.holds(word))
    }
}

/// A wait that has ended, for the caller to pass on if there is a way to its
/// client now. Otherwise the client asks again when it comes back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// The wait.
    pub id: WaitId,
    /// Where its client is.
    pub route: Option<Route>,
    /// The answer.
    pub ended: Ended,
}

/// The session waits for more cells, or has more waits, than it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMany;

#[derive(Debug)]
struct Waiter {
    id: WaitId,
    need: usize,
    /// Conditions with their starting value filled in, or one claim.
    targets: Box<[(u32, Want)]>,
    fired: Vec<Fired>,
    /// The peers that it names.
    peers: Box<[Arc<str>]>,
    /// When it was parked.
    since: Duration,
}

impl Waiter {
    fn claim(&self) -> Option<Claim> {
        match self.targets.first() {
            Some((_, Want::Claim(claim))) => Some(*claim),
            _ => None,
        }
    }
}

/// One target of one waiter, in the list of its cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parked {
    waiter: usize,
    index: u32,
}

#[derive(Debug)]
enum State {
    /// Parked; where in the slab.
    Parked(usize),
    /// Over. Kept until the client says that the answer has arrived.
    Ended(Ended),
}

#[derive(Debug, Default)]
struct SessionWaits {
    route: Option<Route>,
    waits: HashMap<u64, State>,
    cells: usize,
}

mod bits;
mod claims;
mod listing;

/// What one session may have.
#[derive(Clone, Copy, Debug)]
struct Most {
    waits: usize,
}

impl Default for Most {
    fn default() -> Most {
        Most { waits: MAX_WAITS }
    }
}

impl Most {
    /// Whether so many cells more are too many.
    fn refuses(self, session: &SessionWaits, cells: usize) -> bool {
        session.waits.len() >= self.waits
            || session.cells + cells > self.waits.saturating_mul(CELLS_A_WAIT)
    }
}

/// The table of waiters.
#[derive(Debug, Default)]
pub struct Parking {
    most: Most,
    waiters: Slab<Waiter>,
    cells: HashMap<u32, Vec<Parked>>,
    sessions: HashMap<u64, SessionWaits>,
    /// Who names a peer.
    watchers: HashMap<Arc<str>, Vec<usize>>,
    /// Cells that may lack their waiting bit, or have it with nobody parked.
    untidy: VecDeque<u32>,
    /// As it was told last.
    now: Duration,
}

impl Parking {
    /// A table in which a session may have so many waits.
    #[must_use]
    pub fn with_most(waits: usize) -> Parking {
        Parking { most: Most { waits }, ..Parking::default() }
    }

    /// Whether a session may have one wait more, on so many cells and peers.
    #[must_use]
    pub fn has_room(&self, session: u64, cells: usize) -> bool {
        let none = SessionWaits::default();
        !self.most.refuses(self.sessions.get(&session).unwrap_or(&none), cells)
    }

    /// How many waits are parked.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// How many waits are parked on a cell.
    #[must_use]
    pub fn waiters_on(&self, place: u32) -> usize {
        self.cells.get(&place).map_or(0, Vec::len)
    }

    /// Whether this wait is known: parked, or over and not acknowledged.
    #[must_use]
    pub fn knows(&self, id: WaitId) -> bool {
        self.state(id).is_some()
    }

    /// Whether this wait is parked.
    #[cfg(test)]
    pub fn is_parked(&self, id: WaitId) -> bool {
        matches!(self.state(id), Some(State::Parked(_)))
    }

    /// Parks a wait until `need` of its targets are satisfied, or answers it
    /// if they are already. A target once satisfied counts from then on,
    /// whatever its cell does later. A wait that came before is not parked
    /// again: it is answered as it was, or stays parked.
    ///
    /// # Errors
    /// The session is at a limit; nothing stays behind.
    pub fn wait<A: Actor>(
        &mut self,
        actor: &A,
        id: WaitId,
        route: Option<Route>,
        need: usize,
        targets: &[Target],
    ) -> Result<Option<Ended>, TooMany> {
        match self.state(id) {
            Some(State::Ended(ended)) => return Ok(Some(ended.clone())),
            Some(State::Parked(_)) => return Ok(None),
            None => {}
        }
        // First only look: a wait that is satisfied touches no cell.
        let mut fired = Vec::new();
        let mut settled = Vec::with_capacity(targets.len());
        for (index, target) in targets.iter().enumerate() {
            let word = actor.load(target.place);
            let (condition, holds) = match target.condition {
                Some(condition) => (condition, condition.holds(word)),
                None => {
                    let value = cell::value(word);
                    let changed = Condition { comparison: Comparison::Ne, value };
                    (changed, cell::event_is_set(word))
                }
            };
            if holds {
                fired.push(Fired { index: index as u32, word });
            }
            settled.push((target.place, Want::When(condition)));
        }
        let session = self.sessions.entry(id.session).or_default();
        session.route = route;
        let enough = fired.len() >= need;
        let cells = if enough { fired.len() } else { settled.len() };
        if self.most.refuses(session, cells) {
            self.drop_if_idle(id.session);
            return Err(TooMany);
        }
        session.cells += cells;
        if enough {
            let ended = Ended::Satisfied(fired);
            session.waits.insert(id.wait, State::Ended(ended.clone()));
            return Ok(Some(ended));
        }
        let already: Vec<u32> = fired.iter().map(|f| f.index).collect();
        let targets_of = settled.into();
        let (peers, since) = (Box::default(), self.now);
        let waiter = Waiter { id, need, targets: targets_of, fired, peers, since };
        let key = self.waiters.insert(waiter);
        session.waits.insert(id.wait, State::Parked(key));
        let mut already = already.into_iter().peekable();
        let open = (0..targets.len() as u32).filter(|index| already.next_if_eq(index).is_none());
        self.arm(actor, key, open);
        if self.waiters[key].fired.len() >= need {
            // Cells changed while the others were armed.
            return Ok(self.end(actor, key, Ended::Satisfied).map(|done| done.ended));
        }
        Ok(None)
    }

    /// Gives up a wait, and says how it ended: it may have been satisfied
    /// before, also by a change whose ring is still on its way. No cell keeps
    /// a trace of it.
    pub fn cancel<A: Actor>(&mut self, actor: &A, id: WaitId) -> Ended {
        let key = match self.state(id) {
            Some(State::Ended(ended)) => return ended.clone(),
            Some(State::Parked(key)) => *key,
            None => return Ended::Cancelled(Vec::new()),
        };
        let how = if self.look(actor, key) { Ended::Satisfied } else { Ended::Cancelled };
        self.end(actor, key, how).map_or(Ended::Cancelled(Vec::new()), |done| done.ended)
    }

    /// The client has the answer to this wait: forgets it.
    pub fn acknowledge(&mut self, id: WaitId) {
        if let Some(session) = self.sessions.get_mut(&id.session)
            && let Some(State::Ended(ended)) = session.waits.get(&id.wait)
        {
            session.cells -= ended.cells();
            session.waits.remove(&id.wait);
            self.drop_if_idle(id.session);
        }
    }

    /// The answers of a session's waits that its client has not acknowledged.
    #[must_use]
    pub fn unacknowledged(&self, session: u64) -> Vec<Done> {
        let Some(waits) = self.sessions.get(&session) else {
            return Vec::new();
        };
        let ended = waits.waits.iter().filter_map(|(&wait, state)| match state {
            State::Ended(ended) => Some((wait, ended.clone())),
            State::Parked(_) => None,
        });
        let route = waits.route;
        ended.map(|(wait, ended)| Done { id: WaitId { session, wait }, route, ended }).collect()
    }

    /// The session has another way to its client now, or none.
    pub fn reroute(&mut self, session: u64, route: Option<Route>) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.route = route;
        }
    }

    /// Gives up and forgets all waits of a session. A permit that it was given
    /// and has not said to have got goes back; its locks are found by its seat.
    pub fn end_session<A: Actor>(&mut self, actor: &A, session: u64, done: &mut Vec<Done>) {
        let Some(waits) = self.sessions.remove(&session) else {
            return;
        };
        let mut granted = Vec::new();
        for state in waits.waits.into_values() {
            match state {
                State::Parked(key) => drop(self.unpark(actor, key)),
                State::Ended(Ended::Granted(grant)) if grant.claim == Claim::Permit => {
                    granted.push(grant);
                }
                State::Ended(_) => {}
            }
        }
        for grant in granted {
            self.give_back(actor, grant, done);
        }
    }

    /// Ends every wait on cells of a removed array: as satisfied if it is so
    /// by now.
    pub fn remove_cells<A: Actor>(
        &mut self,
        actor: &A,
        cells: std::ops::Range<u32>,
        done: &mut Vec<Done>,
    ) {
        let keys: Vec<usize> = self
            .cells
            .iter()
            .filter(|(place, _)| cells.contains(place))
            .flat_map(|(_, parked)| parked.iter().map(|p| p.waiter))
            .collect();
        for key in keys {
            let satisfied = self.look(actor, key);
            let how = |fired| if satisfied { Ended::Satisfied(fired) } else { Ended::Removed };
            done.extend(self.end(actor, key, how));
        }
        // They get tombstones, which have the bit, or what another array begins
        // with.
        self.untidy.retain(|place| !cells.contains(place));
        let states = self.sessions.values_mut().flat_map(|s| s.waits.values_mut());
        for state in states {
            if let State::Ended(Ended::Granted(grant)) = state
                && grant.place.is_some_and(|place| cells.contains(&place))
            {
                // Its cell may be another array's soon.
                grant.place = None;
            }
        }
    }

    /// Someone changed this cell under its waiting bit: finishes the waits
    /// that are satisfied and keeps the bit for the others.
    pub fn ring<A: Actor>(&mut self, actor: &A, place: u32, done: &mut Vec<Done>) {
        let mut complete = Vec::new();
        // Without an entry it was rung late, after the last waiter went, whose
        // leaving has cleared the bit.
        while let Some(parked) = self.cells.get_mut(&place) {
            let word = actor.load(place);
            let waiters = &mut self.waiters;
            parked.retain(|p| {
                let waiter = &mut waiters[p.waiter];
                if !waiter.targets[p.index as usize].1.holds(word) {
                    return true;
                }
                waiter.fired.push(Fired { index: p.index, word });
                if waiter.fired.len() == waiter.need {
                    complete.push(p.waiter);
                }
                false
            });
            // Then the first claim: only its turn has come.
            let first = parked.iter().position(|p| waiters[p.waiter].claim().is_some());
            let next = first.and_then(|at| {
                let next = waiters[parked[at].waiter].claim()?.take(word)?;
                Some((at, next))
            });
            if let Some((at, next)) = next {
                // The bit stays meanwhile: nobody must overtake the others.
                if actor.compare_exchange(place, word, next | WAITING).is_ok() {
                    let Parked { waiter, index } = parked.remove(at);
                    waiters[waiter].fired.push(Fired { index, word });
                    complete.push(waiter);
                    if parked.is_empty() {
                        self.cells.remove(&place);
                        actor.watch(place, false);
                        self.clear_bit(actor, place);
                    }
                }
                continue;
            }
            let rest = !parked.is_empty();
            if !rest {
                self.cells.remove(&place);
                actor.watch(place, false);
            }
            // With waiters left, the bit must be there, set from a word that
            // satisfies none of them; with none left it must not.
            let want = if rest { word | WAITING } else { word & !WAITING };
            if want == word || actor.compare_exchange(place, word, want).is_ok() {
                break;
            }
            if !rest {
                self.clear_bit(actor, place);
                break;
            }
        }
        for key in complete {
            let claim = self.waiters.get(key).and_then(Waiter::claim);
            let how = |fired: Vec<Fired>| match (claim, fired.as_slice()) {
                (Some(claim), &[Fired { word, .. }]) => {
                    Ended::Granted(Grant { place: Some(place), claim, word })
                }
                _ => Ended::Satisfied(fired),
            };
            done.extend(self.end(actor, key, how));
        }
    }

    /// Looks at every parked cell and rings those that a mutator changed
    /// without ringing. To be called every few milliseconds while anyone is
    /// parked.
    pub fn sweep<A: Actor>(&mut self, actor: &A, done: &mut Vec<Done>) {
        let (mut missed, mut bare) = (Vec::new(), VecDeque::new());
        for (&place, parked) in &self.cells {
            let word = actor.load(place);
            let mut wants =
                parked.iter().map(|p| self.waiters[p.waiter].targets[p.index as usize].1);
            // All claims of a cell are alike: none can be met if the first
            // cannot.
            let first = wants.clone().find_map(|want| match want {
                Want::Claim(claim) => Some(claim),
                Want::When(_) => None,
            });
            if first.is_some_and(|claim| claim.take(word).is_some())
                || wants.any(|want| want.holds(word))
            {
                missed.push(place);
            } else if !cell::is_waiting(word) {
                bare.push_back(place);
            }
        }
        for place in missed {
            self.ring(actor, place, done);
        }
        // Otherwise they are known, most likely.
        if self.untidy.is_empty() {
            self.untidy = bare;
            self.mend(actor, done);
        }
    }

    fn state(&self, id: WaitId) -> Option<&State> {
        self.sessions.get(&id.session)?.waits.get(&id.wait)
    }

    fn drop_if_idle(&mut self, session: u64) {
        if self.sessions.get(&session).is_some_and(|s| s.waits.is_empty()) {
            self.sessions.remove(&session);
        }
    }

    /// Looks once more at the cells of a wait that is about to end, and says
    /// whether it is satisfied: a change may have been made, and its ring
    /// still be on its way.
    fn look<A: Actor>(&mut self, actor: &A, key: usize) -> bool {
        let Some(waiter) = self.waiters.get_mut(key) else {
            return false;
        };
        let mut open = vec![true; waiter.targets.len()];
        for fired in &waiter.fired {
            open[fired.index as usize] = false;
        }
        for (index, (place, condition)) in waiter.targets.iter().enumerate() {
            if open[index] {
                let word = actor.load(*place);
                if condition.holds(word) {
                    waiter.fired.push(Fired { index: index as u32, word });
                }
            }
        }
        waiter.fired.len() >= waiter.need
    }

    /// Takes a wait off its cells and keeps how it ended for the client.
    fn end<A: Actor>(
        &mut self,
        actor: &A,
        key: usize,
        how: impl FnOnce(Vec<Fired>) -> Ended,
    ) -> Option<Done> {
        let waiter = self.unpark(actor, key)?;
        let ended = how(waiter.fired);
        let session = self.sessions.get_mut(&waiter.id.session)?;
        // Never more than it had: what has fired was a target.
        session.cells -= waiter.targets.len() + waiter.peers.len() - ended.cells();
        let kept = State::Ended(ended.clone());
        session.waits.insert(waiter.id.wait, kept);
        Some(Done { id: waiter.id, route: session.route, ended })
    }

    /// Takes a waiter out of every list, and the bit from cells without one.
    fn unpark<A: Actor>(&mut self, actor: &A, key: usize) -> Option<Waiter> {
        let waiter = self.waiters.try_remove(key)?;
        // Each cell once, however often the wait names it: its list can be
        // long.
        let mut places: Vec<u32> = waiter.targets.iter().map(|(place, _)| *place).collect();
        places.sort_unstable();
        places.dedup();
        places.retain(|place| {
            let Some(parked) = self.cells.get_mut(place) else {
                return false;
            };
            parked.retain(|p| p.waiter != key);
            let last = parked.is_empty();
            if last {
                self.cells.remove(place);
                actor.watch(*place, false);
            }
            last
        });
        if places.len() > TOGETHER {
            self.untidy.extend(places.drain(TOGETHER..));
        }
        self.clear_bits(actor, places);
        self.unwatch(key, &waiter.peers);
        Some(waiter)
    }
}
