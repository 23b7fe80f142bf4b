//! Handing the segment's memory to clients on this machine.
//!
//! A session asks over its connection and is told the name of a datagram socket
//! and a token. Whoever sends the token there gets the files of the memory in
//! return (unix(7), `SCM_RIGHTS`): the segment's, or that of an array's messages. There is no connection to that socket, so a
//! stranger can hold nothing: what is no token is dropped. The name is random
//! and in the abstract namespace, which is that of the network namespace.
//!
//! Nothing that clients write into the memory is relied upon: a cell is a
//! number, and what stands in a desk is counted if it is the index of a cell.

use crate::auth::{Access, Domain, Secret};
use crate::engine::lock;
use crate::layout::header;
use crate::segment::{Payload, Segment};
use crate::wire::ShmRecord;
use crate::wire::slots::ShmSlotsAnswer;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrAny,
    SocketAddrUnix, SocketFlags, SocketType, bind, recvfrom, sendmsg_addr, socket_with,
};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

/// How long a token is good.
const TOKEN_TIME: Duration = Duration::from_secs(5);
/// Tokens for messages that one session can have at a time.
const TOKENS: usize = 64;
/// Datagrams that are looked at before others have their turn.
const IN_TURN: usize = 64;
/// Sleeps of a session that can be counted at a time.
pub(crate) const DESK_PLACES: u32 = 512;
/// Cells whose watch is in one word.
pub(crate) const WATCHED_IN_WORD: u32 = 64;

/// A session that may have the memory.
#[derive(Debug)]
struct Grant {
    session: u64,
    writable: bool,
    token: Secret<16>,
    echo: Secret<16>,
    until: Instant,
    /// The memory of these messages; the segment's otherwise.
    payload: Option<Weak<Payload>>,
}

/// What clients on this machine get.
#[derive(Debug)]
pub(super) struct Shm {
    segment: Arc<Segment>,
    segment_to_read: File,
    /// A bit for each cell: the server has waiters on it.
    watched: Segment,
    watched_to_read: File,
    capacity: u32,
    /// Clients change cells by themselves: the domain is the CPU's.
    changes: bool,
    socket: OwnedFd,
    name: [u8; 16],
    boot: [u8; 16],
    /// By the first half of the token. The whole is compared in constant time.
    grants: Mutex<HashMap<[u8; 8], Grant>>,
    /// By session: where its client writes down on which cells it sleeps.
    desks: RwLock<HashMap<u64, Segment>>,
    /// Somebody was given memory to write.
    used: AtomicBool,
}

/// Which start of this machine this is, the same for every process on it.
pub(crate) fn boot_id() -> Result<[u8; 16], String> {
    let path = "/proc/sys/kernel/random/boot_id";
    let text = std::fs::read_to_string(path).map_err(|e| format!("cannot read {path}: {e}"))?;
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    let number = u128::from_str_radix(&digits, 16).map_err(|_| format!("{path} holds no id"))?;
    Ok(number.to_be_bytes())
}

/// A datagram socket with this name.
pub(crate) fn named_socket(name: &[u8; 16]) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    bind(&socket, &address_of(name)?)?;
    Ok(socket)
}

/// The address of a socket with this name: `farcell-` and hexadecimal digits.
pub(crate) fn address_of(name: &[u8; 16]) -> io::Result<SocketAddrUnix> {
    let text = format!("farcell-{:032x}", u128::from_be_bytes(*name));
    Ok(SocketAddrUnix::new_abstract_name(text.as_bytes())?)
}

/// The part of a token that it is found by. What the search for it tells by its time
/// is nothing about the other half.
fn half(token: &Secret<16>) -> [u8; 8] {
    let mut half = [0; 8];
    half.copy_from_slice(&token.expose()[..8]);
    half
}

/// A token and an echo.
fn secrets() -> Result<(Secret<16>, Secret<16>), String> {
    Ok((Secret::new(random()?), Secret::new(random()?)))
}

/// 16 random bytes.
pub(crate) fn random() -> Result<[u8; 16], String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| format!("no random numbers: {e}"))?;
    Ok(bytes)
}

