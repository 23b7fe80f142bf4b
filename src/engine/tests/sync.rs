//! Queues, ends and wills, driven by hand.

use super::{Frame, frames};
use crate::auth::Access;
use crate::catalog::{Form, Kind};
use crate::cell::sync::{Barrier, Lock};
use crate::cell::{Op, WAITING, is_waiting, value};
use crate::engine::actor::{Actor, execute};
use crate::engine::{Engine, Gone, Newcomer, Next, Out, SharedSession, lock};
use crate::layout::Shape;
use crate::segment::Segment;
use crate::wire::{
    self, AcquireRecord, ErrorRecord, FiredRecord, OpRecord, OpenRecord, PartyRecord, Tag,
    Violation, take,
};
use std::time::Duration;

const LEASE: Duration = Duration::from_secs(1);
const LOCKS: u16 = 0;
const PERMITS: u16 = 1;
const BARRIERS: u16 = 2;
const PARTIES: u64 = 3;
/// Of five permits one is there.
const BOUND: u64 = 5;

struct Place {
    engine: Engine<Segment>,
    base: [u32; 3],
}

struct Client<'p> {
    place: &'p Place,
    session: SharedSession,
    id: u64,
    seat: u32,
}

impl Place {
    fn new() -> Place {
        let engine = Engine::new(Segment::anonymous(64).unwrap(), 64, LEASE);
        let shape = Shape { rows: 1, cols: 4 };
        let form = |kind, param| Form { kind, shape, param };
        let base = [
            ("locks", form(Kind::Lock, 0)),
            ("permits", form(Kind::Semaphore, BOUND << 32 | 1)),
            ("barriers", form(Kind::Barrier, PARTIES)),
        ]
        .map(|(name, form)| engine.open(name, form).unwrap().0.base);
        Place { engine, base }
    }

    fn client(&self, id: u64, now: u64) -> Client<'_> {
        self.client_with(id, now, Access::ReadWrite)
    }

    fn client_with(&self, id: u64, now: u64, access: Access) -> Client<'_> {
        let newcomer = Newcomer { access, resume: None, next_request: 1, fresh: id, route: id };
        let now = Duration::from_millis(now);
        let attached = self.engine.attach(&newcomer, now, &mut Out::default());
        let client = Client { place: self, session: attached.session, id, seat: attached.seat };
        for (number, name) in ["locks", "permits", "barriers"].into_iter().enumerate() {
            let record = OpenRecord { array: number as u16, ..OpenRecord::default() };
            let parts = [bytemuck::bytes_of(&record), name.as_bytes()];
            let answers = client.say(Tag::Open, 0, &parts);
            assert_eq!(answers[0].1.0.tag, Tag::Opened as u8);
        }
        client
    }

    fn word(&self, array: u16) -> u64 {
        self.engine.actor.load(self.base[usize::from(array)])
    }

    /// The word as one who changes it without the server sees it.
    fn one_sided(&self, array: u16, op: Op, a: u64, b: u64) -> (u64, bool) {
        execute(&self.engine.actor, self.base[usize::from(array)], op, a, b)
    }

    fn ring(&self, array: u16) -> Vec<(u64, Frame)> {
        let mut out = Out::default();
        self.engine.ring(self.base[usize::from(array)], &mut out);
        mail(out)
    }

    fn sweep(&self) -> Vec<(u64, Frame)> {
        let mut out = Out::default();
        self.engine.sweep(&mut out);
        mail(out)
    }

    /// Time passes, and those whose lease is over are settled.
    fn pass_to(&self, now: u64) -> Vec<(u64, Frame)> {
        let now = Duration::from_millis(now);
        let mut out = Out::default();
        self.engine.expire(now, &mut out);
        for over in std::mem::take(&mut out.ended) {
            self.engine.settle(over.id, now, &mut out);
        }
        mail(out)
    }
}

fn mail(out: Out) -> Vec<(u64, Frame)> {
    out.mail.iter().flat_map(|(to, bytes)| frames(bytes).into_iter().map(|f| (*to, f))).collect()
}

