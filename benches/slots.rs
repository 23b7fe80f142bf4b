//! Messages of a slot beside the same bytes over a bare socket, in turns in one
//! run, so that what the machine does besides meets both.
//!
//! `cargo bench --bench slots [-- BYTES [ROUNDS]]`; with `rdma` before that, over
//! RDMA, to be held against `ib_write_bw` and `ib_read_bw` of the same machine.

use farcell::{Client, Key, RdmaChoice, Server, Slot, TransportChoice};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// A message of the bare stream is answered by one byte, as a write is.
fn bare(bytes: usize) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.set_nodelay(true).unwrap();
        let mut buffer = vec![0u8; bytes];
        loop {
            let mut what = [0];
            if socket.read_exact(&mut what).is_err() {
                return;
            }
            let done = match what[0] {
                b'w' => socket.read_exact(&mut buffer).and_then(|()| socket.write_all(b"k")),
                _ => socket.write_all(&buffer),
            };
            if done.is_err() {
                return;
            }
        }
    });
    let socket = TcpStream::connect(addr).unwrap();
    socket.set_nodelay(true).unwrap();
    socket
}

fn timed(work: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

fn by_rdma(client: &Client, slot: &Slot, buffer: &mut [u8], rounds: usize) {
    let bytes = buffer.len();
    let memory = client.register(bytes);
    let names = ["write", "read", "write registered", "read registered"];
    let mut all = [const { Vec::new() }; 4];
    for round in 0..rounds + 2 {
        let times = [
            timed(|| assert!(slot.write(buffer).unwrap() > 0)),
            timed(|| assert_eq!(slot.read(buffer).unwrap().len, bytes)),
            timed(|| assert!(slot.write_registered(&memory, 0..bytes).unwrap() > 0)),
            timed(|| assert_eq!(slot.read_registered(&memory, 0..bytes).unwrap().len, bytes)),
        ];
        if round >= 2 {
            times.iter().zip(&mut all).for_each(|(&time, all)| all.push(time));
        }
    }
    println!("{bytes} bytes, {rounds} rounds in turns, medians, RDMA");
    for (name, times) in names.iter().zip(&mut all) {
        println!("{name:18} {:>8.0} MB/s", bytes as f64 / median(times) / 1e6);
    }
    assert_eq!(client.transport().name, "rdma");
}

fn main() {
    let numbers: Vec<usize> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let bytes = numbers.first().copied().unwrap_or(4 << 20);
    let rounds = numbers.get(1).copied().unwrap_or(200);
    let key = Key::new(*b"the key of the benches").unwrap();
    let rdma = std::env::args().any(|a| a == "rdma");
    let offer = if rdma { RdmaChoice::Auto } else { RdmaChoice::Off };
    let server = Server::builder(key.clone()).bind("127.0.0.1:0").rdma(offer).start().unwrap();
    let client = Client::builder()
        .addr(server.address())
        .key(key)
        .transport(if rdma { TransportChoice::Rdma } else { TransportChoice::Tcp })
        .connect()
        .unwrap();
    let slot = client.slots("params", 1, bytes as u64).unwrap().at(0).unwrap();
    let mut buffer = vec![1u8; bytes];
    if rdma {
        return by_rdma(&client, &slot, &mut buffer, rounds);
    }
    let mut socket = bare(bytes);
    let (mut ours, mut theirs) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
    for round in 0..rounds + 10 {
        let times = [
            timed(|| {
                socket.write_all(b"w").unwrap();
                socket.write_all(&buffer).unwrap();
                socket.read_exact(&mut [0]).unwrap();
            }),
            timed(|| assert!(slot.write(&buffer).unwrap() > 0)),
            timed(|| {
                socket.write_all(b"r").unwrap();
                socket.read_exact(&mut buffer).unwrap();
            }),
            timed(|| assert_eq!(slot.read(&mut buffer).unwrap().len, bytes)),
        ];
        // The first of them touch every page for the first time.
        if round >= 10 {
            for (way, pair) in times.chunks(2).enumerate() {
                theirs[way].push(pair[0]);
                ours[way].push(pair[1]);
            }
        }
    }
    println!("{bytes} bytes, {rounds} rounds in turns, medians, TCP over loopback");
    println!("{:8} {:>12} {:>12} {:>8}", "", "bare", "slot", "ratio");
    for (way, name) in ["write", "read"].iter().enumerate() {
        let (bare, slot) = (median(&mut theirs[way]), median(&mut ours[way]));
        let rate = |seconds: f64| format!("{:.0} MB/s", bytes as f64 / seconds / 1e6);
        println!("{name:8} {:>12} {:>12} {:>8.2}", rate(bare), rate(slot), bare / slot);
    }
}
