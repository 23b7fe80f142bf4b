//! A message is there as a whole or not at all, whatever its size and whatever
//! happens to those who write and read it.

mod common;

use common::another::{Speaker, role};
use common::messages::{self, LARGEST, message, size};
use common::proxy::{Cut, Proxy};
use common::{client, eventually, key, server};
use farcell::{Client, Error, Slot, TransportChoice};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const ROLE: &str = "FARCELL_TEST_SLOT_ROLE";
const LONG: Duration = Duration::from_secs(20);

fn tcp(addr: &str) -> Client {
    Client::builder().addr(addr).key(key()).transport(TransportChoice::Tcp).connect().unwrap()
}

// ---- a writer in a process of its own ------------------------------------------

/// This test executable once more, as a client that does what its role says.
fn other(as_what: &str, addr: &str) -> Speaker {
    Speaker::start(&mut role("role_of_another_process", ROLE, format!("{as_what} {addr}")))
}

#[test]
#[ignore = "it is what the other tests start"]
fn role_of_another_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (role, addr) = role.split_once(' ').unwrap();
    let client = tcp(addr);
    let slots = client.open_slots("params").unwrap();
    match role {
        // Writes for ever, with moments in between in which it can be read.
        "writer" => {
            let slot = slots.at(0).unwrap();
            for number in 1.. {
                slot.write(&message(number)).unwrap();
                if number == 1 {
                    println!("writing");
                }
                thread::sleep(Duration::from_millis(3));
            }
        }
        // Stops in the middle of a message.
        "half" => {
            let mut write = slots.at(0).unwrap().writer().unwrap();
            write.write_at(0, &messages::of_size(9, 100_000)).unwrap();
            println!("half");
            thread::sleep(LONG);
        }
        // Goes on in the middle of a message when it is let.
        "late" => {
            let mut write = slots.at(0).unwrap().writer().unwrap();
            write.write_at(0, &messages::of_size(9, 100_000)).unwrap();
            println!("half");
            let go = client.events("go", 1, 1).unwrap().at(0, 0).unwrap();
            let waited = go.wait_timeout(LONG);
            let rest = write.write_at(100_000, &messages::of_size(9, 1_000_000));
            let end = write.commit(1_100_000);
            println!("waited {waited:?}, rest {rest:?}");
            match end {
                Err(Error::WriteLost { .. }) => println!("lost"),
                other => println!("{other:?}"),
            }
        }
        other => panic!("no role {other}"),
    }
}

// ---- whole or not at all --------------------------------------------------------

fn read_for(slot: &Slot, time: Duration) -> usize {
    let mut buffer = vec![0; LARGEST as usize];
    let (mut reads, mut last) = (0, 0);
    let begun = Instant::now();
    while begun.elapsed() < time {
        let (number, received) = match messages::read(slot, &mut buffer) {
            // A writer that leaves too short a time for so long a message.
            Err(Error::SlotBusy { .. }) => continue,
            read => read.unwrap(),
        };
        assert_eq!(number, received.version, "the writer counts from 1");
        assert_eq!(received.len, size(number));
        assert!(number >= last, "{number} after {last}");
        last = number;
        reads += 1;
    }
    reads
}

#[test]
fn no_reader_ever_sees_a_torn_message() {
    let server = server().start().unwrap();
    let addr = server.address();
    let slots = tcp(&addr).slots("params", 2, LARGEST).unwrap();
    let mut writer = other("writer", &addr);
    writer.says("writing");
    thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let slots = tcp(&addr).open_slots("params").unwrap();
                    read_for(&slots.at(0).unwrap(), Duration::from_secs(3))
                })
            })
            .collect();
        for reader in readers {
            let reads = reader.join().unwrap();
            assert!(reads > 10, "{reads} reads");
        }
    });
    assert!(slots.at(0).unwrap().version().unwrap() > 20);
    assert_eq!(slots.at(1).unwrap().read(&mut []).unwrap().version, 0, "it was never written");
}

#[test]
fn every_size_comes_back_as_it_was() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let slots = client.slots("params", 3, LARGEST).unwrap();
    let slot = slots.at(1).unwrap();
    let mut buffer = vec![0; LARGEST as usize];
    assert_eq!(slot.read(&mut buffer).unwrap().total, 0);
    for (version, number) in (1..).zip(0..messages::SIZES.len() as u64) {
        assert_eq!(slot.write(&message(number)).unwrap(), version);
        let (read, received) = messages::read(&slot, &mut buffer).unwrap();
        assert_eq!((read, received.version, received.len), (number, version, size(number)));
    }
    slot.write(&[]).unwrap();
    let received = slot.read(&mut []).unwrap();
    assert_eq!((received.len, received.total, received.version), (0, 0, 17));
    // The neighbours are untouched.
    assert_eq!(slots.versions().unwrap(), [0, 17, 0]);
    for row in [0, 2] {
        assert_eq!(slots.at(row).unwrap().read(&mut buffer).unwrap().total, 0);
    }
}

