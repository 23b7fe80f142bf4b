//! Promise: a snapshot is of one moment, also while clients change cells over TCP
//! and in shared memory: what each of them does first is in it before what it does
//! next, and a message belongs to its version. One that could not be so says that.

mod common;

use common::messages::{self, message};
use common::{eventually, key};
use farcell::{Client, Error, RdmaChoice, Server, TransportChoice, inspect_snapshot};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PAIRS: usize = 3;
/// Snapshots that are looked at.
const ENOUGH: usize = 25;
const BYTES: u64 = 70_000;

fn over(server: &Server, choice: TransportChoice) -> Client {
    Client::builder().addr(server.address()).key(key()).transport(choice).connect().unwrap()
}

/// Ends the others, also when a check fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Each change of `first` goes before that of `second`, in another array.
fn count(client: &Client, pair: usize, over: &AtomicBool) {
    let first = client.counters("first", 1, PAIRS).unwrap().at(0, pair).unwrap();
    let second = client.counters("second", PAIRS, 40).unwrap().at(pair, 39).unwrap();
    let event = client.events("event", 1, PAIRS).unwrap().at(0, pair).unwrap();
    let mut on = false;
    while !over.load(Ordering::Relaxed) {
        first.fetch_add(1).unwrap();
        if on {
            event.clear().unwrap()
        } else {
            event.set().unwrap()
        };
        on = !on;
        second.fetch_add(1).unwrap();
    }
}

/// Each message goes before what is said about it.
fn write(client: &Client, row: usize, over: &AtomicBool) {
    let slot = client.slots("params", 2, BYTES).unwrap().at(row).unwrap();
    let said = client.counters("said", 1, 2).unwrap().at(0, row).unwrap();
    for number in 1.. {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let size = BYTES as usize - number as usize % 1000;
        assert_eq!(slot.write(&messages::of_size(number, size)).unwrap(), number);
        said.store(number as i64).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What a server has that begins with this snapshot. Messages that are torn in it.
fn check(file: &Path) -> usize {
    let server = Server::builder(key()).rdma(RdmaChoice::Off).bind("127.0.0.1:0");
    let server = server.restore(file).start().unwrap();
    let client = over(&server, TransportChoice::Tcp);
    let first = client.counters("first", 1, PAIRS).unwrap().all().snapshot().unwrap();
    let second = client.counters("second", PAIRS, 40).unwrap();
    let events = client.events("event", 1, PAIRS).unwrap().all().transitions().unwrap();
    for (pair, &a) in first.iter().enumerate() {
        let b = second.at(pair, 39).unwrap().load().unwrap();
        let event = events[pair] as i64;
        assert!(a >= event && event >= b && a - b <= 1, "pair {pair}: {a}, {event}, {b}");
    }
    let mut buffer = vec![0; BYTES as usize];
    let mut torn = 0;
    for row in 0..2 {
        let said =
            client.counters("said", 1, 2).unwrap().at(0, row).unwrap().load().unwrap() as u64;
        match messages::read(
            &client.slots("params", 2, BYTES).unwrap().at(row).unwrap(),
            &mut buffer,
        ) {
            Ok((number, received)) => {
                assert_eq!(number, received.version);
                assert!((said..=said + 1).contains(&number), "{row}: {number}, {said}");
            }
            Err(Error::Torn { version, .. }) => {
                assert_eq!(version, said, "the next one was being written");
                torn += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    torn
}

#[test]
fn every_snapshot_is_of_one_moment() {
    let dir = tempfile::tempdir().unwrap();
    let kept = dir.path().join("kept");
    let server = Server::builder(key()).rdma(RdmaChoice::Off).bind("127.0.0.1:0");
    let server = server.snapshots(&kept).snapshot_every(Duration::from_millis(50));
    let server = server.start().unwrap();
    let ways = [TransportChoice::Shm, TransportChoice::Tcp, TransportChoice::Shm];
    let clients = ways.map(|way| over(&server, way));
    assert_eq!(clients[0].transport().name, "shm");
    let end = AtomicBool::new(false);
    let (mut at_once, mut others, mut torn) = (0, 0, 0);
    std::thread::scope(|s| {
        let _over = End(&end);
        for (pair, client) in clients.iter().enumerate() {
            let end = &end;
            s.spawn(move || count(client, pair, end));
        }
        for (row, client) in clients[..2].iter().enumerate() {
            let end = &end;
            s.spawn(move || write(client, row, end));
        }
        let begun = Instant::now();
        let copy = dir.path().join("copy");
        let mut seen = BTreeSet::new();
        while at_once + others < ENOUGH && begun.elapsed() < Duration::from_secs(60) {
            let files = fs::read_dir(&kept).unwrap().map(|file| file.unwrap().path());
            let newest = files.filter(|file| !file.ends_with("snapshot.new")).max().unwrap();
            // It may go meanwhile, for another one.
            if newest.ends_with("lock")
                || seen.contains(&newest)
                || fs::copy(&newest, &copy).is_err()
            {
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
            seen.insert(newest);
            let info = inspect_snapshot(&copy).unwrap();
            let complete = ["event", "first", "params", "said", "second"];
            if !info.arrays.iter().map(|array| array.0.as_str()).eq(complete) {
                continue;
            }
            if info.at_once {
                torn += check(&copy);
                at_once += 1;
            } else {
                others += 1;
            }
        }
    });
    println!("{at_once} of one moment with {torn} torn messages, {others} not of one moment");
    assert!(at_once >= ENOUGH / 2, "{at_once} of one moment, {others} not");
    assert!(torn <= at_once, "{torn} messages of {} are torn", at_once * 2);
}

#[test]
fn messages_come_back_with_a_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let begin = |state: &str| {
        let server = Server::builder(key()).rdma(RdmaChoice::Off).bind("127.0.0.1:0");
        let server =
            if state.is_empty() { server } else { server.state(memory.path().join(state)) };
        server.snapshots(dir.path().join("kept")).start().unwrap()
    };
    let sizes = [1, 8, 65_537, 200_000];
    let mut buffer = vec![0; 200_000];
    // Memory of its own, a new state, and memory again.
    for (round, state) in ["", "one", "two", ""].into_iter().enumerate() {
        let server = begin(state);
        for way in [TransportChoice::Tcp, TransportChoice::Shm] {
            let client = over(&server, way);
            let slots = client.slots("params", 6, 200_000).unwrap();
            if round > 0 {
                for (row, size) in sizes.into_iter().enumerate() {
                    let received = slots.at(row).unwrap().read(&mut buffer).unwrap();
                    assert_eq!((received.version, received.len), (1, size), "{round} {row}");
                    let sent = messages::of_size(row as u64 + 1, size);
                    assert_eq!(buffer[..size], sent);
                }
                let torn = slots.at(4).unwrap().read(&mut buffer);
                assert!(matches!(torn, Err(Error::Torn { version: 0, .. })), "{torn:?}");
                assert_eq!(slots.at(5).unwrap().read(&mut buffer).unwrap().version, 0);
            }
        }
        if round == 0 {
            let slots = over(&server, TransportChoice::Tcp).slots("params", 6, 200_000).unwrap();
            for (row, size) in sizes.into_iter().enumerate() {
                let sent = messages::of_size(row as u64 + 1, size);
                slots.at(row).unwrap().write(&sent).unwrap();
            }
            slots.at(4).unwrap().writer().unwrap().write_at(0, &message(3)).unwrap();
            let torn = || matches!(slots.at(4).unwrap().read(&mut [0; 9]), Err(Error::Torn { .. }));
            eventually("its writer is given up", torn);
        }
        server.stop().unwrap();
    }
}
