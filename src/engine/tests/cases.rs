//! Cases that the engine must get right, one by one.

use super::model::{Ask, Cells, TOO_MANY_WAITS};
use super::{Frame, encode, frames};
use crate::auth::Access;
use crate::catalog::{CatalogError, Form, Kind};
use crate::cell::{TOMBSTONE, is_waiting};
use crate::engine::parking::MAX_PARKED_CELLS;
use crate::engine::{Actor, Engine, Newcomer, Next, Out, SharedSession, lock};
use crate::layout::Shape;
use crate::segment::Segment;
use crate::wire::{ErrorRecord, MAX_ARRAYS_OPEN, MAX_WAIT_CELLS, Tag, Violation, take};
use std::time::{Duration, Instant};

const LEASE: Duration = Duration::from_secs(1);
const NOW: Duration = Duration::from_secs(100);

struct One {
    engine: Engine<Segment>,
    session: SharedSession,
}

impl One {
    /// An engine with one session, which has opened an event array as 0.
    fn new() -> One {
        One::of(Engine::new(Segment::anonymous(64).unwrap(), 64, LEASE))
    }

    fn of(engine: Engine<Segment>) -> One {
        let newcomer = Newcomer {
            access: Access::ReadWrite,
            resume: None,
            next_request: 1,
            fresh: 1,
            route: 1,
        };
        let session = engine.attach(&newcomer, NOW, &mut Out::default()).session;
        let one = One { engine, session };
        let open = Ask::Open { number: 0, name: "a".into(), kind: 1, rows: 1, cols: 8 };
        assert_eq!(one.ask(&[(1, open)])[0].0.tag, Tag::Opened as u8);
        one
    }

    /// What all these are answered by, wake-ups last.
    fn ask(&self, asks: &[(u64, Ask)]) -> Vec<Frame> {
        let bytes: Vec<u8> = asks.iter().flat_map(|(id, ask)| encode(ask, *id, 0)).collect();
        let mut out = Out::default();
        let (used, next) = self.engine.handle(NOW, &mut lock(&self.session), &bytes, &mut out);
        assert_eq!((used, next), (bytes.len(), Ok(Next::Continue)));
        let mail = out.mail.iter().flat_map(|(_, bytes)| frames(bytes));
        frames(&out.reply).into_iter().chain(mail).collect()
    }
}

fn wait(comparison: u8, cells: Cells, value: i64) -> Ask {
    Ask::Wait { need: cells.1, records: vec![(0, comparison, cells, value)] }
}

fn set() -> Ask {
    Ask::Ops(vec![(2, 0, 0, 0, 0)])
}

fn tags(frames: &[Frame]) -> Vec<u8> {
    frames.iter().map(|(header, _)| header.tag).collect()
}

#[test]
fn a_session_that_has_ended_parks_no_wait() {
    let one = One::new();
    one.engine.expire(NOW + LEASE + LEASE, &mut Out::default());
    let mut out = Out::default();
    let bytes = encode(&wait(0, (0, 1, 1), 0), 1, 0);
    let (_, next) = one.engine.handle(NOW, &mut lock(&one.session), &bytes, &mut out);
    assert_eq!(next, Ok(Next::Close));
    assert!(out.reply.is_empty());
    assert_eq!(one.engine.parked(), 0);
}

#[test]
fn a_set_before_the_cancel_satisfies_the_wait() {
    let one = One::new();
    let answers = one.ask(&[(1, wait(0, (0, 1, 1), 0)), (2, set()), (1, Ask::Cancel)]);
    assert_eq!(tags(&answers), [Tag::Words as u8, Tag::Woken as u8]);
    assert_eq!(one.engine.parked(), 0);
}

