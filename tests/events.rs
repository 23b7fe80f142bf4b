//! Promise: an event behaves as `threading.Event`, and no set is ever lost.

mod common;
use common::{client, eventually, server};
use farcell::{Canceller, Error};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);

#[test]
fn set_clear_is_set_take() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let event = client.events("e", 2, 3).unwrap().at(1, 2).unwrap();
    assert!(!event.is_set().unwrap());
    assert!(!event.clear().unwrap(), "clearing a clear event changes nothing");
    assert!(event.set().unwrap());
    assert!(!event.set().unwrap(), "setting a set event changes nothing");
    assert!(event.is_set().unwrap());
    assert_eq!(event.transitions().unwrap(), 1);
    assert!(event.take().unwrap());
    assert!(!event.take().unwrap());
    assert!(!event.is_set().unwrap());
    assert_eq!(event.transitions().unwrap(), 2);
}

#[test]
fn wait_returns_as_threading_event_does() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let event = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    assert!(!event.wait_timeout(Duration::ZERO).unwrap());
    let begun = Instant::now();
    assert!(!event.wait_timeout(Duration::from_millis(80)).unwrap());
    assert!(begun.elapsed() >= Duration::from_millis(80));
    assert!(begun.elapsed() < Duration::from_secs(5));
    event.set().unwrap();
    assert!(event.wait_timeout(Duration::ZERO).unwrap());
    assert!(event.wait_timeout(LONG).unwrap());
    event.wait().unwrap();
    assert!(event.is_set().unwrap(), "a wait leaves the event set");
}

#[test]
fn a_set_wakes_a_waiter_of_another_client() {
    let server = server().start().unwrap();
    let setter = client(&server).connect().unwrap();
    let event = setter.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        let waiter = s.spawn(|| {
            let client = client(&server).connect().unwrap();
            client.open_events("e").unwrap().at(0, 0).unwrap().wait_timeout(LONG).unwrap()
        });
        eventually("the wait is parked", || server.parked_waits() == 1);
        event.set().unwrap();
        assert!(waiter.join().unwrap());
    });
    assert_eq!(server.parked_waits(), 0);
}

/// 10,000 pulses; the consumer counts sets by the transition count.
fn pulses(consume: impl Fn(&farcell::Event, u64) -> u64 + Sync) {
    const PULSES: u64 = 10_000;
    let server = server().start().unwrap();
    let setter = client(&server).connect().unwrap();
    let event = setter.events("pulse", 1, 1).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        let counter = s.spawn(|| {
            let client = client(&server).connect().unwrap();
            let event = client.events("pulse", 1, 1).unwrap().at(0, 0).unwrap();
            let (mut seen, mut sets) = (0, 0);
            while seen < 2 * PULSES {
                let now = consume(&event, seen);
                sets += now.div_ceil(2) - seen.div_ceil(2);
                seen = now;
            }
            sets
        });
        for _ in 0..PULSES {
            assert!(event.set().unwrap());
            assert!(event.clear().unwrap());
        }
        assert_eq!(counter.join().unwrap(), PULSES);
    });
}

#[test]
fn no_pulse_is_lost_to_a_waiter() {
    pulses(|event, seen| event.wait_after(seen).unwrap());
}

#[test]
fn no_pulse_is_lost_to_a_poller() {
    pulses(|event, seen| {
        loop {
            if let Some(now) = event.wait_after_with(seen, Some(Duration::ZERO), None).unwrap() {
                return now;
            }
        }
    });
}

