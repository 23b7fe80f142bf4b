//! Promise: who stands between a client and a server, and does not know the key, is
//! refused by both; and who only begins to speak TLS costs himself alone.
#![cfg(feature = "tls")]

mod common;
use common::{key, server};
use farcell::{Client, ClientBuilder, Error, Event, Server, Tls, TransportChoice};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, ServerConfig, ServerConnection,
    SignatureScheme, StreamOwned,
};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

const HELLO: usize = 112;
const WELCOME: usize = 80;
const BINDING: usize = 32;

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

#[derive(Debug)]
struct Any;

impl ServerCertVerifier for Any {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        panic!("TLS 1.2 was spoken");
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &provider().signature_verification_algorithms)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

/// TLS with a server, as one who takes any certificate.
fn towards(stream: TcpStream) -> StreamOwned<ClientConnection, TcpStream> {
    let config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Any))
        .with_no_client_auth();
    let name = ServerName::try_from("anything").unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), stream)
}

/// TLS with a client, by a certificate of his own.
fn instead(stream: TcpStream) -> StreamOwned<ServerConnection, TcpStream> {
    let made = rcgen::generate_simple_self_signed(["the real one".to_owned()]).unwrap();
    let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key.into())
        .unwrap();
    StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), stream)
}

/// What one in the middle does with what he can read.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Passes all of it on.
    Passes,
    /// Puts the value of his own connection to the server into the hello.
    Rebinds,
    /// Tells the client that it is let in.
    LetsIn,
}

/// Stands in the middle of one connection, and tells what verdict the server gave.
fn in_the_middle(server: SocketAddr, way: Way) -> (String, Receiver<Option<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect(server).unwrap();
        let mut greeting = [0; 48];
        far.read_exact(&mut greeting).unwrap();
        near.write_all(&greeting).unwrap();
        let (mut near, mut far) = (instead(near), towards(far));
        let mut hello = [0; HELLO + BINDING];
        near.read_exact(&mut hello).unwrap();
        // It is all there to be read, and worth nothing.
        assert_eq!(&hello[..8], b"\xFAfarcell");
        if let Way::Rebinds = way {
            far.flush().unwrap();
            while far.conn.is_handshaking() {
                far.conn.complete_io(&mut far.sock).unwrap();
            }
            let label = b"EXPORTER-Channel-Binding";
            let own = far.conn.export_keying_material([0; BINDING], label, Some(&[])).unwrap();
            assert_ne!(own, hello[HELLO..]);
            hello[HELLO..].copy_from_slice(&own);
        }
        far.write_all(&hello).unwrap();
        let mut welcome = [0; WELCOME];
        let verdict = far.read_exact(&mut welcome).ok().map(|()| welcome[10]);
        tell.send(verdict).unwrap();
        if let Way::LetsIn = way {
            // Access, lease, capacity: all as a client likes it. But no proof.
            welcome[10] = 0;
            welcome[11] = 1;
            welcome[12] = 1;
        }
        let _ = near.write_all(&welcome);
        // A client that believed it would go on.
        let mut rest = Vec::new();
        let _ = near.read_to_end(&mut rest);
        assert!(rest.is_empty(), "the client went on: {rest:?}");
        let _ = tell.send(None);
    });
    (addr, told)
}

fn tcp(addr: impl Into<String>) -> ClientBuilder {
    Client::builder().addr(addr).key(key()).transport(TransportChoice::Tcp)
}

#[test]
fn a_man_in_the_middle_is_refused_by_both() {
    for mode in [Tls::Auto, Tls::Require] {
        let server = server().tls(mode).start().unwrap();
        let there = server.local_addrs()[0];
        for (way, verdict) in [(Way::Passes, 7), (Way::Rebinds, 2), (Way::LetsIn, 7)] {
            let (addr, told) = in_the_middle(there, way);
            let error = tcp(addr).tls(mode).connect().unwrap_err();
            let as_it_should = match way {
                Way::Passes => matches!(error, Error::Intercepted { .. }),
                Way::Rebinds => matches!(error, Error::AuthenticationFailed { .. }),
                Way::LetsIn => matches!(error, Error::Impostor { .. }),
            };
            assert!(as_it_should && error.is_refusal(), "{way:?}: {error}");
            assert_eq!(told.recv().unwrap(), Some(verdict), "{way:?}");
            assert_eq!(told.recv().unwrap(), None, "{way:?}");
            assert_eq!(server.sessions(), 0, "{way:?}");
        }
        tcp(server.address()).tls(mode).connect().unwrap();
    }
}

