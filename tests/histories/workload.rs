//! What the clients do: runs of a few milliseconds, each on cells of its own, which
//! all threads of all processes begin at the same time by the machine's clock.

use crate::common::random;
use crate::journal::{Journal, Kind, Outcome, now};
use crate::spec::{Op, Ret};
use farcell::{Client, CounterArray, Error, Event, EventArray, Lock, LockArray, LockGuard};
use std::time::{Duration, Instant};

/// What all clients of a round have in common.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    /// When the first run begins, by [`now`].
    pub begin: u64,
    /// How long each run lasts, in nanoseconds.
    pub run: u64,
    pub runs: usize,
    /// Most calls of a thread in a run.
    pub calls: u64,
    /// 0: all kinds of calls; 1: adds alone, as many at once as there can be; 2: as
    /// 1, and each by itself; 3: stores and loads alone.
    pub what: u64,
    /// Whether a wait that says that its time was over is held to that: the event was
    /// not set at some moment of it. Not where anything is cut or stopped: without an
    /// answer of the server in time nobody can know.
    pub timeouts_tell: bool,
}

impl Plan {
    /// As one word, for another process.
    pub fn to_words(self) -> String {
        let Plan { seed, begin, run, runs, calls, what, timeouts_tell } = self;
        format!("{seed},{begin},{run},{runs},{calls},{what},{}", u64::from(timeouts_tell))
    }

    pub fn from_words(words: &str) -> Plan {
        let n: Vec<u64> = words.split(',').map(|n| n.parse().unwrap()).collect();
        let (runs, timeouts_tell) = (n[3] as usize, n[6] == 1);
        Plan { seed: n[0], begin: n[1], run: n[2], runs, calls: n[4], what: n[5], timeouts_tell }
    }

    /// The arrays of the round: a cell for each run.
    pub fn arrays(&self, client: &Client) -> (EventArray, CounterArray, LockArray) {
        (
            client.events("events", 1, self.runs).unwrap(),
            client.counters("counters", 1, self.runs).unwrap(),
            client.locks("locks", 1, self.runs).unwrap(),
        )
    }

    /// When the last run ends.
    pub fn end(&self) -> u64 {
        self.begin + self.run * self.runs as u64
    }
}

/// How many adds are done at once where adds alone are done.
const AT_ONCE: u64 = 40;

/// How long a thread waits for a lock.
const PATIENCE: Duration = Duration::from_secs(3);

/// Longest time of a wait of a millisecond that the server has answered for certain.
const ANSWERED: Duration = Duration::from_millis(400);

/// Does what a thread does, until the last run is over.
pub fn work(plan: &Plan, client: &Client, journal: Journal, process: usize, thread: usize) {
    let (events, counters, locks) = plan.arrays(client);
    let (me, timeouts_tell) = ((process * 64 + thread) as i64, plan.timeouts_tell);
    let mut worker = Worker { journal, seed: 0, made: 0, me, timeouts_tell };
    let mut next = 0;
    loop {
        let since = now().saturating_sub(plan.begin);
        let run = if now() < plan.begin { 0 } else { (since / plan.run) as usize };
        if run >= plan.runs {
            return;
        }
        if now() < plan.begin || run < next {
            let at = plan.begin + plan.run * next as u64;
            std::thread::sleep(Duration::from_nanos(at.saturating_sub(now()).max(1000)));
            continue;
        }
        next = run + 1;
        // The same calls each time that the seed is the same, whatever happens.
        worker.seed = plan.seed ^ (run as u64) << 20 ^ (process as u64) << 10 ^ thread as u64;
        random(&mut worker.seed, 2);
        let counter = counters.at(0, run).unwrap();
        match plan.what {
            1 => worker.adds_at_once(run, client, &counter),
            2 => (0..plan.calls).for_each(|_| worker.add(run, &counter)),
            3 => (0..plan.calls).for_each(|_| worker.store_or_load(run, &counter)),
            _ => {
                for _ in 0..plan.calls {
                    match random(&mut worker.seed, 3) {
                        0 => worker.event(run, &events.at(0, run).unwrap()),
                        1 => worker.counter(run, &counter),
                        _ => worker.lock(run, &locks.at(0, run).unwrap()),
                    }
                }
            }
        }
    }
}

struct Worker {
    journal: Journal,
    seed: u64,
    /// So that no two stored values are the same.
    made: i64,
    me: i64,
    timeouts_tell: bool,
}

/// What an operation came to.
fn outcome<T>(result: Result<T, Error>, ret: impl FnOnce(T) -> Ret) -> Outcome {
    match result {
        Ok(value) => Outcome::Returned(ret(value)),
        Err(Error::OutcomeUnknown { .. }) => Outcome::Unknown,
        Err(Error::Unreachable { .. } | Error::ServerGoingAway { .. }) => Outcome::Not,
        Err(error) => panic!("{error}"),
    }
}

