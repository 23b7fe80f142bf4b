//! The engine on real threads and real memory.

use super::model::Ask;
use super::{encode, frames};
use crate::auth::Access;
use crate::catalog::{Form, Kind};
use crate::cell;
use crate::engine::{Engine, Newcomer, Next, Out, Route, SharedSession, lock};
use crate::layout::Shape;
use crate::segment::Segment;
use crate::wire::{FiredRecord, Tag, take};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

const LEASE: Duration = Duration::from_secs(1000);

/// A client's thread, and how the others reach it.
struct Seat<'e> {
    engine: &'e Engine<Segment>,
    session: SharedSession,
    inbox: Receiver<Vec<u8>>,
    outboxes: Vec<Sender<Vec<u8>>>,
    next_request: u64,
    next_wait: u64,
}

impl<'e> Seat<'e> {
    /// As many seats as asked for, each with the events as 0 and the counters
    /// as 1. Routes are their places at the table.
    fn table(engine: &'e Engine<Segment>, count: usize) -> Vec<Seat<'e>> {
        let (outboxes, inboxes): (Vec<_>, Vec<_>) = (0..count).map(|_| channel()).unzip();
        let seat = |(at, inbox)| {
            let newcomer = Newcomer {
                access: Access::ReadWrite,
                resume: None,
                next_request: 1,
                fresh: at as u64 + 1,
                route: at as Route,
            };
            let session = engine.attach(&newcomer, Duration::ZERO, &mut Out::default()).session;
            let outboxes = outboxes.clone();
            let mut seat = Seat { engine, session, inbox, outboxes, next_request: 1, next_wait: 1 };
            for (number, name) in [(0, "events"), (1, "counters")] {
                let name = name.to_owned();
                seat.ask(Ask::Open { number, name, kind: 0, rows: 0, cols: 0 });
            }
            seat
        };
        inboxes.into_iter().enumerate().map(seat).collect()
    }

    /// Carries these to the engine, passes on whom it wakes, and returns the
    /// replies.
    fn handle(&self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Out::default();
        let session = &mut lock(&self.session);
        let result = self.engine.handle(Duration::ZERO, session, bytes, &mut out);
        assert_eq!(result, (bytes.len(), Ok(Next::Continue)));
        post(&self.outboxes, out.mail);
        out.reply
    }

    fn ask(&mut self, ask: Ask) -> Vec<u8> {
        let reply = self.handle(&encode(&ask, self.next_request, 0));
        self.next_request += 1;
        let (header, payload) = frames(&reply).remove(0);
        assert!([Tag::Words as u8, Tag::Opened as u8].contains(&header.tag));
        payload
    }

    /// One operation; the value before it.
    fn one(&mut self, op: u8, array: u16, cell: u32, a: i64) -> i64 {
        let word = self.ask(Ask::Ops(vec![(op, array, cell, a, 0)]));
        cell::value(u64::from_le_bytes(word.try_into().unwrap()))
    }

    fn begin_wait(&mut self, ask: &Ask) -> (u64, Vec<u8>) {
        let id = self.next_wait;
        self.next_wait += 1;
        (id, self.handle(&encode(ask, id, 0)))
    }

    /// Waits until enough of the cells compare so; their values. Nobody sweeps
    /// here: a lost wake-up is a wait without end, and fails.
    fn wait(
        &mut self,
        need: u32,
        array: u16,
        comparison: u8,
        cells: (u32, u32, u32),
        value: i64,
    ) -> Vec<(u32, i64)> {
        let ask = Ask::Wait { need, records: vec![(array, comparison, cells, value)] };
        let (id, mut bytes) = self.begin_wait(&ask);
        if bytes.is_empty() {
            let patience = Duration::from_secs(60);
            bytes = self.inbox.recv_timeout(patience).expect("a wake-up was lost");
        }
        let (header, payload) = frames(&bytes).remove(0);
        assert_eq!((header.tag, header.id), (Tag::Woken as u8, id), "an answer that is not ours");
        assert!(self.handle(&encode(&Ask::WaitDone, id, 0)).is_empty());
        payload
            .chunks(size_of::<FiredRecord>())
            .map(|bytes| take::<FiredRecord>(Tag::Woken, bytes).unwrap().0)
            .map(|fired| (fired.index, cell::value(fired.word)))
            .collect()
    }
}

fn post(outboxes: &[Sender<Vec<u8>>], mail: Vec<(Route, Vec<u8>)>) {
    for (route, bytes) in mail {
        outboxes[route as usize].send(bytes).expect("everyone stays to the end");
    }
}

fn engine() -> Engine<Segment> {
    let engine = Engine::new(Segment::anonymous(1024).unwrap(), 1024, LEASE);
    for (name, kind) in [("events", Kind::Event), ("counters", Kind::Counter)] {
        engine.open(name, Form { kind, shape: Shape { rows: 4, cols: 9 }, param: 0 }).unwrap();
    }
    engine
}

/// Nobody waits, and so no cell has its waiting bit.
fn verify_clean(engine: &Engine<Segment>) {
    assert_eq!(engine.parked(), 0);
    for (place, word) in engine.actor.cells().iter().enumerate() {
        assert!(!cell::is_waiting(word.load(Ordering::Relaxed)), "a bit is left on cell {place}");
    }
}

#[test]
fn ten_thousand_pulses_between_threads_are_all_seen() {
    const PULSES: i64 = 10_000;
    let engine = engine();
    let mut seats = Seat::table(&engine, 2).into_iter();
    let (mut setter, mut waiter) = (seats.next().unwrap(), seats.next().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for round in 0..PULSES {
                setter.one(2, 0, 0, 0);
                setter.one(3, 0, 0, 0);
                setter.wait(1, 1, 4, (0, 1, 1), round + 1);
            }
        });
        scope.spawn(move || {
            for round in 0..PULSES {
                // Any transition behind the even value that was seen last.
                let seen = waiter.wait(1, 0, 1, (0, 1, 1), 2 * round);
                assert!(seen[0].1 == 2 * round + 1 || seen[0].1 == 2 * round + 2);
                assert_eq!(waiter.one(6, 1, 0, 1), round);
                // The pulse of this round is over before the next wait.
                waiter.wait(1, 0, 4, (0, 1, 1), 2 * round + 2);
            }
        });
    });
    verify_clean(&engine);
}

