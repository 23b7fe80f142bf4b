//! Reading: by whoever waits, one thread at a time, for all of them.

use super::super::Bell;
use super::super::connect::plain;
use super::super::interrupt;
use super::super::socket::Socket;
use super::link::Link;
use super::state::{Answer, Reply, State};
use super::{Failure, Waited};
use crate::engine::lock;
use crate::wire::{self, ErrorRecord, FiredRecord, HEADER, Header, Refusal, Tag};
use crossbeam::sync::{Parker, Unparker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;
use std::io;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::Instant;

thread_local! {
    /// Where this thread sleeps. Not `std::thread::park`, whose token belongs
    /// to the program that uses this library.
    static PARKER: Parker = Parker::new();
}

/// Bytes that have been read and are no whole frame yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// Which connection they came from.
    pub(super) from: Option<Weak<Socket>>,
    pub(super) bytes: Vec<u8>,
    pub(super) filled: usize,
}

/// When an operation began, as far as patience with a lost connection goes.
/// Filled in with the first look at one: the others spare the clock.
#[derive(Debug, Default)]
pub(super) struct Begun {
    at: Option<Instant>,
    /// Whether the thread is asked whether to give up, and what it said.
    asks: bool,
    gives_up: bool,
}

impl Begun {
    pub(super) fn at(at: Instant) -> Begun {
        Begun { at: Some(at), ..Begun::default() }
    }

    /// One that its thread can give up; see [`interrupt`].
    pub(super) fn interruptible() -> Begun {
        Begun { asks: interrupt::is_asked(), ..Begun::default() }
    }

    pub(super) fn get(&mut self) -> Instant {
        *self.at.get_or_insert_with(Instant::now)
    }

    /// Whether its thread has given it up.
    pub(super) fn is_given_up(&self) -> bool {
        self.gives_up
    }

    /// Asks the thread. No lock may be held.
    fn ask(&mut self) {
        self.gives_up = self.gives_up || (self.asks && interrupt::gives_up());
    }
}

/// What reading once has brought.
pub(super) enum Got<'l> {
    /// There was nothing to read.
    Nothing,
    /// Something came and is in the state, which is locked since.
    Some(MutexGuard<'l, State>),
    /// The connection is lost.
    Lost,
}

/// What a sleeper must do next.
pub(super) enum Step<T> {
    Finished(T),
    /// Read the socket.
    Lead(Arc<Socket>, Option<Arc<dyn Bell>>),
    /// Someone else reads, or nobody can: sleep until then.
    Sleep(Option<Instant>),
}

impl Link {
    /// Reads, or sleeps while another thread reads, until `ready` has
    /// something. `register` says where the thread sleeps.
    pub(super) fn pump_until<T>(
        &self,
        begun: &mut Begun,
        deadline: Option<Instant>,
        mut ready: impl FnMut(&Link, &mut State, &mut Begun) -> Option<T>,
        register: impl Fn(&mut State, Option<Unparker>),
    ) -> T {
        let mut leading = false;
        let mut slept = false;
        // What was read is looked at before anyone else can lock the state.
        let mut locked = None;
        loop {
            let step = {
                let mut state = locked.take().unwrap_or_else(|| lock(&self.state));
                state.sleeping -= usize::from(std::mem::take(&mut slept));
                match ready(self, &mut state, begun) {
                    Some(result) => {
                        register(&mut state, None);
                        if leading {
                            state.led = false;
                        }
                        // Also when not leading: the lead may have been passed
                        // to this very thread, which has no use for it.
                        state.wake_one();
                        Step::Finished(result)
                    }
                    None => match state.socket.clone() {
                        Some(socket) if leading || !state.led => {
                            state.led = true;
                            Step::Lead(socket, state.bell.clone())
                        }
                        socket => {
                            if leading {
                                state.led = false;
                                leading = false;
                            }
                            register(&mut state, Some(PARKER.with(|p| p.unparker().clone())));
                            state.sleeping += 1;
                            slept = true;
                            // While the connection is down, look again when
                            // patience ends.
                            let patience = match (&socket, &state.down) {
                                (None, Some(d)) => d
                                    .since
                                    .max(begun.get())
                                    .checked_add(self.settings.reconnect_for),
                                _ => None,
                            };
                            Step::Sleep([deadline, patience].into_iter().flatten().min())
                        }
                    },
                }
            };
            match step {
                Step::Finished(result) => return result,
                Step::Lead(socket, bell) => {
                    leading = true;
                    locked = self.lead(&socket, bell.as_deref(), deadline);
                    if locked.is_none() {
                        // Nothing came: a signal, perhaps.
                        begun.ask();
                    }
                }
                Step::Sleep(until) => {
                    // A signal does not end this sleep.
                    let look = begun.asks.then(|| Instant::now() + interrupt::LOOK);
                    PARKER.with(|p| match [until, look].into_iter().flatten().min() {
                        Some(until) => p.park_deadline(until),
                        None => p.park(),
                    });
                    begun.ask();
                }
            }
        }
    }

