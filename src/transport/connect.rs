//! From an address to a connection with a session.

use super::socket::Socket;
use crate::addr::resolve;
use crate::auth::{
    ClientHandshake, Denial, GREETING_LEN, HandshakeError, Job, Key, Resume, Tls, WELCOME_LEN,
    Welcome, may_be_greeting, offered, version_of,
};
use crate::engine::lock;
use crate::error::{Error, Result, seconds};
use crate::tls;
use socket2::{SockRef, TcpKeepalive};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// A silent server is asked what it is after this time.
const SILENCE: Duration = Duration::from_secs(1);

/// Where to, and how to prove oneself.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// `HOST:PORT`.
    pub addr: String,
    /// The key.
    pub key: Key,
    /// Where the key came from, for messages.
    pub key_source: String,
    /// The job that we belong to, or nothing.
    pub job: String,
    /// Whether to encrypt.
    pub tls: Tls,
    /// How long one attempt may take.
    pub timeout: Duration,
}

/// Connects to the first address of the target that takes it, and shakes
/// hands. Blocks for the target's timeout at most.
pub(crate) fn connect(target: &Target, resume: Resume) -> Result<(Socket, Welcome)> {
    let deadline = soon_enough(target.timeout);
    let mut last = None;
    let addrs = resolve(&target.addr)?;
    for (i, &addr) in addrs.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        // One that is silent must leave time for those behind it.
        let share = left / (addrs.len() - i) as u32;
        match TcpStream::connect_timeout(&addr, share) {
            Ok(stream) => return shake_hands(target, stream, addr, resume, deadline),
            Err(e) => last = Some((addr, e)),
        }
    }
    let why = match last {
        Some((addr, e)) if e.kind() == io::ErrorKind::TimedOut => {
            format!("{addr} did not answer within {}", seconds(target.timeout))
        }
        Some((addr, e)) if addr.to_string() == target.addr => plain(&e),
        Some((addr, e)) => format!("{addr}: {}", plain(&e)),
        None => format!("no answer within {}", seconds(target.timeout)),
    };
    Err(Error::Unreachable { addr: target.addr.clone(), why })
}

/// That long from now; in a year if it is longer than that, since a clock
/// cannot be asked for any time.
pub(crate) fn soon_enough(time: Duration) -> Instant {
    Instant::now() + time.min(Duration::from_secs(365 * 86_400))
}

/// The system's message without its number.
pub(crate) fn plain(e: &io::Error) -> String {
    if e.kind() == io::ErrorKind::UnexpectedEof {
        return "the server closed the connection".to_owned();
    }
    let text = e.to_string();
    match text.split_once(" (os error") {
        Some((words, _)) => words.to_lowercase(),
        None => text,
    }
}

fn shake_hands(
    target: &Target,
    stream: TcpStream,
    addr: SocketAddr,
    resume: Resume,
    deadline: Instant,
) -> Result<(Socket, Welcome)> {
    let broke = |e: io::Error| match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::Unreachable {
            addr: target.addr.clone(),
            why: format!(
                "it took the connection but did not answer within {}",
                seconds(target.timeout)
            ),
        },
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => Error::Unreachable {
            addr: target.addr.clone(),
            why: "it closed the connection during the handshake".to_owned(),
        },
        _ => Error::Unreachable { addr: target.addr.clone(), why: plain(&e) },
    };
    prepare(&stream).map_err(broke)?;
    let greeting = read_greeting(&target.addr, target.timeout, &stream, addr, deadline)?;
    let explain = |e| explain(target, e);
    let socket = match wants_tls(target, offered(&greeting, target.tls).map_err(explain)?)? {
        false => Socket::plain(stream),
        true => Socket::encrypt(stream, deadline).map_err(|e| match e.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::Other => {
                Error::Tls { addr: target.addr.clone(), what: format!("{e}; {NOT_OURS}") }
            }
            _ => broke(e),
        })?,
    };
    let binding = socket.tls().and_then(|tls| lock(tls).binding());
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|e| Error::os("asking for random numbers", e.into()))?;
    let job = Job::new(&target.job);
    let handshake = ClientHandshake::new(&greeting, nonce, resume, &target.key, job, binding)
        .map_err(explain)?;
    (&socket).write_all(&handshake.hello()).map_err(broke)?;
    let mut welcome = [0; WELCOME_LEN];
    socket.set_read_timeout(Some(left_until(deadline))).map_err(broke)?;
    (&socket).read_exact(&mut welcome).map_err(broke)?;
    let welcome = handshake.welcome(&welcome).map_err(explain)?;
    socket.set_read_timeout(None).map_err(broke)?;
    Ok((socket, welcome))
}

/// Whether to encrypt where the server offers that.
fn wants_tls(target: &Target, offered: Tls) -> Result<bool> {
    let no = |what: &str| Err(Error::Tls { addr: target.addr.clone(), what: what.to_owned() });
    match (target.tls, offered) {
        (Tls::Off, Tls::Require) => no(REQUIRED),
        (Tls::Off, _) | (_, Tls::Off) => Ok(false),
        (Tls::Auto, Tls::Auto) => Ok(tls::IS_BUILT),
        _ if tls::IS_BUILT => Ok(true),
        _ => no(tls::NOT_BUILT),
    }
}

/// What the server wants.
const REQUIRED: &str = "the server takes encrypted connections alone, and this client was told not to encrypt; connect with --tls auto or FARCELL_TLS=auto";

/// What the server wants, and we would have done.
const TAKEN_AWAY: &str = "the server takes encrypted connections alone, and its offer of one did not come through: somebody in between has taken it away; check the address, and who can get between";

/// What spoke TLS in another way.
const NOT_OURS: &str = "what answers there speaks no TLS 1.3, or somebody in between changes what is sent; check the address, and that both ends are of one release";

