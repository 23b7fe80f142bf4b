//! A connection's socket, and TLS on it if there is.

use crate::engine::lock;
use crate::tls::Channel;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};
use std::cell::RefCell;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Encrypted bytes that one call of the system moves.
const PIECE: usize = 64 << 10;
/// Parts that are no more than this together are encrypted as one record.
const JOINED: usize = 16 << 10;

thread_local! {
    /// Encrypted bytes, from the socket to where they are decrypted.
    static SEALED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A connection to a server. One thread reads while another one writes; of those
/// that write, and of those that read, one at a time.
#[derive(Debug)]
pub(crate) struct Socket {
    stream: TcpStream,
    /// Locked for as long as bytes are encrypted or decrypted, and by those who
    /// write while they send, never while waiting for bytes to read.
    tls: Option<Box<Mutex<Channel>>>,
}

impl Socket {
    /// The socket itself.
    pub fn plain(stream: TcpStream) -> Socket {
        Socket { stream, tls: None }
    }

    /// Makes a TLS connection of it. Blocks until the deadline at most.
    ///
    /// # Errors
    /// `InvalidData` for what is no TLS; `WouldBlock` at the deadline; those of the
    /// socket.
    pub fn encrypt(stream: TcpStream, deadline: Instant) -> io::Result<Socket> {
        let mut tls = Channel::client().map_err(io::Error::other)?;
        let mut buffer = [0; 4096];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            stream.set_read_timeout(Some(left))?;
            stream.set_write_timeout(Some(left))?;
            tls.write(&[], |sealed| Ok(send(&stream, sealed, SendFlags::NOSIGNAL)?))?;
            if tls.owes() {
                continue;
            }
            if tls.binding().is_some() {
                stream.set_write_timeout(None)?;
                return Ok(Socket { stream, tls: Some(Box::new(Mutex::new(tls))) });
            }
            match recv(&stream, &mut buffer[..], RecvFlags::empty()) {
                Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok((_, n)) => {
                    if let Err(error) = tls.feed(&buffer[..n]) {
                        // It says why to the server, which may be gone.
                        let _ = tls.write(&[], |sealed| (&stream).write(sealed));
                        return Err(error);
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// The TLS on it.
    pub fn tls(&self) -> Option<&Mutex<Channel>> {
        self.tls.as_deref()
    }

    /// Whether something can be read that the system knows nothing of any more.
    pub fn holds(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| lock(tls).holds())
    }

    /// Whether something was encrypted that has not gone out yet: the next
    /// [`send`](Self::send), be it of nothing, begins with it.
    pub fn owes(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| lock(tls).owes())
    }

    /// As recv(2). Inside of TLS `Interrupted` also means that something has come
    /// which is not enough to tell what it says.
    ///
    /// # Errors
    /// As recv(2); `InvalidData` for what the server did not send.
    pub fn recv(&self, into: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
        match &self.tls {
            None => Ok(recv(&self.stream, into, flags)?.0),
            Some(tls) => self.unseal(tls, into, flags),
        }
    }

    fn unseal(&self, tls: &Mutex<Channel>, into: &mut [u8], flags: RecvFlags) -> io::Result<usize> {
        let flags = flags - RecvFlags::WAITALL;
        let take = |tls: &mut Channel, into: &mut [u8]| match tls.take(into)? {
            0 if tls.is_over() => Ok(Some(0)),
            0 => Ok(None),
            n => io::Result::Ok(Some(n)),
        };
        loop {
            if let Some(n) = take(&mut lock(tls), into)? {
                return Ok(n);
            }
            let taken = SEALED.with_borrow_mut(|sealed| {
                sealed.resize(PIECE, 0);
                let (_, n) = recv(&self.stream, &mut sealed[..], flags)?;
                if n == 0 {
                    return Ok(Some(0));
                }
                let mut tls = lock(tls);
                tls.feed(&sealed[..n])?;
                take(&mut tls, into)
            })?;
            match taken {
                Some(n) => return Ok(n),
                None if flags.contains(RecvFlags::DONTWAIT) => {}
                None => return Err(io::ErrorKind::Interrupted.into()),
            }
        }
    }

    /// As send(2), without a signal. Inside of TLS the bytes that are counted may
    /// not have gone out yet, see [`owes`](Self::owes).
    ///
    /// # Errors
    /// As send(2).
    pub fn send(&self, bytes: &[u8], flags: SendFlags) -> io::Result<usize> {
        let flags = flags | SendFlags::NOSIGNAL;
        let Some(tls) = &self.tls else {
            return Ok(send(&self.stream, bytes, flags)?);
        };
        let mut tls = lock(tls);
        let n = tls.write(bytes, |sealed| Ok(send(&self.stream, sealed, flags)?))?;
        if n == 0 && tls.owes() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(n)
    }

    /// Sends what the parts have, one behind the other.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_parts(&self, parts: &[IoSlice<'_>; 2]) -> io::Result<usize> {
        let [first, second] = parts;
        if self.tls.is_none() {
            let parts = if first.is_empty() { &parts[1..] } else { &parts[..] };
            let none = &mut SendAncillaryBuffer::default();
            return Ok(sendmsg(&self.stream, parts, none, SendFlags::NOSIGNAL)?);
        }
        let none = SendFlags::empty();
        match (first.is_empty(), first.len() + second.len() <= JOINED) {
            (true, _) => self.send(second, none),
            (false, true) => self.send(&[&first[..], &second[..]].concat(), none),
            (false, false) => self.send(first, none),
        }
    }

    /// As shutdown(2).
    ///
    /// # Errors
    /// As there.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.stream.shutdown(how)
    }

    /// Our address.
    ///
    /// # Errors
    /// As getsockname(2).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    /// The server's address.
    ///
    /// # Errors
    /// As getpeername(2).
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// How long reading may wait.
    ///
    /// # Errors
    /// A time of 0.
    pub fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.stream.set_read_timeout(time)
    }

    /// How long writing may wait.
    ///
    /// # Errors
    /// A time of 0.
    pub fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.stream.set_write_timeout(time)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

impl Read for &Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.recv(into, RecvFlags::empty())
    }
}

impl Write for &Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.send(bytes, SendFlags::empty())?;
        while self.owes() {
            self.send(&[], SendFlags::empty())?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