/// Passes one connection on, with another offer in the greeting.
fn with_offer(server: SocketAddr, offer: u8) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect(server).unwrap();
        let mut greeting = [0; 48];
        far.read_exact(&mut greeting).unwrap();
        greeting[10] = offer;
        near.write_all(&greeting).unwrap();
        let (mut up, mut down) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut up, &mut down));
        let _ = std::io::copy(&mut far, &mut near);
        let _ = near.shutdown(std::net::Shutdown::Both);
    });
    addr
}

#[test]
fn nobody_can_take_the_encryption_away() {
    for mode in [Tls::Auto, Tls::Require] {
        let server = server().tls(mode).start().unwrap();
        let there = server.local_addrs()[0];
        // Who requires it sends nothing.
        let error = tcp(with_offer(there, 0)).tls(Tls::Require).connect().unwrap_err();
        assert!(matches!(error, Error::Tls { .. }), "{error}");
        // Who does not speaks in clear, and the server sees that the offer was
        // changed, or takes nothing in clear.
        let error = tcp(with_offer(there, 0)).connect().unwrap_err();
        let seen = match mode {
            Tls::Require => matches!(error, Error::Tls { .. }),
            _ => matches!(error, Error::AuthenticationFailed { .. }),
        };
        assert!(seen, "{error}");
        assert_eq!(server.sessions(), 0);
        // Nor can anyone make the two believe that it must not be clear.
        let error = tcp(with_offer(there, 1 + u8::from(mode == Tls::Auto))).connect().unwrap_err();
        assert!(matches!(error, Error::AuthenticationFailed { .. }), "{error}");
    }
    // An offer that the server does not make.
    let server = server().start().unwrap();
    let begun = Instant::now();
    for tls in [Tls::Auto, Tls::Require] {
        let error = tcp(with_offer(server.local_addrs()[0], 2)).tls(tls).connect().unwrap_err();
        assert!(matches!(error, Error::Unreachable { .. } | Error::Tls { .. }), "{error}");
    }
    assert!(begun.elapsed() < Duration::from_secs(4));
    assert_eq!(server.sessions(), 0);
}

fn works(event: &Event) {
    event.set().unwrap();
    assert!(event.take().unwrap());
}

fn raw(server: &Server) -> TcpStream {
    let mut stream = TcpStream::connect(server.local_addrs()[0]).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.read_exact(&mut [0; 48]).unwrap();
    stream
}

/// Until the server closes.
fn ends(stream: &mut TcpStream) {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return,
            Err(e) => panic!("the server did not close: {e}"),
        }
    }
}

/// The first flight of a TLS client.
fn first_flight() -> Vec<u8> {
    let stream = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut tls = towards(TcpStream::connect(stream.local_addr().unwrap()).unwrap());
    let mut bytes = Vec::new();
    tls.conn.write_tls(&mut bytes).unwrap();
    bytes
}

