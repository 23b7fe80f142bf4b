//! What bytes of a client come and go by: its socket, or TLS on it.

use crate::segment::Payload;
use crate::tls::Channel;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::cell::RefCell;
use std::io;
use std::os::fd::BorrowedFd;

/// Encrypted bytes that one call of the system moves.
const PIECE: usize = 64 << 10;

thread_local! {
    /// Encrypted bytes, from the socket to where they are decrypted.
    static SEALED: RefCell<Vec<u8>> = RefCell::new(vec![0; PIECE]);
}

/// The way to a client. Nothing here waits.
#[derive(Debug)]
pub enum Pipe<'c> {
    /// The socket itself.
    Plain(BorrowedFd<'c>),
    /// TLS, and the socket that it is on.
    Sealed(&'c mut Channel, BorrowedFd<'c>),
}

impl Pipe<'_> {
    /// Reads what has come. 0 bytes: the client has closed its side. Fewer than
    /// there is room for: there are no more by now.
    ///
    /// # Errors
    /// As recv(2): `EAGAIN` when there is nothing, `ECONNRESET`, ...; `InvalidData`
    /// for what is no TLS.
    pub fn recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Pipe::Plain(socket) => Ok(recv(*socket, into, RecvFlags::DONTWAIT)?.0),
            Pipe::Sealed(tls, socket) => unseal(tls, *socket, into),
        }
    }

    /// Sends as many bytes as the socket takes; `more` says that others follow at
    /// once.
    ///
    /// # Errors
    /// As send(2): `EAGAIN` when it takes none.
    pub fn send(&mut self, bytes: &[u8], more: bool) -> io::Result<usize> {
        match self {
            Pipe::Plain(socket) => {
                let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                if more {
                    flags |= SendFlags::MORE;
                }
                Ok(send(*socket, bytes, flags)?)
            }
            Pipe::Sealed(tls, socket) => match seal(tls, *socket, bytes)? {
                0 if !bytes.is_empty() => Err(io::ErrorKind::WouldBlock.into()),
                n => Ok(n),
            },
        }
    }

    /// How many bytes of a message one call moves at most.
    pub fn most(&self, scratch: &[u8]) -> usize {
        match self {
            Pipe::Plain(_) => usize::MAX,
            Pipe::Sealed(..) => scratch.len(),
        }
    }

    /// As [`Payload::receive_for`].
    ///
    /// # Errors
    /// As there, and [`recv`](Self::recv).
    pub fn receive_row(
        &mut self,
        (payload, serial): (&Payload, u64),
        (row, at, len): (u32, u64, usize),
        scratch: &mut [u8],
    ) -> io::Result<Option<usize>> {
        if let Pipe::Plain(socket) = self {
            return payload.receive_for(serial, row, at, len, *socket);
        }
        let len = len.min(scratch.len());
        let n = self.recv(&mut scratch[..len])?;
        // Where the claim is gone they are thrown away: they are read already.
        payload.put_for(serial, row, at, &scratch[..n])?;
        Ok(Some(n))
    }

    /// As [`Payload::send`].
    ///
    /// # Errors
    /// As there.
    pub fn send_row(
        &mut self,
        payload: &Payload,
        (row, at, len): (u32, u64, usize),
        more: bool,
        scratch: &mut [u8],
    ) -> io::Result<usize> {
        if let Pipe::Plain(socket) = self {
            return payload.send(row, at, len, more, *socket);
        }
        let len = len.min(scratch.len()).min(PIECE);
        payload.copy_out(row, at, &mut scratch[..len])?;
        self.send(&scratch[..len], more)
    }
}

/// Decrypts what has come by a socket, until there is no more or no room.
pub fn unseal(tls: &mut Channel, socket: BorrowedFd<'_>, into: &mut [u8]) -> io::Result<usize> {
    let mut n = 0;
    loop {
        n += tls.take(&mut into[n..])?;
        if n == into.len() || tls.is_over() {
            return Ok(n);
        }
        let came = SEALED.with_borrow_mut(|sealed| {
            let (_, m) = recv(socket, &mut sealed[..], RecvFlags::DONTWAIT)?;
            tls.feed(&sealed[..m]).map(|()| m)
        });
        match came {
            Ok(0) => return Ok(n),
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && n > 0 => return Ok(n),
            Err(e) => return Err(e),
        }
    }
}

/// Encrypts and sends as far as the socket takes it; how many of the bytes that
/// were.
pub fn seal(tls: &mut Channel, socket: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    tls.write(bytes, |sealed| {
        loop {
            match send(socket, sealed, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                other => return Ok(other?),
            }
        }
    })
}
