//! The handshake, as state machines without sockets.
//!
//! ```text
//! server -> client   Greeting   version, nonce
//! client -> server   Hello      version, nonce, session to resume, job, proof
//! server -> client   Welcome    session, lease, domain, proof
//! ```
//!
//! Both proofs are HMAC-SHA256 with the shared key over a label and every byte
//! that was exchanged before, both nonces among them (RFC 2104, FIPS 198-1).
//! No secret goes over the wire, a recorded exchange is worth nothing in
//! another one, and a proof made for one direction is none in the other. The
//! comparison takes the same time wherever the first difference is.
//!
//! Inside of TLS both proofs also cover a value that only the two ends of that one
//! TLS connection have ([`Binding`]). So the key says who is at the other end of
//! the encryption, and a certificate need not: someone in the middle has two
//! connections, and their values differ.
//!
//! The server speaks first, so that before it knows its client all it ever
//! does for it is to send 48 bytes and read one small frame.

mod channel;
mod secret;

pub use channel::{BINDING_LEN, Binding, Tls};
pub use secret::Secret;

use channel::bound;

use bytemuck::{Pod, Zeroable};
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use std::fmt;
use subtle::ConstantTimeEq;

/// The first bytes of every message of the handshake.
pub const MAGIC: [u8; 8] = *b"\xFAfarcell";

/// Longest key that is taken, in bytes.
pub const MAX_KEY: usize = 4096;

const CLIENT: &[u8] = b"farcell client proof\0";
const SERVER: &[u8] = b"farcell server proof\0";
const CLIENT_IN_TLS: &[u8] = b"farcell client proof in TLS\0";
const SERVER_IN_TLS: &[u8] = b"farcell server proof in TLS\0";

/// A shared secret. Its bytes never show in `Debug` output, and it has no `==`,
/// which would tell by its time how much of a guess is right:
///
/// ```compile_fail,E0369
/// # let [a, b] = [*b"at least 16 bytes", *b"another 17 bytes!"].map(|k| farcell::Key::new(k).unwrap());
/// let same = a == b;
/// ```
///
/// ```
/// # let [a, b] = [*b"at least 16 bytes", *b"another 17 bytes!"].map(|k| farcell::Key::new(k).unwrap());
/// let same = a.is(&b);
/// # assert!(!same && a.is(&a.clone()));
/// ```
#[derive(Clone)]
pub struct Key(Vec<u8>);

/// Why bytes are no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// No bytes at all.
    #[error("the key is empty")]
    Empty,
    /// More than 4096 bytes.
    #[error("the key has more than {MAX_KEY} bytes")]
    TooLong,
}

impl Key {
    /// A key of 1 to 4096 bytes. Whoever sees a handshake can try out short
    /// keys at leisure: use 16 random bytes or more.
    ///
    /// # Errors
    /// No bytes, or too many.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Key, KeyError> {
        let bytes = bytes.into();
        match bytes.len() {
            0 => Err(KeyError::Empty),
            n if n > MAX_KEY => Err(KeyError::TooLong),
            _ => Ok(Key(bytes)),
        }
    }

    /// The bytes of the key, to be kept secret.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.0
    }

    /// Whether the two are the same key. Takes the same time wherever they differ;
    /// not whatever their lengths are.
    #[must_use]
    pub fn is(&self, other: &Key) -> bool {
        self.0.ct_eq(&other.0).into()
    }

    fn mac(&self, label: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0)
            .unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
        mac.update(label);
        for part in parts {
            mac.update(part);
        }
        mac
    }

    fn prove(&self, label: &[u8], parts: &[&[u8]]) -> Secret<32> {
        Secret::new(self.mac(label, parts).finalize().into_bytes().into())
    }

    /// Constant-time: `verify_slice` compares all bytes whatever they are.
    fn verify(&self, label: &[u8], parts: &[&[u8]], proof: &Secret<32>) -> bool {
        self.mac(label, parts).verify_slice(proof.expose()).is_ok()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(secret)")
    }
}

