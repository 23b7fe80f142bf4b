//! From a `set` in one process to the return of `wait` in another one.
//!
//! Three processes on either side: the setter, the server or a bare relay, and
//! a waiter that has slept for two milliseconds. The relay sleeps in epoll_wait,
//! reads 40 bytes and writes 32 to the waiter, which sleeps in read(2): the
//! bytes of a set and of a wake-up. The stamps are of the monotonic clock,
//! which the processes share. Wake-ups alternate between the two, and a ratio
//! is that of the medians of a group of either.

mod common;

use common::{
    Aim, Bare, Options, Part, Peer, Report, Result, Row, cores, farcell_client, farcell_server,
    list, monotonic_ns, part, pin, play, quantile, ready,
};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::io::{BufRead, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// A set: a header and an operation.
const SET: usize = 16 + 24;
/// A wake-up: a header and the word of one cell.
const WOKEN: usize = 16 + 16;
/// How long the waiter sleeps before it is woken.
const ASLEEP: Duration = Duration::from_millis(2);
/// Wake-ups of one kind in a group.
const GROUP: usize = 25;

fn main() -> Result<()> {
    match part() {
        Part::Driver(options) => drive(options),
        Part::Peer(role, args) => match (role.as_str(), &args[..]) {
            ("relay", [core]) => relay(core.parse()?),
            ("waiter", [core, relay, server]) => wait(core.parse()?, relay, server),
            _ if play(&role, &args)? => Ok(()),
            _ => Err(format!("no role {role:?}").into()),
        },
    }
}

/// Passes on to the first client what the second one writes.
fn relay(core: usize) -> Result<()> {
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
        }
    }
}

/// For each line on standard input waits once, and says when that was over.
fn wait(core: usize, relay: &str, server: &str) -> Result<()> {
    pin(&[core])?;
    let mut bare = Bare::connect(relay, false)?;
    let client = farcell_client(server)?.connect()?;
    let event = client.events("event", 1, 1)?.at(0, 0)?;
    ready("")?;
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "bare" => bare.read(&mut [0; WOKEN])?,
            _ => event.wait()?,
        }
        ready(&monotonic_ns().to_string())?;
    }
    Ok(())
}

fn drive(options: Options) -> Result<()> {
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

fn measure(report: &mut Report, options: Options, cores: [usize; 3], place: &str) -> Result<()> {
    let [setter_core, server_core, waiter_core] = cores;
    pin(&[setter_core])?;
    let relay = Peer::start("relay", &[&list(&[server_core])])?;
    let server = farcell_server(&[server_core], false)?;
    let mut waiter = Peer::start("waiter", &[&list(&[waiter_core]), &relay.addr, &server.addr])?;
    let mut bare = Bare::new(TcpStream::connect(&relay.addr)?, false)?;
    let client = farcell_client(&server.addr)?.connect()?;
    let event = client.events("event", 1, 1)?.at(0, 0)?;
    let groups = if options.quick { 2 } else { 60 };
    let mut all = [Vec::new(), Vec::new()];
    let mut ratios = Vec::new();
    for _ in 0..groups {
        let mut group = [Vec::new(), Vec::new()];
        for i in 0..2 * GROUP {
            // Bare, ours, ours, bare, bare, ...
            let which = (i + 1) / 2 % 2;
            waiter.say(["bare", "ours"][which])?;
            std::thread::sleep(ASLEEP);
            let begun = monotonic_ns();
            match which {
                0 => bare.write(&[0; SET])?,
                _ => drop(event.set()?),
            }
            let woken: u64 = waiter.hear()?.parse()?;
            let ns = woken.checked_sub(begun).ok_or("woken before it was set")?;
            group[which].push(ns as f64 / 1000.0);
            if which == 1 {
                event.clear()?;
            }
        }
        let [limit, ours] = &mut group;
        ratios.push(quantile(ours, 0.5) / quantile(limit, 0.5));
        for (all, group) in all.iter_mut().zip(group) {
            all.extend(group);
        }
    }
    let [mut limit, mut ours] = all;
    report.note(format!(
        "{place}: p99 {:.1} us, bare {:.1} us",
        quantile(&mut ours, 0.99),
        quantile(&mut limit, 0.99)
    ));
    report.add(Row {
        what: "set to wake-up".to_owned(),
        against: format!("epoll relay {SET} B / {WOKEN} B"),
        place: place.to_owned(),
        unit: "us",
        limit: Some(quantile(&mut limit, 0.5)),
        ours: quantile(&mut ours, 0.5),
        values: ratios,
        aim: Aim::AtMost(1.1),
    });
    Ok(())
}
