//! Messages by hand: claims, what becomes of them, and clients that ask for
//! what no client of ours would.

use super::model::Ask;
use super::{Frame, encode, frames};
use crate::auth::Access;
use crate::catalog::{Form, Kind};
use crate::engine::{
    Begun, Brought, Engine, Newcomer, Next, Out, SharedSession, Shelf, Writing, lock,
};
use crate::layout::Shape;
use crate::segment::{Payload, Segment};
use crate::slot::{MAX_BYTES, Version};
use crate::wire::slots::{KEEP, REMOTE, SlotRefusal, SlotRequest};
use crate::wire::{self, OpenRecord, OpenedRecord, Refusal, Tag};
use proptest::prelude::*;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

const ROWS: u32 = 4;
const BYTES: u64 = 100;

struct Place {
    engine: Engine<Segment>,
    payload: Arc<Payload>,
    base: u32,
}

impl Place {
    fn new() -> Place {
        let engine = Engine::new(Segment::anonymous(256).unwrap(), 256, Duration::from_secs(1));
        let form = Form { kind: Kind::Slots, shape: Shape { rows: ROWS, cols: 1 }, param: BYTES };
        let (entry, _) = engine.open("params", form).unwrap();
        Place { payload: entry.payload.get().cloned().unwrap(), base: entry.base, engine }
    }

    fn session(&self, id: u64, access: Access) -> SharedSession {
        let newcomer = Newcomer { access, resume: None, next_request: 1, fresh: id, route: id };
        let attached = self.engine.attach(&newcomer, Duration::ZERO, &mut Out::default());
        let entry = self.engine.catalogued().get("params").unwrap();
        lock(&attached.session).bind(0, Some(entry)).unwrap();
        attached.session
    }

    fn begin(&self, session: &SharedSession, request: &SlotRequest) -> Result<Begun, Refusal> {
        self.engine.slot_begin(&mut lock(session), request, &mut Out::default()).unwrap()
    }

    fn claim(&self, session: &SharedSession, row: u32, write: u64) -> Writing {
        match self.begin(session, &SlotRequest { row, write, ..SlotRequest::default() }) {
            Ok(Begun::Claimed(writing)) => writing,
            other => panic!("{other:?}"),
        }
    }

    /// Puts bytes into a row as a connection would.
    fn put(&self, writing: &Writing, at: u64, bytes: &[u8]) -> bool {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(bytes).unwrap();
        let row = writing.row.row;
        let put =
            self.payload.receive_for(writing.serial, row, at, bytes.len(), theirs.as_fd()).unwrap();
        assert!(put.is_none_or(|n| n == bytes.len()));
        put.is_some()
    }

    fn commit(&self, s: &SharedSession, writing: &Writing, total: u64) -> Result<u64, Refusal> {
        let out = &mut Out::default();
        let done = self.engine.slot_commit(&mut lock(s), writing, total, &Brought::default(), out);
        done.map(|reply| Version::of(reply.word).number())
    }

    fn version(&self, row: u32) -> Version {
        let offset = Shape { rows: ROWS, cols: 1 }.offset(row, 0).unwrap();
        let place = (self.base + offset) as usize;
        // Relaxed: nobody else is there.
        Version::of(self.engine.actor.cells()[place].load(std::sync::atomic::Ordering::Relaxed))
    }
}

#[test]
fn a_claim_that_began_again_takes_the_place_of_the_one_before() {
    let place = Place::new();
    let session = place.session(1, Access::ReadWrite);
    let first = place.claim(&session, 0, 7);
    assert!(place.put(&first, 0, b"first"));
    // Its connection was lost, and the server has not found out.
    let second = place.claim(&session, 0, 7);
    assert!(place.put(&second, 0, b"second"));
    assert!(!place.put(&first, 0, b"late"), "what still comes by the old one counts no more");
    place.engine.slot_lost(&first, &mut Out::default());
    assert!(place.version(0).is_writing());
    assert!(matches!(
        place.commit(&session, &first, 5),
        Err(Refusal::Slot(SlotRefusal::NotClaimed(_)))
    ));
    assert_eq!(place.commit(&session, &second, 6), Ok(1));
    // Asked again: it was done.
    let again = SlotRequest { write: 7, oldest: 7, ..SlotRequest::default() };
    let Ok(Begun::Before(word)) = place.begin(&session, &again) else { panic!("done twice") };
    assert_eq!(Version::of(word).number(), 1);
    // Acknowledged: forgotten.
    let next = SlotRequest { write: 8, oldest: 8, ..SlotRequest::default() };
    assert!(matches!(place.begin(&session, &next), Ok(Begun::Claimed(_))));
}

