//! The server as a driver of the engine, the network, and time, in steps of a
//! millisecond.

use super::books::{Books, COUNTERS, EVENTS, LOCKS, PARTIES, PERMITS, ROWS};
use super::client::{
    Aim, BARRIER, BRIEF, COUNTER, Client, EVENT, LOCK, SEMAPHORE, SLOTS, WILL, Want, name_of,
};
use super::faults::{Cells, Fault};
use super::network::{Connection, Packet};
use super::random::Random;
use crate::auth::Access;
use crate::catalog::{Catalog, Form, Kind};
use crate::cell::sync::{Barrier, Lock, permits};
use crate::cell::{Condition, Op, is_waiting, value};
use crate::engine::actor::Actor;
use crate::engine::parking::WaitId;
use crate::engine::session::Session;
use crate::engine::{Begun, Brought, Engine, Newcomer, Next, Out, lock};
use crate::layout::Shape;
use crate::segment::Segment;
use crate::slot::Version;
use crate::wire::slots::{BEGIN, COMMIT, SlotRequest};
use crate::wire::{self, HEADER, OpRecord, Tag, WaitHead, WaitRecord};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

mod inspect;

const CAPACITY: u32 = 256;
const CLIENTS: usize = 6;
/// In milliseconds, as all times here.
const LEASE: u64 = 100;
/// How often the server looks for leases that are over.
const TICK: u64 = 10;

/// A wait as the server has heard of it, and what has satisfied it so far.
struct Heard {
    need: usize,
    goals: Vec<(u32, u16, Condition)>,
    fired: BTreeSet<usize>,
    peers: Vec<String>,
}

/// See the [module](self).
pub struct World {
    engine: Engine<Cells>,
    fault: Fault,
    now: u64,
    random: Random,
    clients: Vec<Client>,
    connections: BTreeMap<u64, Connection>,
    made: u64,
    books: Books,
    /// First cells of the arrays, by number, but of the one that comes and goes.
    bases: Vec<u32>,
    waits: BTreeMap<(u64, u64), Heard>,
    /// Sessions with a will.
    wills: BTreeSet<u64>,
}

impl World {
    pub fn new(fault: Fault) -> World {
        let segment = Segment::anonymous(CAPACITY).expect("memory");
        let mut cells = Cells { segment, fault, locks: 0..0, count: AtomicU64::new(0) };
        // The first ones of an empty catalog stand where these would.
        let forms = [
            (EVENT, Kind::Event, 1, EVENTS, 0),
            (COUNTER, Kind::Counter, 1, COUNTERS, 0),
            (LOCK, Kind::Lock, 1, LOCKS, 0),
            (BARRIER, Kind::Barrier, 1, 1, PARTIES),
            (SEMAPHORE, Kind::Semaphore, 1, 1, PERMITS << 32 | PERMITS),
            (WILL, Kind::Counter, 1, 1, 0),
            (SLOTS, Kind::Slots, ROWS, 1, 64),
        ];
        let shape = |rows: usize, cols: usize| Shape { rows: rows as u32, cols: cols as u32 };
        let before: u64 = forms[..2].iter().map(|f| shape(f.2, f.3).extent()).sum();
        cells.locks = before as u32..before as u32 + LOCKS as u32;
        let catalog = Catalog::new(CAPACITY);
        let engine = Engine::with_catalog(cells, catalog, Duration::from_millis(LEASE));
        let mut bases = vec![0; usize::from(SLOTS) + 1];
        for (number, kind, rows, cols, param) in forms {
            let form = Form { kind, shape: shape(rows, cols), param };
            let (entry, _) = engine.open(&name_of(number), form).expect("room");
            bases[usize::from(number)] = entry.base;
        }
        World {
            engine,
            fault,
            now: 1,
            random: Random::of(0, 0),
            clients: (0..CLIENTS).map(Client::new).collect(),
            connections: BTreeMap::new(),
            made: 0,
            books: Books::default(),
            bases,
            waits: BTreeMap::new(),
            wills: BTreeSet::new(),
        }
    }

    fn time(&self) -> Duration {
        Duration::from_millis(self.now)
    }

