//! What the engine promises, said once more and as plainly as possible: values
//! in vectors, one thing after another. Nothing here comes from the code that
//! it is compared with but the names of the frames.

use super::Frame;
use crate::auth::Access;
use crate::catalog::Kind;
use crate::engine::Route;
use crate::wire::{ErrorRecord, FiredRecord, InfoRecord, ListRecord, OpenedRecord, Tag, take};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

pub const CAPACITY: u32 = 96;
pub const LEASE: Duration = Duration::from_millis(100);

pub const NO_ARRAY: u16 = 1;
pub const WRONG_KIND: u16 = 2;
pub const OUT_OF_RANGE: u16 = 3;
pub const TOO_LARGE: u16 = 4;
pub const READ_ONLY: u16 = 5;
pub const TOO_MANY_WAITS: u16 = 6;
pub const EMPTY_SHAPE: u16 = 20;
pub const MISMATCH: u16 = 21;
pub const MISSING: u16 = 22;
pub const FULL: u16 = 23;

/// One operation of a frame: code, number of the array, offset, operands.
pub type OneOp = (u8, u16, u32, i64, i64);

/// Offset, count, stride.
pub type Cells = (u32, u32, u32);

/// One record of a wait: number of the array, comparison, cells, value.
pub type Until = (u16, u8, Cells, i64);

/// What a client asks.
#[derive(Clone, Debug)]
pub enum Ask {
    Ops(Vec<OneOp>),
    Runs(u8, u16, Vec<Cells>),
    Open { number: u16, name: String, kind: u8, rows: u32, cols: u32 },
    Remove(String),
    List(String),
    Info,
    Wait { need: u32, records: Vec<Until> },
    Cancel,
    WaitDone,
    Heartbeat,
    Bye,
}

impl Ask {
    /// Whether the answer is worth keeping: the request may change something.
    pub fn changes(&self) -> bool {
        match self {
            Ask::Ops(ops) => ops.iter().any(|op| !is_read(op.0)),
            Ask::Runs(op, ..) => !is_read(*op),
            Ask::Open { .. } | Ask::Remove(_) => true,
            _ => false,
        }
    }
}

pub fn is_read(op: u8) -> bool {
    op == 1 || op == 12
}

#[derive(Debug)]
pub struct Array {
    uid: u64,
    pub kind: Kind,
    rows: u32,
    cols: u32,
    pub base: u32,
    pub cells: Vec<i64>,
}

#[derive(Clone, Debug)]
struct Goal {
    uid: u64,
    offset: u32,
    comparison: u8,
    value: i64,
}

impl Goal {
    fn holds(&self, v: i64) -> bool {
        let w = self.value;
        [v != w, v == w, v > w, v >= w, v < w, v <= w][usize::from(self.comparison) - 1]
    }
}

#[derive(Clone, Debug)]
struct Parked {
    need: usize,
    goals: Vec<Goal>,
    fired: BTreeMap<u32, i64>,
}

/// What is known of the answer to a wait before it was seen. Once it has been
/// seen, it is known exactly.
#[derive(Clone, Debug)]
struct Answer {
    tag: Tag,
    must: BTreeMap<u32, i64>,
    may: BTreeMap<u32, i64>,
    need: usize,
}

impl Answer {
    fn exactly(tag: Tag, fired: BTreeMap<u32, i64>) -> Answer {
        Answer { tag, must: fired.clone(), may: fired, need: 0 }
    }

    fn see(&mut self, (header, payload): &Frame) {
        assert_eq!(header.tag, self.tag as u8, "an answer of another kind: {self:?}");
        if self.tag == Tag::WaitRefused {
            let (record, _) = take::<ErrorRecord>(self.tag, payload).unwrap();
            assert_eq!(record.code, NO_ARRAY);
            return;
        }
        let mut fired = BTreeMap::new();
        for bytes in payload.chunks(size_of::<FiredRecord>()) {
            let (record, _) = take::<FiredRecord>(self.tag, bytes).unwrap();
            let value = (record.word as i64) >> 1;
            assert_eq!(fired.insert(record.index, value), None, "a cell twice in an answer");
            assert_eq!(self.may.get(&record.index), Some(&value), "fired for no reason: {self:?}");
        }
        assert!(fired.len() >= self.need, "woken too early: {fired:?} {self:?}");
        for index in self.must.keys() {
            assert!(fired.contains_key(index), "{index} is missing: {fired:?} {self:?}");
        }
        self.must = fired.clone();
        self.may = fired;
    }
}

