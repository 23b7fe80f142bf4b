//! Promise: many cells are as easy as one, a column as easy as a row, and the
//! results say which cells.

mod common;
use common::{client, eventually, server};
use farcell::{Cell, Comparison, Error};
use std::time::Duration;

const LONG: Option<Duration> = Some(Duration::from_secs(20));
const SHORT: Option<Duration> = Some(Duration::from_millis(30));

fn places(cells: &[Cell]) -> Vec<(usize, usize)> {
    let mut places: Vec<_> = cells.iter().map(|c| (c.row, c.col)).collect();
    places.sort_unstable();
    places
}

#[test]
fn rows_columns_lists_and_all() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let events = client.events("e", 3, 10).unwrap();
    assert_eq!((events.rows(), events.cols()), (3, 10));
    assert_eq!(events.row(1).unwrap().set_all().unwrap(), 10);
    assert_eq!(events.column(4).unwrap().set_all().unwrap(), 2, "one was set");
    assert_eq!(events.column(4).unwrap().snapshot().unwrap(), [true; 3]);
    let list = events.cells(&[(2, 9), (1, 0), (0, 4), (0, 4)]).unwrap();
    assert_eq!(list.snapshot().unwrap(), [false, true, true, true]);
    assert_eq!(list.clear_all().unwrap(), 2);
    let all = events.snapshot().unwrap();
    let set: Vec<usize> = (0..30).filter(|&i| all[i]).collect();
    assert_eq!(set, [11, 12, 13, 14, 15, 16, 17, 18, 19, 24]);
    assert!(set.iter().all(|&i| events.flat(i).unwrap().is_set().unwrap()));
    assert_eq!(events.clear_all().unwrap(), 10);
    assert_eq!(events.all().cell(24), (2, 4));
    assert_eq!(events.all().transitions().unwrap()[24], 2);
    assert!(matches!(events.row(3), Err(Error::OutOfRange { row: 3, rows: 3, .. })));
    assert!(matches!(events.column(10), Err(Error::OutOfRange { col: 10, cols: 10, .. })));
    assert!(matches!(events.cells(&[(0, 0), (5, 0)]), Err(Error::OutOfRange { .. })));
    assert!(matches!(events.cells(&[]), Err(Error::BadSelection { .. })));
}

#[test]
fn waits_for_any_all_and_some() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let events = client.events("e", 4, 5).unwrap();
    let column = events.column(2).unwrap();
    events.at(1, 2).unwrap().set().unwrap();
    let any = column.wait_any(LONG).unwrap();
    assert_eq!(places(any.cells()), [(1, 2)]);
    assert_eq!(any.cells()[0].transitions(), 1);
    let late = column.wait_some(2, SHORT).unwrap();
    assert!(!late.is_satisfied());
    assert_eq!(places(late.cells()), [(1, 2)], "those that were set are named");
    std::thread::scope(|s| {
        let some = s.spawn(|| column.wait_some(3, LONG).unwrap());
        let all = s.spawn(|| column.wait_all(LONG).unwrap());
        eventually("both are parked", || server.parked_waits() == 2);
        events.at(0, 1).unwrap().set().unwrap();
        events.at(3, 2).unwrap().set().unwrap();
        // A pulse counts as well.
        events.at(0, 2).unwrap().set().unwrap();
        events.at(0, 2).unwrap().clear().unwrap();
        assert_eq!(places(some.join().unwrap().cells()), [(0, 2), (1, 2), (3, 2)]);
        assert_eq!(server.parked_waits(), 1);
        events.at(2, 2).unwrap().set().unwrap();
        assert_eq!(places(all.join().unwrap().cells()), [(0, 2), (1, 2), (2, 2), (3, 2)]);
    });
    assert_eq!(events.all().waiters().unwrap(), [0; 20]);
    assert!(matches!(column.wait_some(0, LONG), Err(Error::BadSelection { .. })));
    assert!(matches!(column.wait_some(5, LONG), Err(Error::BadSelection { .. })));
}

#[test]
fn waits_after_what_was_seen() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let events = client.events("e", 1, 3).unwrap();
    let row = events.row(0).unwrap();
    let mut seen = row.transitions().unwrap();
    events.at(0, 1).unwrap().set().unwrap();
    let woken = row.wait_after(1, &seen, LONG, None).unwrap();
    assert_eq!(places(woken.cells()), [(0, 1)]);
    seen[1] = woken.cells()[0].transitions();
    assert!(!row.wait_after(1, &seen, SHORT, None).unwrap().is_satisfied());
    assert!(matches!(row.wait_after(1, &seen[1..], SHORT, None), Err(Error::BadSelection { .. })));
}

