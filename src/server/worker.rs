//! An event loop: some of the clients, on one thread.

use super::Shared;
use super::alarm::Alarm;
use super::connection::{Connection, Phase};
use super::maker::Jobs;
use super::meter::{Meter, Turned};
use super::strangers::{Stranger, Strangers};
use crate::auth::{self, Denial};
use crate::engine::{Out, Route, lock};
use crate::wire::{self, Tag};
use crossbeam::queue::SegQueue;
use mio::net::{TcpListener, TcpStream};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use slab::Slab;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub(super) const WAKER: Token = Token(usize::MAX);
/// The adapter has something: doorbells of clients.
pub(super) const BELLS: Token = Token(usize::MAX - 1);
pub(super) const ALARM: Token = Token(usize::MAX - 2);
/// A client on this machine wants the segment's memory.
pub(super) const MEMORY: Token = Token(usize::MAX - 3);
/// Listeners have the tokens below this one, clients those above.
pub(super) const FIRST_CLIENT: usize = 1 << 16;

/// How long a client may take to prove that it knows the key.
pub(super) const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Between two looks at the parked cells, while there are any; more if a look
/// takes long.
const SWEEP_EVERY: Duration = Duration::from_millis(5);
/// Between two looks at leases and deadlines.
const TICK_EVERY: Duration = Duration::from_millis(250);
/// How long clients have to take our last words when the server stops.
const LINGER: Duration = Duration::from_millis(500);
/// How long accepting rests when there are no file descriptors left.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// Connections that are accepted before those that are there have their turn.
const ACCEPTS_IN_TURN: usize = 64;
/// What strangers may cost a worker before the others have their turn: to look at
/// what one has said costs 1, to begin TLS with it costs [`TLS_COSTS`].
const PATIENCE: u32 = 64;
/// About a quarter of a millisecond.
pub(super) const TLS_COSTS: u32 = 16;
/// Complaints about clients that go to the log in a second.
const COMPLAINTS: u32 = 10;
/// Reads from one client before the others have their turn.
pub(super) const READS_IN_TURN: usize = 4;
/// Bytes of the buffer that a worker reads into.
const SCRATCH: usize = 256 << 10;

/// A message from another thread.
#[derive(Debug)]
pub enum Mail {
    /// Look after this client, which comes from there.
    Client(std::net::TcpStream, IpAddr),
    /// Send this to that client.
    Send(Route, Vec<u8>),
    /// The answer of a wait, for that client, and when the server heard of the
    /// change.
    Wake(Route, Vec<u8>, Instant),
    /// What that client asks for now has been made, or cannot be: go on with it.
    /// Whether it was made for it.
    Prepared(Route, bool),
    /// Close the connection of that client: its session is elsewhere or over.
    Close(Route),
    /// Say goodbye to every client, and end.
    Stop,
}

