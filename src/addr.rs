//! Addresses as people write them.

use crate::error::{Error, Result};
use std::net::{SocketAddr, ToSocketAddrs};

/// The port of a server, unless another one is named.
pub const DEFAULT_PORT: u16 = 7117;

/// Splits `HOST:PORT`, `[V6]:PORT`, `HOST` or `V6` into host and port.
pub fn split_host_port(addr: &str) -> Result<(&str, u16)> {
    let bad = |why: &str| Error::BadAddress { addr: addr.to_owned(), why: why.to_owned() };
    let (host, port) = if let Some(rest) = addr.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or_else(|| bad("a [ without its ]"))?;
        match rest {
            "" => (host, None),
            _ => (host, Some(rest.strip_prefix(':').ok_or_else(|| bad("no : behind the ]"))?)),
        }
    } else {
        match addr.split_once(':') {
            // More than one colon: a bare IPv6 address.
            Some((_, rest)) if rest.contains(':') => (addr, None),
            Some((host, port)) => (host, Some(port)),
            None => (addr, None),
        }
    };
    if host.is_empty() {
        return Err(bad("the host is missing"));
    }
    let port = match port {
        None => DEFAULT_PORT,
        Some(port) => port.parse().map_err(|_| bad("the port is no number from 0 to 65535"))?,
    };
    Ok((host, port))
}

/// The socket addresses of `HOST:PORT`, in the resolver's order.
pub fn resolve(addr: &str) -> Result<Vec<SocketAddr>> {
    let bad = |why: String| Error::BadAddress { addr: addr.to_owned(), why };
    let (host, port) = split_host_port(addr)?;
    let found: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|e| bad(format!("the host cannot be found ({e})")))?
        .collect();
    if found.is_empty() {
        return Err(bad("the host has no address".to_owned()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_split() {
        for (given, host, port) in [
            ("node0:5000", "node0", 5000),
            ("node0", "node0", DEFAULT_PORT),
            ("[::1]:80", "::1", 80),
            ("[fe80::1]", "fe80::1", DEFAULT_PORT),
            ("::1", "::1", DEFAULT_PORT),
            ("10.0.0.1:0", "10.0.0.1", 0),
        ] {
            assert_eq!(split_host_port(given).unwrap(), (host, port), "{given}");
        }
        for bad in ["", ":80", "a:", "a:b", "a:70000", "[::1", "[::1]80", "a:-1"] {
            assert!(split_host_port(bad).is_err(), "{bad}");
        }
    }
}
