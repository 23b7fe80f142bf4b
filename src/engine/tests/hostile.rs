//! Clients that send what no client of ours would send.

use super::model::{Ask, Cells};
use super::{encode, frames};
use crate::auth::Access;
use crate::catalog::{Form, Kind};
use crate::cell::sync::Lock;
use crate::cell::{self, WAITING};
use crate::engine::request::ENOUGH;
use crate::engine::{Actor, Engine, Gone, Newcomer, Next, Out, SharedSession, lock};
use crate::layout::Shape;
use crate::segment::Segment;
use crate::wire::{HEADER, Header, MAX_PAYLOAD};
use proptest::prelude::*;
use std::sync::atomic::Ordering;
use std::time::Duration;

const CELLS: u32 = 128;
/// The seat of the attacker: the second one to come.
const ATTACKER: u32 = 2;
const LEASE: Duration = Duration::from_secs(1);
/// A name that nobody hits by chance.
const THEIRS: &str = "an-array-that-belongs-to-somebody-else";

struct Place {
    engine: Engine<Segment>,
    attacker: SharedSession,
    /// Cells of somebody else, on which somebody waits.
    theirs: std::ops::Range<usize>,
    /// Cells of locks that the attacker has open.
    locks: std::ops::Range<usize>,
    before: Vec<u64>,
}

impl Place {
    fn new(access: Access) -> Place {
        let engine = Engine::new(Segment::anonymous(CELLS).unwrap(), CELLS, LEASE);
        let form = |kind| Form { kind, shape: Shape { rows: 2, cols: 5 }, param: 0 };
        engine.open("events", form(Kind::Event)).unwrap();
        engine.open("counters", form(Kind::Counter)).unwrap();
        let (locks, _) = engine.open("locks", form(Kind::Lock)).unwrap();
        let locks = locks.base as usize..(locks.base + locks.extent) as usize;
        engine.open("barriers", Form { param: 3, ..form(Kind::Barrier) }).unwrap();
        engine.open("semaphores", Form { param: 3 << 32 | 2, ..form(Kind::Semaphore) }).unwrap();
        let (theirs, _) = engine.open(THEIRS, form(Kind::Counter)).unwrap();
        let theirs = theirs.base as usize..(theirs.base + theirs.extent) as usize;
        for place in theirs.clone() {
            engine.actor.cells()[place].store((place as u64 * 1001) << 1, Ordering::Relaxed);
        }
        let owner = attach(&engine, 1, Access::ReadWrite);
        let wait = Ask::Wait { need: 3, records: vec![(0, 2, (0, 3, 1), -1)] };
        talk(&engine, &owner, &[open(0, THEIRS), wait]);
        let attacker = attach(&engine, 2, access);
        let names = ["events", "counters", "locks", "barriers", "semaphores"];
        let opens: Vec<Ask> = names.iter().zip(0..).map(|(name, n)| open(n, name)).collect();
        talk(&engine, &attacker, &opens);
        assert_eq!(lock(&attacker).seat, ATTACKER);
        let before = snapshot(&engine);
        assert!(before[theirs.start] & WAITING != 0);
        Place { engine, attacker, theirs, locks, before }
    }

    /// Whatever this is, it is handled without a panic, with replies of
    /// bounded size, and what is not the attacker's stays as it was.
    fn attack(&self, bytes: &[u8], access: Access) {
        let mut left = bytes;
        loop {
            let mut out = Out::default();
            let session = &mut lock(&self.attacker);
            let (used, next) = self.engine.handle(Duration::ZERO, session, left, &mut out);
            assert!(used <= left.len());
            assert!(out.reply.len() <= ENOUGH + MAX_PAYLOAD + HEADER);
            frames(&out.reply);
            for (route, mail) in &out.mail {
                assert_eq!(*route, 2, "somebody else was disturbed");
                frames(mail);
            }
            left = &left[used..];
            if used == 0 || matches!(next, Ok(Next::Close) | Err(_)) {
                break;
            }
        }
        // Rings for no reason, also for cells that do not exist, wake nobody.
        let mut out = Out::default();
        for place in 0..2 * CELLS {
            self.engine.ring(place, &mut out);
        }
        assert!(out.mail.is_empty());
        let after = snapshot(&self.engine);
        assert_eq!(after[self.theirs.clone()], self.before[self.theirs.clone()]);
        if access == Access::ReadOnly {
            let values = |words: &[u64]| words.iter().map(|w| w >> 1).collect::<Vec<_>>();
            assert_eq!(values(&after), values(&self.before));
        }
        // What the attacker leaves behind goes with its session.
        self.engine.end(&mut lock(&self.attacker), Gone::Closed, &mut Out::default());
        self.engine.settle(2, Duration::ZERO, &mut Out::default());
        for place in self.locks.clone() {
            let word = self.engine.actor.load(place as u32);
            assert_ne!(Lock::of(word).seat, ATTACKER, "a lock of one who has gone");
        }
        assert_eq!(self.engine.parked(), 1);
        for (place, word) in snapshot(&self.engine).into_iter().enumerate() {
            let waited = (self.theirs.start..self.theirs.start + 3).contains(&place);
            assert_eq!(cell::is_waiting(word), waited, "the waiting bit of cell {place}");
        }
        assert!(self.engine.catalog.read().unwrap().get(THEIRS).is_ok());
    }
}

fn snapshot(engine: &Engine<Segment>) -> Vec<u64> {
    engine.actor.cells().iter().map(|c| c.load(Ordering::Relaxed)).collect()
}

