//! Promise: when RDMA breaks under load, every operation ends or goes on over
//! TCP within the dead-peer time, none is lost or done twice, and whoever waits
//! is woken.
//!
//! Needs a machine of `scripts/soft-roce run --hcas 2`, whose links it breaks.
//! Elsewhere each test says so and passes, unless `FARCELL_TEST_RDMA` is
//! `required`.

mod common;
use common::client;
use common::rdma::{LONG, device, eventually, machine_has, over, rdma_server, run};
use farcell::{Client, ClientBuilder, Counter, Error, Event, RdmaChoice, Server, TransportChoice};
use std::collections::HashSet;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A peer that does not answer for this long is given up.
const DEAD_AFTER: Duration = Duration::from_secs(1);
/// The most that an operation may take then: a device may take longer for its
/// repetitions, the server is to confirm the end, and the machine is slow.
const WITHIN: Duration = Duration::from_secs(10);

/// Links and queue pairs are broken for all: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one thread has seen of its fetch_adds.
#[derive(Default)]
struct Journal {
    olds: Vec<i64>,
    unknown: i64,
    slowest: Duration,
}

fn add_until(stop: &AtomicBool, counter: &Counter) -> Journal {
    let mut journal = Journal::default();
    while !stop.load(Relaxed) {
        let begun = Instant::now();
        match counter.fetch_add(1) {
            Ok(old) => journal.olds.push(old),
            Err(Error::OutcomeUnknown { .. }) => journal.unknown += 1,
            Err(error) => panic!("{error}"),
        }
        journal.slowest = journal.slowest.max(begun.elapsed());
    }
    journal
}

/// Passes a ball on each time it comes. The longest time that it was away.
fn pass_until(stop: &AtomicBool, mine: &Event, theirs: &Event, passes: &AtomicUsize) -> Duration {
    let mut slowest = Duration::ZERO;
    loop {
        let begun = Instant::now();
        assert!(mine.wait_timeout(LONG).unwrap(), "the ball was lost");
        slowest = slowest.max(begun.elapsed());
        mine.clear().unwrap();
        theirs.set().unwrap();
        passes.fetch_add(1, Relaxed);
        if stop.load(Relaxed) {
            return slowest;
        }
    }
}

