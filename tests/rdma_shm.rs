//! Promise: clients that use RDMA, TCP and the server's memory count on one
//! counter, and none is lost: whoever may look at the memory by itself changes it
//! by the one who makes all changes. Messages that one of them puts into the memory
//! are whole for all of them.

mod common;
use common::another::{Speaker, role};
use common::messages::{self, LARGEST, message, size};
use common::proxy::Proxy;
use common::rdma::{LONG, device, eventually, over, over_at, rdma_server, stays_over};
use common::{client, key};
use farcell::{Client, Domain, Error, Server, Slot, TransportChoice};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const EACH: i64 = 300;

const WAYS: [TransportChoice; 3] =
    [TransportChoice::Shm, TransportChoice::Rdma, TransportChoice::Tcp];

/// A server in the domain of its adapter, and a client over each transport.
fn all_ways() -> (Server, [Client; 3]) {
    let server = rdma_server().start().unwrap();
    assert_eq!(server.domain(), Domain::Hca);
    let clients = WAYS.map(|choice| over(&server, choice));
    (server, clients)
}

#[test]
fn nothing_is_lost_between_memory_adapter_and_server() {
    if !device() {
        return;
    }
    let server = rdma_server().start().unwrap();
    assert_eq!(server.domain(), Domain::Hca);
    let builder = || Client::builder().addr(server.address()).key(key());
    let shm = builder().transport(TransportChoice::Shm).connect().unwrap();
    let auto = client(&server).connect().unwrap();
    for client in [&shm, &auto] {
        assert_eq!(client.transport().name, "shm", "{:?}", client.transport());
    }
    let others = [TransportChoice::Rdma, TransportChoice::Tcp].map(|choice| over(&server, choice));
    let clients = [&shm, &auto, &others[0], &others[1]];
    std::thread::scope(|s| {
        for client in clients {
            s.spawn(move || {
                let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
                for _ in 0..EACH {
                    let before = counter.fetch_add(1).unwrap();
                    assert!(counter.load().unwrap() > before);
                }
            });
        }
    });
    let counter = shm.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    assert_eq!(counter.load().unwrap(), EACH * clients.len() as i64);
    println!("{:?}", shm.transport());
    // Waits go by the server, whoever sets.
    for setter in clients {
        for waiter in clients {
            let set = setter.events("e", 1, 1).unwrap().at(0, 0).unwrap();
            let wait = waiter.events("e", 1, 1).unwrap().at(0, 0).unwrap();
            std::thread::scope(|s| {
                let waits = s.spawn(|| wait.wait_timeout(LONG).unwrap());
                common::eventually("it waits", || server.parked_waits() == 1);
                assert!(set.set().unwrap());
                assert!(waits.join().unwrap());
            });
            assert!(set.clear().unwrap());
        }
    }
    // Nobody has the memory to write: the kernel would refuse a change.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours: Vec<&str> = maps.lines().filter(|line| line.contains("memfd:farcell")).collect();
    let shown = ours.iter().filter(|line| line.contains(" r--s ")).count();
    assert_eq!(shown, 4, "two files of two clients: {ours:?}");
}

// ---- messages --------------------------------------------------------------------

/// The bytes of a message that is looked at where it is.
fn borrowed_bytes(slot: &Slot) -> (Vec<u8>, u64) {
    let borrowed = slot.borrow().unwrap();
    let words = borrowed.words().iter();
    let bytes: Vec<u8> = words.flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).collect();
    assert!(borrowed.is_whole());
    (bytes[..borrowed.len()].to_vec(), borrowed.version())
}