    fn word(&self, array: u16, offset: u32) -> u64 {
        self.engine.actor.segment.load(self.bases[usize::from(array)] + offset)
    }

    // ---- what happens ---------------------------------------------------------

    pub fn step(&mut self, random: Random) {
        self.random = random;
        let who = self.random.below(CLIENTS as u64) as usize;
        match self.random.below(100) {
            0..=61 => self.operation(who),
            62..=81 => {
                let time = 1 + self.random.below(20);
                self.pass(time);
            }
            82 => {
                let time = 40 + self.random.below(120);
                self.pass(time);
            }
            83..=88 => self.cut(who),
            89..=91 => {
                let time = self.random.below(2 * LEASE);
                self.part(who, time);
            }
            92 => self.leave(who),
            _ => self.write(who),
        }
        self.send();
    }

    /// Everyone comes to an end with what is under way; then all go, in their own
    /// ways.
    pub fn finish(&mut self, random: Random) {
        self.random = random;
        for client in &mut self.clients {
            client.apart_until = 0;
        }
        self.pass(2 * LEASE);
        let left = self.unheard();
        self.pass(2 * LEASE);
        let unheard = self.unheard();
        let never: Vec<_> = left.intersection(&unheard).collect();
        assert!(never.is_empty(), "client, session and wait {never:?}: the answer never came");
        for client in &mut self.clients {
            client.give_up(self.now);
        }
        for _ in 0..40 {
            if self.clients.iter().all(|client| client.welcomed && client.is_idle()) {
                break;
            }
            self.pass(LEASE / 2);
        }
        for client in &self.clients {
            let number = client.number;
            assert!(client.welcomed, "client {number} is not there any more");
            assert!(client.is_idle(), "client {number} was left: {}", client.under_way());
        }
        for who in 0..CLIENTS {
            self.clients[who].reconnect_at = u64::MAX;
            if self.random.often(50) {
                self.leave(who);
                self.clients[who].reconnect_at = u64::MAX;
            } else {
                self.cut(who);
                self.clients[who].disconnect(u64::MAX);
                self.clients[who].lose_session(&mut self.books);
            }
        }
        self.send();
        self.pass(3 * LEASE);
        assert_eq!(self.engine.sessions(), 0, "sessions without a lease");
        assert_eq!(self.engine.parked(), 0, "waits without a session");
        for entry in self.engine.arrays() {
            for place in entry.base..entry.base + entry.extent {
                let word = self.engine.actor.segment.load(place);
                assert!(
                    !is_waiting(word),
                    "a waiting bit without a waiter: {} {place}",
                    entry.name
                );
            }
        }
        for (at, count) in self.books.counters.iter().enumerate() {
            count.check(value(self.word(COUNTER, at as u32)), 0, "a counter");
        }
        for (at, count) in self.books.events.iter().enumerate() {
            count.check(value(self.word(EVENT, at as u32)), 0, "an event");
        }
        for (at, count) in self.books.rows.iter().enumerate() {
            let version = Version::of(self.word(SLOTS, at as u32 * 8));
            assert!(!version.is_writing(), "a row that nobody writes");
            count.check(version.number() as i64, 0, "a message");
        }
        let barrier = Barrier::of(self.word(BARRIER, 0));
        if let Some(count) = self.books.arrivals.get(&barrier.epoch) {
            count.check(barrier.arrivals as i64, self.books.arrivals_lost, "a barrier");
        }
        for at in 0..LOCKS {
            let seat = Lock::of(self.word(LOCK, at as u32)).seat;
            assert_eq!(seat, 0, "a lock without a holder");
        }
        let there = value(self.word(SEMAPHORE, 0)) as u64;
        assert!(there + self.books.permits_lost >= PERMITS, "permits are lost: {there} are there");
        assert_eq!(value(self.word(WILL, 0)), self.books.wills, "wills");
    }

    /// Waits that have ended, and whose clients do not know it.
    fn unheard(&self) -> BTreeSet<(usize, u64, u64)> {
        let parking = lock(&self.engine.parking);
        let mut all = BTreeSet::new();
        for client in &self.clients {
            if let Some(session) = client.session.filter(|_| client.welcomed) {
                let ended = |wait: &u64| !parking.is_parked(WaitId { session, wait: *wait });
                all.extend(client.waits().filter(ended).map(|w| (client.number, session, w)));
            }
        }
        all
    }

