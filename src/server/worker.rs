//! An event loop: some of the clients, on one thread.

use super::Shared;
use super::connection::{Connection, Phase};
use super::rdma::take_unclear;
use crate::auth::{self, Denial, HELLO_LEN, MAGIC, ServerHandshake, Welcome};
use crate::engine::{Newcomer, Next, Out, Route, lock};
use crate::wire::{self, Tag};
use crossbeam::queue::SegQueue;
use mio::net::{TcpListener, TcpStream};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use slab::Slab;
use socket2::{SockRef, TcpKeepalive};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WAKER: Token = Token(usize::MAX);
/// The adapter has something: doorbells of clients.
const BELLS: Token = Token(usize::MAX - 1);
const ALARM: Token = Token(usize::MAX - 2);
/// Listeners have the tokens below this one, clients those above.
const FIRST_CLIENT: usize = 1 << 16;

/// How long a client may take to prove that it knows the key.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Between two looks at the parked cells, while there are any.
const SWEEP_EVERY: Duration = Duration::from_millis(5);
/// Between two looks at leases and deadlines.
const TICK_EVERY: Duration = Duration::from_millis(250);
/// How long clients have to take our last words when the server stops.
const LINGER: Duration = Duration::from_millis(500);
/// How long accepting rests when there are no file descriptors left.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// Reads from one client before the others have their turn.
const READS_IN_TURN: usize = 4;
/// Bytes of the buffer that a worker reads into.
const SCRATCH: usize = 256 << 10;

/// A message from another thread.
#[derive(Debug)]
pub enum Mail {
    /// Look after this client.
    Client(std::net::TcpStream),
    /// Send this to that client.
    Send(Route, Vec<u8>),
    /// Close the connection of that client: its session is elsewhere or over.
    Close(Route),
    /// Say goodbye to every client, and end.
    Stop,
}

/// How others reach a worker.
#[derive(Debug)]
pub struct Mailbox {
    queue: SegQueue<Mail>,
    waker: Waker,
}

impl Mailbox {
    /// Puts a message into the box and wakes the worker.
    pub fn post(&self, mail: Mail) {
        self.queue.push(mail);
        if let Err(error) = self.waker.wake() {
            // An eventfd that exists cannot refuse; the next tick finds it.
            tracing::warn!(%error, "cannot wake a worker");
        }
    }
}

/// Ends the worker's sleep when something is due. A timeout of epoll would do
/// too, but it sets and cancels a timer with every request.
#[derive(Debug)]
struct Alarm {
    timer: OwnedFd,
    /// When it goes off.
    at: Option<Instant>,
}

impl Alarm {
    fn new() -> io::Result<Alarm> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Alarm { timer: timerfd_create(TimerfdClockId::Monotonic, flags)?, at: None })
    }

    /// Goes off at `next` or before; costs nothing if it does so already. `now`
    /// may be a moment old: it does not go off early by that.
    fn set(&mut self, next: Instant, now: Instant) {
        if self.at.is_some_and(|at| at <= next) {
            return;
        }
        // No time at all would switch it off.
        let left = next.saturating_duration_since(now).max(Duration::from_nanos(1));
        let value = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let once = Itimerspec { it_interval: Timespec::default(), it_value: value };
        match timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            Ok(_) => self.at = Some(next),
            // A timer that exists cannot refuse; requests still wake us.
            Err(error) => tracing::error!(%error, "cannot set a worker's alarm"),
        }
    }
}

/// A worker, before and while its thread runs.
pub struct Worker {
    shared: Arc<Shared>,
    index: usize,
    poll: Poll,
    alarm: Alarm,
    /// Worker 0 listens, and hands the clients out in turn.
    listeners: Vec<TcpListener>,
    accept_again: Option<Instant>,
    next_worker: usize,
    clients: Slab<Connection>,
    serial: u32,
    /// Clients that have yet to prove themselves, oldest first.
    strangers: VecDeque<(Instant, usize, u32)>,
    /// Clients with more to read, when the others have had their turn.
    again: Vec<(usize, u32)>,
    scratch: Vec<u8>,
    out: Out,
    stopping: Option<Instant>,
    /// When it last had something to do: the time of all that it does then, so
    /// that a request costs one look at the clock.
    now: Instant,
}