/// A wait that has just ended.
#[derive(Debug)]
pub struct Ending {
    pub session: u64,
    pub wait: u64,
    answer: Answer,
}

#[derive(Clone, Debug)]
enum Wait {
    Parked(Parked),
    Ended(Answer),
}

#[derive(Debug)]
pub struct Session {
    pub access: Access,
    pub route: Option<Route>,
    pub last_heard: Duration,
    bindings: BTreeMap<u16, u64>,
    waits: BTreeMap<u64, Wait>,
}

#[derive(Debug, Default)]
pub struct Model {
    pub arrays: BTreeMap<String, Array>,
    pub sessions: BTreeMap<u64, Session>,
    arrays_made: u64,
}

/// How a number of 63 bits wraps.
fn wrap(v: i128) -> i64 {
    let half = 1i128 << 62;
    ((v + half).rem_euclid(half * 2) - half) as i64
}

fn fits(v: i64) -> bool {
    (-(1 << 62)..1 << 62).contains(&v)
}

/// Rows are whole cache lines of 8 cells, and an odd number of them if there
/// is more than one row.
fn extent(rows: u32, cols: u32) -> u32 {
    let lines = cols.div_ceil(8);
    let odd = lines + u32::from(rows > 1 && lines.is_multiple_of(2));
    rows * odd * 8
}

/// What an operation leaves behind.
fn after(op: u8, old: i64, a: i64, b: i64) -> i64 {
    let set = old.rem_euclid(2) == 1;
    match op {
        2 if !set => wrap(i128::from(old) + 1),
        3 | 4 if set => wrap(i128::from(old) + 1),
        5 | 8 => a,
        6 => wrap(i128::from(old) + i128::from(a)),
        7 if old == a => b,
        9 => old & a,
        10 => old | a,
        11 => old ^ a,
        _ => old,
    }
}

fn offsets((offset, count, stride): Cells) -> impl Iterator<Item = u32> {
    (0..count).map(move |i| offset + i * stride)
}

impl Model {
    pub fn attach(&mut self, id: u64, access: Access, route: Route, now: Duration) {
        let session = Session {
            access,
            route: Some(route),
            last_heard: now,
            bindings: BTreeMap::new(),
            waits: BTreeMap::new(),
        };
        assert!(self.sessions.insert(id, session).is_none());
    }

    pub fn parked(&self) -> usize {
        let waits = self.sessions.values().flat_map(|s| s.waits.values());
        waits.filter(|w| matches!(w, Wait::Parked(_))).count()
    }

    /// How many goals of waits are on this cell and have yet to be reached.
    fn waiters(&self, uid: u64, offset: u32) -> usize {
        let mut sum = 0;
        for wait in self.sessions.values().flat_map(|s| s.waits.values()) {
            if let Wait::Parked(parked) = wait {
                let open = |i| !parked.fired.contains_key(&(i as u32));
                let here = |g: &Goal| g.uid == uid && g.offset == offset;
                sum += parked.goals.iter().enumerate().filter(|&(i, g)| open(i) && here(g)).count();
            }
        }
        sum
    }

    /// Every cell of the segment: its value if it belongs to an array, and
    /// whether someone waits on it.
    pub fn segment(&self) -> Vec<(Option<i64>, bool)> {
        let mut all = vec![(None, false); CAPACITY as usize];
        for array in self.arrays.values() {
            for (offset, &value) in array.cells.iter().enumerate() {
                let waited = self.waiters(array.uid, offset as u32) > 0;
                all[array.base as usize + offset] = (Some(value), waited);
            }
        }
        all
    }

    /// First cells and lengths of the pieces that no array has.
    fn gaps(&self) -> Vec<(u32, u32)> {
        let mut taken: Vec<(u32, u32)> =
            self.arrays.values().map(|a| (a.base, a.cells.len() as u32)).collect();
        taken.push((CAPACITY, 0));
        taken.sort_unstable();
        let mut gaps = Vec::new();
        let mut end = 0;
        for (base, len) in taken {
            if base > end {
                gaps.push((end, base - end));
            }
            end = base + len;
        }
        gaps
    }