/// Two clients that add over RDMA with two threads each, one that adds over
/// TCP, two that pass a ball over RDMA, and one that is parked all the time;
/// under all that, something breaks.
fn break_under_load(server: &Server, builder: ClientBuilder, break_it: impl FnOnce()) {
    let connect = || {
        let builder = builder.clone().transport(TransportChoice::Rdma).dead_after(DEAD_AFTER);
        let client = builder.connect().unwrap();
        assert_eq!(client.transport().name, "rdma");
        client
    };
    let adders: Vec<Client> = (0..2).map(|_| connect()).collect();
    let players: Vec<Client> = (0..2).map(|_| connect()).collect();
    let (parked, tcp) = (connect(), over(server, TransportChoice::Tcp));
    let counter = |client: &Client| client.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
    let event = |client: &Client, i| client.events("e", 1, 3).unwrap().at(0, i).unwrap();
    let (stop, passes) = (AtomicBool::new(false), AtomicUsize::new(0));
    let journals = std::thread::scope(|s| {
        let mut threads = Vec::new();
        for client in adders.iter().chain(&adders).chain([&tcp]) {
            let (stop, counter) = (&stop, counter(client));
            threads.push(s.spawn(move || add_until(stop, &counter)));
        }
        let mut passing = Vec::new();
        for (i, player) in players.iter().enumerate() {
            let (mine, theirs) = (event(player, i), event(player, 1 - i));
            let (stop, passes) = (&stop, &passes);
            passing.push(s.spawn(move || pass_until(stop, &mine, &theirs, passes)));
        }
        let waits = event(&parked, 2);
        let wait = s.spawn(move || waits.wait_timeout(LONG).unwrap());
        event(&tcp, 0).set().unwrap();
        eventually("the ball goes to and fro", || passes.load(Relaxed) > 20);
        break_it();
        std::thread::sleep(DEAD_AFTER * 4);
        let then = passes.load(Relaxed);
        eventually("the ball goes to and fro again", || passes.load(Relaxed) > then + 20);
        assert!(!wait.is_finished());
        let begun = Instant::now();
        event(&tcp, 2).set().unwrap();
        assert!(wait.join().unwrap());
        let woken = begun.elapsed();
        stop.store(true, Relaxed);
        let away: Vec<Duration> = passing.into_iter().map(|t| t.join().unwrap()).collect();
        println!("woken after {woken:?}, ball away for {away:?} at most");
        assert!(woken < WITHIN && away.iter().all(|&time| time < 2 * WITHIN));
        threads.into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>()
    });
    for client in adders.iter().chain(&players) {
        let report = client.transport();
        assert_eq!(report.name, "tcp", "{report:?}");
        println!("{:?}", report.reasons);
    }
    let total = counter(&tcp).load().unwrap();
    let done: i64 = journals.iter().map(|j| j.olds.len() as i64).sum();
    let unknown: i64 = journals.iter().map(|j| j.unknown).sum();
    let slowest = journals.iter().map(|j| j.slowest).max().unwrap();
    println!("{done} done, {unknown} unknown, {total} in all; the slowest took {slowest:?}");
    assert!(done <= total && total <= done + unknown);
    let distinct: HashSet<i64> = journals.iter().flat_map(|j| &j.olds).copied().collect();
    assert_eq!(distinct.len() as i64, done, "two fetch_adds found the same value");
    assert!(slowest < WITHIN);
}

#[test]
fn the_link_goes_down() {
    let _alone = alone();
    let Some(netdev) = machine_has("SOFT_ROCE_NETDEV").filter(|_| device()) else {
        return;
    };
    for _ in 0..3 {
        let server = rdma_server().shared_memory(false).start().unwrap();
        break_under_load(&server, client(&server), || run(&format!("ip link set {netdev} down")));
        run(&format!("ip link set {netdev} up"));
        // The server's own way to its adapter has failed too: it says so.
        let late = client(&server).connect().unwrap();
        assert_eq!(late.transport().name, "tcp");
        assert!(late.transport().reasons.join(" ").contains("failed"), "{:?}", late.transport());
        let sum = late.open_counters("sum").unwrap().at(0, 0).unwrap();
        let before = sum.fetch_add(1).unwrap();
        assert_eq!(sum.load().unwrap(), before + 1);
        // On a new server all is well.
        drop(server);
        let server = rdma_server().start().unwrap();
        eventually("RDMA works again", || {
            client(&server).transport(TransportChoice::Rdma).connect().is_ok()
        });
    }
}

#[test]
fn every_packet_is_lost() {
    let _alone = alone();
    let Some(first) = machine_has("SOFT_ROCE_DEVICE").filter(|_| device()) else {
        return;
    };
    let Some(second) = machine_has("SOFT_ROCE_DEVICE_2") else {
        return;
    };
    let (a, b) =
        (machine_has("SOFT_ROCE_NETDEV").unwrap(), machine_has("SOFT_ROCE_NETDEV_2").unwrap());
    let server = rdma_server().rdma(RdmaChoice::Device(first)).start().unwrap();
    let builder = client(&server).device(second);
    break_under_load(&server, builder.clone(), || {
        run(&format!("tc qdisc add dev {a} root netem loss 100%"));
        run(&format!("tc qdisc add dev {b} root netem loss 100%"));
    });
    run(&format!("tc qdisc del dev {a} root"));
    run(&format!("tc qdisc del dev {b} root"));
    // Another client has RDMA again.
    let client = builder.transport(TransportChoice::Rdma).connect().unwrap();
    let event = client.events("e", 1, 3).unwrap().at(0, 2).unwrap();
    assert!(event.take().unwrap());
    assert_eq!(client.transport().name, "rdma");
}