#[test]
fn what_becomes_of_a_row_depends_on_whether_it_was_touched() {
    let place = Place::new();
    let session = place.session(1, Access::ReadWrite);
    let out = &mut Out::default();
    let writing = place.claim(&session, 0, 1);
    place.commit(&session, &writing, 0).unwrap();
    // By hand, by a lost connection, by the end of the session; untouched.
    let untouched = place.claim(&session, 0, 2);
    place.engine.slot_abandon(&untouched, out);
    assert_eq!(place.version(0), Version::whole(1));
    let touched = place.claim(&session, 0, 3);
    place.put(&touched, 0, b"x");
    place.engine.slot_lost(&touched, out);
    assert!(place.version(0).is_torn() && !place.version(0).is_writing());
    assert_eq!(place.version(0).number(), 1);
    let late = place.claim(&session, 1, 4);
    place.engine.end_writes(2, out);
    assert!(place.version(1).is_writing(), "another session has ended");
    place.engine.end_writes(1, out);
    assert_eq!(place.version(1), Version::whole(0));
    assert!(!place.put(&late, 0, b"late"));
    // Whose bytes come by RDMA: not before its session ends.
    let request = SlotRequest { row: 2, write: 5, flags: REMOTE, ..SlotRequest::default() };
    let Ok(Begun::Claimed(remote)) = place.begin(&session, &request) else { panic!() };
    place.engine.slot_lost(&remote, out);
    assert!(place.version(2).is_writing());
    place.engine.end_writes(1, out);
    assert!(place.version(2).is_torn());
}

#[test]
fn a_torn_row_becomes_whole_by_all_bytes_of_a_message_alone() {
    let place = Place::new();
    let session = place.session(1, Access::ReadWrite);
    let out = &mut Out::default();
    let write = |number, parts: &[(u64, u64)], total, flags| {
        let request = SlotRequest { write: number, flags, ..SlotRequest::default() };
        let Ok(Begun::Claimed(writing)) = place.begin(&session, &request) else { panic!() };
        let mut brought = Brought::default();
        for &(from, to) in parts {
            place.put(&writing, from, &vec![1; (to - from) as usize]);
            brought.add(from, to);
        }
        let out = &mut Out::default();
        let done = place.engine.slot_commit(&mut lock(&session), &writing, total, &brought, out);
        if done.is_err() {
            place.engine.slot_abandon(&writing, out);
        }
        done.map(|reply| reply.total)
    };
    assert_eq!(write(1, &[(0, 50)], 50, 0), Ok(50));
    let torn = place.claim(&session, 0, 2);
    place.put(&torn, 0, b"x");
    place.engine.slot_abandon(&torn, out);
    let refused = Err(Refusal::Slot(SlotRefusal::Torn(place.version(0).word())));
    let parts: [(&[(u64, u64)], u64); 6] = [
        (&[], 50),
        (&[], KEEP),
        (&[(20, 21)], KEEP),
        (&[(0, 49)], KEEP),
        (&[(0, 20), (21, 50)], 50),
        (&[(0, 50)], 51),
    ];
    for (at, (parts, total)) in parts.into_iter().enumerate() {
        for flags in [0, REMOTE] {
            let number = 3 + 2 * at as u64 + u64::from(flags == REMOTE);
            assert_eq!(write(number, parts, total, flags), refused, "{parts:?} of {total}");
            assert!(place.version(0).is_torn() && !place.version(0).is_writing());
            assert_eq!(place.version(0).number(), 1);
        }
    }
    assert_eq!(write(20, &[(20, 50), (0, 20)], KEEP, 0), Ok(50));
    assert_eq!(place.version(0), Version::whole(2));
    // Over a whole one, any part will do.
    assert_eq!(write(21, &[(20, 21)], KEEP, 0), Ok(50));
}

fn request() -> impl Strategy<Value = SlotRequest> {
    let number =
        || prop_oneof![0..200u64, Just(u64::MAX), Just(KEEP), Just(MAX_BYTES), any::<u64>()];
    let row = prop_oneof![0..ROWS + 2, any::<u32>()];
    (0..3u16, row, 0..4u64, number(), number(), number()).prop_map(
        |(array, row, write, offset, bytes, total)| SlotRequest {
            array,
            flags: 0,
            row,
            write,
            oldest: 0,
            offset,
            bytes,
            total,
        },
    )
}