fn open(number: u16, name: &str) -> Ask {
    Ask::Open { number, name: name.to_owned(), kind: 0, rows: 0, cols: 0 }
}

fn attach(engine: &Engine<Segment>, id: u64, access: Access) -> SharedSession {
    let newcomer = Newcomer { access, resume: None, next_request: 1, fresh: id, route: id };
    engine.attach(&newcomer, Duration::ZERO, &mut Out::default()).session
}

fn talk(engine: &Engine<Segment>, session: &SharedSession, asks: &[Ask]) {
    let bytes: Vec<u8> = asks.iter().zip(1..).flat_map(|(ask, id)| encode(ask, id, 0)).collect();
    let mut out = Out::default();
    let (_, next) = engine.handle(Duration::ZERO, &mut lock(session), &bytes, &mut out);
    assert_eq!(next, Ok(Next::Continue));
}

fn access() -> impl Strategy<Value = Access> {
    prop_oneof![Just(Access::ReadWrite), Just(Access::ReadOnly)]
}

/// Numbers near the limits of every field.
fn number<T: TryFrom<u64> + std::fmt::Debug>() -> impl Strategy<Value = T> {
    let edge = prop_oneof![
        6 => 0u64..4,
        2 => 0u64..70_000,
        1 => (0u32..64).prop_map(|bit| 1 << bit),
        1 => (0u32..64).prop_map(|bit| (1 << bit) - 1),
        1 => any::<u64>(),
    ];
    edge.prop_filter_map("too wide for the field", |n| T::try_from(n).ok())
}

fn cells() -> impl Strategy<Value = Cells> {
    (number(), number(), number())
}

/// Frames as they should be, with whatever in their fields.
fn ask() -> impl Strategy<Value = Ask> {
    let op = (0u8..21, number(), number(), number(), number());
    let name = prop_oneof!["events", "counters", "locks", "[a-e]{0,3}", ".{0,12}"];
    let until = (number(), 0u8..8, cells(), number());
    prop_oneof![
        prop::collection::vec(op, 0..4).prop_map(Ask::Ops),
        (0u8..21, number(), prop::collection::vec(cells(), 0..4))
            .prop_map(|(op, number, runs)| Ask::Runs(op, number, runs)),
        (number(), name.clone(), 0u8..4, number(), number()).prop_map(
            |(number, name, kind, rows, cols)| Ask::Open { number, name, kind, rows, cols }
        ),
        name.clone().prop_map(Ask::Remove),
        name.prop_map(Ask::List),
        Just(Ask::Info),
        (number(), prop::collection::vec(until, 0..4))
            .prop_map(|(need, records)| Ask::Wait { need, records }),
        Just(Ask::Cancel),
        Just(Ask::WaitDone),
        Just(Ask::Heartbeat),
        Just(Ask::Bye),
    ]
}

fn asked() -> impl Strategy<Value = Vec<u8>> {
    let frame = (ask(), number(), number::<u16>());
    prop::collection::vec(frame, 1..12).prop_map(|frames| {
        frames.iter().flat_map(|(ask, id, span)| encode(ask, *id, (*span).into())).collect()
    })
}

/// A frame of any type around any bytes.
fn framed() -> impl Strategy<Value = Vec<u8>> {
    let payload = prop::collection::vec(any::<u8>(), 0..120);
    let tag = prop_oneof![6 => 1u8..13, 2 => 16u8..19, 2 => 24u8..26, 1 => any::<u8>()];
    let frame = (tag, number::<u64>(), number::<u16>(), payload);
    prop::collection::vec(frame, 1..8).prop_map(|frames| {
        let mut bytes = Vec::new();
        for (tag, id, span, payload) in frames {
            let header = Header { len: payload.len() as u32, tag, reserved: 0, span, id };
            bytes.extend_from_slice(bytemuck::bytes_of(&header));
            bytes.extend_from_slice(&payload);
        }
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_disturb_nobody(bytes in prop::collection::vec(any::<u8>(), 0..400), access in access()) {
        Place::new(access).attack(&bytes, access);
    }

    #[test]
    fn frames_around_arbitrary_bytes_disturb_nobody(bytes in framed(), access in access()) {
        Place::new(access).attack(&bytes, access);
    }

    #[test]
    fn frames_with_arbitrary_fields_disturb_nobody(bytes in asked(), access in access()) {
        Place::new(access).attack(&bytes, access);
    }

    #[test]
    fn spoilt_frames_disturb_nobody(
        mut bytes in asked(),
        spoils in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        end in any::<prop::sample::Index>(),
        access in access(),
    ) {
        for (at, mask) in spoils {
            let at = at.index(bytes.len());
            bytes[at] ^= mask;
        }
        if end.index(3) == 0 {
            bytes.truncate(end.index(bytes.len()));
        }
        Place::new(access).attack(&bytes, access);
    }
}

#[test]
fn small_requests_with_large_replies_are_answered_in_turns() {
    let place = Place::new(Access::ReadOnly);
    let large = Ask::Runs(1, 0, vec![(0, (MAX_PAYLOAD / 8) as u32, 0)]);
    let one = encode(&large, 0, 0);
    let bytes = one.repeat(40);
    let mut out = Out::default();
    let (used, next) =
        place.engine.handle(Duration::ZERO, &mut lock(&place.attacker), &bytes, &mut out);
    assert_eq!(next, Ok(Next::Continue));
    assert_eq!(used, one.len(), "the first reply is as much as goes out at once");
    assert_eq!(out.reply.len(), MAX_PAYLOAD + HEADER);
    place.attack(&bytes, Access::ReadOnly);
}