/// What we want.
const NOT_OFFERED: &str = "it is required here, and the server offers none, or somebody in between has taken the offer away; start the server with --tls auto or --tls require";

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10))
        .with_retries(3);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

fn left_until(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now());
    // 0 would mean "for ever".
    left.max(Duration::from_millis(1))
}

/// Reads the server's greeting. What is no farcell server is recognised by
/// its first bytes, or, if it waits to be spoken to, by what it says to a
/// second connection.
fn read_greeting(
    name: &str,
    timeout: Duration,
    mut stream: &TcpStream,
    addr: SocketAddr,
    deadline: Instant,
) -> Result<[u8; GREETING_LEN]> {
    let unreachable = |why: String| Error::Unreachable { addr: name.to_owned(), why };
    let stranger = |what: &str| Error::NotFarcell { addr: name.to_owned(), what: what.to_owned() };
    let mut bytes = [0; GREETING_LEN];
    let mut n = 0;
    let mut asked = false;
    while n < GREETING_LEN {
        let patience = if asked { deadline } else { deadline.min(Instant::now() + SILENCE) };
        stream.set_read_timeout(Some(left_until(patience))).map_err(|e| unreachable(plain(&e)))?;
        match stream.read(&mut bytes[n..]) {
            Ok(0) => {
                return Err(unreachable("it closed the connection during the greeting".to_owned()));
            }
            Ok(m) => n += m,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if is_timeout(&e) && Instant::now() < deadline && !asked => {
                asked = true;
                if let Some(what) = ask_what_it_is(addr) {
                    return Err(stranger(what));
                }
            }
            Err(e) if is_timeout(&e) => {
                let time = seconds(timeout);
                return Err(unreachable(format!(
                    "it took the connection but sent no greeting within {time}"
                )));
            }
            Err(e) => return Err(unreachable(plain(&e))),
        }
        if !may_be_greeting(&bytes[..n]) {
            return Err(stranger(recognise(&bytes[..n])));
        }
    }
    Ok(bytes)
}

/// What said hello, or did not.
#[derive(Debug)]
pub(crate) enum Greeted {
    /// A farcell server of this version.
    Farcell(u16),
    /// Something else, as far as it can be named.
    Stranger(String),
    /// Nothing was said, for this reason.
    Silent(String),
}

/// Connects, reads the greeting and hangs up. Blocks for the timeout at most.
///
/// # Errors
/// No connection.
pub(crate) fn greeted(addr: SocketAddr, timeout: Duration) -> io::Result<Greeted> {
    let deadline = soon_enough(timeout);
    let stream = TcpStream::connect_timeout(&addr, timeout.max(Duration::from_millis(1)))?;
    let name = addr.to_string();
    Ok(match read_greeting(&name, timeout, &stream, addr, deadline) {
        Ok(greeting) => Greeted::Farcell(version_of(&greeting)),
        Err(Error::NotFarcell { what, .. }) => Greeted::Stranger(what),
        Err(Error::Unreachable { why, .. }) => Greeted::Silent(why),
        Err(error) => Greeted::Silent(error.to_string()),
    })
}

fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Says something that an HTTP server and a Redis both answer, on a
/// connection of its own. `None`: still silent, or a farcell server after all.
fn ask_what_it_is(addr: SocketAddr) -> Option<&'static str> {
    let mut stream = TcpStream::connect_timeout(&addr, SILENCE).ok()?;
    stream.set_read_timeout(Some(SILENCE / 2)).ok()?;
    stream.write_all(b"PING / HTTP/1.0\r\n\r\n").ok()?;
    let mut bytes = [0; 64];
    let n = stream.read(&mut bytes).ok()?;
    (n > 0 && !may_be_greeting(&bytes[..n])).then(|| recognise(&bytes[..n]))
}

/// What kind of server starts like this.
fn recognise(bytes: &[u8]) -> &'static str {
    match bytes {
        [b'H', b'T', b'T', b'P', ..] | [b'<', ..] => "an HTTP server",
        [b'+' | b'-', ..] => "a Redis server",
        [b'S', b'S', b'H', b'-', ..] => "an SSH server",
        [b'2', b'2', b'0', ..] => "a mail or FTP server",
        _ => "something else",
    }
}

fn explain(target: &Target, e: HandshakeError) -> Error {
    let addr = target.addr.clone();
    let key = target.key_source.clone();
    match e {
        HandshakeError::NotFarcell => Error::NotFarcell { addr, what: "something else".to_owned() },
        HandshakeError::Version(theirs) => {
            Error::VersionMismatch { addr, theirs, ours: crate::wire::VERSION }
        }
        HandshakeError::Denied(Denial::Key) => Error::AuthenticationFailed { addr, key },
        HandshakeError::Denied(Denial::Job) => Error::OtherJob { addr, job: target.job.clone() },
        HandshakeError::Denied(Denial::TlsRequired) => {
            let what = if target.tls == Tls::Off { REQUIRED } else { TAKEN_AWAY };
            Error::Tls { addr, what: what.to_owned() }
        }
        HandshakeError::Denied(Denial::Intercepted) => Error::Intercepted { addr },
        HandshakeError::NoTls => Error::Tls { addr, what: NOT_OFFERED.to_owned() },
        HandshakeError::Denied(Denial::Full) => Error::ServerFull { addr },
        HandshakeError::Denied(Denial::GoingAway) => Error::ServerGoingAway { addr },
        HandshakeError::Denied(Denial::Version) | HandshakeError::Malformed => {
            Error::Protocol { addr, what: e.to_string() }
        }
        HandshakeError::Impostor => Error::Impostor { addr, key },
    }
}
