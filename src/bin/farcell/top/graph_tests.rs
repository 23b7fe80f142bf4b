//! What is a cycle, and what only looks like one.

use super::*;
use farcell::WaitedCell;

pub fn member(seat: u32, name: &str) -> Member {
    Member {
        name: (!name.is_empty()).then(|| name.to_owned()),
        seat,
        transport: "tcp",
        reads_only: false,
        age: Duration::ZERO,
        last_heard: Duration::ZERO,
        holds: Vec::new(),
        holds_in_all: 0,
    }
}

pub fn wait(seat: u32, kind: Kind, name: &str, col: usize) -> Waiting {
    let cell =
        WaitedCell { name: name.to_owned(), kind, row: 0, col, until: None, satisfied: false };
    let queues = matches!(kind, Kind::Lock | Kind::Semaphore);
    Waiting {
        seat,
        how: if queues { WaitingHow::Queued } else { WaitingHow::Parked },
        since: Some(Duration::from_secs(5)),
        need: 1,
        cells: vec![cell],
        cells_in_all: 1,
        peers: Vec::new(),
        peers_in_all: 0,
    }
}

fn naming(mut wait: Waiting, peers: &[&str]) -> Waiting {
    wait.peers = peers.iter().map(|&peer| peer.to_owned()).collect();
    wait.peers_in_all = peers.len();
    wait
}

fn held(name: &str, col: usize, state: HeldState) -> Held {
    Held { name: name.to_owned(), row: 0, col, queued: 0, state }
}

pub fn lock(col: usize, holder: u32) -> Held {
    held("gate", col, HeldState::Lock { holder: Some(holder), token: 1, abandoned: false })
}

fn barrier(needed: u64, parties: &[(u32, bool)]) -> Held {
    let arrived = parties.iter().filter(|(_, here)| *here).count() as u32;
    let (parties, parties_in_all) = (parties.to_vec(), parties.len());
    let state = HeldState::Barrier { needed, arrived, broken: false, parties, parties_in_all };
    held("start", 0, state)
}

fn graph(members: u32, waits: &[Waiting], held: &[Held]) -> Graph {
    let names = ["", "a", "b", "c", "d", "e"];
    let members: Vec<_> = (1..=members).map(|s| member(s, names[s as usize])).collect();
    Graph::new(&members, waits, held, &[])
}

#[test]
fn two_who_want_each_others_lock_are_named() {
    let waits = [wait(1, Kind::Lock, "gate", 1), wait(2, Kind::Lock, "gate", 0)];
    let graph = graph(2, &waits, &[lock(0, 1), lock(1, 2)]);
    let cycles = graph.cycles();
    assert_eq!(cycles.len(), 1);
    assert_eq!(cycles[0].seats, [1, 2]);
    assert!(cycles[0].sure);
    assert_eq!(
        cycles[0].text,
        "a waits for lock gate 0 1, held by b; b waits for lock gate 0 0, held by a"
    );
    assert!(graph.chains().is_empty(), "all of it is in the cycle");
}

#[test]
fn one_who_waits_for_the_stuck_is_a_chain_behind_the_cycle() {
    let waits = [
        wait(1, Kind::Lock, "gate", 1),
        wait(2, Kind::Lock, "gate", 0),
        wait(3, Kind::Lock, "gate", 0),
    ];
    let graph = graph(3, &waits, &[lock(0, 1), lock(1, 2)]);
    assert_eq!(graph.cycles().len(), 1);
    assert!(graph.is_stuck(3));
    let chains = graph.chains();
    assert_eq!(chains.len(), 1);
    assert!(chains[0].starts_with("c -> lock gate 0 0 (5.0 s) -> held by a -> lock gate 0 1"));
}

#[test]
fn a_chain_ends_with_the_one_who_works() {
    let waits = [wait(1, Kind::Lock, "gate", 0), wait(2, Kind::Lock, "gate", 1)];
    let graph = graph(3, &waits, &[lock(0, 2), lock(1, 3)]);
    assert!(graph.cycles().is_empty());
    assert!(!graph.is_stuck(1) && !graph.is_stuck(2));
    assert_eq!(
        graph.chains(),
        ["a -> lock gate 0 0 (5.0 s) -> held by b -> lock gate 0 1 (5.0 s) -> held by c"]
    );
}

#[test]
fn a_permit_can_come_from_anyone() {
    let semaphore = held("permits", 0, HeldState::Semaphore { free: 0, most: 8 });
    let waits = [wait(1, Kind::Semaphore, "permits", 0), wait(2, Kind::Lock, "gate", 0)];
    let graph = graph(2, &waits, &[semaphore, lock(0, 1)]);
    assert!(graph.cycles().is_empty());
    assert!(!graph.is_stuck(2));
}

