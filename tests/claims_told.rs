//! Locks, permits and barriers without a thread: what was queued for is told once,
//! and what is not wanted any more goes back.

mod common;

use common::eventually;
use farcell::{Client, Comparison, Error, LockGuard, Server};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(10);
const NOW: Duration = Duration::from_millis(100);

fn server() -> Server {
    common::server().start().unwrap()
}

fn client(server: &Server) -> Client {
    common::client(server).connect().unwrap()
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn hundreds_hold_a_lock_one_after_another_in_their_order() {
    let server = server();
    let client = client(&server);
    let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let held = lock.lock().unwrap();
    let before = threads();
    let (tell, told) = mpsc::channel();
    for i in 0..300 {
        let tell = tell.clone();
        let ended = move |got: farcell::Result<LockGuard>| tell.send((i, got)).unwrap();
        lock.lock_then(ended).unwrap();
    }
    // The server's own threads were there before; other tests start theirs.
    assert!(threads() < before + 50, "{before} threads became {}", threads());
    assert!(told.recv_timeout(NOW).is_err());
    let mut token = held.token();
    held.unlock().unwrap();
    for i in 0..300 {
        let (who, got) = told.recv_timeout(SOON).unwrap();
        let guard = got.unwrap();
        assert_eq!(who, i);
        assert!(guard.token() > token && !guard.was_abandoned());
        assert!(told.try_recv().is_err(), "two hold it");
        guard.check().unwrap();
        token = guard.token();
        guard.unlock().unwrap();
    }
    assert!(!lock.is_locked().unwrap());
}

#[test]
fn who_cancels_holds_nothing_however_late() {
    let server = server();
    let (one, other) = (client(&server), client(&server));
    let lock = one.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let held = other.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    for pause in [0, 0, 100, 200, 500, 1000, 5000] {
        let guard = held.lock().unwrap();
        let (tell, told) = mpsc::channel();
        let pending = lock.lock_then(move |got| tell.send(got).unwrap()).unwrap();
        let until = Instant::now() + Duration::from_micros(pause);
        guard.unlock().unwrap();
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        pending.cancel();
        match told.recv_timeout(SOON).unwrap() {
            Ok(guard) => drop(guard),
            Err(error) => assert!(matches!(error, Error::Cancelled), "{error}"),
        }
        assert!(held.lock_timeout(SOON).unwrap().is_some());
    }
}

#[test]
fn a_lock_whose_function_has_no_use_for_it_goes_back() {
    let server = server();
    let client = client(&server);
    let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let held = lock.lock().unwrap();
    lock.lock_then(drop).unwrap();
    held.unlock().unwrap();
    eventually("the lock is free", || !lock.is_locked().unwrap());
}

#[test]
fn closing_gives_back_what_was_queued_for() {
    let server = server();
    let (closing, other) = (client(&server), client(&server));
    let lock = other.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let held = lock.lock().unwrap();
    let (tell, told) = mpsc::channel();
    let theirs = closing.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    theirs.lock_then(move |got| tell.send(got.map(drop)).unwrap()).unwrap();
    closing.close();
    assert!(matches!(told.recv_timeout(SOON), Ok(Err(Error::Closed))));
    held.unlock().unwrap();
    assert!(lock.lock_timeout(SOON).unwrap().is_some());
}

#[test]
fn permits_come_and_those_of_who_cancelled_are_there_for_others() {
    let server = server();
    let client = client(&server);
    let semaphore = client.semaphores("s", 1, 1, 2, 2).unwrap().at(0, 0).unwrap();
    let (tell, told) = mpsc::channel();
    let mut pending = Vec::new();
    for _ in 0..50 {
        let tell = tell.clone();
        pending.push(semaphore.acquire_then(move |got| tell.send(got).unwrap()).unwrap());
    }
    for _ in 0..2 {
        told.recv_timeout(SOON).unwrap().unwrap();
    }
    assert!(told.recv_timeout(NOW).is_err());
    semaphore.release().unwrap();
    told.recv_timeout(SOON).unwrap().unwrap();
    for one in &pending {
        one.cancel();
    }
    for _ in 0..47 {
        assert!(matches!(told.recv_timeout(SOON).unwrap(), Err(Error::Cancelled)));
    }
    assert_eq!(semaphore.available().unwrap(), 0);
    semaphore.release_many(2).unwrap();
    assert_eq!(semaphore.available().unwrap(), 2);
}

#[test]
fn a_barrier_is_passed_by_all_and_broken_by_one_that_gives_up() {
    let server = server();
    let clients = [client(&server), client(&server), client(&server)];
    let barriers = clients.each_ref().map(|c| c.barriers("b", 1, 1, 3).unwrap().at(0, 0).unwrap());
    let (tell, told) = mpsc::channel();
    let come = |which: usize| {
        let tell = tell.clone();
        barriers[which].wait_then(move |got| tell.send((which, got)).unwrap()).unwrap()
    };
    for _ in 0..3 {
        come(0);
        come(1);
        assert!(told.recv_timeout(NOW).is_err());
        come(2);
        let mut places: Vec<usize> =
            (0..3).map(|_| told.recv_timeout(SOON).unwrap().1.unwrap().index()).collect();
        places.sort_unstable();
        assert_eq!(places, [0, 1, 2]);
    }
    come(0);
    come(1).cancel();
    for _ in 0..2 {
        match told.recv_timeout(SOON).unwrap() {
            (0, Err(Error::BarrierBroken { .. })) | (1, Err(Error::Cancelled)) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(barriers[2].is_broken().unwrap());
}

#[test]
fn counters_messages_and_transitions() {
    let server = server();
    let client = client(&server);
    let counters = client.counters("c", 1, 3).unwrap();
    let one = counters.at(0, 1).unwrap();
    let (tell, told) = mpsc::channel();
    one.wait_until_then(Comparison::Ge, 3, move |got| tell.send(got).unwrap()).unwrap();
    assert!(told.recv_timeout(NOW).is_err());
    one.fetch_add(4).unwrap();
    assert_eq!(told.recv_timeout(SOON).unwrap().unwrap(), 4);
    let (tell, told) = mpsc::channel();
    let some = counters.all();
    some.wait_some_then(2, Comparison::Ne, 0, move |got| tell.send(got).unwrap()).unwrap();
    assert!(told.recv_timeout(NOW).is_err());
    counters.at(0, 2).unwrap().store(-1).unwrap();
    let woken = told.recv_timeout(SOON).unwrap().unwrap();
    let found: Vec<_> = woken.cells().iter().map(|cell| (cell.col, cell.value())).collect();
    assert_eq!((woken.is_satisfied(), found.len()), (true, 2));
    assert!(found.contains(&(1, 4)) && found.contains(&(2, -1)));

    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let (tell, told) = mpsc::channel();
    event.wait_after_then(0, move |got| tell.send(got).unwrap()).unwrap();
    assert!(told.recv_timeout(NOW).is_err());
    event.set().unwrap();
    event.clear().unwrap();
    assert!(told.recv_timeout(SOON).unwrap().unwrap() >= 1);

    let slot = client.slots("s", 1, 16).unwrap().at(0).unwrap();
    let (tell, told) = mpsc::channel();
    slot.wait_newer_then(0, move |got| tell.send(got).unwrap()).unwrap();
    assert!(told.recv_timeout(NOW).is_err());
    slot.write(b"new").unwrap();
    told.recv_timeout(SOON).unwrap().unwrap();
}
