//! Writing whole frames, also to a server that waits to be read.

use super::super::connect::plain;
use super::super::socket::Socket;
use super::link::Link;
use crate::engine::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;
use std::io;
use std::sync::Arc;

impl Link {
    /// Writes whole frames. The caller holds `writing`. What cannot be written
    /// is sent again with the next connection.
    pub(super) fn write(&self, socket: &Arc<Socket>, parts: &[&[u8]]) {
        let joined;
        let mut rest = match parts {
            [.., only] if parts[..parts.len() - 1].iter().all(|p| p.is_empty()) => *only,
            _ => {
                joined = parts.concat();
                &joined
            }
        };
        while !rest.is_empty() || socket.owes() {
            match socket.send(rest, SendFlags::DONTWAIT) {
                Ok(n) => rest = &rest[n..],
                Err(e) => match e.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => self.make_room(socket),
                    _ => return self.broken(socket, &plain(&e)),
                },
            }
        }
    }

    /// The socket takes no more. If nobody reads what the server sends, it may
    /// be waiting for us to do that.
    pub(super) fn make_room(&self, socket: &Arc<Socket>) {
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

    pub(super) fn is_current(&self, socket: &Arc<Socket>) -> bool {
        lock(&self.state).socket.as_ref().is_some_and(|s| Arc::ptr_eq(s, socket))
    }
}
