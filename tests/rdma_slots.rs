//! Messages by RDMA: whole or not there at all, to readers by any way, also when
//! the RDMA connection breaks and when writers are killed. FARCELL_KILLS says how
//! often.

mod common;

use common::another::{Speaker, role};
use common::messages::{self, LARGEST, message, size};
use common::rdma::{LONG, device, eventually, over, over_at, rdma_server, stays_over};
use farcell::{Client, Error, Server, Slot, TransportChoice};
use std::collections::BTreeMap;
use std::io::Write;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

fn both(server: &Server) -> (Client, Client) {
    (over(server, TransportChoice::Rdma), over(server, TransportChoice::Tcp))
}

fn server(cpu: bool) -> Server {
    let builder = rdma_server();
    let builder = if cpu { builder.cpu_domain() } else { builder };
    builder.start().unwrap()
}

#[test]
fn every_size_comes_back_by_either_way() {
    if !device() {
        return;
    }
    for cpu in [false, true] {
        let server = server(cpu);
        let (rdma, tcp) = both(&server);
        let ours = rdma.slots("params", 3, LARGEST).unwrap().at(1).unwrap();
        let theirs = tcp.open_slots("params").unwrap().at(1).unwrap();
        let mut buffer = vec![0; LARGEST as usize];
        assert_eq!(ours.read(&mut buffer).unwrap().version, 0);
        let mut version = 0;
        for number in 0..messages::SIZES.len() as u64 {
            for (writer, reader) in [(&ours, &theirs), (&theirs, &ours), (&ours, &ours)] {
                version += 1;
                assert_eq!(writer.write(&message(number)).unwrap(), version);
                let (read, received) = messages::read(reader, &mut buffer).unwrap();
                let want = (number, version, size(number));
                assert_eq!((read, received.version, received.len), want);
            }
        }
        // A part, and a message of no bytes.
        ours.write(b"0123456789").unwrap();
        ours.write_at(3, b"xyz").unwrap();
        ours.write_at(9, b"abc").unwrap();
        for reader in [&ours, &theirs] {
            let received = reader.read_at(2, &mut buffer[..100]).unwrap();
            assert_eq!((&buffer[..received.len], received.total), (&b"2xyz678abc"[..], 12));
        }
        ours.write(&[]).unwrap();
        assert_eq!(theirs.read(&mut []).unwrap().total, 0);
        assert_eq!(ours.read(&mut []).unwrap().total, 0);
        // The neighbours are untouched.
        assert_eq!(theirs.read_at(0, &mut buffer).unwrap().len, 0);
        let versions = rdma.open_slots("params").unwrap().versions().unwrap();
        assert_eq!((versions[0], versions[2]), (0, 0));
        assert_eq!(rdma.transport().name, "rdma", "nothing of this broke it");
    }
}

#[test]
fn a_part_does_not_make_a_torn_message_whole() {
    if !device() {
        return;
    }
    let server = server(false);
    let (rdma, tcp) = both(&server);
    let ours = rdma.slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    let theirs = tcp.open_slots("params").unwrap().at(0).unwrap();
    let mut buffer = vec![0; LARGEST as usize];
    for version in [1, 2] {
        assert_eq!(ours.write(&message(12)).unwrap(), version);
        let mut half = theirs.writer().unwrap();
        half.write_at(0, b"half").unwrap();
        drop(half);
        let part = ours.write_at(5, b"part");
        assert!(matches!(part, Err(Error::PartOfTorn { .. })), "{part:?}");
        for reader in [&ours, &theirs] {
            assert!(matches!(reader.read(&mut buffer), Err(Error::Torn { .. })));
        }
    }
    assert_eq!(ours.write(&message(12)).unwrap(), 3);
    assert_eq!(messages::read(&theirs, &mut buffer).unwrap().0, 12);
    assert_eq!(rdma.transport().name, "rdma");
}

