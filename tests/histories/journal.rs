//! What clients write down: each call before it begins and after it has ended, so
//! that also a process that is killed has told what it had begun.

use crate::spec::{Op, Ret};
use rustix::time::{ClockId, clock_gettime};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The time of all processes of this machine, in nanoseconds.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The kind of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Event,
    Counter,
    Lock,
}

/// What became of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Returned(Ret),
    /// The library says that it does not know.
    Unknown,
    /// The library says that it did not happen.
    Not,
    /// It waited for a lock until its time was over.
    TimedOut,
}

/// The journal of one thread.
pub struct Journal {
    file: File,
    calls: u32,
}

impl Journal {
    /// The journal of a thread of a process, in a folder for all of them.
    pub fn create(folder: &Path, process: usize, thread: usize) -> Journal {
        let path = folder.join(format!("{process}-{thread}.journal"));
        let file = OpenOptions::new().create_new(true).append(true).open(path).unwrap();
        Journal { file, calls: 0 }
    }

    fn line(&mut self, line: &str) {
        // In one piece, and without a buffer of our own, which would die with us.
        self.file.write_all(line.as_bytes()).unwrap();
    }

    /// A call begins. Its number in this journal.
    pub fn begins(&mut self, kind: Kind, run: usize, op: Op) -> u32 {
        self.calls += 1;
        let (word, a, b) = words(op);
        let number = self.calls;
        self.line(&format!("b {number} {} {} {run} {word} {a} {b}\n", now(), kind as u8));
        number
    }

    /// It has ended.
    pub fn ended(&mut self, number: u32, outcome: Outcome) {
        let end = now();
        let (word, a) = match outcome {
            Outcome::Returned(Ret::Done) => ("done", 0),
            Outcome::Returned(Ret::Bool(yes)) => ("bool", i64::from(yes)),
            Outcome::Returned(Ret::Value(value)) => ("value", value),
            Outcome::Returned(Ret::Cas(Ok(value))) => ("ok", value),
            Outcome::Returned(Ret::Cas(Err(value))) => ("err", value),
            Outcome::Returned(Ret::Token(Some(token))) => ("token", token),
            Outcome::Returned(Ret::Token(None)) => ("none", 0),
            Outcome::Unknown => ("unknown", 0),
            Outcome::Not => ("not", 0),
            Outcome::TimedOut => ("late", 0),
        };
        self.line(&format!("e {number} {end} {word} {a}\n"));
    }
}

/// A call as it was written down.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub process: usize,
    pub thread: usize,
    /// Its number in the journal of its thread.
    pub number: u32,
    pub kind: Kind,
    pub run: usize,
    pub op: Op,
    pub begin: u64,
    /// When it had ended and how, if it had.
    pub end: Option<(u64, Outcome)>,
}

/// All journals in a folder.
pub fn read(folder: &Path) -> Vec<Entry> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|e| e == "journal"));
    files.sort();
    let mut entries = Vec::new();
    for path in files {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let (process, thread) = name.split_once('-').unwrap();
        let (process, thread) = (process.parse().unwrap(), thread.parse().unwrap());
        let first = entries.len();
        let text = std::fs::read_to_string(&path).unwrap();
        // A line that was not written to its end is of a call that had not begun.
        for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
            let fields: Vec<&str> = line.trim_end().split(' ').collect();
            let n = |i: usize| -> i64 { fields[i].parse().unwrap() };
            if fields[0] == "b" {
                let kind = [Kind::Event, Kind::Counter, Kind::Lock][n(3) as usize];
                let op = op(fields[5], n(6), n(7));
                let (number, begin, run) = (n(1) as u32, n(2) as u64, n(4) as usize);
                entries.push(Entry { process, thread, number, kind, run, op, begin, end: None });
            } else {
                let outcome = outcome(fields[3], n(4));
                entries[first + n(1) as usize - 1].end = Some((n(2) as u64, outcome));
            }
        }
    }
    entries
}

fn words(op: Op) -> (&'static str, i64, i64) {
    match op {
        Op::Set => ("set", 0, 0),
        Op::Clear => ("clear", 0, 0),
        Op::IsSet => ("is_set", 0, 0),
        Op::Take => ("take", 0, 0),
        Op::Transitions => ("transitions", 0, 0),
        Op::Load => ("load", 0, 0),
        Op::Store(a) => ("store", a, 0),
        Op::Add(a) => ("add", a, 0),
        Op::Cas(a, b) => ("cas", a, b),
        Op::Swap(a) => ("swap", a, 0),
        Op::Acquire => ("acquire", 0, 0),
        Op::TryAcquire => ("try", 0, 0),
        Op::Release(call) => ("release", i64::from(call), 0),
        Op::TooLate(_) | Op::Gone(_) => unreachable!("nobody calls it"),
    }
}

fn op(word: &str, a: i64, b: i64) -> Op {
    match word {
        "set" => Op::Set,
        "clear" => Op::Clear,
        "is_set" => Op::IsSet,
        "take" => Op::Take,
        "transitions" => Op::Transitions,
        "load" => Op::Load,
        "store" => Op::Store(a),
        "add" => Op::Add(a),
        "cas" => Op::Cas(a, b),
        "swap" => Op::Swap(a),
        "acquire" => Op::Acquire,
        "try" => Op::TryAcquire,
        "release" => Op::Release(a as u32),
        other => panic!("no operation {other}"),
    }
}

fn outcome(word: &str, a: i64) -> Outcome {
    Outcome::Returned(match word {
        "done" => Ret::Done,
        "bool" => Ret::Bool(a == 1),
        "value" => Ret::Value(a),
        "ok" => Ret::Cas(Ok(a)),
        "err" => Ret::Cas(Err(a)),
        "token" => Ret::Token(Some(a)),
        "none" => Ret::Token(None),
        "unknown" => return Outcome::Unknown,
        "not" => return Outcome::Not,
        "late" => return Outcome::TimedOut,
        other => panic!("no outcome {other}"),
    })
}
