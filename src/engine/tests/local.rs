//! Sleeping and waking in memory under every schedule of its steps: the
//! protocol of `transport::shm` and [`Parking`] as they are, on one cell, over
//! loom's atomics, lock and condition.
//!
//! A futex is a lock and a condition here, and nobody looks at its cell again by
//! itself: a wake-up that is lost shows as a deadlock, or as a wait of the
//! server's that has no end.

use super::schedules::until;
use crate::cell::{Comparison, Condition, Op, WAITING, is_waiting, value};
use crate::engine::actor::{Actor, execute};
use crate::engine::parking::{Ended, Parking, Target, WaitId};
use crate::segment::Slept;
use crate::transport::shm::protocol::{self, Ground, Waited};
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread::{self, JoinHandle};
use std::sync::Arc;

mod messages;
mod sync;

/// What is wrong on purpose in a world, to see that it is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// Nobody is woken.
    NoWake,
    /// Who adds wakes before it drops the bit.
    WakeFirst,
    /// The server is not rung.
    NoRing,
    /// The server relies on a waiting bit that it finds.
    FoundBit,
    /// Who leaves drops the bit and tells nobody.
    QuietLeave,
    /// The server drops a bit and wakes nobody.
    QuietServer,
    /// Who arrives looks whether its session is over before it looks at the cell.
    EarlyLook,
    /// A row may be seen claimed behind what is put into it.
    NoWriterFence,
    /// A reader may look at the version before it has the bytes.
    NoReaderFence,
    /// A row may be seen to move before it is seen that nobody has it.
    EarlyMove,
    /// A writer makes its message whole whatever has become of its claim.
    BlindCommit,
}

struct World {
    fault: Fault,
    cell: AtomicU64,
    watched: AtomicU64,
    /// The session of those who arrive is over.
    over: AtomicU64,
    futex: (loom::sync::Mutex<()>, loom::sync::Condvar),
    parking: loom::sync::Mutex<Parking>,
    /// The server's waits that have ended, and how. In ordinary memory.
    ended: std::sync::Mutex<Vec<(u64, Ended)>>,
}

impl World {
    fn wake(&self) {
        if self.fault != Fault::NoWake {
            drop(self.futex.0.lock().unwrap());
            self.futex.1.notify_all();
        }
    }

    fn swap(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.cell.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }

    fn note(&self, done: Vec<super::super::parking::Done>) {
        let mut ended = crate::engine::lock(&self.ended);
        ended.extend(done.into_iter().map(|d| (d.id.wait, d.ended)));
    }

    fn ring(&self) {
        let mut done = Vec::new();
        self.parking.lock().unwrap().ring(&Server(self), 0, &mut done);
        self.note(done);
    }

    /// The server parks a wait, for a client that is elsewhere.
    fn park(&self, wait: u64, condition: Condition) {
        let target = Target { place: 0, condition: Some(condition) };
        let id = WaitId { session: 1, wait };
        let answer =
            self.parking.lock().unwrap().wait(&Server(self), id, None, 1, &[target]).unwrap();
        if let Some(ended) = answer {
            crate::engine::lock(&self.ended).push((wait, ended));
        }
    }

    fn cancel(&self, wait: u64) {
        let id = WaitId { session: 1, wait };
        self.parking.lock().unwrap().cancel(&Server(self), id);
    }

    /// The server carries out a change for a client that is elsewhere.
    fn change_by_server(&self, op: Op, a: u64) {
        self.change_by_server_of(op, a, 0);
    }

    fn change_by_server_of(&self, op: Op, a: u64, b: u64) {
        if execute(&Server(self), 0, op, a, b).1 {
            self.ring();
        }
    }

    fn change(&self, op: Op, a: u64) {
        self.change_of(op, a, 0);
    }

    /// A client changes the cell in memory, as `Slot::execute` does.
    fn change_of(&self, op: Op, a: u64, b: u64) {
        let here = Here(self);
        if op == Op::Add {
            let old = here.fetch_add(a << 1);
            if self.fault == Fault::WakeFirst && is_waiting(old) {
                protocol::answer(&here, old);
                here.drop_bit();
                return;
            }
            protocol::added(&here, old, a);
            return;
        }
        let mut word = here.load();
        while let crate::cell::Change::Swap(new) = crate::cell::change(op, word, a, b) {
            match here.compare_exchange(word, new) {
                Ok(old) => return protocol::answer(&here, old),
                Err(found) => word = found,
            }
        }
    }

    fn sleep_until(&self, condition: Condition) {
        let ended = protocol::wait(&Here(self), condition, || false);
        assert!(matches!(ended, Waited::Satisfied(word) if condition.holds(word)));
    }

    /// A sleeper whose time is over when it has been woken this often.
    fn sleep_briefly(&self, condition: Condition, mut times: u32) {
        let here = Here(self);
        if self.fault == Fault::QuietLeave {
            let word = here.load();
            if !condition.holds(word) && here.compare_exchange(word, word | WAITING).is_ok() {
                here.drop_bit();
            }
            return;
        }
        protocol::wait(&here, condition, || {
            let over = times == 0;
            times = times.saturating_sub(1);
            over
        });
    }

