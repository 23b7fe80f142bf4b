//! Lists of who waits and who holds, driven by hand.

use super::frames;
use crate::auth::Access;
use crate::catalog::{Form, Kind};
use crate::engine::{Engine, Newcomer, Next, Out, SharedSession, lock};
use crate::layout::Shape;
use crate::segment::Segment;
use crate::wire::{
    self, AcquireRecord, FellRecord, HeldRecord, HoldersHead, OpRecord, OpenRecord, RunRecord, Tag,
    TallyRecord, Violation, WaitHead, WaitRecord, WaitedRecord, WaitingRecord, WaitsAfter, take,
};
use std::time::Duration;

struct Place(Engine<Segment>);

struct Client<'p> {
    place: &'p Place,
    session: SharedSession,
    seat: u32,
}

const NAMES: [(&str, Kind); 2] = [("go", Kind::Event), ("gate", Kind::Lock)];

impl Place {
    fn new() -> Place {
        let engine =
            Engine::new(Segment::anonymous(4096).unwrap(), 4096, Duration::from_secs(1000));
        let shape = Shape { rows: 2, cols: 300 };
        for (name, kind) in NAMES {
            engine.open(name, Form { kind, shape, param: 0 }).unwrap();
        }
        Place(engine)
    }

    fn client(&self, id: u64, access: Access) -> Client<'_> {
        let newcomer = Newcomer { access, resume: None, next_request: 1, fresh: id, route: id };
        let attached = self.0.attach(&newcomer, Duration::ZERO, &mut Out::default());
        let client = Client { place: self, session: attached.session, seat: attached.seat };
        for (array, (name, _)) in NAMES.into_iter().enumerate() {
            let record = OpenRecord { array: array as u16, ..OpenRecord::default() };
            client.ask(1, Tag::Open, 0, &[bytemuck::bytes_of(&record), name.as_bytes()].concat());
        }
        client
    }
}

impl Client<'_> {
    fn try_ask(
        &self,
        now: u64,
        tag: Tag,
        id: u64,
        payload: &[u8],
    ) -> Result<Vec<super::Frame>, Violation> {
        let (mut bytes, mut out) = (Vec::new(), Out::default());
        wire::push(&mut bytes, tag, id, &[payload]);
        let mut session = lock(&self.session);
        let now = Duration::from_millis(now);
        let (used, next) = self.place.0.handle(now, &mut session, &bytes, &mut out);
        assert_eq!(next?, Next::Continue);
        assert_eq!(used, bytes.len());
        Ok(frames(&out.reply))
    }

    fn ask(&self, now: u64, tag: Tag, id: u64, payload: &[u8]) -> Vec<super::Frame> {
        self.try_ask(now, tag, id, payload).unwrap()
    }

    fn list(&self, now: u64, tag: Tag, payload: &[u8]) -> Vec<u8> {
        let mut replies = self.ask(now, tag, 0, payload);
        assert_eq!(replies.len(), 1);
        replies.remove(0).1
    }

    /// Waits for `count` events of the first row from `offset` on.
    fn wait(&self, now: u64, id: u64, offset: u32, count: u32, peers: &str) {
        let names = match peers.len() {
            0 => Vec::new(),
            len => [&[len as u8], peers.as_bytes()].concat(),
        };
        let head = WaitHead { need: 1, peers: names.len() as u32 };
        let run = RunRecord { offset, count, stride: 1 };
        let record = WaitRecord { array: 0, comparison: 1, reserved: 0, run, value: 0 };
        let parts = [bytemuck::bytes_of(&head), &names, bytemuck::bytes_of(&record)].concat();
        assert!(self.ask(now, Tag::Wait, id, &parts).is_empty());
    }
}

type Told = (WaitingRecord, Vec<(WaitedRecord, String)>, Vec<String>);

fn waits(mut bytes: &[u8]) -> Vec<Told> {
    let mut told = Vec::new();
    while !bytes.is_empty() {
        let (record, mut rest) = take::<WaitingRecord>(Tag::WaitsListed, bytes).unwrap();
        let mut cells = Vec::new();
        for _ in 0..record.cells {
            let (cell, behind) = take::<WaitedRecord>(Tag::WaitsListed, rest).unwrap();
            let (name, behind) = behind.split_at(cell.name_len.into());
            cells.push((cell, String::from_utf8(name.to_vec()).unwrap()));
            rest = behind;
        }
        let mut peers = Vec::new();
        for _ in 0..record.peers {
            let (name, behind) = rest[1..].split_at(rest[0].into());
            peers.push(String::from_utf8(name.to_vec()).unwrap());
            rest = behind;
        }
        told.push((record, cells, peers));
        bytes = rest;
    }
    told
}

#[test]
fn a_wait_is_told_with_its_cells_its_time_and_its_peers() {
    let place = Place::new();
    let one = place.client(1, Access::ReadWrite);
    let watcher = place.client(2, Access::ReadOnly);
    one.wait(100, 7, 3, 40, "rank 9");
    let told = waits(&watcher.list(1_600, Tag::Waits, bytemuck::bytes_of(&WaitsAfter::default())));
    let [(record, cells, peers)] = &told[..] else { panic!("{told:?}") };
    assert_eq!((record.seat, record.what, record.wait), (one.seat, 1, 7));
    assert_eq!((record.need, record.all_cells, record.all_peers), (1, 40, 1));
    assert_eq!(record.since_ms, 1_500);
    assert_eq!(cells.len(), wire::WAITING_CELLS);
    let (cell, name) = &cells[2];
    assert_eq!((cell.row, cell.col, cell.comparison, cell.value), (0, 5, 1, 0));
    assert_eq!((name.as_str(), cell.kind), ("go", Kind::Event as u8));
    assert_eq!(peers, &["rank 9"]);
    one.ask(200, Tag::Cancel, 7, &[]);
    assert!(watcher.list(2, Tag::Waits, bytemuck::bytes_of(&WaitsAfter::default())).is_empty());
}