    /// Something that a client wants.
    fn operation(&mut self, who: usize) {
        let random = &mut self.random;
        let client = &mut self.clients[who];
        if !client.welcomed || client.is_busy() {
            return;
        }
        let most = if random.often(10) { 100 * LEASE } else { 150 };
        let patience = self.now + 1 + random.below(most);
        match random.below(17) {
            0..=2 => {
                let counter = random.below(COUNTERS as u64) as usize;
                client.op(Want::Add(counter), Op::Add, COUNTER, counter as u32, (1, 0));
            }
            3..=5 => {
                let event = random.below(EVENTS as u64) as usize;
                let op = [Op::Set, Op::Clear, Op::Take][random.below(3) as usize];
                client.op(Want::Event(event, op), op, EVENT, event as u32, (0, 0));
            }
            6..=8 => {
                let lock = random.below(LOCKS as u64) as usize;
                let seat = u64::from(client.seat);
                if let Some(token) = client.holds.remove(&lock) {
                    client.op(Want::Release, Op::Release, LOCK, lock as u32, (token, seat));
                } else if !client.is_after(lock) && random.often(40) {
                    let want = Want::TryLock(lock);
                    client.op(want, Op::Acquire, LOCK, lock as u32, (seat, 0));
                } else if !client.is_after(lock) {
                    client.queue(LOCK, lock as u32, Aim::Lock(lock), patience);
                }
            }
            9 if client.permits > 0 => {
                client.permits -= 1;
                client.op(Want::Up, Op::Up, SEMAPHORE, 0, (1, permits(PERMITS << 32 | PERMITS).1));
            }
            9 => client.queue(SEMAPHORE, 0, Aim::Permit, patience),
            10 => client.arrive(),
            11..=13 => {
                let mut goals = Vec::new();
                for _ in 0..1 + random.below(3) {
                    let (array, most) = match random.below(9) {
                        0..=3 => (EVENT, EVENTS),
                        4..=7 => (COUNTER, COUNTERS),
                        _ => (WILL, 1),
                    };
                    let offset = random.below(most as u64) as u32;
                    goals.push((array, offset, client.condition(array, offset, random.number())));
                }
                let need = 1 + random.below(goals.len() as u64) as usize;
                let peer = (random.often(40)).then(|| {
                    format!(
                        "client {}",
                        (who as u64 + 1 + random.below(CLIENTS as u64 - 1)) % CLIENTS as u64
                    )
                });
                client.wait_for(need, &goals, peer, patience);
            }
            14 => {
                let record =
                    OpRecord { op: Op::Add as u8, reserved: 0, array: WILL, offset: 0, a: 1, b: 0 };
                let will = if random.often(70) { bytemuck::bytes_of(&record) } else { &[] };
                client.request(Want::Other, Tag::SetWill, will);
            }
            15 => match random.below(4) {
                0 => client.request(Want::Brief, Tag::Remove, name_of(BRIEF).as_bytes()),
                1 => client.op(Want::Brief, Op::Add, BRIEF, 0, (1, 0)),
                2 => {
                    let goal = client.condition(BRIEF, 0, random.number());
                    client.wait_for(1, &[(BRIEF, 0, goal)], None, patience);
                }
                _ => client.open_brief(),
            },
            _ => {
                let name = client.name();
                client.request(Want::Join, Tag::Join, name.as_bytes());
            }
        }
    }

