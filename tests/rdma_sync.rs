//! Promise: over RDMA a lock that nobody wants, a permit that is there and an
//! arrival at a barrier are the adapter's work alone; whoever has to wait gets
//! his turn as over TCP, and whoever dies is missed as over TCP.
//!
//! Needs a device: run it with `scripts/soft-roce run` where there is none.
//! Without one each test says so and passes, unless `FARCELL_TEST_RDMA` is
//! `required`.

mod common;
use common::rdma::{LONG, ServerProcess, device, over, rdma_server};
use common::sync::{alone, hold_if_asked, killed, mixed, short, stopped, stopped_at_work};
use farcell::TransportChoice;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// In the process that the tests start: a server. Otherwise nothing.
#[test]
#[ignore = "only a process of the tests"]
fn role_of_the_server() {
    common::rdma::serve_if_asked();
}

/// In the process that the tests start: one that holds a lock by RDMA until it
/// is told to go on.
#[test]
#[ignore = "only a process of the tests"]
fn role_of_the_holder() {
    hold_if_asked();
}

#[test]
fn what_nobody_else_wants_needs_no_server() {
    if device() {
        alone(&ServerProcess::start(), TransportChoice::Rdma);
    }
}

#[test]
fn those_who_wait_get_their_turn_over_all_transports() {
    if device() {
        let choices = [TransportChoice::Rdma, TransportChoice::Rdma, TransportChoice::Tcp];
        mixed(&rdma_server().start().unwrap(), choices, 100);
    }
}

#[test]
fn locks_are_taken_once_also_when_the_connection_breaks() {
    if !device() {
        return;
    }
    for round in 0..10 {
        let server = rdma_server().start().unwrap();
        let clients = [over(&server, TransportChoice::Rdma), over(&server, TransportChoice::Rdma)];
        let (low, high) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|s| {
            for client in clients.iter().cycle().take(4) {
                let (low, high) = (&low, &high);
                s.spawn(move || {
                    let lock = client.locks("l", 1, 1).unwrap().at(0, 0).unwrap();
                    for _ in 0..60 {
                        // One that was neither taken nor left would end this.
                        let guard = lock.lock_timeout(LONG).unwrap().expect("a minute is enough");
                        let before = low.load(Relaxed);
                        assert_eq!(before, high.load(Relaxed), "someone else is in here");
                        low.store(before + 1, Relaxed);
                        std::thread::yield_now();
                        high.store(before + 1, Relaxed);
                        guard.unlock().unwrap();
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(5 + 7 * round));
            server.break_queue_pairs_for_tests();
        });
        assert_eq!(low.load(Relaxed), 240);
        assert_eq!(clients[0].transport().name, "tcp");
        let lock = clients[0].locks("l", 1, 1).unwrap().at(0, 0).unwrap();
        assert!(!lock.is_locked().unwrap());
    }
}

#[test]
fn a_holder_that_is_killed_is_missed_and_its_lock_comes_free() {
    if device() {
        killed(&short(rdma_server()), TransportChoice::Rdma);
    }
}

#[test]
fn a_holder_that_was_stopped_past_its_lease_changes_nothing() {
    if device() {
        stopped(&short(rdma_server()), TransportChoice::Rdma);
        stopped_at_work(&short(rdma_server()), TransportChoice::Rdma);
    }
}
