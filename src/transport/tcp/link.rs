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

use super::super::Bell;
use super::super::connect::{Target, plain};
use super::{Canceller, Failure, Waited};
use crate::auth::{Resume, Welcome};
use crate::engine::lock;
use crate::error::{Error, seconds};
use crate::wire::{self, ErrorRecord, FiredRecord, HEADER, Header, OpRecord, Refusal, Tag};
use crossbeam::sync::{Parker, Unparker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

thread_local! {
    /// Where this thread sleeps. Not `std::thread::park`, whose token belongs
    /// to the program that uses this library.
    static PARKER: Parker = Parker::new();
}

/// A timed-out wait gives the server this long to say how the wait stood; then
/// the caller goes on without.
const CANCEL_GRACE: Duration = Duration::from_millis(500);

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

/// What a request is answered by.
#[derive(Debug)]
pub(crate) enum Reply {
    /// One word.
    Word(u64),
    /// A frame of this kind with this payload.
    Frame(Tag, Vec<u8>),
}

/// Bytes of a frame with one operation.
const ONE_OP: usize = HEADER + size_of::<OpRecord>();

/// A frame to be sent, perhaps more than once.
#[derive(Clone, Debug)]
pub(super) enum Frame {
    /// One operation, as nearly every request is: no allocation.
    One([u8; ONE_OP]),
    /// Any other.
    Many(Arc<Vec<u8>>),
}

impl Frame {
    /// The frame of one operation, its id not filled in.
    pub fn one(record: &OpRecord) -> Frame {
        let mut bytes = [0; ONE_OP];
        let header = Header::new(Tag::Ops, 0, size_of::<OpRecord>());
        bytes[..HEADER].copy_from_slice(bytemuck::bytes_of(&header));
        bytes[HEADER..].copy_from_slice(bytemuck::bytes_of(record));
        Frame::One(bytes)
    }

    /// Any frame.
    pub fn many(frame: Vec<u8>) -> Frame {
        Frame::Many(Arc::new(frame))
    }

    fn as_slice(&self) -> &[u8] {
        match self {
            Frame::One(bytes) => bytes,
            Frame::Many(bytes) => bytes,
        }
    }

    /// Fills in a request's number. Nobody has a copy yet.
    fn stamp(&mut self, id: u64, answered: u64) {
        match self {
            Frame::One(bytes) => stamp(bytes, id, answered),
            Frame::Many(bytes) => stamp(Arc::make_mut(bytes).as_mut_slice(), id, answered),
        }
    }
}

/// A request, and what is known of it before it is sent.
#[derive(Debug)]
pub(super) struct Request {
    /// The whole frame; its id and span are filled in here.
    pub frame: Frame,
    /// What a person calls it.
    pub name: &'static str,
    /// It may be sent to a server that has forgotten whether it did it.
    pub repeatable: bool,
    /// It changes nothing.
    pub reads: bool,
    /// Bytes of its reply, at most.
    pub reply_bytes: usize,
}

#[derive(Debug)]
enum Status {
    Pending,
    Answered(Result<Reply, Failure>),
    /// Answered and collected, or given up: nobody will ask for it.
    Finished,
}

#[derive(Debug)]
struct Call {
    id: u64,
    bytes: Frame,
    name: &'static str,
    repeatable: bool,
    reads: bool,
    reply_bytes: usize,
    /// It has been written to a connection, in part at least.
    sent: bool,
    /// The server has answered, or never will: it need not be sent again.
    over: bool,
    status: Status,
    sleeper: Option<Unparker>,
}

/// What a frame with an id of the waits is answered by.
#[derive(Debug)]
enum Answer {
    Waited(Waited),
    Told(Tag, Vec<u8>),
}

impl Answer {
    fn nothing() -> Answer {
        Answer::Waited(Waited { satisfied: false, fired: Vec::new() })
    }
}

#[derive(Debug)]
struct Wait {
    bytes: Arc<Vec<u8>>,
    cancelling: bool,
    /// Nobody waits for the answer any more.
    abandoned: bool,
    answer: Option<Result<Answer, Failure>>,
    sleeper: Option<Unparker>,
}

/// Why there is no connection, and since when.
#[derive(Clone, Debug)]
struct Down {
    since: Instant,
    why: String,
}

#[derive(Debug)]
struct State {
    /// The connection, unless it is down.
    socket: Option<Arc<TcpStream>>,
    down: Option<Down>,
    /// A thread is at work to bring it back.
    reconnecting: bool,
    welcome: Welcome,
    closed: bool,
    next_request: u64,
    /// Every request up to this one has been answered.
    answered: u64,
    /// Requests with consecutive ids, those finished in front removed.
    calls: VecDeque<Call>,
    unanswered_bytes: usize,
    next_wait: u64,
    waits: BTreeMap<u64, Wait>,
    /// Answers of waits that have arrived, to be told to the server.
    done_waits: Vec<u64>,
    /// Someone reads the socket.
    led: bool,
    /// Threads that sleep until they are woken.
    sleeping: usize,
    bell: Option<Arc<dyn Bell>>,
    /// Something came since the keeper looked.
    heard: bool,
    last_heard: Instant,
    /// Frames that open the session's arrays, by their number. `None`: the
    /// number is free.
    bindings: Vec<Option<Arc<Vec<u8>>>>,
}

/// Bytes that have been read and are no whole frame yet.
#[derive(Debug, Default)]
struct Inbox {
    /// Which connection they came from.
    from: Option<Weak<TcpStream>>,
    bytes: Vec<u8>,
    filled: usize,
}

/// A session and its connection. See the [module](self).
#[derive(Debug)]
pub(crate) struct Link {
    pub(super) settings: Settings,
    /// Held while writing, so that frames do not mix and are written in the
    /// order of their ids. Taken before `state`, never after.
    writing: Mutex<()>,
    state: Mutex<State>,
    /// Used by the leader alone.
    inbox: Mutex<Inbox>,
    me: Weak<Link>,
}

/// When an operation began, as far as patience with a lost connection goes.
/// Filled in with the first look at one: the others spare the clock.
#[derive(Debug, Default)]
struct Begun(Option<Instant>);

impl Begun {
    fn get(&mut self) -> Instant {
        *self.0.get_or_insert_with(Instant::now)
    }
}

/// What reading once has brought.
enum Got<'l> {
    /// There was nothing to read.
    Nothing,
    /// Something came and is in the state, which is locked since.
    Some(MutexGuard<'l, State>),
    /// The connection is lost.
    Lost,
}

/// What a sleeper must do next.
enum Step<T> {
    Finished(T),
    /// Read the socket.
    Lead(Arc<TcpStream>, Option<Arc<dyn Bell>>),
    /// Someone else reads, or nobody can: sleep until then.
    Sleep(Option<Instant>),
}

impl Link {
    /// A link over a connection that has just been made.
    pub(crate) fn new(settings: Settings, socket: TcpStream, welcome: Welcome) -> Arc<Link> {
        Arc::new_cyclic(|me| Link {
            settings,
            writing: Mutex::new(()),
            state: Mutex::new(State {
                socket: Some(Arc::new(socket)),
                down: None,
                reconnecting: false,
                welcome,
                closed: false,
                next_request: 1,
                answered: 0,
                calls: VecDeque::new(),
                unanswered_bytes: 0,
                next_wait: 1,
                waits: BTreeMap::new(),
                done_waits: Vec::new(),
                led: false,
                sleeping: 0,
                bell: None,
                heard: false,
                last_heard: Instant::now(),
                bindings: Vec::new(),
            }),
            inbox: Mutex::default(),
            me: me.clone(),
        })
    }

    /// What the server said when it let us in.
    pub(crate) fn welcome(&self) -> Welcome {
        lock(&self.state).welcome
    }

    /// Whether there is a connection right now.
    pub(crate) fn is_connected(&self) -> bool {
        lock(&self.state).socket.is_some()
    }

    pub(crate) fn addr(&self) -> String {
        self.settings.target.addr.clone()
    }

    // ---- requests -------------------------------------------------------

    /// Sends a request and returns its number. Waits while as many requests
    /// are unanswered as may be.
    pub(super) fn submit(&self, request: Request) -> Result<u64, Failure> {
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
            &mut Begun::default(),
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
    fn await_answered(&self, id: u64) -> Result<(), Failure> {
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
    fn given_up(&self, state: &State, at: usize, begun: &mut Begun) -> Option<Error> {
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

    // ---- waits ----------------------------------------------------------

    /// Sends a wait and waits for its answer. The header's id is filled in.
    pub(super) fn wait(
        &self,
        frame: Vec<u8>,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Waited, Failure> {
        match self.exchange(frame, timeout, cancel)? {
            Answer::Waited(waited) => Ok(waited),
            Answer::Told(..) => Err(self.senseless("another answer than that of a wait")),
        }
    }

    /// Sends a frame whose answer comes when it comes. `None`: not in time.
    pub(crate) fn ask_later(
        &self,
        tag: Tag,
        payload: &[u8],
        timeout: Duration,
    ) -> Result<Option<(Tag, Vec<u8>)>, Failure> {
        let mut frame = Vec::new();
        wire::push(&mut frame, tag, 0, &[payload]);
        match self.exchange(frame, Some(timeout), None)? {
            Answer::Told(tag, bytes) => Ok(Some((tag, bytes))),
            Answer::Waited(_) => Ok(None),
        }
    }

    /// A second way by which the server's frames come, or none.
    pub(crate) fn set_bell(&self, bell: Option<Arc<dyn Bell>>) {
        lock(&self.state).bell = bell;
    }

    /// This end of the connection.
    pub(crate) fn local_ip(&self) -> Option<IpAddr> {
        let socket = lock(&self.state).socket.clone()?;
        Some(socket.local_addr().ok()?.ip().to_canonical())
    }

    fn exchange(
        &self,
        mut frame: Vec<u8>,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Answer, Failure> {
        let begun = Instant::now();
        // A wait of no time is a question: it is answered at once, or fails as
        // any other operation does.
        let at_once = timeout.is_some_and(|t| t.is_zero());
        let mut deadline = timeout.filter(|_| !at_once).and_then(|t| begun.checked_add(t));
        let mut patience = Begun(Some(begun));
        let id = {
            let _writing = lock(&self.writing);
            let mut state = lock(&self.state);
            if state.closed {
                return Err(Error::Closed.into());
            }
            let id = state.next_wait;
            state.next_wait += 1;
            frame[8..16].copy_from_slice(&id.to_le_bytes());
            let bytes = Arc::new(frame);
            state.waits.insert(
                id,
                Wait {
                    bytes: bytes.clone(),
                    cancelling: at_once,
                    abandoned: false,
                    answer: None,
                    sleeper: None,
                },
            );
            if let Some(socket) = state.socket.clone() {
                let done = take_done(&mut state);
                drop(state);
                let mut last = Vec::new();
                if at_once {
                    wire::push(&mut last, Tag::Cancel, id, &[]);
                }
                self.write(&socket, &[&done, &bytes, &last]);
            }
            id
        };
        // From here on a cancel from another thread finds the wait.
        let _entry = cancel.map(|c| c.enter(self.me.clone(), id));
        if cancel.is_some_and(Canceller::is_cancelled) {
            self.cancel_wait(id);
        }
        loop {
            let ended = self.pump_until(
                &mut patience,
                deadline,
                |link, state, begun| {
                    let wait = state.waits.get_mut(&id)?;
                    if let Some(answer) = wait.answer.take() {
                        state.waits.remove(&id);
                        return Some(Some(answer));
                    }
                    let why = match &state.down {
                        _ if state.closed => return Some(Some(Err(Error::Closed.into()))),
                        Some(d)
                            if d.since.max(begun.get()).elapsed()
                                >= link.settings.reconnect_for =>
                        {
                            d.why.clone()
                        }
                        Some(_) if wait.cancelling && !at_once => {
                            // The server is told when it is back.
                            state.abandon(id);
                            return Some(Some(Ok(Answer::nothing())));
                        }
                        _ => {
                            let over = deadline.is_some_and(|at| Instant::now() >= at);
                            return over.then_some(None);
                        }
                    };
                    state.abandon(id);
                    let time = seconds(link.settings.reconnect_for);
                    let why = format!("no connection for {time}: {why}");
                    Some(Some(Err(Error::Unreachable { addr: link.addr(), why }.into())))
                },
                |state, sleeper| {
                    if let Some(wait) = state.waits.get_mut(&id) {
                        wait.sleeper = sleeper;
                    }
                },
            );
            if let Some(answer) = ended {
                if cancel.is_some_and(Canceller::is_cancelled)
                    && matches!(answer, Ok(Answer::Waited(Waited { satisfied: false, .. })))
                {
                    return Err(Error::Cancelled.into());
                }
                return answer;
            }
            // Time is over: take the wait back, and take what the server says
            // to that, since it may have been satisfied at the last moment.
            if !self.cancel_wait(id) {
                lock(&self.state).abandon(id);
                return Ok(Answer::nothing());
            }
            deadline = Some(Instant::now() + CANCEL_GRACE);
        }
    }

    /// Asks the server to give up a wait. `false` if that was done before, or
    /// cannot be done now.
    pub(super) fn cancel_wait(&self, id: u64) -> bool {
        let _writing = lock(&self.writing);
        let mut state = lock(&self.state);
        let Some(wait) = state.waits.get_mut(&id) else {
            return false;
        };
        if std::mem::replace(&mut wait.cancelling, true) {
            return false;
        }
        let Some(socket) = state.socket.clone() else {
            // Its owner sees that it is being given up.
            if let Some(sleeper) = state.waits.get(&id).and_then(|w| w.sleeper.as_ref()) {
                sleeper.unpark();
            }
            return false;
        };
        let mut frame = take_done(&mut state);
        drop(state);
        wire::push(&mut frame, Tag::Cancel, id, &[]);
        self.write(&socket, &[&frame]);
        true
    }

    // ---- reading --------------------------------------------------------

    /// Reads, or sleeps while another thread reads, until `ready` has
    /// something. `register` says where the thread sleeps.
    fn pump_until<T>(
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
                }
                Step::Sleep(until) => PARKER.with(|p| match until {
                    Some(until) => p.park_deadline(until),
                    None => p.park(),
                }),
            }
        }
    }

    fn stop_leading(&self) {
        let mut state = lock(&self.state);
        state.led = false;
        state.wake_one();
    }

    /// Reads once and hands out what came, or returns at the deadline. The
    /// caller has the lead. The state comes back locked if something came.
    fn lead(
        &self,
        socket: &Arc<TcpStream>,
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
        if deadline.is_some() || bell.is_some() {
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
    fn listen(&self, bell: &dyn Bell) -> bool {
        let mut frames = Vec::new();
        let works = bell.take(&mut frames);
        let mut state = lock(&self.state);
        if !works {
            // Operations find out by themselves what is wrong with it.
            state.bell = None;
        }
        let mut rest = &frames[..];
        while let Ok(Some((header, payload))) = wire::split(rest) {
            rest = &rest[HEADER + payload.len()..];
            if let Err(what) = self.dispatch(&mut state, &header, payload) {
                tracing::warn!(what, "a notification that makes no sense");
            }
        }
        !frames.is_empty()
    }

    /// Reads all that has come by now. The caller has the lead.
    fn read_all(&self, socket: &Arc<TcpStream>) {
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
    fn read(&self, socket: &Arc<TcpStream>, flags: RecvFlags) -> Got<'_> {
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
        let n = match recv(socket, &mut inbox.bytes[inbox.filled..], flags) {
            Ok((_, 0)) => {
                self.broken(socket, "the server closed the connection");
                return Got::Lost;
            }
            Ok((_, n)) => n,
            // Not lost, but the caller looks around before it reads again.
            Err(Errno::INTR) => return Got::Some(lock(&self.state)),
            Err(Errno::AGAIN) => return Got::Nothing,
            Err(e) => {
                self.broken(socket, &plain(&e.into()));
                return Got::Lost;
            }
        };
        inbox.filled += n;
        let mut used = 0;
        let mut state = lock(&self.state);
        state.heard = true;
        let result = loop {
            match wire::split(&inbox.bytes[used..inbox.filled]) {
                Ok(Some((header, payload))) => {
                    used += HEADER + payload.len();
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
        Got::Some(state)
    }

    /// Hands one frame of the server's to whom it belongs.
    fn dispatch(&self, state: &mut State, header: &Header, payload: &[u8]) -> Result<(), String> {
        let Some(tag) = Tag::from_code(header.tag) else {
            return Err(format!("it sent a frame of type {}", header.tag));
        };
        match tag {
            Tag::Words | Tag::Opened | Tag::Listed | Tag::Info | Tag::Refused => {
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
            Tag::RdmaOpened | Tag::RdmaRefused => {
                state.wait_over(header.id, Ok(Answer::Told(tag, payload.to_vec())));
                Ok(())
            }
            Tag::Heartbeat => Ok(()),
            Tag::GoingAway => {
                tracing::warn!(addr = self.settings.target.addr, "server going away");
                state.going_away(&self.settings.target.addr);
                Err("the server was asked to stop".to_owned())
            }
            _ => Err(format!("it sent a frame of type {}", header.tag)),
        }
    }

    // ---- writing --------------------------------------------------------

    /// Writes whole frames. The caller holds `writing`. What cannot be written
    /// is sent again with the next connection.
    fn write(&self, socket: &Arc<TcpStream>, parts: &[&[u8]]) {
        let joined;
        let mut rest = match parts {
            [.., only] if parts[..parts.len() - 1].iter().all(|p| p.is_empty()) => *only,
            _ => {
                joined = parts.concat();
                &joined
            }
        };
        while !rest.is_empty() {
            match send(socket, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(n) => rest = &rest[n..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.make_room(socket),
                Err(e) => return self.broken(socket, &plain(&e.into())),
            }
        }
    }

    /// The socket takes no more. If nobody reads what the server sends, it may
    /// be waiting for us to do that.
    fn make_room(&self, socket: &Arc<TcpStream>) {
        let lead = {
            let mut state = lock(&self.state);
            !std::mem::replace(&mut state.led, true)
        };
        if lead {
            self.read_all(socket);
            self.stop_leading();
        }
        let mut fds = [PollFd::new(socket, PollFlags::OUT)];
        let moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        // Whatever it says, the next send tells.
        let _ = poll(&mut fds, Some(&moment));
    }

    fn is_current(&self, socket: &Arc<TcpStream>) -> bool {
        lock(&self.state).socket.as_ref().is_some_and(|s| Arc::ptr_eq(s, socket))
    }

    // ---- the connection's end and its return ----------------------------

    /// This connection is of no use any more. Someone else may have found out
    /// before, and there may be another one already.
    fn broken(&self, socket: &Arc<TcpStream>, why: &str) {
        let mut state = lock(&self.state);
        if !state.socket.as_ref().is_some_and(|s| Arc::ptr_eq(s, socket)) {
            return;
        }
        state.socket = None;
        // Whoever reads or writes it wakes up. It may be closed already.
        let _ = socket.shutdown(Shutdown::Both);
        state.down = Some(Down { since: Instant::now(), why: why.to_owned() });
        state.wake_all();
        drop(state);
        tracing::info!(addr = self.settings.target.addr, why, "lost the connection");
        self.bring_back();
    }

    /// Starts a thread that connects again, unless there is one.
    fn bring_back(&self) {
        let mut state = lock(&self.state);
        if state.closed || state.socket.is_some() || state.reconnecting {
            return;
        }
        let me = self.me.clone();
        let spawned = std::thread::Builder::new()
            .name("farcell-reconnect".to_owned())
            .spawn(move || super::resume::reconnect(&me));
        match spawned {
            Ok(_) => state.reconnecting = true,
            // The keeper tries again with its next look.
            Err(error) => tracing::warn!(%error, "cannot start a thread to reconnect"),
        }
    }

    /// What to ask the server for when connecting again; `None` when there is
    /// no need to connect.
    pub(super) fn resume_request(&self) -> Option<Resume> {
        let mut state = lock(&self.state);
        if state.closed || state.socket.is_some() {
            state.reconnecting = false;
            return None;
        }
        Some(Resume {
            incarnation: state.welcome.incarnation,
            session: state.welcome.session,
            next_request: state.answered + 1,
        })
    }

    /// An attempt to connect has failed.
    pub(super) fn still_down(&self, error: &Error) {
        let why = match error {
            Error::Unreachable { why, .. } => why.clone(),
            other => other.to_string(),
        };
        if let Some(down) = &mut lock(&self.state).down {
            down.why = why;
        }
    }

    /// The frames that open the session's arrays.
    pub(super) fn bindings(&self) -> Vec<Arc<Vec<u8>>> {
        lock(&self.state).bindings.iter().flatten().cloned().collect()
    }

    /// Remembers how an array is opened under a free number, and returns that
    /// number. An array that is opened in the same way keeps the one it has.
    pub(super) fn add_binding(&self, frame: impl Fn(u16) -> Vec<u8>) -> Option<u16> {
        let mut state = lock(&self.state);
        let mut free = state.bindings.len();
        for (number, binding) in state.bindings.iter().enumerate() {
            match binding {
                Some(bytes) if **bytes == frame(number as u16) => return Some(number as u16),
                Some(_) => {}
                None => free = free.min(number),
            }
        }
        let number = u16::try_from(free).ok()?;
        if free >= wire::MAX_ARRAYS_OPEN {
            return None;
        }
        if free == state.bindings.len() {
            state.bindings.push(None);
        }
        state.bindings[free] = Some(Arc::new(frame(number)));
        Some(number)
    }

    /// The array could not be opened: its number is free again.
    pub(super) fn drop_binding(&self, number: u16) {
        if let Some(binding) = lock(&self.state).bindings.get_mut(usize::from(number)) {
            *binding = None;
        }
    }

    /// The connection is back: sends all that is pending.
    pub(super) fn back(&self, socket: TcpStream, welcome: Welcome) {
        let _writing = lock(&self.writing);
        let mut state = lock(&self.state);
        state.reconnecting = false;
        if state.closed {
            return;
        }
        if !welcome.resumed {
            state.forget_unrepeatable(&self.settings.target.addr);
            // The server knows nothing of them.
            state.done_waits.clear();
        }
        let socket = Arc::new(socket);
        let mut bytes = Vec::new();
        let answered = state.answered;
        for call in state.calls.iter_mut().filter(|call| !call.over) {
            let start = bytes.len();
            bytes.extend_from_slice(call.bytes.as_slice());
            stamp(&mut bytes[start..], call.id, answered);
            call.sent = true;
        }
        for (&id, wait) in &state.waits {
            if wait.answer.is_some() {
                continue;
            }
            if !wait.abandoned {
                bytes.extend_from_slice(&wait.bytes);
            }
            if wait.cancelling {
                wire::push(&mut bytes, Tag::Cancel, id, &[]);
            }
        }
        let done = take_done(&mut state);
        state.welcome = welcome;
        state.socket = Some(socket.clone());
        state.down = None;
        state.last_heard = Instant::now();
        state.wake_all();
        drop(state);
        tracing::info!(
            addr = self.settings.target.addr,
            resumed = welcome.resumed,
            "the connection is back"
        );
        self.write(&socket, &[&done, &bytes]);
    }

    /// Keeps the lease, and finds out whether the server is still there. When
    /// to call again; `None` for never.
    pub(crate) fn tend(&self, now: Instant) -> Option<Instant> {
        let (lease, socket, lead) = {
            let mut state = lock(&self.state);
            if state.closed {
                return None;
            }
            let lease = Duration::from_millis(state.welcome.lease_ms);
            let Some(socket) = state.socket.clone() else {
                drop(state);
                self.bring_back();
                return Some(now + lease / 3);
            };
            (lease, socket, !std::mem::replace(&mut state.led, true))
        };
        if lead {
            self.read_all(&socket);
            self.stop_leading();
        }
        let mut frame = {
            let mut state = lock(&self.state);
            if std::mem::take(&mut state.heard) {
                state.last_heard = now;
            }
            if now.saturating_duration_since(state.last_heard) > lease {
                drop(state);
                let time = seconds(lease);
                self.broken(&socket, &format!("no sign of life from the server for {time}"));
                return Some(now + lease / 3);
            }
            // Whoever writes now keeps the lease as well.
            let Ok(_writing) = self.writing.try_lock() else {
                return Some(now + lease / 3);
            };
            let mut frame = take_done(&mut state);
            wire::push(&mut frame, Tag::Heartbeat, 0, &[]);
            drop(state);
            match send(&socket, &frame, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(n) => frame.drain(..n).for_each(drop),
                Err(_) => frame.clear(),
            }
            frame
        };
        if !frame.is_empty() {
            // A part of it: the rest must follow before anything else can.
            frame.clear();
            self.broken(&socket, "the server takes no more bytes");
        }
        Some(now + lease / 3)
    }

    /// Ends the session. Whoever still waits gets [`Error::Closed`].
    pub(crate) fn close(&self) {
        let socket = {
            let mut state = lock(&self.state);
            if std::mem::replace(&mut state.closed, true) {
                return;
            }
            state.socket.take()
        };
        if let Some(socket) = socket {
            // In the middle of another thread's frame it would be no goodbye.
            // Should it not go out, the server finds the connection closed and
            // ends the session with its lease.
            if let Ok(_writing) = self.writing.try_lock() {
                let mut bye = Vec::new();
                wire::push(&mut bye, Tag::Bye, 0, &[]);
                let _ = send(&socket, &bye, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
            }
            let _ = socket.shutdown(Shutdown::Write);
            // What the server had sent by then is read away: closing with
            // bytes unread resets the connection, and the goodbye with it.
            let mut rest = [0; 4096];
            while matches!(recv(&socket, &mut rest[..], RecvFlags::DONTWAIT), Ok((_, n)) if n > 0) {
            }
            let _ = socket.shutdown(Shutdown::Read);
        }
        let mut state = lock(&self.state);
        for call in &mut state.calls {
            if matches!(call.status, Status::Pending) {
                call.status = Status::Answered(Err(Error::Closed.into()));
                call.over = true;
            }
        }
        state.wake_all();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

impl State {
    fn call_at(&self, id: u64) -> Option<usize> {
        let first = self.calls.front()?.id;
        let at = usize::try_from(id.checked_sub(first)?).ok()?;
        (at < self.calls.len()).then_some(at)
    }

    fn drop_finished(&mut self) {
        while let Some(call) = self.calls.front()
            && call.over
            && matches!(call.status, Status::Finished)
        {
            self.calls.pop_front();
        }
    }

    /// The caller has gone without an answer while the connection is down. The
    /// request is not sent again: it must not happen behind the caller's back.
    fn give_up(&mut self, at: usize) {
        let call = &mut self.calls[at];
        call.status = Status::Finished;
        if !std::mem::replace(&mut call.over, true) {
            self.unanswered_bytes -= call.reply_bytes;
        }
        self.settle();
        self.drop_finished();
    }

    /// Finds the oldest unanswered request anew, after some were answered out
    /// of their order.
    fn settle(&mut self) {
        let oldest = self.calls.iter().find(|c| !c.over).map_or(self.next_request, |c| c.id);
        self.answered = oldest - 1;
    }

    /// The server's answer to a request, or that it never will answer.
    fn answer(&mut self, id: u64, answer: Result<Reply, Failure>) -> Result<(), String> {
        let Some(at) = self.call_at(id) else {
            return Err(format!("it answered request {id}, which was not asked"));
        };
        let call = &mut self.calls[at];
        if std::mem::replace(&mut call.over, true) {
            return Err(format!("it answered request {id} twice"));
        }
        self.answered = self.answered.max(id);
        self.unanswered_bytes -= call.reply_bytes;
        if matches!(call.status, Status::Pending) {
            call.status = Status::Answered(answer);
            if let Some(sleeper) = call.sleeper.take() {
                sleeper.unpark();
            }
        } else {
            self.drop_finished();
        }
        Ok(())
    }

    fn wait_over(&mut self, id: u64, answer: Result<Answer, Failure>) {
        self.done_waits.push(id);
        // Unknown: the answer to a cancel of a wait that was answered before.
        let Some(wait) = self.waits.get_mut(&id) else {
            return;
        };
        if wait.abandoned {
            self.waits.remove(&id);
            return;
        }
        wait.answer = Some(answer);
        if let Some(sleeper) = wait.sleeper.take() {
            sleeper.unpark();
        }
    }

    /// The owner of a wait has gone. The server has to be told, now or with
    /// the next connection.
    fn abandon(&mut self, id: u64) {
        if let Some(wait) = self.waits.get_mut(&id) {
            wait.abandoned = true;
            wait.cancelling = true;
            wait.sleeper = None;
        }
    }

    /// The server has forgotten this session. What it may have done before
    /// cannot be known any more, and is not done again.
    fn forget_unrepeatable(&mut self, addr: &str) {
        let lost: Vec<(u64, &'static str)> = self
            .calls
            .iter()
            .filter(|c| !c.over && c.sent && !c.repeatable)
            .map(|c| (c.id, c.name))
            .collect();
        for (id, op) in lost {
            let why = "the server was restarted, or our lease was over, before its answer came";
            let error = Error::OutcomeUnknown { addr: addr.to_owned(), op, why: why.to_owned() };
            // It is in the list, so it is known.
            let _ = self.answer(id, Err(error.into()));
        }
        self.settle();
        // No wait that is being given up is known to the new session.
        self.waits.retain(|_, wait| !wait.abandoned);
    }

    /// The server stops, and has carried out nothing that it has not answered.
    fn going_away(&mut self, addr: &str) {
        let error = || Error::ServerGoingAway { addr: addr.to_owned() };
        let pending: Vec<u64> = self.calls.iter().filter(|c| !c.over).map(|c| c.id).collect();
        for id in pending {
            // It is in the list, so it is known.
            let _ = self.answer(id, Err(error().into()));
        }
        self.settle();
        let waits: Vec<u64> =
            self.waits.iter().filter(|(_, w)| w.answer.is_none()).map(|(&id, _)| id).collect();
        for id in waits {
            self.wait_over(id, Err(error().into()));
        }
        self.done_waits.clear();
    }

    /// Wakes one thread to take the lead, if nobody has it.
    fn wake_one(&mut self) {
        if self.led || self.sleeping == 0 {
            return;
        }
        let call = self.calls.iter().find_map(|c| c.sleeper.as_ref());
        let sleeper = call.or_else(|| self.waits.values().find_map(|w| w.sleeper.as_ref()));
        if let Some(sleeper) = sleeper {
            sleeper.unpark();
        }
    }

    /// Wakes every thread that sleeps, to look at what has changed.
    fn wake_all(&mut self) {
        let calls = self.calls.iter().filter_map(|c| c.sleeper.as_ref());
        let waits = self.waits.values().filter_map(|w| w.sleeper.as_ref());
        for sleeper in calls.chain(waits) {
            sleeper.unpark();
        }
    }
}

/// Fills in a request's number, and how far it is ahead of the oldest one
/// that is unanswered.
fn stamp(frame: &mut [u8], id: u64, answered: u64) {
    let span = u16::try_from(id - answered - 1).unwrap_or(u16::MAX);
    frame[6..8].copy_from_slice(&span.to_le_bytes());
    frame[8..16].copy_from_slice(&id.to_le_bytes());
}

/// The frames that tell the server which answers of waits have arrived.
fn take_done(state: &mut State) -> Vec<u8> {
    let mut bytes = Vec::new();
    for id in state.done_waits.drain(..) {
        wire::push(&mut bytes, Tag::WaitDone, id, &[]);
    }
    bytes
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