    /// A message, by a connection for these; either answer may be lost.
    fn write(&mut self, who: usize) {
        let client = &mut self.clients[who];
        let open = |route| self.connections.get(&route).filter(|c: &&Connection| c.at_server);
        let Some(session) = client.route.and_then(open).and_then(|c| c.session.clone()) else {
            return;
        };
        let mut session = lock(&session);
        if !client.welcomed || session.ended || Some(session.id) != client.session {
            return;
        }
        let row = self.random.below(ROWS as u64) as usize;
        let (row, number) = match client.write {
            Some((row, _)) if self.fault == Fault::TwiceWritten => {
                client.writes += 1;
                (row, client.writes)
            }
            Some(write) => write,
            None => {
                client.writes += 1;
                (row, client.writes)
            }
        };
        client.write = Some((row, number));
        let request = SlotRequest {
            array: SLOTS,
            flags: BEGIN | COMMIT,
            row: row as u32,
            write: number,
            oldest: number,
            ..SlotRequest::default()
        };
        let mut out = Out::default();
        let begun = self.engine.slot_begin(&mut session, &request, &mut out).expect("few writes");
        let mut word = None;
        match begun {
            Ok(Begun::Before(before)) => word = Some(before),
            Ok(Begun::Claimed(writing)) if self.random.often(30) => {
                self.engine.slot_lost(&writing, &mut out);
            }
            Ok(Begun::Claimed(writing)) => {
                let mut brought = Brought::default();
                brought.add(0, 8);
                let done = self.engine.slot_commit(&mut session, &writing, 8, &brought, &mut out);
                let done = done.expect("a claim that stands");
                word = (!self.random.often(40)).then_some(done.word);
            }
            // Its array is not open yet: the frames of that are on their way.
            Err(_) => {}
        }
        if let Some(word) = word {
            client.write = None;
            self.books.rows[row].acknowledge(Version::of(word).number() as i64 - 1, "a message");
        }
        drop(session);
        self.carry(out, None);
        self.inspect();
    }

    /// A connection breaks, with some of what is under way.
    fn cut(&mut self, who: usize) {
        let Some(route) = self.clients[who].route else {
            return;
        };
        if let Some(connection) = self.connections.get_mut(&route) {
            connection.up.cut(self.now, &mut self.random);
            connection.down.cut(self.now, &mut self.random);
        }
    }

    /// A client's machine is cut off for a while.
    fn part(&mut self, who: usize, time: u64) {
        let until = self.now + time;
        self.clients[who].apart_until = until;
        for connection in self.connections.values_mut().filter(|c| c.client == who) {
            connection.up.hold(until);
            connection.down.hold(until);
        }
    }

    /// A client says goodbye, and comes back as another one soon.
    fn leave(&mut self, who: usize) {
        let hand_over = self.random.often(50);
        let back = self.now + 60 + self.random.below(60);
        let client = &mut self.clients[who];
        let Some(route) = client.route.filter(|_| client.welcomed) else {
            return;
        };
        client.goodbye(hand_over);
        let bytes = std::mem::take(&mut client.out);
        if let Some(connection) = self.connections.get_mut(&route) {
            connection.up.send(self.now, &mut self.random, Packet::Bytes(bytes));
            connection.at_client = false;
        }
        client.lose_session(&mut self.books);
        client.disconnect(back);
    }

    // ---- time and the network ---------------------------------------------------

    fn pass(&mut self, time: u64) {
        for _ in 0..time {
            self.send();
            self.now += 1;
            self.deliver();
            if self.now.is_multiple_of(5) {
                let mut out = Out::default();
                self.engine.sweep(&mut out);
                self.carry(out, None);
            }
            if self.now.is_multiple_of(TICK) && self.fault != Fault::NoLease {
                let mut out = Out::default();
                self.engine.expire(self.time(), &mut out);
                self.carry(out, None);
                let mut out = Out::default();
                if self.fault != Fault::NotSettled {
                    self.engine.tidy(&mut out);
                }
                self.carry(out, None);
                self.inspect();
            }
            self.inspect_leases();
            for who in 0..CLIENTS {
                self.look_after(who);
            }
        }
    }

    fn look_after(&mut self, who: usize) {
        let now = self.now;
        let client = &mut self.clients[who];
        match client.route {
            Some(_) if now > client.heard + LEASE => {
                // Nothing heard for so long: the connection is dead.
                let route = client.route;
                client.disconnect(now + 1 + self.random.below(10));
                if let Some(connection) = route.and_then(|route| self.connections.get_mut(&route)) {
                    connection.at_client = false;
                    connection.up.cut(now, &mut self.random);
                }
            }
            Some(_) if client.welcomed => client.look_at_clock(now, LEASE / 3),
            None if now >= client.reconnect_at => {
                self.made += 1;
                client.route = Some(self.made);
                client.heard = now;
                let hello =
                    Packet::Hello { resume: client.session, next_request: client.next_request() };
                let mut connection = Connection {
                    client: who,
                    at_client: true,
                    at_server: true,
                    ..Connection::default()
                };
                connection.up.hold(client.apart_until);
                connection.down.hold(client.apart_until);
                connection.up.send(now, &mut self.random, hello);
                self.connections.insert(self.made, connection);
            }
            _ => {}
        }
    }

