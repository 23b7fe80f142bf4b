//! Messages of a slot beside the same bytes over a bare socket, in turns in one
//! run, so that what the machine does besides meets both.
//!
//! `cargo bench --bench slots [-- BYTES [ROUNDS]]`; with `shm` before that, in
//! shared memory beside a copy of the same bytes within this process; with `rdma`, over
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

/// In shared memory, beside a copy from and to memory of the same kind.
fn by_shm(client: &Client, slot: &Slot, buffer: &mut [u8], rounds: usize) {
    let bytes = buffer.len();
    assert_eq!(client.transport().name, "shm");
    let mut file = memmap2::MmapOptions::new().len(bytes).map_anon().unwrap();
    let names = ["write", "read", "borrow and read"];
    let (mut ours, mut theirs) = ([const { Vec::new() }; 3], [const { Vec::new() }; 3]);
    for round in 0..rounds + 10 {
        let mut sink = 0u64;
        let times = [
            timed(|| std::hint::black_box(&mut file[..]).copy_from_slice(buffer)),
            timed(|| assert!(slot.write(buffer).unwrap() > 0)),
            timed(|| buffer.copy_from_slice(std::hint::black_box(&file[..]))),
            timed(|| assert_eq!(slot.read(buffer).unwrap().len, bytes)),
            timed(|| {
                let (words, _) = std::hint::black_box(&file[..]).as_chunks::<8>();
                sink = words.iter().fold(0, |sum, w| sum ^ u64::from_le_bytes(*w));
            }),
            timed(|| {
                let sum = |words: &[std::sync::atomic::AtomicU64], _: usize| {
                    let relaxed = std::sync::atomic::Ordering::Relaxed;
                    words.iter().fold(0, |sum, w| sum ^ w.load(relaxed))
                };
                sink ^= slot.read_with(sum).unwrap().0;
            }),
        ];
        std::hint::black_box(sink);
        if round >= 10 {
            for (way, pair) in times.chunks(2).enumerate() {
                theirs[way].push(pair[0]);
                ours[way].push(pair[1]);
            }
        }
    }
    println!("{bytes} bytes, {rounds} rounds in turns, medians, shared memory");
    table(bytes, &names, &mut theirs, &mut ours);
}

fn table(bytes: usize, names: &[&str], theirs: &mut [Vec<Duration>], ours: &mut [Vec<Duration>]) {
    println!("{:16} {:>12} {:>12} {:>8}", "", "bare", "slot", "ratio");
    for (way, name) in names.iter().enumerate() {
        let (bare, slot) = (median(&mut theirs[way]), median(&mut ours[way]));
        let rate = |seconds: f64| format!("{:.0} MB/s", bytes as f64 / seconds / 1e6);
        println!("{name:16} {:>12} {:>12} {:>8.2}", rate(bare), rate(slot), bare / slot);
    }
}

fn main() {
    let numbers: Vec<usize> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let bytes = numbers.first().copied().unwrap_or(4 << 20);
    let rounds = numbers.get(1).copied().unwrap_or(200);
    let key = Key::new(*b"the key of the benches").unwrap();
    let asked = |name| std::env::args().any(|a| a == name);
    let (rdma, shm) = (asked("rdma"), asked("shm"));
    let offer = if rdma { RdmaChoice::Auto } else { RdmaChoice::Off };
    let server = Server::builder(key.clone()).bind("127.0.0.1:0").rdma(offer).start().unwrap();
    let client = Client::builder()
        .addr(server.address())
        .key(key)
        .transport(match (rdma, shm) {
            (true, _) => TransportChoice::Rdma,
            (_, true) => TransportChoice::Shm,
            _ => TransportChoice::Tcp,
        })
        .connect()
        .unwrap();
    let slot = client.slots("params", 1, bytes as u64).unwrap().at(0).unwrap();
    let mut buffer = vec![1u8; bytes];
    if rdma {
        return by_rdma(&client, &slot, &mut buffer, rounds);
    }
    if shm {
        return by_shm(&client, &slot, &mut buffer, rounds);
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
    table(bytes, &["write", "read"], &mut theirs, &mut ours);
}