    fn bound(&self, session: u64, number: u16) -> Option<&Array> {
        let uid = self.sessions[&session].bindings.get(&number)?;
        self.arrays.values().find(|a| a.uid == *uid)
    }

    /// The kind and size of what a session calls by this number.
    pub fn form(&self, session: u64, number: u16) -> Option<(Kind, u32)> {
        self.bound(session, number).map(|a| (a.kind, a.cells.len() as u32))
    }

    /// Waits that a session could name, known ones first.
    pub fn waits(&self, session: u64) -> Vec<u64> {
        self.sessions[&session].waits.keys().copied().collect()
    }

    fn cell(&mut self, uid: u64, offset: u32) -> Option<&mut i64> {
        let array = self.arrays.values_mut().find(|a| a.uid == uid)?;
        array.cells.get_mut(offset as usize)
    }

    /// Why this must be refused; more than one reason may be true.
    fn reasons(&self, session: u64, op: u8, number: u16, cells: Cells) -> BTreeSet<u16> {
        let Some(array) = self.bound(session, number) else {
            return [NO_ARRAY].into();
        };
        let mut reasons = BTreeSet::new();
        let kind = if (2..=4).contains(&op) { Kind::Event } else { Kind::Counter };
        if !is_read(op) && self.sessions[&session].access == Access::ReadOnly {
            reasons.insert(READ_ONLY);
        }
        if !is_read(op) && array.kind != kind {
            reasons.insert(WRONG_KIND);
        }
        let (offset, count, stride) = cells;
        let last = u128::from(offset) + u128::from(count.max(1) - 1) * u128::from(stride);
        if count == 0 || last >= array.cells.len() as u128 {
            reasons.insert(OUT_OF_RANGE);
        }
        reasons
    }

    fn one(&mut self, session: u64, (op, number, offset, a, b): OneOp) -> u64 {
        let uid = self.bound(session, number).unwrap().uid;
        if op == 12 {
            return self.waiters(uid, offset) as u64;
        }
        let cell = self.cell(uid, offset).unwrap();
        let old = *cell;
        *cell = after(op, old, a, b);
        ((old as u64) << 1) >> 1
    }

    /// A change from behind the server's back, by one who then dies.
    pub fn change(&mut self, name: &str, offset: u32, op: u8, a: i64) {
        let array = self.arrays.get_mut(name).unwrap();
        let cell = &mut array.cells[offset as usize];
        *cell = after(op, *cell, a, 0);
    }

    /// Goals that are reached now and were not before.
    fn look(&mut self, session: u64, wait: u64) -> Option<(Parked, BTreeMap<u32, i64>)> {
        let Some(Wait::Parked(parked)) = self.sessions.get(&session)?.waits.get(&wait) else {
            return None;
        };
        let parked = parked.clone();
        let mut all = parked.fired.clone();
        for (index, goal) in parked.goals.iter().enumerate() {
            let index = index as u32;
            if let Some(&mut value) = self.cell(goal.uid, goal.offset)
                && !all.contains_key(&index)
                && goal.holds(value)
            {
                all.insert(index, value);
            }
        }
        Some((parked, all))
    }

    fn put(&mut self, session: u64, wait: u64, state: Wait) {
        self.sessions.get_mut(&session).unwrap().waits.insert(wait, state);
    }

    /// Looks at every wait, and says which ones have ended.
    pub fn settle(&mut self) -> Vec<Ending> {
        let mut ended = Vec::new();
        for session in self.sessions.keys().copied().collect::<Vec<_>>() {
            for wait in self.waits(session) {
                let Some((mut parked, all)) = self.look(session, wait) else {
                    continue;
                };
                if all.len() < parked.need {
                    parked.fired = all;
                    self.put(session, wait, Wait::Parked(parked));
                    continue;
                }
                let (must, need) = (parked.fired, parked.need);
                let answer = Answer { tag: Tag::Woken, must, may: all, need };
                self.put(session, wait, Wait::Ended(answer.clone()));
                ended.push(Ending { session, wait, answer });
            }
        }
        ended
    }

