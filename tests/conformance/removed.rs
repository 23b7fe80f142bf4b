//! Whoever holds a handle to a removed array gets an error from everything that he
//! does with it, and no cell of another array is touched.

use crate::set::{LONG, Set, parked};
use farcell::{Client, Comparison, CounterArray, Error, EventArray, Result};

together! {
    everything_says_so_and_reaches_nothing
    waits_end
    values_that_look_like_it_are_values
    an_old_handle_never_reaches_another_array
    a_removal_amid_operations
}

/// What the cells of removed arrays hold, less the waiting bit. That it is this
/// very number is no promise.
const TOMBSTONE: i64 = -(1 << 62) + (3 << 40);

/// What each operation on these arrays comes to.
fn everything(
    client: &Client,
    e: &EventArray,
    c: &CounterArray,
) -> Vec<(&'static str, Result<()>)> {
    let mut all = Vec::new();
    // One cell that this client has used before, and one that it has not.
    for (row, col) in [(0, 0), (1, 2)] {
        let (event, counter) = (e.at(row, col).unwrap(), c.at(row, col).unwrap());
        let mut one = |name, result: Result<()>| all.push((name, result));
        one("is_set", event.is_set().map(drop));
        one("set", event.set().map(drop));
        one("wait", event.wait_timeout(LONG).map(drop));
        one("clear", event.clear().map(drop));
        one("take", event.take().map(drop));
        one("transitions", event.transitions().map(drop));
        one("load", counter.load().map(drop));
        one("store", counter.store(5));
        one("fetch_add", counter.fetch_add(1).map(drop));
        one("fetch_add of much", counter.fetch_add(1 << 55).map(drop));
        one("compare_exchange", counter.compare_exchange(0, 1).map(drop));
        one("compare_exchange, as it is", counter.compare_exchange(TOMBSTONE, 1).map(drop));
        one("swap", counter.swap(3).map(drop));
        one("fetch_and", counter.fetch_and(3).map(drop));
        one("fetch_or", counter.fetch_or(3).map(drop));
        one("fetch_xor", counter.fetch_xor(3).map(drop));
        one("wait_until", counter.wait_until(Comparison::Ne, 99, Some(LONG), None).map(drop));
        let batched = |fill: &dyn Fn(&mut farcell::Batch) -> usize| {
            let mut batch = client.batch();
            fill(&mut batch);
            batch.run().map(drop)
        };
        one("a batch of one", batched(&|b| b.take(&event).len()));
        one("a batch of loads", batched(&|b| b.load(&counter).is_set(&event).len()));
        one("a batch of adds", batched(&|b| b.fetch_add(&counter, 1).load(&counter).len()));
        one("a batch of all", batched(&|b| b.set(&event).fetch_add(&counter, 1).len()));
    }
    let mut one = |name, result: Result<()>| all.push((name, result));
    one("snapshot of events", e.snapshot().map(drop));
    one("snapshot of a column", e.column(1).unwrap().snapshot().map(drop));
    one("set_all", e.set_all().map(drop));
    one("clear_all", e.row(1).unwrap().clear_all().map(drop));
    one("waiters", e.all().waiters().map(drop));
    one("snapshot of counters", c.all().snapshot().map(drop));
    all
}

fn all_are_removed(client: &Client, e: &EventArray, c: &CounterArray) -> Vec<String> {
    let mut texts = Vec::new();
    for (name, result) in everything(client, e, c) {
        match result {
            Err(error @ Error::ArrayRemoved { .. }) => texts.push(format!("{name}: {error}")),
            other => panic!("{name}: {other:?}, transport {:?}", client.transport()),
        }
    }
    texts
}

fn everything_says_so_and_reaches_nothing(set: &Set) {
    let domains = [set.server(), set.server().cpu_domain()];
    for server in domains {
        let server = server.start().unwrap();
        let remover = set.client(&server, 1);
        let clients = set.some(&server);
        let holders: Vec<_> = clients
            .iter()
            .map(|client| {
                let (e, c) =
                    (client.events("e", 2, 3).unwrap(), client.counters("c", 2, 3).unwrap());
                e.at(0, 0).unwrap().set().unwrap();
                e.at(0, 0).unwrap().clear().unwrap();
                c.at(0, 0).unwrap().store(4).unwrap();
                (client.clone(), e, c)
            })
            .collect();
        drop(clients);
        for (client, e, c) in &holders {
            assert!(everything(client, e, c).iter().all(|(_, result)| result.is_ok()));
        }
        remover.remove("e").unwrap();
        remover.remove("c").unwrap();
        let removed: Vec<_> = holders.iter().map(|(cl, e, c)| all_are_removed(cl, e, c)).collect();
        assert!(removed.iter().all(|texts| *texts == removed[0]), "all transports say the same");

        // The names once more, for arrays of another kind and shape.
        let c = remover.counters("e", 3, 40).unwrap();
        let e = remover.events("c", 9, 9).unwrap();
        for _ in 0..3 {
            for (client, e, c) in &holders {
                all_are_removed(client, e, c);
            }
        }
        assert!(c.all().snapshot().unwrap().iter().all(|&value| value == 0));
        assert!(e.all().transitions().unwrap().iter().all(|&n| n == 0));
        let error = holders[0].0.events("e", 2, 3).unwrap_err();
        assert!(matches!(error, Error::ArrayMismatch { .. }), "{error}");

        // Those who hold on to what is gone can use what is there now.
        for (i, (client, ..)) in holders.iter().enumerate() {
            let c = client.counters("e", 3, 40).unwrap().at(2, 39).unwrap();
            assert_eq!(c.fetch_add(1).unwrap(), i as i64);
        }
        drop(holders);
        // Nobody holds the cells any more: they can be had, and are clear.
        let free = remover.info().unwrap().largest_free;
        let big = remover.counters("big", 1, free as usize).unwrap();
        assert!(big.all().snapshot().unwrap().iter().all(|&value| value == 0));
    }
}

