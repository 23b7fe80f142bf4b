//! Promise: on the server's machine, a client works in the server's memory, and
//! says why where it does not.

mod common;
use common::{client, eventually, key, server};
use farcell::{Canceller, Client, Error, Key, Kind, TransportChoice};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);

#[test]
fn auto_takes_shared_memory_on_one_machine() {
    let server = server().start().unwrap();
    let here = client(&server).connect().unwrap();
    let report = here.transport();
    assert_eq!(report.name, "shm", "{:?}", report.reasons);
    assert!(report.reasons[0].contains("memory"), "{:?}", report.reasons);
    let asked = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    assert_eq!(asked.transport().name, "shm");
    let tcp = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    assert_eq!(tcp.transport().name, "tcp");
    // They see the same cells.
    let a = here.events("e", 3, 5).unwrap().at(2, 4).unwrap();
    let b = tcp.events("e", 3, 5).unwrap().at(2, 4).unwrap();
    assert!(a.set().unwrap());
    assert!(b.is_set().unwrap());
    assert!(b.clear().unwrap());
    assert!(!a.is_set().unwrap());
    assert_eq!(a.transitions().unwrap(), 2);
}

#[test]
fn a_server_that_offers_none_is_served_by_tcp_with_the_reason() {
    let server = server().shared_memory(false).start().unwrap();
    let auto = client(&server).connect().unwrap();
    let report = auto.transport();
    assert_eq!(report.name, "tcp");
    let why = report.reasons.join("; ");
    assert!(why.contains("no shared memory: the server does not offer it"), "{why}");
    let asked = client(&server).transport(TransportChoice::Shm).connect();
    assert!(matches!(asked, Err(Error::Shm { .. })), "{asked:?}");
    eventually("the refused one leaves nothing", || server.sessions() == 1);
}

#[test]
fn who_may_only_read_reads_in_memory_and_changes_nothing() {
    let reader = Key::new(*b"the key of the readers").unwrap();
    let server = server().read_only_key(reader.clone()).start().unwrap();
    let writer = client(&server).connect().unwrap();
    let event = writer.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let reader = Client::builder().addr(server.address()).key(reader).connect().unwrap();
    assert_eq!(reader.transport().name, "shm", "{:?}", reader.transport());
    let seen = reader.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    assert!(!seen.is_set().unwrap());
    assert!(matches!(seen.set(), Err(Error::ReadOnly { .. })));
    assert!(matches!(seen.take(), Err(Error::ReadOnly { .. })));
    std::thread::scope(|s| {
        let waits = s.spawn(|| seen.wait_timeout(LONG).unwrap());
        eventually("it is parked", || server.parked_waits() == 1);
        event.set().unwrap();
        assert!(waits.join().unwrap());
    });
    assert!(seen.is_set().unwrap());
}

#[test]
fn waits_end_whoever_sets() {
    let server = server().start().unwrap();
    let shm = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    let tcp = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    let other = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    for setter in [&shm, &tcp, &other] {
        for waiter in [&shm, &tcp, &other] {
            let set = setter.events("e", 1, 2).unwrap().at(0, 1).unwrap();
            let wait = waiter.events("e", 1, 2).unwrap().at(0, 1).unwrap();
            std::thread::scope(|s| {
                let waits = s.spawn(|| wait.wait_timeout(LONG).unwrap());
                eventually("it waits", || server.parked_waits() == 1);
                let begun = Instant::now();
                assert!(set.set().unwrap());
                assert!(waits.join().unwrap());
                assert!(begun.elapsed() < Duration::from_secs(5));
            });
            assert!(set.clear().unwrap());
            assert_eq!(server.parked_waits(), 0);
        }
    }
}

#[test]
fn waiters_of_all_kinds_end_with_one_set() {
    let server = server().start().unwrap();
    let tcp = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    let shm = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    let events = shm.events("e", 1, 4).unwrap();
    let event = events.at(0, 2).unwrap();
    for round in 0..100u64 {
        std::thread::scope(|s| {
            let mut waits = Vec::new();
            for client in [&tcp, &shm, &tcp, &shm] {
                let event = client.events("e", 1, 4).unwrap().at(0, 2).unwrap();
                waits.push(s.spawn(move || event.wait_timeout(LONG).unwrap()));
            }
            // All at once, which goes through the server.
            let all = events.clone();
            waits.push(s.spawn(move || all.all().wait_any(Some(LONG)).unwrap().is_satisfied()));
            if round % 2 == 0 {
                eventually("all are parked", || server.parked_waits() == 5);
            }
            let setter = if round % 3 == 0 { &tcp } else { &shm };
            let setter = setter.events("e", 1, 4).unwrap().at(0, 2).unwrap();
            assert!(setter.set().unwrap());
            for wait in waits {
                assert!(wait.join().unwrap());
            }
        });
        assert_eq!(event.transitions().unwrap(), round * 2 + 1);
        assert!(event.clear().unwrap());
        assert_eq!(server.parked_waits(), 0);
    }
}

