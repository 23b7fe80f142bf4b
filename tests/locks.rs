//! Promise: one holder at a time, in order of arrival, with tokens that only
//! grow; whoever ends without unlocking is told of, and can change nothing any
//! more.

mod common;
use common::proxy::{Cut, Proxy};
use common::{client, eventually, key, server};
use farcell::{Client, Error, HoldingKind, Kind, Server};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

fn sleep(ms: u64) {
    thread::sleep(Duration::from_millis(ms));
}

/// A guard may end in another thread than it began in.
const fn may_travel<T: Send + Sync>() {}
const _: () = may_travel::<farcell::LockGuard>();

/// A number in ordinary memory that only the lock protects, torn on purpose.
struct Torn {
    low: AtomicU64,
    high: AtomicU64,
    last_token: AtomicU64,
}

impl Torn {
    /// Adds one, badly: two who do it at once are found out.
    fn add(&self, token: u64) {
        let low = self.low.load(Ordering::Relaxed);
        thread::yield_now();
        assert_eq!(low, self.high.load(Ordering::Relaxed), "someone else is in here");
        self.low.store(low + 1, Ordering::Relaxed);
        thread::yield_now();
        self.high.store(low + 1, Ordering::Relaxed);
        assert!(self.last_token.swap(token, Ordering::Relaxed) < token, "a token did not grow");
    }
}

/// So many threads with so many clients each take the lock so often.
fn contend(connect: impl Fn() -> Client + Sync, clients: usize, threads: usize, rounds: u64) {
    let torn =
        Torn { low: AtomicU64::new(0), high: AtomicU64::new(0), last_token: AtomicU64::new(0) };
    thread::scope(|s| {
        for _ in 0..clients {
            let client = connect();
            for t in 0..threads {
                let (client, torn) = (client.clone(), &torn);
                s.spawn(move || {
                    let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
                    for i in 0..rounds {
                        let guard = match (i + t as u64) % 3 {
                            0 => lock.lock_timeout(Duration::from_secs(60)).unwrap(),
                            1 => Some(lock.lock().unwrap()),
                            _ => match lock.try_lock().unwrap() {
                                None => Some(lock.lock().unwrap()),
                                guard => guard,
                            },
                        };
                        let guard = guard.expect("a minute is enough");
                        torn.add(guard.token());
                        guard.unlock().unwrap();
                    }
                });
            }
        }
    });
    let all = (clients * threads) as u64 * rounds;
    assert_eq!(torn.low.load(Ordering::Relaxed), all);
    assert_eq!(torn.last_token.load(Ordering::Relaxed), all, "each holder has one token");
}

#[test]
fn no_two_hold_it_and_none_waits_for_ever_while_connections_are_cut() {
    let server = server().start().unwrap();
    let cuts = (1..120).map(|i| {
        if i % 2 == 0 { Cut::Up(211 * i % 3001 + 150) } else { Cut::Down(307 * i % 3001 + 150) }
    });
    let proxy = Proxy::start(server.local_addrs()[0], cuts.collect());
    let through = || {
        let builder = Client::builder().addr(proxy.addr()).key(key());
        builder.wait_for_server(Duration::from_secs(10)).connect().unwrap()
    };
    contend(through, 4, 2, 60);
    assert!(proxy.connections() > 20, "{} connections", proxy.connections());
    eventually("nothing is left", || server.parked_waits() == 0);
}

#[test]
fn what_times_out_or_is_cancelled_while_cut_off_holds_nothing() {
    let server = server().start().unwrap();
    let cuts = (1..200).map(|i| Cut::Down(150 + 53 * i % 400)).collect();
    let proxy = Proxy::start(server.local_addrs()[0], cuts);
    let impatient = Client::builder()
        .addr(proxy.addr())
        .key(key())
        .wait_for_server(Duration::from_secs(10))
        .connect()
        .unwrap();
    let lock = impatient.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let other = client(&server).connect().unwrap();
    let theirs = other.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    for i in 0..60 {
        let held = theirs.lock().unwrap();
        thread::scope(|s| {
            s.spawn(|| {
                let time = Duration::from_millis(1 + i % 5);
                drop(lock.lock_timeout(time).unwrap());
            });
            sleep(1 + (i / 2) % 4);
            held.unlock().unwrap();
        });
    }
    // Whatever was granted at the last moment has come back.
    let guard = theirs.lock_timeout(Duration::from_secs(5)).unwrap();
    assert!(guard.is_some_and(|guard| !guard.was_abandoned()));
}

/// A client that the server hears no more of: its bytes do not get through,
/// and its connection does not end.
fn silenced(server: &Server) -> (Client, Arc<Proxy>) {
    let proxy = Arc::new(Proxy::start(server.local_addrs()[0], Vec::new()));
    (Client::builder().addr(proxy.addr()).key(key()).connect().unwrap(), proxy)
}

