//! Waits end when they are to, say by what, and leave nothing behind.

use crate::common::eventually_within;
use crate::set::{LONG, Set, parked};
use farcell::{Canceller, Cell, Comparison, Error};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const SHORT: Option<Duration> = Some(Duration::from_millis(30));

alone! {
    a_wait_returns_as_threading_event_does
    a_wait_that_ends_early_leaves_no_trace
    closing_ends_the_waits
    waits_after_what_was_seen
    waits_without_a_thread
    as_many_cells_as_one_wait_may_name
}
together! {
    waits_for_any_all_and_some
    counters_are_waited_for_in_rows
    a_list_of_cells_of_several_waiters
}

fn places(cells: &[Cell]) -> Vec<(usize, usize)> {
    let mut places: Vec<_> = cells.iter().map(|c| (c.row, c.col)).collect();
    places.sort_unstable();
    places
}

fn a_wait_returns_as_threading_event_does(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    assert!(!event.wait_timeout(Duration::ZERO).unwrap());
    let begun = Instant::now();
    assert!(!event.wait_timeout(Duration::from_millis(80)).unwrap());
    assert!(begun.elapsed() >= Duration::from_millis(80));
    assert!(begun.elapsed() < Duration::from_secs(10));
    event.set().unwrap();
    assert!(event.wait_timeout(Duration::ZERO).unwrap());
    assert!(event.wait_timeout(LONG).unwrap());
    event.wait().unwrap();
    assert!(event.is_set().unwrap(), "a wait leaves the event set");
}

fn a_wait_that_ends_early_leaves_no_trace(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let events = client.events("e", 4, 4).unwrap();
    let event = events.at(0, 0).unwrap();
    for _ in 0..set.times(20) {
        assert!(!event.wait_timeout(Duration::from_millis(1)).unwrap());
        assert!(!events.all().wait_any(Some(Duration::from_millis(1))).unwrap().is_satisfied());
    }
    let canceller = Canceller::new();
    std::thread::scope(|s| {
        let many = s.spawn(|| events.all().wait_with(3, None, Some(&canceller)));
        let one = s.spawn(|| event.wait_with(None, Some(&canceller)));
        parked(&server, 2);
        let begun = Instant::now();
        canceller.cancel();
        assert!(matches!(many.join().unwrap(), Err(Error::Cancelled)));
        assert!(matches!(one.join().unwrap(), Err(Error::Cancelled)));
        assert!(begun.elapsed() < Duration::from_secs(10));
    });
    assert!(matches!(event.wait_with(None, Some(&canceller)), Err(Error::Cancelled)));
    assert_eq!(client.info().unwrap().parked_waits, 0);
    assert_eq!(events.all().waiters().unwrap(), [0; 16]);
}

fn closing_ends_the_waits(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let waiting = client.events("e", 4, 4).unwrap().at(3, 3).unwrap();
    let event = waiting.clone();
    let thread = std::thread::spawn(move || waiting.wait());
    parked(&server, 1);
    client.close();
    assert!(matches!(thread.join().unwrap(), Err(Error::Closed)));
    assert!(matches!(event.set(), Err(Error::Closed)));
    assert!(matches!(event.is_set(), Err(Error::Closed)));
    parked(&server, 0);
}

fn waits_after_what_was_seen(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let events = client.events("e", 1, 3).unwrap();
    let row = events.row(0).unwrap();
    let mut seen = row.transitions().unwrap();
    events.at(0, 1).unwrap().set().unwrap();
    let woken = row.wait_after(1, &seen, Some(LONG), None).unwrap();
    assert_eq!(places(woken.cells()), [(0, 1)]);
    seen[1] = woken.cells()[0].transitions();
    assert!(!row.wait_after(1, &seen, SHORT, None).unwrap().is_satisfied());
    assert!(matches!(row.wait_after(1, &seen[1..], SHORT, None), Err(Error::BadSelection { .. })));
}

fn waits_without_a_thread(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let events = client.events("e", 1, 20).unwrap();
    let (tell, told) = mpsc::channel();
    for col in 0..20 {
        let tell = tell.clone();
        let ended = move |result: farcell::Result<()>| tell.send((col, result.is_ok())).unwrap();
        events.at(0, col).unwrap().wait_then(ended).unwrap();
    }
    parked(&server, 20);
    events.set_all().unwrap();
    let mut seen: Vec<_> = (0..20).map(|_| told.recv_timeout(LONG).unwrap()).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..20).map(|col| (col, true)).collect::<Vec<_>>());
    events.clear_all().unwrap();
    let (tell, told) = mpsc::channel();
    let event = events.at(0, 0).unwrap();
    let pending = event.wait_then(move |result| tell.send(result).unwrap()).unwrap();
    pending.cancel();
    assert!(matches!(told.recv_timeout(LONG), Ok(Err(Error::Cancelled))));
    parked(&server, 0);
}

