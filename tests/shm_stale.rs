//! Promise: a client that works in memory and is stopped past its lease changes
//! no cell of another array when it goes on, however many were removed and made
//! meanwhile; and the cells can be had again once it has gone on, or is dead.

mod common;
use common::another::{Another, role};
use common::{client, eventually, key, server};
use farcell::{Client, Error, TransportChoice};
use std::time::Duration;

const ADDR: &str = "FARCELL_TEST_STALE_ADDR";
const LEASE: Duration = Duration::from_millis(600);
/// More than half of the segment: two of them need the same cells.
const CAPACITY: u32 = 4096;
const CELLS: usize = 2560;

/// The child: adds without end, until that fails. Nothing to do as a test.
#[test]
fn a_child() {
    let Ok(addr) = std::env::var(ADDR) else { return };
    let client =
        Client::builder().addr(addr).key(key()).transport(TransportChoice::Shm).connect().unwrap();
    let cells = client.counters("a", 1, CELLS).unwrap();
    let done = client.events("done", 1, 1).unwrap().at(0, 0).unwrap();
    'all: loop {
        for i in 0..CELLS {
            if cells.at(0, i).unwrap().fetch_add(1).is_err() {
                break 'all;
            }
        }
    }
    done.set().unwrap();
}

fn round(goes_on: bool) {
    let server = server().lease(LEASE).capacity(CAPACITY).start().unwrap();
    let watcher = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    let done = watcher.events("done", 1, 1).unwrap().at(0, 0).unwrap();
    let last = watcher.counters("a", 1, CELLS).unwrap().at(0, CELLS - 1).unwrap();
    let mut child = Another::start(&mut role("a_child", ADDR, server.address()));
    eventually("it adds", || last.load().unwrap() > 1000);
    let members = format!("{:?}", watcher.members().unwrap());
    assert!(members.to_lowercase().contains("shm"), "{members}");
    child.signal("STOP");
    eventually("its lease is over", || watcher.members().unwrap().len() == 1);
    watcher.remove("a").unwrap();
    // Its cells can still be reached by the one that was stopped.
    let error = watcher.counters("b", 1, CELLS).map(drop).unwrap_err();
    assert!(matches!(error, Error::SegmentFull { .. }), "{error:?}");
    let small = watcher.counters("small", 1, CAPACITY as usize - CELLS - 64).unwrap();
    if goes_on {
        child.signal("CONT");
        assert!(done.wait_timeout(Duration::from_secs(20)).unwrap(), "it has learnt it");
    } else {
        child.kill();
    }
    eventually("the cells can be had", || watcher.counters("b", 1, CELLS).is_ok());
    std::thread::sleep(LEASE / 2);
    for other in [small, watcher.counters("b", 1, CELLS).unwrap()] {
        assert!(other.all().snapshot().unwrap().iter().all(|&value| value == 0));
    }
}

#[test]
fn one_that_goes_on_changes_nothing_of_others() {
    for _ in 0..3 {
        round(true);
    }
}

#[test]
fn one_that_is_killed_in_its_sleep_keeps_nothing() {
    round(false);
}
