//! Promise: when the server dies or the connection breaks, clients in its memory
//! notice at once, go on as soon as it is back, and then are in its memory again.

#![cfg(feature = "cli")]

mod common;

use common::process::Process;
use common::{eventually, key};
use farcell::{Client, Error, TransportChoice};
use std::time::{Duration, Instant};

fn connect(server: &Process) -> Client {
    let builder = Client::builder().addr(&server.addr).key(key());
    builder.transport(TransportChoice::Shm).connect().unwrap()
}

#[test]
fn the_way_through_memory_comes_back_with_the_server() {
    let mut server = Process::start(&[]);
    let client = connect(&server);
    let event = client.events("e", 2, 2).unwrap().at(1, 1).unwrap();
    let counter = client.counters("c", 1, 9).unwrap().at(0, 8).unwrap();
    for round in 0..5 {
        event.set().unwrap();
        assert_eq!(counter.fetch_add(3).unwrap(), 0, "round {round}");
        server.kill();
        let begun = Instant::now();
        eventually("it notices", || !client.is_connected());
        assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
        eventually("its memory is gone", || client.transport().name != "shm");
        server.start_again();
        assert!(!event.is_set().unwrap(), "the server that is back knows nothing");
        eventually("it is in memory again", || client.transport().name == "shm");
        // Another client sees what is done there, and the other way round.
        let other = Client::builder().addr(&server.addr).key(key());
        let other = other.transport(TransportChoice::Tcp).connect().unwrap();
        let theirs = other.counters("c", 1, 9).unwrap().at(0, 8).unwrap();
        assert_eq!(theirs.swap(0).unwrap(), 0);
        assert!(event.set().unwrap());
        assert!(other.events("e", 2, 2).unwrap().at(1, 1).unwrap().is_set().unwrap());
    }
}

#[test]
fn sleepers_in_memory_outlive_the_server() {
    let mut server = Process::start(&[]);
    let client = connect(&server);
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    event.set().unwrap();
    event.clear().unwrap();
    std::thread::scope(|s| {
        let waits = s.spawn(|| event.wait_timeout(Duration::from_secs(20)).unwrap());
        eventually("it sleeps", || client.info().unwrap().parked_waits == 1);
        server.kill();
        server.start_again();
        eventually("it is parked again", || client.info().unwrap().parked_waits == 1);
        assert!(!waits.is_finished());
        event.set().unwrap();
        assert!(waits.join().unwrap());
    });
}

#[test]
fn without_a_server_sleepers_and_operations_give_up_in_time() {
    let mut server = Process::start(&[]);
    let builder = Client::builder().addr(&server.addr).key(key());
    let builder = builder.transport(TransportChoice::Shm);
    let client = builder.reconnect_for(Duration::from_millis(400)).connect().unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        let waits = s.spawn(|| event.wait());
        eventually("it sleeps", || client.info().unwrap().parked_waits == 1);
        server.kill();
        let begun = Instant::now();
        let error = waits.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. }), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(5));
    });
    assert!(matches!(event.is_set(), Err(Error::Unreachable { .. })));
}

#[test]
fn a_server_that_says_goodbye_is_heard() {
    let mut server = Process::start(&[]);
    let client = connect(&server);
    let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    counter.fetch_add(1).unwrap();
    server.signal("TERM");
    assert_eq!(server.wait(), Some(0));
    eventually("it notices", || !client.is_connected());
    server.start_again();
    assert_eq!(counter.fetch_add(1).unwrap(), 0);
    eventually("it is in memory again", || client.transport().name == "shm");
}