    /// Compares the answer that a client is sent when its wait ends.
    pub fn see_ending(&mut self, mut ending: Ending, frame: &Frame) {
        if self.waits(ending.session).contains(&ending.wait) {
            self.see(ending.session, ending.wait, frame);
        } else {
            // It was acknowledged before the answer came.
            ending.answer.see(frame);
        }
    }

    /// Compares the answer of a wait that has ended.
    fn see(&mut self, session: u64, wait: u64, frame: &Frame) {
        let state = self.sessions.get_mut(&session).unwrap().waits.get_mut(&wait);
        let Some(Wait::Ended(answer)) = state else {
            panic!("the answer of a wait that has not ended: {state:?} {frame:?}");
        };
        answer.see(frame);
    }

    /// Does what is asked, compares the reply, and says which waits, of anyone,
    /// have ended by it.
    pub fn ask(
        &mut self,
        session: u64,
        id: u64,
        ask: &Ask,
        replies: &mut VecDeque<Frame>,
    ) -> Vec<Ending> {
        let mut ended = Vec::new();
        match ask {
            Ask::Ops(ops) => {
                let first = ops.iter().enumerate().find_map(|(i, &(op, number, offset, a, b))| {
                    let mut reasons = self.reasons(session, op, number, (offset, 1, 1));
                    if !is_read(op)
                        && !reasons.contains(&NO_ARRAY)
                        && (!fits(a) || op == 7 && !fits(b))
                    {
                        reasons.insert(TOO_LARGE);
                    }
                    (!reasons.is_empty()).then_some((i as u32, reasons))
                });
                if let Some((index, reasons)) = first {
                    refused(replies, Tag::Refused, id, index, &reasons);
                } else {
                    let words: Vec<u64> = ops.iter().map(|&op| self.one(session, op)).collect();
                    let counts = ops.iter().map(|op| op.0 == 12);
                    has_words(replies, id, words.into_iter().zip(counts));
                }
            }
            Ask::Runs(op, number, runs) => {
                let reasons: BTreeSet<u16> =
                    runs.iter().flat_map(|&run| self.reasons(session, *op, *number, run)).collect();
                if reasons.is_empty() {
                    let mut words = Vec::new();
                    for offset in runs.iter().flat_map(|&run| offsets(run)) {
                        words.push((self.one(session, (*op, *number, offset, 0, 0)), *op == 12));
                    }
                    has_words(replies, id, words.into_iter());
                } else {
                    refused(replies, Tag::Refused, id, 0, &reasons);
                }
            }
            Ask::Open { number, name, kind, rows, cols } => {
                self.open(session, id, *number, name, (*kind, *rows, *cols), replies);
            }
            Ask::Remove(name) => {
                if self.sessions[&session].access == Access::ReadOnly {
                    refused(replies, Tag::Refused, id, 0, &[READ_ONLY].into());
                } else if self.arrays.contains_key(name) {
                    has_words(replies, id, std::iter::empty());
                    ended = self.remove(name);
                } else {
                    refused(replies, Tag::Refused, id, 0, &[MISSING].into());
                }
            }
            Ask::List(after) => {
                let (header, mut payload) = replies.pop_front().expect("a list");
                assert_eq!((header.tag, header.id), (Tag::Listed as u8, id));
                for (name, array) in self.arrays.range(after.clone()..).filter(|(n, _)| *n > after)
                {
                    let (record, rest) = take::<ListRecord>(Tag::Listed, &payload).unwrap();
                    assert_eq!(record.kind, array.kind as u8);
                    assert_eq!((record.rows, record.cols), (array.rows, array.cols));
                    let (found, rest) = rest.split_at(record.name_len.into());
                    assert_eq!(found, name.as_bytes());
                    payload = rest.to_vec();
                }
                assert!(payload.is_empty(), "arrays that do not exist: {payload:?}");
            }
            Ask::Info => {
                let (header, payload) = replies.pop_front().expect("what there is");
                assert_eq!((header.tag, header.id), (Tag::Info as u8, id));
                let gaps = self.gaps();
                let record = InfoRecord {
                    capacity: CAPACITY.into(),
                    free: gaps.iter().map(|g| u64::from(g.1)).sum(),
                    largest: gaps.iter().map(|g| g.1).max().unwrap_or(0).into(),
                    sessions: self.sessions.len() as u32,
                    arrays: self.arrays.len() as u32,
                    parked: self.parked() as u32,
                    reserved: 0,
                };
                assert_eq!(take(Tag::Info, &payload).unwrap(), (record, &[][..]));
            }
            Ask::Wait { need, records } => self.wait(session, id, *need, records, replies),
            Ask::Cancel => {
                if let Some((parked, all)) = self.look(session, id) {
                    let enough = all.len() >= parked.need;
                    let tag = if enough { Tag::Woken } else { Tag::Cancelled };
                    self.put(session, id, Wait::Ended(Answer::exactly(tag, all)));
                }
                let frame = replies.pop_front().expect("an answer to a cancel");
                assert_eq!(frame.0.id, id);
                if self.sessions[&session].waits.contains_key(&id) {
                    self.see(session, id, &frame);
                } else {
                    Answer::exactly(Tag::Cancelled, BTreeMap::new()).see(&frame);
                }
            }
            Ask::WaitDone => {
                let waits = &mut self.sessions.get_mut(&session).unwrap().waits;
                if let Some(Wait::Ended(_)) = waits.get(&id) {
                    waits.remove(&id);
                }
            }
            Ask::Heartbeat => {
                let (header, payload) = replies.pop_front().expect("a heartbeat");
                assert_eq!((header.tag, payload.len()), (Tag::Heartbeat as u8, 0));
            }
            Ask::Bye => {}
        }
        ended
    }