#[test]
fn registered_memory_is_written_from_and_read_into() {
    if !device() {
        return;
    }
    let server = server(false);
    let (rdma, tcp) = both(&server);
    let ours = rdma.slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    let theirs = tcp.open_slots("params").unwrap().at(0).unwrap();
    let memory = rdma.register(2 * LARGEST as usize);
    assert!(memory.is_registered() && memory.len() == 2 * LARGEST as usize);
    let plain = tcp.register(LARGEST as usize);
    assert!(!plain.is_registered());
    let mut buffer = vec![0; LARGEST as usize];
    for (number, start) in [(15, 0), (14, 8), (12, 100), (0, 4095)] {
        let message = message(number);
        memory.write(start, &message).unwrap();
        let version = ours.write_registered(&memory, start..start + message.len()).unwrap();
        assert_eq!(messages::read(&theirs, &mut buffer).unwrap().0, number);
        let room = LARGEST as usize..2 * LARGEST as usize;
        let received = ours.read_registered(&memory, room.clone()).unwrap();
        assert_eq!((received.version, received.len), (version, message.len()));
        memory.read(room.start, &mut buffer[..message.len()]).unwrap();
        assert_eq!(messages::check(&buffer[..message.len()]), number);
        let received = theirs.read_registered(&plain, 0..plain.len()).unwrap();
        plain.read(0, &mut buffer[..received.len]).unwrap();
        assert_eq!(messages::check(&buffer[..received.len]), number);
    }
    ours.write(&message(15)).unwrap();
    let small = ours.read_registered(&memory, 0..1000);
    assert!(matches!(small, Err(Error::SlotSize { .. })), "{small:?}");
    let outside = ours.read_registered(&memory, 0..memory.len() + 1);
    assert!(matches!(outside, Err(Error::BadSelection { .. })), "{outside:?}");
    // It outlives the client that made it, and an adapter that is gone.
    rdma.close();
    memory.write(0, b"still there").unwrap();
}

#[test]
fn no_reader_ever_sees_a_torn_message() {
    if !device() {
        return;
    }
    for writer in [TransportChoice::Rdma, TransportChoice::Tcp] {
        let server = server(false);
        let writer = over(&server, writer);
        writer.slots("params", 1, LARGEST).unwrap();
        let over_now = &AtomicBool::new(false);
        thread::scope(|scope| {
            let written = scope.spawn(move || {
                let slot = writer.open_slots("params").unwrap().at(0).unwrap();
                let mut number = 0;
                while !over_now.load(Ordering::Relaxed) {
                    number += 1;
                    assert_eq!(slot.write(&message(number)).unwrap(), number);
                    thread::sleep(Duration::from_millis(20));
                }
                number
            });
            let readers: Vec<_> =
                [TransportChoice::Rdma, TransportChoice::Rdma, TransportChoice::Tcp]
                    .map(|choice| over(&server, choice))
                    .map(|client| {
                        scope.spawn(move || {
                            let slot = client.open_slots("params").unwrap().at(0).unwrap();
                            let mut buffer = vec![0; LARGEST as usize];
                            let (mut reads, mut last) = (0, 0);
                            let begun = Instant::now();
                            while begun.elapsed() < Duration::from_secs(8) {
                                let (number, received) = match messages::read(&slot, &mut buffer) {
                                    Err(Error::SlotBusy { .. }) => continue,
                                    read => read.unwrap(),
                                };
                                assert_eq!(number, received.version);
                                assert!(number >= last);
                                (reads, last) = (reads + 1, number);
                            }
                            reads
                        })
                    })
                    .into_iter()
                    .collect();
            for reader in readers {
                let reads = reader.join().unwrap();
                assert!(reads > 3, "{reads} reads");
            }
            over_now.store(true, Ordering::Relaxed);
            assert!(written.join().unwrap() > 5);
        });
    }
}

#[test]
fn an_event_that_is_set_behind_a_write_is_never_seen_before_it() {
    if !device() {
        return;
    }
    for cpu in [false, true] {
        let server = server(cpu);
        let (rdma, tcp) = both(&server);
        rdma.slots("params", 1, LARGEST).unwrap();
        rdma.events("full", 1, 1).unwrap();
        for (one, two) in [(&rdma, &tcp), (&tcp, &rdma), (&rdma, &rdma)] {
            thread::scope(|scope| {
                scope.spawn(|| {
                    let slot = one.open_slots("params").unwrap().at(0).unwrap();
                    let full = one.open_events("full").unwrap().at(0, 0).unwrap();
                    for number in 1..=20 {
                        slot.write(&message(number)).unwrap();
                        assert!(full.set().unwrap());
                        eventually("it was read", || !full.is_set().unwrap());
                    }
                });
                let slot = two.open_slots("params").unwrap().at(0).unwrap();
                let full = two.open_events("full").unwrap().at(0, 0).unwrap();
                let mut buffer = vec![0; LARGEST as usize];
                for number in 1..=20 {
                    assert!(full.wait_timeout(common::rdma::LONG).unwrap());
                    assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, number);
                    assert!(full.take().unwrap());
                }
            });
        }
    }
}