#[test]
fn more_cells_than_fit_into_one_frame() {
    let server = server().capacity(1 << 19).start().unwrap();
    let client = client(&server).connect().unwrap();
    let events = client.events("big", 300, 1000).unwrap();
    assert_eq!(events.set_all().unwrap(), 300_000);
    assert_eq!(events.column(999).unwrap().clear_all().unwrap(), 300);
    let all = events.snapshot().unwrap();
    assert_eq!(all.len(), 300_000);
    assert!(all.iter().enumerate().all(|(i, &set)| set == (i % 1000 != 999)));
    let list: Vec<(usize, usize)> = (0..300_000).rev().map(|i| (i / 1000, i % 1000)).collect();
    assert_eq!(events.cells(&list).unwrap().clear_all().unwrap(), 299_700);
    let error = events.all().wait_any(SHORT).unwrap_err();
    assert!(error.to_string().contains("40960"), "{error}");
    let most: Vec<(usize, usize)> = list[..40_960].to_vec();
    let most = events.cells(&most).unwrap();
    assert!(!most.wait_any(SHORT).unwrap().is_satisfied());
    eventually("nothing is parked", || server.parked_waits() == 0);
    // As many as may be, each named by itself, and it is still one wait.
    std::thread::scope(|s| {
        let wait = s.spawn(|| most.wait_any(LONG).unwrap());
        eventually("it is parked", || server.parked_waits() == 1);
        events.flat(299_999).unwrap().set().unwrap();
        assert_eq!(places(wait.join().unwrap().cells()), [(299, 999)]);
    });
}

#[test]
fn a_batch_is_one_request_in_order() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let events = client.events("e", 1, 2).unwrap();
    let counters = client.counters("c", 1, 2).unwrap();
    let (e, c) = (events.at(0, 1).unwrap(), counters.at(0, 1).unwrap());
    let mut batch = client.batch();
    batch.set(&e).is_set(&e).take(&e).take(&e).clear(&e);
    batch.store(&c, -5).fetch_add(&c, 7).compare_exchange(&c, 2, 12).swap(&c, 9);
    batch.fetch_or(&c, 6).fetch_and(&c, 3).fetch_xor(&c, 1).load(&c);
    let found = batch.run().unwrap();
    assert_eq!(found.len(), batch.len());
    let changed: Vec<bool> = found[..5].iter().map(|o| o.changed()).collect();
    assert_eq!(changed, [true, false, true, false, false]);
    assert!(found[1].was_set());
    let values: Vec<i64> = found[5..].iter().map(|o| o.value()).collect();
    assert_eq!(values, [0, -5, 2, 12, 9, 15, 3, 2]);
    assert_eq!(batch.run().unwrap()[5].value(), 2, "a batch can be run again");

    // One that is refused changes nothing: the second array is gone.
    client.remove("e").unwrap();
    let mut batch = client.batch();
    batch.store(&c, 100).set(&e);
    let error = batch.run().unwrap_err();
    assert!(matches!(&error, Error::ArrayRemoved { name } if name == "e"), "{error}");
    assert_eq!(c.load().unwrap(), 2);

    let other = common::client(&server).connect().unwrap();
    let error = other.batch().load(&c).run().unwrap_err();
    assert!(error.to_string().contains("its own client"), "{error}");
    assert!(client.batch().run().unwrap().is_empty());
}

#[test]
fn a_batch_of_two_hundred_thousand() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let mut batch = client.batch();
    for _ in 0..200_000 {
        batch.fetch_add(&counter, 1);
    }
    // Several threads with deep pipelines on one connection: no dead end.
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                let found = batch.run().unwrap();
                assert!(found.windows(2).all(|w| w[0].value() < w[1].value()));
            });
        }
    });
    assert_eq!(counter.load().unwrap(), 800_000);
}

#[test]
fn counters_in_rows() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let counters = client.counters("c", 3, 3).unwrap();
    for i in 0..9 {
        counters.flat(i).unwrap().store(i as i64 - 4).unwrap();
    }
    assert_eq!(counters.column(1).unwrap().snapshot().unwrap(), [-3, 0, 3]);
    assert_eq!(counters.all().len(), 9);
    let woken = counters.all().wait_some(3, Comparison::Ge, 2, LONG, None).unwrap();
    assert_eq!(places(woken.cells()), [(2, 0), (2, 1), (2, 2)]);
    assert_eq!(woken.cells()[2].value(), 4);
}
