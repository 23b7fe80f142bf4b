//! From a `set` in one process to the return of `wait` in another one.
//!
//! Three processes on either side: the setter, the server or a bare relay, and
//! a waiter that has slept for two milliseconds. The relay sleeps in epoll_wait,
//! reads 40 bytes and writes 32 to the waiter, which sleeps in read(2): the
//! bytes of a set and of a wake-up. The stamps are of the monotonic clock,
//! which the processes share. Wake-ups alternate, and a ratio is that of the
//! medians of a group of each.
//!
//! A `set` returns what the event was before, so the server also answers the
//! setter, behind the wake-up. A second relay does the same, with 24 bytes: it
//! shows what that answer costs the waiter where they share a core.

mod common;

use common::{
    Aim, Bare, Options, Part, Peer, Report, Result, Row, cores, farcell_client, farcell_server,
    list, monotonic_ns, part, pin, play, quantile, ready,
};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::io::{BufRead, Read, Write};
use std::net::TcpListener;
use std::time::Duration;

/// A set: a header and an operation.
const SET: usize = 16 + 24;
/// A wake-up: a header and the word of one cell.
const WOKEN: usize = 16 + 16;
/// The answer to a set: a header and a word.
const ANSWER: usize = 16 + 8;
/// How long the waiter sleeps before it is woken.
const ASLEEP: Duration = Duration::from_millis(2);
/// What the waiter sleeps on.
const KINDS: [&str; 3] = ["bare", "confirming", "farcell"];
/// Wake-ups of one kind in a group.
const GROUP: usize = 25;

fn main() -> Result<()> {
    match part() {
        Part::Driver(options) => drive(&options),
        Part::Peer(role, args) => match (role.as_str(), &args[..]) {
            ("relay", [core, answers]) => relay(core.parse()?, answers == "answers"),
            ("waiter", [core, relay, confirming, server]) => {
                wait(core.parse()?, [relay, confirming], server)
            }
            _ if play(&role, &args)? => Ok(()),
            _ => Err(format!("no role {role:?}").into()),
        },
    }
}

/// Passes on to the first client what the second one writes, and may answer
/// the second one too.
fn relay(core: usize, answers: bool) -> Result<()> {
    pin(&[core])?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    ready(&listener.local_addr()?.to_string())?;
    let mut waiter = listener.accept()?.0;
    let mut setter = listener.accept()?.0;
    for stream in [&waiter, &setter] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    let poller = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&poller, &waiter, EventData::new_u64(0), EventFlags::IN)?;
    epoll::add(&poller, &setter, EventData::new_u64(1), EventFlags::IN)?;
    let mut events = Vec::with_capacity(8);
    let mut bytes = [0; SET];
    loop {
        events.clear();
        epoll::wait(&poller, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in &events {
            // Whoever leaves ends it.
            if event.data.u64() == 0 || setter.read(&mut bytes)? != SET {
                return Ok(());
            }
            waiter.write_all(&bytes[..WOKEN])?;
            if answers {
                setter.write_all(&bytes[..ANSWER])?;
            }
        }
    }
}

/// For each line on standard input waits once, and says when that was over.
fn wait(core: usize, relays: [&str; 2], server: &str) -> Result<()> {
    pin(&[core])?;
    let mut bare = Bare::connect(relays[0], false)?;
    let mut confirming = Bare::connect(relays[1], false)?;
    let client = farcell_client(server)?.connect()?;
    let event = client.events("event", 1, 1)?.at(0, 0)?;
    ready("")?;
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "bare" => bare.read(&mut [0; WOKEN])?,
            "confirming" => confirming.read(&mut [0; WOKEN])?,
            _ => event.wait()?,
        }
        ready(&monotonic_ns().to_string())?;
    }
    Ok(())
}

fn drive(options: &Options) -> Result<()> {
    let mut report = Report::new("wakeup", options);
    let (a, b) = cores()?;
    let one = format!("all on core {a}");
    let two = format!("setter and waiter on core {a}, server on core {b}");
    let three = format!("setter and server on core {a}, waiter on core {b}");
    measure(&mut report, options, [a, a, a], &one)?;
    if a == b {
        report.note("There is one core alone: nothing was measured across cores.");
    } else {
        measure(&mut report, options, [a, b, a], &two)?;
        measure(&mut report, options, [a, a, b], &three)?;
    }
    report.print()
}

fn measure(report: &mut Report, options: &Options, cores: [usize; 3], place: &str) -> Result<()> {
    if !options.wants(place) {
        return Ok(());
    }
    let [setter_core, server_core, waiter_core] = cores;
    pin(&[setter_core])?;
    let relay = Peer::start("relay", &[&list(&[server_core]), "silent"])?;
    let confirming = Peer::start("relay", &[&list(&[server_core]), "answers"])?;
    let server = farcell_server(&[server_core], false)?;
    let addrs = [relay.addr.as_str(), &confirming.addr, &server.addr];
    let mut waiter = Peer::start("waiter", &[&list(&[waiter_core]), addrs[0], addrs[1], addrs[2]])?;
    let mut bare = Bare::connect(&relay.addr, false)?;
    let mut confirmed = Bare::connect(&confirming.addr, false)?;
    let client = farcell_client(&server.addr)?.connect()?;
    let event = client.events("event", 1, 1)?.at(0, 0)?;
    let groups = if options.quick { 2 } else { 60 };
    let mut all: [Vec<f64>; KINDS.len()] = Default::default();
    let mut ratios = [Vec::new(), Vec::new()];
    for _ in 0..groups {
        let mut group: [Vec<f64>; KINDS.len()] = Default::default();
        for i in 0..GROUP {
            for step in 0..KINDS.len() {
                // There and back again, so that none is always the first.
                let which = if i % 2 == 0 { step } else { KINDS.len() - 1 - step };
                waiter.say(KINDS[which])?;
                std::thread::sleep(ASLEEP);
                let begun = monotonic_ns();
                match which {
                    0 => bare.write(&[0; SET])?,
                    1 => {
                        confirmed.write(&[0; SET])?;
                        confirmed.read(&mut [0; ANSWER])?;
                    }
                    _ => drop(event.set()?),
                }
                let woken: u64 = waiter.hear()?.parse()?;
                let ns = woken.checked_sub(begun).ok_or("woken before it was set")?;
                group[which].push(ns as f64 / 1000.0);
                if which == 2 {
                    event.clear()?;
                }
            }
        }
        let [bare, confirmed, ours] = group.each_mut().map(|times| quantile(times, 0.5));
        ratios[0].push(ours / bare);
        ratios[1].push(ours / confirmed);
        for (all, group) in all.iter_mut().zip(group) {
            all.extend(group);
        }
    }
    let [p50, p99] = [0.5, 0.99].map(|q| all.each_mut().map(|times| quantile(times, q)));
    report.note(format!(
        "{place}: p99 {:.1} us, bare {:.1} us, bare with an answer {:.1} us",
        p99[2], p99[0], p99[1]
    ));
    let answer = format!(" + answer {ANSWER} B");
    for (limit, values) in ratios.into_iter().enumerate() {
        report.add(Row {
            what: "set to wake-up".to_owned(),
            against: format!(
                "epoll relay {SET} B / {WOKEN} B{}",
                if limit == 1 { &answer } else { "" }
            ),
            place: place.to_owned(),
            unit: "us",
            limit: Some(p50[limit]),
            ours: p50[2],
            values,
            aim: Aim::AtMost(1.1),
        });
    }
    Ok(())
}
