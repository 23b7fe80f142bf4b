//! A client and its handles can be used from many threads at once.

use crate::set::Set;
use std::thread;

together! { handles_are_shared_by_many_threads }

fn handles_are_shared_by_many_threads(set: &Set) {
    let rounds = set.times(200);
    let server = set.start();
    let clients = set.some(&server);
    thread::scope(|s| {
        for client in &clients {
            let counters = client.counters("c", 1, 4).unwrap();
            let events = client.events("e", 1, 4).unwrap();
            for t in 0..4 {
                // One handle for all threads, and one for each.
                let (shared, own) = (counters.clone(), counters.at(0, t).unwrap());
                let (events, client) = (events.clone(), client.clone());
                s.spawn(move || {
                    for _ in 0..rounds {
                        own.fetch_add(1).unwrap();
                        shared.at(0, 3 - t).unwrap().fetch_add(1).unwrap();
                        let event = events.at(0, t).unwrap();
                        event.set().unwrap();
                        event.wait_timeout(std::time::Duration::from_millis(1)).unwrap();
                        event.take().unwrap();
                        // Opened again it is the same array.
                        assert_eq!(client.counters("c", 1, 4).unwrap().cols(), 4);
                    }
                });
            }
        }
    });
    let total = 2 * rounds as i64 * clients.len() as i64;
    assert_eq!(clients[0].open_counters("c").unwrap().all().snapshot().unwrap(), [total; 4]);
    let transitions = clients[0].open_events("e").unwrap().all().transitions().unwrap();
    assert!(transitions.iter().all(|&n| n > 0), "{transitions:?}");
}
