//! Whoever is gone is missed by those who named it, and its will is done.

use crate::set::{LONG, Set, eventually, parked};
use farcell::{Comparison, Error, Parted, WaitOptions};
use std::thread;
use std::time::Duration;

together! {
    a_wait_ends_when_a_peer_closes_and_goes_on_when_it_is_released
    a_peer_that_was_lost_before_is_missed_until_it_comes_back
    a_will_is_done_when_its_session_ends_and_not_when_it_is_released
}

fn a_wait_ends_when_a_peer_closes_and_goes_on_when_it_is_released(set: &Set) {
    let server = set.start();
    let waiter = set.client(&server, 0);
    let events = waiter.events("e", 1, 4).unwrap();
    let counter = waiter.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    for way in 0..3 {
        let peer = set.client(&server, 1);
        peer.join("p").unwrap();
        let options = WaitOptions::new().peers(["p", "q"]).timeout(LONG);
        thread::scope(|s| {
            let wait = s.spawn(|| match way {
                0 => events.at(0, 0).unwrap().wait_with_options(&options).map(drop),
                1 => events.all().wait_with_options(4, &options).map(drop),
                _ => counter.wait_until_with_options(Comparison::Ge, 1, &options).map(drop),
            });
            parked(&server, 1);
            peer.close();
            let error = wait.join().unwrap().unwrap_err();
            assert!(
                matches!(&error, Error::PeerLost { peer, how: Parted::Closed, .. } if peer == "p"),
                "{error}"
            );
        });
        assert_eq!(server.parked_waits(), 0);
    }
    let peer = set.client(&server, 1);
    peer.join("p").unwrap();
    let options = WaitOptions::new().peers(["p"]).timeout(LONG);
    let event = events.at(0, 1).unwrap();
    thread::scope(|s| {
        let wait = s.spawn(|| event.wait_with_options(&options).unwrap());
        parked(&server, 1);
        peer.release().unwrap();
        eventually("the peer has gone", || server.sessions() == 1);
        assert_eq!(server.parked_waits(), 1, "nobody is missed");
        event.set().unwrap();
        assert!(wait.join().unwrap());
    });
    assert!(matches!(peer.join("p"), Err(Error::Closed)));
}

fn a_peer_that_was_lost_before_is_missed_until_it_comes_back(set: &Set) {
    let server = set.start();
    let waiter = set.client(&server, 0);
    let event = waiter.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let soon = WaitOptions::new().peers(["p"]).timeout(Duration::from_millis(80));
    let is_missed = || matches!(event.wait_with_options(&soon), Err(Error::PeerLost { .. }));
    assert!(!event.wait_with_options(&soon).unwrap(), "who never came is not lost");
    let peer = set.client(&server, 1);
    peer.join("p").unwrap();
    peer.close();
    eventually("it is lost", is_missed);
    event.set().unwrap();
    let at_once = WaitOptions::new().peers(["p"]).timeout(Duration::ZERO);
    assert!(event.wait_with_options(&at_once).unwrap(), "what has happened counts first");
    event.clear().unwrap();
    let back = set.client(&server, 1);
    back.join("p").unwrap();
    assert!(!event.wait_with_options(&soon).unwrap());
}

fn a_will_is_done_when_its_session_ends_and_not_when_it_is_released(set: &Set) {
    let server = set.start();
    let heir = set.client(&server, 0);
    let event = heir.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    let counter = heir.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let leave = || {
        let client = set.client(&server, 1);
        let mut will = client.batch();
        will.set(&client.events("e", 1, 1).unwrap().at(0, 0).unwrap());
        will.fetch_add(&client.counters("c", 1, 1).unwrap().at(0, 0).unwrap(), 5);
        client.set_will(&will).unwrap();
        client
    };
    thread::scope(|s| {
        let wait = s.spawn(|| event.wait_timeout(LONG).unwrap());
        parked(&server, 1);
        leave().close();
        assert!(wait.join().unwrap());
    });
    eventually("all of it is done", || counter.load().unwrap() == 5);
    event.clear().unwrap();
    leave().release().unwrap();
    let withdrawn = leave();
    withdrawn.set_will(&withdrawn.batch()).unwrap();
    withdrawn.close();
    eventually("both have gone", || server.sessions() == 1);
    assert!(!event.is_set().unwrap());
    assert_eq!(counter.load().unwrap(), 5);
}
