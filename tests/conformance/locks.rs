//! One holder at a time, in order of arrival, with tokens that only grow; whoever
//! ends without unlocking is told of.

use crate::set::{LONG, Set, eventually, parked};
use farcell::{Canceller, Client, Error, Lock};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

together! {
    a_lock_is_held_by_one_and_says_so
    who_queues_first_gets_it_first
    no_two_hold_it_from_many_threads_and_clients
    a_wait_for_a_lock_is_cancelled_and_the_next_gets_it
    a_holder_that_closes_leaves_its_lock_abandoned
    a_holder_that_is_released_leaves_it_as_if_unlocked
    a_removed_lock_says_so
}

fn lock(client: &Client) -> Lock {
    client.locks("l", 2, 2).unwrap().at(1, 0).unwrap()
}

fn a_lock_is_held_by_one_and_says_so(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let ours = lock(&a);
    let theirs = b.open_locks("l").unwrap().flat(2).unwrap();
    assert!(!ours.is_locked().unwrap());
    let guard = ours.lock().unwrap();
    assert_eq!((guard.token(), guard.was_abandoned()), (1, false));
    guard.check().unwrap();
    assert!(theirs.is_locked().unwrap());
    assert!(theirs.try_lock().unwrap().is_none());
    assert!(ours.try_lock().unwrap().is_none(), "it is not reentrant");
    assert!(a.open_locks("l").unwrap().at(0, 0).unwrap().try_lock().unwrap().is_some());
    let begun = Instant::now();
    assert!(theirs.lock_timeout(Duration::from_millis(120)).unwrap().is_none());
    assert!((110..10_000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    assert_eq!(server.parked_waits(), 0, "a wait that timed out leaves nothing behind");
    guard.unlock().unwrap();
    let guard = theirs.try_lock().unwrap().unwrap();
    assert_eq!(guard.token(), 2);
    drop(guard);
    assert_eq!(ours.lock().unwrap().token(), 3, "dropping a guard unlocks");
    assert_eq!(ours.token().unwrap(), 3);
}

fn who_queues_first_gets_it_first(set: &Set) {
    let server = set.start();
    let holder = set.client(&server, 0);
    let guard = lock(&holder).lock().unwrap();
    let order = Mutex::new(Vec::new());
    let most = set.times(12).max(4);
    thread::scope(|s| {
        for i in 0..most {
            let (server, order) = (&server, &order);
            s.spawn(move || {
                let client = set.client(server, i as usize + 1);
                let lock = lock(&client);
                let guard = lock.lock().unwrap();
                order.lock().unwrap().push((i, guard.token()));
                // A newcomer does not get past those who queue.
                if i < most - 1 {
                    assert!(lock.try_lock().unwrap().is_none());
                }
                guard.unlock().unwrap();
            });
            parked(server, i as usize + 1);
        }
        guard.unlock().unwrap();
    });
    let want: Vec<_> = (0..most).map(|i| (i, i + 2)).collect();
    assert_eq!(*order.lock().unwrap(), want);
    assert_eq!(server.parked_waits(), 0);
    assert!(!lock(&holder).is_locked().unwrap());
}

fn no_two_hold_it_from_many_threads_and_clients(set: &Set) {
    let rounds = set.times(150).max(10);
    let server = set.start();
    // A number in ordinary memory that only the lock protects, torn on purpose.
    let [low, high, last] = [0, 0, 0].map(AtomicU64::new);
    thread::scope(|s| {
        for n in 0..4 {
            let client = set.client(&server, n);
            for t in 0..3 {
                let (lock, low, high, last) = (lock(&client), &low, &high, &last);
                s.spawn(move || {
                    for i in 0..rounds {
                        let guard = match (i + t) % 3 {
                            0 => lock.lock_timeout(LONG).unwrap(),
                            1 => Some(lock.lock().unwrap()),
                            _ => match lock.try_lock().unwrap() {
                                None => Some(lock.lock().unwrap()),
                                guard => guard,
                            },
                        };
                        let guard = guard.expect("a minute is enough");
                        let before = low.load(Ordering::Relaxed);
                        thread::yield_now();
                        assert_eq!(before, high.load(Ordering::Relaxed), "someone else is in here");
                        low.store(before + 1, Ordering::Relaxed);
                        thread::yield_now();
                        high.store(before + 1, Ordering::Relaxed);
                        let token = guard.token();
                        assert!(last.swap(token, Ordering::Relaxed) < token, "it did not grow");
                        guard.unlock().unwrap();
                    }
                });
            }
        }
    });
    assert_eq!(low.into_inner(), 12 * rounds);
    assert_eq!(last.into_inner(), 12 * rounds, "each holder has one token");
    assert_eq!(server.parked_waits(), 0);
}

fn a_wait_for_a_lock_is_cancelled_and_the_next_gets_it(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let (ours, theirs) = (lock(&a), lock(&b));
    let guard = ours.lock().unwrap();
    let canceller = Canceller::new();
    thread::scope(|s| {
        let first = s.spawn(|| theirs.lock_with(None, Some(&canceller)));
        parked(&server, 1);
        let second = s.spawn(|| ours.lock().map(|guard| guard.token()));
        parked(&server, 2);
        canceller.cancel();
        assert!(matches!(first.join().unwrap(), Err(Error::Cancelled)));
        guard.unlock().unwrap();
        assert_eq!(second.join().unwrap().unwrap(), 2);
    });
    assert!(matches!(theirs.lock_with(None, Some(&canceller)), Err(Error::Cancelled)));
}

fn a_holder_that_closes_leaves_its_lock_abandoned(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let guard = lock(&a).lock().unwrap();
    let theirs = lock(&b);
    thread::scope(|s| {
        let waiter = s.spawn(|| theirs.lock().unwrap());
        parked(&server, 1);
        a.close();
        let got = waiter.join().unwrap();
        assert!(got.was_abandoned());
        assert_eq!(got.token(), 2);
        // It is told once.
        got.unlock().unwrap();
        assert!(!theirs.lock().unwrap().was_abandoned());
    });
    assert!(matches!(guard.unlock(), Err(Error::Closed)));
}

fn a_holder_that_is_released_leaves_it_as_if_unlocked(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let _guard = lock(&a).lock().unwrap();
    let theirs = lock(&b);
    thread::scope(|s| {
        let waiter = s.spawn(|| theirs.lock().unwrap());
        parked(&server, 1);
        a.release().unwrap();
        assert!(!waiter.join().unwrap().was_abandoned());
    });
    eventually("it has gone", || server.sessions() == 1);
}

fn a_removed_lock_says_so(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let theirs = lock(&b);
    let guard = lock(&a).lock().unwrap();
    thread::scope(|s| {
        let waiter = s.spawn(|| theirs.lock());
        parked(&server, 1);
        b.remove("l").unwrap();
        assert!(matches!(waiter.join().unwrap(), Err(Error::ArrayRemoved { .. })));
    });
    assert!(matches!(guard.unlock(), Err(Error::ArrayRemoved { .. })));
}
