//! A counter is an i63 with the atomics of `std`, and its total is exact whoever
//! adds.

use crate::set::{LONG, Set, parked};
use farcell::{Client, Comparison, Counter, Error};
use std::time::Duration;

alone! { the_ends_of_the_range values_too_large_change_nothing waits_compare }
together! {
    every_operation_sees_the_one_before
    it_wraps_for_all
    the_total_is_exact
    a_wait_for_a_value_ends_whoever_counts
}

const MAX: i64 = i64::MAX >> 1;
const MIN: i64 = i64::MIN >> 1;

fn counter(client: &Client) -> Counter {
    client.counters("c", 2, 2).unwrap().at(1, 1).unwrap()
}

fn every_operation_sees_the_one_before(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let (c, d) = (counter(&a), counter(&b));
    for (c, d) in [(&c, &d), (&d, &c)] {
        c.store(0).unwrap();
        assert_eq!(d.load().unwrap(), 0);
        d.store(-3).unwrap();
        assert_eq!(c.fetch_add(10).unwrap(), -3);
        assert_eq!(d.compare_exchange(7, 8).unwrap(), Ok(7));
        assert_eq!(c.compare_exchange(7, 9).unwrap(), Err(8));
        assert_eq!(d.swap(0b1100).unwrap(), 8);
        assert_eq!(c.fetch_and(0b0110).unwrap(), 0b1100);
        assert_eq!(d.fetch_or(0b0011).unwrap(), 0b0100);
        assert_eq!(c.fetch_xor(-1).unwrap(), 0b0111);
        assert_eq!(d.load().unwrap(), !0b0111);
        assert_eq!(c.load().unwrap(), !0b0111);
    }
}

fn the_ends_of_the_range(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let c = counter(&client);
    for v in [MIN, MIN + 1, -1, 0, 1, MAX - 1, MAX] {
        c.store(v).unwrap();
        assert_eq!(c.load().unwrap(), v);
        assert_eq!(c.compare_exchange(v, v).unwrap(), Ok(v));
        assert_eq!(c.swap(v).unwrap(), v);
        assert_eq!(c.fetch_or(0).unwrap(), v);
    }
}

fn values_too_large_change_nothing(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let c = counter(&client);
    c.store(5).unwrap();
    for v in [MAX + 1, MIN - 1, i64::MAX, i64::MIN] {
        let too_large =
            |e: Error| assert!(matches!(e, Error::ValueTooLarge { value } if value == v), "{e}");
        too_large(c.store(v).unwrap_err());
        too_large(c.fetch_add(v).unwrap_err());
        too_large(c.swap(v).unwrap_err());
        too_large(c.fetch_xor(v).unwrap_err());
        too_large(c.compare_exchange(5, v).unwrap_err());
        too_large(c.compare_exchange(v, 5).unwrap_err());
        too_large(c.wait_until(Comparison::Eq, v, None, None).unwrap_err());
        assert!(client.batch().fetch_add(&c, 1).store(&c, v).run().is_err());
    }
    assert_eq!(c.load().unwrap(), 5, "nothing of it happened");
}

fn it_wraps_for_all(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let (c, d) = (counter(&a), counter(&b));
    c.store(MAX).unwrap();
    assert_eq!(d.fetch_add(1).unwrap(), MAX);
    assert_eq!(c.load().unwrap(), MIN);
    assert_eq!(c.fetch_add(-1).unwrap(), MIN);
    assert_eq!(d.load().unwrap(), MAX);
    assert_eq!(d.fetch_add(MAX).unwrap(), MAX);
    assert_eq!(c.fetch_add(MIN).unwrap(), -2);
    assert_eq!(d.load().unwrap(), MAX - 1);
    // The waiting bit is no part of it, on either side of the end.
    c.store(MAX).unwrap();
    std::thread::scope(|s| {
        let wait = s.spawn(|| d.wait_until(Comparison::Lt, 0, Some(LONG), None).unwrap());
        parked(&server, 1);
        assert_eq!(c.load().unwrap(), MAX);
        assert_eq!(c.fetch_add(1).unwrap(), MAX);
        assert_eq!(wait.join().unwrap(), Some(MIN));
    });
}

fn the_total_is_exact(set: &Set) {
    let each = set.times(1000) as i64;
    let server = set.server().workers(2).start().unwrap();
    std::thread::scope(|s| {
        for t in 0..8 {
            let server = &server;
            s.spawn(move || {
                let client = set.client(server, t);
                let c = client.counters("sum", 1, 2).unwrap();
                let (a, b) = (c.at(0, 0).unwrap(), c.at(0, 1).unwrap());
                for _ in 0..each {
                    a.fetch_add(3).unwrap();
                    let mut seen = b.load().unwrap();
                    while let Err(found) = b.compare_exchange(seen, seen + t as i64).unwrap() {
                        seen = found;
                    }
                }
            });
        }
    });
    let c = set.client(&server, 0).open_counters("sum").unwrap();
    assert_eq!(c.all().snapshot().unwrap(), [24 * each, 28 * each]);
}

fn waits_compare(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let c = counter(&client);
    let now = Some(Duration::ZERO);
    c.store(-5).unwrap();
    for (comparison, value, holds) in [
        (Comparison::Ne, -5, false),
        (Comparison::Ne, 5, true),
        (Comparison::Eq, -5, true),
        (Comparison::Gt, -6, true),
        (Comparison::Gt, -5, false),
        (Comparison::Ge, -5, true),
        (Comparison::Lt, 0, true),
        (Comparison::Lt, -5, false),
        (Comparison::Le, -5, true),
    ] {
        let found = c.wait_until(comparison, value, now, None).unwrap();
        assert_eq!(found, holds.then_some(-5), "{comparison:?} {value}");
    }
}

fn a_wait_for_a_value_ends_whoever_counts(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let (c, d) = (counter(&a), counter(&b));
    c.store(-5).unwrap();
    std::thread::scope(|s| {
        let wait = s.spawn(|| c.wait_until(Comparison::Ge, 100, Some(LONG), None).unwrap());
        parked(&server, 1);
        for _ in 0..21 {
            d.fetch_add(5).unwrap();
        }
        assert_eq!(wait.join().unwrap(), Some(100));
    });
    assert_eq!(d.fetch_add(0).unwrap(), 100, "no waiting bit got into the value");
}