impl Client<'_> {
    fn try_say(
        &self,
        tag: Tag,
        id: u64,
        parts: &[&[u8]],
    ) -> (Vec<(u64, Frame)>, Result<Next, Violation>) {
        let mut bytes = Vec::new();
        wire::push(&mut bytes, tag, id, parts);
        let mut out = Out::default();
        let now = lock(&self.session).last_heard;
        let (_, next) = self.place.engine.handle(now, &mut lock(&self.session), &bytes, &mut out);
        for over in std::mem::take(&mut out.ended) {
            self.place.engine.settle(over.id, now, &mut out);
        }
        let replies = frames(&out.reply).into_iter().map(|frame| (self.id, frame));
        (replies.collect::<Vec<_>>().into_iter().chain(mail(out)).collect(), next)
    }

    /// What everyone gets for this frame, by session.
    fn say(&self, tag: Tag, id: u64, parts: &[&[u8]]) -> Vec<(u64, Frame)> {
        let (answers, next) = self.try_say(tag, id, parts);
        assert!(next.is_ok(), "{next:?}");
        answers
    }

    fn op(&self, array: u16, op: Op, a: u64, b: u64) -> Result<u64, u16> {
        let record = OpRecord { op: op as u8, reserved: 0, array, offset: 0, a, b };
        let answers = self.say(Tag::Ops, 0, &[bytemuck::bytes_of(&record)]);
        let (header, payload) = &answers.iter().find(|(to, _)| *to == self.id).unwrap().1;
        match header.tag {
            tag if tag == Tag::Words as u8 => {
                Ok(u64::from_le_bytes(payload[..].try_into().unwrap()))
            }
            _ => Err(take::<ErrorRecord>(Tag::Refused, payload).unwrap().0.code),
        }
    }

    fn queue(&self, array: u16, wait: u64) -> Vec<(u64, Frame)> {
        self.queue_as(array, wait, self.seat)
    }

    fn queue_as(&self, array: u16, wait: u64, seat: u32) -> Vec<(u64, Frame)> {
        let record = AcquireRecord { array, seat, ..AcquireRecord::default() };
        self.say(Tag::Acquire, wait, &[bytemuck::bytes_of(&record)])
    }
}

/// Who was woken, by session and wait, and by what word.
fn woken(answers: &[(u64, Frame)]) -> Vec<(u64, u64, u64)> {
    answers
        .iter()
        .filter(|(_, (header, _))| header.tag == Tag::Woken as u8)
        .map(|(to, (header, payload))| {
            let (record, rest) = take::<FiredRecord>(Tag::Woken, payload).unwrap();
            assert!(rest.is_empty());
            (*to, header.id, record.word)
        })
        .collect()
}

fn code(answers: &[(u64, Frame)]) -> u16 {
    assert_eq!(answers[0].1.0.tag, Tag::WaitRefused as u8, "{answers:?}");
    take::<ErrorRecord>(Tag::WaitRefused, &answers[0].1.1).unwrap().0.code
}

#[test]
fn a_lock_goes_through_its_queue_in_order() {
    let place = Place::new();
    let clients: Vec<Client> = (1..=4).map(|id| place.client(id, 0)).collect();
    assert_eq!(woken(&clients[0].queue(LOCKS, 7)), [(1, 7, 0)], "free, so at once");
    for client in &clients[1..] {
        assert!(client.queue(LOCKS, 7).is_empty());
    }
    assert_eq!(place.engine.parked(), 3);
    assert!(is_waiting(place.word(LOCKS)));
    for holder in 0..3 {
        let (token, seat) = (holder + 1, u64::from(clients[holder as usize].seat));
        let held = Lock::of(place.word(LOCKS));
        assert_eq!((held.token, u64::from(held.seat), held.granted), (token, seat, true));
        let (_, ring) = place.one_sided(LOCKS, Op::Release, token, seat);
        assert!(ring);
        // Nobody gets it past the queue, whichever way.
        let free = place.word(LOCKS);
        place.one_sided(LOCKS, Op::Acquire, 99, 0);
        clients[0].op(LOCKS, Op::Acquire, clients[0].seat.into(), 0).unwrap();
        assert_eq!(place.word(LOCKS), free);
        assert_eq!(woken(&place.ring(LOCKS)), [(holder + 2, 7, free)]);
    }
    assert!(!is_waiting(place.word(LOCKS)), "nobody queues any more");
    assert_eq!(place.engine.parked(), 0);
}

#[test]
fn the_sweep_hands_on_what_a_dead_releaser_left() {
    let place = Place::new();
    let (a, b) = (place.client(1, 0), place.client(2, 0));
    a.op(LOCKS, Op::Acquire, a.seat.into(), 0).unwrap();
    b.queue(LOCKS, 1);
    assert!(place.sweep().is_empty());
    // Without a ring.
    place.one_sided(LOCKS, Op::Release, 1, a.seat.into());
    assert_eq!(woken(&place.sweep()).len(), 1);
    assert_eq!(Lock::of(place.word(LOCKS)).seat, b.seat);
    a.op(PERMITS, Op::Down, 0, 0).unwrap();
    a.queue(PERMITS, 2);
    b.queue(PERMITS, 2);
    place.one_sided(PERMITS, Op::Up, 3, BOUND);
    assert_eq!(woken(&place.sweep()).len(), 2);
    assert_eq!(place.word(PERMITS), 1 << 1);
}

