//! An honest client: it numbers its requests, sends what is unanswered again when
//! its connection is back, and tells the server what it has heard.

use super::books::Books;
use crate::cell::sync::{Barrier, Lock};
use crate::cell::{Comparison, Condition, Op, event_is_set, is_waiting, value};
use crate::wire::{
    self, AcquireRecord, FiredRecord, HEADER, Header, OpRecord, OpenRecord, PartyRecord, Refusal,
    RunRecord, Tag, WaitHead, WaitRecord,
};
use std::collections::{BTreeMap, VecDeque};

/// The numbers of the arrays.
pub const EVENT: u16 = 0;
pub const COUNTER: u16 = 1;
pub const LOCK: u16 = 2;
pub const BARRIER: u16 = 3;
pub const SEMAPHORE: u16 = 4;
pub const WILL: u16 = 5;
pub const BRIEF: u16 = 6;
pub const SLOTS: u16 = 7;

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    Add(usize),
    Event(usize, Op),
    TryLock(usize),
    Release,
    Up,
    Arrive,
    Join,
    /// Of an array that comes and goes.
    Brief,
    Other,
}

#[derive(Clone, Debug)]
struct Call {
    id: u64,
    bytes: Vec<u8>,
    want: Want,
}

/// What a wait is for.
#[derive(Clone, Debug)]
pub enum Aim {
    /// So many of these; whether one of them comes and goes.
    Cells(usize, Vec<Condition>, bool),
    Lock(usize),
    Permit,
}

#[derive(Clone, Debug)]
struct Wait {
    bytes: Vec<u8>,
    aim: Aim,
    deadline: u64,
    cancelling: bool,
    /// It may be refused: some of its cells come and go.
    brief: bool,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Client {
    pub number: usize,
    pub session: Option<u64>,
    pub seat: u32,
    /// The connection, perhaps one that nothing has come over yet.
    pub route: Option<u64>,
    pub welcomed: bool,
    /// A new session and its seat, to be its own when its arrays are open, and so
    /// many answers that are to come before.
    fresh: Option<(u64, u32)>,
    opening: usize,
    pub reconnect_at: u64,
    /// No connection gets through before this time.
    pub apart_until: u64,
    pub heard: u64,
    pub inbox: Vec<u8>,
    /// What is to be sent now.
    pub out: Vec<u8>,
    pub holds: BTreeMap<usize, u64>,
    pub permits: u64,
    /// The write of a message whose end is not known: row and number.
    pub write: Option<(usize, u64)>,
    pub writes: u64,
    next_request: u64,
    calls: VecDeque<Call>,
    next_wait: u64,
    waits: BTreeMap<u64, Wait>,
    told: Vec<Vec<u8>>,
    told_before: usize,
    party: bool,
    seen: BTreeMap<(u16, u32), i64>,
    beat_at: u64,
}

fn frame(tag: Tag, id: u64, span: u16, payload: &[u8]) -> Vec<u8> {
    let header = Header { span, ..Header::new(tag, id, payload.len()) };
    [bytemuck::bytes_of(&header), payload].concat()
}

impl Client {
    pub fn new(number: usize) -> Client {
        Client { number, next_request: 1, next_wait: 1, ..Client::default() }
    }

    pub fn name(&self) -> String {
        format!("client {}", self.number)
    }

    /// The number of the oldest request without an answer, or of the next one.
    pub fn next_request(&self) -> u64 {
        self.calls.front().map_or(self.next_request, |call| call.id)
    }

    pub fn is_busy(&self) -> bool {
        self.calls.len() >= 8 || self.waits.len() >= 6
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.calls.is_empty() && self.waits.is_empty()
    }

    /// The waits that it has not given up.
    pub fn waits(&self) -> impl Iterator<Item = u64> {
        self.waits.iter().filter(|(_, wait)| !wait.cancelling).map(|(id, _)| *id)
    }

    pub fn under_way(&self) -> String {
        format!("{:?} {:?}", self.calls, self.waits)
    }

    pub fn request(&mut self, want: Want, tag: Tag, payload: &[u8]) {
        let id = self.next_request;
        self.next_request += 1;
        let span = id - self.calls.front().map_or(id, |oldest| oldest.id);
        let bytes = frame(tag, id, span as u16, payload);
        self.out.extend_from_slice(&bytes);
        self.calls.push_back(Call { id, bytes, want });
    }