#[test]
fn messages_go_on_over_tcp_when_the_connection_breaks() {
    if !device() {
        return;
    }
    let server = server(false);
    let (rdma, tcp) = both(&server);
    let ours = rdma.slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    let theirs = tcp.open_slots("params").unwrap().at(0).unwrap();
    let over_now = &AtomicBool::new(false);
    thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut buffer = vec![0; LARGEST as usize];
            while !over_now.load(Ordering::Relaxed) {
                match messages::read(&theirs, &mut buffer) {
                    Err(Error::SlotBusy { .. }) => {}
                    read => drop(read.unwrap()),
                }
            }
        });
        for number in 1..=20 {
            if number == 5 {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(15));
                    server.break_queue_pairs_for_tests();
                });
            }
            assert_eq!(ours.write(&message(15 + 16 * number)).unwrap(), number, "each once");
        }
        over_now.store(true, Ordering::Relaxed);
        reader.join().unwrap();
    });
    assert_eq!(rdma.transport().name, "tcp");
    let mut buffer = vec![0; LARGEST as usize];
    assert_eq!(messages::read(&ours, &mut buffer).unwrap().0, 15 + 16 * 20);
}

#[test]
fn a_removed_array_is_gone_for_those_who_have_its_memory_too() {
    if !device() {
        return;
    }
    let server = server(false);
    let (rdma, tcp) = both(&server);
    let slot = rdma.slots("params", 1, 1000).unwrap().at(0).unwrap();
    slot.write(b"there").unwrap();
    let mut buffer = [0; 1000];
    assert_eq!(slot.read(&mut buffer).unwrap().len, 5);
    tcp.remove("params").unwrap();
    let read = slot.read(&mut buffer);
    assert!(matches!(read, Err(Error::ArrayRemoved { .. })), "{read:?}");
    assert!(matches!(slot.write(b"x"), Err(Error::ArrayRemoved { .. })));
    let again = tcp.slots("params", 1, 1000).unwrap().at(0).unwrap();
    again.write(b"new").unwrap();
    assert!(matches!(slot.read(&mut buffer), Err(Error::ArrayRemoved { .. })));
    assert_eq!(rdma.transport().name, "rdma");
}

// ---- writers that are killed -----------------------------------------------------

const ROLE: &str = "FARCELL_TEST_RDMA_SLOT_ROLE";
/// How long sessions of killed writers keep their rows.
const LEASE: Duration = Duration::from_secs(1);
/// How long a writer leaves its first message to those who read.
const PAUSE: Duration = Duration::from_millis(200);
/// Bytes of its messages: more than one WRITE moves.
const LONG_ONE: usize = 1_500_004;

