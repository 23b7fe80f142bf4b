//! The wait protocol under every schedule of its steps: [`Parking`] and
//! [`execute`] as they are, over loom's atomics and lock.
//!
//! All that the protocol shares comes in from here, so nothing in it has to be
//! built another way for this. Beside the model runs a [`Ledger`] in ordinary
//! memory: loom changes threads only where a thread uses loom's primitives, so
//! what is written down right behind such a use is written down together with
//! it.

use crate::cell::sync::{Claim, Lock};
use crate::cell::{Comparison, Condition, Op, WAITING, is_waiting};
use crate::engine::actor::{Actor, execute};
use crate::engine::lock;
use crate::engine::parking::{Done, Ended, Parking, Target, WaitId};
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread::{self, JoinHandle};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

const CELLS: usize = 2;

/// What is wrong on purpose in a world, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// Mutators never ring.
    NoRing,
    /// Mutators ring before their change, not behind it.
    RingFirst,
    /// A mutator's compare-and-swap is a load and a store.
    TornSwap,
    /// The waiting bit is set whatever the word has become since it was read.
    BlindBit,
    /// The waiting bit is never taken back.
    BitStays,
    /// Who cancels takes for granted that the wait was not satisfied.
    UnaskedCancel,
}

/// What is known for certain at every moment.
#[derive(Default)]
struct Ledger {
    words: [u64; CELLS],
    /// Waits on each cell when the table was last unlocked.
    parked: [usize; CELLS],
    /// Changes under the waiting bit whose ring has yet to come.
    rings: [usize; CELLS],
    /// Someone is at work on the table.
    locked: bool,
    ended: Vec<(u64, Ended)>,
    wrong: Vec<String>,
}

impl Ledger {
    /// While nobody is at work on the table: behind a cell with waiters there
    /// is the bit or a ring on its way, and no bit on a cell without.
    fn inspect(&mut self) {
        if self.locked {
            return;
        }
        for place in 0..CELLS {
            let bit = is_waiting(self.words[place]);
            if self.parked[place] > 0 && !bit && self.rings[place] == 0 {
                self.wrong.push(format!("no bit and no ring for the waiter on cell {place}"));
            }
            if self.parked[place] == 0 && bit {
                self.wrong.push(format!("a bit without a waiter on cell {place}"));
            }
        }
    }
}

struct World {
    fault: Fault,
    cells: [AtomicU64; CELLS],
    parking: loom::sync::Mutex<Parking>,
    ledger: std::sync::Mutex<Ledger>,
}

/// The actor as the server uses it.
struct Server<'w>(&'w World);

/// The actor as those use it who change cells.
struct Mutator<'w>(&'w World);

impl Actor for Server<'_> {
    fn load(&self, place: u32) -> u64 {
        self.0.cells[place as usize].load(Ordering::Acquire)
    }

    fn compare_exchange(&self, place: u32, current: u64, new: u64) -> Result<u64, u64> {
        let at = place as usize;
        let cell = &self.0.cells[at];
        if self.0.fault == Fault::BlindBit && new == current | WAITING {
            let old = cell.fetch_or(WAITING, Ordering::AcqRel);
            lock(&self.0.ledger).words[at] = old | WAITING;
            return Ok(current);
        }
        if self.0.fault == Fault::BitStays && new == current & !WAITING {
            return Ok(current);
        }
        let done = cell.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire);
        if done.is_ok() {
            lock(&self.0.ledger).words[at] = new;
        }
        done
    }

    fn fetch_add(&self, _: u32, _: u64) -> u64 {
        unreachable!("the table of waiters adds to no cell")
    }
}

impl Mutator<'_> {
    fn changed(&self, at: usize, old: u64, new: u64) {
        let mut ledger = lock(&self.0.ledger);
        ledger.words[at] = new;
        ledger.rings[at] += usize::from(is_waiting(old));
        ledger.inspect();
    }
}