    pub fn op(&mut self, want: Want, op: Op, array: u16, offset: u32, (a, b): (u64, u64)) {
        let record = OpRecord { op: op as u8, reserved: 0, array, offset, a, b };
        self.request(want, Tag::Ops, bytemuck::bytes_of(&record));
    }

    fn wait(&mut self, tag: Tag, payload: &[u8], aim: Aim, deadline: u64) {
        let id = self.next_wait;
        self.next_wait += 1;
        let bytes = frame(tag, id, 0, payload);
        self.out.extend_from_slice(&bytes);
        let brief = matches!(aim, Aim::Cells(_, _, true));
        self.waits.insert(id, Wait { bytes, aim, deadline, cancelling: false, brief });
    }

    pub fn queue(&mut self, array: u16, offset: u32, aim: Aim, deadline: u64) {
        let record = AcquireRecord { array, offset, seat: self.seat, ..AcquireRecord::default() };
        self.wait(Tag::Acquire, bytemuck::bytes_of(&record), aim, deadline);
    }

    /// Whether it has this lock or queues for it.
    pub fn is_after(&self, lock: usize) -> bool {
        self.holds.contains_key(&lock)
            || self.waits.values().any(|wait| matches!(wait.aim, Aim::Lock(other) if other == lock))
            || self.calls.iter().any(|call| call.want == Want::TryLock(lock))
    }

    pub fn wait_for(
        &mut self,
        need: usize,
        goals: &[(u16, u32, Condition)],
        peer: Option<String>,
        deadline: u64,
    ) {
        let named = peer.map_or(Vec::new(), |p| [&[p.len() as u8], p.as_bytes()].concat());
        let head = WaitHead { need: need as u32, peers: named.len() as u32 };
        let mut payload = [bytemuck::bytes_of(&head), &named].concat();
        for &(array, offset, Condition { comparison, value }) in goals {
            let run = RunRecord { offset, count: 1, stride: 0 };
            let comparison = comparison as u8;
            let record = WaitRecord { array, comparison, reserved: 0, run, value };
            payload.extend_from_slice(bytemuck::bytes_of(&record));
        }
        let conditions = goals.iter().map(|goal| goal.2).collect();
        let brief = goals.iter().any(|goal| goal.0 == BRIEF);
        self.wait(Tag::Wait, &payload, Aim::Cells(need, conditions, brief), deadline);
    }

    /// A condition about a cell that may or may not be so by now.
    pub fn condition(&self, array: u16, offset: u32, which: u64) -> Condition {
        let seen = self.seen.get(&(array, offset)).copied().unwrap_or(0);
        let (comparison, value) = match which % 4 {
            0 => (Comparison::Ne, seen),
            1 => (Comparison::Gt, seen),
            2 => (Comparison::Ge, seen + 2),
            _ => (Comparison::Eq, seen + 1),
        };
        Condition { comparison, value }
    }

    pub fn arrive(&mut self) {
        if !std::mem::replace(&mut self.party, true) {
            let record = PartyRecord { array: BARRIER, ..PartyRecord::default() };
            self.request(Want::Other, Tag::Party, bytemuck::bytes_of(&record));
        }
        self.op(Want::Arrive, Op::Arrive, BARRIER, 0, (0, super::books::PARTIES));
    }

    pub fn open_brief(&mut self) {
        self.request(Want::Brief, Tag::Open, &open(BRIEF));
    }

    /// Something is overdue: a heartbeat, or the end of patience with a wait.
    pub fn look_at_clock(&mut self, now: u64, every: u64) {
        if now >= self.beat_at {
            self.beat_at = now + every;
            // Of one that is not answered yet it is not known what it comes behind.
            if self.told_before == 0 {
                self.told_before = self.told.len();
            }
            self.out.extend(frame(Tag::Heartbeat, 0, 0, &[]));
        }
        for (&id, wait) in &mut self.waits {
            if now >= wait.deadline && !std::mem::replace(&mut wait.cancelling, true) {
                self.out.extend(frame(Tag::Cancel, id, 0, &[]));
            }
        }
    }

