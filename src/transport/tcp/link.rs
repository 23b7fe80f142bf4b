//! A session over one TCP connection after another.
//!
//! No thread stands between a caller and the socket: whoever needs an answer
//! writes its request and reads the socket itself. If several threads wait,
//! one of them is the **leader**: it reads, hands the others their answers,
//! and passes the lead on when it has its own. A caller that is alone pays one
//! send and one receive, and nothing else.
//!
//! Requests are numbered and stay in [`State::calls`] until they are answered,
//! so that they can be sent again on the next connection. The server remembers
//! the answers of those that it has carried out, and so each happens once.

use super::super::Follower;
use super::super::connect::Target;
use super::super::interrupt;
use super::super::socket::Socket;
use super::Failure;
use super::beside::Pool;
use super::holds::Holds;
use super::later::Pump;
use super::reading::{Begun, Inbox};
use super::state::{Call, Reply, Request, State, Status, take_done};
use crate::auth::Welcome;
use crate::engine::lock;
use crate::error::{Error, seconds};
use crate::wire;
use farcell_sys::fork::{self, Generation};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// How a link behaves.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Where to and with which key.
    pub target: Target,
    /// How long an operation waits for a lost connection to come back.
    pub reconnect_for: Duration,
    /// How long a reader looks for an answer, burning its core, before it
    /// sleeps.
    pub spin: Duration,
}

/// A session and its connection. See the [module](self).
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) settings: Settings,
    /// Held while writing, so that frames do not mix and are written in the
    /// order of their ids. Taken before `state`, never after.
    pub(super) writing: Mutex<()>,
    pub(super) state: Mutex<State>,
    /// Used by the leader alone.
    pub(super) inbox: Mutex<Inbox>,
    /// Connections for messages.
    pub(super) pool: Pool,
    pub(super) me: Weak<Link>,
    /// One who must know how it stands with the connection.
    pub(super) followers: Mutex<Vec<Weak<dyn Follower>>>,
    /// The process that made it. A child that was forked since has its own copy
    /// of all this, but one connection with its parent: it must not touch that,
    /// nor wait for a lock that a thread of its parent may have held.
    generation: Generation,
}

impl Link {
    /// A link over a connection that has just been made.
    pub(crate) fn new(settings: Settings, socket: Socket, welcome: Welcome) -> Arc<Link> {
        Arc::new_cyclic(|me| Link {
            settings,
            writing: Mutex::new(()),
            state: Mutex::new(State {
                socket: Some(Arc::new(socket)),
                down: None,
                trouble_since: None,
                fruitless: 0,
                reconnecting: false,
                welcome,
                closed: false,
                going: false,
                next_request: 1,
                answered: 0,
                calls: VecDeque::new(),
                unanswered_bytes: 0,
                next_wait: 1,
                waits: BTreeMap::new(),
                done_waits: Vec::new(),
                told: Vec::new(),
                told_before: 0,
                led: false,
                sleeping: 0,
                bell: None,
                heard: false,
                last_heard: Instant::now(),
                bindings: Vec::new(),
                name: None,
                will: None,
                holds: Holds::default(),
                ended: Vec::new(),
                pump: Pump::default(),
            }),
            inbox: Mutex::default(),
            pool: Pool::default(),
            me: me.clone(),
            followers: Mutex::default(),
            generation: fork::generation(),
        })
    }

    /// Whether this process made it: not so in a child that was forked since.
    #[inline]
    pub(crate) fn is_ours(&self) -> bool {
        fork::generation() == self.generation
    }