#[test]
fn parts_make_one_message() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let slot = client.slots("params", 1, 1000).unwrap().at(0).unwrap();
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
    // Given up before anything was written: as before. In the middle: torn.
    drop(slot.writer().unwrap());
    assert_eq!(slot.read(&mut buffer).unwrap().version, 3);
    let mut write = slot.writer().unwrap();
    write.write_at(0, b"half").unwrap();
    drop(write);
    let torn = slot.read(&mut buffer).unwrap_err();
    assert!(matches!(&torn, Error::Torn { row: 0, version: 3, .. }), "{torn}");
    assert!(torn.to_string().contains("row 0 of array \"params\""), "{torn}");
    assert_eq!(slot.write(b"whole").unwrap(), 4);
    assert_eq!(slot.read(&mut buffer).unwrap().len, 5);
}

#[test]
fn a_size_that_does_not_fit_is_an_error_and_changes_nothing() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
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
    assert!(matches!(client.open_counters("params"), Err(Error::WrongKind { .. })));
}

#[test]
fn there_is_a_limit_for_all_slots_together() {
    let server = server().slot_bytes(1 << 20).start().unwrap();
    let client = client(&server).connect().unwrap();
    client.slots("a", 1, 700_000).unwrap();
    let full = client.slots("b", 1, 700_000).unwrap_err();
    assert!(matches!(full, Error::SlotsFull { .. }) && full.to_string().contains("--slot-bytes"));
    client.remove("a").unwrap();
    client.slots("b", 1, 700_000).unwrap();
}

// ---- writers --------------------------------------------------------------------

#[test]
fn a_second_writer_is_told_and_changes_nothing() {
    let server = server().start().unwrap();
    let addr = server.address();
    let (one, two) = (tcp(&addr), tcp(&addr));
    let slot = one.slots("params", 1, 1000).unwrap().at(0).unwrap();
    let mut write = slot.writer().unwrap();
    write.write_at(0, b"first").unwrap();
    let same = two.open_slots("params").unwrap().at(0).unwrap();
    for busy in [&slot, &same] {
        assert!(matches!(busy.write(b"second"), Err(Error::SlotBusy { row: 0, .. })));
        assert!(matches!(busy.writer(), Err(Error::SlotBusy { row: 0, .. })));
    }
    // A reader finds no whole message until it is committed.
    let begun = Instant::now();
    assert!(matches!(same.read(&mut [0; 1000]), Err(Error::SlotBusy { op: "read", .. })));
    assert!(begun.elapsed() < LONG);
    assert_eq!(write.commit(5).unwrap(), 1);
    let mut buffer = [0; 1000];
    let received = same.read(&mut buffer).unwrap();
    assert_eq!(&buffer[..received.len], b"first");
    assert_eq!(same.write(b"second").unwrap(), 2);
}

#[test]
fn a_writer_that_is_killed_in_the_middle_leaves_a_torn_row_until_the_next_message() {
    let server = server().start().unwrap();
    let addr = server.address();
    let client = tcp(&addr);
    let slot = client.slots("params", 1, 2_000_000).unwrap().at(0).unwrap();
    slot.write(&message(1)).unwrap();
    let mut other = other("half", &addr);
    other.says("half");
    let waiter = {
        let slot = slot.clone();
        thread::spawn(move || {
            let mut buffer = vec![0; 2_000_000];
            let received = slot.read_newer(1, &mut buffer, Some(LONG)).unwrap().unwrap();
            (messages::check(&buffer[..received.len]), received.version)
        })
    };
    other.process.signal("KILL");
    let mut buffer = vec![0; 2_000_000];
    eventually("the row is torn", || match slot.read(&mut buffer) {
        Err(Error::Torn { version: 1, .. }) => true,
        Err(Error::SlotBusy { .. }) => false,
        other => panic!("{other:?}"),
    });
    assert!(!waiter.is_finished(), "a torn message is no newer one");
    assert_eq!(slot.write(&message(2)).unwrap(), 2);
    assert_eq!(waiter.join().unwrap(), (2, 2));
    assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, 2);
}

#[test]
fn a_part_does_not_make_a_torn_message_whole() {
    for choice in [TransportChoice::Tcp, TransportChoice::Auto] {
        a_torn_message_stays_torn(choice);
    }
}

