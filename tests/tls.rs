//! Promise: with TLS nobody on the way reads what is said, and everything else is
//! as without.
#![cfg(feature = "cli")]

mod common;
use common::messages::{check, message, of_size};
use common::process::Process;
use common::proxy::{Cut, Proxy};
use common::{client, eventually, key, random, server};
use farcell::{Client, ClientBuilder, Error, Server, Tls, TransportChoice};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const ARRAY: &str = "an_array_whose_name_would_show";
const MESSAGE: &[u8] = b"a message whose bytes would show, wherever they are";

/// Forwards connections, and keeps a copy of what goes by it.
struct Recorder {
    addr: SocketAddr,
    seen: Arc<Mutex<Vec<u8>>>,
}

impl Recorder {
    fn start(server: SocketAddr) -> Recorder {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let recorder = Recorder { addr: listener.local_addr().unwrap(), seen: Arc::default() };
        let seen = recorder.seen.clone();
        std::thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                let far = TcpStream::connect(server).unwrap();
                let ends = (near.try_clone().unwrap(), far.try_clone().unwrap());
                for (from, to) in [(near, far), (ends.1, ends.0)] {
                    let seen = seen.clone();
                    std::thread::spawn(move || record(from, to, &seen));
                }
            }
        });
        recorder
    }

    fn has_seen(&self, what: &[u8]) -> bool {
        self.seen.lock().unwrap().windows(what.len()).any(|seen| seen == what)
    }
}