#[test]
fn a_removed_array_says_so_in_memory_too() {
    let server = server().start().unwrap();
    let a = client(&server).connect().unwrap();
    let b = client(&server).connect().unwrap();
    let mine = a.counters("gone", 2, 3).unwrap();
    let (one, other) = (mine.at(1, 1).unwrap(), mine.at(0, 0).unwrap());
    one.fetch_add(5).unwrap();
    let theirs = b.events("gone-too", 1, 1).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        let waits = s.spawn(|| one.wait_until(farcell::Comparison::Ge, 99, Some(LONG), None));
        eventually("it waits", || server.parked_waits() == 1);
        b.remove("gone").unwrap();
        assert!(matches!(waits.join().unwrap(), Err(Error::ArrayRemoved { .. })));
    });
    a.remove("gone-too").unwrap();
    assert!(matches!(one.load(), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(one.fetch_add(7), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(other.store(7), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(mine.all().snapshot(), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(theirs.set(), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(theirs.is_set(), Err(Error::ArrayRemoved { .. })));
    // The name is free, and what is made under it is new.
    let again = b.counters("gone", 2, 3).unwrap();
    assert_eq!(again.at(1, 1).unwrap().load().unwrap(), 0);
}

#[test]
fn the_last_moment_of_a_wait_leaves_nothing() {
    let server = server().start().unwrap();
    let client = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    assert!(!event.wait_timeout(Duration::ZERO).unwrap());
    let begun = Instant::now();
    assert!(!event.wait_timeout(Duration::from_millis(130)).unwrap());
    assert!(begun.elapsed() >= Duration::from_millis(130));
    let canceller = Canceller::new();
    std::thread::scope(|s| {
        let waits = s.spawn(|| event.wait_with(None, Some(&canceller)));
        eventually("it waits", || server.parked_waits() == 1);
        let begun = Instant::now();
        canceller.cancel();
        assert!(matches!(waits.join().unwrap(), Err(Error::Cancelled)));
        assert!(begun.elapsed() < Duration::from_secs(1));
    });
    std::thread::scope(|s| {
        let waits = s.spawn(|| event.wait());
        eventually("it waits", || server.parked_waits() == 1);
        client.close();
        assert!(matches!(waits.join().unwrap(), Err(Error::Closed)));
    });
    assert!(matches!(event.set(), Err(Error::Closed)));
    assert!(matches!(event.is_set(), Err(Error::Closed)));
    eventually("nothing is parked", || server.parked_waits() == 0);
}

#[test]
fn spinning_waiters_see_a_set_as_well() {
    let server = server().array("e", Kind::Event, 1, 1).start().unwrap();
    let spin = client(&server).spin(Duration::from_millis(200)).connect().unwrap();
    let set = client(&server).connect().unwrap();
    let (a, b) = (spin.open_events("e").unwrap(), set.open_events("e").unwrap());
    let (a, b) = (a.at(0, 0).unwrap(), b.at(0, 0).unwrap());
    std::thread::scope(|s| {
        let waits = s.spawn(|| a.wait_timeout(LONG).unwrap());
        std::thread::sleep(Duration::from_millis(20));
        assert!(b.set().unwrap());
        assert!(waits.join().unwrap());
    });
}

#[test]
fn batches_and_selections_are_done_in_memory_in_order() {
    let server = server().start().unwrap();
    let client = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    let events = client.events("e", 3, 9).unwrap();
    let counters = client.counters("c", 1, 3).unwrap();
    assert_eq!(events.row(1).unwrap().set_all().unwrap(), 9);
    assert_eq!(events.column(4).unwrap().set_all().unwrap(), 2);
    assert_eq!(events.all().clear_all().unwrap(), 11);
    assert!(events.snapshot().unwrap().into_iter().all(|set| !set));
    let (x, y) = (counters.at(0, 0).unwrap(), counters.at(0, 2).unwrap());
    let mut batch = client.batch();
    batch.fetch_add(&x, 2).swap(&y, 7).fetch_add(&x, 3).load(&x).set(&events.at(0, 0).unwrap());
    let words = batch.run().unwrap();
    assert_eq!(words[2].value(), 2);
    assert_eq!(words[3].value(), 5);
    assert!(words[4].changed());
    assert_eq!(counters.all().snapshot().unwrap(), [5, 0, 7]);
    // With one cell gone nothing of a batch is done.
    client.remove("e").unwrap();
    let failed = batch.run();
    assert!(matches!(failed, Err(Error::ArrayRemoved { .. })), "{failed:?}");
    assert_eq!(counters.all().snapshot().unwrap(), [5, 0, 7]);
}

#[test]
fn a_wrong_key_gets_no_memory() {
    let server = server().start().unwrap();
    let stranger = Client::builder()
        .addr(server.address())
        .key(Key::new(*b"another key altogether").unwrap())
        .transport(TransportChoice::Shm)
        .connect();
    assert!(matches!(stranger, Err(Error::AuthenticationFailed { .. })));
    let _ = key();
}