impl Actor for Mutator<'_> {
    fn load(&self, place: u32) -> u64 {
        self.0.cells[place as usize].load(Ordering::Acquire)
    }

    fn compare_exchange(&self, place: u32, current: u64, new: u64) -> Result<u64, u64> {
        let at = place as usize;
        let cell = &self.0.cells[at];
        if self.0.fault == Fault::TornSwap {
            let found = cell.load(Ordering::Acquire);
            if found != current {
                return Err(found);
            }
            cell.store(new, Ordering::Release);
            self.changed(at, current, new);
            return Ok(current);
        }
        let done = cell.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire);
        if done.is_ok() {
            self.changed(at, current, new);
        }
        done
    }

    fn fetch_add(&self, place: u32, delta: u64) -> u64 {
        let at = place as usize;
        let old = self.0.cells[at].fetch_add(delta, Ordering::AcqRel);
        self.changed(at, old, old.wrapping_add(delta));
        old
    }
}

fn id(wait: u64) -> WaitId {
    WaitId { session: 1, wait }
}

impl World {
    /// Works on the table, and looks behind itself on the way out.
    fn locked<R>(&self, work: impl FnOnce(&mut Parking, &Server<'_>) -> R) -> R {
        let mut parking = self.parking.lock().unwrap();
        lock(&self.ledger).locked = true;
        let result = work(&mut parking, &Server(self));
        let mut ledger = lock(&self.ledger);
        for place in 0..CELLS {
            ledger.parked[place] = parking.waiters_on(place as u32);
        }
        ledger.locked = false;
        ledger.inspect();
        result
    }

    fn note(&self, wait: u64, ended: Ended) {
        let mut ledger = lock(&self.ledger);
        if let Some((_, before)) = ledger.ended.iter().find(|(other, _)| *other == wait) {
            let what = format!("wait {wait} ended twice: {before:?} and {ended:?}");
            ledger.wrong.push(what);
        }
        ledger.ended.push((wait, ended));
    }

    fn note_all(&self, done: Vec<Done>) {
        for Done { id, ended, .. } in done {
            self.note(id.wait, ended);
        }
    }

    /// Waits until `need` of the cells, the first ones of the segment, satisfy
    /// their condition.
    fn wait(&self, wait: u64, need: usize, conditions: &[Option<Condition>]) {
        let targets: Vec<Target> = conditions
            .iter()
            .enumerate()
            .map(|(place, &condition)| Target { place: place as u32, condition })
            .collect();
        self.locked(|parking, actor| {
            let answer = parking.wait(actor, id(wait), None, need, &targets);
            if let Some(ended) = answer.expect("far from every limit") {
                self.note(wait, ended);
            }
        });
    }

    fn cancel(&self, wait: u64) {
        let ended = self.locked(|parking, actor| parking.cancel(actor, id(wait)));
        let known = lock(&self.ledger).ended.iter().find(|(other, _)| *other == wait).cloned();
        match known {
            _ if self.fault == Fault::UnaskedCancel => {
                self.note(wait, Ended::Cancelled(Vec::new()));
            }
            // It had ended before, and a cancel changes nothing about that.
            Some((_, before)) => assert_eq!(before, ended),
            None => self.note(wait, ended),
        }
    }

    fn ring(&self, place: u32) {
        self.locked(|parking, actor| {
            let mut done = Vec::new();
            parking.ring(actor, place, &mut done);
            self.note_all(done);
            let mut ledger = lock(&self.ledger);
            ledger.rings[place as usize] = ledger.rings[place as usize].saturating_sub(1);
        });
    }

    /// One change, and the ring that it asks for.
    fn change(&self, place: u32, op: Op, a: u64) {
        self.change_by(place, op, a, 0);
    }

    fn change_by(&self, place: u32, op: Op, a: u64, b: u64) {
        if self.fault == Fault::RingFirst {
            self.ring(place);
            execute(&Mutator(self), place, op, a, b);
            return;
        }
        let (_, ring) = execute(&Mutator(self), place, op, a, b);
        if ring && self.fault != Fault::NoRing {
            self.ring(place);
        }
    }

    /// Queues for the lock in cell 0, in the seat of the wait's number.
    fn lock(&self, wait: u64) {
        let claim = Claim::Lock { seat: wait as u32 };
        self.locked(|parking, actor| {
            let answer = parking.acquire(actor, id(wait), None, 0, claim);
            if let Some(ended) = answer.expect("far from every limit") {
                self.note(wait, ended);
            }
        });
    }

    /// The holder whose token and seat these are unlocks.
    fn unlock(&self, token: u64, seat: u64) {
        self.change_by(0, Op::Release, token, seat);
    }

    /// Who holds the lock in cell 0.
    fn holder(&self) -> u64 {
        Lock::of(lock(&self.ledger).words[0]).seat.into()
    }

    /// A mutator that dies behind its change.
    fn change_and_die(&self, place: u32, op: Op, a: u64) {
        execute(&Mutator(self), place, op, a, 0);
    }

    fn sweep(&self) {
        self.locked(|parking, actor| {
            let mut done = Vec::new();
            parking.sweep(actor, &mut done);
            self.note_all(done);
        });
    }

    /// The end: everyone is through. Exactly these waits have ended, each
    /// once, the others are parked behind a bit, and no other bit is left.
    fn verify(&self, satisfied: &[u64], cancelled_too: &[u64], parked: usize) {
        let table = self.locked(|parking, _| parking.len());
        let ledger = lock(&self.ledger);
        assert!(ledger.wrong.is_empty(), "{:?}", ledger.wrong);
        for wait in satisfied {
            let how = ledger.ended.iter().find(|(other, _)| other == wait).map(|(_, how)| how);
            let got = matches!(how, Some(Ended::Satisfied(_) | Ended::Granted(_)));
            assert!(got, "wake-up lost: wait {wait} {how:?}");
        }
        for wait in cancelled_too {
            let how = ledger.ended.iter().find(|(other, _)| other == wait);
            assert!(how.is_some(), "wait {wait} has no end");
        }
        assert_eq!(ledger.ended.len(), satisfied.len() + cancelled_too.len(), "woken for nothing");
        assert_eq!(table, parked, "waits parked at the end");
        if parked == 0 {
            assert_eq!(ledger.words.map(is_waiting), [false; CELLS], "bits at the end");
        }
    }
}

/// A thread of the model at work in the world.
fn spawn(world: &Arc<World>, work: impl FnOnce(&World) + 'static) -> JoinHandle<()> {
    let world = world.clone();
    thread::spawn(move || work(&world))
}

/// Runs a model in every schedule.
fn explore(fault: Fault, name: &str, model: impl Fn(&Arc<World>) + Send + Sync + 'static) {
    let count = Arc::new(AtomicUsize::new(0));
    let counter = count.clone();
    loom::model::Builder::new().check(move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        model(&Arc::new(World {
            fault,
            cells: std::array::from_fn(|_| AtomicU64::new(0)),
            parking: loom::sync::Mutex::new(Parking::default()),
            ledger: std::sync::Mutex::default(),
        }));
    });
    let count = count.load(std::sync::atomic::Ordering::Relaxed);
    println!("{name}: {count} schedules");
    assert!(count > 1, "{name}: nothing was interleaved");
}