proptest! {
    #[test]
    fn whatever_a_client_asks_it_gets_no_more_than_a_row(
        steps in prop::collection::vec((0u8..5, request(), any::<bool>()), 1..60),
        read_only: bool,
    ) {
        let place = Place::new();
        let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
        let (attacker, owner) = (place.session(1, access), place.session(2, Access::ReadWrite));
        // A row of somebody else's, and a claim on another one.
        let writing = place.claim(&owner, 3, 1);
        place.put(&writing, 0, b"theirs");
        place.commit(&owner, &writing, 6).unwrap();
        let theirs = place.claim(&owner, 2, 2);
        let mut open: Vec<Writing> = Vec::new();
        let out = &mut Out::default();
        for (what, request, last) in steps {
            let pick = if last { open.pop() } else { (!open.is_empty()).then(|| open.remove(0)) };
            match (what, pick) {
                (0, _) => match place.engine.slot_begin(&mut lock(&attacker), &request, out) {
                    Ok(Ok(Begun::Claimed(claimed))) => {
                        prop_assert!(!read_only && request.array == 0 && request.row < ROWS);
                        prop_assert_ne!(request.row, 2);
                        open.push(claimed);
                    }
                    Ok(_) => {}
                    Err(violation) => prop_assert!(false, "{violation}"),
                },
                (1, Some(claimed)) => {
                    let _ = place.engine.slot_commit(&mut lock(&attacker), &claimed, request.total, &Brought::default(), out);
                }
                (2, Some(claimed)) => place.engine.slot_abandon(&claimed, out),
                (3, Some(claimed)) => place.engine.slot_lost(&claimed, out),
                _ => if let Ok((row, reply)) = place.engine.slot_read(&lock(&attacker), &request) {
                    prop_assert!(row.row < ROWS);
                    prop_assert!(reply.total <= BYTES && reply.bytes <= request.bytes);
                    let end = request.offset.checked_add(reply.bytes);
                    prop_assert!(reply.bytes == 0 || end.is_some_and(|end| end <= reply.total));
                },
            }
        }
        prop_assert!(place.version(2).is_writing(), "its owner still has it");
        prop_assert_eq!(place.commit(&owner, &theirs, 3), Ok(1));
        place.engine.end_writes(1, out);
        for row in 0..ROWS {
            prop_assert!(!place.version(row).is_writing());
        }
    }
}

#[test]
fn what_one_who_has_gone_was_writing_in_memory_is_torn() {
    let place = Place::new();
    let one = place.session(1, Access::ReadWrite);
    let two = place.session(2, Access::ReadWrite);
    let claim_in_memory = |row: u32, session: &SharedSession| {
        let offset = Shape { rows: ROWS, cols: 1 }.offset(row, 0).unwrap();
        let claimed = Version::whole(5).claimed(lock(session).seat);
        let cells = place.engine.actor.cells();
        // Relaxed: nobody else is there.
        let order = std::sync::atomic::Ordering::Relaxed;
        cells[(place.base + offset) as usize].store(claimed.word(), order);
    };
    claim_in_memory(0, &one);
    claim_in_memory(1, &two);
    let writing = place.claim(&two, 2, 1);
    place.engine.tidy(&mut Out::default());
    assert!(place.version(0).is_writing() && place.version(1).is_writing());
    assert!(matches!(
        place.begin(&two, &SlotRequest { row: 0, write: 2, ..SlotRequest::default() }),
        Err(Refusal::Slot(SlotRefusal::Busy(_)))
    ));
    let out = &mut Out::default();
    place.engine.end(&mut lock(&one), crate::engine::Gone::Silent, out);
    place.engine.end_writes(1, out);
    assert!(place.version(0).is_torn() && !place.version(0).is_writing());
    assert!(place.version(1).is_writing() && place.version(2).is_writing());
    // It goes on after its end, and before it has noticed.
    place.engine.settle(1, Duration::ZERO, out);
    claim_in_memory(3, &one);
    place.engine.tidy(out);
    assert!(place.version(3).is_torn() && !place.version(3).is_writing());
    assert!(place.version(1).is_writing());
    assert_eq!(place.commit(&two, &writing, 0).unwrap(), 1);
}

#[test]
fn a_row_that_is_being_written_by_nobody_comes_free() {
    let mut place = Place::new();
    let session = place.session(1, Access::ReadWrite);
    let claimed = place.claim(&session, 1, 1);
    let seat = lock(&session).seat;
    // By one who has gone, by nobody, and by one who lives and has not claimed it.
    for (row, seat) in [(0, seat + 1), (2, 0), (3, seat)] {
        let offset = Shape { rows: ROWS, cols: 1 }.offset(row, 0).unwrap();
        let cell = &place.engine.actor.cells()[(place.base + offset) as usize];
        // Relaxed: nobody else is there.
        let word = Version::whole(5).claimed(seat).word();
        cell.store(word, std::sync::atomic::Ordering::Relaxed);
    }
    let out = &mut Out::default();
    place.engine.tidy(out);
    let writing = |place: &Place| [0, 1, 2, 3].map(|row| place.version(row).is_writing());
    assert_eq!(writing(&place), [false, true, false, true], "it may have claimed it in memory");
    place.engine = place.engine.claims_in_memory(false);
    place.engine.tidy(out);
    assert_eq!(writing(&place), [false, true, false, false], "it cannot");
    for row in [0, 2, 3] {
        assert!(place.version(row).is_torn() && place.version(row).number() == 5);
        assert!(matches!(
            place.begin(&session, &SlotRequest { row, write: 10, ..SlotRequest::default() }),
            Ok(Begun::Claimed(_))
        ));
    }
    assert_eq!(place.commit(&session, &claimed, 0), Ok(1));
}

