//! Messages in shared memory are as whole as any others: nobody reads a torn one,
//! also not from writers that are killed or come too late, and whatever the others
//! reach the server by.

mod common;

use common::another::{Speaker, role};
use common::messages::{self, LARGEST, message, size};
use common::proxy::{Cut, Proxy};
use common::{key, server};
use farcell::{Client, Error, Key, Slot, TransportChoice};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

const ROLE: &str = "FARCELL_TEST_SHM_SLOT_ROLE";
const LONG: Duration = Duration::from_secs(20);

fn client(addr: &str, choice: TransportChoice) -> Client {
    let client = Client::builder().addr(addr).key(key()).transport(choice).connect().unwrap();
    let name = if choice == TransportChoice::Tcp { "tcp" } else { "shm" };
    assert_eq!(client.transport().name, name);
    client
}

fn shm(addr: &str) -> Client {
    client(addr, TransportChoice::Shm)
}

/// This test executable once more, as a client that does what its role says.
fn other(as_what: &str, addr: &str) -> Speaker {
    Speaker::start(&mut role("role_of_another_process", ROLE, format!("{as_what} {addr}")))
}

#[test]
#[ignore = "it is what the other tests start"]
fn role_of_another_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (role, addr) = role.split_once(' ').unwrap();
    let slot = shm(addr).open_slots("params").unwrap().at(0).unwrap();
    if role == "parts" {
        let mut half = slot.writer().unwrap();
        half.write_at(0, &long_part(9)).unwrap();
        println!("half");
        thread::sleep(LONG);
        return;
    }
    // The eager one is nearly always in the middle of a message; the other one
    // leaves moments in which it can be read.
    let long = [1, 2].map(|number| messages::of_size(number, LARGEST as usize));
    let mut number = slot.version().unwrap() + 1;
    println!("writing");
    loop {
        let written = match role {
            "eager" => slot.write(&long[number as usize % 2]),
            _ => slot.write(&message(number)),
        };
        match written {
            Ok(_) => number += 1,
            Err(Error::WriteLost { row: 0, .. }) => {
                println!("lost");
                return;
            }
            Err(Error::SlotBusy { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        if role != "eager" {
            thread::sleep(Duration::from_millis(3));
        }
    }
}

fn long_part(byte: u8) -> Vec<u8> {
    vec![byte; LARGEST as usize / 2]
}

/// Parts are copied into the memory: none of their bytes goes through a socket.
#[test]
fn parts_go_through_memory_and_are_as_whole_as_by_tcp() {
    let server = server().start().unwrap();
    let proxy = Proxy::start(server.local_addrs()[0], Vec::new());
    let slot = shm(&proxy.addr()).slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    slot.write(&long_part(1)).unwrap();
    let over_tcp = client(&server.address(), TransportChoice::Tcp);
    let seen = over_tcp.open_slots("params").unwrap().at(0).unwrap();
    let mut buffer = vec![0; LARGEST as usize];
    let before = proxy.forwarded();
    let mut write = slot.writer().unwrap();
    write.write_at(0, &long_part(2)).unwrap();
    write.write_at(LARGEST / 2, &long_part(3)).unwrap();
    assert!(matches!(seen.write(b"x"), Err(Error::SlotBusy { .. })));
    assert_eq!(write.commit(LARGEST).unwrap(), 2);
    let (up, down) = proxy.forwarded();
    let sent = up + down - before.0 - before.1;
    assert!(sent < 10_000, "{sent} bytes went over the connection");
    for slot in [&slot, &seen] {
        let received = slot.read(&mut buffer).unwrap();
        assert_eq!((received.version, received.total), (2, LARGEST));
        assert_eq!(buffer, [long_part(2), long_part(3)].concat());
    }
    // One that is given up before its first part leaves all as it was, and one
    // that is given up behind it a torn row.
    drop(slot.writer().unwrap());
    assert_eq!(seen.read(&mut buffer).unwrap().version, 2);
    let mut half = slot.writer().unwrap();
    half.write_at(3, b"half").unwrap();
    drop(half);
    assert!(matches!(seen.read(&mut buffer), Err(Error::Torn { version: 2, .. })));
    // Nothing less than all of a message makes it whole.
    let mut gap = slot.writer().unwrap();
    gap.write_at(0, b"012").unwrap();
    gap.write_at(4, b"4567").unwrap();
    assert!(matches!(gap.commit(8), Err(Error::PartOfTorn { .. })));
    let mut whole = slot.writer().unwrap();
    whole.write_at(4, b"4567").unwrap();
    whole.write_at(0, b"0123").unwrap();
    assert_eq!(whole.commit(8).unwrap(), 3);
    assert_eq!(seen.read(&mut buffer).unwrap().len, 8);
    assert_eq!(&buffer[..8], b"01234567");
}

/// A writer whose connection is cut between its parts is told, and lets go of the
/// row.
#[test]
fn a_cut_between_parts_tears_the_row_and_frees_it() {
    let server = server().start().unwrap();
    // The first is the session's own.
    let cuts = vec![Cut::Never, Cut::Up(600)];
    let proxy = Proxy::start(server.local_addrs()[0], cuts);
    let slot = shm(&proxy.addr()).slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    slot.write(b"before").unwrap();
    let mut write = slot.writer().unwrap();
    let lost = loop {
        if let Err(error) = write.write_at(0, b"part") {
            break error;
        }
        thread::sleep(Duration::from_millis(1));
    };
    assert!(matches!(lost, Error::WriteLost { .. }), "{lost}");
    drop(write);
    let torn = slot.read(&mut [0; 8]);
    assert!(matches!(torn, Err(Error::Torn { version: 1, .. })), "{torn:?}");
    assert_eq!(slot.write(b"after").unwrap(), 2);
}

#[test]
fn a_writer_that_is_killed_between_its_parts_leaves_a_torn_row() {
    let server = server().lease(Duration::from_millis(500)).start().unwrap();
    let addr = server.address();
    let slot = shm(&addr).slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    slot.write(b"before").unwrap();
    let mut writer = other("parts", &addr);
    writer.says("half");
    writer.process.kill();
    let mut buffer = vec![0; LARGEST as usize];
    let torn = slot.read(&mut buffer);
    assert!(matches!(torn, Err(Error::Torn { version: 1, .. })), "{torn:?}");
    assert_eq!(slot.write(b"after").unwrap(), 2);
    assert_eq!(slot.read(&mut buffer).unwrap().len, 5);
}

#[test]
fn no_reader_ever_sees_a_torn_message() {
    let read_only = Key::new(*b"a key for reading").unwrap();
    let server = server().read_only_key(read_only.clone()).start().unwrap();
    let addr = server.address();
    shm(&addr).slots("params", 1, LARGEST).unwrap();
    let mut writer = other("writer", &addr);
    writer.says("writing");
    let reads_only = Client::builder().addr(&addr).key(read_only).connect().unwrap();
    assert_eq!(reads_only.transport().name, "shm");
    let clients = [shm(&addr), client(&addr, TransportChoice::Tcp), reads_only];
    thread::scope(|scope| {
        let readers: Vec<_> = clients
            .iter()
            .map(|client| {
                scope.spawn(|| {
                    let slot = client.open_slots("params").unwrap().at(0).unwrap();
                    let mut buffer = vec![0; LARGEST as usize];
                    let (mut reads, mut last, begun) = (0, 0, Instant::now());
                    while begun.elapsed() < Duration::from_secs(3) {
                        let (number, received) = match messages::read(&slot, &mut buffer) {
                            Err(Error::SlotBusy { .. }) => continue,
                            read => read.unwrap(),
                        };
                        assert_eq!(number, received.version);
                        assert!(number == 0 || received.len == size(number));
                        assert!(number >= last);
                        (last, reads) = (number, reads + 1);
                    }
                    reads
                })
            })
            .collect();
        for reader in readers {
            let reads = reader.join().unwrap();
            assert!(reads > 10, "{reads} reads");
        }
    });
}

#[test]
fn what_one_transport_writes_the_others_read() {
    let server = server().start().unwrap();
    let addr = server.address();
    let clients = [shm(&addr), client(&addr, TransportChoice::Tcp)];
    let slots = clients.each_ref().map(|c| c.slots("params", 3, LARGEST).unwrap());
    let mut buffer = vec![0; LARGEST as usize];
    for number in 0..48u64 {
        let from = &slots[number as usize % 2].at(1).unwrap();
        assert_eq!(from.write(&message(number)).unwrap(), number + 1);
        for to in &slots {
            assert_eq!(messages::read(&to.at(1).unwrap(), &mut buffer).unwrap().0, number);
        }
    }
    let [here, there] = slots.each_ref().map(|s| s.at(1).unwrap());
    for (slot, other) in [(&here, &there), (&there, &here)] {
        slot.write(b"0123456789").unwrap();
        slot.write_at(3, b"xyz").unwrap();
        slot.write_at(9, b"abc").unwrap();
        let received = other.read(&mut buffer).unwrap();
        assert_eq!(&buffer[..received.len], b"012xyz678abc");
        let received = other.read_at(5, &mut buffer[..6]).unwrap();
        assert_eq!((&buffer[..received.len], received.total), (&b"z678ab"[..], 12));
        slot.write(&[]).unwrap();
        assert_eq!(other.read(&mut []).unwrap().total, 0);
        // A claim by one is one for the other.
        let write = slot.writer().unwrap();
        assert!(matches!(other.write(b"x"), Err(Error::SlotBusy { .. })));
        drop(write);
        assert!(matches!(other.write(&[0; LARGEST as usize + 1]), Err(Error::SlotSize { .. })));
    }
    assert_eq!(slots[0].versions().unwrap()[0], 0, "the neighbours are untouched");
    assert_eq!(slots[1].versions().unwrap()[2], 0);
}

#[test]
fn a_reader_that_waits_is_woken_by_every_kind_of_writer() {
    let server = server().start().unwrap();
    let addr = server.address();
    let clients = [shm(&addr), client(&addr, TransportChoice::Tcp)];
    let slots = clients.each_ref().map(|c| c.slots("params", 1, 64).unwrap().at(0).unwrap());
    thread::scope(|scope| {
        for slot in &slots {
            scope.spawn(|| {
                let (mut last, mut buffer) = (0, [0; 64]);
                while last < 40 {
                    let begun = Instant::now();
                    let read = slot.read_newer(last, &mut buffer, Some(LONG)).unwrap().unwrap();
                    assert!(read.version > last && begun.elapsed() < LONG);
                    last = read.version;
                }
            });
        }
        for number in 0..40 {
            thread::sleep(Duration::from_millis(5));
            slots[number % 2].write(&[1; 64]).unwrap();
        }
    });
}

#[test]
fn a_borrowed_message_says_whether_it_was_replaced() {
    let server = server().start().unwrap();
    let addr = server.address();
    for choice in [TransportChoice::Shm, TransportChoice::Tcp] {
        let client = client(&addr, choice);
        let slot = client.slots("params", 1, LARGEST).unwrap().at(0).unwrap();
        let before = slot.version().unwrap();
        slot.write(&messages::of_size(7, 100_003)).unwrap();
        let borrowed = slot.borrow().unwrap();
        assert_eq!((borrowed.version(), borrowed.len()), (before + 1, 100_003));
        let bytes: Vec<u8> = borrowed
            .words()
            .iter()
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .take(borrowed.len())
            .collect();
        assert_eq!(messages::check(&bytes), 7);
        assert!(borrowed.is_whole());
        slot.write(&message(8)).unwrap();
        assert_eq!(borrowed.is_whole(), choice == TransportChoice::Tcp, "that is a copy");
        let (first, received) =
            slot.read_with(|words, _| words[0].load(Ordering::Relaxed)).unwrap();
        assert_eq!((first, received.version, received.len), (8, before + 2, size(8)));
        slot.write(&[]).unwrap();
        assert!(slot.borrow().unwrap().words().is_empty());
    }
}

#[test]
fn sums_of_borrowed_messages_are_of_one_message() {
    let server = server().start().unwrap();
    let addr = server.address();
    shm(&addr).slots("params", 1, LARGEST).unwrap();
    let mut writer = other("writer", &addr);
    writer.says("writing");
    let slot = shm(&addr).open_slots("params").unwrap().at(0).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    let begun = Instant::now();
    let enough = |seen: usize| seen > 3 || begun.elapsed() > LONG;
    while begun.elapsed() < Duration::from_secs(2) || !enough(seen.len()) {
        let sum = |words: &[std::sync::atomic::AtomicU64], len: usize| {
            let bytes: Vec<u8> =
                words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).collect();
            bytes[..len].to_vec()
        };
        match slot.read_with(sum) {
            Ok((bytes, received)) if received.version > 0 => {
                assert_eq!(messages::check(&bytes), received.version);
                seen.insert(received.version);
            }
            Ok(_) | Err(Error::SlotBusy { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    assert!(seen.len() > 3, "{seen:?}");
}

/// Reads until the row is no longer being written; `None` for a torn one.
fn settled(slot: &Slot, buffer: &mut [u8]) -> Option<u64> {
    let begun = Instant::now();
    loop {
        match messages::read(slot, buffer) {
            Ok((number, _)) => return Some(number),
            Err(Error::Torn { .. }) => return None,
            Err(Error::SlotBusy { .. }) if begun.elapsed() < LONG => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn writers_that_are_killed_leave_a_whole_message_or_a_torn_row_and_hold_up_nobody() {
    let server = server().lease(Duration::from_millis(300)).start().unwrap();
    let addr = server.address();
    let slot = shm(&addr).slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    let mut buffer = vec![0; LARGEST as usize];
    let mut torn = 0;
    for round in 0..12u64 {
        let mut writer = other("eager", &addr);
        writer.says("writing");
        thread::sleep(Duration::from_micros(7_000 + round * 731));
        writer.process.signal("KILL");
        writer.process.0.wait().unwrap();
        let before = slot.version().unwrap();
        torn += u64::from(settled(&slot, &mut buffer).is_none());
        assert_eq!(slot.version().unwrap(), before, "nobody writes any more");
        assert_eq!(slot.write(&message(round)).unwrap(), before + 1);
        assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, round);
    }
    assert!(torn > 0, "it was never met in the middle");
}

#[test]
fn a_writer_that_was_stopped_past_its_lease_changes_nothing_any_more() {
    let server = server().lease(Duration::from_millis(300)).start().unwrap();
    let addr = server.address();
    let slot = client(&addr, TransportChoice::Tcp).slots("params", 1, LARGEST).unwrap();
    let slot = slot.at(0).unwrap();
    let mut buffer = vec![0; LARGEST as usize];
    for _ in 0..20 {
        let mut writer = other("eager", &addr);
        writer.says("writing");
        thread::sleep(Duration::from_millis(9));
        writer.process.signal("STOP");
        if settled(&slot, &mut buffer).is_some() {
            // It was stopped between two messages.
            continue;
        }
        let number = slot.write(&messages::of_size(77, LARGEST as usize)).unwrap();
        // Our message is whole before the other one goes on.
        assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, 77);
        writer.process.signal("CONT");
        writer.says("lost");
        // What it was putting into the row when it was stopped went elsewhere.
        assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, 77);
        assert_eq!(slot.version().unwrap(), number);
        // The row has moved, and all reach it there.
        let same = shm(&addr).open_slots("params").unwrap().at(0).unwrap();
        for (from, to) in [(&slot, &same), (&same, &slot), (&same, &same)] {
            from.write(&message(5)).unwrap();
            assert_eq!(messages::read(to, &mut buffer).unwrap().0, 5);
            from.write_at(8, &messages::of_size(5, 8)).unwrap();
            to.read(&mut buffer).unwrap();
            assert_eq!(buffer[8..16], 5u64.to_le_bytes());
        }
        return;
    }
    panic!("it was never stopped in the middle");
}

#[test]
fn messages_of_a_removed_array_are_gone() {
    let server = server().start().unwrap();
    let client = shm(&server.address());
    let slot = client.slots("params", 1, 100).unwrap().at(0).unwrap();
    slot.write(b"there").unwrap();
    let borrowed = slot.borrow().unwrap();
    client.remove("params").unwrap();
    assert!(!borrowed.is_whole());
    assert!(matches!(slot.write(b"x"), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(slot.read(&mut [0; 100]), Err(Error::ArrayRemoved { .. })));
    assert!(matches!(slot.borrow(), Err(Error::ArrayRemoved { .. })));
    let again = client.slots("params", 1, 100).unwrap().at(0).unwrap();
    assert_eq!(again.read(&mut [0; 100]).unwrap().version, 0);
    assert_eq!(again.write(b"new").unwrap(), 1);
}

#[cfg(feature = "cli")]
#[test]
fn a_server_that_is_started_again_takes_messages_in_its_new_memory() {
    let mut server = common::process::Process::start(&[]);
    let client = shm(&server.addr);
    let slot = client.slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    slot.write(&message(1)).unwrap();
    let borrowed = slot.borrow().unwrap();
    server.kill();
    server.start_again();
    let mut buffer = vec![0; LARGEST as usize];
    assert_eq!(slot.write(&message(2)).unwrap(), 1, "it is another array");
    assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, 2);
    common::eventually("in memory again", || client.transport().name == "shm");
    assert_eq!(slot.write(&message(3)).unwrap(), 2);
    let other = self::client(&server.addr, TransportChoice::Tcp);
    let same = other.open_slots("params").unwrap().at(0).unwrap();
    assert_eq!(messages::read(&same, &mut buffer).unwrap().0, 3);
    assert!(!borrowed.is_whole());
}
