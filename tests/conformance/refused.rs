//! What cannot be is refused: to those who only read, to those who take one kind
//! for another, and by name.

use crate::set::{LONG, Set, parked};
use farcell::{Access, Error, Key, Kind};

alone! { another_form_is_refused_by_name kinds_are_not_each_other bad_names_and_shapes }
together! { a_read_only_session_reads_and_waits_and_changes_nothing }

fn a_read_only_session_reads_and_waits_and_changes_nothing(set: &Set) {
    let key = Key::new(*b"the key of the readers").unwrap();
    let server = set.server().read_only_key(key.clone()).start().unwrap();
    let writer = set.client(&server, 0);
    let event = writer.events("e", 1, 2).unwrap().at(0, 0).unwrap();
    let counter = writer.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    counter.store(5).unwrap();
    writer.locks("l", 1, 1).unwrap();
    writer.semaphores("s", 1, 1, 1, 1).unwrap();
    writer.barriers("b", 1, 1, 2).unwrap();
    writer.slots("m", 1, 100).unwrap().at(0).unwrap().write(b"there").unwrap();
    let client = set.reader(&server, key, 1);
    assert_eq!(client.info().unwrap().access, Access::ReadOnly);
    let all = client.events("e", 1, 2).unwrap();
    let seen = all.at(0, 0).unwrap();
    let count = client.open_counters("c").unwrap().at(0, 0).unwrap();
    assert_eq!(count.load().unwrap(), 5);
    let read_only = |e: Error| assert!(matches!(e, Error::ReadOnly { .. }), "{e}");
    for _ in 0..2 {
        read_only(seen.set().unwrap_err());
        read_only(seen.clear().unwrap_err());
        read_only(seen.take().unwrap_err());
        read_only(all.set_all().unwrap_err());
        read_only(client.batch().set(&seen).run().unwrap_err());
        read_only(count.fetch_add(0).unwrap_err());
        read_only(count.store(7).unwrap_err());
        read_only(count.compare_exchange(5, 5).unwrap_err());
        read_only(client.events("new", 1, 1).unwrap_err());
        read_only(client.remove("e").unwrap_err());
        read_only(client.join("p").unwrap_err());
        let lock = client.open_locks("l").unwrap().at(0, 0).unwrap();
        read_only(lock.try_lock().unwrap_err());
        assert!(!lock.is_locked().unwrap());
        let semaphore = client.open_semaphores("s").unwrap().at(0, 0).unwrap();
        read_only(semaphore.try_acquire().unwrap_err());
        read_only(semaphore.release().unwrap_err());
        read_only(client.open_barriers("b").unwrap().at(0, 0).unwrap().wait().unwrap_err());
        let slot = client.open_slots("m").unwrap().at(0).unwrap();
        read_only(slot.write(b"x").unwrap_err());
        read_only(slot.writer().unwrap_err());
        let mut buffer = [0; 100];
        let received = slot.read(&mut buffer).unwrap();
        assert_eq!(&buffer[..received.len], b"there");
        read_only(client.slots("new", 1, 1).unwrap_err());
        assert_eq!(count.load().unwrap(), 5);
    }
    std::thread::scope(|s| {
        let wait = s.spawn(|| seen.wait_timeout(LONG).unwrap());
        parked(&server, 1);
        event.set().unwrap();
        assert!(wait.join().unwrap());
    });
    assert!(seen.is_set().unwrap());
    assert_eq!(writer.list().unwrap().len(), 6);
}

fn another_form_is_refused_by_name(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    client.events("a", 4, 4).unwrap();
    let text = client.events("a", 4, 5).unwrap_err().to_string();
    assert!(text.contains("event 4 x 4") && text.contains("event 4 x 5"), "{text}");
    let text = client.counters("a", 4, 4).unwrap_err().to_string();
    assert!(text.contains("event 4 x 4") && text.contains("counter 4 x 4"), "{text}");
    let error = client.open_events("b").unwrap_err();
    assert!(matches!(error, Error::NoSuchArray { .. }), "{error}");
    // A refused open takes no number: thousands of them, and it still works.
    for _ in 0..set.times(5000) {
        client.events("a", 1, 1).unwrap_err();
    }
    assert!(!client.events("a", 4, 4).unwrap().at(3, 3).unwrap().is_set().unwrap());
    for _ in 0..set.times(5000) {
        client.events("a", 4, 4).unwrap();
    }
}

fn kinds_are_not_each_other(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    client.events("event", 1, 1).unwrap();
    client.counters("counter", 1, 1).unwrap();
    client.locks("lock", 1, 1).unwrap();
    client.barriers("barrier", 1, 1, 1).unwrap();
    client.semaphores("semaphore", 1, 1, 1, 1).unwrap();
    client.slots("slot", 1, 8).unwrap();
    let kinds = client.list().unwrap();
    assert_eq!(kinds.len(), 6);
    for array in kinds {
        let name = array.name.as_str();
        for (other, opened) in [
            ("event", client.open_events(name).map(drop)),
            ("counter", client.open_counters(name).map(drop)),
            ("lock", client.open_locks(name).map(drop)),
            ("barrier", client.open_barriers(name).map(drop)),
            ("semaphore", client.open_semaphores(name).map(drop)),
            ("slot", client.open_slots(name).map(drop)),
        ] {
            if name == other {
                opened.unwrap();
            } else {
                let error = opened.unwrap_err();
                assert!(
                    matches!(&error, Error::WrongKind { kind, .. } if *kind == array.kind),
                    "{name} as {other}: {error}"
                );
            }
        }
    }
    let error = client.open_counters("event").unwrap_err();
    assert!(matches!(error, Error::WrongKind { kind: Kind::Event, .. }), "{error}");
}

fn bad_names_and_shapes(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    for bad in ["", "a b", "ä", "-x", "a\nb", "a:b", &"x".repeat(129)] {
        let error = client.events(bad, 1, 1).unwrap_err();
        assert!(matches!(error, Error::BadName { .. }), "{bad:?}: {error}");
        assert!(matches!(client.remove(bad), Err(Error::BadName { .. })));
        assert!(matches!(client.lookup(bad), Err(Error::BadName { .. })));
    }
    for (rows, cols) in [(0, 1), (1, 0), (1 << 40, 1), (usize::MAX, usize::MAX)] {
        let error = client.events("e", rows, cols).unwrap_err();
        assert!(matches!(error, Error::BadShape { .. }), "{error}");
    }
    let error = client.events("e", 1 << 20, 1 << 20).unwrap_err();
    assert!(matches!(error, Error::SegmentFull { asked, .. } if asked > 1 << 40), "{error}");
}