/// What a session may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Access {
    /// Read, wait and change.
    ReadWrite = 1,
    /// Read and wait.
    ReadOnly = 2,
}

/// Who executes every change of the cells (see the atomicity domains in
/// `docs/protocol.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Domain {
    /// The server's CPU.
    Cpu = 1,
    /// The server's host channel adapter.
    Hca = 2,
}

impl fmt::Display for Domain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Domain::Cpu => f.write_str("cpu"),
            Domain::Hca => f.write_str("hca"),
        }
    }
}

/// The keys that a server accepts.
#[derive(Clone, Debug)]
pub struct Keys {
    /// Gives read-write sessions.
    pub full: Key,
    /// Gives read-only sessions.
    pub read_only: Option<Key>,
}

/// First message, from the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Greeting {
    magic: [u8; 8],
    version: u16,
    tls: u8,
    reserved: [u8; 5],
    nonce: [u8; 32],
}

/// Second message, from the client. Inside of TLS the client's [`Binding`]
/// follows it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Hello {
    magic: [u8; 8],
    version: u16,
    beside: u8,
    reserved: [u8; 5],
    nonce: [u8; 32],
    incarnation: u64,
    session: u64,
    next_request: u64,
    job: u64,
    proof: Secret<32>,
}

/// Third message, from the server.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct WelcomeBytes {
    magic: [u8; 8],
    version: u16,
    verdict: u8,
    access: u8,
    domain: u8,
    resumed: u8,
    offers_rdma: u8,
    offers_shm: u8,
    incarnation: u64,
    session: u64,
    capacity: u64,
    lease_ms: u32,
    seat: u32,
    proof: Secret<32>,
}

/// Bytes of the server's first message.
pub const GREETING_LEN: usize = size_of::<Greeting>();
/// Bytes of the client's only message.
pub const HELLO_LEN: usize = size_of::<Hello>();
/// Bytes of the server's second message.
pub const WELCOME_LEN: usize = size_of::<WelcomeBytes>();

const PROOF: usize = 32;
const ACCEPTED: u8 = 0;

/// Why a server sent a client away. The number goes over the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u8)]
pub enum Denial {
    /// The client's version is not spoken here.
    #[error("the server does not speak this client's version of the protocol")]
    Version = 1,
    /// The proof was made with another key.
    #[error("the keys do not match")]
    Key = 2,
    /// The server has as many clients as it may.
    #[error("the server has as many clients as its limits allow")]
    Full = 3,
    /// The server is about to stop.
    #[error("the server is going away")]
    GoingAway = 4,
    /// The client belongs to another job than the server.
    #[error("the server serves another job")]
    Job = 5,
    /// The server talks to those alone who encrypt.
    #[error("the server takes encrypted connections alone")]
    TlsRequired = 6,
    /// The client is at the end of another TLS connection than the server.
    #[error("the encrypted connection of the client does not end at the server")]
    Intercepted = 7,
}

impl Denial {
    fn from_code(code: u8) -> Option<Denial> {
        match code {
            1 => Some(Denial::Version),
            2 => Some(Denial::Key),
            3 => Some(Denial::Full),
            4 => Some(Denial::GoingAway),
            5 => Some(Denial::Job),
            6 => Some(Denial::TlsRequired),
            7 => Some(Denial::Intercepted),
            _ => None,
        }
    }
}

/// What a client asks to resume; all 0 for a new session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resume {
    /// Which life of the server the session began in.
    pub incarnation: u64,
    /// The session.
    pub session: u64,
    /// Number of the client's next request, or of its oldest unanswered one.
    pub next_request: u64,
    /// The connection is one more of the session, for messages, and takes the
    /// place of none.
    pub beside: bool,
}

/// Which job a client or a server belongs to, so that a client that was led to
/// another job's server by a stale address is sent away. 0 is none. The number
/// is the start of the SHA-256 of the job's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Job(u64);

