//! Sessions of a former life, driven by hand.

use super::frames;
use crate::auth::Access;
use crate::catalog::{Form, Kind};
use crate::cell::sync::{Barrier, Lock};
use crate::cell::{Op, event_is_set};
use crate::engine::actor::Actor;
use crate::engine::{Engine, Former, Formers, Left, Newcomer, Note, Out, Roster, lock};
use crate::layout::Shape;
use crate::segment::Segment;
use crate::wire::{self, KeepRecord, OpenRecord, Tag};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const LEASE: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Roster for Notes {
    fn note(&mut self, note: &Note<'_>) {
        self.0.lock().unwrap().push(format!("{note:?}"));
    }
}

struct Place {
    engine: Engine<Segment>,
    locks: u32,
    barriers: u32,
    events: u32,
    notes: Arc<Mutex<Vec<String>>>,
}

fn held(seat: u32, token: u64) -> u64 {
    Lock { token, granted: true, abandoned: false, seat }.word()
}

/// Seats 5 and 6 lived; 5 is a party of the first barrier, which is half full as
/// the second is, and has left a will. Locks are held by 5, 6 and 7.
fn place() -> Place {
    let engine = Engine::new(Segment::anonymous(64).unwrap(), 64, LEASE);
    let open = |name: &str, kind, param| {
        let form = Form { kind, shape: Shape { rows: 1, cols: 4 }, param };
        engine.open(name, form).unwrap().0.base
    };
    let (locks, barriers, events) = (
        open("locks", Kind::Lock, 0),
        open("barriers", Kind::Barrier, 2),
        open("e", Kind::Event, 0),
    );
    let put = |at, word| assert!(engine.actor.compare_exchange(at, 0, word).is_ok());
    for (at, seat) in [5, 6, 7].into_iter().enumerate() {
        put(locks + at as u32, held(seat, 9));
    }
    put(barriers, 1 << 1);
    put(barriers + 1, 1 << 1);
    let former = |session, name: Option<&str>| Former {
        session,
        access: Access::ReadWrite,
        name: name.map(Arc::from),
        parties: HashSet::new(),
        will: Vec::new(),
    };
    let set = |base| Left { op: Op::Set, base, offset: 1, a: 0, b: 0 };
    let mut five = former(50, Some("five"));
    five.parties.insert(barriers);
    // The second is of an array that is gone, the third none that can be left.
    five.will = vec![set(events), set(events + 1), Left { op: Op::Acquire, ..set(locks) }];
    let sessions = HashMap::from([(5, five), (6, former(60, None))]);
    let notes = Arc::default();
    let roster = Box::new(Notes(Arc::clone(&notes)));
    let lost = vec![(Arc::from("gone"), crate::engine::Gone::Closed)];
    engine.take_over(Formers { sessions, lost, last_seat: 9 }, Some(roster));
    Place { engine, locks, barriers, events, notes }
}

impl Place {
    fn lock_at(&self, at: u32) -> Lock {
        Lock::of(self.engine.actor.load(self.locks + at))
    }

    fn is_broken(&self, at: u32) -> bool {
        Barrier::of(self.engine.actor.load(self.barriers + at)).broken
    }

    fn pass_to(&self, now: u64) {
        let now = Duration::from_millis(now);
        let mut out = Out::default();
        self.engine.expire(now, &mut out);
        for session in std::mem::take(&mut out.ended) {
            self.engine.settle(session.id, now, &mut out);
        }
    }
}

fn newcomer(resume: u64, route: u64) -> Newcomer {
    Newcomer { access: Access::ReadWrite, resume: Some(resume), next_request: 8, fresh: 99, route }
}