    /// Puts what clients have to say on its way.
    fn send(&mut self) {
        for client in &mut self.clients {
            let bytes = std::mem::take(&mut client.out);
            if let Some(connection) = client.route.and_then(|r| self.connections.get_mut(&r))
                && !bytes.is_empty()
            {
                connection.up.send(self.now, &mut self.random, Packet::Bytes(bytes));
            }
        }
    }

    /// Delivers what is due, of the connections in any order.
    fn deliver(&mut self) {
        let mut routes: Vec<u64> = self.connections.keys().copied().collect();
        for at in (1..routes.len()).rev() {
            routes.swap(at, self.random.below(at as u64 + 1) as usize);
        }
        for route in routes {
            while let Some(packet) =
                self.connections.get_mut(&route).and_then(|c| c.up.receive(self.now))
            {
                self.at_server(route, packet);
            }
            while let Some(packet) =
                self.connections.get_mut(&route).and_then(|c| c.down.receive(self.now))
            {
                self.at_client(route, packet);
            }
            if self.connections.get(&route).is_some_and(|c| !c.at_client && !c.at_server) {
                self.connections.remove(&route);
            }
        }
    }

    fn at_client(&mut self, route: u64, packet: Packet) {
        let Some(connection) = self.connections.get_mut(&route).filter(|c| c.at_client) else {
            return;
        };
        let client = &mut self.clients[connection.client];
        if client.route != Some(route) {
            connection.at_client = false;
            return;
        }
        match packet {
            Packet::Welcome { session, resumed, seat } => {
                client.heard = self.now;
                client.welcome(session, resumed, seat);
            }
            Packet::Bytes(bytes) => client.hear(&bytes, self.now, &mut self.books),
            Packet::End | Packet::Hello { .. } => {
                connection.at_client = false;
                connection.up.cut(self.now, &mut self.random);
                client.disconnect(self.now + 1 + self.random.below(10));
            }
        }
    }

    // ---- the server ---------------------------------------------------------------

    fn at_server(&mut self, route: u64, packet: Packet) {
        let Some(connection) = self.connections.get_mut(&route).filter(|c| c.at_server) else {
            return;
        };
        match packet {
            Packet::Hello { resume, next_request } => {
                let fresh = 1_000_000 + route;
                let access = Access::ReadWrite;
                let newcomer = Newcomer { access, resume, next_request, fresh, route };
                let mut out = Out::default();
                let attached = self.engine.attach(&newcomer, self.time(), &mut out);
                let (session, resumed, seat) = (attached.id, attached.resumed, attached.seat);
                if resumed && self.fault == Fault::NoReplies {
                    forget_replies(&mut lock(&attached.session), next_request, self.time());
                }
                let connection = self.connections.get_mut(&route).expect("just looked");
                connection.session = Some(attached.session);
                let welcome = Packet::Welcome { session, resumed, seat };
                connection.down.send(self.now, &mut self.random, welcome);
                self.carry(out, None);
            }
            Packet::Bytes(bytes) => {
                connection.inbox.extend_from_slice(&bytes);
                self.handle(route);
            }
            Packet::End | Packet::Welcome { .. } => self.close(route),
        }
    }

    fn close(&mut self, route: u64) {
        if let Some(connection) = self.connections.get_mut(&route)
            && std::mem::replace(&mut connection.at_server, false)
        {
            connection.down.send(self.now, &mut self.random, Packet::End);
            if let Some(session) = connection.session.take() {
                self.engine.detach(&session, route);
            }
        }
    }

