//! A proxy that cuts connections where it is told to.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

/// After how many bytes, counted over a connection, it is cut.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// Bytes from the client.
    Up(usize),
    /// Bytes from the server.
    Down(usize),
    /// Not at all.
    Never,
}

/// Forwards connections to a server. The cuts are used up in order, one a
/// connection; when there are none left connections are whole.
pub struct Proxy {
    addr: SocketAddr,
    stopped: Arc<AtomicBool>,
    connections: Arc<AtomicUsize>,
    sent_down: Arc<AtomicUsize>,
    sent_up: Arc<AtomicUsize>,
    held: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Proxy {
    pub fn start(server: SocketAddr, cuts: Vec<Cut>) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let proxy = Proxy {
            addr,
            stopped: Arc::default(),
            connections: Arc::default(),
            sent_down: Arc::default(),
            sent_up: Arc::default(),
            held: Arc::default(),
            open: Arc::default(),
        };
        let open = proxy.open.clone();
        let held = proxy.held.clone();
        let (stopped, connections) = (proxy.stopped.clone(), proxy.connections.clone());
        let (up, down) = (proxy.sent_up.clone(), proxy.sent_down.clone());
        let cuts = Mutex::new(cuts.into_iter());
        thread::spawn(move || {
            for client in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(client) = client else { continue };
                let Ok(server) = TcpStream::connect(server) else { continue };
                connections.fetch_add(1, Ordering::Relaxed);
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                let cut = cuts.lock().unwrap().next().unwrap_or(Cut::Never);
                let (up_limit, down_limit) = match cut {
                    Cut::Up(n) => (n, usize::MAX),
                    Cut::Down(n) => (usize::MAX, n),
                    Cut::Never => (usize::MAX, usize::MAX),
                };
                let ends = (client.try_clone().unwrap(), server.try_clone().unwrap());
                open.lock().unwrap().push(client.try_clone().unwrap());
                let (up, down) = (up.clone(), down.clone());
                let holds = (held.clone(), held.clone());
                thread::spawn(move || forward(client, server, up_limit, &up, &holds.0));
                thread::spawn(move || forward(ends.1, ends.0, down_limit, &down, &holds.1));
            }
        });
        proxy
    }

    pub fn addr(&self) -> String {
        self.addr.to_string()
    }

    /// Lets nothing through for a while, and keeps it: both ends find the
    /// connection silent.
    pub fn hold(&self, yes: bool) {
        self.held.store(yes, Ordering::Relaxed);
    }

    /// Cuts all connections there are.
    pub fn cut_all(&self) {
        for connection in self.open.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
    }

    /// How many connections there have been.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Bytes forwarded so far, from the client and from the server.
    pub fn forwarded(&self) -> (usize, usize) {
        (self.sent_up.load(Ordering::Relaxed), self.sent_down.load(Ordering::Relaxed))
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.addr);
    }
}

fn forward(
    mut from: TcpStream,
    mut to: TcpStream,
    limit: usize,
    count: &AtomicUsize,
    held: &AtomicBool,
) {
    let mut left = limit;
    let mut buffer = [0; 16384];
    while left > 0 {
        let most = left.min(buffer.len());
        let read = from.read(&mut buffer[..most]);
        while held.load(Ordering::Relaxed) {
            thread::sleep(std::time::Duration::from_millis(1));
        }
        match read {
            Ok(n) if n > 0 && to.write_all(&buffer[..n]).is_ok() => {
                left -= n;
                count.fetch_add(n, Ordering::Relaxed);
            }
            _ => break,
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
