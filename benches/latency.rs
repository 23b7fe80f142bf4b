//! One operation after another, against a bare TCP ping-pong.
//!
//! The limit is a blocking ping-pong of the same bytes between two processes:
//! 40 there, 24 back, as one operation has on the wire. Rounds of both follow
//! each other, and a ratio is that of the medians of two rounds side by side.
//! With spinning, both sides of both poll their sockets instead of sleeping.

mod common;

use common::{
    Aim, Bare, Options, Part, Peer, Report, Result, Row, cores, echo_server, farcell_client,
    farcell_server, part, pin, ping_pong_server, play, quantile,
};
use hdrhistogram::Histogram;
use std::time::{Duration, Instant};

/// Header and one operation.
const REQUEST: usize = 16 + 24;
/// Header and one word.
const REPLY: usize = 16 + 8;
/// Operations of a round, and those before them that do not count.
const COUNTED: usize = 150;
const WARM: usize = 15;

fn main() -> Result<()> {
    match part() {
        Part::Driver(options) => drive(&options),
        Part::Peer(role, args) if play(&role, &args)? => Ok(()),
        Part::Peer(role, _) => Err(format!("no role {role:?}").into()),
    }
}

fn drive(options: &Options) -> Result<()> {
    let mut report = Report::new("latency", options);
    let (a, b) = cores()?;
    let one = format!("client and server on core {a}");
    let two = format!("client on core {a}, server on core {b}");
    measure(&mut report, options, a, a, false, &one)?;
    if a == b {
        report.note("There is one core alone: nothing was measured across cores or spinning.");
    } else {
        measure(&mut report, options, a, b, false, &two)?;
        measure(&mut report, options, a, b, true, &two)?;
    }
    report.print()
}

/// A round: how long each operation took, in nanoseconds.
fn round(mut op: impl FnMut() -> Result<()>) -> Result<Vec<f64>> {
    for _ in 0..WARM {
        op()?;
    }
    let mut times = Vec::with_capacity(COUNTED);
    let mut last = Instant::now();
    for _ in 0..COUNTED {
        op()?;
        let now = Instant::now();
        times.push(now.duration_since(last).as_nanos() as f64);
        last = now;
    }
    Ok(times)
}

fn measure(
    report: &mut Report,
    options: &Options,
    client_core: usize,
    server_core: usize,
    spin: bool,
    place: &str,
) -> Result<()> {
    let how = if spin { ", spinning" } else { "" };
    if !options.wants(&format!("{place}{how}")) {
        return Ok(());
    }
    pin(&[client_core])?;
    let bare_server: Peer = ping_pong_server(&[server_core], spin, REQUEST, REPLY)?;
    let server = farcell_server(&[server_core], spin)?;
    let echo = echo_server(&[server_core], REQUEST, REPLY)?;
    let mut bare = Bare::connect(&bare_server.addr, spin)?;
    let mut polled = Bare::connect(&echo.addr, spin)?;
    let mut builder = farcell_client(&server.addr)?;
    if spin {
        builder = builder.spin(common::SPIN);
    }
    let client = builder.connect()?;
    let event = client.events("event", 1, 1)?.at(0, 0)?;
    let counter = client.counters("counter", 1, 1)?.at(0, 0)?;
    let mut set = false;
    let mut is_set = || event.is_set().map(drop).map_err(Into::into);
    let mut set_clear = || {
        set = !set;
        if set { event.set() } else { event.clear() }.map(drop).map_err(Into::into)
    };
    let mut fetch_add = || counter.fetch_add(1).map(drop).map_err(Into::into);
    let (request, mut reply) = ([0; REQUEST], [0; REPLY]);
    let mut epoll_echo = || {
        polled.write(&request)?;
        Ok(polled.read(&mut [0; REPLY])?)
    };
    // The last one tells what epoll alone costs, which any server for more than
    // one client needs.
    let ops: [(&str, &mut dyn FnMut() -> Result<()>); 4] = [
        ("is_set", &mut is_set),
        ("set, clear", &mut set_clear),
        ("fetch_add", &mut fetch_add),
        ("(bare epoll echo)", &mut epoll_echo),
    ];
    let rounds = if options.quick { 4 } else { 400 };
    let mut ping_pong = || {
        bare.write(&request)?;
        Ok(bare.read(&mut reply)?)
    };
    for (at, (name, op)) in ops.into_iter().enumerate() {
        let bare_epoll = at == 3;
        if bare_epoll && spin {
            continue;
        }
        let mut limits = Histogram::<u64>::new(3)?;
        let mut ours = Histogram::<u64>::new(3)?;
        let mut ratios = Vec::new();
        for i in 0..rounds {
            let mut pair = [Vec::new(), Vec::new()];
            // Bare, ours, ours, bare, bare, ...
            for half in [i % 2, 1 - i % 2] {
                if spin {
                    // The other server has stopped spinning by then.
                    std::thread::sleep(3 * common::SPIN);
                }
                pair[half] = if half == 0 { round(&mut ping_pong)? } else { round(&mut *op)? };
            }
            for (histogram, times) in [(&mut limits, &pair[0]), (&mut ours, &pair[1])] {
                for &ns in times {
                    histogram.record(ns as u64)?;
                }
            }
            let [limit, our] = &mut pair;
            ratios.push(quantile(our, 0.5) / quantile(limit, 0.5));
        }
        let us = |h: &Histogram<u64>, q| h.value_at_quantile(q) as f64 / 1000.0;
        report.note(format!(
            "{name}, {place}{how}: p99 {:.1} us, bare {:.1} us",
            us(&ours, 0.99),
            us(&limits, 0.99)
        ));
        report.add(Row {
            what: format!("{name}{how}"),
            against: format!("TCP ping-pong {REQUEST} B / {REPLY} B"),
            place: place.to_owned(),
            unit: "us",
            limit: Some(us(&limits, 0.5)),
            ours: us(&ours, 0.5),
            values: ratios,
            aim: match bare_epoll {
                true => Aim::None,
                false => Aim::AtMost(if spin { 1.2 } else { 1.08 }),
            },
        });
    }
    // Servers that are not needed any more do not spin into the next ones.
    drop(client);
    std::thread::sleep(Duration::from_millis(5));
    Ok(())
}
