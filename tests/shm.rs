//! Promise: on the server's machine, a client works in the server's memory, and
//! says why where it does not.

mod common;
use common::{client, eventually, key, server};
use farcell::{Client, Error, Key, Kind, TransportChoice};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

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
    assert!(why.contains("no shared memory: the server does not offer it: it was told"), "{why}");
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

/// To open an array once more says nothing against operations that are under way on it.
#[test]
fn operations_go_on_while_their_array_is_opened_once_more() {
    let server = server().start().unwrap();
    let builder = client(&server).transport(TransportChoice::Shm);
    let client = builder.connect().unwrap();
    let counter = client.counters("c", 1, 4).unwrap().at(0, 1).unwrap();
    let over = AtomicBool::new(false);
    let added = std::thread::scope(|s| {
        let adds: Vec<_> = (0..2)
            .map(|_| {
                s.spawn(|| {
                    let mut added = 0;
                    while !over.load(Ordering::Relaxed) {
                        counter.fetch_add(1).unwrap();
                        added += 1;
                    }
                    added
                })
            })
            .collect();
        for _ in 0..2000 {
            client.counters("c", 1, 4).unwrap();
        }
        over.store(true, Ordering::Relaxed);
        adds.into_iter().map(|t| t.join().unwrap()).sum::<i64>()
    });
    assert_eq!(counter.load().unwrap(), added);
}
