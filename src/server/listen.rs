//! Listening sockets.

use crate::addr::resolve;
use crate::error::{Error, Result};
use rustix::system::uname;
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::time::Duration;

/// Where a server listens unless told otherwise: on every address of the
/// machine, IPv6 and IPv4.
pub const DEFAULT_BIND: &str = "[::]:7117";

/// Opens listening sockets on every address of every name given.
///
/// # Errors
/// [`Error::Bind`] that names the address; [`Error::BadAddress`].
pub fn listen(binds: &[String]) -> Result<Vec<TcpListener>> {
    let mut targets = Vec::new();
    for bind in binds {
        let found = resolve(bind)?;
        targets.extend(found.into_iter().map(|addr| (bind.as_str(), addr)));
    }
    targets.dedup_by_key(|(_, addr)| *addr);
    // One IPv6 wildcard socket takes IPv4 connections too, unless IPv4 has
    // sockets of its own.
    let only_v6 = targets.iter().any(|(_, addr)| addr.is_ipv4());
    let mut listeners = Vec::new();
    for (bind, addr) in targets {
        match open(addr, only_v6) {
            Ok(listener) => listeners.push(listener),
            // A machine without IPv6: the default still means "everywhere".
            Err(e) if EVERYWHERE.contains(&bind) && e.raw_os_error() == Some(EAFNOSUPPORT) => {
                let v4 = SocketAddr::from(([0, 0, 0, 0], addr.port()));
                listeners.push(open(v4, false).map_err(|e| bind_error(v4, &e))?);
            }
            Err(e) => return Err(bind_error(addr, &e)),
        }
    }
    if listeners.is_empty() {
        return Err(Error::BadSetting { what: "no address to listen on was given".to_owned() });
    }
    Ok(listeners)
}

/// What means every address of the machine, whatever families it has.
const EVERYWHERE: [&str; 2] = [DEFAULT_BIND, "[::]:0"];

const EAFNOSUPPORT: i32 = rustix::io::Errno::AFNOSUPPORT.raw_os_error();

fn bind_error(addr: SocketAddr, e: &io::Error) -> Error {
    let why = match e.kind() {
        io::ErrorKind::AddrInUse => {
            "address in use by another program; choose another port, or 0 for a free one".to_owned()
        }
        io::ErrorKind::AddrNotAvailable => {
            "no interface of this machine has that address; see `ip addr`".to_owned()
        }
        io::ErrorKind::PermissionDenied => {
            format!("permission denied ({e}); ports below 1024 are for root")
        }
        _ => e.to_string(),
    };
    Error::Bind { addr: addr.to_string(), why }
}

fn open(addr: SocketAddr, only_v6: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    if addr.is_ipv6() {
        socket.set_only_v6(only_v6)?;
    }
    // A restarted server must not wait until old connections have timed out.
    socket.set_reuse_address(true)?;
    socket.bind(&addr.into())?;
    // Every socket accepted here has these from it: they need not be set for
    // each client. Without them one is slower, or is found dead later: no
    // reason not to serve.
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10))
        .with_retries(3);
    let _ = socket.set_tcp_nodelay(true);
    let _ = socket.set_tcp_keepalive(&keepalive);
    // The kernel cuts this down to net.core.somaxconn (listen(2)).
    socket.listen(i32::MAX)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

/// An address that a client can use for a listening socket: a wildcard is
/// replaced by this machine's name, if that leads anywhere.
pub fn reachable(local: SocketAddr) -> String {
    if !local.ip().is_unspecified() {
        return local.to_string();
    }
    let name = uname();
    let name = name.nodename().to_str().unwrap_or("");
    let known = !name.is_empty()
        && (name, local.port()).to_socket_addrs().is_ok_and(|mut found| found.next().is_some());
    format!("{}:{}", if known { name } else { "127.0.0.1" }, local.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::SockRef;
    use std::net::TcpStream;

    #[test]
    fn accepted_sockets_have_the_options_of_the_listener() {
        let listener = open(([127, 0, 0, 1], 0).into(), false).unwrap();
        listener.set_nonblocking(false).unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let socket = SockRef::from(&accepted);
        assert!(socket.tcp_nodelay().unwrap());
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(30));
    }
}
