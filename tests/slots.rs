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
fn there_is_a_limit_for_all_slots_together() {
    let server = server().slot_bytes(1 << 20).start().unwrap();
    let client = client(&server).connect().unwrap();
    client.slots("a", 1, 700_000).unwrap();
    let full = client.slots("b", 1, 700_000).unwrap_err();
    assert!(matches!(full, Error::SlotsFull { .. }) && full.to_string().contains("--slot-bytes"));
    assert!(full.to_string().contains("within two leases"), "{full}");
    client.remove("a").unwrap();
    client.slots("b", 1, 700_000).unwrap();
}

// ---- writers --------------------------------------------------------------------

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