pub(super) const fn until(comparison: Comparison, value: i64) -> Option<Condition> {
    Some(Condition { comparison, value })
}

/// Not 0, the even value that the waiter saw.
const CHANGED: Option<Condition> = until(Comparison::Ne, 0);
/// Set, or any transition from now on.
const SET: Option<Condition> = None;

fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    for thread in threads {
        thread.join().unwrap();
    }
}

// ---- the models, each also run with faults below ---------------------------

fn one_set(world: &Arc<World>) {
    let setter = spawn(world, |w| w.change(0, Op::Set, 0));
    world.wait(1, 1, &[CHANGED]);
    join([setter]);
    world.verify(&[1], &[], 0);
}

fn one_pulse(world: &Arc<World>) {
    let setter = spawn(world, |w| {
        w.change(0, Op::Set, 0);
        w.change(0, Op::Clear, 0);
    });
    world.wait(1, 1, &[CHANGED]);
    join([setter]);
    world.verify(&[1], &[], 0);
}

fn one_add(world: &Arc<World>) {
    let adder = spawn(world, |w| w.change(0, Op::Add, 1));
    world.wait(1, 1, &[until(Comparison::Ge, 1)]);
    join([adder]);
    world.verify(&[1], &[], 0);
}

fn cancel_against_set(world: &Arc<World>) {
    let setter = spawn(world, |w| w.change(0, Op::Set, 0));
    world.wait(1, 1, &[CHANGED]);
    world.cancel(1);
    join([setter]);
    world.verify(&[], &[1], 0);
}