fn record(mut from: TcpStream, mut to: TcpStream, seen: &Mutex<Vec<u8>>) {
    let mut buffer = [0; 16384];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        // One direction at a time is good enough: what is looked for is short.
        seen.lock().unwrap().extend_from_slice(&buffer[..n]);
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

fn tcp(addr: impl Into<String>) -> ClientBuilder {
    Client::builder().addr(addr).key(key()).transport(TransportChoice::Tcp)
}

#[test]
fn nothing_can_be_read_on_the_way_and_without_tls_it_can() {
    for (mode, shows) in [("off", true), ("auto", false), ("require", false)] {
        let server = Process::start(&["--tls", mode]);
        let recorder = Recorder::start(server.addr.parse().unwrap());
        let client = tcp(recorder.addr.to_string()).connect().unwrap();
        assert_eq!(client.is_encrypted(), !shows, "{mode}");
        let told = client.transport().reasons.join("; ").contains("encrypted (TLS 1.3)");
        assert_eq!(told, !shows, "{mode}");
        let events = client.events(ARRAY, 2, 2).unwrap();
        events.at(0, 1).unwrap().set().unwrap();
        let slot = client.slots("slots", 1, 4096).unwrap().at(0).unwrap();
        slot.write(MESSAGE).unwrap();
        let mut buffer = [0; 4096];
        let received = slot.read(&mut buffer).unwrap();
        assert_eq!(&buffer[..received.len], MESSAGE);
        client.join("a peer whose name would show").unwrap();
        client.close();
        // The start of the greeting is always in clear.
        assert!(recorder.has_seen(b"\xFAfarcell"), "{mode}");
        for what in [ARRAY.as_bytes(), MESSAGE, b"a peer whose name would show"] {
            assert_eq!(recorder.has_seen(what), shows, "{mode}");
        }
    }
}

#[test]
fn what_does_not_go_together_says_what_to_do() {
    let required = Process::start(&["--tls", "require"]);
    let off = Process::start(&[]);
    let error = tcp(&required.addr).tls(Tls::Off).connect().unwrap_err();
    assert!(matches!(error, Error::Tls { .. }) && error.is_refusal(), "{error}");
    assert!(error.to_string().contains("connect with --tls auto"), "{error}");
    let error = tcp(&off.addr).tls(Tls::Require).connect().unwrap_err();
    assert!(matches!(error, Error::Tls { .. }), "{error}");
    assert!(error.to_string().contains("start the server with --tls"), "{error}");
    // As the program says it.
    let run = |server: &Process, tls: &[&str], variable: &str| {
        let run = std::process::Command::new(env!("CARGO_BIN_EXE_farcell"))
            .args(["--addr", &server.addr, "--transport", "tcp", "--authkey-file"])
            .arg(server.dir.path().join("key"))
            .args(tls)
            .args(["ls"])
            .env("FARCELL_TLS", variable)
            .output()
            .unwrap();
        (run.status.code(), String::from_utf8_lossy(&run.stderr).into_owned())
    };
    let (code, said) = run(&required, &["--tls", "off"], "");
    assert!(code == Some(4) && said.contains("no encrypted connection"), "{code:?} {said}");
    let (code, said) = run(&off, &[], "require");
    assert!(code == Some(4) && said.contains("no encrypted connection"), "{code:?} {said}");
    let (code, said) = run(&off, &[], "yes");
    assert!(code.is_some_and(|c| c != 0) && said.contains("FARCELL_TLS"), "{code:?} {said}");
    for (server, tls) in [(&required, "require"), (&required, "auto"), (&off, "auto")] {
        assert_eq!(run(server, &["--tls", tls], "off"), (Some(0), String::new()));
    }
    // A client that knows nothing of TLS is told too, by a verdict of its own.
    let mut bare = TcpStream::connect(&required.addr).unwrap();
    let mut greeting = [0; 48];
    bare.read_exact(&mut greeting).unwrap();
    assert_eq!(greeting[10], 2);
    let mut hello = [0; 112];
    hello[..10].copy_from_slice(&greeting[..10]);
    bare.write_all(&hello).unwrap();
    let mut welcome = [0; 80];
    bare.read_exact(&mut welcome).unwrap();
    assert_eq!(welcome[10], 6);
}

#[test]
fn rdma_which_cannot_be_encrypted_is_off_where_tls_is_required() {
    use farcell::RdmaChoice;
    let builder = || Server::builder(key()).bind("127.0.0.1:0").tls(Tls::Require);
    let server = builder().start().unwrap();
    assert!(server.no_rdma().unwrap().contains("cannot be encrypted"));
    let error = tcp(server.address()).transport(TransportChoice::Rdma).connect().unwrap_err();
    assert!(matches!(error, Error::Rdma { .. }), "{error}");
    let named = RdmaChoice::Device("none0".to_owned());
    let error = builder().rdma(named.clone()).start().unwrap_err();
    assert!(matches!(error, Error::BadSetting { .. }), "{error}");
    assert!(error.to_string().contains("--clear-rdma"), "{error}");
    // Allowed, it is looked for; there is none of that name.
    let error = builder().rdma(named).clear_rdma().start().unwrap_err();
    assert!(matches!(error, Error::Rdma { .. }), "{error}");
    // The client's own wish keeps it off as well.
    let server = common::server().tls(Tls::Auto).start().unwrap();
    let wants = |builder: ClientBuilder| {
        let error = builder.transport(TransportChoice::Rdma).connect().unwrap_err();
        error.to_string().contains("TLS is required")
    };
    assert!(wants(tcp(server.address()).tls(Tls::Require)));
    assert!(!wants(tcp(server.address()).tls(Tls::Require).clear_rdma()));
    assert!(!wants(tcp(server.address())));
}

#[test]
fn waits_wake_and_large_requests_come_through() {
    let server = server().tls(Tls::Require).workers(2).start().unwrap();
    let client = tcp(server.address()).connect().unwrap();
    let events = client.events("e", 8, 4).unwrap();
    let counters = client.counters("c", 100, 1000).unwrap();
    std::thread::scope(|s| {
        for t in 0..8 {
            let events = &events;
            s.spawn(move || {
                let event = events.at(t, 0).unwrap();
                for _ in 0..50 {
                    event.wait().unwrap();
                    assert!(event.take().unwrap());
                    events.at(t, 1).unwrap().set().unwrap();
                }
                let short = Duration::from_millis(30);
                assert!(!event.wait_timeout(short).unwrap());
            });
            let addr = server.address();
            s.spawn(move || {
                let other = tcp(addr).connect().unwrap();
                let events = other.events("e", 8, 4).unwrap();
                for _ in 0..50 {
                    events.at(t, 0).unwrap().set().unwrap();
                    events.at(t, 1).unwrap().wait().unwrap();
                    assert!(events.at(t, 1).unwrap().take().unwrap());
                }
            });
        }
        // More in one go than waits to be sent anywhere, both ways.
        let mut batch = client.batch();
        let cells = counters.rows() * counters.cols();
        for i in 0..cells {
            batch.fetch_add(&counters.flat(i).unwrap(), i as i64);
        }
        assert_eq!(batch.run().unwrap().len(), cells);
        let all: Vec<i64> = counters.all().snapshot().unwrap();
        assert_eq!(all, (0..cells as i64).collect::<Vec<_>>());
    });
    assert_eq!(server.parked_waits(), 0);
}

#[test]
fn a_message_is_whole() {
    let server = server().tls(Tls::Require).workers(2).start().unwrap();
    let connect = || tcp(server.address()).connect().unwrap();
    let writer = connect();
    let slot = writer.slots("s", 2, common::messages::LARGEST).unwrap().at(0).unwrap();
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let reader = connect();
                let slot = reader.open_slots("s").unwrap().at(0).unwrap();
                let mut buffer = vec![0; common::messages::LARGEST as usize];
                let mut last = 0;
                while last < 40 {
                    match common::messages::read(&slot, &mut buffer) {
                        Ok((number, _)) => {
                            assert!(number >= last);
                            last = number;
                        }
                        Err(Error::SlotBusy { .. }) => {}
                        Err(e) => panic!("{e}"),
                    }
                }
            });
        }
        for number in 1..=40 {
            slot.write(&message(number)).unwrap();
        }
    });
    // In parts, and a part of one.
    let bytes = of_size(7, 3_000_001);
    let mut write = slot.writer().unwrap();
    for (i, part) in bytes.chunks(700_001).enumerate() {
        write.write_at(i as u64 * 700_001, part).unwrap();
    }
    write.commit(bytes.len() as u64).unwrap();
    let mut buffer = vec![0; common::messages::LARGEST as usize];
    let received = slot.read(&mut buffer).unwrap();
    assert_eq!(check(&buffer[..received.len]), 7);
}

