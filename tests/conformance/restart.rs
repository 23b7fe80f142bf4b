//! When the server process dies, what can be repeated goes on once it is back, the
//! rest says that its outcome is unknown, and with `--state` all is as it was.

use crate::common::process::Process;
use crate::set::{LONG, Set, eventually};
use farcell::{Counter, Error};
use std::sync::atomic::{AtomicBool, Ordering};

alone! { without_a_state_arrays_are_made_anew_and_waits_go_on }
together! {
    with_a_state_everything_is_as_it_was
    what_was_acknowledged_is_there
    who_holds_a_lock_holds_it_over_the_restart
}

fn start(set: &Set, more: &[&str]) -> Process {
    Process::start(&[set.arguments(), more].concat())
}

/// A place for a state in memory.
fn state() -> (tempfile::TempDir, String) {
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = memory.path().join("state").to_str().unwrap().to_owned();
    (memory, state)
}

fn without_a_state_arrays_are_made_anew_and_waits_go_on(set: &Set) {
    let mut server = start(set, &[]);
    let client = set.client_at(&server.addr, 0);
    let events = client.events("e", 4, 4).unwrap();
    let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    events.at(1, 1).unwrap().set().unwrap();
    counter.store(3).unwrap();
    let waits = events.at(3, 3).unwrap();
    std::thread::scope(|s| {
        let before = s.spawn(|| waits.wait_timeout(LONG).unwrap());
        eventually("it is parked", || client.info().unwrap().parked_waits == 1);
        server.kill();
        eventually("the client has noticed", || !client.is_connected());
        let set = s.spawn(|| events.at(2, 2).unwrap().set().unwrap());
        let store = s.spawn(|| counter.store(5).unwrap());
        let after = s.spawn(|| waits.wait_timeout(LONG).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(100));
        server.start_again();
        assert!(set.join().unwrap(), "the array is there again, its events clear");
        store.join().unwrap();
        eventually("both are parked again", || client.info().unwrap().parked_waits == 2);
        waits.set().unwrap();
        assert!(before.join().unwrap() && after.join().unwrap());
    });
    assert_eq!(counter.load().unwrap(), 5);
    assert!(!events.at(1, 1).unwrap().is_set().unwrap(), "it had no memory");
    assert_eq!(counter.fetch_add(1).unwrap(), 5);
}

fn with_a_state_everything_is_as_it_was(set: &Set) {
    let (_memory, state) = state();
    let mut server = start(set, &["--state", &state]);
    let (a, b) = (set.client_at(&server.addr, 0), set.client_at(&server.addr, 1));
    let (e, c) = (a.events("e", 2, 3).unwrap(), a.counters("c", 2, 3).unwrap());
    for life in 0..2 {
        e.at(1, 2).unwrap().set().unwrap();
        c.at(1, 2).unwrap().store(-7 - life).unwrap();
        b.semaphores("s", 1, 1, 3, 3).unwrap().at(0, 0).unwrap().acquire().unwrap();
        server.kill();
        server.start_again();
        let (seen, count) = (b.events("e", 2, 3).unwrap(), b.counters("c", 2, 3).unwrap());
        assert_eq!(seen.snapshot().unwrap(), [false, false, false, false, false, true]);
        assert_eq!(count.all().snapshot().unwrap(), [0, 0, 0, 0, 0, -7 - life]);
        assert_eq!(e.at(1, 2).unwrap().transitions().unwrap(), 1);
        let semaphore = a.open_semaphores("s").unwrap().at(0, 0).unwrap();
        assert_eq!(semaphore.available().unwrap(), 2 - life as u32);
        std::thread::scope(|s| {
            let wait = s.spawn(|| seen.at(0, 0).unwrap().wait_timeout(LONG).unwrap());
            eventually("it is parked", || a.info().unwrap().parked_waits == 1);
            e.at(0, 0).unwrap().set().unwrap();
            assert!(wait.join().unwrap());
        });
        assert!(seen.at(0, 0).unwrap().clear().unwrap());
    }
}

/// How often it was done for certain, and how often perhaps.
fn add_until(over: &AtomicBool, counter: &Counter) -> (i64, i64) {
    let (mut done, mut unknown) = (0, 0);
    while !over.load(Ordering::Relaxed) {
        match counter.fetch_add(1) {
            Ok(_) => done += 1,
            Err(Error::OutcomeUnknown { op: "fetch_add", .. }) => unknown += 1,
            Err(error) => panic!("{error}"),
        }
    }
    (done, unknown)
}

fn what_was_acknowledged_is_there(set: &Set) {
    let (_memory, state) = state();
    let mut server = start(set, &["--state", &state]);
    let clients = [0, 1].map(|i| set.client_at(&server.addr, i));
    let counters = [0, 1].map(|i| clients[i].counters("c", 1, 1).unwrap().at(0, 0).unwrap());
    let over = AtomicBool::new(false);
    let (done, unknown) = std::thread::scope(|s| {
        let adding: Vec<_> = counters.iter().map(|c| s.spawn(|| add_until(&over, c))).collect();
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(60));
            server.kill();
            server.start_again();
        }
        over.store(true, Ordering::Relaxed);
        let both = adding.into_iter().map(|a| a.join().unwrap());
        both.fold((0, 0), |(d, u), (done, unknown)| (d + done, u + unknown))
    });
    let total = counters[0].load().unwrap();
    assert!((done..=done + unknown).contains(&total), "{done} + {unknown}, {total}");
    assert!(done > 0);
    assert_eq!(counters[1].load().unwrap(), total);
}

fn who_holds_a_lock_holds_it_over_the_restart(set: &Set) {
    let (_memory, state) = state();
    let mut server = start(set, &["--state", &state]);
    let (a, b) = (set.client_at(&server.addr, 0), set.client_at(&server.addr, 1));
    let [ours, theirs] = [&a, &b].map(|c| c.locks("l", 1, 1).unwrap().at(0, 0).unwrap());
    let guard = ours.lock().unwrap();
    std::thread::scope(|s| {
        let queues = s.spawn(|| theirs.lock().unwrap());
        eventually("it queues", || a.info().unwrap().parked_waits == 1);
        server.kill();
        server.start_again();
        eventually("it queues again", || a.info().unwrap().parked_waits == 1);
        assert!(!queues.is_finished());
        guard.check().unwrap();
        guard.unlock().unwrap();
        let got = queues.join().unwrap();
        assert!(got.token() > 1 && !got.was_abandoned(), "{got:?}");
    });
}