#[test]
#[ignore = "it is what the tests below start"]
fn role_of_a_writer() {
    let Ok(what) = std::env::var(ROLE) else { return };
    let [addr, way, number] = what.split(' ').collect::<Vec<_>>()[..] else { panic!("{what}") };
    let choice = if way == "shm" { TransportChoice::Shm } else { TransportChoice::Rdma };
    let client = over_at(addr, choice);
    let slot = client.open_slots("params").unwrap().at(0).unwrap();
    let number: u64 = number.parse().unwrap();
    let long = [0, 1].map(|i| messages::of_size(number + i, LONG_ONE));
    let memory = client.register(LONG_ONE);
    memory.write(0, &long[1]).unwrap();
    println!("ready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    write_again(&slot, &long[0]);
    thread::sleep(PAUSE);
    println!("writing");
    // By both ways: from where the message is, and by way of the staging ring.
    for i in 1.. {
        match i % 2 {
            0 => slot.write(&long[0]).unwrap(),
            _ if way == "shm" => slot.write(&long[1]).unwrap(),
            _ => slot.write_registered(&memory, 0..LONG_ONE).unwrap(),
        };
    }
}

/// Writes as soon as the one before is no longer taken for a writer. The version, and
/// how long that took.
fn write_again(slot: &Slot, message: &[u8]) -> (u64, Duration) {
    let begun = Instant::now();
    loop {
        match slot.write(message) {
            Ok(version) => return (version, begun.elapsed()),
            Err(Error::SlotBusy { .. }) if begun.elapsed() < LONG => {}
            Err(error) => panic!("{error}"),
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// What readers have found: which message each version is.
#[derive(Default)]
struct Found(Mutex<BTreeMap<u64, u64>>);

impl Found {
    /// Reads whole messages until it is over; how many, and how often there was none.
    fn read_until(&self, over_now: &AtomicBool, slot: &Slot) -> (usize, usize) {
        let mut buffer = vec![0; LONG_ONE];
        let (mut whole, mut none, mut last) = (0, 0, 0);
        while !over_now.load(Ordering::Relaxed) {
            // Whoever is at work beside it needs the processor.
            thread::sleep(Duration::from_millis(10));
            match messages::read(slot, &mut buffer) {
                Ok((number, received)) => {
                    assert!(received.version >= last, "{} after {last}", received.version);
                    last = received.version;
                    self.is(last, number);
                    whole += 1;
                }
                Err(Error::SlotBusy { .. } | Error::Torn { .. }) => none += 1,
                Err(error) => panic!("{error}"),
            }
        }
        (whole, none)
    }

    fn is(&self, version: u64, number: u64) {
        let before = *self.0.lock().unwrap().entry(version).or_insert(number);
        assert_eq!(before, number, "two messages of version {version}");
    }
}

/// Ends those who go on until it is over, also where something else has failed.
struct Ends<'f>(&'f AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A writer that is ready to begin.
fn writer(server: &Server, way: &str, number: u64) -> Speaker {
    let what = format!("{} {way} {number}", server.address());
    Speaker::start(role("role_of_a_writer", ROLE, what).stdin(Stdio::piped()))
}

/// Kills writers in the middle of messages, under the eyes of readers by two ways.
fn kill_writers(way: &str, usual: u64, readers: [TransportChoice; 2]) {
    if !device() {
        return;
    }
    let kills = std::env::var("FARCELL_KILLS").ok();
    let kills = kills.map_or(usual, |n| n.parse().expect("FARCELL_KILLS"));
    let server = rdma_server().lease(LEASE).start().unwrap();
    let (rdma, tcp) = both(&server);
    rdma.slots("params", 1, LONG_ONE as u64).unwrap();
    let slots = [&rdma, &tcp].map(|c| c.open_slots("params").unwrap().at(0).unwrap());
    let ways = readers;
    let readers = readers.map(|c| over(&server, c));
    let (found, over_now) = (&Found::default(), &AtomicBool::new(false));
    let (mut seed, mut in_the_middle, mut last) = (7, 0, 0);
    thread::scope(|scope| {
        let readers = readers.each_ref().map(|client| {
            let slot = client.open_slots("params").unwrap().at(0).unwrap();
            scope.spawn(move || found.read_until(over_now, &slot))
        });
        let ends = Ends(over_now);
        let mut next = writer(&server, way, 1);
        for kill in 0..kills {
            let number = 10 * kill + 1;
            next.says("ready");
            // Connections take long: the one behind it makes its own meanwhile.
            let mut writer = std::mem::replace(&mut next, self::writer(&server, way, number + 10));
            writer.process.0.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
            writer.says("writing");
            thread::sleep(Duration::from_micros(common::random(&mut seed, 400_000)));
            writer.process.kill();
            // Every other time the next one is a writer who is here already.
            let slot = &slots[kill as usize / 2 % 2];
            let refused = match slot.write(b"too soon") {
                Ok(_) => false,
                Err(Error::SlotBusy { .. }) => true,
                Err(error) => panic!("{error}"),
            };
            in_the_middle += u32::from(refused);
            let version = slot.version().unwrap();
            assert!(version > last, "{version} after {last}");
            last = version;
            if kill % 2 == 0 {
                let (version, took) = write_again(slot, &messages::of_size(number + 5, 65_537));
                assert!(version > last, "{version} after {last}");
                found.is(version, number + 5);
                last = version;
                println!("kill {kill}: refused {refused}, the next message after {took:?}");
                assert!(took < LEASE + Duration::from_secs(10), "{took:?}");
            }
        }
        drop(ends);
        let read = readers.map(|reader| reader.join().unwrap());
        println!("{in_the_middle} of {kills} in the middle; whole messages, and none: {read:?}");
        // While a row is being written, also by a dead one, they wait for its end.
        for (whole, _) in read {
            assert!(whole as u64 > kills / 2, "{whole} were read");
        }
    });
    assert!(u64::from(in_the_middle) > kills / 2, "{in_the_middle}");
    // Nobody was sent another way.
    stays_over(&rdma, TransportChoice::Rdma);
    for (client, choice) in readers.iter().zip(ways) {
        stays_over(client, choice);
    }
}

#[test]
fn writers_that_are_killed_over_rdma_tear_no_message() {
    kill_writers("rdma", 8, [TransportChoice::Rdma, TransportChoice::Tcp]);
}

/// In the domain of the adapter they write in memory what the server lets them.
#[test]
fn writers_that_are_killed_in_memory_tear_no_message_for_those_over_rdma() {
    kill_writers("shm", 4, [TransportChoice::Rdma, TransportChoice::Shm]);
}