impl Shm {
    /// Gets ready to hand out a segment of so many cells.
    ///
    /// # Errors
    /// Why this cannot be, in words.
    pub fn open(
        segment: Arc<Segment>,
        capacity: u32,
        domain: Domain,
        incarnation: u64,
    ) -> Result<Shm, String> {
        let because = |what: &'static str| move |e: io::Error| format!("{what}: {e}");
        let watched = Segment::published(capacity.div_ceil(WATCHED_IN_WORD))
            .map_err(because("memory for its own use"))?;
        // The segment has the same in its header, but there any client may write.
        watched.describe(incarnation, capacity);
        let to_read = because("a descriptor to read (is /proc mounted?)");
        let segment_to_read = segment.read_only_file().map_err(to_read)?;
        let watched_to_read = watched.read_only_file().map_err(to_read)?;
        let name = random()?;
        let sealed = segment.is_sealed();
        let socket = named_socket(&name).map_err(because("a Unix socket"))?;
        Ok(Shm {
            segment,
            segment_to_read,
            watched,
            watched_to_read,
            capacity,
            // Who could write a file that is not sealed could cut it short, and
            // end the server by that.
            changes: domain == Domain::Cpu && sealed,
            socket,
            name,
            boot: boot_id()?,
            grants: Mutex::default(),
            desks: RwLock::default(),
            used: AtomicBool::new(false),
        })
    }

    /// Whether clients change cells, and claim messages, by themselves.
    pub fn changes(&self) -> bool {
        self.changes
    }