    /// No more patience with anything.
    pub fn give_up(&mut self, now: u64) {
        for wait in self.waits.values_mut() {
            wait.deadline = now;
        }
    }

    /// The connection is gone; what is under way stays so.
    pub fn disconnect(&mut self, reconnect_at: u64) {
        self.route = None;
        self.welcomed = false;
        self.inbox.clear();
        self.out.clear();
        self.told_before = 0;
        (self.fresh, self.opening) = (None, 0);
        self.reconnect_at = reconnect_at;
    }

    pub fn welcome(&mut self, session: u64, resumed: bool, seat: u32) {
        self.out.clear();
        if resumed {
            assert_eq!(self.session, Some(session), "somebody else's session");
            self.welcomed = true;
            for call in &self.calls {
                self.out.extend_from_slice(&call.bytes);
            }
            for bytes in &self.told {
                self.out.extend_from_slice(bytes);
            }
            for (&id, wait) in &self.waits {
                self.out.extend_from_slice(&wait.bytes);
                if wait.cancelling {
                    self.out.extend(frame(Tag::Cancel, id, 0, &[]));
                }
            }
            return;
        }
        self.fresh = Some((session, seat));
        self.opening = usize::from(SLOTS) + 2;
        for array in EVENT..=SLOTS {
            self.out.extend(frame(Tag::Open, 0, 0, &open(array)));
        }
        self.out.extend(frame(Tag::Join, 0, 0, self.name().as_bytes()));
    }

    /// The answer to something that a new session begins with.
    fn opened(&mut self, books: &mut Books) {
        self.opening -= 1;
        if let Some((session, seat)) = self.fresh.filter(|_| self.opening == 0) {
            self.lose_session(books);
            (self.session, self.seat) = (Some(session), seat);
            self.fresh = None;
            self.welcomed = true;
        }
    }

    /// What was under way may have happened or not; what was held is gone.
    pub fn lose_session(&mut self, books: &mut Books) {
        for call in self.calls.drain(..) {
            match call.want {
                Want::Add(counter) => books.counters[counter].lose(),
                Want::Event(event, _) => books.events[event].lose(),
                Want::Arrive => books.arrivals_lost += 1,
                Want::Up => books.permits_lost += 1,
                _ => {}
            }
        }
        let claims = self.waits.values().filter(|wait| matches!(wait.aim, Aim::Permit)).count();
        books.permits_lost += self.permits + claims as u64;
        if let Some((row, _)) = self.write.take() {
            books.rows[row].lose();
        }
        self.waits.clear();
        self.told.clear();
        self.holds.clear();
        self.party = false;
        self.permits = 0;
        self.session = None;
    }

    /// Bytes of the server's.
    pub fn hear(&mut self, bytes: &[u8], now: u64, books: &mut Books) {
        self.heard = now;
        self.inbox.extend_from_slice(bytes);
        let inbox = std::mem::take(&mut self.inbox);
        let mut rest = &inbox[..];
        while let Some((header, payload)) = wire::split(rest).expect("frames of the server's") {
            rest = &rest[HEADER + payload.len()..];
            match Tag::from_code(header.tag).expect("a known frame") {
                Tag::Heartbeat => drop(self.told.drain(..std::mem::take(&mut self.told_before))),
                Tag::Woken | Tag::Cancelled | Tag::WaitRefused | Tag::PeerLost => {
                    self.wait_over(&header, payload);
                }
                _ if header.id == 0 => self.opened(books),
                tag => self.answer(tag, header.id, payload, now, books),
            }
        }
        self.inbox = rest.to_vec();
    }