#[test]
fn a_long_list_of_waits_comes_in_parts_with_each_once() {
    let place = Place::new();
    let clients = [1, 2, 3].map(|id| place.client(id, Access::ReadWrite));
    for client in &clients {
        // Numbers as a client has them are not dense.
        for wait in 1..=1500 {
            client.wait(10, wait * 3, 0, 20, "");
        }
    }
    let (mut after, mut all, mut parts) = (WaitsAfter::default(), Vec::new(), 0);
    loop {
        let bytes = clients[0].list(20, Tag::Waits, bytemuck::bytes_of(&after));
        assert!(bytes.len() < wire::MAX_PAYLOAD / 4, "{}", bytes.len());
        let told = waits(&bytes);
        let Some((last, ..)) = told.last() else { break };
        after = WaitsAfter { wait: last.wait, seat: last.seat, reserved: 0 };
        all.extend(told.iter().map(|(record, ..)| (record.seat, record.wait)));
        parts += 1;
    }
    let expected: Vec<_> =
        clients.iter().flat_map(|client| (1..=1500).map(|wait| (client.seat, wait * 3))).collect();
    assert_eq!(all, expected);
    assert!(parts > 3);
}

#[test]
fn holders_and_queues_are_told() {
    let place = Place::new();
    let (one, two) = (place.client(1, Access::ReadWrite), place.client(2, Access::ReadWrite));
    let acquire = |client: &Client<'_>, wait: u64, offset: u32| {
        let record = AcquireRecord { array: 1, offset, seat: client.seat, ..Default::default() };
        client.ask(50, Tag::Acquire, wait, bytemuck::bytes_of(&record)).len()
    };
    // Of the second row, behind the padding of the first.
    let offset = Shape { rows: 2, cols: 300 }.offset(1, 2).unwrap();
    assert_eq!((acquire(&one, 1, offset), acquire(&two, 1, offset)), (1, 0));
    let bytes = two.list(60, Tag::Holders, &0u32.to_le_bytes());
    let (head, rest) = take::<HoldersHead>(Tag::HoldersListed, &bytes).unwrap();
    let (record, name) = take::<HeldRecord>(Tag::HoldersListed, rest).unwrap();
    assert_eq!(head.next, 0);
    assert_eq!((record.seat, record.queued, record.value), (one.seat, 1, 1));
    assert_eq!((record.row, record.col, name), (1, 2, &b"gate"[..]));
    let queue = waits(&two.list(60, Tag::Waits, bytemuck::bytes_of(&WaitsAfter::default())));
    assert_eq!((queue[0].0.what, queue[0].0.seat, queue[0].1[0].0.comparison), (2, two.seat, 0));
    // From behind it on there is nothing.
    let bytes = two.list(60, Tag::Holders, &4095u32.to_le_bytes());
    assert_eq!(bytes, [0; 8]);
    assert!(!two.list(60, Tag::Holders, &u32::MAX.to_le_bytes()).is_empty());
}

#[test]
fn tallies_count_what_was_asked_and_keep_what_was_said() {
    let place = Place::new();
    let one = place.client(1, Access::ReadWrite);
    let set = OpRecord { op: 2, reserved: 0, array: 0, offset: 1, a: 0, b: 0 };
    one.ask(100, Tag::Ops, 0, bytemuck::cast_slice(&[set, set, set]));
    let fell = FellRecord { wanted: 2, reason: 5, text: 0, reserved: 0 };
    let say = |text: &[u8]| [bytemuck::bytes_of(&fell), text].concat();
    assert!(one.ask(100, Tag::Fell, 0, &say(b"no \x1b[2Jdevice")).is_empty());
    let told = one.list(600, Tag::Tallies, &0u32.to_le_bytes());
    let (record, rest) = take::<TallyRecord>(Tag::TalliesListed, &told).unwrap();
    // Two openings, the operations, and this question.
    assert_eq!((record.operations, record.requests), (3, 4));
    assert_eq!((record.seat, record.fallbacks, record.idle_ms), (one.seat, 1, 0));
    let (kept, text) = take::<FellRecord>(Tag::TalliesListed, rest).unwrap();
    assert_eq!((kept.reason, text), (5, &b"no  [2Jdevice"[..]));
    // Said again it is no second one.
    one.ask(700, Tag::Fell, 0, &say(b"still none"));
    let told = one.list(700, Tag::Tallies, &0u32.to_le_bytes());
    assert!(told.ends_with(b"still none"));
    assert!(one.list(800, Tag::Tallies, &one.seat.to_le_bytes()).is_empty());

    let long = say(&[b'x'; wire::MAX_FELL_TEXT + 1]);
    assert!(matches!(one.try_ask(900, Tag::Fell, 0, &long), Err(Violation::Size(123, _))));
    for wanted in [0, 1, 4, 255] {
        let bad = FellRecord { wanted, ..fell };
        let told = one.try_ask(900, Tag::Fell, 0, bytemuck::bytes_of(&bad));
        assert_eq!(told, Err(Violation::Field("wanted")));
    }
    for tag in [Tag::Waits, Tag::Holders, Tag::Tallies, Tag::Fell] {
        assert!(matches!(one.try_ask(900, tag, 0, &[0; 3]), Err(Violation::Size(..))));
    }
}
