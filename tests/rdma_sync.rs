//! Promise: over RDMA a lock that nobody wants, a permit that is there and an
//! arrival at a barrier are the adapter's work alone; whoever has to wait gets
//! his turn as over TCP, and whoever dies is missed as over TCP.
//!
//! Needs a device: run it with `scripts/soft-roce run` where there is none.
//! Without one each test says so and passes, unless `FARCELL_TEST_RDMA` is
//! `required`.

mod common;
use common::another::{Another, role};
use common::rdma::{LONG, ServerProcess, device, eventually, over, over_at, rdma_server};
use farcell::{Client, Error, TransportChoice};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const ROLE: &str = "FARCELL_TEST_HOLDER";

/// In the process that the tests start: a server. Otherwise nothing.
#[test]
#[ignore = "only a process of the tests"]
fn role_of_the_server() {
    common::rdma::serve_if_asked();
}

/// In the process that the tests start: one that holds a lock by RDMA until it
/// is told to go on.
#[test]
#[ignore = "only a process of the tests"]
fn role_of_the_holder() {
    let Ok(addr) = std::env::var(ROLE) else {
        return;
    };
    let client = over_at(&addr, TransportChoice::Rdma);
    client.join("holder").unwrap();
    let guard = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap().lock().unwrap();
    println!("#holding {}", guard.token());
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
    match guard.unlock() {
        Err(Error::LeaseLost { .. }) => println!("#late"),
        other => println!("#unlocked {other:?}"),
    }
}

