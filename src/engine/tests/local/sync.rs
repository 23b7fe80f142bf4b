//! The same of locks and barriers: the lock goes to the one who queues, those
//! who wait at a barrier go on together, and nobody arrives behind its end.

use super::{Fault, Here, Server, World, at_least, explore, join, spawn};
use crate::cell::sync::{Barrier, Claim, Lock, arrived, completes};
use crate::cell::{Op, is_waiting};
use crate::engine::parking::{Ended, WaitId};
use crate::transport::shm::protocol::{self, Changed, Ground};
use loom::sync::atomic::Ordering;
use std::sync::Arc;

const QUEUED: u32 = 8;

impl World {
    fn lock(&self) -> Lock {
        Lock::of(self.cell.load(Ordering::Acquire))
    }

    /// A client that works in memory takes the lock if it can be had.
    fn try_lock(&self, seat: u32) -> Option<u64> {
        let Changed::Done(word) = protocol::change(&Here(self), Op::Acquire, seat.into(), 0) else {
            panic!("it lives, and so does the array");
        };
        let before = Lock::of(word);
        (before.seat == 0 && !is_waiting(word)).then(|| before.taken(seat, false).token)
    }

    fn unlock(&self, seat: u32, token: u64) {
        assert_eq!((self.lock().seat, self.lock().token), (seat, token), "another one has it");
        self.change_of(Op::Release, token, seat.into());
    }

    /// The server queues for a client that is elsewhere.
    fn queue(&self) {
        let id = WaitId { session: 1, wait: 1 };
        let claim = Claim::Lock { seat: QUEUED };
        let answer = self.parking.lock().unwrap().acquire(&Server(self), id, None, 0, claim);
        if let Some(ended) = answer.unwrap() {
            crate::engine::lock(&self.ended).push((1, ended));
        }
    }

    /// Who has queued has got it, and nobody else wants it.
    fn verify_granted(&self) {
        let ended = crate::engine::lock(&self.ended);
        assert!(matches!(ended[..], [(1, Ended::Granted(_))]), "wake-up lost: {ended:?}");
        assert_eq!(self.lock().seat, QUEUED);
        assert!(!is_waiting(self.cell.load(Ordering::Acquire)), "nobody queues any more");
        assert_eq!(self.watched.load(Ordering::Acquire), 0);
    }

    /// A party that works in memory; the word that it found. `None`: its session
    /// was over.
    fn arrive(&self, parties: u64) -> Option<u64> {
        let here = Here(self);
        if self.fault == Fault::EarlyLook {
            if here.is_over() {
                return None;
            }
            let mut word = here.load();
            while let Err(found) = here.compare_exchange(word, arrived(word, parties)) {
                word = found;
            }
            return Some(word);
        }
        match protocol::change(&here, Op::Arrive, 0, parties) {
            Changed::Done(word) => Some(word),
            Changed::Over => None,
            Changed::Suspect => panic!("the array lives"),
        }
    }

    fn pass(&self, parties: u64) {
        let found = self.arrive(parties).expect("the session lives");
        if !completes(found, parties) {
            self.sleep_until(at_least(Barrier::of(found).goal(parties) as i64));
        }
    }
}

fn released_to_the_queue(world: &Arc<World>) {
    let token = world.try_lock(7).expect("nobody has it");
    let holder = spawn(world, move |w| w.unlock(7, token));
    world.queue();
    join([holder]);
    world.verify_granted();
    assert_eq!(world.lock().token, 2);
}

fn two_pass(world: &Arc<World>) {
    let other = spawn(world, |w| w.pass(2));
    world.pass(2);
    join([other]);
    world.verify(&[], 0);
}

fn two_pass_and_one_elsewhere(world: &Arc<World>) {
    let other = spawn(world, |w| w.pass(3));
    world.change_by_server_of(Op::Arrive, 0, 3);
    world.park(1, at_least(3));
    world.pass(3);
    join([other]);
    world.verify(&[1], 0);
}

/// The session of one who arrives ends, which breaks the barrier, and somebody
/// makes it whole.
fn one_arrives_and_ends(world: &Arc<World>) {
    let party = spawn(world, |w| {
        let _ = w.arrive(2);
    });
    world.over.store(1, Ordering::Release);
    world.change_by_server_of(Op::Break, crate::cell::sync::ANY_STAGE, 2);
    world.change_by_server_of(Op::Reset, 0, 2);
    join([party]);
    let now = Barrier::of(world.cell.load(Ordering::Acquire));
    assert_eq!(now, Barrier { epoch: 1, broken: false, arrivals: 0 }, "it came back");
}

#[test]
fn a_lock_that_is_freed_in_memory_goes_to_the_queue() {
    explore(Fault::None, 4, released_to_the_queue);
}

#[test]
fn nobody_takes_a_lock_in_memory_past_the_queue() {
    explore(Fault::None, 3, |world| {
        let token = world.try_lock(7).expect("nobody has it");
        let other = spawn(world, |w| {
            if let Some(token) = w.try_lock(9) {
                w.unlock(9, token);
            }
        });
        let holder = spawn(world, move |w| w.unlock(7, token));
        world.queue();
        join([other, holder]);
        world.verify_granted();
    });
}

#[test]
fn those_who_wait_at_a_barrier_in_memory_go_on_with_the_last() {
    explore(Fault::None, 4, two_pass);
    explore(Fault::None, 3, |world| {
        let other = spawn(world, |w| w.change_by_server_of(Op::Arrive, 0, 2));
        world.pass(2);
        join([other]);
        world.verify(&[], 0);
    });
}

#[test]
fn the_last_at_a_barrier_reaches_those_elsewhere() {
    explore(Fault::None, 2, two_pass_and_one_elsewhere);
}

#[test]
fn nobody_arrives_behind_the_end_of_its_session() {
    explore(Fault::None, 4, one_arrives_and_ends);
}

// ---- that the models would find faults --------------------------------------

#[test]
#[should_panic(expected = "wake-up lost")]
fn a_holder_that_does_not_ring_is_found() {
    explore(Fault::NoRing, 3, released_to_the_queue);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_last_party_that_wakes_nobody_is_found() {
    explore(Fault::NoWake, 3, two_pass);
}

#[test]
#[should_panic(expected = "wake-up lost")]
fn a_last_party_that_does_not_ring_is_found() {
    explore(Fault::NoRing, 2, two_pass_and_one_elsewhere);
}

#[test]
#[should_panic(expected = "it came back")]
fn one_who_looks_at_its_session_too_early_is_found() {
    explore(Fault::EarlyLook, 3, one_arrives_and_ends);
}