#[test]
fn permits_go_to_as_many_as_there_are() {
    let place = Place::new();
    let clients: Vec<Client> = (1..=4).map(|id| place.client(id, 0)).collect();
    assert_eq!(woken(&clients[0].queue(PERMITS, 1)).len(), 1);
    for client in &clients[1..] {
        assert!(client.queue(PERMITS, 1).is_empty());
    }
    assert_eq!(clients[0].op(PERMITS, Op::Up, 2, BOUND), Ok(WAITING));
    assert_eq!(place.word(PERMITS), WAITING, "two are out, and one still queues");
    assert_eq!(place.engine.parked(), 1);
    assert_eq!(clients[0].op(PERMITS, Op::Up, 4, BOUND), Ok(WAITING));
    assert_eq!((place.word(PERMITS), place.engine.parked()), (3 << 1, 0));
}

#[test]
fn a_grant_while_away_is_told_once_on_return() {
    let place = Place::new();
    let (a, b) = (place.client(1, 0), place.client(2, 0));
    a.op(LOCKS, Op::Acquire, a.seat.into(), 0).unwrap();
    b.queue(LOCKS, 5);
    place.engine.detach(&b.session, 2);
    a.op(LOCKS, Op::Release, 1, a.seat.into()).unwrap();
    let held = place.word(LOCKS);
    assert_eq!(Lock::of(held).seat, b.seat);
    for _ in 0..2 {
        assert_eq!(woken(&b.queue(LOCKS, 5)).len(), 1);
        assert_eq!(place.word(LOCKS), held, "it was not granted again");
    }
    b.say(Tag::WaitDone, 5, &[]);
    b.op(LOCKS, Op::Release, 2, b.seat.into()).unwrap();
    assert_eq!(Lock::of(place.word(LOCKS)).seat, 0);
}

#[test]
fn a_grant_to_one_that_never_returns_is_freed() {
    let place = Place::new();
    let (a, b, c) = (place.client(1, 900), place.client(2, 0), place.client(3, 900));
    a.op(LOCKS, Op::Acquire, a.seat.into(), 0).unwrap();
    a.op(PERMITS, Op::Down, 0, 0).unwrap();
    for (array, wait) in [(LOCKS, 1), (PERMITS, 2)] {
        b.queue(array, wait);
        c.queue(array, wait);
    }
    place.engine.detach(&b.session, 2);
    a.op(LOCKS, Op::Release, 1, a.seat.into()).unwrap();
    a.op(PERMITS, Op::Up, 1, BOUND).unwrap();
    let told = woken(&place.pass_to(1500));
    assert_eq!(told.iter().map(|(to, wait, _)| (*to, *wait)).collect::<Vec<_>>(), [(3, 2), (3, 1)]);
    let lock = told.iter().find(|(_, wait, _)| *wait == 1).unwrap();
    assert!(Lock::of(lock.2).abandoned);
    assert_eq!(Lock::of(place.word(LOCKS)).seat, c.seat);
    assert_eq!(place.word(PERMITS), 0);
    assert_eq!(place.engine.parked(), 0);
}

#[test]
fn a_permit_that_arrived_is_its_takers_own_affair() {
    let place = Place::new();
    let a = place.client(1, 0);
    assert_eq!(woken(&a.queue(PERMITS, 1)).len(), 1);
    a.say(Tag::WaitDone, 1, &[]);
    place.pass_to(1500);
    assert_eq!(place.word(PERMITS), 0);
}

#[test]
fn what_is_forfeited_goes_to_the_next_whether_it_was_granted_or_not() {
    let place = Place::new();
    let clients: Vec<Client> = (1..=4).map(|id| place.client(id, 0)).collect();
    clients[0].op(LOCKS, Op::Acquire, clients[0].seat.into(), 0).unwrap();
    for client in &clients[1..] {
        client.queue(LOCKS, 1);
    }
    // One that still queues.
    assert!(clients[2].say(Tag::Forfeit, 1, &[]).is_empty());
    // One that was granted it, and has not heard.
    clients[0].op(LOCKS, Op::Release, 1, clients[0].seat.into()).unwrap();
    assert_eq!(Lock::of(place.word(LOCKS)).seat, clients[1].seat);
    let told = woken(&clients[1].say(Tag::Forfeit, 1, &[]));
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].0, 4);
    assert!(!Lock::of(told[0].2).abandoned);
    assert_eq!(Lock::of(place.word(LOCKS)).token, 3, "no token twice");
    // Twice, and of nothing, and of one that was unlocked since.
    assert!(clients[1].say(Tag::Forfeit, 1, &[]).is_empty());
    assert!(clients[1].say(Tag::Forfeit, 77, &[]).is_empty());
    clients[3].op(LOCKS, Op::Release, 3, clients[3].seat.into()).unwrap();
    let before = place.word(LOCKS);
    clients[3].say(Tag::Forfeit, 1, &[]);
    assert_eq!(place.word(LOCKS), before);
    // A permit.
    assert_eq!(woken(&clients[0].queue(PERMITS, 2)).len(), 1);
    assert!(clients[1].queue(PERMITS, 2).is_empty());
    assert_eq!(woken(&clients[0].say(Tag::Forfeit, 2, &[])).len(), 1);
}

