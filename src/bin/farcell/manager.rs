//! Telling the service manager, if one has started us: `NOTIFY_SOCKET`, as
//! sd_notify(3) has it. Without it nothing is sent.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The server takes clients.
pub fn is_ready(address: &str) {
    tell(&format!("READY=1\nSTATUS=serving at {address}\n"));
}

/// The server has been asked to stop, and does.
pub fn is_stopping(clients: usize) {
    tell(&format!("STOPPING=1\nSTATUS=stopping; {clients} clients are told\n"));
}

fn tell(state: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
        return;
    };
    // Whoever waits for it gives up by its own time limit; the server serves.
    if let Err(error) = send(&socket, state) {
        tracing::warn!(%error, ?socket, "the service manager cannot be told (NOTIFY_SOCKET)");
    }
}

fn send(socket: &OsStr, state: &str) -> io::Result<()> {
    let to = match socket.as_bytes() {
        // A name in the abstract namespace, as containers have it.
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &to).map(drop)
}