#[test]
fn either_of_two_writers_is_enough() {
    let waits =
        [naming(wait(1, Kind::Event, "go", 0), &["b", "c"]), wait(2, Kind::Lock, "gate", 0)];
    let free = graph(3, &waits, &[lock(0, 1)]);
    assert!(free.cycles().is_empty(), "c can set it");
    let also = [&waits[..], &[wait(3, Kind::Lock, "gate", 0)]].concat();
    let stuck = graph(3, &also, &[lock(0, 1)]);
    let cycles = stuck.cycles();
    assert_eq!(cycles.len(), 1, "neither can");
    assert!(!cycles[0].sure);
    assert!(cycles[0].text.ends_with("(unless someone else ends one of these waits)"));
}

#[test]
fn an_event_that_names_nobody_or_one_who_is_not_here_is_open() {
    for peers in [&[][..], &["nobody"]] {
        let waits = [naming(wait(1, Kind::Event, "go", 0), peers), wait(2, Kind::Lock, "gate", 0)];
        assert!(graph(2, &waits, &[lock(0, 1)]).cycles().is_empty());
    }
}

#[test]
fn a_barrier_whose_missing_party_waits_for_one_who_is_there() {
    let waits = [wait(1, Kind::Barrier, "start", 0), wait(2, Kind::Lock, "gate", 0)];
    let all = [barrier(2, &[(1, true), (2, false)]), lock(0, 1)];
    let cycles = graph(2, &waits, &all).cycles();
    assert_eq!(cycles.len(), 1);
    assert_eq!(
        cycles[0].text,
        "a waits for barrier start 0 0, which lacks b; b waits for lock gate 0 0, held by a"
    );
    // A party that is not known yet may come.
    let unknown = [barrier(3, &[(1, true), (2, false)]), lock(0, 1)];
    assert!(graph(2, &waits, &unknown).cycles().is_empty());
    // More know it than it needs.
    let more = [barrier(2, &[(1, true), (2, false), (3, false)]), lock(0, 1)];
    assert!(graph(3, &waits, &more).cycles().is_empty());
}

#[test]
fn threads_of_one_session_hold_nobody_up() {
    let own = [wait(1, Kind::Lock, "gate", 0)];
    assert!(graph(1, &own, &[lock(0, 1)]).cycles().is_empty(), "another thread has it");
    // One thread waits in the cycle, another for what anyone can set.
    let waits = [
        wait(1, Kind::Lock, "gate", 1),
        wait(1, Kind::Event, "go", 0),
        wait(2, Kind::Lock, "gate", 0),
    ];
    assert!(graph(2, &waits, &[lock(0, 1), lock(1, 2)]).cycles().is_empty());
}

#[test]
fn one_who_still_asks_for_things_is_not_stuck() {
    let waits = [wait(1, Kind::Lock, "gate", 1), wait(2, Kind::Lock, "gate", 0)];
    let tally = |idle| Tally {
        seat: 1,
        operations: 1,
        requests: 1,
        waits: 1,
        rings: 0,
        idle: Some(idle),
        fallbacks: Vec::new(),
    };
    let members = [member(1, "a"), member(2, "b")];
    let locks = [lock(0, 1), lock(1, 2)];
    let busy = Graph::new(&members, &waits, &locks, &[tally(Duration::from_secs(1))]);
    assert!(busy.cycles().is_empty());
    let idle = Graph::new(&members, &waits, &locks, &[tally(Duration::from_secs(5))]);
    assert_eq!(idle.cycles().len(), 1);
}

#[test]
fn a_lock_of_one_who_has_gone_is_freed_soon() {
    let waits = [wait(1, Kind::Lock, "gate", 1), wait(2, Kind::Lock, "gate", 0)];
    assert!(graph(2, &waits, &[lock(0, 1), lock(1, 77)]).cycles().is_empty());
}

#[test]
fn every_cycle_is_found_once() {
    let waits: Vec<_> = [(1, 2), (2, 1), (3, 4), (4, 5), (5, 3)]
        .into_iter()
        .map(|(seat, of)| wait(seat, Kind::Lock, "gate", of))
        .collect();
    let locks: Vec<_> = (1..=5).map(|seat| lock(seat as usize, seat)).collect();
    let cycles = graph(5, &waits, &locks).cycles();
    let seats: Vec<_> = cycles.iter().map(|cycle| cycle.seats.clone()).collect();
    assert_eq!(seats, [vec![1, 2], vec![3, 4, 5]]);
}