impl Job {
    /// The job of this name; an empty name is none.
    #[must_use]
    pub fn new(name: &str) -> Job {
        if name.is_empty() {
            return Job::default();
        }
        let hash = Sha256::digest(name.as_bytes());
        let start = hash.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Job(start.max(1))
    }

    /// Whether a client of the job `other` may come in: one of the same job,
    /// or one without, such as a person who looks.
    #[must_use]
    pub fn admits(self, other: Job) -> bool {
        self == other || self == Job::default() || other == Job::default()
    }
}

/// What the server tells a client that it let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// What the session may do.
    pub access: Access,
    /// Who changes the cells.
    pub domain: Domain,
    /// Whether this is the session that the client asked for, with all that the
    /// server knew of it. If not, it may still be that session by its number: it
    /// goes on in another life of the server, without its arrays and replies.
    pub resumed: bool,
    /// Whether the server has an adapter.
    pub offers_rdma: bool,
    /// Whether clients on the server's machine can have its memory.
    pub offers_shm: bool,
    /// Which life of the server this is.
    pub incarnation: u64,
    /// The session.
    pub session: u64,
    /// Cells of the segment.
    pub capacity: u64,
    /// How long the session lives without a sign from its client.
    pub lease_ms: u64,
    /// What the session is called in the cells of locks; 0: it can hold none.
    pub seat: u32,
}

/// A session in one life of the server: number and incarnation. Where its arrays
/// are was said in that life, and is good in no other one.
pub type Tenure = (u64, u64);

impl Welcome {
    /// The session, in this life.
    #[must_use]
    pub fn tenure(&self) -> Tenure {
        (self.session, self.incarnation)
    }
}

/// The server's side.
#[derive(Clone, Debug)]
pub struct ServerHandshake {
    greeting: Greeting,
}

/// A hello that proved to know a key.
#[derive(Clone, Copy, Debug)]
pub struct Proven {
    hello: Hello,
    binding: Option<Binding>,
    /// Which of the keys it was.
    pub access: Access,
    /// What the client wants to resume.
    pub resume: Resume,
}

impl ServerHandshake {
    /// Starts with a nonce that must never have been used before.
    #[must_use]
    pub fn new(nonce: [u8; 32], tls: Tls) -> ServerHandshake {
        ServerHandshake {
            greeting: Greeting {
                magic: MAGIC,
                version: crate::wire::VERSION,
                tls: tls as u8,
                reserved: [0; 5],
                nonce,
            },
        }
    }

    /// What to send first.
    #[must_use]
    pub fn greeting(&self) -> [u8; GREETING_LEN] {
        bytemuck::cast(self.greeting)
    }

    /// Judges the client's hello; inside of TLS, whose [`Binding`] is given, with
    /// the client's own behind it.
    ///
    /// # Errors
    /// `Some` reason, to be sent as [`denial`]; `None` when the peer is no
    /// farcell client, which deserves no answer.
    pub fn hello(
        &self,
        bytes: &[u8; HELLO_LEN],
        tls: Option<(&Binding, &Binding)>,
        keys: &Keys,
        job: Job,
    ) -> Result<Proven, Option<Denial>> {
        let hello: Hello = bytemuck::cast(*bytes);
        if hello.magic != MAGIC {
            return Err(None);
        }
        if hello.version != crate::wire::VERSION {
            return Err(Some(Denial::Version));
        }
        if tls.is_none() && self.greeting.tls == Tls::Require as u8 {
            return Err(Some(Denial::TlsRequired));
        }
        let theirs = tls.map(|(theirs, _)| theirs);
        let parts =
            [bytemuck::bytes_of(&self.greeting), &bytes[..HELLO_LEN - PROOF], bound(theirs)];
        let label = if tls.is_some() { CLIENT_IN_TLS } else { CLIENT };
        let proves = |key: &Key| key.verify(label, &parts, &hello.proof);
        let access = if proves(&keys.full) {
            Access::ReadWrite
        } else if keys.read_only.as_ref().is_some_and(proves) {
            Access::ReadOnly
        } else {
            return Err(Some(Denial::Key));
        };
        if tls.is_some_and(|(theirs, ours)| !theirs.is(ours)) {
            return Err(Some(Denial::Intercepted));
        }
        if !job.admits(Job(hello.job)) {
            return Err(Some(Denial::Job));
        }
        Ok(Proven {
            hello,
            binding: theirs.copied(),
            access,
            resume: Resume {
                incarnation: hello.incarnation,
                session: hello.session,
                next_request: hello.next_request,
                beside: hello.beside != 0,
            },
        })
    }

