//! The judge finds what is wrong: the same clients, with a fault that was put there.

use crate::common::{key, rdma, server};
use crate::early;
use crate::journal::{self, Journal, now};
use crate::judge::{Faults, Seen, histories, judge};
use crate::round::seed;
use crate::workload::{Plan, work};
use farcell::{Client, Server, TransportChoice};
use std::time::Duration;

/// Clients in threads of ours: each has a transport, a server and what it does. The
/// verdict over what they have seen.
fn verdict(server: &Server, plan: Plan, clients: &[(TransportChoice, &str, u64)]) -> Seen {
    let folder = tempfile::tempdir().unwrap();
    let connected: Vec<Client> = clients
        .iter()
        .map(|(way, addr, _)| {
            Client::builder().addr(*addr).key(key()).transport(*way).connect().unwrap()
        })
        .collect();
    drop(plan.arrays(&connected[0]));
    let plan = Plan { begin: now() + 20_000_000, ..plan };
    std::thread::scope(|s| {
        for (process, client) in connected.iter().enumerate() {
            let plan = Plan { what: clients[process].2, ..plan };
            let journal = Journal::create(folder.path(), process, 0);
            s.spawn(move || work(&plan, client, journal, process, 0));
        }
    });
    let names = |n: usize| format!("{:?}#{n}", clients[n].0).to_lowercase();
    let entries = journal::read(folder.path());
    assert!(entries.iter().all(|entry| entry.end.is_some()));
    let seen = judge(&histories(&entries, &Faults::default(), &names));
    assert_eq!(server.sessions(), clients.len());
    seen
}

/// Stores and loads of clients, one of which is answered by someone in between.
fn stores(lies: bool) -> Seen {
    let server = server().start().unwrap();
    let addr = server.local_addrs()[0];
    // What others need to look in between, and an emulated machine for everything.
    let (early, run, runs) = if rdma::device() { (30, 150, 60) } else { (2, 10, 150) };
    let early = lies.then_some(Duration::from_millis(early));
    let (direct, between) = (addr.to_string(), early::start(addr, early));
    let run = run * 1_000_000;
    let plan = Plan { seed: seed(), begin: 0, run, runs, calls: 6, what: 3, timeouts_tell: true };
    let clients = [
        (TransportChoice::Tcp, between.as_str(), 3),
        (TransportChoice::Tcp, direct.as_str(), 3),
        (TransportChoice::Shm, direct.as_str(), 3),
    ];
    verdict(&server, plan, &clients)
}

#[test]
fn an_answer_before_the_change_is_found_out() {
    let seen = stores(true);
    assert!(!seen.refused.is_empty(), "nothing found in {} histories", seen.histories);
    println!("found, as it should be:\n{}", seen.text(&Faults::default()));
    for (_, _, calls) in &seen.refused {
        assert!(calls.iter().filter(|call| call.happened).count() <= 6, "this is not small");
    }
}

#[test]
fn one_in_between_that_does_not_lie_is_not_accused() {
    let seen = stores(false);
    assert!(seen.refused.is_empty(), "{}", seen.text(&Faults::default()));
    assert!(seen.histories > 20, "{} histories", seen.histories);
}

/// Adds by the adapter and, many at once, by the server.
fn adds(broken: bool, runs: usize) -> Seen {
    let mut builder = rdma::rdma_server();
    if broken {
        builder = builder.break_domain_rule_for_tests();
    }
    let server = builder.start().unwrap();
    let addr = server.address();
    let plan = Plan {
        seed: seed(),
        begin: 0,
        run: 150_000_000,
        runs,
        calls: 10,
        what: 2,
        timeouts_tell: true,
    };
    let clients = [
        (TransportChoice::Rdma, addr.as_str(), 2),
        (TransportChoice::Tcp, addr.as_str(), 1),
        (TransportChoice::Rdma, addr.as_str(), 2),
        (TransportChoice::Tcp, addr.as_str(), 1),
    ];
    verdict(&server, plan, &clients)
}

#[test]
fn with_the_domain_rule_off_histories_are_refused() {
    if !rdma::device() {
        return;
    }
    let seen = adds(false, 30);
    assert!(seen.refused.is_empty(), "{}", seen.text(&Faults::default()));
    for _ in 0..10 {
        let seen = adds(true, 60);
        if !seen.refused.is_empty() {
            println!("found, as it should be:\n{}", seen.text(&Faults::default()));
            return;
        }
    }
    panic!("CPU and adapter changed the same cells, and nobody has seen it");
}
