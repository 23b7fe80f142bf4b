//! A message is there as a whole or not at all, whoever writes and whoever reads.

use crate::common::messages::{self, LARGEST, message, size};
use crate::set::{LONG, Set, eventually};
use farcell::{Client, Error, Slot};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

alone! { a_size_that_does_not_fit_is_an_error_and_changes_nothing parts_make_one_message }
together! {
    every_size_comes_back_as_it_was
    no_reader_ever_sees_a_torn_message
    a_second_writer_is_told_and_changes_nothing
    a_torn_message_stays_torn_until_it_is_written_whole
    a_reader_that_waits_is_woken
    an_event_that_is_set_behind_a_write_is_never_seen_before_it
    a_message_of_a_removed_array_is_gone
}

fn slot(client: &Client, bytes: u64) -> Slot {
    client.slots("params", 2, bytes).unwrap().at(1).unwrap()
}

/// The messages that are worth the time here.
fn numbers(set: &Set) -> Vec<u64> {
    let all = 0..messages::SIZES.len() as u64;
    // In an emulated machine the long ones take seconds.
    all.filter(|&n| set.times(40) > 1 && (size(n) < 300_000 || set.times(1000) > 100)).collect()
}

fn every_size_comes_back_as_it_was(set: &Set) {
    let server = set.start();
    let (a, b) = set.two(&server);
    let (writer, reader) = (slot(&a, LARGEST), slot(&b, LARGEST));
    let mut buffer = vec![0; LARGEST as usize];
    assert_eq!(reader.read(&mut buffer).unwrap().total, 0);
    let numbers = numbers(set);
    for (version, &number) in (1..).zip(&numbers) {
        assert_eq!(writer.write(&message(number)).unwrap(), version);
        for slot in [&reader, &writer] {
            let (read, received) = messages::read(slot, &mut buffer).unwrap();
            assert_eq!((read, received.version, received.len), (number, version, size(number)));
        }
    }
    let last = numbers.len() as u64 + 1;
    writer.write(&[]).unwrap();
    let received = reader.read(&mut []).unwrap();
    assert_eq!((received.len, received.total, received.version), (0, 0, last));
    // The neighbour is untouched.
    assert_eq!(a.open_slots("params").unwrap().versions().unwrap(), [0, last]);
    assert_eq!(b.open_slots("params").unwrap().at(0).unwrap().read(&mut buffer).unwrap().total, 0);
}

fn no_reader_ever_sees_a_torn_message(set: &Set) {
    let writes = set.times(150).max(12);
    let server = set.start();
    let clients = set.some(&server);
    let numbers = numbers(set);
    let over = AtomicBool::new(false);
    thread::scope(|s| {
        let readers: Vec<_> = clients[1..]
            .iter()
            .map(|client| {
                let slot = slot(client, LARGEST);
                let over = &over;
                s.spawn(move || {
                    let mut buffer = vec![0; LARGEST as usize];
                    let (mut last, mut reads) = (0, 0);
                    while !over.load(Ordering::Relaxed) || reads == 0 {
                        match messages::read(&slot, &mut buffer) {
                            // A writer that leaves too short a time for so long a message.
                            Err(Error::SlotBusy { .. }) => {}
                            read => {
                                let (_, received) = read.unwrap();
                                assert!(received.version >= last);
                                last = received.version;
                                reads += 1;
                            }
                        }
                    }
                    reads
                })
            })
            .collect();
        let slot = slot(&clients[0], LARGEST);
        for i in 0..writes as usize {
            slot.write(&message(numbers[i % numbers.len()])).unwrap();
            thread::sleep(std::time::Duration::from_millis(1));
        }
        over.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0);
        }
        assert_eq!(slot.version().unwrap(), writes);
    });
}

