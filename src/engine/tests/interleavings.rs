//! Random clients against the plain model: whatever they do, and however
//! their connections come and go, the engine answers as the model says, and
//! every cell and every waiting bit is as the model says.

use super::model::{Ask, CAPACITY, Cells, Ending, LEASE, Model, OneOp, Until};
use super::{Frame, encode, frames};
use crate::auth::Access;
use crate::catalog::Kind;
use crate::cell::{self, Op};
use crate::engine::actor::execute;
use crate::engine::{Engine, Newcomer, Next, Out, Route, SharedSession, lock};
use crate::segment::Segment;
use crate::wire::{HEADER, Header};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::Ordering;
use std::time::Duration;

const NAMES: [&str; 3] = ["a", "b", "c"];
const SHAPES: [(u32, u32); 5] = [(1, 3), (2, 2), (3, 9), (1, 40), (0, 4)];

/// The sessions that have ended.
fn numbers(out: &Out) -> Vec<u64> {
    out.ended.iter().map(|over| over.id).collect()
}

// ---- what happens -----------------------------------------------------------

/// Something to ask, with numbers that are made to fit when it is asked.
#[derive(Clone, Debug)]
enum Draft {
    /// Operations; those marked are made to fit their array.
    Ops(Vec<(OneOp, bool)>),
    Runs(u8, u16, Vec<Cells>, bool),
    Open(u16, usize, u8, usize),
    Remove(usize),
    List(usize),
    Info,
    Wait(u32, Vec<(Until, bool)>),
    Cancel(usize),
    WaitDone(usize),
    Heartbeat,
}

#[derive(Clone, Debug)]
enum Step {
    Connect(Access),
    /// On a new connection, whether or not the old one is known to be gone.
    Resume(usize, Access),
    Detach(usize),
    /// Frames in one piece, or cut into two at a point between 0 and 1.
    Send(usize, Vec<Draft>, f64, bool),
    /// Everything unacknowledged from here on, and the waits, once more.
    Repeat(usize, usize),
    /// The client has seen this many replies.
    Acknowledge(usize, usize),
    Pass(u64),
    Sweep,
    /// A client changes a cell by itself, and rings, or dies before it does.
    Change(usize, u32, u8, i64, bool),
    /// Frames of a session that has ended.
    Late(Vec<Draft>),
}

fn number() -> impl Strategy<Value = u16> {
    prop_oneof![4 => 0u16..2, 1 => 2u16..4, 1 => Just(4095u16)]
}

fn offset() -> impl Strategy<Value = u32> {
    prop_oneof![20 => 0u32..3, 2 => 3u32..80, 1 => any::<u32>()]
}

fn operand() -> impl Strategy<Value = i64> {
    let top = i64::MAX >> 1;
    prop_oneof![
        16 => -3i64..4,
        2 => (-2i64..1).prop_map(move |d| top + d),
        2 => (0i64..3).prop_map(move |d| -top - 1 + d),
        1 => any::<i64>().prop_map(|v| v >> 1),
        1 => any::<i64>(),
    ]
}

fn mostly() -> impl Strategy<Value = bool> {
    prop_oneof![19 => Just(true), 1 => Just(false)]
}

fn cells() -> impl Strategy<Value = Cells> {
    prop_oneof![
        4 => (0u32..3, 1u32..4, 0u32..3),
        1 => (offset(), 0u32..50, offset()),
    ]
}

