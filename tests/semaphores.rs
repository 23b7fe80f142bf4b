//! Promise: no more permits are out than there are, they go out in order of
//! arrival, and none comes back twice.

mod common;
use common::proxy::{Cut, Proxy};
use common::{client, eventually, key, server};
use farcell::{Canceller, Client, Error};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn permits_are_taken_and_given_back_within_their_bound() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let semaphore = client.semaphores("s", 1, 2, 2, 3).unwrap().at(0, 1).unwrap();
    assert_eq!((semaphore.available().unwrap(), semaphore.bound()), (2, 3));
    semaphore.acquire().unwrap();
    assert!(semaphore.try_acquire().unwrap());
    assert!(!semaphore.try_acquire().unwrap());
    let begun = Instant::now();
    assert!(!semaphore.acquire_timeout(Duration::from_millis(120)).unwrap());
    assert!((110..2000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    assert_eq!(server.parked_waits(), 0);
    semaphore.release_many(3).unwrap();
    let error = semaphore.release().unwrap_err();
    assert!(matches!(error, Error::TooManyPermits { bound: 3, count: 1, .. }), "{error}");
    semaphore.acquire().unwrap();
    assert!(matches!(semaphore.release_many(2), Err(Error::TooManyPermits { .. })));
    assert!(matches!(semaphore.release_many(u32::MAX), Err(Error::TooManyPermits { .. })));
    semaphore.release_many(0).unwrap();
    assert_eq!(semaphore.available().unwrap(), 2);
    assert_eq!(client.open_semaphores("s").unwrap().at(0, 0).unwrap().available().unwrap(), 2);
    for (initial, bound) in [(1, 0), (4, 3), (0, 1 << 31)] {
        let bad = client.semaphores("x", 1, 1, initial, bound);
        assert!(matches!(bad, Err(Error::BadSetting { .. })), "{initial} of {bound}");
    }
    let error = client.semaphores("s", 1, 2, 1, 3).unwrap_err();
    assert!(error.to_string().contains("with 2 of 3 permits"), "{error}");
}

#[test]
fn who_queues_first_gets_one_first_also_when_many_come_back() {
    let server = server().start().unwrap();
    let owner = client(&server).connect().unwrap();
    let semaphore = owner.semaphores("s", 1, 1, 0, 100).unwrap().at(0, 0).unwrap();
    let order = Mutex::new(Vec::new());
    thread::scope(|s| {
        for i in 0..9 {
            let (server, order) = (&server, &order);
            s.spawn(move || {
                let client = client(server).connect().unwrap();
                let semaphore = client.open_semaphores("s").unwrap().at(0, 0).unwrap();
                semaphore.acquire().unwrap();
                order.lock().unwrap().push(i);
            });
            eventually("it queues", || server.parked_waits() == i + 1);
        }
        for done in 1..=3 {
            semaphore.release().unwrap();
            eventually("one got it", || order.lock().unwrap().len() == done);
        }
        semaphore.release_many(8).unwrap();
    });
    let order = order.into_inner().unwrap();
    assert_eq!(order[..3], [0, 1, 2]);
    assert_eq!(order.len(), 9);
    assert_eq!(semaphore.available().unwrap(), 2);
}

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
fn never_are_more_out_than_there_are() {
    let server = server().start().unwrap();
    contend(|| client(&server).connect().unwrap(), 100);
    let last = client(&server).connect().unwrap();
    let semaphore = last.open_semaphores("s").unwrap().at(0, 0).unwrap();
    assert_eq!(semaphore.available().unwrap(), 3);
    assert_eq!(server.parked_waits(), 0);
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
