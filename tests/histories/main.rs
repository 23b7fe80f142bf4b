//! Promise: what clients see of a cell, over whatever transports and whatever happens
//! to connections, clients and the server meanwhile, is what they would see if one
//! operation after another had been done on it, each at one moment between its call
//! and its return (it is linearizable). An operation that returned happened once; one
//! whose outcome is unknown, or whose process was killed, happened once or never. Set,
//! clear and store that were under way when the server died, or the session ended, may
//! have happened twice.
//!
//! Clients in processes of their own write down what they call and what they get, over
//! thousands of runs of a few milliseconds, each on cells of its own, while processes
//! are killed and stopped and connections cut; then each history of a cell is judged.
//! A planted fault is found by the same judge.
//!
//! `FARCELL_TEST_SECONDS` says how long each of the rounds lasts, `FARCELL_SEED` what
//! the clients do and what happens to them, as far as threads let that be the same.
#![cfg(feature = "cli")]

#[path = "../common/mod.rs"]
mod common;

mod checker;
mod early;
mod journal;
mod judge;
mod known;
mod planted;
mod round;
mod shown;
mod spec;
mod stateright;
mod workload;

use round::{Menu, Round, seconds, seed};

/// Longest round: after it all begins anew, with new arrays.
const LONGEST: u64 = 20;

fn rounds(usual: u64, menu: Menu) {
    let mut seed = seed();
    let mut left = seconds(usual);
    while left > 0 {
        let length = left.min(LONGEST);
        left -= length;
        let (seen, faults) = Round::start(seed, length, menu).verdict();
        println!(
            "seed {seed}, {length} s: {} histories of {} calls, {} of them beside others, {} open, {} judged twice; the server was killed {} times, {} clients were, {} had lapsed, {} other faults",
            seen.histories,
            seen.calls,
            seen.overlaps,
            seen.unknown,
            seen.twice,
            faults.server_away.len(),
            faults.killed.len(),
            faults.stopped.len(),
            faults.others.len(),
        );
        assert!(
            seen.refused.is_empty(),
            "not linearizable; again with FARCELL_SEED={seed} FARCELL_TEST_SECONDS={length}:\n{}",
            seen.text(&faults)
        );
        let least = if common::rdma::device() { 5 } else { 100 };
        assert!(seen.histories as u64 > length * least, "{} histories", seen.histories);
        assert!(seen.overlaps > seen.calls / 20, "{} of {}", seen.overlaps, seen.calls);
        seed = seed.wrapping_add(1);
    }
}

#[test]
fn while_nothing_happens() {
    rounds(4, Menu::Quiet);
}

#[test]
fn while_connections_are_cut_and_clients_die() {
    rounds(8, Menu::Clients);
}

#[test]
fn while_the_server_dies_and_comes_back_with_its_state() {
    rounds(8, Menu::Server);
}

#[test]
fn while_clients_lapse_and_come_back() {
    rounds(6, Menu::Lapses);
}