#[test]
fn what_one_way_writes_the_others_read_and_borrow() {
    if !device() {
        return;
    }
    let (_server, clients) = all_ways();
    let arrays = clients.each_ref().map(|c| c.slots("params", 3, LARGEST).unwrap());
    let slots = arrays.each_ref().map(|array| array.at(1).unwrap());
    let mut buffer = vec![0; LARGEST as usize];
    let mut version = 0;
    for number in 0..messages::SIZES.len() as u64 {
        for (writer, slot) in slots.iter().enumerate() {
            let number = 3 * 16 * writer as u64 + number;
            version += 1;
            assert_eq!(slot.write(&message(number)).unwrap(), version);
            let reader = &slots[(writer + number as usize) % 3];
            let (read, received) = messages::read(reader, &mut buffer).unwrap();
            assert_eq!((read, received.version, received.len), (number, version, size(number)));
            // In memory, whoever wrote it.
            let (bytes, of) = borrowed_bytes(&slots[0]);
            assert_eq!((messages::check(&bytes), bytes.len(), of), (number, size(number), version));
        }
    }
    // Parts, by each of them, and what was borrowed before them.
    for (writer, slot) in slots.iter().enumerate() {
        slot.write(b"0123456789").unwrap();
        let borrowed = slots[0].borrow().unwrap();
        slot.write_at(3, b"xyz").unwrap();
        assert!(!borrowed.is_whole(), "writer {writer} replaced it");
        assert!(borrowed.version() < slots[0].version().unwrap());
        slot.write_at(9, b"abc").unwrap();
        for reader in &slots {
            let received = reader.read_at(2, &mut buffer[..100]).unwrap();
            assert_eq!((&buffer[..received.len], received.total), (&b"2xyz678abc"[..], 12));
        }
        let (bytes, received) = slots[0]
            .read_with(|words, len| {
                words[0].load(Ordering::Relaxed).to_le_bytes()[..len.min(8)].to_vec()
            })
            .unwrap();
        assert_eq!((&bytes[..], received.total), (&b"012xyz67"[..], 12));
        // A claim by one is one for all, and what it leaves is torn for all.
        let mut half = slot.writer().unwrap();
        half.write_at(0, b"half").unwrap();
        for other in &slots {
            assert!(matches!(other.write(b"x"), Err(Error::SlotBusy { .. })));
        }
        drop(half);
        for other in &slots {
            assert!(matches!(other.read(&mut buffer), Err(Error::Torn { .. })));
            let part = other.write_at(1, b"x");
            assert!(matches!(part, Err(Error::PartOfTorn { .. })), "{part:?}");
        }
        slots[0].write(&[]).unwrap();
        assert_eq!(slot.read(&mut []).unwrap().total, 0);
    }
    let versions = arrays[0].versions().unwrap();
    assert_eq!((versions[0], versions[2]), (0, 0), "the neighbours are untouched");
    for (client, choice) in clients.iter().zip(WAYS) {
        stays_over(client, choice);
    }
}

/// In this domain the server claims rows for those who write in memory; the bytes
/// are theirs to put there all the same.
#[test]
fn messages_in_memory_are_not_sent() {
    if !device() {
        return;
    }
    let (server, [_, rdma, _]) = all_ways();
    let proxy = Proxy::start(server.local_addrs()[0], Vec::new());
    let shm = over_at(&proxy.addr(), TransportChoice::Shm);
    let slot = shm.slots("params", 1, LARGEST).unwrap().at(0).unwrap();
    let seen = rdma.open_slots("params").unwrap().at(0).unwrap();
    let mut buffer = vec![0; LARGEST as usize];
    slot.write(&message(15)).unwrap();
    slot.read(&mut buffer).unwrap();
    let before = proxy.forwarded();
    assert_eq!(slot.write(&message(31)).unwrap(), 2);
    assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, 31);
    assert_eq!(messages::read(&seen, &mut buffer).unwrap().0, 31);
    seen.write(&message(47)).unwrap();
    assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, 47);
    let (up, down) = proxy.forwarded();
    let sent = up + down - before.0 - before.1;
    assert!(sent < 10_000, "{sent} bytes went over the connection");
}

