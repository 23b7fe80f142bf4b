//! Promise: on the server's machine a lock that nobody wants, a permit that is
//! there and an arrival at a barrier need no server, nor does the way of those
//! who wait at a barrier; whoever queues gets his turn as over TCP, and whoever
//! dies is missed as over TCP.

mod common;
use common::another::{Speaker, role};
use common::rdma::{LONG, ServerProcess, eventually, over_at};
use common::sync::{alone, hold_if_asked, killed, mixed, short, stopped, stopped_at_work};
use common::{client, key, server};
use farcell::{Barrier, Client, Error, Key, TransportChoice};
use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::{Duration, Instant};

const PARTY: &str = "FARCELL_TEST_PARTY";
const PARTIES: usize = 3;
const ROUNDS: u64 = 200;

/// In the process that the tests start: a server. Otherwise nothing.
#[test]
#[ignore = "only a process of the tests"]
fn role_of_the_server() {
    common::rdma::serve_if_asked();
}

/// In the process that the tests start: one that holds a lock in memory until it
/// is told to go on.
#[test]
#[ignore = "only a process of the tests"]
fn role_of_the_holder() {
    hold_if_asked();
}

/// In the process that the tests start: a party of a barrier.
#[test]
#[ignore = "only a process of the tests"]
fn role_of_a_party() {
    let Ok(addr) = std::env::var(PARTY) else { return };
    let client = over_at(&addr, TransportChoice::Shm);
    let barrier = barrier(&client);
    barrier.wait().unwrap();
    println!("#met");
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
    for round in 1..=ROUNDS {
        assert_eq!(barrier.wait().unwrap().generation(), round);
    }
    println!("#through");
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

fn barrier(client: &Client) -> Barrier {
    client.barriers("b", 1, 1, PARTIES).unwrap().at(0, 0).unwrap()
}

#[test]
fn what_nobody_else_wants_needs_no_server() {
    alone(&ServerProcess::without_rdma(), TransportChoice::Shm);
}

#[test]
fn processes_pass_a_barrier_together_without_the_server() {
    let server = ServerProcess::without_rdma();
    let client = over_at(&server.addr, TransportChoice::Shm);
    let ours = barrier(&client);
    let mut others: Vec<Speaker> = (1..PARTIES)
        .map(|_| {
            let mut command = role("role_of_a_party", PARTY, &server.addr);
            Speaker::start(command.stdin(Stdio::piped()))
        })
        .collect();
    // Once with the server, which is told who takes part.
    ours.wait().unwrap();
    others.iter_mut().for_each(|other| other.says("#met"));
    server.signal("STOP");
    eventually("the server has stopped", || server.is_stopped());
    for other in &mut others {
        other.process.0.stdin.as_mut().unwrap().write_all(b"go on\n").unwrap();
    }
    let begun = Instant::now();
    for round in 1..=ROUNDS {
        let passed = ours.wait_timeout(LONG).unwrap();
        assert_eq!(passed.generation(), round);
    }
    println!("{ROUNDS} rounds of {PARTIES} processes took {:?}", begun.elapsed());
    others.iter_mut().for_each(|other| other.says("#through"));
    server.signal("CONT");
    others.iter_mut().for_each(|other| other.process.end());
}

#[test]
fn those_who_wait_get_their_turn_over_both_transports() {
    let (shm, tcp) = (TransportChoice::Shm, TransportChoice::Tcp);
    mixed(&server().start().unwrap(), [shm, shm, tcp], 300);
    mixed(&server().start().unwrap(), [shm, tcp, tcp], 300);
}

#[test]
fn a_holder_that_is_killed_is_missed_and_its_lock_comes_free() {
    killed(&short(server()), TransportChoice::Shm);
}

#[test]
fn a_holder_that_was_stopped_past_its_lease_changes_nothing() {
    stopped(&short(server()), TransportChoice::Shm);
    // It depends on which thread of his goes on first.
    for _ in 0..3 {
        stopped_at_work(&short(server()), TransportChoice::Shm);
    }
}

/// A party whose lease is over while it is stopped comes back as one that is new,
/// once, also where the barrier was made whole again meanwhile.
#[test]
fn a_party_that_was_stopped_past_its_lease_comes_once() {
    let server = server().lease(Duration::from_secs(1)).start().unwrap();
    let client = over_at(&server.address(), TransportChoice::Shm);
    let ours = client.barriers("b", 1, 1, 2).unwrap().at(0, 0).unwrap();
    let mut command = role("role_of_a_late_party", PARTY, server.address());
    let mut other = Speaker::start(command.stdin(Stdio::piped()));
    ours.wait().unwrap();
    other.says("#met");
    other.process.signal("STOP");
    eventually("the barrier is broken", || ours.is_broken().unwrap());
    ours.reset().unwrap();
    // It arrives before it can hear anything.
    other.process.0.stdin.as_mut().unwrap().write_all(b"go on\n").unwrap();
    other.process.signal("CONT");
    let passed = ours.wait_timeout(LONG).unwrap();
    assert_eq!(passed.generation(), 0, "since the reset");
    other.says("#passed");
    assert_eq!(ours.n_waiting().unwrap(), 0, "it has come twice");
    // It is missed in its new session, too.
    other.process.kill();
    eventually("the barrier is broken", || ours.is_broken().unwrap());
}

/// In the process that the test above starts.
#[test]
#[ignore = "only a process of the tests"]
fn role_of_a_late_party() {
    let Ok(addr) = std::env::var(PARTY) else { return };
    let client = over_at(&addr, TransportChoice::Shm);
    let barrier = client.barriers("b", 1, 1, 2).unwrap().at(0, 0).unwrap();
    barrier.wait().unwrap();
    println!("#met");
    let mut input = BufReader::new(std::io::stdin());
    input.read_line(&mut String::new()).unwrap();
    barrier.wait_timeout(LONG).unwrap();
    println!("#passed");
    input.read_line(&mut String::new()).unwrap();
}

#[test]
fn who_may_read_only_is_refused() {
    let reader = Key::new(*b"a key to read with").unwrap();
    let server = server().read_only_key(reader.clone()).start().unwrap();
    let owner = over_at(&server.address(), TransportChoice::Shm);
    let held = owner.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let whole = owner.barriers("b", 1, 1, 1).unwrap().at(0, 0).unwrap();
    let full = owner.semaphores("s", 1, 1, 1, 1).unwrap().at(0, 0).unwrap();
    let guard = held.lock().unwrap();
    let client = Client::builder().addr(server.address()).key(reader);
    let client = client.transport(TransportChoice::Shm).connect().unwrap();
    let lock = client.open_locks("l").unwrap().at(0, 0).unwrap();
    let barrier = client.open_barriers("b").unwrap().at(0, 0).unwrap();
    let semaphore = client.open_semaphores("s").unwrap().at(0, 0).unwrap();
    assert!(lock.is_locked().unwrap());
    assert_eq!((lock.token().unwrap(), semaphore.available().unwrap()), (1, 1));
    let refused = |e: Error| assert!(matches!(e, Error::ReadOnly { .. }), "{e}");
    guard.unlock().unwrap();
    refused(lock.lock().unwrap_err());
    refused(lock.try_lock().unwrap_err());
    refused(barrier.wait().unwrap_err());
    refused(barrier.abort().unwrap_err());
    refused(barrier.reset().unwrap_err());
    refused(semaphore.acquire().unwrap_err());
    refused(semaphore.release().unwrap_err());
    assert_eq!(lock.token().unwrap(), 1, "it has taken nothing");
    assert!(!whole.is_broken().unwrap());
    full.acquire().unwrap();
}

#[test]
fn what_was_opened_goes_on_with_a_server_that_begins_anew() {
    let first = server().start().unwrap();
    let addr = first.address();
    let client = Client::builder().addr(&addr).key(key()).transport(TransportChoice::Shm);
    let client = client.wait_for_server(LONG).connect().unwrap();
    let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let semaphore = client.semaphores("s", 1, 1, 1, 1).unwrap().at(0, 0).unwrap();
    let barrier = client.barriers("b", 1, 1, 1).unwrap().at(0, 0).unwrap();
    let guard = lock.lock().unwrap();
    semaphore.acquire().unwrap();
    barrier.wait().unwrap();
    drop(first);
    let _second = server().bind(&addr).start().unwrap();
    eventually("it is back", || client.transport().name == "shm");
    let error = guard.unlock().unwrap_err();
    assert!(matches!(error, Error::LeaseLost { .. }), "{error}");
    // Another memory, with nothing taken.
    assert_eq!(lock.lock().unwrap().token(), 1);
    semaphore.acquire().unwrap();
    assert_eq!(barrier.wait().unwrap().generation(), 0);
}

#[test]
fn many_threads_share_a_client_and_its_locks() {
    let server = server().start().unwrap();
    let client = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    let mut counted = 0u64;
    let cell = std::sync::Mutex::new(&mut counted);
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
                for _ in 0..500 {
                    let guard = lock.lock().unwrap();
                    **cell.try_lock().expect("nobody else is in here") += 1;
                    guard.unlock().unwrap();
                }
            });
        }
    });
    assert_eq!(counted, 2000);
}