/// 40 operations, and a message, through a connection that is cut.
fn exchange(client: &Client, cell: usize, big: &[u8]) {
    let counter = client.counters("c", 1, 512).unwrap().flat(cell).unwrap();
    for next in 0..20 {
        assert_eq!(counter.fetch_add(1).unwrap(), next);
    }
    let mut batch = client.batch();
    for _ in 0..20 {
        batch.fetch_add(&counter, 1);
    }
    let found: Vec<i64> = batch.run().unwrap().iter().map(|o| o.value()).collect();
    assert_eq!(found, (20..40).collect::<Vec<_>>());
    if !big.is_empty() {
        let slot = client.slots("s", 1, 1 << 20).unwrap().at(0).unwrap();
        slot.write(big).unwrap();
        let mut buffer = vec![0; 1 << 20];
        let received = slot.read(&mut buffer).unwrap();
        assert_eq!(&buffer[..received.len], big);
    }
}

#[test]
fn each_happens_once_wherever_the_connection_is_cut() {
    let server = server().tls(Tls::Require).start().unwrap();
    let watcher = client(&server).connect().unwrap();
    let counters = watcher.counters("c", 1, 512).unwrap();
    let mut seed = 40;
    for cell in 0..160 {
        let mut cuts = Vec::new();
        for _ in 0..3 {
            // The handshake alone is 400 and 1,000 bytes.
            let at = random(&mut seed, 3000) as usize;
            cuts.push(if random(&mut seed, 2) == 0 { Cut::Up(at) } else { Cut::Down(at) });
        }
        let proxy = Proxy::start(server.local_addrs()[0], cuts);
        let client = tcp(proxy.addr())
            .tls(Tls::Require)
            .wait_for_server(Duration::from_secs(10))
            .connect()
            .unwrap();
        exchange(&client, cell, &[]);
        assert_eq!(counters.flat(cell).unwrap().load().unwrap(), 40);
    }
    let big = of_size(9, 1 << 20);
    for cell in 200..224 {
        let cuts = (0..4).map(|_| match random(&mut seed, 2) {
            0 => Cut::Up(random(&mut seed, 1 << 20) as usize),
            _ => Cut::Down(random(&mut seed, 1 << 20) as usize),
        });
        let proxy = Proxy::start(server.local_addrs()[0], cuts.collect());
        let client = tcp(proxy.addr())
            .tls(Tls::Require)
            .wait_for_server(Duration::from_secs(10))
            .connect()
            .unwrap();
        exchange(&client, cell, &big);
        assert_eq!(counters.flat(cell).unwrap().load().unwrap(), 40);
    }
}

#[test]
fn a_server_that_is_back_has_another_certificate_and_the_same_clients() {
    let state = tempfile::Builder::new().prefix("farcell-tls").tempdir_in("/dev/shm").unwrap();
    let dir = state.path().join("state");
    let mut server =
        Process::start(&["--tls", "require", "--state", dir.to_str().unwrap(), "--lease", "5"]);
    let client = tcp(&server.addr).tls(Tls::Require).connect().unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let guard = lock.lock().unwrap();
    event.set().unwrap();
    server.kill();
    server.start_again();
    assert!(event.is_set().unwrap());
    eventually("it is encrypted again", || client.is_encrypted());
    guard.unlock().unwrap();
}