#[test]
fn a_set_before_the_removal_satisfies_the_wait() {
    let one = One::new();
    let answers = one.ask(&[(1, wait(0, (0, 1, 1), 0)), (2, set()), (3, Ask::Remove("a".into()))]);
    assert_eq!(tags(&answers), [Tag::Words as u8, Tag::Words as u8, Tag::Woken as u8]);
    assert_eq!(one.engine.parked(), 0);
}

#[test]
fn who_reaches_the_cells_without_asking_finds_tombstones() {
    let engine = Engine::new(Segment::anonymous(64).unwrap(), 64, LEASE).one_sided(true);
    let one = One::of(engine);
    let words = |cells: std::ops::Range<u32>| -> Vec<u64> {
        cells.map(|place| one.engine.actor.load(place)).collect()
    };
    one.ask(&[(1, wait(0, (0, 1, 1), 0)), (2, Ask::Remove("a".into()))]);
    assert_eq!(words(0..8), [TOMBSTONE; 8]);
    assert_eq!(tags(&one.ask(&[(3, set())])), [Tag::Refused as u8]);
    assert_eq!(words(0..16), [[TOMBSTONE; 8], [0; 8]].concat());
    // Under the old number another array: nobody can reach the old cells now.
    let b = |rows, cols| Ask::Open { number: 0, name: "b".into(), kind: 2, rows, cols };
    one.ask(&[(4, b(2, 3))]);
    one.ask(&[(5, Ask::Remove("b".into())), (6, b(1, 64))]);
    assert_eq!(words(0..64), [0; 64]);
}

/// When a session ends, its queue pairs still reach the cells of arrays that it
/// had open, until the driver has closed them.
#[test]
fn cells_are_held_until_the_end_of_a_session_is_dealt_with() {
    let engine = Engine::new(Segment::anonymous(64).unwrap(), 64, LEASE).one_sided(true);
    let one = One::of(engine);
    lock(&one.session).set_one_sided();
    one.ask(&[(2, Ask::Remove("a".into()))]);
    let One { engine, session } = one;
    drop(session);
    let mut out = Out::default();
    engine.expire(NOW + LEASE + LEASE, &mut out);
    assert_eq!(engine.sessions(), 0);
    let all = Form { kind: Kind::Counter, shape: Shape { rows: 1, cols: 64 }, param: 0 };
    assert!(matches!(engine.open("b", all), Err(CatalogError::Full { .. })));
    drop(out);
    assert!(engine.open("b", all).is_ok());
}

#[test]
fn an_array_under_an_impossible_number_is_not_made() {
    let one = One::new();
    let open =
        Ask::Open { number: MAX_ARRAYS_OPEN as u16, name: "b".into(), kind: 1, rows: 1, cols: 1 };
    let bytes = encode(&open, 2, 0);
    let (_, next) = one.engine.handle(NOW, &mut lock(&one.session), &bytes, &mut Out::default());
    assert_eq!(next, Err(Violation::Field("array")));
    let known = Ask::Open { number: 1, name: "b".into(), kind: 0, rows: 0, cols: 0 };
    assert_eq!(tags(&one.ask(&[(3, known)])), [Tag::Refused as u8]);
}

/// As many times the same cell as a wait may name: a small frame.
const OFTEN: Cells = (0, MAX_WAIT_CELLS as u32, 0);

#[test]
fn answers_that_nobody_acknowledges_are_limited() {
    let one = One::new();
    one.ask(&[(2, set())]);
    let satisfied = wait(0, OFTEN, 0);
    let fit = (MAX_PARKED_CELLS / MAX_WAIT_CELLS) as u64;
    for id in 1..=fit {
        assert_eq!(tags(&one.ask(&[(id, satisfied.clone())])), [Tag::Woken as u8]);
    }
    let more = fit + 1;
    let (header, payload) = one.ask(&[(more, satisfied.clone())]).remove(0);
    assert_eq!(header.tag, Tag::WaitRefused as u8);
    let (record, _) = take::<ErrorRecord>(Tag::WaitRefused, &payload).unwrap();
    assert_eq!(record.code, TOO_MANY_WAITS);
    assert_eq!(tags(&one.ask(&[(fit, Ask::WaitDone), (more, satisfied)])), [Tag::Woken as u8]);
}

