//! What others do to a server. Each storm is one process, bounded by its core.

use super::common::{Result, farcell_client, ready};
use super::work::{commands, pin_to, raise_file_limit, random};
use farcell::{Client, Key, TransportChoice};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// All of them.
pub const KINDS: [&str; 4] = [
    "5,000 half-open connections",
    "a garbage storm",
    "an authentication storm",
    "slow readers of large snapshots",
];

/// "go" begins a storm and is answered when it blows, "stop" ends it and is answered by
/// what it did.
pub fn play(cores: &str, server: &str, kind: &str) -> Result<()> {
    pin_to(cores)?;
    raise_file_limit()?;
    ready("")?;
    let mut lines = commands();
    while lines.next().transpose()?.is_some() {
        let (over, done) = (AtomicBool::new(false), AtomicUsize::new(0));
        let blow = || match kind {
            "5,000 half-open connections" => half_open(server, &over, &done),
            "a garbage storm" => garbage(server, &over, &done),
            "an authentication storm" => authentication(server, &over, &done),
            _ => slow_readers(server, &over, &done),
        };
        std::thread::scope(|s| -> Result<()> {
            let storm = s.spawn(blow);
            std::thread::sleep(Duration::from_millis(200));
            ready("blowing")?;
            lines.next().transpose()?;
            over.store(true, Relaxed);
            storm.join().map_err(|_| "the storm panicked")?
        })?;
        ready(&format!("{}", done.load(Relaxed)))?;
    }
    Ok(())
}

/// Connections that say nothing. The server closes them after a while, and others come
/// in their place.
fn half_open(server: &str, over: &AtomicBool, done: &AtomicUsize) -> Result<()> {
    let mut open = std::collections::VecDeque::new();
    while !over.load(Relaxed) {
        if let Ok(stream) = TcpStream::connect(server) {
            open.push_back(stream);
            done.fetch_add(1, Relaxed);
        }
        if open.len() >= 5000 {
            open.pop_front();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

fn garbage(server: &str, over: &AtomicBool, done: &AtomicUsize) -> Result<()> {
    let mut seed = 7;
    while !over.load(Relaxed) {
        let Ok(mut stream) = TcpStream::connect(server) else { continue };
        let mut bytes = [0; 256];
        bytes.fill_with(|| random(&mut seed, 256) as u8);
        let _ = stream.write_all(&bytes);
        stream.set_read_timeout(Some(Duration::from_millis(20)))?;
        while stream.read(&mut bytes).is_ok_and(|n| n > 0) {}
        done.fetch_add(1, Relaxed);
    }
    Ok(())
}

fn authentication(server: &str, over: &AtomicBool, done: &AtomicUsize) -> Result<()> {
    let wrong = Key::new(*b"another key than theirs")?;
    let builder = Client::builder().addr(server).key(wrong).transport(TransportChoice::Tcp);
    while !over.load(Relaxed) {
        match builder.clone().connect() {
            Ok(_) => return Err("a wrong key was taken".into()),
            Err(_) => done.fetch_add(1, Relaxed),
        };
    }
    Ok(())
}

/// Clients that ask for much and read it through a straw: a relay between them and the
/// server takes a few bytes at a time.
fn slow_readers(server: &str, over: &AtomicBool, done: &AtomicUsize) -> Result<()> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let relay = listener.local_addr()?.to_string();
    std::thread::scope(|s| -> Result<()> {
        s.spawn(|| {
            for near in listener.incoming().take(READERS) {
                let (Ok(mut near), Ok(mut far)) = (near, TcpStream::connect(server)) else {
                    return;
                };
                let (Ok(mut up), Ok(mut to)) = (near.try_clone(), far.try_clone()) else { return };
                s.spawn(move || std::io::copy(&mut up, &mut to));
                s.spawn(move || {
                    let mut straw = [0; 4096];
                    while let Ok(n) = far.read(&mut straw)
                        && n > 0
                        && near.write_all(&straw[..n]).is_ok()
                    {
                        done.fetch_add(n, Relaxed);
                        // A frame of a handshake passes at once.
                        if n == straw.len() {
                            std::thread::sleep(Duration::from_millis(5));
                        }
                    }
                    let _ = near.shutdown(std::net::Shutdown::Both);
                });
            }
        });
        let mut clients = Vec::new();
        for _ in 0..READERS {
            let client = farcell_client(&relay)?.reconnect_for(Duration::ZERO).connect()?;
            let array = client.counters("much", 100, 1000)?;
            clients.push(client);
            // Several unanswered requests a connection.
            for _ in 0..4 {
                let array = array.clone();
                s.spawn(move || {
                    while !over.load(Relaxed) {
                        if array.all().snapshot().is_err() {
                            return;
                        }
                    }
                });
            }
        }
        while !over.load(Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        clients.iter().for_each(Client::close);
        Ok(())
    })
}

const READERS: usize = 8;