#[test]
fn who_lived_has_its_own_for_a_lease() {
    let place = place();
    assert_eq!((place.lock_at(0).seat, place.lock_at(1).seat), (5, 6));
    assert_eq!((place.lock_at(2).seat, place.lock_at(2).abandoned), (0, true), "7 lives no more");
    assert!(!place.is_broken(0) && place.is_broken(1), "of the second nobody is a party");
    place.pass_to(900);
    assert_eq!(place.lock_at(0).seat, 5);
    place.pass_to(1300);
    assert_eq!((place.lock_at(0).seat, place.lock_at(0).abandoned), (0, true));
    assert!(place.is_broken(0));
    assert!(event_is_set(place.engine.actor.load(place.events + 1)), "its will is done");
    assert!(!event_is_set(place.engine.actor.load(place.events)));
    let notes = place.notes.lock().unwrap();
    assert!(notes.iter().any(|note| note.contains("Ended { seat: 5, how: Silent }")), "{notes:?}");
}

#[test]
fn who_comes_back_has_its_seat_and_keeps_what_it_says() {
    let place = place();
    let mut out = Out::default();
    let now = Duration::from_millis(500);
    let attached = place.engine.take_up(&newcomer(50, 1), now, &mut out).unwrap();
    assert_eq!((attached.id, attached.seat, attached.resumed), (50, 5, false));
    // Once more, as its answer may be lost: the one before is closed.
    let attached = place.engine.take_up(&newcomer(50, 2), now, &mut out).unwrap();
    assert_eq!((attached.seat, out.close.as_slice()), (5, &[1][..]));
    assert!(place.engine.take_up(&newcomer(51, 3), now, &mut out).is_none());
    let reader = Newcomer { access: Access::ReadOnly, ..newcomer(60, 3) };
    assert!(place.engine.take_up(&reader, now, &mut out).is_none(), "with another key");
    // Both say what they hold: one the lock, the other nothing.
    for (session, record) in
        [(50, Some(KeepRecord { token: 9, ..KeepRecord::default() })), (60, None)]
    {
        let attached = place.engine.take_up(&newcomer(session, 3), now, &mut out).unwrap();
        let mut bytes = Vec::new();
        let open = OpenRecord::default();
        wire::push(&mut bytes, Tag::Open, 0, &[bytemuck::bytes_of(&open), b"locks"]);
        let kept = record.as_ref().map_or(&[][..], bytemuck::bytes_of);
        wire::push(&mut bytes, Tag::Keep, 0, &[kept]);
        let mut session = lock(&attached.session);
        place.engine.handle(now, &mut session, &bytes, &mut out).1.unwrap();
        let last = frames(&out.reply).pop().unwrap();
        assert_eq!((last.0.tag, last.1.len()), (Tag::Words as u8, 0));
    }
    assert_eq!(place.lock_at(0).seat, 5);
    assert_eq!((place.lock_at(1).seat, place.lock_at(1).abandoned), (0, true));
    place.pass_to(1300);
    assert_eq!(place.lock_at(0).seat, 5, "it has given a sign since");
    // A new one sits where nobody sat before.
    let new = place.engine.attach(&Newcomer { resume: None, ..newcomer(0, 4) }, now, &mut out);
    assert_eq!(new.seat, 10);
}

#[test]
fn a_keep_that_makes_no_sense_is_a_violation() {
    let place = place();
    let mut out = Out::default();
    let attached = place.engine.take_up(&newcomer(50, 1), Duration::ZERO, &mut out).unwrap();
    let mut session = lock(&attached.session);
    let mut say = |payload: &[u8]| {
        let mut bytes = Vec::new();
        wire::push(&mut bytes, Tag::Keep, 0, &[payload]);
        place.engine.handle(Duration::ZERO, &mut session, &bytes, &mut out).1
    };
    assert!(say(&[0; 15]).is_err());
    // Numbers that mean nothing hold nothing.
    let strange = KeepRecord { array: 4000, offset: u32::MAX, token: 9, ..KeepRecord::default() };
    assert!(say(bytemuck::bytes_of(&strange)).is_ok());
    assert_eq!(place.lock_at(0).seat, 0);
    assert_eq!(place.lock_at(1).seat, 6, "the locks of others are not its to free");
}