fn a_torn_message_stays_torn(choice: TransportChoice) {
    let server = server().start().unwrap();
    let one = client(&server).transport(choice).connect().unwrap();
    let two = tcp(&server.address());
    let slot = one.slots("params", 1, 2 << 20).unwrap().at(0).unwrap();
    let other = two.open_slots("params").unwrap().at(0).unwrap();
    let (old, mut buffer) = (vec![b'A'; 1 << 20], vec![0; 2 << 20]);
    slot.write(&old).unwrap();
    let mut half = other.writer().unwrap();
    half.write_at(0, &[b'B'; 1000]).unwrap();
    drop(half);
    let mut is_torn = || matches!(slot.read(&mut buffer), Err(Error::Torn { version: 1, .. }));
    assert!(is_torn());
    let part = slot.write_at(2000, b"C").unwrap_err();
    assert!(matches!(&part, Error::PartOfTorn { row: 0, version: 1, .. }), "{part}");
    assert!(part.to_string().ends_with("write the whole message"), "{part}");
    assert!(is_torn());
    let nothing = slot.writer().unwrap().commit(1 << 20);
    assert!(matches!(nothing, Err(Error::PartOfTorn { .. })), "{nothing:?}");
    let mut gap = slot.writer().unwrap();
    gap.write_at(0, &old[..1000]).unwrap();
    gap.write_at(1001, &old[1001..]).unwrap();
    let gap = gap.commit(1 << 20);
    assert!(matches!(gap, Err(Error::PartOfTorn { .. })), "{gap:?}");
    assert!(is_torn());
    // All of it, in whatever parts.
    let mut whole = slot.writer().unwrap();
    whole.write_at(1000, &old[1000..]).unwrap();
    whole.write_at(0, &old[..1000]).unwrap();
    assert_eq!(whole.commit(1 << 20).unwrap(), 2);
    assert_eq!(slot.write_at(2000, b"C").unwrap(), 3);
    let received = slot.read(&mut buffer).unwrap();
    assert_eq!(
        (received.version, received.len, buffer[1999], buffer[2000]),
        (3, 1 << 20, b'A', b'C')
    );
}

#[test]
fn a_writer_whose_lease_is_over_can_change_nothing_any_more() {
    let server = server().lease(Duration::from_millis(500)).start().unwrap();
    let addr = server.address();
    let client = tcp(&addr);
    let slot = client.slots("params", 1, 2_000_000).unwrap().at(0).unwrap();
    let go = client.events("go", 1, 1).unwrap().at(0, 0).unwrap();
    let mut other = other("late", &addr);
    other.says("half");
    other.process.signal("STOP");
    let mut buffer = vec![0; 2_000_000];
    eventually("the row is torn", || matches!(slot.read(&mut buffer), Err(Error::Torn { .. })));
    slot.write(&message(3)).unwrap();
    go.set().unwrap();
    other.process.signal("CONT");
    other.says("lost");
    assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, 3);
    assert_eq!(slot.version().unwrap(), 1);
}

// ---- together with everything else ----------------------------------------------

#[test]
fn an_event_that_is_set_behind_a_write_is_never_seen_before_it() {
    let server = server().start().unwrap();
    let addr = server.address();
    let (one, two) = (tcp(&addr), tcp(&addr));
    one.slots("params", 1, LARGEST).unwrap();
    one.events("full", 1, 1).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let slot = one.open_slots("params").unwrap().at(0).unwrap();
            let full = one.open_events("full").unwrap().at(0, 0).unwrap();
            for number in 1..=200 {
                slot.write(&message(number)).unwrap();
                assert!(full.set().unwrap());
                while full.is_set().unwrap() {
                    thread::sleep(Duration::from_micros(50));
                }
            }
        });
        let slot = two.open_slots("params").unwrap().at(0).unwrap();
        let full = two.open_events("full").unwrap().at(0, 0).unwrap();
        let mut buffer = vec![0; LARGEST as usize];
        for number in 1..=200 {
            assert!(full.wait_timeout(LONG).unwrap());
            assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, number);
            assert!(full.take().unwrap());
        }
    });
}

