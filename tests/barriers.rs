//! Promise: as many as a barrier has parties pass it together, again and again;
//! a party that dies breaks it, with its name, and a reset makes it whole.

mod common;
use common::proxy::{Cut, Proxy};
use common::{client, eventually, key, server};
use farcell::{Barrier, Client, Error, HoldingKind, Server, TransportChoice, WaitOptions};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(30);

fn barrier(client: &Client, parties: usize) -> Barrier {
    client.barriers("b", 2, 3, parties).unwrap().at(1, 2).unwrap()
}

fn connect(server: &Server) -> Client {
    client(server).connect().unwrap()
}

/// Who broke it and why, as the error says.
fn breach(result: Result<farcell::BarrierWait, Error>) -> (Option<String>, String) {
    match result {
        Err(Error::BarrierBroken { name, row, col, by, why }) => {
            assert_eq!((name.as_str(), row, col), ("b", 1, 2));
            (by, why)
        }
        other => panic!("{other:?}"),
    }
}

/// All parties go through it so often, each a client of its own, and nobody is
/// ever ahead.
fn rounds(connect: impl Fn() -> Client + Sync, parties: usize, rounds: u64) {
    let arrived = AtomicU64::new(0);
    let seen = Mutex::new(vec![Vec::new(); rounds as usize]);
    thread::scope(|s| {
        for _ in 0..parties {
            s.spawn(|| {
                let client = connect();
                let barrier = barrier(&client, parties);
                assert_eq!(barrier.parties(), parties);
                for round in 0..rounds {
                    arrived.fetch_add(1, Ordering::Relaxed);
                    let passed = barrier.wait().unwrap();
                    let here = arrived.load(Ordering::Relaxed);
                    assert!(here >= (round + 1) * parties as u64, "somebody was left behind");
                    assert_eq!(passed.generation(), round);
                    assert_eq!(passed.is_last(), passed.index() == parties - 1);
                    seen.lock().unwrap()[round as usize].push(passed.index());
                }
                client.release().unwrap();
            });
        }
    });
    for mut indices in seen.into_inner().unwrap() {
        indices.sort_unstable();
        assert_eq!(indices, (0..parties).collect::<Vec<_>>());
    }
}

#[test]
fn all_pass_it_together_again_and_again() {
    let server = server().start().unwrap();
    rounds(|| connect(&server), 5, 60);
    assert_eq!(server.parked_waits(), 0);
    let watcher = connect(&server);
    assert!(!barrier(&watcher, 5).is_broken().unwrap());
    assert_eq!(barrier(&watcher, 5).n_waiting().unwrap(), 0);
}

#[test]
fn cut_connections_let_nobody_through_and_keep_nobody() {
    let server = server().start().unwrap();
    let cuts = (1..60).map(|i| {
        if i % 2 == 0 { Cut::Up(211 * i % 2001 + 250) } else { Cut::Down(307 * i % 2001 + 250) }
    });
    let proxy = Proxy::start(server.local_addrs()[0], cuts.collect());
    let through = || {
        let builder =
            Client::builder().addr(proxy.addr()).key(key()).transport(TransportChoice::Tcp);
        builder.wait_for_server(Duration::from_secs(10)).connect().unwrap()
    };
    rounds(through, 4, 40);
    assert!(proxy.connections() > 10, "{} connections", proxy.connections());
}