fn parts_make_one_message(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let slot = slot(&client, 1000);
    let mut buffer = [0; 1000];
    let mut write = slot.writer().unwrap();
    write.write_at(5, b"56789").unwrap();
    write.write_at(0, b"01234").unwrap();
    assert_eq!(slot.version().unwrap(), 0);
    assert_eq!(write.commit(10).unwrap(), 1);
    let received = slot.read(&mut buffer).unwrap();
    assert_eq!(&buffer[..received.len], b"0123456789");
    // A part of it.
    assert_eq!(slot.write_at(3, b"xyz").unwrap(), 2);
    let received = slot.read(&mut buffer).unwrap();
    assert_eq!(&buffer[..received.len], b"012xyz6789");
    assert_eq!(slot.write_at(9, b"abc").unwrap(), 3);
    let received = slot.read_at(8, &mut buffer[..3]).unwrap();
    assert_eq!((&buffer[..received.len], received.total), (&b"8ab"[..], 12));
    let received = slot.read_at(12, &mut buffer).unwrap();
    assert_eq!((received.len, received.total), (0, 12));
    // Given up before anything was written: as before.
    drop(slot.writer().unwrap());
    assert_eq!(slot.read(&mut buffer).unwrap().version, 3);
}

fn a_size_that_does_not_fit_is_an_error_and_changes_nothing(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let slots = client.slots("params", 2, 1000).unwrap();
    let slot = slots.at(0).unwrap();
    slot.write(&[7; 1000]).unwrap();
    for result in [
        slot.write(&[0; 1001]),
        slot.write_at(1000, &[0]),
        slot.write_at(u64::MAX, &[0; 2]),
        slot.writer().unwrap().commit(1001),
    ] {
        assert!(matches!(result, Err(Error::SlotSize { .. })), "{result:?}");
    }
    let small = slot.read(&mut [0; 999]).unwrap_err();
    assert!(matches!(small, Error::SlotSize { .. }) && small.to_string().contains("1000"));
    let mut buffer = [0; 1000];
    assert_eq!(slot.read(&mut buffer).unwrap().version, 1);
    assert_eq!(buffer, [7; 1000]);
    assert!(matches!(slots.at(2), Err(Error::OutOfRange { row: 2, .. })));
    for bytes in [0, u64::MAX] {
        assert!(matches!(client.slots("other", 1, bytes), Err(Error::BadSetting { .. })));
    }
    let other = client.slots("params", 2, 1001).unwrap_err();
    assert!(other.to_string().contains("slots 2 x 1 of 1000 bytes"), "{other}");
    assert!(matches!(client.events("params", 2, 1), Err(Error::ArrayMismatch { .. })));
}

fn a_second_writer_is_told_and_changes_nothing(set: &Set) {
    let server = set.start();
    let (one, two) = set.two(&server);
    let (slot, same) = (slot(&one, 1000), slot(&two, 1000));
    let mut write = slot.writer().unwrap();
    write.write_at(0, b"first").unwrap();
    for busy in [&slot, &same] {
        assert!(matches!(busy.write(b"second"), Err(Error::SlotBusy { row: 1, .. })));
        assert!(matches!(busy.writer(), Err(Error::SlotBusy { row: 1, .. })));
    }
    // A reader finds no whole message until it is committed.
    assert!(matches!(same.read(&mut [0; 1000]), Err(Error::SlotBusy { op: "read", .. })));
    assert_eq!(write.commit(5).unwrap(), 1);
    let mut buffer = [0; 1000];
    let received = same.read(&mut buffer).unwrap();
    assert_eq!(&buffer[..received.len], b"first");
    assert_eq!(same.write(b"second").unwrap(), 2);
}

