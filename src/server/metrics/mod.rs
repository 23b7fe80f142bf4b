//! A page for Prometheus: an HTTP server on a thread of its own, which no worker
//! ever waits for.
//!
//! It asks nobody who he is, so whoever can reach the address can read numbers,
//! and nothing else. It keeps [`MOST_CONNECTIONS`] connections at most, reads
//! [`http::MOST_HEAD`] bytes of each and gives it [`TIME`]; for a new one that
//! finds no room the oldest goes.

mod families;
mod http;

use super::{Server, ServerBuilder, Shared, listen};
use crate::error::{Error, Result};
use http::{Asked, MOST_HEAD, Status};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most connections at a time.
const MOST_CONNECTIONS: usize = 32;
/// How long a connection may take, from its beginning to its end.
const TIME: Duration = Duration::from_secs(5);
/// How long accepting rests when there are no file descriptors left.
const REST: Duration = Duration::from_millis(100);
/// Connections that are accepted before the others have their turn.
const IN_TURN: usize = 64;

const WAKER: Token = Token(usize::MAX);
/// Listeners have the tokens below this one, connections those from it on.
const FIRST: usize = 1 << 16;

/// What Prometheus wants to hear, see its documentation of exposition formats.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

impl ServerBuilder {
    /// Serves metrics in the text format of Prometheus at
    /// `http://HOST:PORT/metrics`, and `ok` at `/healthz`; not at all unless told.
    /// Port 0 takes a free one, see [`Server::metrics_addrs`]. A thread of its own
    /// does it, and nobody is asked for a key there: whoever can reach the address
    /// can read the numbers, so one on which other machines can is warned of.
    #[must_use]
    pub fn metrics(mut self, addr: impl Into<String>) -> ServerBuilder {
        self.metrics = Some(addr.into());
        self
    }
}

impl Server {
    /// The addresses on which it serves metrics, with their real ports; none unless
    /// it was told to.
    #[must_use]
    pub fn metrics_addrs(&self) -> &[SocketAddr] {
        self.page.as_ref().map_or(&[], Page::addrs)
    }
}

/// The thread, and how to end it.
#[derive(Debug)]
pub(super) struct Page {
    addrs: Vec<SocketAddr>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

/// Sockets that listen, before there is a server to tell of.
pub(super) struct Prepared {
    poll: Poll,
    waker: Waker,
    listeners: Vec<TcpListener>,
    addrs: Vec<SocketAddr>,
}

impl Page {
    /// Listens on `HOST:PORT`.
    ///
    /// # Errors
    /// [`Error::Bind`], [`Error::BadAddress`], [`Error::Os`].
    pub fn prepare(addr: &str) -> Result<Prepared> {
        let sockets = listen::listen(&[addr.to_owned()])?;
        let trouble = |e| Error::os("listening for metrics", e);
        let mut addrs = Vec::new();
        for socket in &sockets {
            addrs.push(socket.local_addr().map_err(trouble)?);
        }
        let mut listeners: Vec<TcpListener> =
            sockets.into_iter().map(TcpListener::from_std).collect();
        let poll = Poll::new().map_err(trouble)?;
        let waker = Waker::new(poll.registry(), WAKER).map_err(trouble)?;
        for (i, listener) in listeners.iter_mut().enumerate() {
            let registry = poll.registry();
            registry.register(listener, Token(i), Interest::READABLE).map_err(trouble)?;
        }
        for addr in addrs.iter().filter(|addr| !addr.ip().to_canonical().is_loopback()) {
            tracing::warn!(
                %addr,
                "metrics are for everyone who can reach this address: nobody is asked for a key; \
                 127.0.0.1 would be for this machine alone"
            );
        }
        Ok(Prepared { poll, waker, listeners, addrs })
    }

    /// Starts to tell of a server.
    ///
    /// # Errors
    /// [`Error::Os`]: the system has no thread.
    pub fn start(prepared: Prepared, shared: Arc<Shared>) -> Result<Page> {
        let Prepared { poll, waker, listeners, addrs } = prepared;
        let desk =
            Desk { poll, listeners, shared, open: BTreeMap::new(), next: FIRST, accept_at: None };
        let thread = std::thread::Builder::new()
            .name("farcell-metrics".to_owned())
            .spawn(move || desk.run())
            .map_err(|e| Error::os("starting the thread for metrics", e))?;
        Ok(Page { addrs, waker, thread: Some(thread) })
    }

    /// Where it listens.
    pub fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// Ends the thread.
    pub fn end(mut self) {
        // An eventfd that exists cannot refuse.
        let woken = self.waker.wake().is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken)
            && thread.join().is_err()
        {
            tracing::error!("the thread for metrics had panicked");
        }
    }
}

/// A connection.
#[derive(Debug)]
struct Guest {
    stream: TcpStream,
    until: Instant,
    head: Vec<u8>,
    /// The answer, and how much of it is sent.
    answer: Vec<u8>,
    sent: usize,
    /// All is sent, and the other side is to close.
    parting: bool,
}