    fn open(
        &mut self,
        session: u64,
        id: u64,
        number: u16,
        name: &str,
        (kind, rows, cols): (u8, u32, u32),
        replies: &mut VecDeque<Frame>,
    ) {
        let read_only = self.sessions[&session].access == Access::ReadOnly;
        let mut reasons = BTreeSet::new();
        let mut created = 0;
        match self.arrays.get(name) {
            Some(array) => {
                let same = array.kind as u8 == kind && (array.rows, array.cols) == (rows, cols);
                if kind != 0 && rows == 0 {
                    reasons.insert(EMPTY_SHAPE);
                }
                if kind != 0 && !same {
                    reasons.insert(MISMATCH);
                }
            }
            None if kind == 0 => {
                reasons.insert(MISSING);
            }
            None if read_only => {
                reasons.insert(READ_ONLY);
            }
            None if rows == 0 => {
                reasons.insert(EMPTY_SHAPE);
            }
            None => {
                let asked = extent(rows, cols);
                match self.gaps().into_iter().find(|&(_, len)| len >= asked) {
                    None => {
                        reasons.insert(FULL);
                    }
                    Some((base, _)) => {
                        created = 1;
                        self.arrays_made += 1;
                        let array = Array {
                            uid: self.arrays_made,
                            kind: Kind::from_code(kind).unwrap(),
                            rows,
                            cols,
                            base,
                            cells: vec![0; asked as usize],
                        };
                        self.arrays.insert(name.to_owned(), array);
                    }
                }
            }
        }
        if !reasons.is_empty() {
            self.sessions.get_mut(&session).unwrap().bindings.remove(&number);
            let record = refused(replies, Tag::Refused, id, 0, &reasons);
            if record.code == FULL {
                let gaps = self.gaps();
                let free = gaps.iter().map(|g| u64::from(g.1)).sum();
                let largest = gaps.iter().map(|g| u64::from(g.1)).max().unwrap_or(0);
                assert_eq!(record.detail, [extent(rows, cols).into(), free, largest]);
            }
            return;
        }
        let array = &self.arrays[name];
        self.sessions.get_mut(&session).unwrap().bindings.insert(number, array.uid);
        let (header, payload) = replies.pop_front().expect("what was opened");
        assert_eq!((header.tag, header.id), (Tag::Opened as u8, id), "{payload:?}");
        let record = OpenedRecord {
            kind: array.kind as u8,
            created,
            reserved: 0,
            rows: array.rows,
            cols: array.cols,
            base: array.base,
            param: 0,
        };
        assert_eq!(take(Tag::Opened, &payload).unwrap(), (record, &[][..]));
    }

