//! What a look makes of the one before.

use super::*;
use farcell::{Access, Domain, Fallback};

pub fn scene(cells: Option<Cells>) -> Scene {
    let info = ServerInfo {
        capacity: 1000,
        free: 900,
        largest_free: 900,
        sessions: 2,
        arrays: 1,
        parked_waits: 0,
        domain: Domain::Cpu,
        access: Access::ReadWrite,
        lease: Duration::from_secs(10),
    };
    let member = |seat: u32, name: &str| Member {
        name: Some(name.to_owned()),
        seat,
        transport: "tcp",
        reads_only: false,
        age: Duration::from_secs(3),
        last_heard: Duration::from_millis(1500),
        holds: Vec::new(),
        holds_in_all: 0,
    };
    let array = ArrayInfo { name: "go".to_owned(), kind: Kind::Event, rows: 1, cols: 3, param: 0 };
    Scene {
        info,
        arrays: vec![array],
        members: vec![member(1, "rank 0"), member(2, "rank 1")],
        waits: Vec::new(),
        held: Vec::new(),
        tallies: Vec::new(),
        cells,
        own: 2,
    }
}

pub fn events(numbers: &[i64]) -> Cells {
    Cells {
        name: "go".to_owned(),
        kind: Kind::Event,
        rows: 1,
        cols: numbers.len(),
        numbers: numbers.to_vec(),
        waiters: vec![0; numbers.len()],
    }
}

fn tally(requests: u64) -> Tally {
    let text = "no RDMA device".to_owned();
    Tally {
        seat: 1,
        operations: 0,
        requests,
        waits: 0,
        rings: 0,
        idle: None,
        fallbacks: vec![Fallback { wanted: "rdma", reason: "no_device", text }],
    }
}

#[test]
fn a_change_has_an_age_and_a_pulse_is_one() {
    let mut model = Model::default();
    let at = Duration::from_secs;
    model.show(scene(Some(events(&[0, 1, 2]))), at(1));
    assert_eq!(model.age(1, at(5)), None, "nothing was seen to change");
    // Set and cleared again between two looks.
    model.show(scene(Some(events(&[0, 1, 4]))), at(2));
    assert_eq!(model.age(2, at(5)), Some(at(3)));
    assert_eq!(model.age(0, at(5)), None);
    // Another array: nothing of the one before counts.
    let other = Cells { name: "other".to_owned(), ..events(&[7, 7, 7]) };
    model.show(scene(Some(other)), at(6));
    assert_eq!(model.age(2, at(6)), None);
    assert_eq!(model.age(99, at(6)), None);
}

#[test]
fn rates_are_of_the_time_between_looks() {
    let mut model = Model::default();
    let with = |requests| Scene { tallies: vec![tally(requests)], ..scene(None) };
    model.show(with(100), Duration::from_secs(1));
    assert_eq!(model.rows()[0].rate, None);
    model.show(with(300), Duration::from_secs(3));
    let rows = model.rows();
    assert_eq!(rows[0].rate, Some(100.0));
    assert_eq!(rows[0].fallback.as_deref(), Some("no rdma: no RDMA device"));
    assert_eq!(rows[1].name, "rank 1 (this view)");
    // Another session under the same seat, as it seems: no rate below 0.
    model.show(with(0), Duration::from_secs(4));
    assert_eq!(model.rows()[0].rate, Some(0.0));
}

#[test]
fn locks_are_drawn_from_who_holds_them() {
    let array = ArrayInfo { name: "gate".to_owned(), kind: Kind::Lock, rows: 2, cols: 2, param: 0 };
    let state = HeldState::Lock { holder: Some(9), token: 1, abandoned: false };
    let held = [
        Held { name: "gate".to_owned(), row: 1, col: 0, queued: 3, state: state.clone() },
        Held { name: "other".to_owned(), row: 0, col: 0, queued: 1, state: state.clone() },
        // Beyond what is looked at.
        Held { name: "gate".to_owned(), row: 5, col: 0, queued: 1, state },
    ];
    let cells = Cells::of_held(&array, 2, 2, &held);
    assert_eq!(cells.numbers, [0, 0, 9, 0]);
    assert_eq!(cells.waiters, [0, 0, 3, 0]);
    let permits = ArrayInfo { kind: Kind::Semaphore, param: 4 << 32 | 2, ..array };
    assert_eq!(Cells::of_held(&permits, 1, 2, &[]).numbers, [4, 4]);
}
