//! How far one comes on the way to a server without its key.

use crate::addr;
use crate::error::Result;
use crate::transport::connect::{Greeted, greeted};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// The version of the protocol that this library speaks; both ends need the same.
pub const WIRE_VERSION: u16 = crate::wire::VERSION;

/// The addresses of `HOST:PORT`, in the order in which they are tried. Blocks for
/// as long as the system's resolver takes.
///
/// # Errors
/// [`Error::BadAddress`](crate::Error::BadAddress).
pub fn resolve(addr: &str) -> Result<Vec<SocketAddr>> {
    addr::resolve(addr)
}

/// What is found at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Answer {
    /// A farcell server that speaks this version of the protocol.
    Farcell {
        /// The version.
        version: u16,
    },
    /// Something that is no farcell server, as far as it can be named: an HTTP
    /// server, an SSH server, a Redis server.
    Other(String),
    /// The connection was taken, and then closed or left in silence.
    Silent(String),
    /// Nothing listens there: the machine answers and refuses.
    Refused,
    /// Something on the way says no: there is no route, or a firewall rejects.
    Filtered(String),
    /// No answer at all: packets are dropped, or no machine has this address.
    TimedOut,
    /// This system refuses to try.
    Failed(String),
}

/// Connects to an address, listens to what says hello there, and hangs up.
/// Blocks for `timeout` at most. Nothing is proven and no session begins.
#[must_use]
pub fn probe(addr: SocketAddr, timeout: Duration) -> Answer {
    match greeted(addr, timeout) {
        Ok(Greeted::Farcell(version)) => Answer::Farcell { version },
        Ok(Greeted::Stranger(what)) => Answer::Other(what),
        Ok(Greeted::Silent(why)) => Answer::Silent(why),
        Err(error) => refused(&error),
    }
}

fn refused(error: &io::Error) -> Answer {
    use io::ErrorKind as Kind;
    let why = crate::transport::connect::plain(error);
    match error.kind() {
        Kind::ConnectionRefused => Answer::Refused,
        Kind::TimedOut | Kind::WouldBlock => Answer::TimedOut,
        // ICMP "unreachable" and "prohibited", and a rule on this machine.
        Kind::HostUnreachable | Kind::NetworkUnreachable | Kind::PermissionDenied => {
            Answer::Filtered(why)
        }
        _ => Answer::Failed(why),
    }
}
