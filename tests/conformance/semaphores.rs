//! No more permits are out than there are, they go out in order of arrival, and
//! none comes back twice.

use crate::set::{LONG, Set, eventually, parked};
use farcell::{Client, Error, Semaphore};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

together! {
    permits_are_taken_and_given_back_within_their_bound
    who_queues_first_gets_one_first_also_when_many_come_back
    never_are_more_out_than_there_are
}

fn semaphore(client: &Client, initial: u32, bound: u32) -> Semaphore {
    client.semaphores("s", 1, 2, initial, bound).unwrap().at(0, 1).unwrap()
}

fn permits_are_taken_and_given_back_within_their_bound(set: &Set) {
    let server = set.start();
    let (client, other) = set.two(&server);
    let (semaphore, theirs) = (semaphore(&client, 2, 3), semaphore(&other, 2, 3));
    assert_eq!((semaphore.available().unwrap(), semaphore.bound()), (2, 3));
    semaphore.acquire().unwrap();
    assert!(theirs.try_acquire().unwrap());
    assert!(!semaphore.try_acquire().unwrap());
    let begun = Instant::now();
    assert!(!theirs.acquire_timeout(Duration::from_millis(120)).unwrap());
    assert!((110..10_000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    assert_eq!(server.parked_waits(), 0);
    theirs.release_many(3).unwrap();
    let error = semaphore.release().unwrap_err();
    assert!(matches!(error, Error::TooManyPermits { bound: 3, count: 1, .. }), "{error}");
    semaphore.acquire().unwrap();
    assert!(matches!(theirs.release_many(2), Err(Error::TooManyPermits { .. })));
    assert!(matches!(semaphore.release_many(u32::MAX), Err(Error::TooManyPermits { .. })));
    semaphore.release_many(0).unwrap();
    assert_eq!(theirs.available().unwrap(), 2);
    assert_eq!(client.open_semaphores("s").unwrap().at(0, 0).unwrap().available().unwrap(), 2);
    for (initial, bound) in [(1, 0), (4, 3), (0, 1 << 31)] {
        let bad = client.semaphores("x", 1, 1, initial, bound);
        assert!(matches!(bad, Err(Error::BadSetting { .. })), "{initial} of {bound}");
    }
    let error = other.semaphores("s", 1, 2, 1, 3).unwrap_err();
    assert!(error.to_string().contains("with 2 of 3 permits"), "{error}");
}

fn who_queues_first_gets_one_first_also_when_many_come_back(set: &Set) {
    let server = set.start();
    let owner = set.client(&server, 0);
    let ours = semaphore(&owner, 0, 100);
    let order = Mutex::new(Vec::new());
    thread::scope(|s| {
        for i in 0..9 {
            let (server, order) = (&server, &order);
            s.spawn(move || {
                let client = set.client(server, i + 1);
                semaphore(&client, 0, 100).acquire().unwrap();
                order.lock().unwrap().push(i);
            });
            parked(server, i + 1);
        }
        for done in 1..=3 {
            ours.release().unwrap();
            eventually("one got it", || order.lock().unwrap().len() == done);
        }
        ours.release_many(8).unwrap();
    });
    let order = order.into_inner().unwrap();
    assert_eq!(order[..3], [0, 1, 2]);
    assert_eq!(order.len(), 9);
    assert_eq!(ours.available().unwrap(), 2);
}

fn never_are_more_out_than_there_are(set: &Set) {
    let rounds = set.times(100).max(10);
    let server = set.start();
    let inside = AtomicI64::new(0);
    thread::scope(|s| {
        for i in 0..4 {
            let client = set.client(&server, i);
            for _ in 0..2 {
                let (semaphore, inside) = (semaphore(&client, 3, 3), &inside);
                s.spawn(move || {
                    for i in 0..rounds {
                        if i % 3 != 0 || !semaphore.try_acquire().unwrap() {
                            assert!(semaphore.acquire_timeout(LONG).unwrap());
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
    assert_eq!(semaphore(&set.client(&server, 0), 3, 3).available().unwrap(), 3);
    assert_eq!(server.parked_waits(), 0);
}