impl Worker {
    fn call(&mut self, kind: Kind, run: usize, op: Op, call: impl FnOnce() -> Outcome) {
        let number = self.journal.begins(kind, run, op);
        let outcome = call();
        self.journal.ended(number, outcome);
    }

    fn fresh(&mut self) -> i64 {
        self.made += 1;
        self.me * 1_000_000 + self.made
    }

    fn event(&mut self, run: usize, event: &Event) {
        let op = match random(&mut self.seed, 8) {
            0..=2 => Op::Set,
            3 => Op::Clear,
            4 | 5 => Op::Take,
            6 => Op::IsSet,
            _ => Op::Transitions,
        };
        let (waits, tells) = (random(&mut self.seed, 2) == 0, self.timeouts_tell);
        let begun = Instant::now();
        self.call(Kind::Event, run, op, || match op {
            Op::Set => outcome(event.set(), Ret::Bool),
            Op::Clear => outcome(event.clear(), Ret::Bool),
            Op::Take => outcome(event.take(), Ret::Bool),
            // A wait returns true if it was set at some moment of it, and false if it was
            // clear at some moment of it, and its time was over; or if the server has
            // not said within half a second how it was.
            Op::IsSet if waits => match event.wait_timeout(Duration::from_millis(1)) {
                Ok(false) if !tells || begun.elapsed() > ANSWERED => Outcome::Not,
                result => outcome(result, Ret::Bool),
            },
            Op::IsSet => outcome(event.is_set(), Ret::Bool),
            _ => outcome(event.transitions(), |n| Ret::Value(n as i64)),
        });
    }

    fn counter(&mut self, run: usize, counter: &farcell::Counter) {
        let delta = 1 + random(&mut self.seed, 9) as i64;
        match random(&mut self.seed, 6) {
            0 => self.store_or_load(run, counter),
            1 => {
                let new = self.fresh();
                self.call(Kind::Counter, run, Op::Swap(new), || {
                    outcome(counter.swap(new), Ret::Value)
                });
            }
            2 | 3 => {
                let mut seen = 0;
                self.call(Kind::Counter, run, Op::Load, || {
                    outcome(counter.load().inspect(|value| seen = *value), Ret::Value)
                });
                let op = Op::Cas(seen, seen + delta);
                self.call(Kind::Counter, run, op, || {
                    outcome(counter.compare_exchange(seen, seen + delta), Ret::Cas)
                });
            }
            _ => self.call(Kind::Counter, run, Op::Add(delta), || {
                outcome(counter.fetch_add(delta), Ret::Value)
            }),
        }
    }

    fn store_or_load(&mut self, run: usize, counter: &farcell::Counter) {
        if random(&mut self.seed, 2) == 0 {
            let new = self.fresh();
            self.call(Kind::Counter, run, Op::Store(new), || {
                outcome(counter.store(new), |()| Ret::Done)
            });
        } else {
            self.call(Kind::Counter, run, Op::Load, || outcome(counter.load(), Ret::Value));
        }
    }

    fn add(&mut self, run: usize, counter: &farcell::Counter) {
        self.call(Kind::Counter, run, Op::Add(1), || outcome(counter.fetch_add(1), Ret::Value));
    }

    fn adds_at_once(&mut self, run: usize, client: &Client, counter: &farcell::Counter) {
        let mut batch = client.batch();
        let numbers: Vec<u32> = (0..AT_ONCE)
            .map(|_| {
                batch.fetch_add(counter, 1);
                self.journal.begins(Kind::Counter, run, Op::Add(1))
            })
            .collect();
        let found = batch.run().unwrap();
        for (number, found) in numbers.into_iter().zip(found) {
            self.journal.ended(number, Outcome::Returned(Ret::Value(found.value())));
        }
    }

    fn lock(&mut self, run: usize, lock: &Lock) {
        let waits = random(&mut self.seed, 2) == 0;
        let op = if waits { Op::Acquire } else { Op::TryAcquire };
        let number = self.journal.begins(Kind::Lock, run, op);
        let result = if waits { lock.lock_timeout(PATIENCE) } else { lock.try_lock() };
        let mut guard: Option<LockGuard> = None;
        let outcome = match result {
            Ok(None) if waits => Outcome::TimedOut,
            result => outcome(result, |got| {
                guard = got;
                Ret::Token(guard.as_ref().map(|guard| guard.token() as i64))
            }),
        };
        self.journal.ended(number, outcome);
        if let Some(guard) = guard {
            if random(&mut self.seed, 4) == 0 {
                std::thread::yield_now();
            }
            let release = self.journal.begins(Kind::Lock, run, Op::Release(number));
            let outcome = match guard.unlock() {
                // It is said as well as done: its lease was over.
                Err(Error::LeaseLost { .. }) => Outcome::Returned(Ret::Bool(false)),
                result => self::outcome(result, |()| Ret::Done),
            };
            self.journal.ended(release, outcome);
        }
    }
}
