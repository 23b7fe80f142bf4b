//! Promise: no more permits are out than there are, they go out in order of
//! arrival, and none comes back twice.

mod common;
use common::proxy::{Cut, Proxy};
use common::{client, eventually, key, server};
use farcell::{Canceller, Client, Error, TransportChoice};
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::Duration;

/// Many take and give back, and never more than three at once.
fn contend(connect: impl Fn() -> Client + Sync, rounds: usize) {
    let inside = AtomicI64::new(0);
    thread::scope(|s| {
        for _ in 0..4 {
            let client = connect();
            for _ in 0..2 {
                let (client, inside) = (client.clone(), &inside);
                s.spawn(move || {
                    let semaphore = client.semaphores("s", 1, 1, 3, 3).unwrap().at(0, 0).unwrap();
                    for i in 0..rounds {
                        if i % 3 != 0 || !semaphore.try_acquire().unwrap() {
                            semaphore.acquire().unwrap();
                        }
                        assert!(inside.fetch_add(1, Ordering::SeqCst) < 3);
                        thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        semaphore.release().unwrap();
                    }
                });
            }
        }
    });
}

#[test]
fn none_is_lost_or_doubled_while_connections_are_cut() {
    let server = server().start().unwrap();
    let cuts = (1..80).map(|i| {
        if i % 2 == 0 { Cut::Up(211 * i % 3001 + 150) } else { Cut::Down(307 * i % 3001 + 150) }
    });
    let proxy = Proxy::start(server.local_addrs()[0], cuts.collect());
    let through = || {
        let builder = Client::builder().addr(proxy.addr()).key(key());
        let builder = builder.transport(TransportChoice::Tcp);
        builder.wait_for_server(Duration::from_secs(10)).connect().unwrap()
    };
    contend(through, 40);
    assert!(proxy.connections() > 10, "{} connections", proxy.connections());
    let last = client(&server).connect().unwrap();
    let semaphore = last.open_semaphores("s").unwrap().at(0, 0).unwrap();
    assert_eq!(semaphore.available().unwrap(), 3);
}

#[test]
fn what_is_granted_to_one_that_gave_up_goes_to_the_next() {
    let server = server().start().unwrap();
    let a = client(&server).connect().unwrap();
    let semaphore = a.semaphores("s", 1, 1, 1, 1).unwrap().at(0, 0).unwrap();
    for i in 0..100u64 {
        semaphore.acquire().unwrap();
        let canceller = Canceller::new();
        thread::scope(|s| {
            let waiter = s.spawn(|| {
                let b = client(&server).connect().unwrap();
                let semaphore = b.open_semaphores("s").unwrap().at(0, 0).unwrap();
                match semaphore.acquire_with(None, Some(&canceller)) {
                    Ok(true) => semaphore.release().unwrap(),
                    Err(Error::Cancelled) => {}
                    other => panic!("{other:?}"),
                }
            });
            if i % 4 != 0 {
                eventually("it queues", || server.parked_waits() == 1 || waiter.is_finished());
            }
            // Both at once, in no particular order.
            s.spawn(|| canceller.cancel());
            semaphore.release().unwrap();
        });
        assert_eq!(semaphore.available().unwrap(), 1, "round {i}");
    }
}

#[test]
fn a_permit_that_never_arrived_comes_back() {
    let server = server().lease(Duration::from_millis(300)).start().unwrap();
    let proxy = Proxy::start(server.local_addrs()[0], Vec::new());
    let away = Client::builder().addr(proxy.addr()).key(key()).connect().unwrap();
    let owner = client(&server).connect().unwrap();
    let semaphore = owner.semaphores("s", 1, 1, 1, 1).unwrap().at(0, 0).unwrap();
    let theirs = away.semaphores("s", 1, 1, 1, 1).unwrap().at(0, 0).unwrap();
    semaphore.acquire().unwrap();
    thread::scope(|s| {
        let waiter = s.spawn(|| theirs.acquire_timeout(Duration::from_secs(20)));
        eventually("it queues", || server.parked_waits() == 1);
        proxy.hold(true);
        // Granted, and the answer does not get through.
        semaphore.release().unwrap();
        // In shared memory the server hears of it a moment later.
        eventually("it is granted", || semaphore.available().unwrap() == 0);
        eventually("it is given back", || semaphore.available().unwrap() == 1);
        proxy.hold(false);
        // The answer arrives late, or it asks again; either way the count and
        // what it says are one.
        match waiter.join().unwrap() {
            Ok(got) => assert_eq!(semaphore.available().unwrap(), u32::from(!got)),
            Err(error) => {
                assert!(matches!(error, Error::OutcomeUnknown { .. }), "{error}");
                assert_eq!(semaphore.available().unwrap(), 1);
            }
        }
    });
}