fn a_torn_message_stays_torn_until_it_is_written_whole(set: &Set) {
    let server = set.start();
    let (one, two) = set.two(&server);
    let (slot, other) = (slot(&one, 2 << 20), slot(&two, 2 << 20));
    let len = 100_000;
    let (old, mut buffer) = (vec![b'A'; len], vec![0; 2 << 20]);
    slot.write(&old).unwrap();
    let mut half = other.writer().unwrap();
    half.write_at(0, &[b'B'; 1000]).unwrap();
    drop(half);
    let mut is_torn = || {
        [&slot, &other]
            .iter()
            .all(|slot| matches!(slot.read(&mut buffer), Err(Error::Torn { version: 1, .. })))
    };
    assert!(is_torn());
    let torn = other.read(&mut []).unwrap_err();
    assert!(torn.to_string().contains("row 1 of array \"params\""), "{torn}");
    let part = slot.write_at(2000, b"C").unwrap_err();
    assert!(matches!(&part, Error::PartOfTorn { row: 1, version: 1, .. }), "{part}");
    assert!(part.to_string().ends_with("write the whole message"), "{part}");
    assert!(is_torn());
    let nothing = slot.writer().unwrap().commit(len as u64);
    assert!(matches!(nothing, Err(Error::PartOfTorn { .. })), "{nothing:?}");
    let mut gap = slot.writer().unwrap();
    gap.write_at(0, &old[..1000]).unwrap();
    gap.write_at(1001, &old[1001..]).unwrap();
    let gap = gap.commit(len as u64);
    assert!(matches!(gap, Err(Error::PartOfTorn { .. })), "{gap:?}");
    assert!(is_torn());
    // All of it, in whatever parts.
    let mut whole = slot.writer().unwrap();
    whole.write_at(1000, &old[1000..]).unwrap();
    whole.write_at(0, &old[..1000]).unwrap();
    assert_eq!(whole.commit(len as u64).unwrap(), 2);
    assert_eq!(slot.write_at(2000, b"C").unwrap(), 3);
    let received = other.read(&mut buffer).unwrap();
    assert_eq!((received.version, received.len, buffer[1999], buffer[2000]), (3, len, b'A', b'C'));
}

fn a_reader_that_waits_is_woken(set: &Set) {
    let server = set.start();
    let (writer, reader) = set.two(&server);
    let (slot, theirs) = (slot(&writer, 10_000), slot(&reader, 10_000));
    for version in 0..set.times(50) {
        thread::scope(|s| {
            let read = s.spawn(|| {
                let mut buffer = vec![0; 10_000];
                let received = theirs.read_newer(version, &mut buffer, Some(LONG)).unwrap();
                let received = received.expect("a minute is enough");
                (messages::check(&buffer[..received.len]), received.version)
            });
            if version % 2 == 0 {
                eventually("it waits", || server.parked_waits() == 1);
            }
            assert_eq!(slot.write(&messages::of_size(version, 5000)).unwrap(), version + 1);
            assert_eq!(read.join().unwrap(), (version, version + 1));
        });
    }
}

fn an_event_that_is_set_behind_a_write_is_never_seen_before_it(set: &Set) {
    let last = set.times(100);
    let server = set.start();
    let (one, two) = set.two(&server);
    thread::scope(|s| {
        s.spawn(|| {
            let slot = slot(&one, 100_000);
            let full = one.events("full", 1, 1).unwrap().at(0, 0).unwrap();
            for number in 1..=last {
                slot.write(&messages::of_size(number, 8 + 997 * number as usize % 90_000)).unwrap();
                assert!(full.set().unwrap());
                while full.is_set().unwrap() {
                    thread::yield_now();
                }
            }
        });
        let slot = slot(&two, 100_000);
        let full = two.events("full", 1, 1).unwrap().at(0, 0).unwrap();
        let mut buffer = vec![0; 100_000];
        for number in 1..=last {
            assert!(full.wait_timeout(LONG).unwrap());
            assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, number);
            assert!(full.take().unwrap());
        }
    });
}

fn a_message_of_a_removed_array_is_gone(set: &Set) {
    let server = set.start();
    let (client, remover) = set.two(&server);
    let slot = slot(&client, 100);
    slot.write(b"there").unwrap();
    let mut write = slot.writer().unwrap();
    write.write_at(0, b"late").unwrap();
    remover.remove("params").unwrap();
    assert!(matches!(write.commit(4), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(slot.write(b"x"), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(slot.read(&mut [0; 100]), Err(Error::ArrayRemoved { .. })));
    let again = client.slots("params", 2, 100).unwrap().at(1).unwrap();
    assert_eq!(again.read(&mut [0; 100]).unwrap().version, 0);
}