#[test]
fn a_party_whose_lease_is_over_breaks_it_by_name() {
    let server = server().lease(Duration::from_millis(300)).start().unwrap();
    let proxy = Proxy::start(server.local_addrs()[0], Vec::new());
    let lost = Client::builder().addr(proxy.addr()).key(key()).connect().unwrap();
    lost.join("rank 1").unwrap();
    let other = connect(&server);
    let (theirs, ours) = (barrier(&lost, 2), barrier(&other, 2));
    thread::scope(|s| {
        s.spawn(|| theirs.wait().unwrap());
        ours.wait().unwrap();
    });
    // It is listed as a party, by whoever looks.
    let members = other.members().unwrap();
    let rank = members.iter().find(|m| m.name.as_deref() == Some("rank 1")).unwrap();
    assert_eq!(rank.holds[0].what, HoldingKind::Party);
    assert_eq!((rank.holds[0].row, rank.holds[0].col), (1, 2));
    proxy.hold(true);
    let begun = Instant::now();
    let (by, why) = breach(ours.wait_timeout(LONG));
    assert!(begun.elapsed() < Duration::from_millis(300 + 250 + 500), "{:?}", begun.elapsed());
    assert_eq!(by.as_deref(), Some("rank 1"));
    assert!(why.contains("\"rank 1\" is lost"), "{why}");
    assert_eq!(breach(ours.wait()).0.as_deref(), Some("rank 1"), "also for those who come");
    proxy.hold(false);
    assert_eq!(breach(theirs.wait()).0.as_deref(), Some("rank 1"), "it learns of it, too");
    ours.reset().unwrap();
    thread::scope(|s| {
        s.spawn(|| theirs.wait().unwrap());
        ours.wait().unwrap();
    });
}

#[test]
fn one_that_waits_when_its_lease_is_over_learns_it() {
    let server = server().lease(Duration::from_millis(300)).start().unwrap();
    let proxy = Proxy::start(server.local_addrs()[0], Vec::new());
    let away = Client::builder().addr(proxy.addr()).key(key()).connect().unwrap();
    let theirs = barrier(&away, 2);
    thread::scope(|s| {
        let waiter = s.spawn(|| theirs.wait());
        eventually("it waits", || server.parked_waits() == 1);
        proxy.hold(true);
        eventually("its lease is over", || server.parked_waits() == 0);
        proxy.hold(false);
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::LeaseLost { .. }), "{error}");
    });
    let other = connect(&server);
    let (by, _) = breach(barrier(&other, 2).wait());
    assert!(by.is_some_and(|by| by.starts_with("session ")));
}

#[test]
fn who_leaves_in_peace_breaks_nothing_and_who_is_waited_for_breaks_it() {
    let server = server().start().unwrap();
    let (a, b) = (connect(&server), connect(&server));
    b.join("b").unwrap();
    thread::scope(|s| {
        s.spawn(|| barrier(&a, 2).wait().unwrap());
        barrier(&b, 2).wait().unwrap();
    });
    let c = connect(&server);
    thread::scope(|s| {
        s.spawn(|| barrier(&a, 2).wait().unwrap());
        barrier(&c, 2).wait().unwrap();
    });
    // Nobody waits, and nobody misses it.
    c.close();
    let watcher = connect(&server);
    eventually("it has gone", || server.sessions() == 3);
    assert!(!barrier(&watcher, 2).is_broken().unwrap());
    thread::scope(|s| {
        let waiter = s.spawn(|| barrier(&a, 2).wait());
        eventually("a waits", || server.parked_waits() == 1);
        b.release().unwrap();
        let (by, why) = breach(waiter.join().unwrap());
        assert_eq!(by.as_deref(), Some("b"));
        assert!(why.contains("has left while others waited"), "{why}");
    });
}

#[test]
fn a_wait_at_a_barrier_can_name_peers() {
    let server = server().start().unwrap();
    let (a, b) = (connect(&server), connect(&server));
    b.join("late").unwrap();
    let options = WaitOptions::new().peers(["late"]);
    thread::scope(|s| {
        let waiter = s.spawn(|| barrier(&a, 2).wait_with_options(&options));
        eventually("a waits", || server.parked_waits() == 1);
        // Never a party of it.
        b.close();
        let error = waiter.join().unwrap().unwrap_err();
        assert!(matches!(&error, Error::PeerLost { peer, .. } if peer == "late"), "{error}");
    });
}