fn draft() -> impl Strategy<Value = Draft> {
    let op = (1u8..13, number(), offset(), operand(), operand());
    let until = (number(), 0u8..7, cells(), -2i64..4);
    prop_oneof![
        10 => prop::collection::vec((op, mostly()), 1..5).prop_map(Draft::Ops),
        3 => (0u8..4, number(), prop::collection::vec(cells(), 1..4), mostly())
            .prop_map(|(op, number, runs, fit)| Draft::Runs([1, 2, 3, 12][usize::from(op)], number, runs, fit)),
        3 => (number(), 0..NAMES.len(), 0u8..3, 0..SHAPES.len())
            .prop_map(|(number, name, kind, shape)| Draft::Open(number, name, kind, shape)),
        1 => (0..NAMES.len()).prop_map(Draft::Remove),
        1 => (0..NAMES.len()).prop_map(Draft::List),
        1 => Just(Draft::Info),
        6 => (any::<u32>(), prop::collection::vec((until, mostly()), 1..4))
            .prop_map(|(need, records)| Draft::Wait(need, records)),
        2 => any::<usize>().prop_map(Draft::Cancel),
        2 => any::<usize>().prop_map(Draft::WaitDone),
        1 => Just(Draft::Heartbeat),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let who = any::<usize>;
    let access = prop_oneof![3 => Just(Access::ReadWrite), 1 => Just(Access::ReadOnly)];
    let drafts = || prop::collection::vec(draft(), 1..5);
    prop_oneof![
        2 => access.clone().prop_map(Step::Connect),
        4 => (who(), access).prop_map(|(who, access)| Step::Resume(who, access)),
        2 => who().prop_map(Step::Detach),
        24 => (who(), drafts(), 0.0..2.0, prop::bool::weighted(0.03))
            .prop_map(|(who, drafts, cut, bye)| Step::Send(who, drafts, cut, bye)),
        4 => (who(), any::<usize>()).prop_map(|(who, from)| Step::Repeat(who, from)),
        4 => (who(), 0usize..6).prop_map(|(who, n)| Step::Acknowledge(who, n)),
        2 => (0u64..70).prop_map(Step::Pass),
        1 => Just(Step::Sweep),
        3 => (who(), offset(), 2u8..12, -3i64..4, any::<bool>())
            .prop_map(|(array, offset, op, a, ring)| Step::Change(array, offset, op, a, ring)),
        1 => drafts().prop_map(Step::Late),
    ]
}

// ---- who does it ------------------------------------------------------------

/// A frame that was sent.
#[derive(Clone, Debug)]
struct Sent {
    id: u64,
    ask: Ask,
    bytes: Vec<u8>,
    /// What it was answered by.
    reply: Option<Frame>,
}

/// A client's own memory.
struct Client {
    session: SharedSession,
    id: u64,
    access: Access,
    next_request: u64,
    next_wait: u64,
    /// Requests whose reply the client has not seen.
    unacknowledged: VecDeque<Sent>,
    waits: BTreeMap<u64, Sent>,
}

struct World {
    engine: Engine<Segment>,
    model: Model,
    clients: Vec<Client>,
    ended: Vec<Client>,
    now: Duration,
    made: u64,
}

impl World {
    fn new() -> World {
        let segment = Segment::anonymous(CAPACITY).unwrap();
        World {
            engine: Engine::new(segment, CAPACITY, LEASE),
            model: Model::default(),
            clients: Vec::new(),
            ended: Vec::new(),
            now: Duration::ZERO,
            made: 0,
        }
    }

    fn route(&mut self) -> Route {
        self.made += 1;
        1000 + self.made
    }

    fn connect(&mut self, access: Access, resume: Option<u64>) {
        let route = self.route();
        let fresh = route + 1_000_000;
        let newcomer = Newcomer { access, resume, next_request: 1, fresh, route };
        let mut out = Out::default();
        let attached = self.engine.attach(&newcomer, self.now, &mut out);
        assert!(out.reply.is_empty() && out.mail.is_empty());
        let old = resume.and_then(|id| self.model.sessions.get_mut(&id));
        if let Some(old) = old.filter(|old| old.access == access) {
            assert!(attached.resumed);
            assert_eq!(Some(attached.id), resume);
            let before = old.route.replace(route);
            assert_eq!(out.close, Vec::from_iter(before));
            if let Some(before) = before {
                // Its end is heard of late, and must not cut off the new one.
                self.engine.detach(&attached.session, before);
            }
            old.last_heard = self.now;
            return;
        }
        assert!(!attached.resumed);
        assert_eq!((attached.id, &out.close), (fresh, &Vec::new()));
        self.model.attach(fresh, access, route, self.now);
        self.clients.push(Client {
            session: attached.session,
            id: fresh,
            access,
            next_request: 1,
            next_wait: 1,
            unacknowledged: VecDeque::new(),
            waits: BTreeMap::new(),
        });
    }

    /// Makes a draft fit what there is, in a moment.
    fn ask(&self, client: usize, draft: &Draft) -> Ask {
        let session = self.clients[client].id;
        let form = |number| self.model.form(session, number);
        let fit_cells = |(offset, count, stride): Cells, extent: u32| {
            let (offset, stride) = (offset % extent, stride % 8);
            let room = (extent - 1 - offset) / stride.max(1) + 1;
            (offset, count.clamp(1, room), stride)
        };
        match draft.clone() {
            Draft::Ops(ops) => Ask::Ops(
                ops.into_iter()
                    .map(|((op, number, offset, a, b), fit)| match form(number) {
                        Some((kind, extent)) if fit => {
                            let ops: &[u8] = match kind {
                                Kind::Event => &[2, 3, 4, 1, 12, 2, 3],
                                Kind::Slots => &[1, 12],
                                _ => &[5, 6, 7, 8, 9, 10, 11, 1, 12, 6],
                            };
                            let op = ops[usize::from(op) % ops.len()];
                            let half = 1i64 << 62;
                            let fit = |v: i64| v.clamp(-half, half - 1);
                            (op, number, offset % extent, fit(a), fit(b))
                        }
                        _ => (op, number, offset, a, b),
                    })
                    .collect(),
            ),
            Draft::Runs(op, number, runs, fit) => {
                let runs = match form(number) {
                    Some((_, extent)) if fit => {
                        runs.into_iter().map(|r| fit_cells(r, extent)).collect()
                    }
                    _ => runs,
                };
                Ask::Runs(op, number, runs)
            }
            Draft::Open(number, name, kind, shape) => {
                let (rows, cols) = SHAPES[shape];
                Ask::Open { number, name: NAMES[name].to_owned(), kind, rows, cols }
            }
            Draft::Remove(name) => Ask::Remove(NAMES[name].to_owned()),
            Draft::List(name) => Ask::List(NAMES[name].to_owned()),
            Draft::Info => Ask::Info,
            Draft::Wait(need, records) => {
                let records: Vec<Until> = records
                    .into_iter()
                    .map(|((number, comparison, cells, value), fit)| match form(number) {
                        Some((kind, extent)) if fit => {
                            let least = if kind == Kind::Event { 0 } else { 1 };
                            (number, comparison.max(least), fit_cells(cells, extent), value)
                        }
                        _ => (number, comparison, cells, value),
                    })
                    .collect();
                let cells = records.iter().map(|r| r.2.1).sum::<u32>();
                Ask::Wait { need: need % cells.max(1) + 1, records }
            }
            Draft::Cancel(_) => Ask::Cancel,
            Draft::WaitDone(_) => Ask::WaitDone,
            Draft::Heartbeat => Ask::Heartbeat,
        }
    }

    /// The frame for a draft, entered into the client's memory.
    fn frame(&mut self, client: usize, draft: &Draft) -> Sent {
        let ask = self.ask(client, draft);
        let known = self.model.waits(self.clients[client].id);
        let client = &mut self.clients[client];
        let (id, span) = match (draft, &ask) {
            (Draft::Wait(..), _) => {
                client.next_wait += 1;
                (client.next_wait - 1, 0)
            }
            (Draft::Cancel(which) | Draft::WaitDone(which), _) => {
                // Now and then one that nobody knows.
                (known.get(which % (known.len() + 1)).copied().unwrap_or(client.next_wait + 5), 0)
            }
            (Draft::Heartbeat, _) => (0, 0),
            _ => {
                let id = client.next_request;
                client.next_request += 1;
                (id, client.unacknowledged.front().map_or(0, |oldest| id - oldest.id))
            }
        };
        let sent = Sent { id, bytes: encode(&ask, id, span), ask, reply: None };
        match draft {
            Draft::Wait(..) => {
                client.waits.insert(id, sent.clone());
            }
            Draft::WaitDone(_) => {
                client.waits.remove(&id);
            }
            Draft::Cancel(_) | Draft::Heartbeat => {}
            _ => client.unacknowledged.push_back(sent.clone()),
        }
        sent
    }

    /// Lets the engine have these frames, cut in two where it may be, and
    /// compares all that comes back.
    fn deliver(&mut self, client: usize, sent: &[Sent], cut: f64) {
        let bytes = sent.iter().flat_map(|s| s.bytes.clone()).collect::<Vec<u8>>();
        let cut = (bytes.len() as f64 * cut) as usize;
        let mut sent = sent.iter();
        let mut from = 0;
        for to in [cut.min(bytes.len()), bytes.len()] {
            let id = self.clients[client].id;
            let mut out = Out::default();
            let session = self.clients[client].session.clone();
            let (used, next) =
                self.engine.handle(self.now, &mut lock(&session), &bytes[from..to], &mut out);
            let next = next.expect("nothing that the protocol forbids");
            self.model.sessions.get_mut(&id).unwrap().last_heard = self.now;
            let mut handled = Vec::new();
            let mut left = used;
            while left > 0 {
                let one = sent.next().expect("only what was sent is used");
                assert!(one.bytes.len() <= left, "only whole frames are used");
                left -= one.bytes.len();
                handled.push(one.clone());
            }
            from += used;
            let short = bytes[from..to].len();
            let header = bytemuck::pod_read_unaligned::<Header>;
            assert!(
                short < HEADER || short < HEADER + header(&bytes[from..from + HEADER]).len as usize,
                "a whole frame was left over"
            );
            self.compare(client, handled, out, next);
            if next == Next::Close {
                return;
            }
        }
    }

    fn compare(&mut self, client: usize, handled: Vec<Sent>, out: Out, next: Next) {
        let id = self.clients[client].id;
        let mut replies: VecDeque<Frame> = frames(&out.reply).into();
        let mut ended = Vec::new();
        let mut bye = false;
        for sent in handled {
            bye |= matches!(sent.ask, Ask::Bye);
            let kept = sent.reply.filter(|_| sent.ask.changes());
            if let Some(reply) = kept {
                // It was done before, and this is the answer of then.
                assert_eq!(replies.pop_front(), Some(reply));
                continue;
            }
            let reply = replies.front().cloned();
            ended.extend(self.model.ask(id, sent.id, &sent.ask, &mut replies));
            let memory = &mut self.clients[client].unacknowledged;
            if sent.ask.changes()
                && let Some(sent) = memory.iter_mut().find(|s| s.id == sent.id)
            {
                sent.reply = reply;
            }
        }
        assert!(replies.is_empty(), "replies that nobody asked for: {replies:?}");
        ended.extend(self.model.settle());
        self.compare_mail(ended, &out);
        assert!(out.close.is_empty());
        assert_eq!(next == Next::Close, bye);
        assert_eq!(numbers(&out), if bye { vec![id] } else { Vec::new() });
        if bye {
            self.model.sessions.remove(&id);
            let client = self.clients.remove(client);
            self.ended.push(client);
        }
    }

    /// Exactly those waits are answered whose client can be reached.
    fn compare_mail(&mut self, ended: Vec<Ending>, out: &Out) {
        let mut mail: Vec<(Route, Frame)> = Vec::new();
        for (route, bytes) in &out.mail {
            mail.extend(frames(bytes).into_iter().map(|frame| (*route, frame)));
        }
        for ending in ended {
            let (session, wait) = (ending.session, ending.wait);
            let Some(route) = self.model.sessions[&session].route else {
                continue;
            };
            let at = mail.iter().position(|(to, (h, _))| (*to, h.id) == (route, wait));
            let at = at.unwrap_or_else(|| panic!("wait {wait} of {session} was not woken"));
            let (_, frame) = mail.swap_remove(at);
            self.model.see_ending(ending, &frame);
        }
        assert!(mail.is_empty(), "woken for nothing: {mail:?}");
    }

    fn pick(&self, who: usize) -> Option<usize> {
        (!self.clients.is_empty()).then(|| who % self.clients.len())
    }

    fn attached(&self, who: usize) -> Option<usize> {
        self.pick(who).filter(|&c| self.model.sessions[&self.clients[c].id].route.is_some())
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Connect(access) => {
                if self.clients.len() < 5 {
                    self.connect(*access, None);
                }
            }
            Step::Resume(who, access) => {
                // Of the living, of those whose session has ended, or of none.
                let all = self.clients.len() + self.ended.len() + 1;
                let client = self.clients.iter().chain(&self.ended).nth(who % all);
                let id = client.map_or(7, |c| c.id);
                let access = client.map_or(*access, |c| {
                    // The right key, but for a few.
                    if who % 8 == 0 { *access } else { c.access }
                });
                if self.clients.len() < 5 || client.is_some_and(|c| c.access == access) {
                    self.connect(access, Some(id));
                }
            }
            Step::Detach(who) => {
                if let Some(client) = self.attached(*who) {
                    let client = &self.clients[client];
                    let session = self.model.sessions.get_mut(&client.id).unwrap();
                    self.engine.detach(&client.session, session.route.take().unwrap());
                }
            }
            Step::Send(who, drafts, cut, bye) => {
                if let Some(client) = self.attached(*who) {
                    let mut sent: Vec<Sent> =
                        drafts.iter().map(|draft| self.frame(client, draft)).collect();
                    if *bye {
                        let bytes = encode(&Ask::Bye, 0, 0);
                        sent.push(Sent { id: 0, ask: Ask::Bye, bytes, reply: None });
                    }
                    self.deliver(client, &sent, *cut);
                }
            }
            Step::Repeat(who, from) => {
                if let Some(client) = self.attached(*who) {
                    let memory = &self.clients[client];
                    let from = from % (memory.unacknowledged.len() + 1);
                    let mut sent: Vec<Sent> =
                        memory.unacknowledged.iter().skip(from).cloned().collect();
                    sent.extend(memory.waits.values().cloned());
                    self.deliver(client, &sent, 1.0);
                }
            }
            Step::Acknowledge(who, n) => {
                if let Some(client) = self.pick(*who) {
                    let memory = &mut self.clients[client].unacknowledged;
                    memory.drain(..(*n).min(memory.len()));
                }
            }
            Step::Pass(ms) => {
                self.now += Duration::from_millis(*ms);
                self.expire();
            }
            Step::Sweep => self.sweep(Vec::new()),
            Step::Change(which, offset, op, a, ring) => {
                let arrays: Vec<String> = self.model.arrays.keys().cloned().collect();
                if arrays.is_empty() {
                    return;
                }
                let name = &arrays[which % arrays.len()];
                let array = &self.model.arrays[name];
                let op = if array.kind == Kind::Event { 2 + op % 3 } else { 5 + op % 7 };
                let offset = offset % array.cells.len() as u32;
                let code = Op::from_code(op).unwrap();
                let place = array.base + offset;
                let (_, waited) = execute(&self.engine.actor, place, code, *a as u64, 0);
                self.model.change(name, offset, op, *a);
                let ended = self.model.settle();
                if !ring {
                    return self.sweep(ended);
                }
                let mut out = Out::default();
                if waited {
                    self.engine.ring(place, &mut out);
                }
                self.compare_mail(ended, &out);
                self.sweep(Vec::new());
            }
            Step::Late(drafts) => self.late(drafts),
        }
    }

    /// The sweep wakes whom it should, which is nobody unless someone died.
    fn sweep(&mut self, ended: Vec<Ending>) {
        let mut out = Out::default();
        self.engine.sweep(&mut out);
        self.compare_mail(ended, &out);
        assert!(out.close.is_empty() && out.reply.is_empty());
    }

    fn expire(&mut self) {
        let mut out = Out::default();
        self.engine.expire(self.now, &mut out);
        assert!(out.mail.is_empty() && out.reply.is_empty());
        let mut close = Vec::new();
        let mut ended = BTreeSet::new();
        for client in std::mem::take(&mut self.clients) {
            let session = &self.model.sessions[&client.id];
            if self.now - session.last_heard <= LEASE {
                self.clients.push(client);
                continue;
            }
            close.extend(session.route);
            ended.insert(client.id);
            self.model.sessions.remove(&client.id);
            self.ended.push(client);
        }
        out.close.sort_unstable();
        close.sort_unstable();
        assert_eq!(out.close, close);
        assert_eq!(out.ended.len(), ended.len());
        assert_eq!(BTreeSet::from_iter(numbers(&out)), ended);
    }

    /// Frames that arrive when the session has ended do nothing.
    fn late(&mut self, drafts: &[Draft]) {
        let Some(ended) = self.ended.pop() else {
            return;
        };
        // The model takes the session for a living one while they are made.
        self.model.attach(ended.id, Access::ReadWrite, 0, self.now);
        let session = ended.session.clone();
        let id = ended.id;
        self.clients.push(ended);
        let client = self.clients.len() - 1;
        let sent: Vec<Sent> = drafts.iter().map(|draft| self.frame(client, draft)).collect();
        self.clients.pop();
        self.model.sessions.remove(&id);
        let bytes = sent.iter().flat_map(|s| s.bytes.clone()).collect::<Vec<u8>>();
        let mut out = Out::default();
        let (_, next) = self.engine.handle(self.now, &mut lock(&session), &bytes, &mut out);
        assert_eq!(next, Ok(Next::Close));
        assert!(out.reply.is_empty() && out.mail.is_empty() && out.close.is_empty());
        assert!(out.ended.is_empty());
    }

    /// Every cell, every bit and every count is as the model has it.
    fn verify(&self) {
        let segment = self.model.segment();
        for (place, (word, (value, waited))) in
            self.engine.actor.cells().iter().zip(segment).enumerate()
        {
            let word = word.load(Ordering::Relaxed);
            if let Some(value) = value {
                assert_eq!(cell::value(word), value, "the value of cell {place}");
            }
            assert_eq!(cell::is_waiting(word), waited, "the waiting bit of cell {place}");
        }
        assert_eq!(self.engine.parked(), self.model.parked());
        assert_eq!(self.engine.sessions(), self.model.sessions.len());
    }

    /// Everyone falls silent for longer than the lease.
    fn end(&mut self) {
        self.now += LEASE + Duration::from_millis(1);
        self.expire();
        assert_eq!(self.engine.parked(), 0);
        self.verify();
    }
}

/// Two sessions that may write and one that may not, with an array of each
/// kind.
fn beginning() -> Vec<Step> {
    let mut steps = Vec::new();
    for (who, access) in [Access::ReadWrite, Access::ReadWrite, Access::ReadOnly].iter().enumerate()
    {
        steps.push(Step::Connect(*access));
        let opens = vec![Draft::Open(0, 0, 1, 0), Draft::Open(1, 1, 2, 0)];
        steps.push(Step::Send(who, opens, 1.0, false));
    }
    steps
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_interleaving_of_clients_does_what_the_plain_model_says(steps in prop::collection::vec(step(), 1..80)) {
        let mut world = World::new();
        for step in beginning().iter().chain(&steps) {
            world.step(step);
            world.verify();
        }
        world.end();
    }
}
