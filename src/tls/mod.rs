//! One TLS connection, without its socket: bytes as they are on the wire on one
//! side, what they mean on the other. TLS 1.3 alone (RFC 8446), by rustls.
//!
//! The certificate is made when the server starts, and clients take any. What
//! stands for the other end is the handshake of [`auth`](crate::auth) that runs
//! inside, whose proofs cover the [`Binding`](crate::auth::Binding) of this one
//! connection. A client does check that the other end has the key of the
//! certificate that it shows, as TLS 1.3 does; but that only says that it is one
//! and the same end all along.
//!
//! Sessions of TLS are not resumed and nothing is sent in its first flight: a
//! farcell session is resumed by what is said inside.

#[cfg(not(feature = "tls"))]
mod off;
#[cfg(feature = "tls")]
mod on;

#[cfg(not(feature = "tls"))]
pub use off::{Acceptor, Channel};
#[cfg(feature = "tls")]
pub use on::{Acceptor, Channel};

/// The first byte of a TLS connection: a record of the handshake (RFC 8446 5.1).
/// No message of ours begins so.
pub const FIRST_BYTE: u8 = 0x16;

/// Whether this build can encrypt.
pub const IS_BUILT: bool = cfg!(feature = "tls");

/// What to do about a library without it.
pub const NOT_BUILT: &str =
    "this program was built without TLS; build it with the feature `tls` of farcell";