    /// Everyone is through: the server's waits have ended as expected, and the
    /// bit is there only for those that have not.
    fn verify(&self, satisfied: &[u64], parked: usize) {
        let ended = crate::engine::lock(&self.ended);
        for wait in satisfied {
            let how = ended.iter().find(|(other, _)| other == wait).map(|(_, how)| how);
            assert!(matches!(how, Some(Ended::Satisfied(_))), "wake-up lost: wait {wait} {how:?}");
        }
        assert_eq!(ended.len(), satisfied.len(), "woken for nothing");
        assert_eq!(self.parking.lock().unwrap().len(), parked);
        let word = self.cell.load(Ordering::Acquire);
        assert_eq!(is_waiting(word), parked > 0, "the bit at the end of {}", value(word));
        assert_eq!(self.watched.load(Ordering::Acquire) != 0, parked > 0, "the watch at the end");
    }
}

/// A client that works in memory.
struct Here<'w>(&'w World);

impl Ground for Here<'_> {
    fn load(&self) -> u64 {
        self.0.cell.load(Ordering::Acquire)
    }

    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.0.swap(current, new)
    }

    fn fetch_add(&self, delta: u64) -> u64 {
        self.0.cell.fetch_add(delta, Ordering::AcqRel)
    }

    fn drop_bit(&self) -> u64 {
        self.0.cell.fetch_and(!WAITING, Ordering::AcqRel)
    }

    fn sleep(&self, word: u64) -> Slept {
        let (futex, woken) = &self.0.futex;
        let locked = futex.lock().unwrap();
        // The kernel's look, behind whoever has woken before.
        if self.0.cell.load(Ordering::Acquire) as u32 != word as u32 {
            return Slept::Not;
        }
        drop(woken.wait(locked).unwrap());
        Slept::Woken
    }

    fn wake(&self) {
        self.0.wake();
    }

    fn is_watched(&self) -> bool {
        self.0.watched.load(Ordering::Relaxed) != 0
    }

    fn ring(&self) {
        if self.0.fault != Fault::NoRing {
            self.0.ring();
        }
    }

    fn is_over(&self) -> bool {
        self.0.over.load(Ordering::Acquire) != 0
    }
}

/// The server, as its actor in the domain of the CPU is.
struct Server<'w>(&'w World);

impl Server<'_> {
    fn changed(&self, old: u64, keeps_bit: bool) {
        if is_waiting(old) {
            if keeps_bit {
                self.0.cell.fetch_and(!WAITING, Ordering::AcqRel);
            }
            if self.0.fault != Fault::QuietServer {
                self.0.wake();
            }
        }
    }
}

impl Actor for Server<'_> {
    fn load(&self, _: u32) -> u64 {
        self.0.cell.load(Ordering::Acquire)
    }

    fn compare_exchange(&self, _: u32, current: u64, new: u64) -> Result<u64, u64> {
        let done = self.0.swap(current, new);
        if done.is_ok() && !is_waiting(new) {
            self.changed(current, false);
        }
        done
    }

    fn fetch_add(&self, _: u32, delta: u64) -> u64 {
        let old = self.0.cell.fetch_add(delta, Ordering::AcqRel);
        self.changed(old, true);
        old
    }

    fn is_shared(&self) -> bool {
        true
    }

    fn watch(&self, _: u32, yes: bool) -> bool {
        self.0.watched.store(u64::from(yes), Ordering::Relaxed);
        self.0.fault != Fault::FoundBit
    }
}

fn spawn(world: &Arc<World>, work: impl FnOnce(&World) + 'static) -> JoinHandle<()> {
    let world = world.clone();
    thread::spawn(move || work(&world))
}

fn join(threads: impl IntoIterator<Item = JoinHandle<()>>) {
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Runs a model in every schedule that changes threads against their will at
/// most so often.
fn explore(fault: Fault, switches: usize, model: impl Fn(&Arc<World>) + Send + Sync + 'static) {
    let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = count.clone();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        model(&Arc::new(World {
            fault,
            cell: AtomicU64::new(0),
            watched: AtomicU64::new(0),
            over: AtomicU64::new(0),
            futex: (loom::sync::Mutex::new(()), loom::sync::Condvar::new()),
            parking: loom::sync::Mutex::new(Parking::default()),
            ended: std::sync::Mutex::default(),
        }));
    });
    let count = count.load(std::sync::atomic::Ordering::Relaxed);
    println!("{fault:?}: {count} schedules");
    assert!(count > 1, "nothing was interleaved");
}

fn at_least(value: i64) -> Condition {
    until(Comparison::Ge, value).expect("a condition")
}

fn changed() -> Condition {
    until(Comparison::Ne, 0).expect("a condition")
}

// ---- the models, some also run with faults below ----------------------------

fn sleeper_and_setter(world: &Arc<World>) {
    let setter = spawn(world, |w| w.change(Op::Set, 0));
    world.sleep_until(changed());
    join([setter]);
    world.verify(&[], 0);
}

