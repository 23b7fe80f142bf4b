//! Promise: an operation that returned `Ok` happened exactly once, wherever
//! the connection is cut.

mod common;
use common::proxy::{Cut, Proxy};
use common::{client, eventually, key, server};
use farcell::{Client, Counter, CounterArray, Error, Server, TransportChoice};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// 200 operations: 40 alone, 160 in 20 batches of 8.
const OPERATIONS: i64 = 200;

fn exchange(client: &Client, counter: &Counter) {
    let mut next = 0;
    for _ in 0..20 {
        for _ in 0..2 {
            assert_eq!(counter.fetch_add(1).unwrap(), next);
            next += 1;
        }
        let mut batch = client.batch();
        for _ in 0..8 {
            batch.fetch_add(counter, 1);
        }
        let found: Vec<i64> = batch.run().unwrap().iter().map(|o| o.value()).collect();
        assert_eq!(found, (next..next + 8).collect::<Vec<_>>());
        next += 8;
    }
    assert_eq!(next, OPERATIONS);
}

fn through(proxy: &Proxy) -> Client {
    Client::builder()
        .addr(proxy.addr())
        // Past the proxy there is nothing to cut.
        .transport(TransportChoice::Tcp)
        .key(key())
        .wait_for_server(Duration::from_secs(10))
        .connect()
        .unwrap()
}

/// Runs the exchange with these cuts; every answer in it is checked, and so is
/// what remains on the server.
fn run(server: &Server, counters: &CounterArray, cell: usize, cuts: Vec<Cut>) -> (usize, usize) {
    let proxy = Proxy::start(server.local_addrs()[0], cuts);
    let client = through(&proxy);
    let mine = client.counters("c", counters.rows(), counters.cols()).unwrap();
    let counter = mine.flat(cell).unwrap();
    exchange(&client, &counter);
    client.close();
    assert_eq!(counters.flat(cell).unwrap().swap(0).unwrap(), OPERATIONS);
    proxy.forwarded()
}

/// Runs one exchange for each of these cuts, on two threads.
fn all(cuts: &[Cut]) {
    let server = server().start().unwrap();
    let watcher = client(&server).connect().unwrap();
    let counters = watcher.counters("c", 1, 2).unwrap();
    let next = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for cell in 0..2 {
            let (next, counters, server) = (&next, &counters, &server);
            s.spawn(move || {
                while let Some(cut) = cuts.get(next.fetch_add(1, Ordering::Relaxed)) {
                    run(server, counters, cell, vec![*cut]);
                }
            });
        }
    });
    assert_eq!(server.parked_waits(), 0);
}

/// Bytes of a whole exchange, handshake and all, from and to the client.
fn lengths() -> (usize, usize) {
    let server = server().start().unwrap();
    let watcher = client(&server).connect().unwrap();
    let counters = watcher.counters("c", 1, 2).unwrap();
    let (up, down) = run(&server, &counters, 0, Vec::new());
    assert!((5000..9000).contains(&up), "{up} bytes from the client");
    assert!((2500..5000).contains(&down), "{down} bytes to the client");
    (up, down)
}

#[test]
fn every_cut_in_what_the_client_sends() {
    let (up, _) = lengths();
    all(&(0..=up).map(Cut::Up).collect::<Vec<_>>());
}

#[test]
fn every_cut_in_what_the_server_sends() {
    let (_, down) = lengths();
    all(&(0..=down).map(Cut::Down).collect::<Vec<_>>());
}

