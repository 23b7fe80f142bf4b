//! One client's socket and what waits to go through it.

use super::bulk::Bulk;
use super::pipe::{Pipe, seal, unseal};
use crate::auth::{Binding, ServerHandshake};
use crate::engine::SharedSession;
use crate::tls::{Acceptor, Channel};
use mio::net::TcpStream;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Bytes that may wait to be sent before a client's further requests have to
/// wait too.
pub const MOST_WAITING: usize = crate::wire::MAX_UNANSWERED_BYTES + (1 << 20);

/// How far a connection has come.
#[derive(Debug)]
pub enum Phase {
    /// The greeting is out, the client has yet to prove itself.
    Handshake(Box<ServerHandshake>),
    /// The client has a session.
    Open {
        /// The session.
        session: SharedSession,
        /// Its number, for the log.
        id: u64,
    },
    /// One more connection of a session, for messages.
    Beside(Box<Bulk>),
    /// Nothing is handled any more. What is in the outbox is sent, then the
    /// connection ends once the client has closed its side.
    Closing,
    /// As `Closing`, of a client whose session has ended by silence, and that may
    /// still change cells in memory: their arrays' cells go to no other array
    /// before it has closed its side, or its process is gone.
    Lapsed(Vec<Arc<()>>),
}

/// A client's connection. While nothing is under way it owns no buffer.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    /// What the stream's bytes go through, if the client encrypts.
    tls: Option<Box<Channel>>,
    /// Tells it from others that had the same key in the table before.
    pub serial: u32,
    /// How far it has come.
    pub phase: Phase,
    /// The start of a frame whose rest has not come yet, or frames that wait
    /// until replies have gone out.
    pub inbox: Vec<u8>,
    /// Nothing of it is handled until something has been made for it.
    pub held: bool,
    outbox: Vec<u8>,
    sent: usize,
    /// Bytes that have gone out and have not been counted.
    written: usize,
}

impl Connection {
    /// A connection that has just been accepted.
    pub fn new(stream: TcpStream, serial: u32, handshake: ServerHandshake) -> Connection {
        Connection {
            stream,
            tls: None,
            serial,
            phase: Phase::Handshake(Box::new(handshake)),
            inbox: Vec::new(),
            held: false,
            outbox: Vec::new(),
            sent: 0,
            written: 0,
        }
    }

    /// The socket, to register and deregister it.
    pub fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    /// How far it has come, and the way to it.
    pub fn parts(&mut self) -> (&mut Phase, Pipe<'_>) {
        let pipe = match &mut self.tls {
            None => Pipe::Plain(self.stream.as_fd()),
            Some(tls) => Pipe::Sealed(tls, self.stream.as_fd()),
        };
        (&mut self.phase, pipe)
    }

    /// Encrypts from here on: these were the first bytes of it.
    ///
    /// # Errors
    /// They are no TLS, or the connection is broken.
    pub fn encrypt(&mut self, acceptor: &Acceptor, bytes: &[u8]) -> io::Result<()> {
        let tls = self.tls.insert(Box::new(acceptor.accept()?));
        let fed = tls.feed(bytes);
        // Its answer, or why there is none.
        self.flush()?;
        fed
    }

    /// Whether the client encrypts.
    pub fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// What only the two ends of its TLS connection know, if it has one.
    pub fn binding(&self) -> Option<Binding> {
        self.tls.as_ref().and_then(|tls| tls.binding())
    }

    /// Reads what has come. 0 bytes: the client has closed its side.
    ///
    /// # Errors
    /// As read(2): `EAGAIN` when there is nothing, `ECONNRESET`, ...
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(tls) = &mut self.tls {
            let read = unseal(tls, self.stream.as_fd(), buffer);
            if tls.owes() {
                // A part of its handshake, or why it ends.
                self.flush()?;
            }
            return read;
        }
        loop {
            // Straight to the system, here and in `write`: libc makes every
            // call of a process with threads a point of cancellation.
            match recv(&self.stream, &mut *buffer, RecvFlags::empty()) {
                Ok((n, _)) => return Ok(n),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Whether requests have to wait: so much waits to be sent, or it is held.
    pub fn is_clogged(&self) -> bool {
        self.held || self.waiting() > MOST_WAITING
    }

    /// How many bytes wait to be sent; what is encrypted already counts as one.
    pub fn waiting(&self) -> usize {
        self.outbox.len() - self.sent + usize::from(self.owes())
    }

    fn owes(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.owes())
    }

    /// Puts bytes behind those that wait.
    pub fn queue(&mut self, bytes: &[u8]) {
        self.outbox.extend_from_slice(bytes);
    }

    /// Sends bytes, at once if nothing waits before them, and keeps the rest.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.waiting() > 0 {
            self.queue(bytes);
            return self.flush();
        }
        let sent = self.write(bytes)?;
        self.written += sent;
        self.queue(&bytes[sent..]);
        Ok(())
    }

    /// How many bytes have gone out since the last call.
    pub fn take_written(&mut self) -> u64 {
        std::mem::take(&mut self.written) as u64
    }

    /// What waits to be sent is of no use any more.
    pub fn forget_waiting(&mut self) {
        self.outbox = Vec::new();
        self.sent = 0;
    }

    /// Sends what waits, as far as the socket takes it.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn flush(&mut self) -> io::Result<()> {
        if self.outbox.is_empty() {
            return match self.owes() {
                true => self.write(&[]).map(drop),
                false => Ok(()),
            };
        }
        let outbox = std::mem::take(&mut self.outbox);
        let sent = self.write(&outbox[self.sent..]);
        self.outbox = outbox;
        let sent = sent?;
        self.sent += sent;
        self.written += sent;
        if self.sent == self.outbox.len() {
            // An idle client owns no buffer.
            self.outbox = Vec::new();
            self.sent = 0;
        } else if self.sent > MOST_WAITING {
            self.outbox.drain(..self.sent);
            self.sent = 0;
        }
        Ok(())
    }

    /// Writes until all is written or the socket is full.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => write(&self.stream, bytes),
            Some(tls) => seal(tls, self.stream.as_fd(), bytes),
        }
    }

    /// Tells the client that nothing more will come. It closes in turn, and
    /// only then do we: closing with bytes unread would reset the connection
    /// and could take our last words with it.
    pub fn finish(&mut self) {
        // It may be broken already, and then there is nobody to tell.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

/// Writes until all is written or the socket is full.
fn write(stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    let mut sent = 0;
    while sent < bytes.len() {
        match send(stream, &bytes[sent..], SendFlags::NOSIGNAL) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => sent += n,
            Err(Errno::AGAIN) => break,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(sent)
}