    fn answer(&mut self, tag: Tag, id: u64, payload: &[u8], now: u64, books: &mut Books) {
        let call = self.calls.pop_front().expect("an answer to what was asked");
        assert_eq!(call.id, id, "requests are answered in their order, and once");
        if tag == Tag::Refused {
            let record = bytemuck::pod_read_unaligned(payload);
            let why = Refusal::from_record(&record);
            let fine = match call.want {
                Want::Brief => matches!(why, Some(Refusal::NoArray | Refusal::Catalog(_))),
                Want::Join => matches!(why, Some(Refusal::NameTaken(_))),
                _ => false,
            };
            assert!(fine, "{:?} was refused: {why:?}", call.want);
            return;
        }
        let word = payload.first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        match call.want {
            Want::Add(counter) => {
                self.seen.insert((COUNTER, counter as u32), value(word) + 1);
                books.counters[counter].acknowledge(value(word), "a counter");
            }
            Want::Event(event, op) => {
                let changes = event_is_set(word) != (op == Op::Set);
                self.seen.insert((EVENT, event as u32), value(word) + i64::from(changes));
                if changes {
                    books.events[event].acknowledge(value(word), "an event");
                }
            }
            Want::TryLock(lock) => {
                let before = Lock::of(word);
                if before.seat == 0 && !is_waiting(word) {
                    self.holds.insert(lock, before.token + 1);
                }
            }
            Want::Arrive => {
                let before = Barrier::of(word);
                // Counted where it is broken as well.
                let epoch = books.arrivals.entry(before.epoch).or_default();
                epoch.acknowledge(before.arrivals as i64, "a barrier");
                if before.broken {
                    let reset = (before.epoch, super::books::PARTIES);
                    self.op(Want::Other, Op::Reset, BARRIER, 0, reset);
                    return;
                }
                let goal = before.goal(super::books::PARTIES) as i64;
                let condition = Condition { comparison: Comparison::Ge, value: goal };
                self.wait_for(1, &[(BARRIER, 0, condition)], None, now + 300);
            }
            _ => {}
        }
    }

    fn wait_over(&mut self, header: &Header, payload: &[u8]) {
        let id = header.id;
        let done = frame(Tag::WaitDone, id, 0, &[]);
        self.out.extend_from_slice(&done);
        self.told.push(done);
        // A second one answers a cancel that crossed the first.
        let Some(wait) = self.waits.remove(&id) else {
            return;
        };
        assert!(header.tag != Tag::WaitRefused as u8 || wait.brief, "refused: {:?}", wait.aim);
        if header.tag != Tag::Woken as u8 {
            return;
        }
        let fired: Vec<FiredRecord> = payload
            .chunks_exact(size_of::<FiredRecord>())
            .map(bytemuck::pod_read_unaligned)
            .collect();
        match wait.aim {
            Aim::Cells(need, conditions, _) => {
                assert!(fired.len() >= need, "woken by {} cells of {need}", fired.len());
                for FiredRecord { index, word, .. } in fired {
                    let condition = conditions[index as usize];
                    assert!(condition.holds(word), "woken by {}: {condition:?}", value(word));
                }
            }
            Aim::Lock(lock) => {
                self.holds.insert(lock, Lock::of(fired[0].word).token + 1);
            }
            Aim::Permit => self.permits += 1,
        }
    }

    /// The connection on which it says goodbye, having handed over what it has.
    pub fn goodbye(&mut self, hand_over: bool) {
        if hand_over {
            self.out.extend(frame(Tag::Release, 0, 0, &[]));
        }
        self.out.extend(frame(Tag::Bye, 0, 0, &[]));
    }
}

/// What opens an array.
pub fn open(array: u16) -> Vec<u8> {
    use super::books::{COUNTERS, EVENTS, LOCKS, PARTIES, PERMITS, ROWS};
    use crate::catalog::Kind;
    let (kind, rows, cols, param) = match array {
        EVENT => (Kind::Event, 1, EVENTS, 0),
        COUNTER => (Kind::Counter, 1, COUNTERS, 0),
        LOCK => (Kind::Lock, 1, LOCKS, 0),
        BARRIER => (Kind::Barrier, 1, 1, PARTIES),
        SEMAPHORE => (Kind::Semaphore, 1, 1, PERMITS << 32 | PERMITS),
        SLOTS => (Kind::Slots, ROWS, 1, 64),
        _ => (Kind::Counter, 1, 1, 0),
    };
    let (rows, cols) = (rows as u32, cols as u32);
    let record = OpenRecord { array, kind: kind as u8, rows, cols, param, ..OpenRecord::default() };
    [bytemuck::bytes_of(&record), name_of(array).as_bytes()].concat()
}

/// What an array is called.
pub fn name_of(array: u16) -> String {
    format!("array{array}")
}
