//! Promise: a client that is slow, silent, half there, gone or talks garbage
//! costs only itself.

mod common;
use common::{client, eventually, key, server};
use farcell::{Client, Error, Event, Key, Server, TransportChoice};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

fn event(server: &Server) -> (Client, Event) {
    let client = client(server).connect().unwrap();
    let event = client.events("quiet", 1, 1).unwrap().at(0, 0).unwrap();
    (client, event)
}

fn raw(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.local_addrs()[0]).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// Reads until the server closes, and says how many bytes there were.
fn read_to_end(stream: &mut TcpStream) -> usize {
    let mut total = 0;
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return total,
            Ok(n) => total += n,
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return total,
            Err(e) => panic!("the server did not close: {e}"),
        }
    }
}

fn works(event: &Event) {
    event.set().unwrap();
    assert!(event.take().unwrap());
}

/// Resident bytes of this process, the servers of this test among them.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn garbage_is_closed_at_once_and_silence_after_five_seconds() {
    let server = server().start().unwrap();
    let (_client, event) = event(&server);
    let mut silent = raw(&server);
    let mut half = raw(&server);
    half.write_all(b"\xFAfarcell\x01\x00").unwrap();
    let begun = Instant::now();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\0", b"\xFAfarcelL", &[0xff; 5000]] {
        let mut stream = raw(&server);
        stream.write_all(garbage).unwrap();
        assert!(read_to_end(&mut stream) <= 48, "nothing but the greeting is sent");
        works(&event);
    }
    assert!(begun.elapsed() < Duration::from_secs(4));
    assert_eq!(read_to_end(&mut silent), 48);
    assert_eq!(read_to_end(&mut half), 48);
    assert!(begun.elapsed() > Duration::from_secs(4));
    assert!(begun.elapsed() < Duration::from_secs(9));
    works(&event);
}

#[test]
fn thousands_of_half_open_connections() {
    let server = server().start().unwrap();
    let (_client, event) = event(&server);
    let mut strangers = Vec::new();
    for i in 0..3000 {
        match TcpStream::connect(server.local_addrs()[0]) {
            Ok(stream) => strangers.push(stream),
            Err(e) => panic!("after {i}: {e}"),
        }
        if i % 100 == 0 {
            works(&event);
        }
    }
    let newcomer = client(&server).connect().unwrap();
    newcomer.list().unwrap();
    assert_eq!(server.sessions(), 2);
}

#[test]
fn a_wrong_key_opens_nothing() {
    let server = server().start().unwrap();
    for _ in 0..50 {
        let error = Client::builder()
            .addr(server.address())
            .key(Key::new(*b"another key").unwrap())
            .connect()
            .unwrap_err();
        assert!(matches!(error, Error::AuthenticationFailed { .. }), "{error}");
    }
    assert_eq!(server.sessions(), 0);
}

/// Lets a client and the server shake hands through the two sockets that are
/// returned: that to the client, and that to the server.
fn pass_handshake(listener: &TcpListener, there: SocketAddr) -> (TcpStream, TcpStream) {
    let (mut near, _) = listener.accept().unwrap();
    let mut far = TcpStream::connect(there).unwrap();
    // Greeting, hello, welcome.
    let mut buffer = [0; 112];
    far.read_exact(&mut buffer[..48]).unwrap();
    near.write_all(&buffer[..48]).unwrap();
    near.read_exact(&mut buffer[..112]).unwrap();
    far.write_all(&buffer[..112]).unwrap();
    far.read_exact(&mut buffer[..80]).unwrap();
    near.write_all(&buffer[..80]).unwrap();
    (near, far)
}

/// A client in the middle of things that speaks raw frames: connects through
/// the library, then takes the socket's place by a proxy that injects bytes.
fn session_that_says(server: &Server, bytes: Vec<u8>) -> Result<(), Error> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap().to_string();
    let there = server.local_addrs()[0];
    let proxy = std::thread::spawn(move || {
        let (near, mut far) = pass_handshake(&listener, there);
        // Errors: the server has closed already, which is what we want.
        let _ = far.write_all(&bytes);
        let _ = far.shutdown(Shutdown::Write);
        far.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let answered = read_to_end(&mut far);
        near.shutdown(Shutdown::Both).unwrap();
        answered
    });
    let client =
        Client::builder().addr(here).key(key()).transport(TransportChoice::Tcp).connect()?;
    let answered = proxy.join().unwrap();
    assert!(answered < 1 << 20, "{answered} bytes");
    client.close();
    Ok(())
}