#[test]
fn a_set_wakes_the_waiter_in_every_schedule() {
    explore(Fault::None, "set", one_set);
}

#[test]
fn a_pulse_is_never_lost_in_any_schedule() {
    explore(Fault::None, "pulse", one_pulse);
}

#[test]
fn an_add_wakes_the_waiter_in_every_schedule() {
    explore(Fault::None, "add", one_add);
}

#[test]
fn a_wait_until_set_ends_once_whenever_it_comes() {
    explore(Fault::None, "until set", |world| {
        let setter = spawn(world, |w| w.change(0, Op::Set, 0));
        world.wait(1, 1, &[SET]);
        join([setter]);
        world.verify(&[1], &[], 0);
    });
}

#[test]
fn a_change_that_satisfies_nobody_keeps_the_bit() {
    explore(Fault::None, "not enough", |world| {
        let adder = spawn(world, |w| w.change(0, Op::Add, 1));
        let swapper = spawn(world, |w| w.change(0, Op::Or, 4));
        world.wait(1, 1, &[until(Comparison::Lt, 0)]);
        join([adder, swapper]);
        world.verify(&[], &[], 1);
        world.change(0, Op::Store, -7i64 as u64);
        world.verify(&[1], &[], 0);
    });
}

#[test]
fn two_waiters_and_two_adders_end_each_wait_once() {
    explore(Fault::None, "two waiters, two adders", |world| {
        world.wait(2, 1, &[until(Comparison::Ge, 2)]);
        let adders = [1, 1].map(|d| spawn(world, move |w| w.change(0, Op::Add, d)));
        world.wait(1, 1, &[until(Comparison::Ge, 1)]);
        join(adders);
        world.verify(&[1, 2], &[], 0);
    });
}

#[test]
fn two_waiters_set_and_clear_end_each_wait_once() {
    explore(Fault::None, "two waiters, set and clear", |world| {
        let setter = spawn(world, |w| w.change(0, Op::Set, 0));
        let other = spawn(world, |w| w.wait(2, 1, &[until(Comparison::Gt, 1)]));
        world.wait(1, 1, &[CHANGED]);
        join([setter]);
        let clearer = spawn(world, |w| w.change(0, Op::Clear, 0));
        join([other, clearer]);
        world.verify(&[1, 2], &[], 0);
    });
}

#[test]
fn a_ring_and_a_new_wait_do_not_miss_each_other() {
    explore(Fault::None, "ring against new wait", |world| {
        world.wait(1, 1, &[until(Comparison::Ge, 1)]);
        let first = spawn(world, |w| w.change(0, Op::Add, 1));
        world.wait(2, 1, &[until(Comparison::Eq, 3)]);
        world.change(0, Op::Xor, 2);
        join([first]);
        world.verify(&[1, 2], &[], 0);
    });
}

#[test]
fn any_of_two_cells_wakes_once_and_leaves_no_bit() {
    explore(Fault::None, "any of two", |world| {
        let setter = spawn(world, |w| w.change(0, Op::Set, 0));
        let adder = spawn(world, |w| w.change(1, Op::Add, 1));
        world.wait(1, 1, &[SET, until(Comparison::Eq, 1)]);
        join([setter, adder]);
        world.verify(&[1], &[], 0);
    });
}