#[test]
fn a_holder_whose_lease_is_over_can_change_nothing() {
    let server = server().lease(Duration::from_millis(300)).start().unwrap();
    let (lost, proxy) = silenced(&server);
    let guard = lost.locks("l", 1, 1).unwrap().at(0, 0).unwrap().lock().unwrap();
    let b = client(&server).connect().unwrap();
    let lock = b.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    proxy.hold(true);
    let begun = Instant::now();
    let got = lock.lock_timeout(Duration::from_secs(10)).unwrap().unwrap();
    let took = begun.elapsed();
    assert!(took < Duration::from_millis(300 + 250 + 500), "{took:?}");
    assert!(got.was_abandoned());
    proxy.hold(false);
    let error = guard.unlock().unwrap_err();
    assert!(matches!(error, Error::LeaseLost { .. }), "{error}");
    assert!(error.to_string().contains("lock \"l\" (0, 0), token 1"), "{error}");
    got.check().unwrap();
    assert_eq!(lock.token().unwrap(), 2);
    // With a new session it gets it as anyone else.
    let again = lost.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    assert!(again.try_lock().unwrap().is_none());
    got.unlock().unwrap();
    assert_eq!(again.lock().unwrap().token(), 3);
}

#[test]
fn one_that_queues_goes_on_with_its_next_session() {
    let server = server().lease(Duration::from_millis(300)).start().unwrap();
    let (away, proxy) = silenced(&server);
    let lock = client(&server).connect().unwrap().locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let guard = lock.lock().unwrap();
    let theirs = away.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    thread::scope(|s| {
        let (told, heard) = mpsc::channel();
        s.spawn(move || {
            let guard = theirs.lock().unwrap();
            told.send(guard.token()).unwrap();
            guard.unlock().unwrap();
        });
        eventually("it queues", || server.parked_waits() == 1);
        proxy.hold(true);
        eventually("its lease is over", || server.parked_waits() == 0);
        proxy.hold(false);
        eventually("it queues again", || server.parked_waits() == 1);
        guard.unlock().unwrap();
        assert_eq!(heard.recv_timeout(Duration::from_secs(10)).unwrap(), 2);
    });
}

#[test]
fn a_time_is_a_time_also_without_a_connection() {
    let server = server().start().unwrap();
    let proxy = Proxy::start(server.local_addrs()[0], vec![Cut::Never]);
    let away = Client::builder().addr(proxy.addr()).key(key()).connect().unwrap();
    let lock = away.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    let semaphore = away.semaphores("s", 1, 1, 1, 1).unwrap().at(0, 0).unwrap();
    drop(proxy);
    server.stop().unwrap();
    eventually("the connection is gone", || !away.is_connected());
    let begun = Instant::now();
    assert!(lock.lock_timeout(Duration::from_millis(100)).unwrap().is_none());
    assert!(!semaphore.acquire_timeout(Duration::from_millis(100)).unwrap());
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn locks_are_no_counters_and_not_for_those_who_only_read() {
    let read_only = farcell::Key::new(*b"to look, not to touch").unwrap();
    let server = server().read_only_key(read_only.clone()).start().unwrap();
    let a = client(&server).connect().unwrap();
    a.locks("l", 1, 1).unwrap();
    let kind = |e| matches!(e, Error::WrongKind { kind: Kind::Lock, .. });
    assert!(kind(a.open_counters("l").unwrap_err()));
    assert!(matches!(a.counters("l", 1, 1).unwrap_err(), Error::ArrayMismatch { .. }));
    let reader = Client::builder().addr(server.address()).key(read_only).connect().unwrap();
    let lock = reader.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
    assert!(matches!(lock.try_lock().unwrap_err(), Error::ReadOnly { .. }));
    assert!(!lock.is_locked().unwrap());
    assert!(matches!(reader.join("p"), Err(Error::ReadOnly { .. })));
}

#[test]
fn what_is_held_and_queued_for_is_listed() {
    let server = server().start().unwrap();
    let a = client(&server).connect().unwrap();
    a.join("holder").unwrap();
    let locks = a.locks("l", 3, 40).unwrap();
    let _guard = locks.at(2, 37).unwrap().lock().unwrap();
    let b = client(&server).connect().unwrap();
    let theirs = b.locks("l", 3, 40).unwrap().at(2, 37).unwrap();
    thread::scope(|s| {
        let waiter = s.spawn(|| theirs.lock_timeout(Duration::from_secs(20)).unwrap().is_some());
        eventually("it queues", || server.parked_waits() == 1);
        let members = a.members().unwrap();
        assert_eq!(members.len(), 2);
        assert_eq!(members[0].name.as_deref(), Some("holder"));
        assert_eq!((members[0].seat, members[0].transport), (a.seat(), a.transport().name));
        let held = &members[0].holds[0];
        assert_eq!(held.what, HoldingKind::Lock { token: 1 });
        assert_eq!((held.name.as_str(), held.row, held.col), ("l", 2, 37));
        let queued = &members[1].holds[0];
        assert_eq!((members[1].name.as_deref(), queued.what), (None, HoldingKind::Queue));
        assert_eq!((queued.row, queued.col), (2, 37));
        drop(_guard);
        assert!(waiter.join().unwrap());
    });
}