#[test]
fn other_sessions_go_on_while_large_messages_stream() {
    // One worker: whatever holds it up holds up everyone.
    let server = server().workers(1).start().unwrap();
    let addr = server.address();
    let slots = tcp(&addr).slots("params", 3, 10_000_000).unwrap();
    let counter = tcp(&addr).counters("n", 1, 1).unwrap().at(0, 0).unwrap();
    let slots = &slots;
    slots.at(2).unwrap().write(&vec![1; 10_000_000]).unwrap();
    let (ops, over) = (&AtomicUsize::new(0), &AtomicBool::new(false));
    // How many operations others did during each message.
    let during: Vec<usize> = thread::scope(|scope| {
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                counter.fetch_add(1).unwrap();
                ops.fetch_add(1, Ordering::Relaxed);
            }
        });
        let streams: Vec<_> = (0..3)
            .map(|row| {
                let addr = &addr;
                scope.spawn(move || {
                    let slot = tcp(addr).open_slots("params").unwrap().at(row).unwrap();
                    let mut message = vec![row as u8; 10_000_000];
                    (0..15)
                        .map(|_| {
                            let before = ops.load(Ordering::Relaxed);
                            if row == 2 {
                                slot.read(&mut message).unwrap();
                            } else {
                                slot.write(&message).unwrap();
                            }
                            ops.load(Ordering::Relaxed) - before
                        })
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        let during = streams.into_iter().flat_map(|s| s.join().unwrap()).collect();
        over.store(true, Ordering::Relaxed);
        during
    });
    // A message takes 20 turns of the worker, and each lets all others have
    // theirs.
    let held_up = during.iter().filter(|&&n| n == 0).count();
    assert!(held_up * 5 < during.len(), "{during:?}");
    assert!(during.iter().sum::<usize>() > during.len() * 3, "{during:?}");
}

#[test]
fn connections_that_are_cut_lose_and_double_nothing() {
    let server = server().start().unwrap();
    // The session's own connection first; then those for messages, which end
    // in a head, in bytes, before an answer, in an answer.
    let mut cuts = vec![Cut::Never];
    for n in [100, 300, 100_000, 500_000] {
        cuts.push(Cut::Up(n));
        cuts.push(Cut::Down(n));
    }
    cuts.extend([Cut::Down(128 + 144 + 20), Cut::Down(128 + 144 + 48 + 10), Cut::Up(176 + 63)]);
    let proxy = Proxy::start(server.local_addrs()[0], cuts.clone());
    let slot = tcp(&proxy.addr()).slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    let mut buffer = vec![0; LARGEST as usize];
    for number in 1..=40 {
        assert_eq!(slot.write(&message(number)).unwrap(), number, "each exactly once");
        let (read, received) = messages::read(&slot, &mut buffer).unwrap();
        assert_eq!((read, received.version), (number, number));
    }
    assert!(proxy.connections() > cuts.len(), "they were all used up");
}

#[test]
fn a_message_of_a_removed_array_is_gone() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let slot = client.slots("params", 1, 100).unwrap().at(0).unwrap();
    slot.write(b"there").unwrap();
    let mut write = slot.writer().unwrap();
    write.write_at(0, b"late").unwrap();
    client.remove("params").unwrap();
    assert!(matches!(write.commit(4), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(slot.write(b"x"), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(slot.read(&mut [0; 100]), Err(Error::ArrayRemoved { .. })));
    let again = client.slots("params", 1, 100).unwrap().at(0).unwrap();
    assert_eq!(again.read(&mut [0; 100]).unwrap().version, 0);
}

#[test]
fn a_read_only_session_reads() {
    let read_only = farcell::Key::new(*b"a key for reading").unwrap();
    let server = server().read_only_key(read_only.clone()).start().unwrap();
    let writer = client(&server).connect().unwrap();
    let slot = writer.slots("params", 1, 100).unwrap().at(0).unwrap();
    slot.write(b"there").unwrap();
    let reader = Client::builder().addr(server.address()).key(read_only).connect().unwrap();
    let same = reader.open_slots("params").unwrap().at(0).unwrap();
    let mut buffer = [0; 100];
    assert_eq!(same.read(&mut buffer).unwrap().len, 5);
    assert!(matches!(same.write(b"x"), Err(Error::ReadOnly { .. })));
    assert!(matches!(same.writer(), Err(Error::ReadOnly { .. })));
    assert!(matches!(reader.slots("new", 1, 1), Err(Error::ReadOnly { .. })));
}

#[cfg(feature = "cli")]
#[test]
fn a_server_that_is_started_again_takes_messages_again() {
    let mut server = common::process::Process::start(&[]);
    let slot = tcp(&server.addr).slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    slot.write(&message(1)).unwrap();
    let held = slot.writer().unwrap();
    server.kill();
    let writer = {
        let slot = slot.clone();
        thread::spawn(move || slot.write(&message(2)))
    };
    server.start_again();
    writer.join().unwrap().unwrap();
    assert!(matches!(held.commit(3), Err(Error::WriteLost { .. })));
    let mut buffer = vec![0; LARGEST as usize];
    assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, 2);
}