    /// Becomes readable when someone shows a token.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Lets a session have the memory; what its client must know.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn grant(&self, session: u64, access: Access, now: Instant) -> Result<ShmRecord, String> {
        let (token, echo) = secrets()?;
        let writable = self.changes && access == Access::ReadWrite;
        let until = now + TOKEN_TIME;
        let grant = Grant { session, writable, token, echo, until, payload: None };
        let mut grants = lock(&self.grants);
        let goes = |old: &Grant| old.session == session && old.payload.is_none();
        grants.retain(|_, old| !goes(old) && old.until > now);
        grants.insert(half(&token), grant);
        drop(grants);
        let length = |file: io::Result<&File>| {
            file.and_then(|f| f.metadata()).map(|m| m.len()).map_err(|e| e.to_string())
        };
        let desk = match writable {
            true => Segment::bytes_of(DESK_PLACES).map_err(|e| e.to_string())? as u64,
            false => 0,
        };
        Ok(ShmRecord {
            boot: self.boot,
            name: self.name,
            token,
            echo,
            segment: length(self.segment.file())?,
            watched: length(self.watched.file())?,
            desk,
            writable: writable.into(),
            sealed: self.segment.is_sealed().into(),
            reserved: [0; 6],
        })
    }

    /// Lets a session have the memory of these messages; what its client must
    /// know.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn grant_slots(
        &self,
        session: u64,
        access: Access,
        payload: &Arc<Payload>,
        now: Instant,
    ) -> Result<ShmSlotsAnswer, String> {
        let (token, echo) = secrets()?;
        // Bytes are changed by whoever has claimed the row, in any domain.
        let writable = payload.is_sealed() && access == Access::ReadWrite;
        let bytes = payload.file().and_then(|f| f.metadata()).map_err(|e| e.to_string())?.len();
        let (until, weak) = (now + TOKEN_TIME, Some(Arc::downgrade(payload)));
        let grant = Grant { session, writable, token, echo, until, payload: weak };
        let mut grants = lock(&self.grants);
        grants.retain(|_, old| old.until > now);
        if grants.values().filter(|old| old.session == session).count() >= TOKENS {
            return Err(format!("the client has {TOKENS} tokens that it has not shown yet"));
        }
        grants.insert(half(&token), grant);
        let (name, writable, reserved) = (self.name, writable.into(), [0; 6]);
        let sealed = payload.is_sealed().into();
        Ok(ShmSlotsAnswer { name, token, echo, bytes, writable, sealed, reserved })
    }

    /// Looks at what has come to the socket, and says whom it has given memory.
    /// `true`: there may be more. Does not block.
    pub fn hand_out(&self, now: Instant, lives: impl Fn(u64) -> bool, given: impl Fn(u64)) -> bool {
        // One byte more than a token, to know what is longer.
        let mut bytes = [0; 17];
        for _ in 0..IN_TURN {
            // Descriptors that come along are dropped by the kernel: there is
            // no room for them.
            let (n, from) = match recvfrom(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT) {
                Ok((n, _, from)) => (n, from),
                Err(Errno::INTR) => continue,
                Err(_) => return false,
            };
            let Some(token) = bytes[..n.min(17)].first_chunk::<16>().filter(|_| n == 16) else {
                continue;
            };
            let token = Secret::new(*token);
            // Also one of which only a half is right is gone: it was guessed.
            let Some(grant) = lock(&self.grants).remove(&half(&token)) else {
                continue;
            };
            if !grant.token.is(&token) || grant.until <= now || !lives(grant.session) {
                continue;
            }
            match self.send(&grant, from) {
                Ok(()) if grant.payload.is_none() => given(grant.session),
                Ok(()) => {}
                Err(error) => {
                    tracing::debug!(target: "farcell::shm", session = grant.session, %error, "a client did not get memory");
                }
            }
            if !lives(grant.session) {
                self.close(grant.session);
            }
        }
        true
    }

    fn send(&self, grant: &Grant, to: Option<SocketAddrAny>) -> io::Result<()> {
        let to = to.ok_or(io::ErrorKind::InvalidInput)?;
        let to = SocketAddrUnix::try_from(to)?;
        if let Some(payload) = &grant.payload {
            // It goes with its array.
            let payload = payload.upgrade().ok_or(io::ErrorKind::NotFound)?;
            return match grant.writable {
                true => self.post(&[payload.file()?.as_fd()], grant, &to),
                false => self.post(&[payload.read_only_file()?.as_fd()], grant, &to),
            };
        }
        let mut desk = None;
        let segment = if grant.writable {
            // Relaxed: it never goes back, and whoever sleeps on a cell has got
            // the memory behind this.
            self.used.store(true, Ordering::Relaxed);
            desk = Some(Segment::anonymous(DESK_PLACES)?);
            self.segment.file()?
        } else {
            &self.segment_to_read
        };
        let mut files = vec![segment.as_fd(), self.watched_to_read.as_fd()];
        if let Some(desk) = &desk {
            files.push(desk.file()?.as_fd());
        }
        self.post(&files, grant, &to)?;
        if let Some(mut desk) = desk {
            // A session is to cost the server no further descriptor.
            desk.close_file();
            self.desks.write().unwrap_or_else(PoisonError::into_inner).insert(grant.session, desk);
        }
        Ok(())
    }

    fn post(&self, files: &[BorrowedFd<'_>], grant: &Grant, to: &SocketAddrUnix) -> io::Result<()> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(files));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg_addr(&self.socket, to, &[IoSlice::new(grant.echo.expose())], &mut control, flags)?;
        Ok(())
    }

    /// A session is over. Its client may go on with the memory that it has;
    /// what it does there is as good or bad as what it did before, but it learns
    /// by its desk that it takes nothing any more and arrives nowhere.
    pub fn close(&self, session: u64) {
        lock(&self.grants).retain(|_, grant| grant.session != session);
        let desk = self.desks.write().unwrap_or_else(PoisonError::into_inner).remove(&session);
        if let Some(desk) = desk {
            // Release: whoever sees what is done for the end of the session from
            // here on sees this, too.
            desk.header()[header::OVER].store(1, Ordering::Release);
        }
    }

    /// Whether someone may sleep on a cell in memory.
    pub fn has_sleepers(&self) -> bool {
        // Relaxed: see `send`. Whoever asks has found the waiting bit that the
        // sleeper set.
        self.used.load(Ordering::Relaxed)
    }

    /// The server has waiters on this cell from here on, or none any more.
    /// Whether clients look at that.
    pub fn watch(&self, place: u32, yes: bool) -> bool {
        if !self.changes {
            return false;
        }
        let word = &self.watched.cells()[(place / WATCHED_IN_WORD) as usize];
        let bit = 1 << (place % WATCHED_IN_WORD);
        // Relaxed: the change of the cell that follows is what publishes it,
        // see `transport::shm::protocol`. Taken back late it costs a ring.
        if yes {
            word.fetch_or(bit, Ordering::Relaxed);
        } else {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
        true
    }

    /// The cells on which a session's client sleeps, as it says.
    pub fn sleeps_of(&self, session: u64) -> Vec<u32> {
        let desks = self.desks.read().unwrap_or_else(PoisonError::into_inner);
        let cells = desks.get(&session).map(|desk| &desk.cells()[..DESK_PLACES as usize]);
        // Relaxed: see `sleepers`.
        let said = cells.into_iter().flatten().map(|cell| cell.load(Ordering::Relaxed));
        said.filter(|&said| said != 0 && said <= u64::from(self.capacity))
            .map(|said| (said - 1) as u32)
            .collect()
    }

    /// How many of the sessions' sleeps are on this cell, or on any, as their
    /// clients say.
    pub fn sleepers(&self, place: Option<u32>) -> usize {
        let desks = self.desks.read().unwrap_or_else(PoisonError::into_inner);
        let cells = desks.values().flat_map(|desk| &desk.cells()[..DESK_PLACES as usize]);
        // Relaxed: a number for people. 0 is a free place, others are an index
        // and 1.
        let said = cells.map(|cell| cell.load(Ordering::Relaxed));
        said.filter(|&said| match place {
            Some(place) => said == u64::from(place) + 1,
            None => said != 0 && said <= u64::from(self.capacity),
        })
        .count()
    }
}