/// A wait that is parked when the array goes, on one cell and on all of them.
fn waits_end(set: &Set) {
    let server = set.start();
    let (waiter, remover) = set.two(&server);
    let e = waiter.events("w", 1, 2).unwrap();
    std::thread::scope(|s| {
        let one = s.spawn(|| e.at(0, 1).unwrap().wait());
        let all = s.spawn(|| e.all().wait_all(None));
        parked(&server, 2);
        remover.remove("w").unwrap();
        assert!(matches!(one.join().unwrap(), Err(Error::ArrayRemoved { .. })));
        assert!(matches!(all.join().unwrap(), Err(Error::ArrayRemoved { .. })));
    });
    for col in 0..2 {
        assert!(matches!(e.at(0, col).unwrap().set(), Err(Error::ArrayRemoved { .. })));
    }
    // The same array again is a new one.
    assert!(!waiter.events("w", 1, 2).unwrap().at(0, 1).unwrap().is_set().unwrap());
}

/// Counters that hold what tombstones hold are counters all the same.
fn values_that_look_like_it_are_values(set: &Set) {
    let server = set.start();
    let (client, other) = set.two(&server);
    let (c, theirs) = (client.counters("odd", 1, 2).unwrap(), other.counters("odd", 1, 2).unwrap());
    let (counter, theirs) = (c.at(0, 1).unwrap(), theirs.at(0, 1).unwrap());
    let (least, most) = (-(1i64 << 62), (1i64 << 62) - 1);
    for value in [least, most, TOMBSTONE, TOMBSTONE - 1000, TOMBSTONE + 1000] {
        for with_wait in [false, true] {
            counter.store(value).unwrap();
            std::thread::scope(|s| {
                // So that the waiting bit is there as well.
                let wait = with_wait.then(|| {
                    let wait = s.spawn(|| theirs.wait_until(Comparison::Eq, 7, Some(LONG), None));
                    parked(&server, 1);
                    wait
                });
                assert_eq!(counter.load().unwrap(), value);
                assert_eq!(c.all().snapshot().unwrap(), [0, value]);
                assert_eq!(counter.fetch_add(-1).unwrap(), value);
                let before = if value == least { most } else { value - 1 };
                assert_eq!(counter.fetch_add(1).unwrap(), before);
                assert_eq!(counter.compare_exchange(0, 1).unwrap(), Err(value));
                let fits = value != most;
                assert_eq!(counter.compare_exchange(value, value + 5).is_ok(), fits);
                counter.store(value).unwrap();
                assert_eq!(counter.fetch_or(0).unwrap(), value);
                let mut batch = client.batch();
                for _ in 0..20 {
                    batch.load(&counter).fetch_add(&counter, 0);
                }
                let found = batch.run().unwrap();
                assert!(found.iter().all(|outcome| outcome.value() == value));
                assert_eq!(theirs.load().unwrap(), value);
                assert_eq!(counter.swap(7).unwrap(), value);
                if let Some(wait) = wait {
                    assert_eq!(wait.join().unwrap().unwrap(), Some(7));
                }
                assert_eq!(counter.load().unwrap(), 7);
            });
        }
    }
}

fn an_old_handle_never_reaches_another_array(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let old = a.events("x", 2, 2).unwrap();
    b.remove("x").unwrap();
    b.events("x", 3, 3).unwrap();
    a.events("x", 2, 2).unwrap_err();
    let other = a.events("y", 2, 2).unwrap();
    let error = old.at(0, 0).unwrap().set().unwrap_err();
    assert!(matches!(error, Error::ArrayRemoved { .. }), "{error}");
    assert_eq!(other.snapshot().unwrap(), [false; 4]);
    assert!(matches!(a.remove("z"), Err(Error::NoSuchArray { .. })));
}

/// Everything that is done on an array while it is being removed is either done
/// or refused, and what is done counts.
fn a_removal_amid_operations(set: &Set) {
    let server = set.start();
    let remover = set.client(&server, 1);
    let clients = set.some(&server);
    for round in 0..3 {
        let arrays: Vec<_> = clients
            .iter()
            .map(|client| (client.events("e", 1, 1).unwrap(), client.counters("c", 1, 1).unwrap()))
            .collect();
        std::thread::scope(|s| {
            for (e, c) in &arrays {
                s.spawn(move || {
                    let (event, counter) = (e.at(0, 0).unwrap(), c.at(0, 0).unwrap());
                    let mut least = 0;
                    let error = loop {
                        match counter.fetch_add(1) {
                            Ok(before) if before >= least => least = before + 1,
                            Ok(other) => panic!("{other} behind {least}"),
                            Err(error) => break error,
                        }
                    };
                    assert!(matches!(error, Error::ArrayRemoved { .. }), "{error}");
                    let error = loop {
                        if let Err(error) = event.set().and_then(|_| event.take()) {
                            break error;
                        }
                    };
                    assert!(matches!(error, Error::ArrayRemoved { .. }), "{error}");
                });
            }
            std::thread::sleep(std::time::Duration::from_millis(20 + 10 * round));
            remover.remove("c").unwrap();
            remover.remove("e").unwrap();
        });
    }
}