#[test]
fn a_cancel_takes_what_was_granted_and_leaves_nothing_if_it_was_not() {
    let place = Place::new();
    let (a, b) = (place.client(1, 0), place.client(2, 0));
    a.op(LOCKS, Op::Acquire, a.seat.into(), 0).unwrap();
    b.queue(LOCKS, 1);
    let answers = b.say(Tag::Cancel, 1, &[]);
    assert_eq!(answers[0].1.0.tag, Tag::Cancelled as u8);
    assert!(!is_waiting(place.word(LOCKS)));
    b.queue(LOCKS, 2);
    a.op(LOCKS, Op::Release, 1, a.seat.into()).unwrap();
    assert_eq!(woken(&b.say(Tag::Cancel, 2, &[])).len(), 1, "it has it already");
    assert_eq!(Lock::of(place.word(LOCKS)).seat, b.seat);
}

#[test]
fn nothing_is_given_back_into_cells_of_another_array() {
    let place = Place::new();
    let a = place.client(1, 0);
    assert_eq!(woken(&a.queue(PERMITS, 1)).len(), 1);
    assert_eq!(woken(&a.queue(LOCKS, 2)).len(), 1);
    a.say(Tag::Remove, 0, &[b"permits"]);
    a.say(Tag::Remove, 0, &[b"locks"]);
    let form = Form { kind: Kind::Counter, shape: Shape { rows: 1, cols: 16 }, param: 0 };
    let (entry, _) = place.engine.open("counters", form).unwrap();
    assert_eq!(entry.base, place.base[0]);
    a.say(Tag::Forfeit, 1, &[]);
    a.say(Tag::Forfeit, 2, &[]);
    place.pass_to(1500);
    for cell in entry.base..entry.base + entry.extent {
        assert_eq!(place.engine.actor.load(cell), 0);
    }
}

#[test]
fn a_seat_that_is_not_ones_own_is_of_no_use() {
    let place = Place::new();
    let (a, b) = (place.client(1, 0), place.client(2, 0));
    let stale = 32;
    for seat in [0, u64::from(b.seat), 1 << 20, u64::MAX] {
        assert_eq!(a.op(LOCKS, Op::Acquire, seat, 0), Err(stale), "{seat}");
    }
    b.op(LOCKS, Op::Acquire, b.seat.into(), 0).unwrap();
    assert_eq!(a.op(LOCKS, Op::Release, 1, b.seat.into()), Err(stale), "someone else's");
    a.op(LOCKS, Op::Release, 1, a.seat.into()).unwrap();
    assert_eq!(Lock::of(place.word(LOCKS)).seat, b.seat);
    assert_eq!(code(&a.queue_as(LOCKS, 1, b.seat)), stale);
    assert_eq!(code(&a.queue_as(PERMITS, 1, 0)), stale);
    assert_eq!(code(&a.queue(BARRIERS, 1)), 2, "nobody queues for a barrier");
    assert_eq!(code(&a.queue(9, 1)), 1);
    let bad = 33;
    for (array, op, a_, b_) in [
        (PERMITS, Op::Up, 1, BOUND + 1),
        (PERMITS, Op::Up, 0, BOUND),
        (BARRIERS, Op::Arrive, 0, PARTIES - 1),
        (BARRIERS, Op::Break, 0, 0),
        (BARRIERS, Op::Reset, 0, u64::MAX),
    ] {
        assert_eq!(a.op(array, op, a_, b_), Err(bad), "{op:?}");
    }
    assert_eq!(a.op(LOCKS, Op::Add, 2, 0), Err(2), "no counter");
    let reader = place.client_with(3, 0, Access::ReadOnly);
    assert_eq!(reader.op(LOCKS, Op::Acquire, reader.seat.into(), 0), Err(5));
    assert_eq!(code(&reader.queue(LOCKS, 1)), 5);
    let (_, next) = a.try_say(Tag::Acquire, 1, &[&[0; 15]]);
    assert!(matches!(next, Err(Violation::Size(24, 15))));
    let (_, next) = a.try_say(Tag::Acquire, 1, &[&[0; 17]]);
    assert!(matches!(next, Err(Violation::Size(24, 17))));
}

