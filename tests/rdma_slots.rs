//! Messages by RDMA: whole or not there at all, to readers by any way, and also
//! when the RDMA connection breaks.

mod common;

use common::messages::{self, LARGEST, message, size};
use common::rdma::{device, eventually, over, rdma_server};
use farcell::{Client, Error, Server, TransportChoice};
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