#[test]
fn broken_frames_end_their_own_session() {
    let server = server().start().unwrap();
    let (_client, event) = event(&server);
    let header = |len: u32, tag: u8, id: u64| {
        let mut bytes = len.to_le_bytes().to_vec();
        bytes.extend([tag, 0, 0, 0]);
        bytes.extend(id.to_le_bytes());
        bytes
    };
    let mut cases = vec![
        header(u32::MAX, 1, 1),
        header(1 << 21, 1, 1),
        header(0, 1, 1),
        header(0, 200, 1),
        header(0, 64, 1),
        header(7, 2, 1),
        vec![0; 16],
        vec![0xff; 100_000],
    ];
    // One operation with a code that is none; a run over 4 billion cells; an
    // open under number 65,535; a wait for no cells.
    let with = |tag: u8, payload: &[u8]| {
        let mut bytes = header(payload.len() as u32, tag, 1);
        bytes.extend(payload);
        bytes
    };
    cases.push(with(1, &[0xee; 24]));
    let mut runs = vec![1, 0, 0, 0, 0, 0, 0, 0];
    runs.extend([0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
    cases.push(with(2, &runs));
    cases.push(with(3, &[0xff, 0xff, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, b'a']));
    cases.push(with(16, &[1, 0, 0, 0, 0, 0, 0, 0]));
    for (i, case) in cases.into_iter().enumerate() {
        session_that_says(&server, case).unwrap_or_else(|e| panic!("case {i}: {e}"));
        works(&event);
    }
}

#[test]
fn who_asks_for_much_and_reads_nothing_is_held_up_alone() {
    let server = server().start().unwrap();
    let (client, event) = event(&server);
    client.events("big", 1, 100_000).unwrap();
    // A thousand snapshots of 800,000 bytes, none of them read.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap().to_string();
    let there = server.local_addrs()[0];
    let before = resident();
    let greedy = std::thread::spawn(move || {
        let (near, mut far) = pass_handshake(&listener, there);
        let mut bytes = Vec::new();
        // Open "big" as number 0, whatever it is.
        bytes.extend([15, 0, 0, 0, 3, 0, 0, 0]);
        bytes.extend(1u64.to_le_bytes());
        bytes.extend([0; 12]);
        bytes.extend(b"big");
        for id in 2..1002u64 {
            bytes.extend([20, 0, 0, 0, 2, 0, 0, 0]);
            bytes.extend(id.to_le_bytes());
            bytes.extend([1, 0, 0, 0, 0, 0, 0, 0]);
            bytes.extend(0u32.to_le_bytes());
            bytes.extend(100_000u32.to_le_bytes());
            bytes.extend(1u32.to_le_bytes());
        }
        far.write_all(&bytes).unwrap();
        (near, far)
    });
    let greedy_client =
        Client::builder().addr(here).key(key()).transport(TransportChoice::Tcp).connect().unwrap();
    let (near, far) = greedy.join().unwrap();
    for _ in 0..200 {
        works(&event);
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 64 << 20, "the server holds {} MiB", grown >> 20);
    drop((near, far));
    greedy_client.close();
    works(&event);
}

#[test]
fn a_vanished_client_is_forgotten_with_its_lease() {
    let server = server().lease(Duration::from_millis(300)).start().unwrap();
    let (_client, event) = event(&server);
    assert_eq!(server.sessions(), 1);
    // A session whose client stops reading and writing but keeps its socket.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap().to_string();
    let there = server.local_addrs()[0];
    let frozen = std::thread::spawn(move || pass_handshake(&listener, there));
    let lost =
        Client::builder().addr(here).key(key()).transport(TransportChoice::Tcp).connect().unwrap();
    let (_near, mut far) = frozen.join().unwrap();
    assert_eq!(server.sessions(), 2);
    eventually("its lease is over", || server.sessions() == 1);
    read_to_end(&mut far);
    // Meanwhile the living one was kept alive by its heartbeats.
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(server.sessions(), 1);
    works(&event);
    drop(lost);
}
