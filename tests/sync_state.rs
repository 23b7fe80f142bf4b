//! Promise: a server that comes back with its state has no locks of sessions
//! that are over, and no barrier at which somebody waits for ever.
#![cfg(feature = "cli")]

mod common;
use common::process::Process;
use common::{eventually, key};
use farcell::{Client, Error};

fn client(server: &Process) -> Client {
    Client::builder().addr(&server.addr).key(key()).connect().unwrap()
}

#[test]
fn what_was_held_is_abandoned_and_what_was_half_full_is_broken() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = dir.path().join("state").to_str().unwrap().to_owned();
    let mut server = Process::start(&["--state", &state]);
    let (a, b) = (client(&server), client(&server));
    let locks = a.locks("l", 1, 2).unwrap();
    let guard = locks.at(0, 1).unwrap().lock().unwrap();
    let barriers = a.barriers("b", 1, 2, 2).unwrap();
    let (half, whole) = (barriers.at(0, 0).unwrap(), barriers.at(0, 1).unwrap());
    let theirs = b.barriers("b", 1, 2, 2).unwrap();
    let semaphore = a.semaphores("s", 1, 1, 3, 4).unwrap().at(0, 0).unwrap();
    semaphore.acquire().unwrap();
    std::thread::scope(|s| {
        s.spawn(|| theirs.at(0, 1).unwrap().wait().unwrap());
        whole.wait().unwrap();
    });
    std::thread::scope(|s| {
        let waiter = s.spawn(|| half.wait());
        eventually("it waits", || b.info().unwrap().parked_waits == 1);
        server.kill();
        server.start_again();
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::LeaseLost { .. }), "{error}");
    });
    let error = guard.unlock().unwrap_err();
    assert!(matches!(error, Error::LeaseLost { .. }), "{error}");
    let next = b.locks("l", 1, 2).unwrap().at(0, 1).unwrap().lock().unwrap();
    assert!(next.was_abandoned());
    assert_eq!(next.token(), 2, "tokens go on");
    let error = theirs.at(0, 0).unwrap().wait().unwrap_err();
    assert!(matches!(error, Error::BarrierBroken { .. }), "{error}");
    assert!(!whole.is_broken().unwrap());
    half.reset().unwrap();
    for col in 0..2 {
        std::thread::scope(|s| {
            s.spawn(|| theirs.at(0, col).unwrap().wait().unwrap());
            let passed = barriers.at(0, col).unwrap().wait().unwrap();
            assert_eq!(passed.generation(), col as u64, "what was passed before counts");
        });
    }
    assert_eq!(semaphore.available().unwrap(), 2);
}
