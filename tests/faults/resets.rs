//! A way to the server on which all connections are reset at once, as often as one likes.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};

type Sockets = Arc<Mutex<Vec<TcpStream>>>;

/// Forwards to a server.
pub struct Resetter {
    pub addr: String,
    sockets: Sockets,
}

impl Resetter {
    pub fn new(server: &str) -> Resetter {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let sockets = Sockets::default();
        let (all, server) = (sockets.clone(), server.to_owned());
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let Ok(near) = near else { continue };
                let Ok(far) = TcpStream::connect(&server) else { continue };
                for socket in [&near, &far] {
                    let _ = socket.set_nodelay(true);
                    lock(&all).extend(socket.try_clone());
                }
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (Ok(from), Ok(to)) = (from.try_clone(), to.try_clone()) else { continue };
                    std::thread::spawn(move || forward(from, to));
                }
            }
        });
        Resetter { addr, sockets }
    }

    /// Both ends of each connection get a segment with RST. How many there were.
    pub fn reset(&self) -> usize {
        let sockets = std::mem::take(&mut *lock(&self.sockets));
        // To disconnect an established connection is to reset it, tcp(7).
        sockets.iter().filter(|socket| rustix::net::connect_unspec(socket).is_ok()).count() / 2
    }
}

fn lock(sockets: &Sockets) -> std::sync::MutexGuard<'_, Vec<TcpStream>> {
    sockets.lock().unwrap_or_else(PoisonError::into_inner)
}

fn forward(mut from: TcpStream, mut to: TcpStream) {
    let mut buffer = [0; 16384];
    while let Ok(n) = from.read(&mut buffer)
        && n > 0
        && to.write_all(&buffer[..n]).is_ok()
    {}
    for socket in [from, to] {
        let _ = socket.shutdown(Shutdown::Both);
    }
}