    /// What to send to a client that was let in.
    #[must_use]
    pub fn welcome(&self, proven: &Proven, welcome: &Welcome, keys: &Keys) -> [u8; WELCOME_LEN] {
        let mut bytes = WelcomeBytes {
            magic: MAGIC,
            version: crate::wire::VERSION,
            verdict: ACCEPTED,
            access: welcome.access as u8,
            domain: welcome.domain as u8,
            resumed: welcome.resumed.into(),
            offers_rdma: welcome.offers_rdma.into(),
            offers_shm: welcome.offers_shm.into(),
            incarnation: welcome.incarnation,
            session: welcome.session,
            capacity: welcome.capacity,
            lease_ms: u32::try_from(welcome.lease_ms).unwrap_or(u32::MAX),
            seat: welcome.seat,
            proof: Secret::default(),
        };
        let key = match (proven.access, &keys.read_only) {
            (Access::ReadOnly, Some(key)) => key,
            _ => &keys.full,
        };
        bytes.proof = key.prove(
            if proven.binding.is_some() { SERVER_IN_TLS } else { SERVER },
            &[
                bytemuck::bytes_of(&self.greeting),
                bytemuck::bytes_of(&proven.hello),
                bound(proven.binding.as_ref()),
                &bytemuck::bytes_of(&bytes)[..WELCOME_LEN - PROOF],
            ],
        );
        bytemuck::cast(bytes)
    }
}

/// What to send to a client that is not let in. It carries no proof, so a
/// client takes it as a hint for a person and for nothing else.
#[must_use]
pub fn denial(reason: Denial) -> [u8; WELCOME_LEN] {
    bytemuck::cast(WelcomeBytes {
        magic: MAGIC,
        version: crate::wire::VERSION,
        verdict: reason as u8,
        ..WelcomeBytes::zeroed()
    })
}

/// Why the client's side failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The first bytes are none of ours.
    #[error("what answers there is no farcell server")]
    NotFarcell,
    /// A farcell server of another version.
    #[error("the server speaks version {0} of the protocol, this client {version}", version = crate::wire::VERSION)]
    Version(u16),
    /// The server sent us away.
    #[error(transparent)]
    Denied(#[from] Denial),
    /// The server's proof is wrong: it does not know the key.
    #[error("the server could not prove that it knows the key")]
    Impostor,
    /// There is to be no connection that is not encrypted, and the server offers no
    /// other.
    #[error("the server offers no encryption")]
    NoTls,
    /// The message makes no sense.
    #[error("the server's answer makes no sense")]
    Malformed,
}

/// The client's side.
#[derive(Debug)]
pub struct ClientHandshake<'k> {
    key: &'k Key,
    greeting: Greeting,
    hello: Hello,
    binding: Option<Binding>,
}

/// What a greeting offers of TLS.
///
/// # Errors
/// The greeting is none, or of another version; or it offers none where that is
/// required.
pub fn offered(greeting: &[u8; GREETING_LEN], wanted: Tls) -> Result<Tls, HandshakeError> {
    let greeting = read_greeting(greeting)?;
    match (greeting.tls, wanted) {
        (0, Tls::Require) => Err(HandshakeError::NoTls),
        (0, _) => Ok(Tls::Off),
        (1, _) => Ok(Tls::Auto),
        _ => Ok(Tls::Require),
    }
}

fn read_greeting(greeting: &[u8; GREETING_LEN]) -> Result<Greeting, HandshakeError> {
    let greeting: Greeting = bytemuck::cast(*greeting);
    if greeting.magic != MAGIC {
        return Err(HandshakeError::NotFarcell);
    }
    if greeting.version != crate::wire::VERSION {
        return Err(HandshakeError::Version(greeting.version));
    }
    Ok(greeting)
}

