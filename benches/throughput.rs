//! Batches of 128 operations, one after another, on 1, 8 and 64 connections.
//!
//! The limit is a bare epoll echo on one thread that answers as many bytes by
//! as many bytes, with the same threads in the same client process: one a
//! connection, which writes, then reads. Slices of time alternate between the
//! two, and a ratio is that of the rates of two slices side by side.
//!
//! A batch travels as one frame, 16 bytes and 24 an operation, and comes back
//! as 16 bytes and 8 a word. A second limit has a header for each operation, as
//! 128 pipelined single operations would.

mod common;

use common::{
    Aim, Bare, Options, Part, Report, Result, Row, cores, echo_server, farcell_client,
    farcell_server, list, part, pin, play, quantile,
};
use farcell::Batch;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

type Error = Box<dyn std::error::Error + Send + Sync>;

const DEPTH: usize = 128;
/// There and back, as one frame.
const FRAME: (usize, usize) = (16 + DEPTH * 24, 16 + DEPTH * 8);
/// There and back, as a frame for each operation.
const SINGLES: (usize, usize) = (DEPTH * (16 + 24), DEPTH * (16 + 8));

fn main() -> Result<()> {
    match part() {
        Part::Driver(options) => drive(&options),
        Part::Peer(role, args) if play(&role, &args)? => Ok(()),
        Part::Peer(role, _) => Err(format!("no role {role:?}").into()),
    }
}

fn drive(options: &Options) -> Result<()> {
    let mut report = Report::new("throughput", options);
    let (a, b) = cores()?;
    let apart = format!("clients on core {a}, server on core {b}");
    let anywhere = format!("all on cores {}", list(&[a, b]));
    for connections in [1, 8, 64] {
        measure(&mut report, options, connections, &[a], &[b], &apart)?;
    }
    if a != b {
        for connections in [1, 8, 64] {
            measure(&mut report, options, connections, &[a, b], &[a, b], &anywhere)?;
        }
    }
    report.print()
}

/// What a slice of time is spent on.
const KINDS: [&str; 4] = ["bare frame", "bare singles", "fetch_add", "load"];

/// One client thread: a bare connection of each kind, and ours.
struct Side {
    frame: Bare,
    singles: Bare,
    add: Batch,
    load: Batch,
}

impl Side {
    fn new(addrs: &[String; 3], cell: usize) -> Result<Side> {
        let client = farcell_client(&addrs[2])?.connect()?;
        let counters = client.counters("counters", 64, DEPTH)?;
        let (mut add, mut load) = (client.batch(), client.batch());
        for col in 0..DEPTH {
            add.fetch_add(&counters.at(cell, col)?, 1);
            load.load(&counters.at(cell, col)?);
        }
        let frame = Bare::connect(&addrs[0], false)?;
        let singles = Bare::connect(&addrs[1], false)?;
        Ok(Side { frame, singles, add, load })
    }

    /// Batches until it is told to stop, and how many.
    fn slice(&mut self, kind: usize, over: &AtomicBool) -> Result<u64> {
        let mut bytes = vec![0; SINGLES.0];
        let mut count = 0;
        while !over.load(Ordering::Relaxed) {
            match kind {
                0 => exchange(&mut self.frame, FRAME, &mut bytes)?,
                1 => exchange(&mut self.singles, SINGLES, &mut bytes)?,
                2 => drop(self.add.run()?),
                _ => drop(self.load.run()?),
            }
            count += 1;
        }
        Ok(count)
    }
}

fn exchange(bare: &mut Bare, (there, back): (usize, usize), bytes: &mut [u8]) -> Result<()> {
    bare.write(&bytes[..there])?;
    bare.read(&mut bytes[..back])?;
    Ok(())
}

fn measure(
    report: &mut Report,
    options: &Options,
    connections: usize,
    client_cores: &[usize],
    server_cores: &[usize],
    place: &str,
) -> Result<()> {
    if !options.wants(&format!("{place}, {connections} connections")) {
        return Ok(());
    }
    pin(client_cores)?;
    let frame = echo_server(server_cores, FRAME.0, FRAME.1)?;
    let singles = echo_server(server_cores, SINGLES.0, SINGLES.1)?;
    let server = farcell_server(server_cores, false)?;
    let addrs = [frame.addr.clone(), singles.addr.clone(), server.addr.clone()];
    let rounds = if options.quick { 3 } else { 60 };
    let length = Duration::from_millis(if options.quick { 10 } else { 40 });

    let kind = AtomicUsize::new(0);
    let over = AtomicBool::new(false);
    let count = AtomicU64::new(0);
    let (begin, end) = (Barrier::new(connections + 1), Barrier::new(connections + 1));
    let mut sides = Vec::new();
    for cell in 0..connections {
        sides.push(Side::new(&addrs, cell)?);
    }
    // By kind, in millions of operations a second.
    let mut rates: [Vec<f64>; KINDS.len()] = Default::default();
    let failed: Mutex<Option<Error>> = Mutex::new(None);
    let work = |mut side: Side| {
        loop {
            begin.wait();
            let kind = kind.load(Ordering::Relaxed);
            if kind >= KINDS.len() {
                return;
            }
            match side.slice(kind, &over) {
                Ok(done) => drop(count.fetch_add(done, Ordering::Relaxed)),
                // It still comes to the barriers, or all would hang.
                Err(error) => drop(failed.lock().map(|mut f| f.replace(error))),
            }
            end.wait();
        }
    };
    std::thread::scope(|s| {
        for side in sides {
            let work = &work;
            s.spawn(move || work(side));
        }
        for round in 0..=rounds {
            for step in 0..KINDS.len() {
                // There and back again, so that none is always the first.
                let which = if round % 2 == 0 { step } else { KINDS.len() - 1 - step };
                kind.store(which, Ordering::Relaxed);
                over.store(false, Ordering::Relaxed);
                count.store(0, Ordering::Relaxed);
                begin.wait();
                let begun = Instant::now();
                std::thread::sleep(length);
                over.store(true, Ordering::Relaxed);
                end.wait();
                let seconds = begun.elapsed().as_secs_f64();
                // The first round warms up.
                if round > 0 {
                    let ops = count.load(Ordering::Relaxed) as f64 * DEPTH as f64;
                    rates[which].push(ops / seconds / 1e6);
                }
            }
        }
        kind.store(KINDS.len(), Ordering::Relaxed);
        begin.wait();
    });
    if let Some(error) = failed.into_inner().map_err(|_| "a client thread panicked")? {
        return Err(error);
    }
    for (limit, ours) in [(0, 2), (0, 3), (1, 2)] {
        let values = rates[ours].iter().zip(&rates[limit]).map(|(o, l)| o / l).collect();
        let (there, back) = [FRAME, SINGLES][limit];
        report.add(Row {
            what: format!("{} x {connections}", KINDS[ours]),
            against: format!("epoll echo {there} B / {back} B"),
            place: place.to_owned(),
            unit: "M/s",
            limit: Some(quantile(&mut rates[limit].clone(), 0.5)),
            ours: quantile(&mut rates[ours].clone(), 0.5),
            values,
            aim: if limit == 0 { Aim::AtLeast(0.8) } else { Aim::None },
        });
    }
    Ok(())
}
