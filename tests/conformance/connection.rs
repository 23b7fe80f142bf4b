//! A connection that is cut comes back, and what was done through it is done once.

use crate::common::key;
use crate::common::proxy::{Cut, Proxy};
use crate::set::{LONG, Set, eventually, parked};
use farcell::{Client, Error, Server};
use std::time::Duration;

alone! {
    cuts_lose_and_double_nothing
    a_wait_goes_on_through_cuts
    a_client_gives_up_after_its_time
    a_server_that_stops_says_so
}
together! { what_one_does_through_cuts_is_seen_once_by_others }

/// Client number `i`, whose connections to the server go through a proxy.
fn through(set: &Set, proxy: &Proxy, i: usize) -> Client {
    let builder = Client::builder().addr(proxy.addr()).key(key());
    set.connect(builder.wait_for_server(LONG), i)
}

/// Cuts that fall everywhere behind the bytes with which the transport begins.
fn cuts(most: usize) -> Vec<Cut> {
    let cut = |i: usize| {
        if i.is_multiple_of(2) {
            Cut::Up(211 * i % 4001 + 150)
        } else {
            Cut::Down(307 * i % 4001 + 150)
        }
    };
    // The first one is whole: a transport may want to look around.
    std::iter::once(Cut::Never).chain((1..most).map(cut)).collect()
}

/// Cuts all connections there are, again and again, by a proxy that goes and comes.
fn proxied(server: &Server, most: usize) -> Proxy {
    Proxy::start(server.local_addrs()[0], cuts(most))
}

fn cuts_lose_and_double_nothing(set: &Set) {
    let rounds = set.times(100).max(10);
    let server = set.start();
    let proxy = proxied(&server, 60);
    let client = through(set, &proxy, 0);
    let counters = client.counters("c", 1, 3).unwrap();
    let events = client.events("e", 1, 4).unwrap();
    proxy.cut_all();
    std::thread::scope(|s| {
        for t in 0..4 {
            let (counters, events, client) = (&counters, &events, &client);
            s.spawn(move || {
                let event = events.at(0, t).unwrap();
                for i in 0..rounds {
                    counters.at(0, 0).unwrap().fetch_add(1).unwrap();
                    let mut batch = client.batch();
                    for _ in 0..5 {
                        batch.fetch_add(&counters.at(0, 1).unwrap(), 3);
                    }
                    batch.run().unwrap();
                    // Alone on its event, so each change is one.
                    assert!(event.set().unwrap(), "round {i}");
                    assert!(event.wait_timeout(LONG).unwrap());
                    assert!(event.take().unwrap(), "round {i}");
                }
            });
        }
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(10));
            proxy.cut_all();
        }
    });
    let done = 4 * rounds as i64;
    assert_eq!(counters.all().snapshot().unwrap(), [done, 15 * done, 0]);
    assert_eq!(events.all().transitions().unwrap(), [2 * rounds; 4]);
    assert!(proxy.connections() > 1, "it was never cut");
}

fn what_one_does_through_cuts_is_seen_once_by_others(set: &Set) {
    let rounds = set.times(200).max(20) as i64;
    let server = set.start();
    let proxy = proxied(&server, 40);
    let (away, other) = (through(set, &proxy, 0), set.client(&server, 1));
    let [ours, theirs] = [&away, &other].map(|c| c.counters("c", 1, 2).unwrap());
    proxy.cut_all();
    std::thread::scope(|s| {
        for cells in [&ours, &theirs] {
            s.spawn(move || {
                let (a, b) = (cells.at(0, 0).unwrap(), cells.at(0, 1).unwrap());
                for _ in 0..rounds {
                    a.fetch_add(1).unwrap();
                    let mut seen = b.load().unwrap();
                    while let Err(found) = b.compare_exchange(seen, seen + 1).unwrap() {
                        seen = found;
                    }
                }
            });
        }
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(5));
            proxy.cut_all();
        }
    });
    assert_eq!(theirs.all().snapshot().unwrap(), [2 * rounds; 2]);
}

fn a_wait_goes_on_through_cuts(set: &Set) {
    let server = set.start();
    let proxy = Proxy::start(server.local_addrs()[0], Vec::new());
    let (away, setter) = (through(set, &proxy, 0), set.client(&server, 0));
    let event = setter.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let mine = away.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    for _ in 0..3 {
        std::thread::scope(|s| {
            let wait = s.spawn(|| mine.wait_timeout(LONG).unwrap());
            parked(&server, 1);
            proxy.cut_all();
            // While it may be away the event is set and cleared.
            event.set().unwrap();
            event.clear().unwrap();
            assert!(wait.join().unwrap());
        });
    }
    parked(&server, 0);
    eventually("it has come back each time", || proxy.connections() > 3);
}

fn a_client_gives_up_after_its_time(set: &Set) {
    let server = set.start();
    let builder = Client::builder().addr(server.address()).key(key());
    let client = set.connect(builder.reconnect_for(Duration::from_millis(300)), 0);
    let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    counter.fetch_add(1).unwrap();
    drop(server);
    let error = event.wait().unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. } | Error::ServerGoingAway { .. }), "{error}");
    let error = counter.fetch_add(1).unwrap_err();
    let one_sided = client.transport().reasons.iter().any(|why| why.contains("rdma was lost"));
    assert!(
        matches!(error, Error::Unreachable { .. })
            || one_sided && matches!(error, Error::OutcomeUnknown { .. }),
        "never sent, so it did not happen: {error}"
    );
    let error = counter.load().unwrap_err();
    assert!(error.to_string().contains("no connection for 0.3 s"), "{error}");
    assert!(matches!(event.wait_timeout(Duration::from_millis(50)), Ok(false)));
}

fn a_server_that_stops_says_so(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        let wait = s.spawn(|| event.wait());
        parked(&server, 1);
        server.stop().unwrap();
        let error = wait.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("server going away"), "{error}");
    });
    client.close();
    assert!(matches!(event.set(), Err(Error::Closed)));
}