#[test]
fn one_who_begins_tls_has_as_little_time_as_any() {
    let server = server().tls(Tls::Auto).start().unwrap();
    let client = tcp(server.address()).connect().unwrap();
    let event = client.events("quiet", 1, 1).unwrap().at(0, 0).unwrap();
    let flight = first_flight();
    let begun = Instant::now();
    // What is no TLS is closed at once.
    let mut oversized = vec![0x16, 3, 3, 0xff, 0xff];
    oversized.resize(70_000, 1);
    let mut broken = flight.clone();
    broken[10..].fill(0xff);
    for garbage in [&b"\x16GET / HTTP/1.1\r\n\r\n"[..], &oversized, &broken] {
        let mut stream = raw(&server);
        let _ = stream.write_all(garbage);
        ends(&mut stream);
        works(&event);
    }
    // TLS 1.2 is not spoken: the version that a client of it offers.
    let mut old = raw(&server);
    let mut hello = vec![0x16, 3, 1, 0, 45, 1, 0, 0, 41, 3, 3];
    hello.extend([7; 32]);
    hello.extend([0, 0, 2, 0xc0, 0x2f, 1, 0]);
    hello.resize(50, 0);
    let _ = old.write_all(&hello);
    ends(&mut old);
    // Garbage inside of TLS as well.
    let mut inside = towards(raw(&server));
    inside.write_all(&[b'x'; 200]).unwrap();
    ends(&mut inside.sock);
    works(&event);
    assert!(begun.elapsed() < Duration::from_secs(4));
    // Who is slow, or silent half way, has five seconds.
    let mut slow = Vec::new();
    for n in [1, 5, 60, flight.len() - 1, flight.len()] {
        let mut stream = raw(&server);
        stream.write_all(&flight[..n]).unwrap();
        slow.push(stream);
    }
    let mut done = towards(raw(&server));
    done.flush().unwrap();
    while done.conn.is_handshaking() {
        done.conn.complete_io(&mut done.sock).unwrap();
    }
    let mut half = towards(raw(&server));
    half.write_all(b"\xFAfarcell\x02\x00").unwrap();
    let mut drop_by_drop = raw(&server);
    let begun = Instant::now();
    let mut next = 0;
    while begun.elapsed() < Duration::from_secs(8) && next < flight.len() {
        if drop_by_drop.write_all(&flight[next..=next]).is_err() {
            break;
        }
        next += 1;
        works(&event);
        std::thread::sleep(Duration::from_millis(100));
    }
    for stream in slow.iter_mut().chain([&mut done.sock, &mut half.sock, &mut drop_by_drop]) {
        ends(stream);
    }
    assert!(begun.elapsed() < Duration::from_secs(9));
    works(&event);
    assert_eq!(server.sessions(), 1);
}

#[test]
fn a_storm_of_tls_beginners_leaves_the_others_their_turn() {
    let server = server().tls(Tls::Auto).workers(1).start().unwrap();
    let client = tcp(server.address()).connect().unwrap();
    let event = client.events("quiet", 1, 1).unwrap().at(0, 0).unwrap();
    let flight = first_flight();
    let streams: Vec<_> = (0..400).map(|_| raw(&server)).collect();
    for mut stream in &streams {
        stream.set_nonblocking(true).unwrap();
        stream.write_all(&flight).unwrap();
    }
    works(&event);
    let mut answered = vec![false; streams.len()];
    let mut look = || {
        for (mut stream, answered) in streams.iter().zip(&mut answered) {
            *answered |= matches!(stream.read(&mut [0; 4096]), Ok(n) if n > 0);
        }
        answered.iter().filter(|&&answered| answered).count()
    };
    // In the order in which they came it would have been the last one.
    let before = look();
    common::eventually("all are answered", || look() == streams.len());
    works(&event);
    println!("{before} of {} were answered before the quiet client", streams.len());
}

/// Somebody who says this in turn, whatever he is told, to each who comes.
fn says(greeting: &'static [u8; 11], then: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut first = greeting.to_vec();
            first.resize(48, 7);
            let _ = stream.write_all(&first);
            let _ = stream.read(&mut [0; 4096]);
            let mut answer = then.to_vec();
            answer.resize(WELCOME, 0);
            let _ = stream.write_all(&answer);
            // Until the client has read it and goes.
            while matches!(stream.read(&mut [0; 4096]), Ok(n) if n > 0) {}
        }
    });
    addr
}

#[test]
fn what_goes_wrong_with_tls_says_what_to_look_at() {
    let refused = |addr: String, tls: Tls| match tcp(addr).tls(tls).connect() {
        Err(Error::Tls { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    // The server requires it, and its offer was hidden from us.
    let stripped = says(b"\xFAfarcell\x02\0\0", b"\xFAfarcell\x02\0\x06");
    let what = refused(stripped.clone(), Tls::Auto);
    assert!(what.contains("somebody in between") && what.contains("check the address"), "{what}");
    assert!(!what.contains("told not to"), "{what}");
    let what = refused(stripped, Tls::Off);
    assert!(what.contains("told not to encrypt") && what.contains("--tls auto"), "{what}");
    // An alert, and no TLS at all.
    for answer in [&b"\x15\x03\x03\0\x02\x02\x28"[..], b"HTTP/1.1 400 Bad Request\r\n\r\n"] {
        let what = refused(says(b"\xFAfarcell\x02\0\x01", answer), Tls::Auto);
        assert!(what.contains("check the address, and that both ends"), "{what}");
    }
}
