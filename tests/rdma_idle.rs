//! Promise: the server's CPU has no part in what clients do over RDMA while
//! nobody waits: it sleeps, and may as well be stopped.
//!
//! Needs a device, as `tests/rdma.rs` does.

mod common;
use common::rdma::{LONG, ServerProcess, Use, adds, device, eventually, over_at, serve_if_asked};
use farcell::{Client, Comparison, Counter, Event, EventArray, TransportChoice};
use std::time::{Duration, Instant};

#[test]
#[ignore = "no test, but the server of the others, in a process of its own"]
fn role_of_the_server() {
    serve_if_asked();
}

/// What a client operates on.
struct Cells {
    counter: Counter,
    events: EventArray,
    event: Event,
}

impl Cells {
    fn new(client: &Client) -> Cells {
        let events = client.events("e", 4, 4).unwrap();
        let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
        Cells { counter, event: events.at(1, 2).unwrap(), events }
    }

    /// Loads, fetch_adds, sets, clears and takes, `count` of them.
    fn operate(&self, count: i64) {
        let (c, e) = (&self.counter, &self.event);
        for n in 0..count {
            match n % 8 {
                0 => assert!(e.set().unwrap()),
                1 => assert!(e.is_set().unwrap()),
                2 => assert!(e.clear().unwrap()),
                3 => assert_eq!(self.events.row(1).unwrap().snapshot().unwrap(), [false; 4]),
                4 => assert!(e.set().unwrap()),
                5 => assert!(e.take().unwrap()),
                6 => drop(c.load().unwrap()),
                _ => drop(c.fetch_add(1).unwrap()),
            }
        }
    }
}

/// soft-RoCE works in whatever thread happens to run, so the kernel's account
/// of CPU time says little of who caused it. A thread that takes part in an
/// operation must be woken for it, and that is counted exactly: it is what is
/// demanded here. User time backs it up, since no part of soft-RoCE is in it.
#[test]
fn the_servers_threads_sleep() {
    if !device() {
        return;
    }
    const COUNT: i64 = 10_000;
    let server = ServerProcess::start();
    let client = over_at(&server.addr, TransportChoice::Rdma);
    let cells = Cells::new(&client);
    cells.operate(80);
    let measure = |what: &str, work: &dyn Fn()| -> (Use, Duration) {
        let (before, begun) = (server.used(), Instant::now());
        work();
        let (used, took) = (server.used() - before, begun.elapsed());
        println!("{what}: {used:?} in {took:?}");
        (used, took)
    };
    let (idle, idle_time) = measure("nothing", &|| std::thread::sleep(Duration::from_secs(3)));
    let (busy, busy_time) = measure("10,000 operations over RDMA", &|| cells.operate(COUNT));
    assert_eq!(client.transport().name, "rdma");
    let times = busy_time.as_secs_f64() / idle_time.as_secs_f64();
    // A heartbeat now and then, and the look at leases that it always takes.
    let wakes = idle.wakes as f64 * times * 1.5 + 50.0;
    assert!((busy.wakes as f64) < wakes, "{} wakes, {wakes:.0} expected", busy.wakes);
    let user = idle.user as f64 * times * 1.5 + 10.0 + 2.0 * busy_time.as_secs_f64();
    assert!((busy.user as f64) < user, "{} ticks, {user:.0} expected", busy.user);
    // The measure can tell: over TCP it takes part in each, and is woken for it
    // unless it is so busy that it does not sleep.
    let tcp = over_at(&server.addr, TransportChoice::Tcp);
    let cells = Cells::new(&tcp);
    let (woken, _) = measure("800 operations over TCP", &|| cells.operate(800));
    assert!(woken.wakes > 400 || woken.user > 20, "{woken:?}");
}

#[test]
fn clients_go_on_while_the_server_is_stopped() {
    if !device() {
        return;
    }
    let server = ServerProcess::start();
    let (rdma, tcp) =
        (over_at(&server.addr, TransportChoice::Rdma), over_at(&server.addr, TransportChoice::Tcp));
    let c = rdma.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
    let far = tcp.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
    assert_eq!(far.fetch_add(1).unwrap(), 0);
    let cells = Cells::new(&rdma);
    cells.operate(80);
    server.signal("STOP");
    eventually("the server has stopped", || server.is_stopped());
    let count = adds(2000);
    let begun = Instant::now();
    // One over TCP, which has to wait.
    let later = std::thread::spawn(move || far.fetch_add(1).unwrap());
    for n in 0..count {
        c.fetch_add(1).unwrap();
        if n % 100 == 0 {
            cells.operate(8);
        }
    }
    println!("{count} fetch_adds while it was stopped, in {:?}", begun.elapsed());
    assert!(server.is_stopped());
    assert_eq!(c.load().unwrap(), count + 1);
    assert!(!later.is_finished());
    assert_eq!(rdma.transport().name, "rdma");
    assert!(begun.elapsed() < LONG, "longer than the lease");
    server.signal("CONT");
    assert_eq!(later.join().unwrap(), count + 1);
    // Everything is as it was, and both ways work.
    for client in [&rdma, &tcp] {
        Cells::new(client).operate(80);
        let c = client.open_counters("sum").unwrap().at(0, 0).unwrap();
        assert_eq!(c.load().unwrap(), count + 2);
        assert!(client.is_connected());
    }
    let event = rdma.events("e", 4, 4).unwrap().at(3, 3).unwrap();
    let signal = tcp.events("e", 4, 4).unwrap().at(3, 3).unwrap();
    std::thread::scope(|s| {
        let wait = s.spawn(|| event.wait_timeout(LONG).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        signal.set().unwrap();
        assert!(wait.join().unwrap());
    });
}

/// A cell with a waiter costs a doorbell each, which the stopped server does not
/// take: what follows must not wait behind them.
#[test]
fn clients_go_on_with_a_watched_cell_while_the_server_is_stopped() {
    if !device() {
        return;
    }
    let server = ServerProcess::start();
    let (rdma, tcp) =
        (over_at(&server.addr, TransportChoice::Rdma), over_at(&server.addr, TransportChoice::Tcp));
    let c = rdma.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
    let watched = tcp.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
    let count = adds(2000);
    let until = count + 100;
    let wait =
        std::thread::spawn(move || watched.wait_until(Comparison::Ge, until, Some(LONG), None));
    eventually("it is parked", || tcp.info().unwrap().parked_waits == 1);
    server.signal("STOP");
    eventually("the server has stopped", || server.is_stopped());
    let (begun, mut slowest) = (Instant::now(), Duration::ZERO);
    // For longer than a peer that does not answer is borne with.
    while c.load().unwrap() < count || begun.elapsed() < Duration::from_secs(4) {
        let at = Instant::now();
        c.fetch_add(i64::from(c.load().unwrap() < count)).unwrap();
        slowest = slowest.max(at.elapsed());
    }
    println!("{count} watched fetch_adds while it was stopped; the slowest took {slowest:?}");
    assert!(server.is_stopped());
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert_eq!(rdma.transport().name, "rdma");
    assert!(!wait.is_finished());
    // The last change is made while no doorbell gets through.
    c.fetch_add(100).unwrap();
    server.signal("CONT");
    assert_eq!(wait.join().unwrap().unwrap(), Some(until));
}
