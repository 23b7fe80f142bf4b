//! Who queues for a lock or a permit, and who names peers.

use super::{
    Actor, Done, Ended, Fired, Grant, Parked, Parking, Route, State, TooMany, WaitId, Waiter, Want,
};
use crate::cell::sync::Claim;
use crate::cell::{WAITING, is_waiting};
use crate::engine::peers::Loss;
use std::sync::Arc;

impl Parking {
    /// Takes the cell for a claim if it can be had and nobody queues for it;
    /// otherwise the claim queues behind the others. One that came before is
    /// answered as it was, or stays in its place.
    ///
    /// # Errors
    /// The session is at a limit; nothing stays behind.
    pub fn acquire<A: Actor>(
        &mut self,
        actor: &A,
        id: WaitId,
        route: Option<Route>,
        place: u32,
        claim: Claim,
    ) -> Result<Option<Ended>, TooMany> {
        match self.state(id) {
            Some(State::Ended(ended)) => return Ok(Some(ended.clone())),
            Some(State::Parked(_)) => return Ok(None),
            None => {}
        }
        let session = self.sessions.entry(id.session).or_default();
        session.route = route;
        if self.most.refuses(session, 1) {
            self.drop_if_idle(id.session);
            return Err(TooMany);
        }
        session.cells += 1;
        let queue = self.cells.get(&place);
        let queued = queue
            .is_some_and(|parked| parked.iter().any(|p| self.waiters[p.waiter].claim().is_some()));
        // Watched before it is looked at, and the bit swapped for itself: see `arm`.
        let fresh = queue.is_none();
        let shared = fresh && actor.watch(place, true);
        let mut word = actor.load(place);
        loop {
            let met = if queued { None } else { claim.take(word) };
            let next = match met {
                // A bit that stands for none of ours is no queue.
                Some(next) if fresh => next & !WAITING,
                Some(next) => next,
                // See `arm`: it cannot go away unnoticed.
                None if !shared && is_waiting(word) => break,
                None => word | WAITING,
            };
            match actor.compare_exchange(place, word, next) {
                Ok(_) if met.is_some() => {
                    if fresh {
                        actor.watch(place, false);
                    }
                    let ended = Ended::Granted(Grant { place: Some(place), claim, word });
                    session.waits.insert(id.wait, State::Ended(ended.clone()));
                    return Ok(Some(ended));
                }
                Ok(_) => break,
                Err(found) => word = found,
            }
        }
        let targets = [(place, Want::Claim(claim))].into();
        let (fired, peers, since) = (Vec::new(), Box::default(), self.now);
        let waiter = Waiter { id, need: 1, targets, fired, peers, since };
        let key = self.waiters.insert(waiter);
        session.waits.insert(id.wait, State::Parked(key));
        self.cells.entry(place).or_default().push(Parked { waiter: key, index: 0 });
        Ok(None)
    }

    /// The client does not want what it asked for any more, and nobody looks
    /// at the answer: takes the claim back, and what it was given for it.
    pub fn forfeit<A: Actor>(&mut self, actor: &A, id: WaitId, done: &mut Vec<Done>) {
        match self.state(id) {
            Some(&State::Parked(key)) => {
                let _ = self.end(actor, key, Ended::Cancelled);
            }
            Some(&State::Ended(Ended::Granted(grant))) => self.give_back(actor, grant, done),
            _ => {}
        }
        self.acknowledge(id);
    }

    /// Puts back what a claim was given, unless that is gone already.
    pub(super) fn give_back<A: Actor>(&mut self, actor: &A, grant: Grant, done: &mut Vec<Done>) {
        let Some(place) = grant.place else {
            return;
        };
        let mut word = actor.load(place);
        while let Some(next) = grant.claim.give_back(grant.word, word) {
            match actor.compare_exchange(place, word, next) {
                Ok(_) => return self.ring(actor, place, done),
                Err(found) => word = found,
            }
        }
    }

    /// Ends this wait, if it is parked, should one of these peers be lost. Whether
    /// there is [room](Self::has_room) for them was asked before.
    pub fn watch(&mut self, id: WaitId, peers: Box<[Arc<str>]>) {
        let Some(&State::Parked(key)) = self.state(id) else {
            return;
        };
        for peer in &peers {
            self.watchers.entry(peer.clone()).or_default().push(key);
        }
        if let Some(session) = self.sessions.get_mut(&id.session) {
            session.cells += peers.len();
        }
        self.waiters[key].peers = peers;
    }

    /// A peer is lost: ends the waits that name it, as satisfied if they are so
    /// by now.
    pub fn peer_lost<A: Actor>(&mut self, actor: &A, peer: &str, loss: Loss, done: &mut Vec<Done>) {
        let Some((peer, keys)) = self.watchers.remove_entry(peer) else {
            return;
        };
        for key in keys {
            let satisfied = self.look(actor, key);
            let how = |fired: Vec<Fired>| match satisfied {
                true => Ended::Satisfied(fired),
                false => Ended::PeerLost(peer.clone(), loss),
            };
            done.extend(self.end(actor, key, how));
        }
    }

    /// Ends this wait, which is parked, because this peer was lost before.
    pub fn lost_before<A: Actor>(
        &mut self,
        actor: &A,
        id: WaitId,
        peer: Arc<str>,
        loss: Loss,
    ) -> Option<Ended> {
        let Some(&State::Parked(key)) = self.state(id) else {
            return None;
        };
        let satisfied = self.look(actor, key);
        let how = |fired: Vec<Fired>| match satisfied {
            true => Ended::Satisfied(fired),
            false => Ended::PeerLost(peer, loss),
        };
        self.end(actor, key, how).map(|done| done.ended)
    }

    pub(super) fn unwatch(&mut self, key: usize, peers: &[Arc<str>]) {
        for peer in peers {
            if let Some(keys) = self.watchers.get_mut(peer) {
                keys.retain(|k| *k != key);
                if keys.is_empty() {
                    self.watchers.remove(peer);
                }
            }
        }
    }

    /// The cells that a session's parked waits wait for, and whether it queues
    /// there; some of them, if there are many.
    #[must_use]
    pub fn waits_of(&self, session: u64, most: usize) -> (Vec<(u32, bool)>, usize) {
        let Some(waits) = self.sessions.get(&session) else {
            return (Vec::new(), 0);
        };
        let keys = waits.waits.values().filter_map(|state| match state {
            State::Parked(key) => self.waiters.get(*key),
            State::Ended(_) => None,
        });
        let mut places = Vec::new();
        let mut all = 0;
        for waiter in keys {
            all += waiter.targets.len();
            let room = most.saturating_sub(places.len());
            let claims = waiter.claim().is_some();
            places.extend(waiter.targets.iter().take(room).map(|(place, _)| (*place, claims)));
        }
        (places, all)
    }

    /// Whether a session has a wait parked on this cell.
    #[must_use]
    pub fn is_parked_on(&self, session: u64, place: u32) -> bool {
        let parked = self.cells.get(&place);
        parked.is_some_and(|list| list.iter().any(|p| self.waiters[p.waiter].id.session == session))
    }
}
