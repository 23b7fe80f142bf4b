//! As many as a barrier has parties pass it together, again and again; one that
//! goes breaks it, with its name, and a reset makes it whole.

use crate::set::{LONG, Set, parked};
use farcell::{Barrier, BarrierWait, Canceller, Client, Error, WaitOptions};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

alone! { a_barrier_for_one_is_passed_at_once }
together! {
    nobody_is_ahead
    time_that_is_over_breaks_it_for_all_until_it_is_reset
    abort_reset_and_cancel_end_the_waits_of_others
    a_party_that_closes_breaks_it_by_name
}

fn barrier(client: &Client, parties: usize) -> Barrier {
    client.barriers("b", 2, 3, parties).unwrap().at(1, 2).unwrap()
}

/// Who broke it and why, as the error says.
fn breach(result: Result<BarrierWait, Error>) -> (Option<String>, String) {
    match result {
        Err(Error::BarrierBroken { name, row, col, by, why }) => {
            assert_eq!((name.as_str(), row, col), ("b", 1, 2));
            (by, why)
        }
        other => panic!("{other:?}"),
    }
}

fn nobody_is_ahead(set: &Set) {
    let server = set.start();
    let (parties, rounds) = (5, set.times(100).max(5));
    let arrived = AtomicU64::new(0);
    let seen = Mutex::new(vec![Vec::new(); rounds as usize]);
    thread::scope(|s| {
        for i in 0..parties {
            let (server, arrived, seen) = (&server, &arrived, &seen);
            s.spawn(move || {
                let client = set.client(server, i);
                let barrier = barrier(&client, parties);
                assert_eq!(barrier.parties(), parties);
                for round in 0..rounds {
                    arrived.fetch_add(1, Ordering::Relaxed);
                    let passed = barrier.wait().unwrap();
                    let here = arrived.load(Ordering::Relaxed);
                    assert!(here >= (round + 1) * parties as u64, "somebody was left behind");
                    assert_eq!(passed.generation(), round);
                    assert_eq!(passed.is_last(), passed.index() == parties - 1);
                    seen.lock().unwrap()[round as usize].push(passed.index());
                }
                client.release().unwrap();
            });
        }
    });
    for mut indices in seen.into_inner().unwrap() {
        indices.sort_unstable();
        assert_eq!(indices, (0..parties).collect::<Vec<_>>());
    }
}

fn a_barrier_for_one_is_passed_at_once(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let barrier = barrier(&client, 1);
    for generation in 0..3 {
        let passed = barrier.wait().unwrap();
        assert_eq!((passed.index(), passed.generation(), passed.is_last()), (0, generation, true));
    }
    for bad in [0, 1 << 32] {
        assert!(matches!(client.barriers("x", 1, 1, bad), Err(Error::BadSetting { .. })));
    }
    let error = client.barriers("b", 2, 3, 2).unwrap_err();
    assert!(error.to_string().contains("barrier 2 x 3 for 1 parties"), "{error}");
}

fn time_that_is_over_breaks_it_for_all_until_it_is_reset(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let (ours, theirs) = (barrier(&a, 3), barrier(&b, 3));
    thread::scope(|s| {
        let other = s.spawn(|| theirs.wait());
        parked(&server, 1);
        assert_eq!(ours.n_waiting().unwrap(), 1);
        let (by, why) = breach(ours.wait_timeout(Duration::from_millis(100)));
        assert_eq!((by, why.as_str()), (None, "a party did not wait any longer"));
        assert_eq!(breach(other.join().unwrap()).0, None);
    });
    assert!(ours.is_broken().unwrap());
    breach(theirs.wait());
    theirs.reset().unwrap();
    assert!(!ours.is_broken().unwrap());
    thread::scope(|s| {
        for barrier in [&ours, &ours, &theirs] {
            s.spawn(|| assert_eq!(barrier.wait_timeout(LONG).unwrap().generation(), 0));
        }
    });
}

fn abort_reset_and_cancel_end_the_waits_of_others(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let (ours, theirs) = (barrier(&a, 2), barrier(&b, 2));
    let waiting = |what: &dyn Fn()| {
        thread::scope(|s| {
            let other = s.spawn(|| theirs.wait());
            parked(&server, 1);
            what();
            breach(other.join().unwrap()).1
        })
    };
    let why = waiting(&|| ours.abort().unwrap());
    assert!(why.contains("aborted"), "{why}");
    ours.reset().unwrap();
    let why = waiting(&|| ours.reset().unwrap());
    assert!(why.contains("was reset"), "{why}");
    assert!(!ours.is_broken().unwrap());
    let canceller = Canceller::new();
    let options = WaitOptions::new().cancel(&canceller);
    thread::scope(|s| {
        let other = s.spawn(|| theirs.wait_with_options(&options));
        parked(&server, 1);
        canceller.cancel();
        assert!(matches!(other.join().unwrap(), Err(Error::Cancelled)));
    });
    assert!(ours.is_broken().unwrap(), "the others must not wait for one that has gone");
}

fn a_party_that_closes_breaks_it_by_name(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    b.join("rank 1").unwrap();
    let (ours, theirs) = (barrier(&a, 2), barrier(&b, 2));
    thread::scope(|s| {
        s.spawn(|| theirs.wait().unwrap());
        ours.wait().unwrap();
    });
    thread::scope(|s| {
        let waits = s.spawn(|| ours.wait_timeout(LONG));
        parked(&server, 1);
        b.close();
        assert_eq!(breach(waits.join().unwrap()).0.as_deref(), Some("rank 1"));
    });
    assert_eq!(breach(ours.wait()).0.as_deref(), Some("rank 1"), "also for those who come");
}