/// Memory that comes from elsewhere, and lasts no longer than here.
#[derive(Debug)]
struct Anywhere;

impl Shelf for Anywhere {
    fn draft(&self, form: Form) -> io::Result<(Segment, u64)> {
        let bytes = crate::slot::extent(form.shape.rows, form.param);
        Segment::anonymous(u32::try_from(bytes / 8).unwrap())
            .map(|memory| (memory, 1))
            .map_err(io::Error::other)
    }

    fn keep(&self, _: u64, _: Form, _: u32) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64) {}

    fn remove(&self, _: u32) {}
}

#[test]
fn what_takes_long_is_made_elsewhere_and_once() {
    let engine = Engine::new(Segment::anonymous(256).unwrap(), 256, Duration::from_secs(1));
    let engine = engine.slot_bytes(64 << 20).shelf(Box::new(Anywhere));
    let fresh = |id| Newcomer {
        access: Access::ReadWrite,
        resume: None,
        next_request: 1,
        fresh: id,
        route: id,
    };
    let attach = |id| engine.attach(&fresh(id), Duration::ZERO, &mut Out::default()).session;
    let hand = |session: &SharedSession, bytes: &[u8]| {
        let mut out = Out::default();
        let handled = engine.handle(Duration::ZERO, &mut lock(session), bytes, &mut out);
        (handled, frames(&out.reply))
    };
    let open = |id: u64, bytes: u64| {
        let record = OpenRecord {
            array: 1,
            kind: Kind::Slots as u8,
            rows: 4,
            cols: 1,
            param: bytes,
            ..OpenRecord::default()
        };
        let mut frame = Vec::new();
        wire::push(&mut frame, Tag::Open, id, &[bytemuck::bytes_of(&record), b"params"]);
        frame
    };
    let created = |(header, payload): &Frame| {
        assert_eq!(header.tag, Tag::Opened as u8);
        wire::take::<OpenedRecord>(Tag::Opened, payload).unwrap().0.created
    };
    let beat = encode(&Ask::Heartbeat, 0, 0);
    let (first, other) = (attach(1), attach(2));
    let large = open(1, 8 << 20);
    let all = [&beat[..], &large, &beat].concat();
    let ((used, next), replies) = hand(&first, &all);
    assert_eq!((used, next, replies.len()), (beat.len(), Ok(Next::Prepare), 1));
    assert!(engine.catalogued().get("params").is_err(), "nothing was done yet");
    let ((_, next), _) = hand(&other, &large);
    assert_eq!(next, Ok(Next::Prepare));
    for (session, made) in [(&first, true), (&other, false)] {
        assert_eq!(engine.prepare(&large), made);
        lock(session).prepared = Some(made);
        let ((used, next), replies) = hand(session, &all[beat.len()..]);
        assert_eq!((used, next), (all.len() - beat.len(), Ok(Next::Continue)));
        assert_eq!(created(&replies[0]), u8::from(made));
        assert_eq!(replies[1].0.tag, Tag::Heartbeat as u8);
        assert_eq!(lock(session).prepared, None);
    }
    // What was answered is answered again and not made again.
    let remove = encode(&Ask::Remove("params".into()), 2, 1);
    assert_ne!(hand(&first, &remove).1[0].0.tag, Tag::Refused as u8);
    let ((_, next), replies) = hand(&first, &large);
    assert_eq!((next, created(&replies[0])), (Ok(Next::Continue), 1));
    assert!(engine.catalogued().get("params").is_err());
    // What cannot be made is refused by its own frame, and small ones go no detour.
    let refused = open(3, MAX_BYTES);
    assert_eq!(hand(&first, &refused).0.1, Ok(Next::Prepare));
    assert!(!engine.prepare(&refused));
    lock(&first).prepared = Some(false);
    let ((_, next), replies) = hand(&first, &refused);
    assert_eq!((next, replies[0].0.tag), (Ok(Next::Continue), Tag::Refused as u8));
    let ((_, next), replies) = hand(&first, &open(4, BYTES));
    assert_eq!((next, created(&replies[0])), (Ok(Next::Continue), 1));
}
