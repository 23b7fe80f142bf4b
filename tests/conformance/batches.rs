//! A batch is done in order, and what is refused changes nothing.

use crate::set::Set;
use farcell::{Domain, Error};

alone! { a_batch_is_done_in_order a_batch_of_another_client_is_refused many_threads_with_long_batches }
together! { batches_of_many_on_one_cell one_that_is_refused_changes_nothing }

fn a_batch_is_done_in_order(set: &Set) {
    let server = set.start();
    let client = set.client(&server, 0);
    let (e, c) = (client.events("e", 1, 2).unwrap(), client.counters("c", 1, 2).unwrap());
    let (e, c) = (e.at(0, 1).unwrap(), c.at(0, 1).unwrap());
    let mut batch = client.batch();
    batch.set(&e).is_set(&e).take(&e).take(&e).clear(&e);
    batch.store(&c, -5).fetch_add(&c, 7).compare_exchange(&c, 2, 12).swap(&c, 9);
    batch.fetch_or(&c, 6).fetch_and(&c, 3).fetch_xor(&c, 1).load(&c);
    let found = batch.run().unwrap();
    assert_eq!(found.len(), batch.len());
    let changed: Vec<bool> = found[..5].iter().map(|o| o.changed()).collect();
    assert_eq!(changed, [true, false, true, false, false]);
    assert!(found[1].was_set());
    let values: Vec<i64> = found[5..].iter().map(|o| o.value()).collect();
    assert_eq!(values, [0, -5, 2, 12, 9, 15, 3, 2]);
    assert_eq!(batch.run().unwrap()[5].value(), 2, "a batch can be run again");
    assert!(client.batch().run().unwrap().is_empty());
}

fn a_batch_of_another_client_is_refused(set: &Set) {
    let server = set.start();
    let (client, other) = set.two(&server);
    let c = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let error = other.batch().load(&c).run().unwrap_err();
    assert!(error.to_string().contains("its own client"), "{error}");
}

fn many_threads_with_long_batches(set: &Set) {
    let long = set.times(200_000);
    let server = set.start();
    let client = set.client(&server, 0);
    let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    let mut batch = client.batch();
    for _ in 0..long {
        batch.fetch_add(&counter, 1);
    }
    // Several threads with deep pipelines on one connection: no dead end.
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                let found = batch.run().unwrap();
                assert!(found.windows(2).all(|w| w[0].value() < w[1].value()));
            });
        }
    });
    assert_eq!(counter.load().unwrap(), 4 * long as i64);
}

fn batches_of_many_on_one_cell(set: &Set) {
    let trips = set.times(50);
    let server = set.start();
    let clients = set.some(&server);
    std::thread::scope(|s| {
        for client in &clients {
            s.spawn(move || {
                let c = client.counters("c", 1, 2).unwrap();
                let (a, b) = (c.at(0, 0).unwrap(), c.at(0, 1).unwrap());
                let mut batch = client.batch();
                for _ in 0..20 {
                    batch.fetch_add(&a, 1).fetch_add(&b, -2);
                }
                for _ in 0..trips {
                    let found = batch.run().unwrap();
                    let mut last = -1;
                    for outcome in found.iter().step_by(2) {
                        assert!(outcome.value() > last, "{} after {last}", outcome.value());
                        last = outcome.value();
                    }
                }
            });
        }
    });
    let total = 20 * trips as i64 * clients.len() as i64;
    let c = clients[0].open_counters("c").unwrap();
    assert_eq!(c.all().snapshot().unwrap(), [total, -2 * total]);
}

fn one_that_is_refused_changes_nothing(set: &Set) {
    let server = set.start();
    let (client, remover) = set.two(&server);
    let (e, c) = (client.events("e", 1, 2).unwrap(), client.counters("c", 1, 2).unwrap());
    let (e, c) = (e.at(0, 1).unwrap(), c.at(0, 1).unwrap());
    c.store(2).unwrap();
    remover.remove("e").unwrap();
    let mut batch = client.batch();
    batch.store(&c, 100).fetch_add(&c, 1).set(&e);
    let error = batch.run().unwrap_err();
    assert!(matches!(&error, Error::ArrayRemoved { name } if name == "e"), "{error}");
    // A one-sided operation is a trip of its own: what is before the refused one
    // may be done there, and nothing else.
    let now = c.load().unwrap();
    if server.domain() == Domain::Hca && client.transport().name != "tcp" {
        assert!([2, 101].contains(&now), "{now}");
    } else {
        assert_eq!(now, 2);
    }
}
