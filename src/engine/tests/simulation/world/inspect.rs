//! What must be so after each step.

use super::{BRIEF, Books, Client, LEASE, LOCK, LOCKS, SEMAPHORE, TICK, WaitId, World};
use crate::cell::sync::Lock;
use crate::cell::value;
use crate::engine::actor::Actor;
use crate::engine::lock;
use std::time::Duration;

impl World {
    pub(super) fn inspect(&mut self) {
        for at in 0..LOCKS {
            let word = Lock::of(self.word(LOCK, at as u32));
            let place = self.bases[usize::from(LOCK)] + at as u32;
            let sessions: Vec<u64> = lock(&self.engine.sessions).keys().copied().collect();
            let holder = lock(&self.engine.peers).at(word.seat).map(|member| member.session);
            let parking = lock(&self.engine.parking);
            let queues = |session| parking.is_parked_on(session, place);
            self.books.lock(at, word.token, holder, queues);
            // One frame at a time is handled, so one at a time comes to queue.
            for session in sessions.into_iter().filter(|session| queues(*session)) {
                self.books.queue(at, session);
            }
        }
        for client in &self.clients {
            let Some(session) = client.session.filter(|id| self.engine.has(*id)) else {
                continue;
            };
            for (&lock, &token) in &client.holds {
                let word = Lock::of(self.word(LOCK, lock as u32));
                let (seat, number) = (client.seat, client.number);
                assert!(
                    (word.seat, word.token) == (seat, token),
                    "client {number}, session {session}, lost lock {lock}: {word:?}, not {token}"
                );
            }
        }
        let there = value(self.word(SEMAPHORE, 0)) as u64;
        // A permit whose grant was not acknowledged goes back with its session, of
        // whose end the client may not know yet.
        let lives = |client: &&Client| client.session.is_some_and(|id| self.engine.has(id));
        Books::permits(there, self.clients.iter().filter(lives).map(|c| c.permits).sum());
        let place = self.bases[usize::from(SEMAPHORE)];
        let queued = lock(&self.engine.parking).waiters_on(place);
        assert!(there == 0 || queued == 0, "{there} permits are there, and {queued} wait");
        self.inspect_waits();
    }

    /// No wait is parked that is satisfied, or that names a peer that is lost.
    fn inspect_waits(&mut self) {
        let parking = lock(&self.engine.parking);
        let peers = lock(&self.engine.peers);
        let (actor, now) = (&self.engine.actor, Duration::from_millis(self.now));
        self.waits.retain(|&(session, wait), heard| {
            if !parking.is_parked(WaitId { session, wait }) {
                return false;
            }
            for (at, (place, array, condition)) in heard.goals.iter().enumerate() {
                // Cells that come and go may be those of another array by now.
                if *array != BRIEF && condition.holds(actor.segment.load(*place)) {
                    heard.fired.insert(at);
                }
            }
            assert!(
                heard.fired.len() < heard.need,
                "wait {wait} of session {session} is satisfied, and left behind"
            );
            for peer in &heard.peers {
                let lost = peers.loss(peer, now);
                assert!(
                    lost.is_none(),
                    "wait {wait} of session {session} names {peer}, who is lost"
                );
            }
            true
        });
    }

    /// Nobody lives on without a sign, and who has gone is missed in time.
    pub(super) fn inspect_leases(&self) {
        let limit = Duration::from_millis(LEASE + TICK);
        for session in lock(&self.engine.sessions).values() {
            let session = lock(session);
            let (id, silent) = (session.id, self.time() - session.last_heard);
            assert!(silent <= limit, "session {id} lives, silent for {silent:?}");
        }
        for (seat, member) in lock(&self.engine.peers).after(0) {
            assert!(member.gone.is_none(), "seat {seat} has gone, and nobody was told");
        }
    }
}