    pub(super) fn stop_leading(&self) {
        let mut state = lock(&self.state);
        state.led = false;
        state.wake_one();
    }

    /// Reads once and hands out what came, or returns at the deadline. The
    /// caller has the lead. The state comes back locked if something came.
    pub(super) fn lead(
        &self,
        socket: &Arc<Socket>,
        bell: Option<&dyn Bell>,
        deadline: Option<Instant>,
    ) -> Option<MutexGuard<'_, State>> {
        if !self.settings.spin.is_zero() {
            let mut end = None;
            loop {
                for _ in 0..16 {
                    match self.read(socket, RecvFlags::DONTWAIT) {
                        Got::Nothing => {}
                        Got::Some(state) => return Some(state),
                        Got::Lost => return None,
                    }
                }
                if bell.is_some_and(|bell| self.listen(bell)) {
                    return None;
                }
                let now = Instant::now();
                let end = *end.get_or_insert_with(|| {
                    let end = now + self.settings.spin;
                    deadline.map_or(end, |d| d.min(end))
                });
                if now >= end {
                    break;
                }
            }
        }
        // It is armed by this, so that its descriptor tells of the next.
        if bell.is_some_and(|bell| self.listen(bell)) {
            return None;
        }
        if (deadline.is_some() || bell.is_some()) && !socket.holds() {
            let timeout = deadline.map(|at| {
                let left = at.saturating_duration_since(Instant::now());
                Timespec {
                    tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                    tv_nsec: left.subsec_nanos().into(),
                }
            });
            let socket_fd = PollFd::new(socket, PollFlags::IN);
            let ready = match bell {
                None => poll(&mut [socket_fd], timeout.as_ref()),
                Some(bell) => {
                    let mut fds = [socket_fd, PollFd::from_borrowed_fd(bell.fd(), PollFlags::IN)];
                    let ready = poll(&mut fds, timeout.as_ref());
                    if !fds[1].revents().is_empty() {
                        self.listen(bell);
                    }
                    if fds[0].revents().is_empty() {
                        return None;
                    }
                    ready
                }
            };
            if matches!(ready, Ok(0) | Err(Errno::INTR)) {
                return None;
            }
            // An error of the socket shows in the read.
        }
        match self.read(socket, RecvFlags::empty()) {
            Got::Some(state) => Some(state),
            Got::Nothing | Got::Lost => None,
        }
    }

    /// Hands out what came by the second way. `false`: nothing.
    pub(super) fn listen(&self, bell: &dyn Bell) -> bool {
        let mut frames = Vec::new();
        let works = bell.take(&mut frames);
        let mut state = lock(&self.state);
        if !works {
            // Operations find out by themselves what is wrong with it.
            state.bell = None;
        }
        let same = |now: &Arc<dyn Bell>| std::ptr::addr_eq(Arc::as_ptr(now), bell);
        let stale = !state.bell.as_ref().is_some_and(same);
        let mut rest = &frames[..];
        while let Ok(Some((header, payload))) = wire::split(rest) {
            rest = &rest[HEADER + payload.len()..];
            if stale && state.is_of_claim(header.tag, header.id) {
                continue;
            }
            if let Err(what) = self.dispatch(&mut state, &header, payload) {
                tracing::warn!(target: "farcell::tcp", what, "a notification that makes no sense");
            }
        }
        !frames.is_empty()
    }

    /// Reads all that has come by now. The caller has the lead.
    pub(super) fn read_all(&self, socket: &Arc<Socket>) {
        loop {
            // The state is locked with what came, and must not be while
            // reading.
            match self.read(socket, RecvFlags::DONTWAIT) {
                Got::Some(state) => drop(state),
                Got::Nothing | Got::Lost => return,
            }
            if !self.is_current(socket) {
                return;
            }
        }
    }

    /// Reads once, and hands out what came.
    pub(super) fn read(&self, socket: &Arc<Socket>, flags: RecvFlags) -> Got<'_> {
        let mut inbox = lock(&self.inbox);
        let inbox = &mut *inbox;
        // A socket that a `Weak` points to keeps its place in memory.
        if inbox.from.as_ref().is_none_or(|from| from.as_ptr() != Arc::as_ptr(socket)) {
            *inbox = Inbox { from: Some(Arc::downgrade(socket)), ..Inbox::default() };
        }
        if inbox.filled == inbox.bytes.len() {
            // By what has really come: it doubles while frames are not whole.
            let more = (inbox.bytes.len() * 2).clamp(4096, 2 * (wire::MAX_PAYLOAD + HEADER));
            inbox.bytes.resize(more, 0);
        }
        let n = match socket.recv(&mut inbox.bytes[inbox.filled..], flags) {
            Ok(0) => {
                self.broken(socket, "the server closed the connection");
                return Got::Lost;
            }
            Ok(n) => n,
            Err(e) => match e.kind() {
                // Not lost, but the caller looks around before it reads again.
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => return Got::Nothing,
                _ => {
                    self.broken(socket, &plain(&e));
                    return Got::Lost;
                }
            },
        };
        inbox.filled += n;
        let mut used = 0;
        let mut state = lock(&self.state);
        state.heard = true;
        // What was granted by a life of the server that is over may be held by
        // others in the next one; see `holds`. It is asked for again.
        let stale = !state.socket.as_ref().is_some_and(|now| Arc::ptr_eq(now, socket));
        let result = loop {
            match wire::split(&inbox.bytes[used..inbox.filled]) {
                Ok(Some((header, payload))) => {
                    used += HEADER + payload.len();
                    if stale && state.is_of_claim(header.tag, header.id) {
                        continue;
                    }
                    if let Err(what) = self.dispatch(&mut state, &header, payload) {
                        break Err(what);
                    }
                }
                Ok(None) => break Ok(()),
                Err(violation) => break Err(violation.to_string()),
            }
        };
        if used > 0 {
            inbox.bytes.copy_within(used..inbox.filled, 0);
            inbox.filled -= used;
        }
        if let Err(what) = result {
            drop(state);
            self.broken(socket, &what);
            return Got::Lost;
        }
        if used > 0 {
            state.trouble_since = None;
            state.fruitless = 0;
        }
        Got::Some(state)
    }

    /// Hands one frame of the server's to whom it belongs.
    pub(super) fn dispatch(
        &self,
        state: &mut State,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), String> {
        let Some(tag) = Tag::from_code(header.tag) else {
            return Err(format!("it sent a frame of type {}", header.tag));
        };
        match tag {
            Tag::Words
            | Tag::Opened
            | Tag::Listed
            | Tag::Info
            | Tag::Refused
            | Tag::MembersListed
            | Tag::WaitsListed
            | Tag::HoldersListed
            | Tag::TalliesListed
            | Tag::Broken => {
                let answer = match (tag, payload.first_chunk::<8>()) {
                    (Tag::Words, Some(word)) if payload.len() == 8 => {
                        Ok(Reply::Word(u64::from_le_bytes(*word)))
                    }
                    (Tag::Refused, _) => Err(refusal(payload)?),
                    _ => Ok(Reply::Frame(tag, payload.to_vec())),
                };
                state.answer(header.id, answer)
            }
            Tag::Woken | Tag::Cancelled | Tag::WaitRefused => {
                let answer = match tag {
                    Tag::WaitRefused => Err(refusal(payload)?),
                    _ => {
                        let satisfied = tag == Tag::Woken;
                        Ok(Answer::Waited(Waited { satisfied, fired: fired(payload)? }))
                    }
                };
                state.wait_over(header.id, answer);
                Ok(())
            }
            Tag::PeerLost => {
                let error = super::sync::peer_lost(payload)?;
                state.wait_over(header.id, Err(error.into()));
                Ok(())
            }
            Tag::RdmaOpened
            | Tag::RdmaRefused
            | Tag::RdmaSlotsOpened
            | Tag::ShmOpened
            | Tag::ShmSlotsOpened
            | Tag::ShmRefused => {
                state.wait_over(header.id, Ok(Answer::Told(tag, payload.to_vec())));
                Ok(())
            }
            Tag::Heartbeat => {
                state.heartbeat();
                Ok(())
            }
            Tag::GoingAway => {
                tracing::warn!(target: "farcell::tcp", addr = self.settings.target.addr, "server going away");
                state.going_away(&self.settings.target.addr);
                Err("the server was asked to stop".to_owned())
            }
            _ => Err(format!("it sent a frame of type {}", header.tag)),
        }
    }
}

fn refusal(payload: &[u8]) -> Result<Failure, String> {
    let (record, _) =
        wire::take::<ErrorRecord>(Tag::Refused, payload).map_err(|v| v.to_string())?;
    match Refusal::from_record(&record) {
        Some(refusal) => Ok(Failure::Refused(refusal, record.index)),
        None => Err(format!("it refused with the unknown code {}", record.code)),
    }
}

fn fired(payload: &[u8]) -> Result<Vec<(u32, u64)>, String> {
    if payload.is_empty() {
        return Ok(Vec::new());
    }
    let records = wire::records::<FiredRecord>(Tag::Woken, payload, wire::MAX_WAIT_CELLS)
        .map_err(|v| v.to_string())?;
    Ok(records.map(|r| (r.index, r.word)).collect())
}