#[test]
fn both_of_two_cells_wake_once_and_leave_no_bit() {
    explore(Fault::None, "both of two", |world| {
        let setters = [0, 1].map(|place| spawn(world, move |w| w.change(place, Op::Set, 0)));
        world.wait(1, 2, &[CHANGED, SET]);
        join(setters);
        world.verify(&[1], &[], 0);
    });
}

#[test]
fn a_cancelled_wait_ends_one_way_and_leaves_no_bit() {
    explore(Fault::None, "cancel", cancel_against_set);
}

#[test]
fn a_cancel_takes_no_bit_from_another_waiter() {
    explore(Fault::None, "cancel beside a waiter", |world| {
        world.wait(1, 1, &[CHANGED]);
        let setter = spawn(world, |w| w.change(0, Op::Set, 0));
        let canceller = spawn(world, |w| w.cancel(1));
        world.wait(2, 1, &[CHANGED]);
        join([setter, canceller]);
        world.verify(&[2], &[1], 0);
    });
}

#[test]
fn the_end_of_a_session_leaves_no_bit() {
    explore(Fault::None, "end of a session", |world| {
        world.wait(1, 1, &[until(Comparison::Ge, 3)]);
        let adder = spawn(world, |w| w.change(0, Op::Add, 1));
        world.locked(|parking, actor| parking.end_session(actor, 1, &mut Vec::new()));
        join([adder]);
        world.verify(&[], &[], 0);
    });
}

#[test]
fn a_removed_cell_ends_its_wait_once() {
    explore(Fault::None, "removal", |world| {
        world.wait(1, 1, &[CHANGED]);
        let setter = spawn(world, |w| w.change(0, Op::Set, 0));
        world.locked(|parking, actor| {
            let mut done = Vec::new();
            parking.remove_cells(actor, 0..1, &mut done);
            world.note_all(done);
        });
        join([setter]);
        world.verify(&[], &[1], 0);
    });
}

#[test]
fn the_sweep_finds_what_a_dead_mutator_left() {
    for op in [Op::Set, Op::Add] {
        explore(Fault::None, "death", move |world| {
            let mutator = spawn(world, move |w| w.change_and_die(0, op, 1));
            let sweeper = spawn(world, World::sweep);
            world.wait(1, 1, &[CHANGED]);
            join([mutator, sweeper]);
            world.sweep();
            world.verify(&[1], &[], 0);
        });
    }
}

#[test]
fn a_dead_mutator_and_a_living_one_lose_nothing_together() {
    explore(Fault::None, "death beside life", |world| {
        world.wait(1, 1, &[until(Comparison::Ge, 2)]);
        let dying = spawn(world, |w| w.change_and_die(0, Op::Set, 0));
        let living = spawn(world, |w| w.change(0, Op::Add, 1));
        let sweeper = spawn(world, World::sweep);
        join([dying, living, sweeper]);
        world.sweep();
        // Set does nothing to a value that the add has made odd before.
        let word = lock(&world.ledger).words[0];
        if word >> 1 == 2 {
            world.verify(&[1], &[], 0);
        } else {
            world.verify(&[], &[], 1);
        }
    });
}

// ---- queues -----------------------------------------------------------------

/// Held by seat 9, and wanted by one who queues.
fn hand_over(world: &Arc<World>) {
    world.change(0, Op::Acquire, 9);
    let holder = spawn(world, |w| w.unlock(1, 9));
    world.lock(1);
    join([holder]);
    world.verify(&[1], &[], 0);
    assert_eq!(world.holder(), 1);
}

#[test]
fn a_lock_is_handed_over() {
    explore(Fault::None, "hand-over", hand_over);
}

