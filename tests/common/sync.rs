//! What locks, barriers and semaphores promise where clients change the cells by
//! themselves, over RDMA or in shared memory.

use super::another::{Another, role};
use super::client;
use super::rdma::{LONG, ServerProcess, eventually, over_at};
use farcell::{Client, Error, Server, TransportChoice};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The address, and the transport.
const ROLE: &str = "FARCELL_TEST_HOLDER";

/// In the process that [`Holder::start`] has started: holds a lock until it is
/// told to go on. Anywhere else it does nothing.
pub fn hold_if_asked() {
    let Ok(what) = std::env::var(ROLE) else {
        return;
    };
    let (addr, name) = what.split_once(' ').unwrap();
    let (name, works) = name.strip_suffix(" at work").map_or((name, false), |name| (name, true));
    let choice = if name == "rdma" { TransportChoice::Rdma } else { TransportChoice::Shm };
    let client = over_at(addr, choice);
    client.join("holder").unwrap();
    let guard = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap().lock().unwrap();
    println!("#holding {}", guard.token());
    if works {
        // Until we were stopped. No other thread of ours has had a word yet then.
        let (mut last, mut now) = (Instant::now(), Instant::now());
        while now - last < Duration::from_secs(1) {
            (last, now) = (now, Instant::now());
        }
    } else {
        std::io::stdin().lock().read_line(&mut String::new()).unwrap();
    }
    match guard.unlock() {
        Err(Error::LeaseLost { .. }) => println!("#late"),
        other => println!("#unlocked {other:?}"),
    }
}

/// A process that holds a lock. The executable must have an ignored test
/// `role_of_the_holder` that calls [`hold_if_asked`].
struct Holder {
    process: Another,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Holder {
    fn start(addr: &str, choice: TransportChoice) -> Holder {
        Holder::start_at(addr, choice, "")
    }

    /// One that holds it at work, until it has been stopped.
    fn start_at_work(addr: &str, choice: TransportChoice) -> Holder {
        Holder::start_at(addr, choice, " at work")
    }

    fn start_at(addr: &str, choice: TransportChoice, what: &str) -> Holder {
        let name = if choice == TransportChoice::Rdma { "rdma" } else { "shm" };
        let mut command = role("role_of_the_holder", ROLE, format!("{addr} {name}{what}"));
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

/// What nobody else wants goes on while the server is stopped.
pub fn alone(server: &ServerProcess, choice: TransportChoice) {
    let client = over_at(&server.addr, choice);
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
    assert!(client.transport().name != "tcp");
    server.signal("CONT");
}

/// Clients over these transports take a lock, a permit and a barrier in turns, and
/// break in on nobody.
pub fn mixed(server: &Server, choices: [TransportChoice; 3], rounds: u64) {
    let (low, high, last) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let out = AtomicU64::new(0);
    std::thread::scope(|s| {
        for choice in choices {
            let client = over_at(&server.address(), choice);
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
    });
    assert_eq!(low.load(Relaxed), 3 * rounds);
    assert_eq!(server.parked_waits(), 0);
}

fn another(server: &Server, choice: TransportChoice) -> (Client, farcell::Lock) {
    let client = client(server).transport(choice).connect().unwrap();
    let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    (client, lock)
}

/// A holder that is killed is missed, and its lock comes free. The server's lease
/// is to be short.
pub fn killed(server: &Server, choice: TransportChoice) {
    let holder = Holder::start(&server.address(), choice);
    let (client, lock) = another(server, choice);
    let members = client.members().unwrap();
    let way = client.transport().name;
    assert_eq!((members[0].name.as_deref(), members[0].transport), (Some("holder"), way));
    assert!(lock.try_lock().unwrap().is_none());
    holder.process.signal("KILL");
    let guard = lock.lock_timeout(LONG).unwrap().unwrap();
    assert!(guard.was_abandoned());
    assert_eq!(guard.token(), 2);
}

/// A holder that was stopped past its lease changes nothing.
pub fn stopped(server: &Server, choice: TransportChoice) {
    let mut holder = Holder::start(&server.address(), choice);
    let (_client, lock) = another(server, choice);
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

/// Whoever unlocks in the moment in which he goes on, before anything has told him
/// that his lease is over, hears it all the same.
pub fn stopped_at_work(server: &Server, choice: TransportChoice) {
    let mut holder = Holder::start_at_work(&server.address(), choice);
    let (_client, lock) = another(server, choice);
    holder.process.signal("STOP");
    let guard = lock.lock_timeout(LONG).unwrap().unwrap();
    holder.process.signal("CONT");
    assert_eq!(holder.hear(), "late");
    guard.check().unwrap();
    guard.unlock().unwrap();
}

/// A server whose lease is soon over.
pub fn short(server: farcell::ServerBuilder) -> Server {
    server.lease(Duration::from_secs(2)).start().unwrap()
}