#[test]
fn adders_and_waiters_on_many_threads_lose_nothing() {
    const ROUNDS: i64 = 1_500;
    let engine = engine();
    let mut seats = Seat::table(&engine, 6);
    std::thread::scope(|scope| {
        for (at, mut seat) in seats.drain(..).enumerate() {
            scope.spawn(move || {
                for round in 1..=ROUNDS {
                    if at < 3 {
                        // Each adds to one cell of its own and to one of all.
                        seat.one(6, 1, at as u32, 1);
                        seat.one(6, 1, 8, 1);
                        // And goes on when the others are as far, so that
                        // somebody sleeps all the time.
                        seat.wait(3, 1, 4, (0, 3, 1), round);
                    } else {
                        // All of the three, and then any of them and the sum.
                        let all = seat.wait(3, 1, 4, (0, 3, 1), round);
                        assert!(all.len() == 3 && all.iter().all(|&(_, v)| v >= round));
                        seat.wait(1, 1, 4, (8, 1, 1), 3 * round);
                    }
                }
            });
        }
    });
    let total = engine.catalog.read().unwrap().get("counters").unwrap().base + 8;
    let total = cell::value(engine.actor.cells()[total as usize].load(Ordering::Relaxed));
    assert_eq!(total, 3 * ROUNDS);
    verify_clean(&engine);
}

#[test]
fn one_set_wakes_each_waiter_once_while_others_cancel_and_a_sweep_runs() {
    const ROUNDS: i64 = 400;
    let engine = engine();
    let mut seats = Seat::table(&engine, 5);
    let outboxes = seats[0].outboxes.clone();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut setter = seats.pop().unwrap();
        let mut canceller = seats.pop().unwrap();
        let waiters: Vec<_> = seats
            .drain(..)
            .enumerate()
            .map(|(at, mut seat)| {
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        seat.wait(1, 0, 4, (5, 1, 1), 2 * round + 1);
                        seat.one(2, 0, 10 + at as u32, 0);
                        seat.wait(1, 0, 4, (5, 1, 1), 2 * round + 2);
                        seat.one(3, 0, 10 + at as u32, 0);
                    }
                    assert!(seat.inbox.try_recv().is_err(), "woken once more");
                })
            })
            .collect();
        scope.spawn(move || {
            for round in 0..ROUNDS {
                setter.one(2, 0, 5, 0);
                setter.wait(3, 0, 4, (10, 3, 1), 2 * round + 1);
                setter.one(3, 0, 5, 0);
                setter.wait(3, 0, 4, (10, 3, 1), 2 * round + 2);
            }
        });
        let over = &over;
        let background = scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                // On the same cell, and for what never comes.
                let ask = Ask::Wait { need: 1, records: vec![(0, 5, (5, 1, 1), 0)] };
                let (id, now) = canceller.begin_wait(&ask);
                assert!(now.is_empty());
                let answer = canceller.handle(&encode(&Ask::Cancel, id, 0));
                assert_eq!(frames(&answer)[0].0.tag, Tag::Cancelled as u8);
                canceller.handle(&encode(&Ask::WaitDone, id, 0));
                let mut out = Out::default();
                canceller.engine.sweep(&mut out);
                post(&outboxes, out.mail);
                std::thread::yield_now();
            }
        });
        for waiter in waiters {
            waiter.join().unwrap();
        }
        over.store(true, Ordering::Relaxed);
        background.join().unwrap();
    });
    verify_clean(&engine);
}