#[test]
fn locks_of_seats_that_nobody_has_are_freed() {
    let place = Place::new();
    let (a, b) = (place.client(1, 0), place.client(2, 500));
    a.op(LOCKS, Op::Acquire, a.seat.into(), 0).unwrap();
    b.queue(LOCKS, 1);
    place.engine.tidy(&mut Out::default());
    assert_eq!(Lock::of(place.word(LOCKS)).seat, a.seat, "it lives");
    assert_eq!(woken(&place.pass_to(1200)).len(), 1);
    b.op(LOCKS, Op::Release, 2, b.seat.into()).unwrap();
    // Its client goes on, past its end, and past the server.
    place.one_sided(LOCKS, Op::Acquire, a.seat.into(), 0);
    b.queue(LOCKS, 2);
    let mut out = Out::default();
    place.engine.tidy(&mut out);
    let told = woken(&mail(out));
    assert_eq!(told.len(), 1);
    assert!(Lock::of(told[0].2).abandoned);
}

#[test]
fn a_barrier_is_broken_by_the_lost_and_not_by_those_who_leave_in_peace() {
    let place = Place::new();
    let party = |client: &Client| {
        let record = PartyRecord { array: BARRIERS, ..PartyRecord::default() };
        client.say(Tag::Party, 0, &[bytemuck::bytes_of(&record)]);
    };
    let (a, b, c) = (place.client(1, 5000), place.client(2, 5000), place.client(3, 0));
    for client in [&a, &b, &c] {
        party(client);
    }
    b.say(Tag::Join, 0, &[b"b"]);
    for index in 0..PARTIES {
        assert_eq!(a.op(BARRIERS, Op::Arrive, 0, PARTIES), Ok(index << 1));
    }
    // Nobody waits when it says goodbye.
    let (_, next) = c.try_say(Tag::Bye, 0, &[]);
    assert_eq!(next, Ok(Next::Close));
    assert!(!Barrier::of(place.word(BARRIERS)).broken);
    a.op(BARRIERS, Op::Arrive, 0, PARTIES).unwrap();
    b.say(Tag::Release, 0, &[]);
    let word = Barrier::of(place.word(BARRIERS));
    assert!(word.broken, "a is there, and b would have been missed");
    let record = PartyRecord { array: BARRIERS, epoch: word.epoch, ..PartyRecord::default() };
    let answers = a.say(Tag::WhoBroke, 0, &[bytemuck::bytes_of(&record)]);
    assert_eq!(answers[0].1.1[0], Gone::Released as u8);
    assert_eq!(&answers[0].1.1[16..], b"b");
    a.op(BARRIERS, Op::Reset, word.epoch, PARTIES).unwrap();
    let word = Barrier::of(place.word(BARRIERS));
    assert_eq!((word.epoch, word.arrivals, word.broken), (1, 0, false));
    // Whoever is silent breaks it, also if nobody waits.
    place.pass_to(9000);
    assert!(Barrier::of(place.word(BARRIERS)).broken);
}

#[test]
fn a_wait_at_a_barrier_ends_with_the_last_arrival_only() {
    let place = Place::new();
    let a = place.client(1, 0);
    a.op(BARRIERS, Op::Arrive, 0, PARTIES).unwrap();
    let head = wire::WaitHead { need: 1, peers: 0 };
    let record = wire::WaitRecord {
        array: BARRIERS,
        comparison: 4,
        reserved: 0,
        run: wire::RunRecord { offset: 0, count: 1, stride: 1 },
        value: PARTIES as i64,
    };
    let parts = [bytemuck::bytes_of(&head), bytemuck::bytes_of(&record)];
    assert!(a.say(Tag::Wait, 1, &parts).is_empty());
    let (old, ring) = place.one_sided(BARRIERS, Op::Arrive, 0, PARTIES);
    assert!(is_waiting(old) && !ring, "no need to wake the server for this one");
    let (_, ring) = place.one_sided(BARRIERS, Op::Arrive, 0, PARTIES);
    assert!(ring);
    let told = woken(&place.ring(BARRIERS));
    assert_eq!(told.len(), 1);
    assert_eq!(value(told[0].2), PARTIES as i64);
}
