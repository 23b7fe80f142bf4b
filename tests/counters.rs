//! Promise: a counter is an i63 with the atomics of `std`, and its total is
//! exact whoever adds.

mod common;
use common::{client, eventually, server};
use farcell::{Comparison, Error};
use std::time::Duration;

const MAX: i64 = i64::MAX >> 1;
const MIN: i64 = i64::MIN >> 1;

#[test]
fn every_operation() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let c = client.counters("c", 2, 2).unwrap().at(1, 1).unwrap();
    assert_eq!(c.load().unwrap(), 0);
    c.store(-3).unwrap();
    assert_eq!(c.fetch_add(10).unwrap(), -3);
    assert_eq!(c.compare_exchange(7, 8).unwrap(), Ok(7));
    assert_eq!(c.compare_exchange(7, 9).unwrap(), Err(8));
    assert_eq!(c.swap(0b1100).unwrap(), 8);
    assert_eq!(c.fetch_and(0b0110).unwrap(), 0b1100);
    assert_eq!(c.fetch_or(0b0011).unwrap(), 0b0100);
    assert_eq!(c.fetch_xor(-1).unwrap(), 0b0111);
    assert_eq!(c.load().unwrap(), !0b0111);
}

#[test]
fn the_ends_of_the_range() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let c = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    for v in [MIN, MIN + 1, -1, 0, 1, MAX - 1, MAX] {
        c.store(v).unwrap();
        assert_eq!(c.load().unwrap(), v);
    }
    assert_eq!(c.fetch_add(1).unwrap(), MAX);
    assert_eq!(c.load().unwrap(), MIN, "it wraps");
    for v in [MAX + 1, MIN - 1, i64::MAX, i64::MIN] {
        assert!(matches!(c.store(v), Err(Error::ValueTooLarge { value }) if value == v));
        assert!(matches!(c.fetch_add(v), Err(Error::ValueTooLarge { .. })));
        assert!(matches!(c.compare_exchange(0, v), Err(Error::ValueTooLarge { .. })));
        assert!(matches!(
            c.wait_until(Comparison::Eq, v, None, None),
            Err(Error::ValueTooLarge { .. })
        ));
        assert!(client.batch().store(&c, v).run().is_err());
    }
    assert_eq!(c.load().unwrap(), MIN, "nothing of it happened");
}

#[test]
fn the_total_is_exact() {
    let server = server().workers(2).start().unwrap();
    std::thread::scope(|s| {
        for t in 0..8 {
            let server = &server;
            s.spawn(move || {
                let client = client(server).connect().unwrap();
                let c = client.counters("sum", 1, 2).unwrap();
                let (a, b) = (c.at(0, 0).unwrap(), c.at(0, 1).unwrap());
                for _ in 0..1000 {
                    a.fetch_add(3).unwrap();
                    let mut seen = b.load().unwrap();
                    while let Err(found) = b.compare_exchange(seen, seen + t).unwrap() {
                        seen = found;
                    }
                }
            });
        }
    });
    let client = client(&server).connect().unwrap();
    let c = client.open_counters("sum").unwrap();
    assert_eq!(c.all().snapshot().unwrap(), [24_000, 28_000]);
}

#[test]
fn waits_compare() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let c = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
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
    std::thread::scope(|s| {
        let wait = s.spawn(|| c.wait_until(Comparison::Ge, 100, None, None).unwrap());
        eventually("it is parked", || server.parked_waits() == 1);
        for _ in 0..21 {
            c.fetch_add(5).unwrap();
        }
        assert_eq!(wait.join().unwrap(), Some(100));
    });
    assert_eq!(c.fetch_add(0).unwrap(), 100, "no waiting bit got into the value");
}