struct Holder {
    process: Another,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Holder {
    fn start(addr: &str) -> Holder {
        let mut command = role("role_of_the_holder", ROLE, addr);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Another::start(command);
        let lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
        let mut holder = Holder { process, lines };
        assert_eq!(holder.hear(), "holding 1");
        holder
    }

    /// What it says next.
    fn hear(&mut self) -> String {
        loop {
            let line = self.lines.next().expect("it goes on").unwrap();
            if let Some((_, what)) = line.split_once('#') {
                return what.to_owned();
            }
        }
    }
}

#[test]
fn what_nobody_else_wants_needs_no_server() {
    if !device() {
        return;
    }
    let server = ServerProcess::start();
    let client = over_at(&server.addr, TransportChoice::Rdma);
    let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let barrier = client.barriers("b", 1, 1, 1).unwrap().at(0, 0).unwrap();
    let pair = client.barriers("c", 1, 1, 2).unwrap().at(0, 0).unwrap();
    let semaphore = client.semaphores("s", 1, 1, 2, 2).unwrap().at(0, 0).unwrap();
    barrier.wait().unwrap();
    server.signal("STOP");
    eventually("the server has stopped", || server.is_stopped());
    let begun = Instant::now();
    for i in 1..=20 {
        let guard = lock.lock().unwrap();
        assert_eq!(guard.token(), i);
        assert!(lock.try_lock().unwrap().is_none());
        guard.check().unwrap();
        guard.unlock().unwrap();
        assert_eq!(barrier.wait().unwrap().generation(), i);
        semaphore.acquire().unwrap();
        assert_eq!(semaphore.available().unwrap(), 1);
        semaphore.release().unwrap();
    }
    assert!(matches!(semaphore.release(), Err(Error::TooManyPermits { .. })));
    pair.abort().unwrap();
    assert!(pair.is_broken().unwrap());
    pair.reset().unwrap();
    assert!(!pair.is_broken().unwrap());
    println!("20 rounds without the server's CPU took {:?}", begun.elapsed());
    assert_eq!(client.transport().name, "rdma");
    server.signal("CONT");
    drop(server);
}

/// Two clients over RDMA and one over TCP take a lock, a permit and a barrier
/// in turns, and break in on nobody.
fn mixed(rounds: u64, meanwhile: impl FnOnce(&farcell::Server)) {
    let server = rdma_server().start().unwrap();
    let (low, high, last) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let out = AtomicU64::new(0);
    std::thread::scope(|s| {
        for choice in [TransportChoice::Rdma, TransportChoice::Rdma, TransportChoice::Tcp] {
            let client = over(&server, choice);
            let (low, high, last, out) = (&low, &high, &last, &out);
            s.spawn(move || {
                let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
                let barrier = client.barriers("b", 1, 1, 3).unwrap().at(0, 0).unwrap();
                let semaphore = client.semaphores("s", 1, 1, 2, 2).unwrap().at(0, 0).unwrap();
                for round in 0..rounds {
                    let guard = lock.lock().unwrap();
                    let before = low.load(Relaxed);
                    assert_eq!(before, high.load(Relaxed), "someone else is in here");
                    low.store(before + 1, Relaxed);
                    assert!(last.swap(guard.token(), Relaxed) < guard.token());
                    std::thread::yield_now();
                    high.store(before + 1, Relaxed);
                    guard.unlock().unwrap();
                    semaphore.acquire().unwrap();
                    assert!(out.fetch_add(1, Relaxed) < 2);
                    std::thread::yield_now();
                    out.fetch_sub(1, Relaxed);
                    semaphore.release().unwrap();
                    if round % 5 == 4 {
                        assert_eq!(barrier.wait().unwrap().generation(), round / 5);
                        assert!(low.load(Relaxed) >= 3 * (round + 1));
                    }
                }
                client.release().unwrap();
            });
        }
        meanwhile(&server);
    });
    assert_eq!(low.load(Relaxed), 3 * rounds);
    assert_eq!(server.parked_waits(), 0);
}

#[test]
fn those_who_wait_get_their_turn_over_all_transports() {
    if device() {
        mixed(100, |_| {});
    }
}

#[test]
fn locks_are_taken_once_also_when_the_connection_breaks() {
    if !device() {
        return;
    }
    for round in 0..10 {
        let server = rdma_server().start().unwrap();
        let clients = [over(&server, TransportChoice::Rdma), over(&server, TransportChoice::Rdma)];
        let (low, high) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|s| {
            for client in clients.iter().cycle().take(4) {
                let (low, high) = (&low, &high);
                s.spawn(move || {
                    let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
                    for _ in 0..60 {
                        // One that was neither taken nor left would end this.
                        let guard = lock.lock_timeout(LONG).unwrap().expect("a minute is enough");
                        let before = low.load(Relaxed);
                        assert_eq!(before, high.load(Relaxed), "someone else is in here");
                        low.store(before + 1, Relaxed);
                        std::thread::yield_now();
                        high.store(before + 1, Relaxed);
                        guard.unlock().unwrap();
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(5 + 7 * round));
            server.break_queue_pairs_for_tests();
        });
        assert_eq!(low.load(Relaxed), 240);
        assert_eq!(clients[0].transport().name, "tcp");
        let lock = clients[0].locks("l", 1, 1).unwrap().at(0, 0).unwrap();
        assert!(!lock.is_locked().unwrap());
    }
}

fn another(addr: &str) -> (Client, farcell::Lock) {
    let client = over_at(addr, TransportChoice::Rdma);
    let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    (client, lock)
}

#[test]
fn a_holder_that_is_killed_is_missed_and_its_lock_comes_free() {
    if !device() {
        return;
    }
    let server = rdma_server().lease(Duration::from_secs(2)).start().unwrap();
    let holder = Holder::start(&server.address());
    let (client, lock) = another(&server.address());
    let members = client.members().unwrap();
    assert_eq!((members[0].name.as_deref(), members[0].transport), (Some("holder"), "rdma"));
    assert!(lock.try_lock().unwrap().is_none());
    holder.process.signal("KILL");
    let guard = lock.lock_timeout(LONG).unwrap().unwrap();
    assert!(guard.was_abandoned());
    assert_eq!(guard.token(), 2);
}

#[test]
fn a_holder_that_was_stopped_past_its_lease_changes_nothing() {
    if !device() {
        return;
    }
    let server = rdma_server().lease(Duration::from_secs(2)).start().unwrap();
    let mut holder = Holder::start(&server.address());
    let (_client, lock) = another(&server.address());
    holder.process.signal("STOP");
    let guard = lock.lock_timeout(LONG).unwrap().unwrap();
    assert!(guard.was_abandoned());
    holder.process.signal("CONT");
    holder.process.0.stdin.as_mut().unwrap().write_all(b"go on\n").unwrap();
    assert_eq!(holder.hear(), "late");
    guard.check().unwrap();
    guard.unlock().unwrap();
    assert_eq!(lock.token().unwrap(), 2);
}
