//! An event behaves as `threading.Event`, for all who use it, and no set is lost.

use crate::set::{LONG, Set, parked};
use farcell::{Client, Event};
use std::time::Duration;

alone! { set_clear_is_set_take }
together! {
    all_see_one_event
    a_set_wakes_whoever_waits
    no_pulse_is_lost_to_a_waiter
    no_pulse_is_lost_to_a_poller
    each_wait_sees_each_pulse_in_an_alternating_hand_off
    one_set_wakes_all_waits
    one_of_many_takers_gets_each_set
}

fn event(client: &Client) -> Event {
    client.events("e", 2, 3).unwrap().at(1, 2).unwrap()
}

fn set_clear_is_set_take(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let event = event(&client);
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

fn all_see_one_event(set: &Set) {
    let server = set.start();
    let clients = set.some(&server);
    let events: Vec<Event> = clients.iter().map(event).collect();
    let mut transitions = 0;
    for (i, mine) in events.iter().enumerate() {
        let theirs = &events[(i + 1) % events.len()];
        // Also where each has a guess of the word that the other has changed.
        for _ in 0..3 {
            assert!(mine.set().unwrap());
            assert!(!theirs.set().unwrap());
            assert!(events.iter().all(|e| e.is_set().unwrap()));
            assert!(theirs.clear().unwrap());
            assert!(!mine.clear().unwrap());
            assert!(events.iter().all(|e| !e.is_set().unwrap()));
            assert!(theirs.set().unwrap());
            assert!(mine.take().unwrap());
            assert!(!theirs.take().unwrap());
            transitions += 4;
            assert!(events.iter().all(|e| e.transitions().unwrap() == transitions));
        }
    }
}

fn a_set_wakes_whoever_waits(set: &Set) {
    let server = set.start();
    let (setter, waiter) = set.two(&server);
    let (signal, waits) = (event(&setter), event(&waiter));
    for round in 0..8 {
        std::thread::scope(|s| {
            let wait = s.spawn(|| waits.wait_timeout(LONG).unwrap());
            if round % 2 == 0 {
                parked(&server, 1);
            }
            assert!(signal.set().unwrap());
            // Gone at once, and not lost if the wait was parked.
            if round % 4 == 0 {
                assert!(signal.clear().unwrap());
            }
            assert!(wait.join().unwrap());
        });
        signal.clear().unwrap();
    }
    assert_eq!(server.parked_waits(), 0);
}

/// Pulses of one; the other counts sets by the transition count.
fn pulses(set: &Set, consume: impl Fn(&Event, u64) -> u64 + Sync) {
    let pulses = set.times(10_000);
    let server = set.start();
    let (setter, counter) = set.two(&server);
    let (signal, seen_by) = (event(&setter), event(&counter));
    std::thread::scope(|s| {
        let counter = s.spawn(|| {
            let (mut seen, mut sets) = (0, 0);
            while seen < 2 * pulses {
                let now = consume(&seen_by, seen);
                sets += now.div_ceil(2) - seen.div_ceil(2);
                seen = now;
            }
            sets
        });
        for _ in 0..pulses {
            assert!(signal.set().unwrap());
            assert!(signal.clear().unwrap());
        }
        assert_eq!(counter.join().unwrap(), pulses);
    });
}

fn no_pulse_is_lost_to_a_waiter(set: &Set) {
    pulses(set, |event, seen| event.wait_after(seen).unwrap());
}

fn no_pulse_is_lost_to_a_poller(set: &Set) {
    pulses(set, |event, seen| {
        loop {
            if let Some(now) = event.wait_after_with(seen, Some(Duration::ZERO), None).unwrap() {
                return now;
            }
        }
    });
}

fn each_wait_sees_each_pulse_in_an_alternating_hand_off(set: &Set) {
    let rounds = set.times(10_000);
    let server = set.start();
    let (a, b) = set.two(&server);
    let [ours, theirs] = [&a, &b].map(|client| client.events("handoff", 1, 2).unwrap());
    std::thread::scope(|s| {
        s.spawn(|| {
            let (ping, pong) = (theirs.at(0, 0).unwrap(), theirs.at(0, 1).unwrap());
            let mut seen = 0;
            for round in 0..rounds {
                // The pulse may be over long before this wait begins.
                while seen < 2 * round + 1 {
                    seen = ping.wait_after(seen).unwrap();
                }
                pong.set().unwrap();
            }
        });
        let (ping, pong) = (ours.at(0, 0).unwrap(), ours.at(0, 1).unwrap());
        for _ in 0..rounds {
            ping.set().unwrap();
            ping.clear().unwrap();
            pong.wait().unwrap();
            pong.clear().unwrap();
        }
    });
}

fn one_set_wakes_all_waits(set: &Set) {
    let server = set.start();
    let waits = set.times(1000) as usize;
    let clients: Vec<_> = (0..10.min(waits)).map(|i| set.client(&server, i + 1)).collect();
    let setter = set.client(&server, 0);
    let gate = event(&setter);
    std::thread::scope(|s| {
        let waiting: Vec<_> = (0..waits)
            .map(|i| {
                let event = event(&clients[i % clients.len()]);
                s.spawn(move || event.wait_timeout(LONG).unwrap())
            })
            .collect();
        parked(&server, waits);
        assert!(gate.set().unwrap());
        assert!(waiting.into_iter().all(|w| w.join().unwrap()));
    });
    assert_eq!(server.parked_waits(), 0);
}

fn one_of_many_takers_gets_each_set(set: &Set) {
    let jobs = set.times(500) as i64;
    let server = set.start();
    let clients: Vec<_> = (0..4).map(|i| set.client(&server, i)).collect();
    let done = clients[0].counters("done", 1, 1).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        for client in &clients {
            s.spawn(move || {
                let event = event(client);
                let done = client.counters("done", 1, 1).unwrap().at(0, 0).unwrap();
                while done.load().unwrap() < jobs {
                    if event.take().unwrap() {
                        done.fetch_add(1).unwrap();
                    }
                }
            });
        }
        let event = event(&clients[0]);
        for n in 0..jobs {
            event.set().unwrap();
            while done.load().unwrap() == n {
                std::thread::yield_now();
            }
            assert_eq!(done.load().unwrap(), n + 1);
        }
    });
}