#[test]
fn the_servers_queue_pairs_break() {
    let _alone = alone();
    if !device() {
        return;
    }
    let server = rdma_server().start().unwrap();
    break_under_load(&server, client(&server), || server.break_queue_pairs_for_tests());
    let client = over(&server, TransportChoice::Rdma);
    let event = client.events("e", 1, 3).unwrap().at(0, 2).unwrap();
    assert!(event.take().unwrap());
    assert_eq!(client.transport().name, "rdma");
}

/// Passes a server's connections on, or cuts them and takes no more.
struct Gate {
    addr: String,
    open: Arc<AtomicBool>,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
}

impl Gate {
    fn new(server: &Server) -> Gate {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let (open, sockets) = (Arc::new(AtomicBool::new(true)), Arc::<Mutex<Vec<_>>>::default());
        let gate = Gate { addr, open: open.clone(), sockets: sockets.clone() };
        let server = server.address();
        std::thread::spawn(move || {
            for near in listener.incoming() {
                let near = near.unwrap();
                if !open.load(Relaxed) {
                    continue;
                }
                let Ok(far) = TcpStream::connect(&server) else { return };
                let ends = [near, far];
                for socket in &ends {
                    socket.set_nodelay(true).unwrap();
                    sockets.lock().unwrap().push(socket.try_clone().unwrap());
                }
                for (from, to) in [(0, 1), (1, 0)] {
                    let mut from = ends[from].try_clone().unwrap();
                    let mut to = ends[to].try_clone().unwrap();
                    std::thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        gate
    }

    fn shut(&self) {
        self.open.store(false, Relaxed);
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn open(&self) {
        self.open.store(true, Relaxed);
    }
}

/// The control connection is lost, and RDMA goes on within the lease. The
/// session ends with it, and its queue pairs with the session. Then the client
/// comes back with a new session.
#[test]
fn the_session_ends_while_the_control_connection_is_away() {
    let _alone = alone();
    if !device() {
        return;
    }
    let server = rdma_server().lease(Duration::from_secs(2)).start().unwrap();
    let gate = Gate::new(&server);
    let builder = client(&server).addr(&gate.addr).dead_after(DEAD_AFTER);
    let client = builder.transport(TransportChoice::Rdma).connect().unwrap();
    let counter = client.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    assert_eq!(counter.fetch_add(1).unwrap(), 0);
    std::thread::scope(|s| {
        let wait = s.spawn(|| event.wait_timeout(LONG).unwrap());
        eventually("it is parked", || server.parked_waits() == 1);
        gate.shut();
        assert_eq!(counter.fetch_add(1).unwrap(), 1);
        assert_eq!(client.transport().name, "rdma");
        eventually("its lease is over", || server.sessions() == 0);
        eventually("nothing is parked", || server.parked_waits() == 0);
        // The queue pairs go a moment later; what was done until then counts.
        let begun = Instant::now();
        let mut next = 2;
        let unknown = loop {
            match counter.fetch_add(1) {
                Ok(found) => assert_eq!(found, next),
                Err(error) => break error,
            }
            next += 1;
            assert!(begun.elapsed() < WITHIN);
        };
        assert!(matches!(unknown, Error::OutcomeUnknown { .. }), "{unknown}");
        println!("given up after {:?}: {:?}", begun.elapsed(), client.transport());
        assert!(begun.elapsed() < WITHIN);
        gate.open();
        // Over TCP, in a new session; nothing happened behind the lease.
        assert_eq!(counter.fetch_add(1).unwrap(), next);
        eventually("it is parked again", || server.parked_waits() == 1);
        assert!(event.set().unwrap());
        assert!(wait.join().unwrap());
    });
    assert_eq!(client.transport().name, "tcp");
}
