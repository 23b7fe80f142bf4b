//! Promise: learners on two machines share events and counters, each by the way
//! that it has: RDMA where there is an adapter, TCP where there is none, with
//! the reason in words. When the server's machine vanishes nobody hangs.
//!
//! Needs the two machines of `scripts/soft-roce pair`, `the_server` run on a
//! and `the_other_machine` on b. Elsewhere each test says so and passes.

mod common;
use common::key;
use common::rdma::{LONG, device};
use farcell::{Client, ClientBuilder, Error, RdmaChoice, Server, TransportChoice};
use std::process::Command;
use std::time::{Duration, Instant};

const ADDR: &str = "10.0.0.1:7117";
/// Set in the process on b that has no adapter.
const NO_ADAPTER: &str = "FARCELL_TEST_NO_ADAPTER";
const LEARNERS: usize = 3;
const ROUNDS: i64 = 40;
const ADDS: i64 = 300;

fn machine() -> String {
    let machine = std::env::var("SOFT_ROCE").unwrap_or_default();
    if machine != "a" && machine != "b" {
        println!("NOT TESTED: outside of a pair of scripts/soft-roce");
    }
    machine
}

fn builder() -> ClientBuilder {
    Client::builder().addr(ADDR).key(key()).wait_for_server(LONG)
}

/// Gossip as GALA does it: in each round learner `me` tells every other that
/// its message is there, and waits until it has been told by every other. Then
/// it adds to the common counter.
fn learn(client: &Client, me: usize) {
    let ready = client.events("write_events", LEARNERS, LEARNERS).unwrap();
    let taken = client.events("read_events", LEARNERS, LEARNERS).unwrap();
    let sum = client.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
    let others = || (0..LEARNERS).filter(|&other| other != me);
    for _ in 0..ROUNDS {
        for other in others() {
            assert!(ready.at(me, other).unwrap().set().unwrap());
        }
        for other in others() {
            let event = ready.at(other, me).unwrap();
            assert!(event.wait_timeout(LONG).unwrap());
            assert!(event.take().unwrap());
            assert!(taken.at(me, other).unwrap().set().unwrap());
        }
        for other in others() {
            let event = taken.at(other, me).unwrap();
            assert!(event.wait_timeout(LONG).unwrap());
            assert!(event.take().unwrap());
        }
        sum.fetch_add(1).unwrap();
    }
    for _ in 0..ADDS {
        sum.fetch_add(1).unwrap();
    }
    client.counters("done", 1, 1).unwrap().at(0, 0).unwrap().fetch_add(1).unwrap();
}

/// All have learned: the total is exact.
fn check_total(client: &Client) {
    let done = client.counters("done", 1, 1).unwrap().at(0, 0).unwrap();
    let begun = Instant::now();
    while done.load().unwrap() < LEARNERS as i64 {
        assert!(begun.elapsed() < LONG, "a learner does not come to its end");
        std::thread::sleep(Duration::from_millis(50));
    }
    let sum = client.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
    assert_eq!(sum.load().unwrap(), LEARNERS as i64 * (ROUNDS + ADDS));
}

#[test]
fn the_server() {
    if machine() != "a" || !device() {
        return;
    }
    let server =
        Server::builder(key()).bind("0.0.0.0:7117").rdma(RdmaChoice::Auto).start().unwrap();
    let client = builder().transport(TransportChoice::Rdma).connect().unwrap();
    assert_eq!(client.transport().name, "rdma", "{:?}", client.transport());
    learn(&client, 0);
    check_total(&client);
    println!("the total is exact, seen from the server's machine");
    let end = client.events("end", 1, 1).unwrap().at(0, 0).unwrap();
    assert!(end.wait_timeout(LONG).unwrap());
    println!("the power is cut");
    let _ = Command::new("soft-roce-off").status();
    drop(server);
    unreachable!("without power");
}

#[test]
fn the_other_machine() {
    if machine() != "b" || std::env::var(NO_ADAPTER).is_ok() || !device() {
        return;
    }
    // A process that sees no adapter, as in a container without one.
    let own = std::env::current_exe().unwrap();
    let mut poor = Command::new("unshare")
        .args(["-m", "sh", "-c", "mount -t tmpfs none /dev/infiniband && exec \"$0\" \"$@\""])
        .arg(own)
        .args(["--exact", "the_one_without_an_adapter", "--ignored", "--nocapture"])
        .env(NO_ADAPTER, "1")
        .spawn()
        .unwrap();
    let client = builder()
        .transport(TransportChoice::Rdma)
        .reconnect_for(Duration::from_secs(3))
        .connect()
        .unwrap();
    println!("{:?}", client.transport());
    learn(&client, 1);
    check_total(&client);
    assert!(poor.wait().unwrap().success());
    assert_eq!(client.transport().name, "rdma", "{:?}", client.transport());

    // The server's machine vanishes: no connection is closed, no packet is
    // answered.
    let sum = client.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
    let never = client.events("never", 1, 1).unwrap().at(0, 0).unwrap();
    client.events("end", 1, 1).unwrap().at(0, 0).unwrap().set().unwrap();
    std::thread::scope(|s| {
        let wait = s.spawn(|| {
            let result = never.wait_timeout(LONG);
            (result, Instant::now())
        });
        let (mut before, mut slowest) = (Instant::now(), Duration::ZERO);
        let error = loop {
            let result = sum.fetch_add(1);
            slowest = slowest.max(before.elapsed());
            before = Instant::now();
            match result {
                Ok(_) => {}
                Err(Error::OutcomeUnknown { why, .. }) => {
                    println!("outcome unknown after {slowest:?}: {why}");
                    assert_eq!(client.transport().name, "tcp");
                    break sum.fetch_add(1).unwrap_err();
                }
                Err(error) => break error,
            }
        };
        println!("then {error} after {:?}", before.elapsed());
        // 1 s to find the adapter dead, 2 s for the server to confirm the end,
        // the lease to find the control connection dead, 3 s to reconnect.
        assert!(slowest < Duration::from_secs(12), "{slowest:?}");
        assert!(before.elapsed() < Duration::from_secs(40));
        let (result, _) = wait.join().unwrap();
        println!("the wait: {result:?}");
        assert!(!matches!(result, Ok(true)));
    });
}

#[test]
#[ignore = "run by the one above"]
fn the_one_without_an_adapter() {
    if std::env::var(NO_ADAPTER).is_err() {
        return;
    }
    let client = builder().connect().unwrap();
    let report = client.transport();
    println!("{report:?}");
    assert_eq!(report.name, "tcp");
    assert!(report.reasons.join(" ").contains("/dev/infiniband"), "{report:?}");
    learn(&client, 2);
}