#[test]
fn an_event_that_is_set_behind_a_message_is_never_seen_before_it() {
    if !device() {
        return;
    }
    let (_server, clients) = all_ways();
    clients[0].slots("params", 1, LARGEST).unwrap();
    clients[0].events("full", 1, 1).unwrap();
    for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 0), (0, 0)] {
        let (from, to) = (&clients[from], &clients[to]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let slot = from.open_slots("params").unwrap().at(0).unwrap();
                let full = from.open_events("full").unwrap().at(0, 0).unwrap();
                for number in 9..=16 {
                    slot.write(&message(number)).unwrap();
                    assert!(full.set().unwrap());
                    eventually("it was read", || !full.is_set().unwrap());
                }
            });
            let slot = to.open_slots("params").unwrap().at(0).unwrap();
            let full = to.open_events("full").unwrap().at(0, 0).unwrap();
            let mut buffer = vec![0; LARGEST as usize];
            for number in 9..=16 {
                // Every other time it is looked for, in memory where that is there.
                match number % 2 {
                    0 => eventually("it is set", || full.is_set().unwrap()),
                    _ => assert!(full.wait_timeout(LONG).unwrap()),
                }
                assert_eq!(messages::read(&slot, &mut buffer).unwrap().0, number);
                assert!(full.take().unwrap());
            }
        });
    }
    for (client, choice) in clients.iter().zip(WAYS) {
        stays_over(client, choice);
    }
}

const ROLE: &str = "FARCELL_TEST_RDMA_SHM_ROLE";
const LEASE: Duration = Duration::from_secs(1);

#[test]
#[ignore = "it is what the test below starts"]
fn role_of_a_writer() {
    let Ok(addr) = std::env::var(ROLE) else { return };
    let slot = over_at(&addr, TransportChoice::Shm).open_slots("params").unwrap().at(0).unwrap();
    let long = [1, 2].map(|number| messages::of_size(number, LARGEST as usize));
    println!("writing");
    for i in 0.. {
        let begun = Instant::now();
        let written = slot.write(&long[i % 2]);
        assert!(matches!(written, Ok(_) | Err(Error::WriteLost { .. })), "{written:?}");
        if begun.elapsed() > LEASE {
            // It was stopped meanwhile.
            println!("went on");
            return;
        }
    }
}

/// What it still puts into the memory when it goes on is nobody's: the row has moved,
/// and those over RDMA find it there, too. Then it writes its message once more, in a
/// new session.
#[test]
fn a_writer_in_memory_that_was_stopped_past_its_lease_tears_nothing_for_rdma() {
    if !device() {
        return;
    }
    let server = rdma_server().lease(LEASE).start().unwrap();
    let clients = WAYS.map(|choice| over(&server, choice));
    let slots = clients.each_ref().map(|c| {
        let array = c.slots("params", 1, LARGEST).unwrap();
        array.at(0).unwrap()
    });
    let mut buffer = vec![0; LARGEST as usize];
    for _ in 0..20 {
        let mut writer = Speaker::start(&mut role("role_of_a_writer", ROLE, server.address()));
        writer.says("writing");
        std::thread::sleep(Duration::from_millis(30));
        writer.process.signal("STOP");
        let busy = matches!(slots[1].write(b"x"), Err(Error::SlotBusy { .. }));
        if !busy {
            // It was stopped between two messages.
            continue;
        }
        let ours = messages::of_size(77, LARGEST as usize);
        eventually("its lease is over", || match slots[1].write(&ours) {
            Err(Error::SlotBusy { .. }) => false,
            written => written.is_ok(),
        });
        writer.process.signal("CONT");
        std::thread::scope(|scope| {
            let goes_on = scope.spawn(|| writer.says("went on"));
            let mut last = 0;
            while !goes_on.is_finished() {
                for slot in &slots {
                    match messages::read(slot, &mut buffer) {
                        Ok((number, received)) => {
                            assert!([1, 2, 77].contains(&number), "{number}");
                            assert!(received.version >= last, "{} after {last}", received.version);
                            last = received.version;
                        }
                        Err(Error::SlotBusy { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        });
        for (number, (from, to)) in [(0, 1), (1, 0), (1, 2), (2, 1)].into_iter().enumerate() {
            slots[from].write(&message(number as u64)).unwrap();
            assert_eq!(messages::read(&slots[to], &mut buffer).unwrap().0, number as u64);
        }
        return;
    }
    panic!("it was never stopped in the middle");
}
