//! Clients at work, each kind a process.

use super::common::{Result, farcell_client, monotonic_ns, pin, ready};
use farcell::{Client, Key, RdmaChoice, Server};
use hdrhistogram::Histogram;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::BufRead;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Learners of one process.
const LEARNERS: usize = 4;

pub fn pin_to(cores: &str) -> Result<()> {
    let cores: Vec<usize> =
        cores.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?;
    pin(&cores)
}

/// Raises the soft limit of open files to the hard one.
pub fn raise_file_limit() -> Result<()> {
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard })?;
    Ok(())
}

/// From 0 on, below `most`.
pub fn random(seed: &mut u64, most: u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) % most
}

/// Bytes of memory that a process has resident.
pub fn resident(pid: u32) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
    let kib: f64 = line.split_whitespace().next().ok_or("an empty VmRSS")?.parse()?;
    Ok(kib * 1024.0)
}

/// One line a command, until there are no more.
pub fn commands() -> impl Iterator<Item = Result<String>> {
    std::io::stdin().lock().lines().map(|line| Ok(line?))
}

fn connect(server: &str, count: usize) -> Result<Vec<Client>> {
    (0..count).map(|_| Ok(farcell_client(server)?.connect()?)).collect()
}

/// Works with each client in a thread of its own for so many milliseconds, with
/// `pause` between two operations. Latencies in nanoseconds.
fn work(clients: &[Client], time: Duration, pause: Duration) -> Result<Histogram<u64>> {
    let mut all = Histogram::<u64>::new(3)?;
    std::thread::scope(|s| -> Result<()> {
        let threads: Vec<_> = clients
            .iter()
            .enumerate()
            .map(|(i, client)| {
                let one = move || -> farcell::Result<Vec<u64>> {
                    let counter = client.counters("work", 1, 64)?.at(0, i % 64)?;
                    let (begun, mut took) = (Instant::now(), Vec::new());
                    while begun.elapsed() < time {
                        let begun = Instant::now();
                        counter.fetch_add(1)?;
                        took.push(begun.elapsed().as_nanos() as u64);
                        std::thread::sleep(pause);
                    }
                    Ok(took)
                };
                std::thread::Builder::new().stack_size(128 << 10).spawn_scoped(s, one)
            })
            .collect::<std::io::Result<_>>()?;
        for thread in threads {
            for ns in thread.join().map_err(|_| "a thread panicked")?? {
                all.record(ns)?;
            }
        }
        Ok(())
    })?;
    Ok(all)
}

/// Learners: a line is a phase in milliseconds; answered by their p99 in microseconds.
pub fn learners(cores: &str, server: &str) -> Result<()> {
    pin_to(cores)?;
    let clients = connect(server, LEARNERS)?;
    ready("learners")?;
    for line in commands() {
        let all =
            work(&clients, Duration::from_millis(line?.parse()?), Duration::from_micros(200))?;
        ready(&format!("{}", all.value_at_quantile(0.99) as f64 / 1e3))?;
    }
    Ok(())
}

/// Many that add without a pause, a thread each; answered by adds a second and p99.
pub fn active(cores: &str, server: &str, count: usize) -> Result<()> {
    pin_to(cores)?;
    raise_file_limit()?;
    ready("")?;
    let clients = connect(server, count)?;
    ready("there")?;
    for line in commands() {
        let time = Duration::from_millis(line?.parse()?);
        let all = work(&clients, time, Duration::ZERO)?;
        let p99 = all.value_at_quantile(0.99) as f64 / 1e3;
        ready(&format!("{} {p99}", all.len() as f64 / time.as_secs_f64()))?;
    }
    Ok(())
}

/// Many that do nothing.
pub fn idle(cores: &str, server: &str, count: usize) -> Result<()> {
    pin_to(cores)?;
    raise_file_limit()?;
    ready("")?;
    let clients = connect(server, count)?;
    ready("there")?;
    for line in commands() {
        line?;
    }
    drop(clients);
    Ok(())
}

/// Many that wait for one event; a line lets them begin, answered by when the first
/// and the last were woken.
pub fn waiters(cores: &str, server: &str, count: usize) -> Result<()> {
    pin_to(cores)?;
    raise_file_limit()?;
    ready("")?;
    let clients = connect(server, count)?;
    let events = clients
        .iter()
        .map(|client| Ok(client.events("go", 1, 1)?.at(0, 0)?))
        .collect::<Result<Vec<_>>>()?;
    ready("there")?;
    for line in commands() {
        line?;
        let (first, last) = (AtomicU64::new(u64::MAX), AtomicU64::new(0));
        std::thread::scope(|s| -> Result<()> {
            let threads: Vec<_> = events
                .iter()
                .map(|event| {
                    let wait = || -> farcell::Result<()> {
                        event.wait()?;
                        let at = monotonic_ns();
                        first.fetch_min(at, Relaxed);
                        last.fetch_max(at, Relaxed);
                        Ok(())
                    };
                    std::thread::Builder::new().stack_size(128 << 10).spawn_scoped(s, wait)
                })
                .collect::<std::io::Result<_>>()?;
            for thread in threads {
                thread.join().map_err(|_| "a thread panicked")??;
            }
            Ok(())
        })?;
        ready(&format!("{} {}", first.load(Relaxed), last.load(Relaxed)))?;
    }
    Ok(())
}

/// A server with room for so many cells.
pub fn large_server(cores: &str, cells: u32) -> Result<()> {
    pin_to(cores)?;
    let key = Key::new(*b"the key of the benches")?;
    let builder = Server::builder(key).rdma(RdmaChoice::Off).bind("127.0.0.1:0").workers(1);
    let server = builder.capacity(cells).start()?;
    ready(&server.address())?;
    for line in commands() {
        line?;
    }
    Ok(())
}