fn waits_for_any_all_and_some(set: &Set) {
    let server = set.start();
    let (setter, waiter) = set.two(&server);
    let (events, theirs) = (setter.events("e", 4, 5).unwrap(), waiter.events("e", 4, 5).unwrap());
    let column = theirs.column(2).unwrap();
    events.at(1, 2).unwrap().set().unwrap();
    let any = column.wait_any(Some(LONG)).unwrap();
    assert_eq!(places(any.cells()), [(1, 2)]);
    assert_eq!(any.cells()[0].transitions(), 1);
    let late = column.wait_some(2, SHORT).unwrap();
    assert!(!late.is_satisfied());
    assert_eq!(places(late.cells()), [(1, 2)], "those that were set are named");
    std::thread::scope(|s| {
        let some = s.spawn(|| column.wait_some(3, Some(LONG)).unwrap());
        let all = s.spawn(|| column.wait_all(Some(LONG)).unwrap());
        parked(&server, 2);
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
    assert!(matches!(column.wait_some(0, Some(LONG)), Err(Error::BadSelection { .. })));
    assert!(matches!(column.wait_some(5, Some(LONG)), Err(Error::BadSelection { .. })));
}

fn counters_are_waited_for_in_rows(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let (ours, theirs) = (a.counters("c", 3, 3).unwrap(), b.counters("c", 3, 3).unwrap());
    std::thread::scope(|s| {
        let wait = s.spawn(|| ours.all().wait_some(3, Comparison::Ge, 2, Some(LONG), None));
        parked(&server, 1);
        for i in 0..9 {
            theirs.flat(i).unwrap().store(i as i64 - 4).unwrap();
        }
        let woken = wait.join().unwrap().unwrap();
        assert_eq!(places(woken.cells()), [(2, 0), (2, 1), (2, 2)]);
        assert_eq!(woken.cells()[2].value(), 4);
    });
    assert_eq!(ours.column(1).unwrap().snapshot().unwrap(), [-3, 0, 3]);
    assert_eq!(ours.all().len(), 9);
}

fn a_list_of_cells_of_several_waiters(set: &Set) {
    let server = set.start();
    let clients = set.some(&server);
    let of = |i: usize| clients[i].events("e", 3, 4).unwrap();
    let (setter, cells) = (of(0), [(2, 3), (0, 1), (1, 1)]);
    std::thread::scope(|s| {
        let waits: Vec<_> = (0..clients.len())
            .map(|i| {
                let list = of(i).cells(&cells).unwrap();
                s.spawn(move || list.wait_all(Some(LONG)).unwrap())
            })
            .collect();
        parked(&server, clients.len());
        for (row, col) in cells {
            assert!(waits.iter().all(|wait| !wait.is_finished()));
            assert!(setter.at(row, col).unwrap().set().unwrap());
        }
        for wait in waits {
            assert_eq!(places(wait.join().unwrap().cells()), [(0, 1), (1, 1), (2, 3)]);
        }
    });
    eventually_within(LONG, "nothing is parked", || setter.all().waiters().unwrap() == [0; 12]);
}

fn as_many_cells_as_one_wait_may_name(set: &Set) {
    let server = set.server().capacity(1 << 19).start().unwrap();
    let client = set.client(&server, 0);
    let events = client.events("big", 300, 1000).unwrap();
    let error = events.all().wait_any(SHORT).unwrap_err();
    assert!(error.to_string().contains("40960"), "{error}");
    let list: Vec<(usize, usize)> = (0..300_000).rev().map(|i| (i / 1000, i % 1000)).collect();
    let most = events.cells(&list[..40_960]).unwrap();
    assert!(!most.wait_any(SHORT).unwrap().is_satisfied());
    parked(&server, 0);
    // As many as may be, each named by itself, and it is still one wait.
    std::thread::scope(|s| {
        let wait = s.spawn(|| most.wait_any(Some(LONG)).unwrap());
        parked(&server, 1);
        events.flat(299_999).unwrap().set().unwrap();
        assert_eq!(places(wait.join().unwrap().cells()), [(299, 999)]);
    });
}