impl Worker {
    /// A worker and its mailbox.
    ///
    /// # Errors
    /// No file descriptor left for epoll or eventfd.
    pub fn prepare() -> io::Result<(Poll, Mailbox)> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        Ok((poll, Mailbox { queue: SegQueue::new(), waker }))
    }

    /// Completes a prepared worker. Only worker 0 gets listeners.
    ///
    /// # Errors
    /// A listener cannot be registered.
    pub fn new(
        shared: Arc<Shared>,
        index: usize,
        poll: Poll,
        listeners: Vec<std::net::TcpListener>,
    ) -> io::Result<Worker> {
        let mut listeners: Vec<TcpListener> =
            listeners.into_iter().map(TcpListener::from_std).collect();
        for (i, listener) in listeners.iter_mut().enumerate() {
            poll.registry().register(listener, Token(i), Interest::READABLE)?;
        }
        if let Some(rdma) = shared.rdma.as_ref().filter(|_| index == 0) {
            let fd = rdma.events().as_raw_fd();
            poll.registry().register(&mut SourceFd(&fd), BELLS, Interest::READABLE)?;
        }
        let alarm = Alarm::new()?;
        // Edge-triggered, and set anew each time: it need not be read.
        let source = &mut SourceFd(&alarm.timer.as_raw_fd());
        poll.registry().register(source, ALARM, Interest::READABLE)?;
        Ok(Worker {
            shared,
            index,
            poll,
            alarm,
            listeners,
            accept_again: None,
            next_worker: 0,
            clients: Slab::new(),
            serial: 0,
            strangers: VecDeque::new(),
            again: Vec::new(),
            scratch: vec![0; SCRATCH],
            out: Out::default(),
            stopping: None,
            now: Instant::now(),
        })
    }

    /// Runs until the server stops.
    pub fn run(mut self) {
        let mut events = Events::with_capacity(1024);
        let mut now = Instant::now();
        let mut last_active = now;
        let mut next_tick = last_active + TICK_EVERY;
        let mut next_sweep = last_active;
        loop {
            let spinning = now.duration_since(last_active) < self.shared.spin;
            let timeout = if spinning || !self.again.is_empty() {
                Some(Duration::ZERO)
            } else {
                let sweeping = self.index == 0 && self.shared.engine.parked() > 0;
                let next = if sweeping { next_sweep.min(next_tick) } else { next_tick };
                let next = self.accept_again.map_or(next, |at| next.min(at));
                self.alarm.set(next, now);
                None
            };
            if let Err(error) = self.poll.poll(&mut events, timeout)
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, "epoll failed; a worker stops");
                return;
            }
            now = Instant::now();
            self.now = now;
            if events.iter().any(|event| event.token() != ALARM) {
                last_active = now;
            }
            for event in &events {
                match event.token() {
                    WAKER => self.read_mail(),
                    BELLS => self.answer_bells(),
                    ALARM => self.alarm.at = None,
                    Token(i) if i < FIRST_CLIENT => self.accept(i),
                    Token(i) => {
                        let key = i - FIRST_CLIENT;
                        if event.is_writable() {
                            self.flush(key);
                        }
                        if event.is_readable() || event.is_read_closed() || event.is_error() {
                            self.receive(key);
                        }
                    }
                }
            }
            for (key, serial) in std::mem::take(&mut self.again) {
                if self.clients.get(key).is_some_and(|c| c.serial == serial) {
                    self.receive(key);
                }
            }
            if self.index == 0 && now >= next_sweep && self.shared.engine.parked() > 0 {
                self.shared.engine.sweep(&mut self.out);
                self.post_out();
                next_sweep = now + SWEEP_EVERY;
            }
            if self.accept_again.is_some_and(|at| now >= at) {
                self.accept_again = None;
                for i in 0..self.listeners.len() {
                    self.accept(i);
                }
            }
            if now >= next_tick {
                self.tick(now);
                next_tick = now + TICK_EVERY;
            }
            if let Some(end) = self.stopping
                && (self.clients.is_empty() || now >= end)
            {
                return;
            }
        }
    }

    fn tick(&mut self, now: Instant) {
        while let Some(&(deadline, key, serial)) = self.strangers.front() {
            if deadline > now {
                break;
            }
            self.strangers.pop_front();
            self.drop_stranger(key, serial, "did not prove itself in time");
        }
        if self.index == 0 {
            self.shared.engine.expire(self.shared.now(), &mut self.out);
            if let Some(rdma) = &self.shared.rdma {
                for session in rdma.take_orphans() {
                    self.shared.engine.repeat(session, &mut self.out);
                }
            }
            self.post_out();
        }
    }

    fn drop_stranger(&mut self, key: usize, serial: u32, why: &'static str) {
        if let Some(client) = self.clients.get(key)
            && client.serial == serial
            && !matches!(client.phase, Phase::Open { .. })
        {
            self.close(key, why);
        }
    }

    fn accept(&mut self, i: usize) {
        loop {
            let Some(listener) = self.listeners.get(i) else {
                return;
            };
            match listener.accept() {
                Ok((stream, _)) => {
                    let worker = self.next_worker;
                    self.next_worker = (worker + 1) % self.shared.mailboxes.len();
                    if worker == self.index {
                        self.welcome_stranger(stream);
                    } else {
                        self.shared.mailboxes[worker].post(Mail::Client(stream.into()));
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // The peer gave up while it was in the queue, or a signal came.
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a client; trying again soon");
                    self.accept_again = Some(Instant::now() + ACCEPT_REST);
                    return;
                }
            }
        }
    }

    /// Sends a greeting to a client that has connected.
    fn welcome_stranger(&mut self, stream: TcpStream) {
        let mut nonce = [0; 32];
        if let Err(error) = getrandom::fill(&mut nonce) {
            tracing::error!(%error, "no random numbers; a client is dropped");
            return;
        }
        let socket = SockRef::from(&stream);
        let keepalive = TcpKeepalive::new()
            .with_time(Duration::from_secs(30))
            .with_interval(Duration::from_secs(10))
            .with_retries(3);
        // Without these a client is slower, or is found dead later: no reason
        // to send it away.
        let _ = socket.set_tcp_nodelay(true);
        let _ = socket.set_tcp_keepalive(&keepalive);
        self.serial = self.serial.wrapping_add(1);
        let serial = self.serial;
        let handshake = ServerHandshake::new(nonce);
        let greeting = handshake.greeting();
        let entry = self.clients.vacant_entry();
        let key = entry.key();
        let client = entry.insert(Connection::new(stream, serial, handshake));
        // Writable too: edge-triggered, it costs nothing until a send did not
        // fit.
        let interest = Interest::READABLE | Interest::WRITABLE;
        let token = Token(FIRST_CLIENT + key);
        let started = client
            .send(&greeting)
            .and_then(|()| self.poll.registry().register(client.stream(), token, interest));
        if let Err(error) = started {
            tracing::debug!(%error, "a client was gone before its greeting");
            self.clients.remove(key);
            return;
        }
        self.strangers.push_back((Instant::now() + HANDSHAKE_TIME, key, serial));
        if self.strangers.len() > self.shared.most_strangers
            && let Some((_, key, serial)) = self.strangers.pop_front()
        {
            self.drop_stranger(key, serial, "made room for newer strangers");
        }
    }

    fn read_mail(&mut self) {
        while let Some(mail) = self.shared.mailboxes[self.index].queue.pop() {
            match mail {
                Mail::Client(stream) => self.welcome_stranger(TcpStream::from_std(stream)),
                Mail::Send(route, frame) => {
                    if let Some(key) = self.client_of(route) {
                        self.send(key, &frame);
                    }
                }
                Mail::Close(route) => {
                    if let Some(key) = self.client_of(route) {
                        self.close(key, "its session is over or has moved");
                    }
                }
                Mail::Stop => self.stop(),
            }
        }
    }

    /// Clients have changed cells by themselves, and someone waits for them.
    fn answer_bells(&mut self) {
        let Some(rdma) = self.shared.rdma.clone() else {
            return;
        };
        let (mut rung, mut broken) = (Vec::new(), Vec::new());
        rdma.take_events(&mut rung, &mut broken);
        for place in rung.into_iter().filter(|&place| place < self.shared.capacity) {
            self.shared.engine.ring(place, &mut self.out);
        }
        for session in broken {
            rdma.close(session);
            self.shared.engine.repeat(session, &mut self.out);
        }
        self.post_out();
    }

    /// A client asks for RDMA, or gives it up.
    fn handle_rdma(&mut self, key: usize, tag: Tag, id: u64, payload: &[u8]) {
        let client = &mut self.clients[key];
        let Phase::Open { session, id: number } = &client.phase else {
            return;
        };
        let (number, access, serial) = (*number, lock(session).access, client.serial);
        let local = client.stream().local_addr().ok().map(|addr| addr.ip().to_canonical());
        let mut answer = Vec::new();
        match (&self.shared.rdma, tag) {
            (None, _) => {
                wire::push(&mut answer, Tag::RdmaRefused, id, &[self.shared.no_rdma.as_bytes()]);
            }
            (Some(rdma), Tag::RdmaClose) => {
                rdma.close(number);
                wire::push(&mut answer, Tag::RdmaRefused, id, &[b"given up"]);
                self.shared.engine.repeat(number, &mut self.out);
                self.post_out();
            }
            (Some(rdma), _) => {
                // The way to the client may take seconds to be found.
                let (rdma, shared) = (rdma.clone(), self.shared.clone());
                let (offer, route, worker) =
                    (payload.to_vec(), self.route(key, serial), self.index);
                let connect = move || {
                    let made = rdma.connect(number, access, &offer, local);
                    if !shared.engine.has(number) {
                        rdma.close(number);
                    }
                    let mut answer = Vec::new();
                    match made {
                        Ok(bytes) => wire::push(&mut answer, Tag::RdmaOpened, id, &[&bytes]),
                        Err(why) => {
                            tracing::info!(session = number, why, "no RDMA for a client");
                            wire::push(&mut answer, Tag::RdmaRefused, id, &[why.as_bytes()]);
                        }
                    }
                    shared.mailboxes[worker].post(Mail::Send(route, answer));
                };
                let thread = std::thread::Builder::new().name("farcell-connect".to_owned());
                if let Err(error) = thread.spawn(connect) {
                    let why = format!("the server cannot start a thread: {error}");
                    wire::push(&mut answer, Tag::RdmaRefused, id, &[why.as_bytes()]);
                }
            }
        }
        self.send(key, &answer);
    }

    fn stop(&mut self) {
        self.stopping = Some(Instant::now() + LINGER);
        self.listeners.clear();
        let mut goodbye = Vec::new();
        wire::push(&mut goodbye, Tag::GoingAway, 0, &[]);
        for key in self.keys() {
            match self.clients[key].phase {
                Phase::Open { .. } => {
                    self.clients[key].queue(&goodbye);
                    self.finish(key);
                }
                Phase::Handshake(_) => {
                    self.clients[key].queue(&auth::denial(Denial::GoingAway));
                    self.finish(key);
                }
                Phase::Closing => {}
            }
        }
    }

    fn keys(&self) -> Vec<usize> {
        self.clients.iter().map(|(key, _)| key).collect()
    }

    /// Handles no further bytes of a client; what waits for it is still sent.
    fn finish(&mut self, key: usize) {
        self.detach(key);
        self.clients[key].phase = Phase::Closing;
        self.flush(key);
    }

    fn route(&self, key: usize, serial: u32) -> Route {
        (self.index as u64) << 56 | (key as u64 & 0xff_ffff) << 32 | u64::from(serial)
    }

    fn client_of(&self, route: Route) -> Option<usize> {
        let key = (route >> 32 & 0xff_ffff) as usize;
        let client = self.clients.get(key)?;
        (client.serial == route as u32).then_some(key)
    }

    /// Carries frames for other clients to them. Those of this worker first go
    /// out together, so that many wake-ups for one client are one write.
    fn post_out(&mut self) {
        for session in std::mem::take(&mut self.out.ended) {
            if let Some(rdma) = &self.shared.rdma {
                rdma.close(session);
            }
        }
        for route in std::mem::take(&mut self.out.close) {
            let worker = (route >> 56) as usize;
            if worker != self.index {
                self.shared.mailboxes[worker].post(Mail::Close(route));
            } else if let Some(key) = self.client_of(route) {
                self.close(key, "its session is over or has moved");
            }
        }
        let mail = std::mem::take(&mut self.out.mail);
        let single = mail.len() == 1;
        let mut queued = Vec::new();
        for (route, frame) in mail {
            let worker = (route >> 56) as usize;
            if worker != self.index {
                self.shared.mailboxes[worker].post(Mail::Send(route, frame));
            } else if let Some(key) = self.client_of(route) {
                if self.notify(key, &frame) {
                    continue;
                }
                if single {
                    self.send(key, &frame);
                } else {
                    if self.clients[key].waiting() == 0 {
                        queued.push(key);
                    }
                    self.clients[key].queue(&frame);
                }
            }
        }
        for key in queued {
            self.flush(key);
        }
    }

    /// Sends the answer of a wait by the way that the client's operations
    /// take, if that is not TCP.
    fn notify(&self, key: usize, frame: &[u8]) -> bool {
        match (&self.shared.rdma, &self.clients[key].phase) {
            (Some(rdma), Phase::Open { id, .. }) => rdma.notify(*id, frame),
            _ => false,
        }
    }

    fn send(&mut self, key: usize, bytes: &[u8]) {
        if let Err(error) = self.clients[key].send(bytes) {
            tracing::debug!(%error, "cannot send to a client");
            self.close(key, "cannot be sent to");
        }
    }

    fn flush(&mut self, key: usize) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        let was_clogged = client.is_clogged();
        if client.flush().is_err() {
            self.close(key, "cannot be sent to");
            return;
        }
        match client.phase {
            Phase::Closing if client.waiting() == 0 => client.finish(),
            // There was no reading while it was clogged, and there is no new
            // event for what came in meanwhile.
            _ if was_clogged && !client.is_clogged() => self.again.push((key, client.serial)),
            _ => {}
        }
    }

    /// Reads and handles what a client has sent.
    fn receive(&mut self, key: usize) {
        let mut scratch = std::mem::take(&mut self.scratch);
        for turn in 0.. {
            let Some(client) = self.clients.get_mut(key) else {
                break;
            };
            if client.is_clogged() {
                break;
            }
            if turn == READS_IN_TURN {
                self.again.push((key, client.serial));
                break;
            }
            // Frames that had to wait for replies to go out come first.
            if !client.inbox.is_empty() && turn == 0 && self.handle_inbox(key) {
                continue;
            }
            let Some(client) = self.clients.get_mut(key) else {
                break;
            };
            let n = match client.read(&mut scratch) {
                Ok(0) => {
                    self.close(key, "closed the connection");
                    break;
                }
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.close(key, "reset the connection");
                    break;
                }
            };
            if client.inbox.is_empty() {
                let used = self.handle(key, &scratch[..n]);
                if let Some(client) = self.clients.get_mut(key) {
                    client.inbox.extend_from_slice(&scratch[used..n]);
                }
            } else {
                client.inbox.extend_from_slice(&scratch[..n]);
                self.handle_inbox(key);
            }
            // The buffer was not filled, so the socket is empty; should more
            // come, there will be another event.
            if n < scratch.len() && self.clients.get(key).is_none_or(|c| c.inbox.is_empty()) {
                break;
            }
        }
        self.scratch = scratch;
    }

    /// Handles what is in the inbox. Whether some of it was.
    fn handle_inbox(&mut self, key: usize) -> bool {
        let mut inbox = std::mem::take(&mut self.clients[key].inbox);
        let used = self.handle(key, &inbox);
        if let Some(client) = self.clients.get_mut(key) {
            if used < inbox.len() {
                inbox.drain(..used);
                client.inbox = inbox;
            }
            return used > 0;
        }
        false
    }

    /// Handles the whole messages at the front of `bytes`, as far as the
    /// client takes the replies, and says how many bytes those were.
    fn handle(&mut self, key: usize, bytes: &[u8]) -> usize {
        let mut total = 0;
        loop {
            let rest = &bytes[total..];
            let Some(client) = self.clients.get_mut(key) else {
                return bytes.len();
            };
            if client.is_clogged() || rest.is_empty() {
                return total;
            }
            let used = match client.phase {
                Phase::Closing => return bytes.len(),
                Phase::Handshake(_) => self.handle_hello(key, rest),
                Phase::Open { .. } => self.handle_frames(key, rest),
            };
            if used == 0 {
                return total;
            }
            total += used;
        }
    }

    fn handle_hello(&mut self, key: usize, bytes: &[u8]) -> usize {
        let Phase::Handshake(handshake) = &self.clients[key].phase else {
            return 0;
        };
        let n = bytes.len().min(MAGIC.len());
        if bytes[..n] != MAGIC[..n] {
            self.close(key, "is no farcell client");
            return 0;
        }
        let Some(hello) = bytes.first_chunk::<HELLO_LEN>() else {
            return 0;
        };
        let handshake = handshake.clone();
        let denial = match handshake.hello(hello, &self.shared.keys) {
            Ok(proven) if self.is_full_for(&proven) => Denial::Full,
            Ok(proven) => {
                self.admit(key, &handshake, &proven);
                return HELLO_LEN;
            }
            Err(Some(denial)) => denial,
            Err(None) => {
                self.close(key, "is no farcell client");
                return 0;
            }
        };
        let client = &mut self.clients[key];
        let peer = client.stream().peer_addr().ok();
        tracing::warn!(?peer, "refused a client: {denial}");
        client.queue(&auth::denial(denial));
        self.finish(key);
        HELLO_LEN
    }

    /// Whether there is no place for this client. Who has a session already
    /// needs none.
    fn is_full_for(&self, proven: &auth::Proven) -> bool {
        let engine = &self.shared.engine;
        engine.sessions() >= self.shared.most_clients && !engine.has(proven.resume.session)
    }

    fn admit(&mut self, key: usize, handshake: &ServerHandshake, proven: &auth::Proven) {
        let Ok(fresh) = getrandom::u64() else {
            self.close(key, "came when there were no random numbers");
            return;
        };
        let serial = self.clients[key].serial;
        let resume = proven.resume;
        let newcomer = Newcomer {
            access: proven.access,
            resume: (resume.incarnation == self.shared.incarnation).then_some(resume.session),
            next_request: resume.next_request,
            fresh: fresh.max(1),
            route: self.route(key, serial),
        };
        let attached = self.shared.engine.attach(&newcomer, self.shared.now(), &mut self.out);
        let welcome = Welcome {
            access: proven.access,
            domain: self.shared.domain,
            resumed: attached.resumed,
            offers_rdma: self.shared.rdma.is_some(),
            incarnation: self.shared.incarnation,
            session: attached.id,
            capacity: self.shared.capacity.into(),
            lease_ms: self.shared.lease.as_millis() as u64,
        };
        let bytes = handshake.welcome(proven, &welcome, &self.shared.keys);
        self.clients[key].phase = Phase::Open { session: attached.session, id: attached.id };
        tracing::debug!(session = attached.id, resumed = attached.resumed, "a client is in");
        self.send(key, &bytes);
        self.post_out();
    }

    fn handle_frames(&mut self, key: usize, bytes: &[u8]) -> usize {
        let client = &self.clients[key];
        let Phase::Open { session, id } = &client.phase else {
            return 0;
        };
        let (id, serial) = (*id, client.serial);
        self.out.reply.clear();
        let now = self.now.saturating_duration_since(self.shared.started);
        let (used, result) = {
            let mut session = lock(session);
            if session.route != Some(self.route(key, serial)) {
                drop(session);
                self.close(key, "its session has moved");
                return 0;
            }
            take_unclear();
            let handled = self.shared.engine.handle(now, &mut session, bytes, &mut self.out);
            if take_unclear() {
                self.shared.engine.forget(&mut session, &mut self.out);
            }
            handled
        };
        // Wake-ups before the reply: whoever sleeps has waited longer.
        if !self.out.mail.is_empty() || !self.out.close.is_empty() || !self.out.ended.is_empty() {
            self.post_out();
        }
        if !self.out.reply.is_empty() && self.clients.get(key).is_some_and(|c| c.serial == serial) {
            let reply = std::mem::take(&mut self.out.reply);
            self.send(key, &reply);
            self.out.reply = reply;
        }
        match result {
            Ok(Next::Continue) => {}
            Ok(Next::Close) => self.close(key, "said goodbye"),
            Ok(Next::Rdma { tag, id, len }) => {
                if self.clients.get(key).is_some_and(|c| c.serial == serial) {
                    self.handle_rdma(key, tag, id, &bytes[used - len..used]);
                }
            }
            Err(violation) => {
                tracing::warn!(session = id, "dropped a client that sent {violation}");
                self.close(key, "broke the protocol");
            }
        }
        used
    }

    fn detach(&mut self, key: usize) {
        let client = &self.clients[key];
        if let Phase::Open { session, .. } = &client.phase {
            self.shared.engine.detach(session, self.route(key, client.serial));
        }
    }

    fn close(&mut self, key: usize, why: &'static str) {
        if !self.clients.contains(key) {
            return;
        }
        self.detach(key);
        let mut client = self.clients.remove(key);
        if let Phase::Open { id, .. } = client.phase {
            tracing::debug!(session = id, "a client {why}");
        } else {
            tracing::debug!(peer = ?client.stream().peer_addr().ok(), "a stranger {why}");
        }
        // Dropping the socket closes it, and that deregisters it as well.
    }
}