#[test]
fn each_wait_sees_each_pulse_in_an_alternating_hand_off() {
    const ROUNDS: usize = 10_000;
    let server = server().start().unwrap();
    let a = client(&server).connect().unwrap();
    let events = a.events("handoff", 1, 2).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            let b = client(&server).connect().unwrap();
            let events = b.events("handoff", 1, 2).unwrap();
            let (ping, pong) = (events.at(0, 0).unwrap(), events.at(0, 1).unwrap());
            let mut seen = 0;
            for round in 0..ROUNDS as u64 {
                // The pulse may be over long before this wait begins.
                while seen < 2 * round + 1 {
                    seen = ping.wait_after(seen).unwrap();
                }
                pong.set().unwrap();
            }
        });
        let (ping, pong) = (events.at(0, 0).unwrap(), events.at(0, 1).unwrap());
        for _ in 0..ROUNDS {
            ping.set().unwrap();
            ping.clear().unwrap();
            pong.wait().unwrap();
            pong.clear().unwrap();
        }
    });
}

#[test]
fn one_set_wakes_a_thousand_waits() {
    let server = server().start().unwrap();
    let clients: Vec<_> = (0..10).map(|_| client(&server).connect().unwrap()).collect();
    let setter = client(&server).connect().unwrap();
    let event = setter.events("gate", 1, 1).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        let waits: Vec<_> = (0..1000)
            .map(|i| {
                let event = clients[i % 10].events("gate", 1, 1).unwrap().at(0, 0).unwrap();
                s.spawn(move || event.wait_timeout(LONG).unwrap())
            })
            .collect();
        eventually("all are parked", || server.parked_waits() == 1000);
        assert!(event.set().unwrap());
        assert!(waits.into_iter().all(|w| w.join().unwrap()));
    });
    assert_eq!(server.parked_waits(), 0);
}

#[test]
fn a_wait_that_ends_early_leaves_no_trace() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let events = client.events("e", 4, 4).unwrap();
    let event = events.at(0, 0).unwrap();
    for _ in 0..20 {
        assert!(!event.wait_timeout(Duration::from_millis(1)).unwrap());
        assert!(!events.all().wait_any(Some(Duration::from_millis(1))).unwrap().is_satisfied());
    }
    let canceller = Canceller::new();
    std::thread::scope(|s| {
        let wait = s.spawn(|| events.all().wait_with(3, None, Some(&canceller)));
        eventually("the wait is parked", || server.parked_waits() == 1);
        canceller.cancel();
        assert!(matches!(wait.join().unwrap(), Err(Error::Cancelled)));
    });
    assert!(matches!(event.wait_with(None, Some(&canceller)), Err(Error::Cancelled)));
    assert_eq!(client.info().unwrap().parked_waits, 0);
    assert_eq!(events.all().waiters().unwrap(), [0; 16]);
    // A client that vanishes takes its waits along when its lease is over;
    // one that says goodbye at once.
    let other = common::client(&server).connect().unwrap();
    let waiting = other.events("e", 4, 4).unwrap().at(3, 3).unwrap();
    let thread = std::thread::spawn(move || waiting.wait());
    eventually("it waits", || events.at(3, 3).is_ok() && server.parked_waits() == 1);
    other.close();
    assert!(matches!(thread.join().unwrap(), Err(Error::Closed)));
    eventually("nothing is parked", || server.parked_waits() == 0);
}

#[test]
fn one_of_many_takers_gets_each_set() {
    let server = server().start().unwrap();
    let setter = client(&server).connect().unwrap();
    let event = setter.events("job", 1, 1).unwrap().at(0, 0).unwrap();
    let done = setter.counters("done", 1, 1).unwrap().at(0, 0).unwrap();
    const JOBS: i64 = 500;
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                let client = client(&server).connect().unwrap();
                let event = client.events("job", 1, 1).unwrap().at(0, 0).unwrap();
                let done = client.counters("done", 1, 1).unwrap().at(0, 0).unwrap();
                while done.load().unwrap() < JOBS {
                    if event.take().unwrap() {
                        done.fetch_add(1).unwrap();
                    }
                }
            });
        }
        for n in 0..JOBS {
            event.set().unwrap();
            while done.load().unwrap() == n {}
            assert_eq!(done.load().unwrap(), n + 1);
        }
    });
}