#[test]
fn of_two_who_queue_one_gets_it_and_the_other_stays() {
    explore(Fault::None, "two queue", |world| {
        world.change(0, Op::Acquire, 9);
        let holder = spawn(world, |w| w.unlock(1, 9));
        let other = spawn(world, |w| w.lock(2));
        world.lock(1);
        join([holder, other]);
        let holder = world.holder();
        assert!([1, 2].contains(&holder));
        world.verify(&[holder], &[], 1);
    });
}

#[test]
fn nobody_overtakes_and_nobody_is_left() {
    explore(Fault::None, "one passes by", |world| {
        world.change(0, Op::Acquire, 9);
        world.lock(1);
        // Somebody queues: whoever passes by does not get it.
        let holder = spawn(world, |w| w.unlock(1, 9));
        let passer = spawn(world, |w| w.change(0, Op::Acquire, 8));
        join([holder, passer]);
        assert_eq!(world.holder(), 1);
        world.verify(&[1], &[], 0);
    });
}

#[test]
fn a_lock_is_taken_by_one_of_one_who_passes_by_and_one_who_queues() {
    explore(Fault::None, "passer against queue", |world| {
        let passer = spawn(world, |w| w.change(0, Op::Acquire, 8));
        world.lock(1);
        join([passer]);
        match world.holder() {
            1 => world.verify(&[1], &[], 0),
            8 => world.verify(&[], &[], 1),
            other => panic!("seat {other} holds it"),
        }
    });
}

#[test]
fn a_claim_that_is_cancelled_while_the_lock_comes_free_keeps_nobody_out() {
    explore(Fault::None, "cancel of a claim", |world| {
        world.change(0, Op::Acquire, 9);
        world.lock(1);
        world.lock(2);
        let holder = spawn(world, |w| w.unlock(1, 9));
        world.cancel(1);
        join([holder]);
        if world.holder() == 1 {
            world.verify(&[1], &[], 1);
        } else {
            assert_eq!(world.holder(), 2);
            world.verify(&[2], &[1], 0);
        }
    });
}

#[test]
fn the_sweep_hands_over_for_one_that_died() {
    explore(Fault::None, "death of a holder", |world| {
        world.change(0, Op::Acquire, 9);
        let holder = spawn(world, |w| {
            execute(&Mutator(w), 0, Op::Release, 1, 9);
        });
        let sweeper = spawn(world, World::sweep);
        world.lock(1);
        join([holder, sweeper]);
        world.sweep();
        world.verify(&[1], &[], 0);
    });
}

#[test]
#[should_panic(expected = "wake-up lost")]
fn an_unlock_that_does_not_ring_is_found() {
    explore(Fault::NoRing, "no ring", hand_over);
}

// ---- that the models would find faults --------------------------------------

#[test]
#[should_panic(expected = "wake-up lost")]
fn a_mutator_that_does_not_ring_is_found() {
    explore(Fault::NoRing, "no ring", one_set);
}

#[test]
#[should_panic(expected = "wake-up lost")]
fn an_adder_that_does_not_ring_is_found() {
    explore(Fault::NoRing, "no ring", one_add);
}

#[test]
#[should_panic(expected = "no bit and no ring")]
fn a_swap_that_is_no_atomic_is_found() {
    explore(Fault::TornSwap, "torn swap", one_set);
}

#[test]
#[should_panic(expected = "wake-up lost")]
fn a_ring_before_the_change_is_found() {
    explore(Fault::RingFirst, "ring first", one_add);
}

#[test]
#[should_panic(expected = "wake-up lost")]
fn a_bit_set_after_a_stale_look_is_found() {
    explore(Fault::BlindBit, "blind bit", one_set);
}

#[test]
#[should_panic(expected = "a bit without a waiter")]
fn a_bit_that_stays_is_found() {
    explore(Fault::BitStays, "bit stays", cancel_against_set);
}

#[test]
#[should_panic(expected = "ended twice")]
fn a_wait_that_ends_twice_is_found() {
    explore(Fault::UnaskedCancel, "unasked cancel", cancel_against_set);
}