/// What the thread has.
struct Desk {
    poll: Poll,
    listeners: Vec<TcpListener>,
    shared: Arc<Shared>,
    /// By their tokens, which grow: the first one is the oldest.
    open: BTreeMap<usize, Guest>,
    next: usize,
    accept_at: Option<Instant>,
}

impl Desk {
    fn run(mut self) {
        let mut events = Events::with_capacity(64);
        loop {
            let first = self.open.values().map(|guest| guest.until).min();
            let next = [first, self.accept_at].into_iter().flatten().min();
            let timeout = next.map(|at| at.saturating_duration_since(Instant::now()));
            if let Err(error) = self.poll.poll(&mut events, timeout)
                && error.kind() != io::ErrorKind::Interrupted
            {
                tracing::error!(%error, "epoll failed; there are no metrics any more");
                return;
            }
            let now = Instant::now();
            for event in &events {
                match event.token() {
                    WAKER => return,
                    Token(i) if i < FIRST => self.accept(i, now),
                    Token(key) => self.serve(key),
                }
            }
            if self.accept_at.is_some_and(|at| now >= at) {
                self.accept_at = None;
                for i in 0..self.listeners.len() {
                    self.accept(i, now);
                }
            }
            let late: Vec<usize> =
                self.open.iter().filter(|(_, g)| g.until <= now).map(|(key, _)| *key).collect();
            for key in late {
                self.give_up(key);
            }
        }
    }

    fn accept(&mut self, i: usize, now: Instant) {
        for _ in 0..IN_TURN {
            match self.listeners[i].accept() {
                Ok((mut stream, _)) => {
                    if self.open.len() >= MOST_CONNECTIONS {
                        self.open.pop_first();
                    }
                    let key = self.next;
                    self.next += 1;
                    let interest = Interest::READABLE | Interest::WRITABLE;
                    if self.poll.registry().register(&mut stream, Token(key), interest).is_err() {
                        continue;
                    }
                    let (head, answer) = (Vec::new(), Vec::new());
                    let until = now + TIME;
                    let guest = Guest { stream, until, head, answer, sent: 0, parting: false };
                    self.open.insert(key, guest);
                    self.serve(key);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a scraper; trying again soon");
                    self.accept_at = Some(now + REST);
                    return;
                }
            }
        }
        // There may be more, and no event will say so.
        self.accept_at = Some(now);
    }

    /// Reads, answers and closes as far as it goes.
    fn serve(&mut self, key: usize) {
        let Some(guest) = self.open.get_mut(&key) else {
            return;
        };
        let shared = &self.shared;
        if !guest.advance(|asked| respond(shared, asked)) {
            self.open.remove(&key);
        }
    }

    /// The time of a connection is over.
    fn give_up(&mut self, key: usize) {
        if let Some(mut guest) = self.open.remove(&key)
            && guest.answer.is_empty()
            && !guest.head.is_empty()
        {
            // As much as the socket takes; it may be none.
            let _ = guest.stream.write(&refusal(Status::Slow));
        }
    }
}

impl Guest {
    /// Goes on as far as the socket lets it. `false`: it is over.
    fn advance(&mut self, respond: impl FnOnce(Asked) -> Vec<u8>) -> bool {
        if self.answer.is_empty() {
            let mut piece = [0; 1024];
            while self.head.len() < MOST_HEAD {
                let room = piece.len().min(MOST_HEAD - self.head.len());
                match self.stream.read(&mut piece[..room]) {
                    Ok(0) => return false,
                    Ok(n) => self.head.extend_from_slice(&piece[..n]),
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => return false,
                }
            }
            match http::parse(&self.head) {
                None => return true,
                Some(asked) => self.answer = respond(asked),
            }
        }
        while self.sent < self.answer.len() {
            match self.stream.write(&self.answer[self.sent..]) {
                Ok(0) => return false,
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        if !std::mem::replace(&mut self.parting, true) {
            // It may be gone already.
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        // To close with bytes unread would reset the connection, and could take
        // the end of the answer with it. What still comes is thrown away, for as
        // long as the connection has time and comes to an end of it.
        let mut piece = [0; 4096];
        for _ in 0..16 {
            match self.stream.read(&mut piece) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        // It sends and sends.
        false
    }
}

fn refusal(status: Status) -> Vec<u8> {
    let line = status.line();
    http::answer(line, PLAIN, format!("{line}\n").as_bytes(), true)
}

fn respond(shared: &Shared, asked: Asked) -> Vec<u8> {
    match asked {
        Asked::Refused(status) => refusal(status),
        Asked::Health { body } => http::answer("200 OK", PLAIN, b"ok\n", body),
        Asked::Metrics { body } => match families::text(shared) {
            Ok(text) => http::answer("200 OK", TEXT_FORMAT, text.as_bytes(), body),
            Err(error) => {
                tracing::error!(%error, "the metrics cannot be written down");
                let line = "500 Internal Server Error";
                http::answer(line, PLAIN, format!("{line}\n").as_bytes(), body)
            }
        },
    }
}
