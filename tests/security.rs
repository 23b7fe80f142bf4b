//! Promise: what docs/security.md says of who can do what. Other parts of it are
//! held by tests/hostile.rs, shm_hostile.rs, tls.rs, tls_middle.rs, fork.rs and
//! state.rs.

mod common;
use common::{client, eventually, key, server};
use farcell::{Client, ClientBuilder, Error, Key, Server, TransportChoice, WaitOptions};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn read_only() -> Key {
    Key::new(*b"the key of those who look").unwrap()
}

fn looker(server: &Server) -> ClientBuilder {
    Client::builder().addr(server.address()).key(read_only())
}

#[test]
fn the_read_only_key_changes_nothing_by_any_way() {
    let server = server().read_only_key(read_only()).start().unwrap();
    let owner = client(&server).connect().unwrap();
    owner.events("e", 2, 2).unwrap().at(0, 0).unwrap().set().unwrap();
    owner.counters("c", 1, 1).unwrap();
    owner.slots("s", 1, 64).unwrap().at(0).unwrap().write(b"here").unwrap();
    owner.locks("l", 1, 1).unwrap();
    for way in [TransportChoice::Tcp, TransportChoice::Shm] {
        let client = looker(&server).transport(way).connect().unwrap();
        let event = client.open_events("e").unwrap().at(0, 0).unwrap();
        assert!(event.is_set().unwrap());
        event.wait().unwrap();
        let mut buffer = [0; 64];
        let slot = client.open_slots("s").unwrap().at(0).unwrap();
        assert_eq!(slot.read(&mut buffer).unwrap().len, 4);
        let refused = |result: Result<(), Error>| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::ReadOnly { .. }), "{way:?}: {error}");
        };
        refused(event.set().map(drop));
        refused(event.clear().map(drop));
        refused(event.take().map(drop));
        let counter = client.open_counters("c").unwrap().at(0, 0).unwrap();
        refused(counter.fetch_add(1).map(drop));
        refused(slot.write(b"gone").map(drop));
        refused(client.remove("e"));
        refused(client.events("another", 1, 1).map(drop));
        assert!(client.join("somebody").is_err());
        let mut batch = client.batch();
        batch.fetch_add(&counter, 1);
        refused(batch.run().map(drop));
    }
    assert_eq!(owner.open_counters("c").unwrap().at(0, 0).unwrap().load().unwrap(), 0);
    let mut buffer = [0; 64];
    owner.open_slots("s").unwrap().at(0).unwrap().read(&mut buffer).unwrap();
    assert_eq!(&buffer[..4], b"here");
    assert_eq!(owner.list().unwrap().len(), 4);
}

#[test]
fn what_the_server_leaves_on_disk_is_its_owners_alone() {
    let shm = tempfile::Builder::new().prefix("farcell-modes").tempdir_in("/dev/shm").unwrap();
    let (state, snapshots) = (shm.path().join("state"), shm.path().join("snapshots"));
    let server = server().state(&state).snapshots(&snapshots).capacity(64).start().unwrap();
    client(&server).connect().unwrap().events("e", 1, 1).unwrap();
    server.stop().unwrap();
    let mut files = 0;
    for folder in [state, snapshots] {
        let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder) & 0o077, 0, "{folder:?}");
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(mode(&path) & 0o077, 0, "{path:?}");
            files += 1;
        }
    }
    assert!(files >= 3, "{files}");
}

#[test]
fn waits_of_a_session_are_bounded_and_others_go_on() {
    let server = server().max_waits(10).start().unwrap();
    let greedy = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    let events = greedy.events("e", 8, 8).unwrap();
    let modest = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    let other = modest.events("e", 8, 8).unwrap();
    let mut pending = Vec::new();
    for i in 0..10 {
        pending.push(events.at(0, i % 8).unwrap().wait_then(|_| ()).unwrap());
    }
    let error = events.at(1, 0).unwrap().wait().unwrap_err();
    assert!(matches!(error, Error::Limit { .. }) && error.is_refusal(), "{error}");
    assert!(error.to_string().contains("this session waits"), "{error}");
    // Nothing of it stays, and the others are as they were.
    assert_eq!(server.parked_waits(), 10);
    other.at(1, 0).unwrap().set().unwrap();
    other.at(1, 0).unwrap().wait().unwrap();
    assert_eq!(greedy.info().unwrap().parked_waits, 10);
    for i in 0..8 {
        other.at(0, i).unwrap().set().unwrap();
    }
    eventually("all have woken", || server.parked_waits() == 0);
    // Cells count four to a wait: 40, and no more.
    let error = events.all().wait_all(None).unwrap_err();
    assert!(matches!(error, Error::Limit { .. }), "{error}");
    drop(pending);
}