/// Whether bytes that a server sent can be the start of a greeting.
#[must_use]
pub fn may_be_greeting(bytes: &[u8]) -> bool {
    let n = bytes.len().min(MAGIC.len());
    bytes[..n] == MAGIC[..n]
}

/// The version that a greeting names.
#[must_use]
pub fn version_of(greeting: &[u8; GREETING_LEN]) -> u16 {
    bytemuck::cast::<_, Greeting>(*greeting).version
}

impl<'k> ClientHandshake<'k> {
    /// Answers a greeting, inside of the TLS connection whose [`Binding`] is given,
    /// or without one. The nonce must never have been used before.
    ///
    /// # Errors
    /// The greeting is none, or of another version.
    pub fn new(
        greeting: &[u8; GREETING_LEN],
        nonce: [u8; 32],
        resume: Resume,
        key: &'k Key,
        job: Job,
        binding: Option<Binding>,
    ) -> Result<ClientHandshake<'k>, HandshakeError> {
        let greeting = read_greeting(greeting)?;
        let mut hello = Hello {
            magic: MAGIC,
            version: crate::wire::VERSION,
            beside: resume.beside.into(),
            reserved: [0; 5],
            nonce,
            incarnation: resume.incarnation,
            session: resume.session,
            next_request: resume.next_request,
            job: job.0,
            proof: Secret::default(),
        };
        hello.proof = key.prove(
            if binding.is_some() { CLIENT_IN_TLS } else { CLIENT },
            &[
                bytemuck::bytes_of(&greeting),
                &bytemuck::bytes_of(&hello)[..HELLO_LEN - PROOF],
                bound(binding.as_ref()),
            ],
        );
        Ok(ClientHandshake { key, greeting, hello, binding })
    }

    /// What to send: the hello, and inside of TLS the binding behind it.
    #[must_use]
    pub fn hello(&self) -> Vec<u8> {
        [bytemuck::bytes_of(&self.hello), bound(self.binding.as_ref())].concat()
    }

    /// Judges the server's answer.
    ///
    /// # Errors
    /// The server said no, or is not the one that it claims to be.
    pub fn welcome(&self, bytes: &[u8; WELCOME_LEN]) -> Result<Welcome, HandshakeError> {
        let w: WelcomeBytes = bytemuck::cast(*bytes);
        if w.magic != MAGIC {
            return Err(HandshakeError::NotFarcell);
        }
        if w.verdict != ACCEPTED {
            return Err(match Denial::from_code(w.verdict) {
                Some(Denial::Version) => HandshakeError::Version(w.version),
                Some(denial) => denial.into(),
                None => HandshakeError::Malformed,
            });
        }
        let parts = [
            bytemuck::bytes_of(&self.greeting),
            bytemuck::bytes_of(&self.hello),
            bound(self.binding.as_ref()),
            &bytes[..WELCOME_LEN - PROOF],
        ];
        let label = if self.binding.is_some() { SERVER_IN_TLS } else { SERVER };
        if !self.key.verify(label, &parts, &w.proof) {
            return Err(HandshakeError::Impostor);
        }
        let access = match w.access {
            1 => Access::ReadWrite,
            2 => Access::ReadOnly,
            _ => return Err(HandshakeError::Malformed),
        };
        let domain = match w.domain {
            1 => Domain::Cpu,
            2 => Domain::Hca,
            _ => return Err(HandshakeError::Malformed),
        };
        Ok(Welcome {
            access,
            domain,
            resumed: w.resumed != 0,
            offers_rdma: w.offers_rdma != 0,
            offers_shm: w.offers_shm != 0,
            incarnation: w.incarnation,
            session: w.session,
            capacity: w.capacity,
            lease_ms: w.lease_ms.into(),
            seat: w.seat,
        })
    }
}

#[cfg(test)]
mod tests;
