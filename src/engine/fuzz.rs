//! The engine, with some sessions that send anything, lose their connections,
//! and fall silent.

use super::actor::{Actor, execute};
use super::{Begun, Brought, Engine, Newcomer, Next, Out, SharedSession, Writing, lock};
use crate::auth::Access;
use crate::catalog::{Catalog, Kind};
use crate::cell::sync::Lock;
use crate::cell::{Op, is_waiting};
use crate::fuzz::Input;
use crate::segment::Segment;
use crate::wire::slots::{REQUEST, SlotTag, request};
use crate::wire::{self, Header, OpenRecord, Tag};
use std::time::Duration;

const CAPACITY: u32 = 512;
const LEASE: Duration = Duration::from_millis(100);
const SESSIONS: usize = 3;
/// Kinds of the arrays that every session has open from the start, by number.
const ARRAYS: [(Kind, u64); 6] = [
    (Kind::Event, 0),
    (Kind::Counter, 0),
    (Kind::Lock, 0),
    (Kind::Barrier, 2),
    (Kind::Semaphore, 3 << 32 | 1),
    (Kind::Slots, 64),
];

struct Client {
    session: SharedSession,
    id: u64,
    route: u64,
    writing: Option<Writing>,
}

struct World {
    engine: Engine<Segment>,
    clients: Vec<Client>,
    now: Duration,
    made: u64,
}

fn frame(tag: u8, id: u64, span: u16, payload: &[u8]) -> Vec<u8> {
    let header = Header { tag, span, ..Header::new(Tag::Bye, id, payload.len()) };
    [bytemuck::bytes_of(&header), payload].concat()
}

impl World {
    fn attach(&mut self, access: Access, resume: Option<u64>, out: &mut Out) -> Client {
        self.made += 1;
        let (route, fresh) = (self.made, self.made + 1000);
        let newcomer = Newcomer { access, resume, next_request: 1, fresh, route };
        let attached = self.engine.attach(&newcomer, self.now, out);
        Client { session: attached.session, id: attached.id, route, writing: None }
    }

    /// Does with what came out as the server does.
    fn carry(&mut self, mut out: Out) {
        let mut rest = &out.reply[..];
        while !rest.is_empty() {
            let (_, payload) = wire::split(rest).unwrap().expect("only whole frames go out");
            rest = &rest[wire::HEADER + payload.len()..];
        }
        for (_, bytes) in &out.mail {
            let (_, payload) = wire::split(bytes).unwrap().expect("whole");
            assert_eq!(bytes.len(), wire::HEADER + payload.len(), "one answer in one piece");
        }
        while !out.ended.is_empty() {
            let mut next = Out::default();
            for over in out.ended.drain(..) {
                self.engine.end_writes(over.id, &mut next);
                self.engine.settle(over.id, self.now, &mut next);
            }
            out = next;
        }
    }

    fn hand(&mut self, who: usize, bytes: &[u8]) {
        let (session, route) = (self.clients[who].session.clone(), self.clients[who].route);
        let mut rest = bytes;
        loop {
            let mut out = Out::default();
            let (used, next) = self.engine.handle(self.now, &mut lock(&session), rest, &mut out);
            self.carry(out);
            assert!(used <= rest.len());
            rest = &rest[used..];
            match next {
                Ok(Next::Continue | Next::Way { .. }) if used > 0 => {}
                Ok(Next::Prepare) => {
                    lock(&session).prepared = Some(self.engine.prepare(rest));
                }
                // The rest of a frame is to come, and never does.
                Ok(Next::Continue | Next::Way { .. }) => return,
                Ok(Next::Close) | Err(_) => return self.engine.detach(&session, route),
            }
        }
    }

    fn expire(&mut self, time: Duration) {
        self.now += time;
        let mut out = Out::default();
        self.engine.expire(self.now, &mut out);
        self.carry(out);
    }

    fn tidy(&mut self) {
        let mut out = Out::default();
        self.engine.sweep(&mut out);
        self.engine.tidy(&mut out);
        while self.engine.is_untidy() {
            self.engine.mend(&mut out);
        }
        self.carry(out);
    }

