//! Promise: when the server process dies, what can be repeated goes on once
//! it is back, and the rest says that its outcome is unknown.

#![cfg(feature = "cli")]

mod common;

use common::process::Process;
use common::{eventually, key};
use farcell::{Client, ClientBuilder, Error, TransportChoice};
use std::time::{Duration, Instant};

fn client(server: &Process) -> ClientBuilder {
    Client::builder().addr(&server.addr).key(key())
}

#[test]
fn repeatable_operations_go_on() {
    let mut server = Process::start(&[]);
    let client = client(&server).connect().unwrap();
    let events = client.events("e", 4, 4).unwrap();
    let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    events.at(1, 1).unwrap().set().unwrap();
    counter.store(3).unwrap();
    server.kill();
    eventually("the client has noticed", || !client.is_connected());
    std::thread::scope(|s| {
        let set = s.spawn(|| events.at(2, 2).unwrap().set().unwrap());
        let store = s.spawn(|| counter.store(5).unwrap());
        let waits: Vec<_> = (0..4)
            .map(|_| s.spawn(|| events.at(3, 3).unwrap().wait_timeout(Duration::from_secs(20))))
            .collect();
        std::thread::sleep(Duration::from_millis(100));
        server.start_again();
        assert!(set.join().unwrap(), "the array is there again, its events clear");
        store.join().unwrap();
        events.at(3, 3).unwrap().set().unwrap();
        assert!(waits.into_iter().all(|w| w.join().unwrap().unwrap()));
    });
    assert_eq!(counter.load().unwrap(), 5);
    assert!(!events.at(1, 1).unwrap().is_set().unwrap(), "it had no memory");
    assert_eq!(counter.fetch_add(1).unwrap(), 5);
}

#[test]
fn a_wait_under_way_goes_on() {
    let mut server = Process::start(&[]);
    let client = client(&server).connect().unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    event.set().unwrap();
    event.clear().unwrap();
    std::thread::scope(|s| {
        let wait = s.spawn(|| event.wait_timeout(Duration::from_secs(20)).unwrap());
        eventually("it is parked", || client.info().unwrap().parked_waits == 1);
        server.kill();
        server.start_again();
        eventually("it is parked again", || client.info().unwrap().parked_waits == 1);
        event.set().unwrap();
        assert!(wait.join().unwrap());
    });
}

#[test]
fn what_cannot_be_repeated_is_unknown() {
    let mut server = Process::start(&[]);
    let client = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    // The server is stopped, so the requests are sent and not answered.
    server.signal("STOP");
    std::thread::scope(|s| {
        let add = s.spawn(|| counter.fetch_add(1));
        let take = s.spawn(|| event.take());
        let load = s.spawn(|| counter.load());
        let set = s.spawn(|| event.set());
        std::thread::sleep(Duration::from_millis(200));
        server.kill();
        server.start_again();
        for (error, op) in [
            (add.join().unwrap().map(drop).unwrap_err(), "fetch_add"),
            (take.join().unwrap().map(drop).unwrap_err(), "take"),
        ] {
            assert!(matches!(error, Error::OutcomeUnknown { op: o, .. } if o == op), "{error}");
        }
        assert_eq!(load.join().unwrap().unwrap(), 0);
        assert!(set.join().unwrap().unwrap());
    });
    assert_eq!(counter.fetch_add(1).unwrap(), 0, "and from here on it counts again");
}

#[test]
fn a_server_that_stops_says_so() {
    let mut server = Process::start(&[]);
    let client = client(&server).reconnect_for(Duration::from_millis(300)).connect().unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        let wait = s.spawn(|| event.wait());
        eventually("it is parked", || client.info().unwrap().parked_waits == 1);
        server.signal("TERM");
        let error = wait.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("server going away"), "{error}");
    });
    assert_eq!(server.wait(), Some(0));
    let error = event.set().unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

#[test]
fn a_server_that_hangs_is_noticed_within_its_lease() {
    let server = Process::start(&["--lease", "0.6"]);
    // In its memory there is nothing to notice for as long.
    let builder = client(&server).transport(TransportChoice::Tcp);
    let client = builder.reconnect_for(Duration::from_millis(500)).connect().unwrap();
    let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    server.signal("STOP");
    let begun = Instant::now();
    let error = counter.fetch_add(1).unwrap_err();
    assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error}");
    assert!(event.wait().is_err());
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    server.signal("CONT");
    eventually("it is back", || client.is_connected());
    assert!(counter.load().is_ok());
}

#[test]
fn a_client_that_was_stopped_past_its_lease_starts_a_new_session() {
    let server = Process::start(&["--lease", "0.5"]);
    let watcher = client(&server).connect().unwrap();
    let before = watcher.info().unwrap().sessions;
    // The program itself is the client that is stopped.
    let event = watcher.events("go", 1, 1).unwrap().at(0, 0).unwrap();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_farcell"))
        .args(["--addr", &server.addr, "--authkey-file"])
        .arg(server.dir.path().join("key"))
        .args(["wait", "go", "0", "0", "--timeout", "20"])
        .spawn()
        .unwrap();
    let signal = |name: &str| common::another::signal(child.id(), name);
    eventually("it waits", || watcher.info().unwrap().parked_waits == 1);
    signal("STOP");
    eventually("its lease is over", || watcher.info().unwrap().sessions == before);
    assert_eq!(watcher.info().unwrap().parked_waits, 0, "its wait went with it");
    signal("CONT");
    eventually("it waits again", || watcher.info().unwrap().parked_waits == 1);
    event.set().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