fn sleeper_and_adder(world: &Arc<World>) {
    // An amount that the half of the cell which a futex compares does not show.
    let adder = spawn(world, |w| w.change(Op::Add, 1 << 31));
    world.sleep_until(at_least(1));
    join([adder]);
    world.verify(&[], 0);
}

fn parked_and_sleeping(world: &Arc<World>) {
    let sleeper = spawn(world, |w| w.sleep_until(changed()));
    let setter = spawn(world, |w| w.change(Op::Set, 0));
    world.park(1, changed());
    join([sleeper, setter]);
    world.verify(&[1], 0);
}

fn set_by_the_server(world: &Arc<World>) {
    let setter = spawn(world, |w| w.change_by_server(Op::Set, 0));
    world.sleep_until(changed());
    join([setter]);
    world.verify(&[], 0);
}

fn one_leaves_early(world: &Arc<World>) {
    let brief = spawn(world, |w| w.sleep_briefly(changed(), 0));
    let setter = spawn(world, |w| w.change(Op::Set, 0));
    world.park(1, changed());
    join([brief, setter]);
    world.verify(&[1], 0);
}

#[test]
fn a_set_wakes_who_sleeps_in_memory() {
    explore(Fault::None, 5, sleeper_and_setter);
}

#[test]
fn an_add_wakes_who_sleeps_in_memory() {
    explore(Fault::None, 5, sleeper_and_adder);
}

#[test]
fn a_pulse_wakes_who_sleeps_in_memory() {
    explore(Fault::None, 4, |world| {
        let setter = spawn(world, |w| {
            w.change(Op::Set, 0);
            w.change(Op::Clear, 0);
        });
        world.sleep_until(changed());
        join([setter]);
        world.verify(&[], 0);
    });
}

#[test]
fn a_set_reaches_the_sleeper_and_the_server() {
    explore(Fault::None, 3, parked_and_sleeping);
}

#[test]
fn an_add_reaches_the_sleeper_and_the_server() {
    explore(Fault::None, 3, |world| {
        world.park(1, at_least(2));
        let sleeper = spawn(world, |w| w.sleep_until(at_least(1)));
        let adder = spawn(world, |w| w.change(Op::Add, 1));
        world.change(Op::Add, 1);
        join([sleeper, adder]);
        world.verify(&[1], 0);
    });
}

#[test]
fn the_server_wakes_who_sleeps_in_memory() {
    explore(Fault::None, 4, set_by_the_server);
    explore(Fault::None, 3, |world| {
        let adder = spawn(world, |w| w.change_by_server(Op::Add, 1));
        world.park(1, at_least(2));
        world.sleep_until(at_least(1));
        join([adder]);
        world.verify(&[], 1);
        world.change(Op::Add, 1);
        world.verify(&[1], 0);
    });
}

#[test]
fn sleepers_that_are_not_satisfied_sleep_on() {
    explore(Fault::None, 2, |world| {
        let sleeper = spawn(world, |w| w.sleep_until(at_least(2)));
        let adder = spawn(world, |w| w.change(Op::Add, 1));
        world.sleep_until(at_least(1));
        world.change(Op::Add, 1);
        join([sleeper, adder]);
        world.verify(&[], 0);
    });
}

#[test]
fn who_leaves_takes_the_bit_from_nobody() {
    explore(Fault::None, 3, one_leaves_early);
    explore(Fault::None, 3, |world| {
        let brief = spawn(world, |w| w.sleep_briefly(at_least(9), 0));
        let sleeper = spawn(world, |w| w.sleep_until(changed()));
        world.change(Op::Set, 0);
        join([brief, sleeper]);
        world.verify(&[], 0);
    });
}

#[test]
fn the_last_of_the_servers_waiters_leaves_the_sleepers_asleep_or_woken() {
    explore(Fault::None, 3, |world| {
        world.park(1, at_least(5));
        let sleeper = spawn(world, |w| w.sleep_until(changed()));
        let canceller = spawn(world, |w| w.cancel(1));
        world.change(Op::Set, 0);
        join([sleeper, canceller]);
        world.verify(&[], 0);
    });
}

// ---- that the models would find faults --------------------------------------

#[test]
#[should_panic(expected = "deadlock")]
fn a_mutator_that_does_not_wake_is_found() {
    explore(Fault::NoWake, 3, sleeper_and_setter);
}

#[test]
#[should_panic(expected = "deadlock")]
fn an_adder_that_wakes_too_early_is_found() {
    explore(Fault::WakeFirst, 3, sleeper_and_adder);
}

#[test]
#[should_panic(expected = "wake-up lost")]
fn a_mutator_that_does_not_ring_the_server_is_found() {
    explore(Fault::NoRing, 3, parked_and_sleeping);
}

#[test]
#[should_panic(expected = "wake-up lost")]
fn a_server_that_relies_on_a_found_bit_is_found() {
    explore(Fault::FoundBit, 3, parked_and_sleeping);
}

#[test]
#[should_panic(expected = "wake-up lost")]
fn one_who_leaves_quietly_is_found() {
    explore(Fault::QuietLeave, 3, one_leaves_early);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_server_that_wakes_nobody_is_found() {
    explore(Fault::QuietServer, 3, set_by_the_server);
}
