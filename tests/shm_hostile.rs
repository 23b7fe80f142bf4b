//! Promise: a client on the server's machine that scribbles over all the memory
//! that it may write damages cells, and neither the server nor anyone else.

mod common;
use common::{client, eventually, key, server};
use farcell::{Client, Key, Kind, TransportChoice};
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const ADDR: &str = "FARCELL_TEST_SHM_ADDR";

/// Mappings of this process that are the server's memory: first and last
/// address, and what may be done there.
fn mappings() -> Vec<(u64, u64, String)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|line| line.contains("memfd:farcell"));
    ours.map(|line| {
        let mut words = line.split_whitespace();
        let (start, end) = words.next().unwrap().split_once('-').unwrap();
        let address = |text| u64::from_str_radix(text, 16).unwrap();
        (address(start), address(end), words.next().unwrap().to_owned())
    })
    .collect()
}

/// The hostile client, in a process of its own: nothing to do as a test.
#[test]
fn a_scribbler() {
    let Ok(addr) = std::env::var(ADDR) else { return };
    let client =
        Client::builder().addr(addr).key(key()).transport(TransportChoice::Shm).connect().unwrap();
    let _array = client.counters("c", 4, 4).unwrap();
    let writable: Vec<_> = mappings().into_iter().filter(|(.., how)| how == "rw-s").collect();
    assert_eq!(writable.len(), 2, "the segment and its own desk: {writable:?}");
    let memory = OpenOptions::new().write(true).open("/proc/self/mem").unwrap();
    let mut random = 88_172_645_463_325_252u64;
    let begun = Instant::now();
    for round in 0u64.. {
        for (start, end, _) in &writable {
            let mut bytes = vec![0; (end - start) as usize];
            for word in bytes.chunks_exact_mut(8) {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let word_now = match round % 4 {
                    0 => random,
                    1 => random | 1,
                    // Small ones, that could be taken for indices.
                    2 => random >> 40,
                    _ => u64::MAX - (random >> 60),
                };
                word.copy_from_slice(&word_now.to_le_bytes());
            }
            memory.write_all_at(&bytes, *start).unwrap();
        }
        if begun.elapsed() > Duration::from_millis(1500) {
            return;
        }
    }
}

#[test]
fn garbage_in_the_memory_harms_nobody_but_the_cells() {
    let server = server()
        .capacity(4096)
        .workers(2)
        .array("c", Kind::Counter, 4, 4)
        .array("e", Kind::Event, 4, 4)
        .start()
        .unwrap();
    let others: Vec<Client> = [TransportChoice::Tcp, TransportChoice::Shm]
        .map(|choice| client(&server).transport(choice).connect().unwrap())
        .into();
    let mut hostile = Command::new(std::env::current_exe().unwrap())
        .args(["a_scribbler", "--exact", "--nocapture"])
        .env(ADDR, server.address())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::scope(|s| {
        let (hostile, server) = (&mut hostile, &server);
        let ended = std::sync::atomic::AtomicBool::new(false);
        let ended = &*Box::leak(Box::new(ended));
        for client in &others {
            s.spawn(move || {
                let counters = client.counters("c", 4, 4).unwrap();
                let events = client.events("e", 4, 4).unwrap();
                let mut made = 0u32;
                while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                    // Whatever they find there, it is an answer.
                    let at = (made as usize % 4, made as usize / 4 % 4);
                    let counter = counters.at(at.0, at.1).unwrap();
                    let event = events.at(at.0, at.1).unwrap();
                    counter.fetch_add(1).unwrap();
                    event.set().unwrap();
                    event.take().unwrap();
                    event.wait_timeout(Duration::from_millis(1)).unwrap();
                    events.all().wait_some(3, Some(Duration::from_millis(1))).unwrap();
                    events.all().waiters().unwrap();
                    client.info().unwrap();
                    let name = format!("made-{made}-{}", client.transport().name);
                    let array = client.counters(&name, 1, 3).unwrap();
                    array.all().snapshot().unwrap();
                    client.remove(&name).unwrap();
                    made += 1;
                }
                assert!(made > 10, "hardly anything was done meanwhile: {made}");
            });
        }
        assert!(hostile.wait().unwrap().success());
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        let _ = server.parked_waits();
    });
    // It is gone, and all is well: new arrays are clean, old cells can be used
    // again, and new clients get the memory.
    eventually("nothing waits", || server.parked_waits() == 0 || server.sessions() > 2);
    let after = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    let fresh = after.counters("fresh", 8, 8).unwrap();
    assert!(fresh.all().snapshot().unwrap().into_iter().all(|v| v == 0));
    let old = others[0].counters("c", 4, 4).unwrap().at(2, 2).unwrap();
    old.store(5).unwrap();
    assert_eq!(after.counters("c", 4, 4).unwrap().at(2, 2).unwrap().fetch_add(1).unwrap(), 5);
    assert_eq!(old.load().unwrap(), 6);
}

#[test]
fn who_may_only_read_maps_nothing_to_write() {
    let reader = Key::new(*b"the key of the readers").unwrap();
    let server = server().read_only_key(reader.clone()).start().unwrap();
    // In this process, whose other tests map to write: those are told apart by
    // what was there before.
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["a_reader", "--exact", "--nocapture"])
        .env("FARCELL_TEST_SHM_READER", server.address())
        .status()
        .unwrap();
    assert!(child.success());
}

/// A client that may only read, in a process of its own.
#[test]
fn a_reader() {
    let Ok(addr) = std::env::var("FARCELL_TEST_SHM_READER") else { return };
    let reader = Key::new(*b"the key of the readers").unwrap();
    let client = Client::builder().addr(addr).key(reader).connect().unwrap();
    assert_eq!(client.transport().name, "shm", "{:?}", client.transport());
    let maps = mappings();
    assert_eq!(maps.len(), 2, "{maps:?}");
    assert!(maps.iter().all(|(.., how)| how == "r--s"), "{maps:?}");
}

#[test]
fn strangers_at_the_socket_get_nothing_and_hold_nothing() {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketType, sendto, socket};
    let server = server().start().unwrap();
    // Its name can be seen by everyone on the machine.
    let names: Vec<String> = std::fs::read_to_string("/proc/net/unix")
        .unwrap()
        .lines()
        .filter_map(|line| line.split_once("@farcell-").map(|(_, name)| name.trim().to_owned()))
        .collect();
    assert!(!names.is_empty());
    let stranger = socket(AddressFamily::UNIX, SocketType::DGRAM, None).unwrap();
    for name in &names {
        let to = SocketAddrUnix::new_abstract_name(format!("farcell-{name}").as_bytes()).unwrap();
        for bytes in [&[][..], &[0; 16], &[7; 17], &[9; 4096], b"give me memory"] {
            for _ in 0..50 {
                let _ = sendto(&stranger, bytes, SendFlags::DONTWAIT, &to);
            }
        }
    }
    let client = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    assert_eq!(client.transport().name, "shm");
}