/// How others reach a worker.
#[derive(Debug)]
pub struct Mailbox {
    pub(super) queue: SegQueue<Mail>,
    pub(super) waker: Waker,
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

/// A worker, before and while its thread runs.
pub struct Worker {
    pub(super) shared: Arc<Shared>,
    pub(super) index: usize,
    pub(super) poll: Poll,
    pub(super) alarm: Alarm,
    /// Worker 0 listens, and hands the clients out in turn.
    pub(super) listeners: Vec<TcpListener>,
    pub(super) accept_again: Option<Instant>,
    pub(super) next_worker: usize,
    pub(super) clients: Slab<Connection>,
    pub(super) serial: u32,
    /// Clients that have yet to prove themselves.
    pub(super) strangers: Strangers,
    /// What strangers may still cost before the others have their turn.
    pub(super) patience: u32,
    /// Clients with more to read, when the others have had their turn.
    pub(super) again: Vec<(usize, u32)>,
    /// Clients for which something is being made, and how to have it made.
    pub(super) held: Vec<Route>,
    pub(super) jobs: Option<Jobs>,
    /// There may be more doorbells, and no event will say so.
    pub(super) bells_again: bool,
    pub(super) scratch: Vec<u8>,
    pub(super) out: Out,
    /// Holds on cells of clients that lapsed and have closed since, and until when
    /// they are kept.
    pub(super) leaving: Vec<(Instant, Vec<Arc<()>>)>,
    pub(super) stopping: Option<Instant>,
    /// When to look for locks that nobody holds.
    pub(super) next_tidy: Instant,
    /// Complaints about clients in the second that began then.
    pub(super) complaints: (Instant, u32),
    /// When it last had something to do: the time of all that it does then, so
    /// that a request costs one look at the clock.
    pub(super) now: Instant,
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
        jobs: Option<Jobs>,
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
        if let (Ok(shm), 0) = (&shared.shm, index) {
            let fd = shm.socket().as_raw_fd();
            poll.registry().register(&mut SourceFd(&fd), MEMORY, Interest::READABLE)?;
        }
        let alarm = Alarm::new()?;
        let strangers = Strangers::new(shared.most_strangers);
        // Edge-triggered, and set anew each time: it need not be read.
        let source = &mut SourceFd(&alarm.timer.as_raw_fd());
        poll.registry().register(source, ALARM, Interest::READABLE)?;
        let counts = shared.counts[index].clone();
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
            strangers,
            patience: PATIENCE,
            again: Vec::new(),
            held: Vec::new(),
            jobs,
            bells_again: false,
            scratch: vec![0; SCRATCH],
            out: Out { counts, ..Out::default() },
            leaving: Vec::new(),
            complaints: (Instant::now(), 0),
            stopping: None,
            next_tidy: Instant::now(),
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
            let more = self.bells_again
                || self.shared.engine.is_untidy()
                || self.accept_again.is_some_and(|at| at <= now);
            self.patience = PATIENCE;
            let timeout = if spinning || more || !self.again.is_empty() {
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
            self.shared.pace.begin(self.index, now.duration_since(self.shared.started));
            if events.iter().any(|event| event.token() != ALARM) {
                last_active = now;
            }
            if std::mem::take(&mut self.bells_again) {
                self.answer_bells();
            }
            for event in &events {
                match event.token() {
                    WAKER => self.read_mail(),
                    BELLS => self.answer_bells(),
                    MEMORY => self.hand_out_memory(),
                    ALARM => self.alarm.at = None,
                    Token(i) if i < FIRST_CLIENT => self.accept(i),
                    Token(i) => {
                        let key = i - FIRST_CLIENT;
                        if self.serve_beside(key) {
                            continue;
                        }
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
            if self.shared.engine.is_untidy() {
                self.shared.engine.mend(&mut self.out);
                self.post_out();
            }
            if self.index == 0 && now >= next_sweep && self.shared.engine.parked() > 0 {
                self.shared.engine.sweep(&mut self.out);
                self.post_out();
                // Never more than a fiftieth of a core, however much is parked.
                let end = Instant::now();
                next_sweep = end + SWEEP_EVERY.max((end - now) * 50);
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
            self.shared.pace.end(self.index, self.shared.started.elapsed());
            if let Some(end) = self.stopping
                && (self.clients.is_empty() || now >= end)
            {
                return;
            }
        }
    }

    pub(super) fn tick(&mut self, now: Instant) {
        self.leaving.retain(|(until, _)| *until > now);
        while let Some(Stranger { key, serial, .. }) = self.strangers.overdue(now) {
            if self.drop_stranger(key, serial, "did not prove itself in time") {
                self.shared.tolls.turn(Turned::Slow);
            }
        }
        self.hear_held();
        if self.index == 0 {
            self.shared.engine.expire(self.shared.now(), &mut self.out);
            if let Some(rdma) = &self.shared.rdma {
                for session in rdma.take_orphans() {
                    self.shared.engine.repeat(session, &mut self.out);
                }
            }
            if now >= self.next_tidy {
                let begun = Instant::now();
                self.shared.engine.tidy(&mut self.out);
                // Never more than a fiftieth of a core, however many locks.
                let end = Instant::now();
                self.next_tidy = end + (end - begun) * 50;
            }
            self.post_out();
        }
    }

    /// Whether one more complaint about a client may go to the log: a storm of
    /// bad clients must not become a storm of lines.
    pub(super) fn may_complain(&mut self) -> bool {
        let (since, count) = &mut self.complaints;
        if since.elapsed() >= Duration::from_secs(1) {
            self.complaints = (Instant::now(), 1);
            return true;
        }
        *count += 1;
        *count <= COMPLAINTS
    }

    /// Closes a connection that has not become a session. Whether it was one.
    pub(super) fn drop_stranger(&mut self, key: usize, serial: u32, why: &'static str) -> bool {
        if let Some(client) = self.clients.get(key)
            && client.serial == serial
            && !matches!(client.phase, Phase::Open { .. } | Phase::Beside(_))
        {
            let proves = matches!(client.phase, Phase::Handshake(_));
            self.close(key, why);
            return proves;
        }
        false
    }

    pub(super) fn accept(&mut self, i: usize) {
        for _ in 0..ACCEPTS_IN_TURN {
            let Some(listener) = self.listeners.get(i) else {
                return;
            };
            match listener.accept() {
                Ok((stream, addr)) => {
                    let host = addr.ip();
                    let worker = self.next_worker;
                    self.next_worker = (worker + 1) % self.shared.mailboxes.len();
                    if worker == self.index {
                        self.welcome_stranger(stream, host);
                    } else {
                        self.shared.mailboxes[worker].post(Mail::Client(stream.into(), host));
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
        // There may be more, and no event will say so.
        self.accept_again = Some(self.now);
    }

    pub(super) fn read_mail(&mut self) {
        while let Some(mail) = self.shared.mailboxes[self.index].queue.pop() {
            match mail {
                Mail::Client(stream, host) => {
                    self.welcome_stranger(TcpStream::from_std(stream), host);
                }
                Mail::Send(route, frame) => {
                    if let Some(key) = self.client_of(route) {
                        self.send(key, &frame);
                    }
                }
                Mail::Wake(route, frame, since) => {
                    if let Some(key) = self.client_of(route) {
                        self.send(key, &frame);
                        self.meter().woke(1, since.elapsed());
                    }
                }
                Mail::Prepared(route, made) => self.go_on(route, made),
                Mail::Close(route) => {
                    self.part(route);
                }
                Mail::Stop => self.stop(),
            }
        }
    }

    pub(super) fn stop(&mut self) {
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
                Phase::Beside(_) => self.close(key, "is told no more"),
                Phase::Closing => {}
                // Nobody gets cells any more.
                Phase::Lapsed(_) => self.close(key, "is told no more"),
            }
        }
    }

    /// What this worker counts.
    pub(super) fn meter(&self) -> &Meter {
        &self.shared.meters[self.index]
    }

    pub(super) fn keys(&self) -> Vec<usize> {
        self.clients.iter().map(|(key, _)| key).collect()
    }

    /// Handles no further bytes of a client; what waits for it is still sent.
    pub(super) fn finish(&mut self, key: usize) {
        self.detach(key);
        self.clients[key].phase = Phase::Closing;
        self.flush(key);
    }

    pub(super) fn route(&self, key: usize, serial: u32) -> Route {
        (self.index as u64) << 56 | (key as u64 & 0xff_ffff) << 32 | u64::from(serial)
    }

    pub(super) fn client_of(&self, route: Route) -> Option<usize> {
        let key = (route >> 32 & 0xff_ffff) as usize;
        let client = self.clients.get(key)?;
        // Nobody has anything to say to one that has lapsed.
        let heard = client.serial == route as u32 && !matches!(client.phase, Phase::Lapsed(_));
        heard.then_some(key)
    }

    pub(super) fn detach(&mut self, key: usize) {
        let route = self.route(key, self.clients[key].serial);
        match &mut self.clients[key].phase {
            Phase::Open { session, .. } => self.shared.engine.detach(session, route),
            Phase::Beside(bulk) => bulk.end(&self.shared.engine, &mut self.out),
            Phase::Handshake(_) | Phase::Closing | Phase::Lapsed(_) => {}
        }
    }

    /// Closes the connection of a client whose session is over or has moved; of
    /// one that may still change cells in memory, this side of it alone.
    pub(super) fn part(&mut self, route: Route) {
        let Some(key) = self.client_of(route) else {
            return;
        };
        let holds = match &self.clients[key].phase {
            Phase::Open { session, .. } => lock(session).take_holds(),
            _ => Vec::new(),
        };
        if holds.is_empty() {
            return self.close(key, "has a session that is over or has moved");
        }
        self.detach(key);
        let client = &mut self.clients[key];
        // Relaxed: a number that nothing else hangs on.
        self.shared.lapsed.fetch_add(1, Ordering::Relaxed);
        client.phase = Phase::Lapsed(holds);
        client.inbox = Vec::new();
        client.forget_waiting();
        client.finish();
        // Reading may have rested while it was clogged.
        self.again.push((key, client.serial));
    }

    pub(super) fn close(&mut self, key: usize, why: &'static str) {
        if !self.clients.contains(key) {
            return;
        }
        self.detach(key);
        let mut client = self.clients.remove(key);
        if let Phase::Beside(bulk) = &client.phase {
            tracing::debug!(session = bulk.id, "a connection for messages {why}");
            // Whoever waited for the row that was given up.
            self.post_out();
        } else if let Phase::Lapsed(holds) = &mut client.phase {
            // Relaxed: as where it is counted.
            self.shared.lapsed.fetch_sub(1, Ordering::Relaxed);
            // A thread of it may be in the middle of an operation still.
            self.leaving.push((Instant::now() + self.shared.lease, std::mem::take(holds)));
        } else if let Phase::Open { id, .. } = client.phase {
            tracing::debug!(session = id, "a client {why}");
        } else {
            tracing::debug!(peer = ?client.stream().peer_addr().ok(), "a stranger {why}");
        }
        // Dropping the socket closes it, and that deregisters it as well.
    }
}