    /// Refuses in a forked child. Before any lock and before the socket.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.is_ours() {
            return Ok(());
        }
        Err(Error::Forked { what: format!("the client of {}", self.settings.target.addr) })
    }

    /// The connection's socket at this moment.
    pub(crate) fn fd(&self) -> Option<i32> {
        if !self.is_ours() {
            return None;
        }
        lock(&self.state).socket.as_ref().map(|socket| socket.as_raw_fd())
    }

    /// What the server said when it let us in.
    pub(crate) fn welcome(&self) -> Welcome {
        lock(&self.state).welcome
    }

    /// Whether there is a connection right now.
    pub(crate) fn is_connected(&self) -> bool {
        self.is_ours() && lock(&self.state).socket.is_some()
    }

    /// Whether the connection is encrypted, if there is one right now.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.is_ours()
            && lock(&self.state).socket.as_ref().is_some_and(|socket| socket.tls().is_some())
    }

    pub(crate) fn addr(&self) -> String {
        self.settings.target.addr.clone()
    }

    /// Sends a request and returns its number. Waits while as many requests
    /// are unanswered as may be.
    pub(super) fn submit(&self, request: Request) -> Result<u64, Failure> {
        self.check()?;
        loop {
            let writing = lock(&self.writing);
            let mut state = lock(&self.state);
            if state.closed {
                return Err(Error::Closed.into());
            }
            let fits = state.unanswered_bytes + request.reply_bytes <= wire::MAX_UNANSWERED_BYTES
                && state.next_request - state.answered < wire::MAX_UNANSWERED as u64;
            if !fits {
                let oldest = state.answered + 1;
                drop(state);
                drop(writing);
                self.await_answered(oldest)?;
                continue;
            }
            let id = state.next_request;
            state.next_request += 1;
            state.unanswered_bytes += request.reply_bytes;
            let mut bytes = request.frame;
            bytes.stamp(id, state.answered);
            let socket = state.socket.clone();
            state.calls.push_back(Call {
                id,
                bytes: bytes.clone(),
                name: request.name,
                repeatable: request.repeatable,
                reads: request.reads,
                reply_bytes: request.reply_bytes,
                sent: socket.is_some(),
                sent_again: false,
                over: false,
                status: Status::Pending,
                sleeper: None,
            });
            // Nothing is written while the connection is down: the one who
            // brings it up again sends all that is pending.
            if let Some(socket) = socket {
                let done = take_done(&mut state);
                drop(state);
                self.write(&socket, &[&done, bytes.as_slice()]);
            }
            drop(writing);
            return Ok(id);
        }
    }

    /// Waits for the answer to a request.
    pub(super) fn collect(&self, id: u64) -> Result<Reply, Failure> {
        self.pump_until(
            &mut Begun::interruptible(),
            None,
            |link, state, begun| {
                let Some(at) = state.call_at(id) else {
                    return Some(Err(Error::Closed.into()));
                };
                if let Status::Answered(_) = state.calls[at].status {
                    let Status::Answered(answer) =
                        std::mem::replace(&mut state.calls[at].status, Status::Finished)
                    else {
                        unreachable!("just looked")
                    };
                    state.drop_finished();
                    return Some(answer);
                }
                if begun.is_given_up() {
                    let call = &state.calls[at];
                    let may_have = call.sent && !call.reads;
                    let error = interrupt::given_up(link.addr(), call.name, may_have);
                    // Where it is on its way its answer still comes, to nobody.
                    match state.socket.is_some() && call.sent {
                        true => state.calls[at].status = Status::Finished,
                        false => state.give_up(at),
                    }
                    return Some(Err(error.into()));
                }
                if let Some(error) = link.given_up(state, at, begun) {
                    state.give_up(at);
                    return Some(Err(error.into()));
                }
                None
            },
            |state, sleeper| {
                if let Some(at) = state.call_at(id) {
                    state.calls[at].sleeper = sleeper;
                }
            },
        )
    }

    /// Waits until the request has been answered, whoever collects it.
    pub(super) fn await_answered(&self, id: u64) -> Result<(), Failure> {
        let begun = Instant::now();
        let reconnect_for = self.settings.reconnect_for;
        // Not registered as a sleeper (the call is another thread's), so it
        // looks again after a moment.
        loop {
            let step = {
                let mut state = lock(&self.state);
                if state.answered >= id {
                    return Ok(());
                }
                if state.closed {
                    return Err(Error::Closed.into());
                }
                if let Some(down) = &state.down
                    && down.since.max(begun).elapsed() > reconnect_for
                {
                    return Err(
                        Error::Unreachable { addr: self.addr(), why: down.why.clone() }.into()
                    );
                }
                match state.socket.clone() {
                    Some(socket) if !state.led => {
                        state.led = true;
                        Some(socket)
                    }
                    _ => None,
                }
            };
            if interrupt::gives_up() {
                return Err(Error::Cancelled.into());
            }
            match step {
                Some(socket) => {
                    let soon = Instant::now() + Duration::from_millis(20);
                    drop(self.lead(&socket, None, Some(soon)));
                    self.stop_leading();
                }
                None => std::thread::sleep(Duration::from_micros(200)),
            }
        }
    }

    /// The error for a call whose connection has been down for too long.
    pub(super) fn given_up(&self, state: &State, at: usize, begun: &mut Begun) -> Option<Error> {
        let down = state.down.as_ref()?;
        if down.since.max(begun.get()).elapsed() < self.settings.reconnect_for {
            return None;
        }
        let call = &state.calls[at];
        let time = seconds(self.settings.reconnect_for);
        let why = format!("no connection for {time}: {}", down.why);
        Some(if call.sent && !call.reads {
            Error::OutcomeUnknown { addr: self.addr(), op: call.name, why }
        } else {
            Error::Unreachable { addr: self.addr(), why }
        })
    }
}