    /// A wait on a cell of it that is satisfied by now ends so, and every
    /// other one ends because the cell is gone.
    fn remove(&mut self, name: &str) -> Vec<Ending> {
        let uid = self.arrays[name].uid;
        let mut ended = Vec::new();
        for session in self.sessions.keys().copied().collect::<Vec<_>>() {
            for wait in self.waits(session) {
                let Some((parked, all)) = self.look(session, wait) else {
                    continue;
                };
                let open = |i: usize| !parked.fired.contains_key(&(i as u32));
                if !parked.goals.iter().enumerate().any(|(i, g)| g.uid == uid && open(i)) {
                    continue;
                }
                let answer = if all.len() >= parked.need {
                    Answer::exactly(Tag::Woken, all)
                } else {
                    Answer::exactly(Tag::WaitRefused, BTreeMap::new())
                };
                self.put(session, wait, Wait::Ended(answer.clone()));
                ended.push(Ending { session, wait, answer });
            }
        }
        self.arrays.remove(name);
        ended
    }

    fn wait(
        &mut self,
        session: u64,
        id: u64,
        need: u32,
        records: &[Until],
        replies: &mut VecDeque<Frame>,
    ) {
        match self.sessions[&session].waits.get(&id) {
            Some(Wait::Parked(_)) => return,
            Some(Wait::Ended(_)) => {
                let frame = replies.pop_front().expect("the answer once more");
                assert_eq!(frame.0.id, id);
                return self.see(session, id, &frame);
            }
            None => {}
        }
        let mut goals = Vec::new();
        let mut fired = BTreeMap::new();
        let mut reasons = BTreeSet::new();
        for &(number, comparison, cells, value) in records {
            let mut bad = self.reasons(session, 1, number, cells);
            let Some(array) = self.bound(session, number) else {
                reasons.append(&mut bad);
                continue;
            };
            if comparison == 0 && array.kind != Kind::Event {
                bad.insert(WRONG_KIND);
            }
            if !bad.is_empty() {
                reasons.append(&mut bad);
                continue;
            }
            for offset in offsets(cells) {
                let now = array.cells[offset as usize];
                let goal = match comparison {
                    0 => Goal { uid: array.uid, offset, comparison: 1, value: now },
                    _ => Goal { uid: array.uid, offset, comparison, value },
                };
                let holds = if comparison == 0 { now.rem_euclid(2) == 1 } else { goal.holds(now) };
                if holds {
                    fired.insert(goals.len() as u32, now);
                }
                goals.push(goal);
            }
        }
        if !reasons.is_empty() {
            refused(replies, Tag::WaitRefused, id, 0, &reasons);
            return;
        }
        if fired.len() >= need as usize {
            self.put(session, id, Wait::Ended(Answer::exactly(Tag::Woken, fired)));
            let frame = replies.pop_front().expect("an answer at once");
            assert_eq!(frame.0.id, id);
            return self.see(session, id, &frame);
        }
        self.put(session, id, Wait::Parked(Parked { need: need as usize, goals, fired }));
    }
}

fn refused(
    replies: &mut VecDeque<Frame>,
    tag: Tag,
    id: u64,
    index: u32,
    reasons: &BTreeSet<u16>,
) -> ErrorRecord {
    let (header, payload) = replies.pop_front().expect("a refusal");
    assert_eq!((header.tag, header.id), (tag as u8, id), "{reasons:?} {payload:?}");
    let (record, rest) = take::<ErrorRecord>(tag, &payload).unwrap();
    assert!(rest.is_empty());
    assert!(reasons.contains(&record.code), "{record:?}, not one of {reasons:?}");
    assert_eq!(record.index, index);
    record
}

/// Values in 63 bits, or counts.
fn has_words(replies: &mut VecDeque<Frame>, id: u64, words: impl Iterator<Item = (u64, bool)>) {
    let (header, payload) = replies.pop_front().expect("words");
    assert_eq!((header.tag, header.id), (Tag::Words as u8, id), "{payload:?}");
    let found: Vec<u64> =
        payload.chunks(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect();
    let wanted: Vec<(u64, bool)> = words.collect();
    assert_eq!(found.len(), wanted.len());
    for (found, (wanted, count)) in found.into_iter().zip(wanted) {
        assert_eq!(if count { found } else { found >> 1 }, wanted);
    }
}