    /// One frame after the other, so that it is known what each has done.
    fn handle(&mut self, route: u64) {
        loop {
            let Some(connection) = self.connections.get_mut(&route).filter(|c| c.at_server) else {
                return;
            };
            let Some(session) = connection.session.clone() else {
                return;
            };
            let inbox = std::mem::take(&mut connection.inbox);
            let Some((header, payload)) = wire::split(&inbox).expect("an honest client") else {
                connection.inbox = inbox;
                return;
            };
            let len = HEADER + payload.len();
            connection.inbox = inbox[len..].to_vec();
            let mut out = Out::default();
            let mut locked = lock(&session);
            let id = locked.id;
            let (used, next) =
                self.engine.handle(self.time(), &mut locked, &inbox[..len], &mut out);
            assert!(used == len || locked.ended);
            let released = locked.released;
            let next = next.expect("an honest client breaks no rule");
            if used > 0 && header.tag == Tag::Wait as u8 {
                self.heard(id, header.id, payload, &locked);
            }
            drop(locked);
            let done = out.reply.get(4) == Some(&(Tag::Words as u8));
            if used > 0 && header.tag == Tag::SetWill as u8 && done && !released {
                match payload.is_empty() {
                    true => self.wills.remove(&id),
                    false => self.wills.insert(id),
                };
            }
            if released {
                self.wills.remove(&id);
            }
            self.carry(out, Some(route));
            self.inspect();
            if next == Next::Close {
                return self.close(route);
            }
        }
    }

    /// Takes down what a wait is for.
    fn heard(&mut self, session: u64, wait: u64, payload: &[u8], bindings: &Session) {
        if self.waits.contains_key(&(session, wait)) {
            return;
        }
        let head: WaitHead = bytemuck::pod_read_unaligned(&payload[..size_of::<WaitHead>()]);
        let (names, records) = payload[size_of::<WaitHead>()..].split_at(head.peers as usize);
        let mut peers = Vec::new();
        if let Some((_, name)) = names.split_first() {
            peers.push(String::from_utf8(name.to_vec()).expect("a name"));
        }
        let mut goals = Vec::new();
        for record in records.chunks_exact(size_of::<WaitRecord>()) {
            let record: WaitRecord = bytemuck::pod_read_unaligned(record);
            let Some(entry) = bindings.binding(record.array) else {
                return;
            };
            let condition = record.condition().expect("known").expect("no wait for any transition");
            goals.push((entry.base + record.run.offset, record.array, condition));
        }
        let heard = Heard { need: head.need as usize, goals, fired: BTreeSet::new(), peers };
        self.waits.insert((session, wait), heard);
    }

    /// Carries what came out of the engine to where it belongs.
    fn carry(&mut self, mut out: Out, from: Option<u64>) {
        if let Some(connection) = from.and_then(|route| self.connections.get_mut(&route))
            && !out.reply.is_empty()
        {
            connection.down.send(self.now, &mut self.random, Packet::Bytes(out.reply));
        }
        for (route, bytes) in out.mail {
            if self.fault == Fault::LostAnswer && self.random.often(60) {
                continue;
            }
            if let Some(connection) = self.connections.get_mut(&route).filter(|c| c.at_server) {
                connection.down.send(self.now, &mut self.random, Packet::Bytes(bytes));
            }
        }
        for route in std::mem::take(&mut out.close) {
            self.close(route);
        }
        for over in std::mem::take(&mut out.ended) {
            self.books.wills += i64::from(self.wills.remove(&over.id));
            self.waits.retain(|(session, _), _| *session != over.id);
            if self.fault == Fault::NotSettled {
                continue;
            }
            let mut out = Out::default();
            self.engine.end_writes(over.id, &mut out);
            self.engine.settle(over.id, self.time(), &mut out);
            self.carry(out, None);
            self.inspect();
        }
    }
}

/// What a server without a memory would know of a session.
fn forget_replies(session: &mut Session, next_request: u64, now: Duration) {
    let mut fresh = Session::new(session.id, session.access, next_request, now);
    for number in EVENT..=SLOTS {
        let entry = session.binding(number).cloned();
        fresh.bind(number, entry).expect("a small number");
    }
    (fresh.route, fresh.seat, fresh.heard) = (session.route, session.seat, session.heard.clone());
    *session = fresh;
}