#[test]
fn waits_that_name_one_cell_often_do_not_stall_the_others() {
    let one = One::new();
    for id in 1..=4 {
        assert!(one.ask(&[(id, wait(0, OFTEN, 0))]).is_empty());
    }
    let begun = Instant::now();
    for id in 1..=4 {
        assert_eq!(tags(&one.ask(&[(id, Ask::Cancel)])), [Tag::Cancelled as u8]);
    }
    // A second at most in a debug build; minutes when every cell that is named
    // is a walk through all waiters.
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn many_adds_to_a_cell_with_many_waiters_do_not_stall_the_others() {
    let one = One::new();
    let open = Ask::Open { number: 1, name: "b".into(), kind: 2, rows: 1, cols: 1 };
    one.ask(&[(2, open)]);
    for id in 1..=4 {
        let never = Ask::Wait { need: OFTEN.1, records: vec![(1, 5, OFTEN, -1)] };
        assert!(one.ask(&[(id, never)]).is_empty());
    }
    let begun = Instant::now();
    let adds = Ask::Ops(vec![(6, 1, 0, 1, 0); 32 * 1024]);
    assert_eq!(tags(&one.ask(&[(3, adds)])), [Tag::Words as u8]);
    // As above: one look at the waiters, not one for each add.
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

/// What a large wait does to its cells is done in parts, with others in between.
/// Until then its cells are only looked at, and it may be over by then.
#[test]
fn a_large_wait_is_armed_and_undone_in_parts() {
    const CELLS: u32 = 2000;
    let one = One::of(Engine::new(Segment::anonymous(4096).unwrap(), 4096, LEASE));
    let open = Ask::Open { number: 1, name: "large".into(), kind: 1, rows: 1, cols: CELLS };
    one.ask(&[(2, open)]);
    let base = one.engine.catalogued().get("large").unwrap().base;
    let bits = || {
        let words = (base..base + CELLS).map(|place| one.engine.actor.load(place));
        words.filter(|word| is_waiting(*word)).count()
    };
    let mend = || {
        let mut out = Out::default();
        while one.engine.is_untidy() {
            one.engine.mend(&mut out);
        }
        out.mail.iter().flat_map(|(_, bytes)| frames(bytes)).collect::<Vec<Frame>>()
    };
    let any = |need| Ask::Wait { need, records: vec![(1, 0, (0, CELLS, 1), 0)] };
    let last = Ask::Ops(vec![(2, 1, CELLS - 1, 0, 0)]);
    for late in [true, false] {
        assert!(one.ask(&[(1, any(1)), (2, any(2))]).is_empty());
        let begun = bits();
        assert!(begun > 0 && begun < CELLS as usize, "{begun}");
        if late {
            assert!(mend().is_empty());
            assert_eq!(bits(), CELLS as usize);
        }
        let answers = one.ask(&[(if late { 3 } else { 5 }, last.clone())]);
        // Without its bit nobody rings: who mends or sweeps finds it.
        let answers = if late { answers[1..].to_vec() } else { mend() };
        assert_eq!(tags(&answers), [Tag::Woken as u8]);
        assert_eq!(answers[0].0.id, 1);
        mend();
        assert_eq!(bits(), CELLS as usize - 1, "the other wait, but for what it has");
        let clear = Ask::Ops(vec![(3, 1, CELLS - 1, 0, 0)]);
        one.ask(&[(2, Ask::Cancel), (if late { 4 } else { 6 }, clear)]);
        one.ask(&[(1, Ask::WaitDone), (2, Ask::WaitDone)]);
        assert_eq!(one.engine.parked(), 0);
        mend();
        assert_eq!(bits(), 0);
    }
}
