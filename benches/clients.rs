//! Many clients: what an idle one costs the server, and how long it takes to
//! connect.
//!
//! Memory is that of the server's process (`Rss` and `Pss` of its
//! `smaps_rollup`) before and after 10,000 clients have come, which live in
//! another process; what the kernel keeps for a socket is not in it.
//! Connecting is measured against bare TCP connects to a process that accepts,
//! in blocks that alternate, one after another and from eight threads.

mod common;

use common::{
    Aim, Options, Part, Peer, Report, Result, Row, acceptor, cores, farcell_client, farcell_server,
    list, part, pin, play, quantile, ready,
};
use farcell::Client;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::BufRead;
use std::net::TcpStream;
use std::time::{Duration, Instant};

fn main() -> Result<()> {
    match part() {
        Part::Driver(options) => drive(&options),
        Part::Peer(role, args) => match (role.as_str(), &args[..]) {
            ("crowd", [server, count]) => crowd(server, count.parse()?),
            _ if play(&role, &args)? => Ok(()),
            _ => Err(format!("no role {role:?}").into()),
        },
    }
}

/// Raises the soft limit of open files to the hard one, and says what it is.
fn raise_file_limit() -> Result<u64> {
    let hard = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard })?;
    Ok(hard.unwrap_or(u64::MAX))
}

/// Many clients in one process. Each line on standard input is a step: they
/// connect; each opens an array and works a little.
fn crowd(server: &str, count: usize) -> Result<()> {
    raise_file_limit()?;
    ready("")?;
    let mut lines = std::io::stdin().lock().lines();
    let mut clients = Vec::with_capacity(count);
    for step in 0.. {
        if lines.next().transpose()?.is_none() {
            break;
        }
        match step {
            0 => {
                for _ in 0..count {
                    clients.push(farcell_client(server)?.connect()?);
                }
            }
            _ => {
                for client in &clients {
                    let event = client.events("events", 64, 64)?.at(0, 1)?;
                    event.set()?;
                    event.clear()?;
                }
            }
        }
        ready("done")?;
    }
    Ok(())
}

/// Bytes of a process's memory: `Rss` or `Pss`.
fn memory(peer: &Peer, field: &str) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", peer.id()))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))
        .ok_or_else(|| format!("no {field} in smaps_rollup"))?;
    let kib: f64 =
        line.split_whitespace().next().ok_or("an empty line in smaps_rollup")?.parse()?;
    Ok(kib * 1024.0)
}

fn drive(options: &Options) -> Result<()> {
    let mut report = Report::new("clients", options);
    let files = raise_file_limit()?;
    let (a, b) = cores()?;
    if options.wants("idle") {
        idle(&mut report, options, files, &[a, b])?;
    }
    let two = format!("clients on core {a}, server on core {b}");
    connecting(&mut report, options, 1, a, b, &two)?;
    connecting(&mut report, options, 8, a, b, &two)?;
    if a != b {
        connecting(&mut report, options, 1, a, a, &format!("clients and server on core {a}"))?;
    }
    report.print()
}

fn idle(report: &mut Report, options: &Options, files: u64, cores: &[usize]) -> Result<()> {
    let wanted = if options.quick { 300 } else { 10_000 };
    let count = wanted.min(usize::try_from(files.saturating_sub(200)).unwrap_or(wanted));
    if count < wanted {
        report.note(format!(
            "The limit of {files} open files allows {count} clients only (ulimit -Hn)."
        ));
    }
    let server = farcell_server(cores, false)?;
    // One that came before the count, so that what the server makes once for
    // all does not count.
    let first = farcell_client(&server.addr)?.connect()?;
    let event = first.events("events", 64, 64)?.at(0, 1)?;
    event.set()?;
    let mut crowd = Peer::start("crowd", &[&server.addr, &count.to_string()])?;
    let place = format!("all on cores {}", list(cores));
    let before = [memory(&server, "Rss")?, memory(&server, "Pss")?];
    for what in ["an idle client", "... after it has worked"] {
        crowd.say("go")?;
        crowd.hear()?;
        let sessions = first.info()?.sessions;
        if sessions != count + 1 {
            return Err(format!("{sessions} sessions, expected {}", count + 1).into());
        }
        // They are idle for a while: heartbeats come and go.
        std::thread::sleep(Duration::from_millis(if options.quick { 100 } else { 8000 }));
        for (field, before) in ["Rss", "Pss"].into_iter().zip(before) {
            let each = (memory(&server, field)? - before) / count as f64;
            report.add(Row {
                what: format!("{what}, {field}, {count} clients"),
                against: "-".to_owned(),
                place: place.clone(),
                unit: "B",
                limit: None,
                ours: each,
                values: vec![each],
                aim: Aim::AtMost(2048.0),
            });
        }
    }
    Ok(())
}

/// Connects `count` times from each of some threads; the time for all, in
/// seconds. What was connected is closed behind the measurement.
fn block<T: Send>(
    threads: usize,
    count: usize,
    connect: &(impl Fn() -> Result<T> + Sync),
) -> Result<f64> {
    let some = || (0..count).map(|_| connect()).collect::<Result<Vec<T>>>();
    let begun = Instant::now();
    if threads == 1 {
        let open = some()?;
        let time = begun.elapsed();
        drop(open);
        return Ok(time.as_secs_f64());
    }
    std::thread::scope(|s| {
        let all: Vec<_> = (0..threads).map(|_| s.spawn(some)).collect();
        let open = all
            .into_iter()
            .map(|t| t.join().map_err(|_| "a thread panicked")?)
            .collect::<Result<Vec<_>>>()?;
        let time = begun.elapsed();
        drop(open);
        Ok(time.as_secs_f64())
    })
}

fn connecting(
    report: &mut Report,
    options: &Options,
    threads: usize,
    client_core: usize,
    server_core: usize,
    place: &str,
) -> Result<()> {
    if !options.wants(&format!("connecting, {threads} threads, {place}")) {
        return Ok(());
    }
    pin(&[client_core])?;
    let bare = acceptor(&[server_core])?;
    let server = farcell_server(&[server_core], false)?;
    let builder = farcell_client(&server.addr)?;
    let (blocks, total) = if options.quick { (2, 50) } else { (40, 2000) };
    let each = total / blocks / threads;
    let bare_addr: std::net::SocketAddr = bare.addr.parse()?;
    let connect_bare = || Ok(TcpStream::connect(bare_addr)?);
    let connect = || -> Result<Client> { Ok(builder.clone().connect()?) };
    let mut times = [Vec::new(), Vec::new()];
    for i in 0..=blocks {
        for which in [i % 2, 1 - i % 2] {
            let time = match which {
                0 => block(threads, each, &connect_bare)?,
                _ => block(threads, each, &connect)?,
            };
            // Goodbyes are not to disturb the next block.
            std::thread::sleep(Duration::from_millis(10));
            // The first one warms up.
            if i > 0 {
                times[which].push(time * 1e6 / (each * threads) as f64);
            }
        }
    }
    let [mut limit, mut ours] = times;
    let values = ours.iter().zip(&limit).map(|(o, l)| o / l).collect();
    report.add(Row {
        what: format!(
            "{} connects, {threads} thread{}",
            each * threads * blocks,
            if threads == 1 { "" } else { "s" }
        ),
        against: "TCP connects".to_owned(),
        place: place.to_owned(),
        unit: "us",
        limit: Some(quantile(&mut limit, 0.5)),
        ours: quantile(&mut ours, 0.5),
        values,
        aim: Aim::AtMost(5.0),
    });
    Ok(())
}