#[test]
fn many_cuts_in_a_row_under_many_threads() {
    let server = server().start().unwrap();
    // Primes, so that cuts fall everywhere.
    let cuts = (1..200).map(|i| {
        if i % 2 == 0 { Cut::Up(211 * i % 4001 + 150) } else { Cut::Down(307 * i % 4001 + 150) }
    });
    let proxy = Proxy::start(server.local_addrs()[0], cuts.collect());
    let client = through(&proxy);
    let counters = client.counters("c", 1, 3).unwrap();
    let events = client.events("e", 1, 8).unwrap();
    std::thread::scope(|s| {
        for t in 0..8 {
            let (counters, events, client) = (&counters, &events, &client);
            s.spawn(move || {
                let event = events.at(0, t).unwrap();
                for i in 0..100 {
                    counters.at(0, 0).unwrap().fetch_add(1).unwrap();
                    let mut batch = client.batch();
                    for _ in 0..5 {
                        batch.fetch_add(&counters.at(0, 1).unwrap(), 3);
                    }
                    batch.run().unwrap();
                    // Alone on its event, so each change is one.
                    assert!(event.set().unwrap(), "round {i}");
                    assert!(event.wait_timeout(Duration::from_secs(20)).unwrap());
                    assert!(event.take().unwrap(), "round {i}");
                }
            });
        }
    });
    assert_eq!(counters.at(0, 0).unwrap().load().unwrap(), 800);
    assert_eq!(counters.at(0, 1).unwrap().load().unwrap(), 12_000);
    assert_eq!(events.all().transitions().unwrap(), [200; 8]);
    assert!(proxy.connections() > 20, "{} connections", proxy.connections());
}

#[test]
fn a_wait_goes_on_through_cuts_and_keeps_its_start() {
    let server = server().start().unwrap();
    let setter = client(&server).connect().unwrap();
    let event = setter.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    // The wait is on the server; then the connection goes, and while it is
    // away the event is set and cleared. Each cut comes behind the frame of
    // the wait: greeting, hello, open and wait are 200 bytes or so.
    for bytes in [230, 235, 240, 260] {
        let proxy = Proxy::start(server.local_addrs()[0], vec![Cut::Down(bytes)]);
        let client = through(&proxy);
        let mine = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
        std::thread::scope(|s| {
            let wait = s.spawn(|| mine.wait_timeout(Duration::from_secs(20)).unwrap());
            eventually("it is parked", || server.parked_waits() == 1);
            // More traffic on the same connection makes it reach its cut.
            let other = client.counters("n", 1, 1).unwrap().at(0, 0).unwrap();
            event.set().unwrap();
            event.clear().unwrap();
            for _ in 0..20 {
                other.fetch_add(1).unwrap();
            }
            assert!(wait.join().unwrap(), "cut after {bytes} bytes");
        });
        assert_eq!(proxy.connections(), 2);
    }
}

#[test]
fn a_client_gives_up_after_its_time_and_says_what_is_known() {
    let server = server().start().unwrap();
    let proxy = Proxy::start(server.local_addrs()[0], vec![Cut::Never]);
    let client = Client::builder()
        .addr(proxy.addr())
        // Past the proxy there is nothing to cut.
        .transport(TransportChoice::Tcp)
        .key(key())
        .reconnect_for(Duration::from_millis(300))
        .connect()
        .unwrap();
    let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    counter.fetch_add(1).unwrap();
    drop(server);
    // Told by the server itself: nothing of this has happened.
    let error = event.wait().unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. } | Error::ServerGoingAway { .. }), "{error}");
    let error = counter.fetch_add(1).unwrap_err();
    assert!(
        matches!(error, Error::Unreachable { .. }),
        "never sent, so it did not happen: {error}"
    );
    let error = counter.load().unwrap_err();
    assert!(error.to_string().contains("no connection for 0.3 s"), "{error}");
    assert!(matches!(event.wait_timeout(Duration::from_millis(50)), Ok(false)));
}

#[test]
fn a_server_that_only_shakes_hands_is_given_up() {
    let server = server().start().unwrap();
    // The handshake is 128 bytes from the server; what comes behind is cut.
    let cuts = std::iter::repeat_n(Cut::Down(128), 10_000).collect();
    let proxy = Proxy::start(server.local_addrs()[0], cuts);
    let client = Client::builder()
        .addr(proxy.addr())
        // Past the proxy there is nothing to cut.
        .transport(TransportChoice::Tcp)
        .key(key())
        .reconnect_for(Duration::from_millis(500))
        .connect()
        .unwrap();
    let begun = std::time::Instant::now();
    let error = client.list().unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}