#[test]
fn peers_that_waits_name_count_as_cells() {
    let server = server().max_waits(5).start().unwrap();
    let client = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let named = |count: usize| {
        let peers: Vec<String> = (0..count).map(|i| format!("peer {i}")).collect();
        let short = Some(Duration::from_millis(20));
        let mut options = WaitOptions::new().peers(peers);
        if let Some(time) = short {
            options = options.timeout(time);
        }
        event.wait_with_options(&options)
    };
    // One cell and 19 names are 20. Over and over: none of it stays behind.
    for _ in 0..30 {
        assert!(!named(19).unwrap());
    }
    let error = named(20).unwrap_err();
    assert!(matches!(error, Error::Limit { .. }), "{error}");
    assert!(!named(19).unwrap());
    assert_eq!(server.parked_waits(), 0);
}

/// A loopback socket that comes from this address.
fn from(source: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.into()
}

#[test]
fn a_host_that_floods_cannot_push_out_the_strangers_of_another() {
    let server = server().workers(1).start().unwrap();
    let there = server.local_addrs()[0];
    // It has not said anything yet, and is the oldest of all.
    let mut patient = from([127, 0, 0, 2], there);
    patient.read_exact(&mut [0; 48]).unwrap();
    // More than there is room for, from one address.
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let most = (files.unwrap_or(u64::MAX) / 4).clamp(16, 4096);
    let mut flood: Vec<_> = (0..most + 100).map(|_| from([127, 0, 0, 3], there)).collect();
    let last = flood.last_mut().unwrap();
    last.read_exact(&mut [0; 48]).unwrap();
    // It can still speak: a version that is not spoken is answered.
    let mut hello = [0; 112];
    hello[..8].copy_from_slice(b"\xFAfarcell");
    patient.write_all(&hello).unwrap();
    let mut answer = [0; 80];
    patient.read_exact(&mut answer).unwrap();
    assert_eq!(answer[10], 1);
    client(&server).connect().unwrap().list().unwrap();
}

#[test]
fn a_storm_of_wrong_keys_leaves_the_others_their_turn() {
    let server = server().workers(1).start().unwrap();
    let quiet = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    let counter = quiet.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let stop = AtomicBool::new(false);
    let mut times: Vec<Duration> = Vec::new();
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                let wrong = Key::new(*b"a key that is guessed").unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let tried = Client::builder().addr(server.address()).key(wrong.clone());
                    let error = tried.connect().unwrap_err();
                    let refused = matches!(
                        error,
                        Error::AuthenticationFailed { .. } | Error::Unreachable { .. }
                    );
                    assert!(refused, "{error}");
                }
            });
        }
        for i in 0..300 {
            let begun = Instant::now();
            assert_eq!(counter.fetch_add(1).unwrap(), i);
            times.push(begun.elapsed());
        }
        stop.store(true, Ordering::Relaxed);
    });
    times.sort_unstable();
    let median = times[times.len() / 2];
    assert!(median < Duration::from_millis(100), "{median:?}");
    assert_eq!(server.sessions(), 1);
}

#[test]
fn keys_show_nowhere() {
    let server = server().read_only_key(read_only()).start().unwrap();
    let builder = client(&server);
    let shown = format!("{builder:?} {server:?} {:?}", builder.clone().connect().unwrap());
    let secret = String::from_utf8(key().expose().to_vec()).unwrap();
    assert!(!shown.contains(&secret) && !shown.contains("those who look"), "{shown}");
    assert!(!shown.contains(&format!("{:?}", key().expose())), "{shown}");
}