    /// A request about messages, as it comes on a connection for these.
    fn message(&mut self, who: usize, input: &mut Input<'_>) {
        let mut bytes = [0; REQUEST];
        bytes[..4].copy_from_slice(&((REQUEST - wire::HEADER) as u32).to_le_bytes());
        bytes[4] = 40 + input.byte() % 3;
        bytes[wire::HEADER..].copy_from_slice(&input.array::<{ REQUEST - wire::HEADER }>());
        let Ok((tag, asked)) = request(&bytes) else {
            return;
        };
        let client = &mut self.clients[who];
        let session = client.session.clone();
        let mut session = lock(&session);
        if session.ended {
            return;
        }
        let mut out = Out::default();
        match tag {
            SlotTag::Read => {
                if let Ok((row, reply)) = self.engine.slot_read(&session, &asked) {
                    assert!(reply.bytes <= row.payload.bytes());
                    self.engine.slot_check(&row, reply.word);
                }
            }
            SlotTag::Abort => {
                if let Some(writing) = client.writing.take() {
                    self.engine.slot_abandon(&writing, &mut out);
                }
            }
            SlotTag::Write => match client.writing.take() {
                None => {
                    if let Ok(Ok(Begun::Claimed(writing))) =
                        self.engine.slot_begin(&mut session, &asked, &mut out)
                    {
                        client.writing = Some(writing);
                    }
                }
                Some(writing) => {
                    let mut brought = Brought::default();
                    if let Some(end) = asked.offset.checked_add(asked.bytes) {
                        brought.add(asked.offset, end);
                    }
                    let _ = self.engine.slot_commit(
                        &mut session,
                        &writing,
                        asked.total,
                        &brought,
                        &mut out,
                    );
                }
            },
        }
        drop(session);
        self.carry(out);
    }
}

/// Frames of several sessions, whole or not, among lost connections and ends of
/// leases. Behind all ends nothing is parked, no cell is waited for, and no lock
/// is held.
pub fn frames(data: &[u8]) {
    let Ok(segment) = Segment::anonymous(CAPACITY) else {
        return;
    };
    let engine = Engine::with_catalog(segment, Catalog::new(CAPACITY), LEASE).slot_bytes(1 << 14);
    let mut world = World { engine, clients: Vec::new(), now: Duration::ZERO, made: 0 };
    for who in 0..SESSIONS {
        let mut out = Out::default();
        let client = world.attach(Access::ReadWrite, None, &mut out);
        world.clients.push(client);
        for (number, (kind, param)) in ARRAYS.into_iter().enumerate() {
            let array = number as u16;
            let (kind, rows) = (kind as u8, 3);
            let open = OpenRecord { array, kind, rows, cols: 1, param, ..OpenRecord::default() };
            let name = [b'a' + number as u8];
            let payload = [bytemuck::bytes_of(&open), &name].concat();
            world.hand(who, &frame(Tag::Open as u8, 0, 0, &payload));
        }
    }
    let mut input = Input(data);
    while !input.is_empty() {
        let what = input.byte();
        let who = usize::from(what >> 4) % SESSIONS;
        match what & 15 {
            0..=7 => {
                let [tag, id, span] = input.array();
                let payload = input.piece();
                world.hand(who, &frame(tag, id.into(), span.into(), payload));
            }
            8 => {
                let bytes = input.piece();
                world.hand(who, bytes);
            }
            9 => {
                let resume = Some(world.clients[who].id);
                let access = if input.byte() < 200 { Access::ReadWrite } else { Access::ReadOnly };
                let mut out = Out::default();
                let client = world.attach(access, resume, &mut out);
                world.carry(out);
                let writing = world.clients[who].writing.take();
                world.clients[who] = Client { writing, ..client };
            }
            10 => {
                let client = &world.clients[who];
                world.engine.detach(&client.session, client.route);
            }
            11 => world.expire(Duration::from_millis(input.byte().into())),
            12 => world.tidy(),
            13 => world.message(who, &mut input),
            14 => {
                // A client that changes a cell by itself, and may die then.
                let [op, place, ring, a, b] = input.array();
                let place = u32::from(place) % CAPACITY;
                // Parties of a barrier are 1 at least.
                let (a, b) = (a.into(), u64::from(b).max(1));
                if let Some(op) = Op::from_code(op) {
                    let (_, rings) = execute(&world.engine.actor, place, op, a, b);
                    if rings && ring & 1 == 0 {
                        let mut out = Out::default();
                        world.engine.ring(place, &mut out);
                        world.carry(out);
                    }
                }
            }
            _ => world.hand(who, &frame(Tag::Bye as u8, 0, 0, &[])),
        }
    }
    world.tidy();
    world.expire(LEASE + Duration::from_millis(1));
    world.tidy();
    assert_eq!(world.engine.sessions(), 0, "a session without a lease");
    assert_eq!(world.engine.parked(), 0, "a wait without a session");
    for entry in world.engine.arrays() {
        for place in entry.base..entry.base + entry.extent {
            let word = world.engine.actor.load(place);
            assert!(!is_waiting(word), "a waiting bit without a waiter: cell {place}");
            if entry.form.kind == Kind::Lock {
                assert_eq!(Lock::of(word).seat, 0, "a lock without a holder");
            }
        }
    }
}
