//! Promise: a server with `--state` that is killed at random moments under
//! load, and started again, has every operation that it acknowledged, and none
//! twice.
//!
//! Processes of clients change cells and arrays, and keep journals of what was
//! answered. FARCELL_KILLS says how often the server is killed.
#![cfg(feature = "cli")]

mod common;

use common::another::{Another, role};
use common::process::Process;
use common::{eventually, key, random};
use farcell::{Client, Comparison, Error, Result};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PROCESSES: usize = 3;
const THREADS: usize = 2;
/// Journals that a client process keeps; the variable holds its number, the
/// server and the file.
const ROLE: &str = "FARCELL_STATE_CLIENT";

/// What became of operations whose outcome may stay unknown.
#[derive(Default)]
struct Tally {
    done: i64,
    unknown: i64,
}

impl Tally {
    /// Counts an answer. The server is killed, so nothing else may come.
    fn count<T>(&mut self, answer: Result<T>) -> Option<T> {
        match answer {
            Ok(value) => {
                self.done += 1;
                Some(value)
            }
            Err(Error::OutcomeUnknown { .. }) => {
                self.unknown += 1;
                None
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A thread's journal.
#[derive(Default)]
struct Journal {
    adds: Tally,
    takes: Tally,
    /// Sets and clears of an event that is this thread's alone.
    transitions: i64,
    /// Arrays: 1 exists, 0 was removed, -1 may be either.
    arrays: BTreeMap<String, i64>,
}

fn work(client: &Client, name: &str, me: usize, over: &AtomicBool) -> Journal {
    let mut journal = Journal::default();
    let cells = PROCESSES * THREADS;
    let counter = client.counters("counts", 1, 4).unwrap().at(0, me % 4).unwrap();
    let event = client.events("events", cells, 2).unwrap().at(me, 0).unwrap();
    let token = client.events("events", cells, 2).unwrap().at(me, 1).unwrap();
    let mut last = -1;
    for round in 0.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        if let Some(before) = journal.adds.count(counter.fetch_add(1)) {
            assert!(before > last, "it went back from {last} to {before}");
            last = before;
        }
        // Each of these changes the event once, also if it is asked for twice.
        event.set().unwrap();
        event.clear().unwrap();
        journal.transitions += 2;
        token.set().unwrap();
        if let Some(was_set) = journal.takes.count(token.take()) {
            assert!(was_set, "nobody else takes it");
        }
        if round % 16 == 0 {
            let name = format!("{name}.{me}.{round}");
            client.events(&name, 1, 3).unwrap().at(0, 2).unwrap().set().unwrap();
            journal.arrays.insert(name, 1);
            if round % 32 == 0
                && let Some((name, state)) = journal.arrays.iter_mut().find(|(_, s)| **s == 1)
            {
                *state = match client.remove(name) {
                    Ok(()) => 0,
                    Err(Error::OutcomeUnknown { .. }) => -1,
                    Err(error) => panic!("{name}: {error}"),
                };
            }
        }
    }
    journal
}

/// Two threads that hand a turn to each other: their waits go on through all.
/// How many turns there were.
fn hand_off(client: &Client, me: usize, over: &AtomicBool) -> i64 {
    let turns = client.counters("turns", PROCESSES, 1).unwrap().at(me, 0).unwrap();
    let run = |first: i64| {
        let turns = turns.clone();
        move || {
            let mut mine = first;
            loop {
                let long = Some(Duration::from_secs(60));
                // Until it is this one's turn, or the end.
                let at = turns.wait_until(Comparison::Ge, mine, long, None).unwrap();
                let at = at.expect("the other one has hung");
                if at > mine {
                    return;
                }
                // The end comes from one of the two alone.
                let last = first == 0 && over.load(Ordering::Relaxed);
                turns.store(if last { 1 << 40 | mine } else { mine + 1 }).unwrap();
                if last {
                    return;
                }
                mine += 2;
            }
        }
    };
    std::thread::scope(|s| {
        s.spawn(run(0));
        s.spawn(run(1));
    });
    turns.load().unwrap() & ((1 << 40) - 1)
}

#[test]
#[ignore = "the role of a client process of the test below"]
fn role_of_a_client() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [me, addr, file] = role.splitn(3, ' ').collect::<Vec<_>>().try_into().unwrap();
    let me: usize = me.parse().unwrap();
    let client = Client::builder().addr(addr).key(key()).connect().unwrap();
    let over = AtomicBool::new(false);
    let (journals, turns) = std::thread::scope(|s| {
        let workers: Vec<_> = (0..THREADS)
            .map(|t| {
                let (client, over) = (&client, &over);
                s.spawn(move || work(client, "array", me * THREADS + t, over))
            })
            .collect();
        let turns = s.spawn(|| hand_off(&client, me, &over));
        std::fs::write(Path::new(file).with_extension("ready"), "").unwrap();
        // It ends when we are to stop.
        let _ = std::io::stdin().read(&mut [0]);
        over.store(true, Ordering::Relaxed);
        let journals: Vec<Journal> = workers.into_iter().map(|w| w.join().unwrap()).collect();
        (journals, turns.join().unwrap())
    });
    let mut out = format!("turns {turns}\n");
    for (t, j) in journals.iter().enumerate() {
        let Journal { adds, takes, transitions, arrays } = j;
        let me = me * THREADS + t;
        out += &format!(
            "thread {me} {} {} {} {} {transitions}\n",
            adds.done, adds.unknown, takes.done, takes.unknown
        );
        for (name, state) in arrays {
            out += &format!("array {name} {state}\n");
        }
    }
    std::fs::File::create(file).unwrap().write_all(out.as_bytes()).unwrap();
}

struct Worker {
    process: Another,
    journal: PathBuf,
}

impl Worker {
    fn start(me: usize, server: &Process) -> Worker {
        let journal = server.dir.path().join(format!("journal-{me}"));
        let what = format!("{me} {} {}", server.addr, journal.display());
        let mut command = role("role_of_a_client", ROLE, what);
        let process = Another::start(command.stdin(Stdio::piped()));
        let worker = Worker { process, journal };
        let ready = worker.journal.with_extension("ready");
        eventually("a client is at work", || ready.exists());
        worker
    }

    /// Its journal.
    fn stop(mut self) -> String {
        self.process.end();
        std::fs::read_to_string(&self.journal).unwrap()
    }
}

#[test]
fn whatever_was_acknowledged_is_there() {
    let kills: u32 =
        std::env::var("FARCELL_KILLS").ok().map_or(200, |n| n.parse().expect("FARCELL_KILLS"));
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = memory.path().join("state");
    let mut server = Process::start(&["--state", state.to_str().unwrap()]);
    let watcher = Client::builder().addr(&server.addr).key(key()).connect().unwrap();
    let counts = watcher.counters("counts", 1, 4).unwrap();
    let workers: Vec<Worker> = (0..PROCESSES).map(|me| Worker::start(me, &server)).collect();
    let mut seed = u64::from(std::process::id());
    println!("seed {seed}, {kills} kills");
    let begun = Instant::now();
    let mut before = vec![0; 4];
    let mut busy = 0;
    for kill in 0..kills {
        // Every fourth kill may meet clients that are on their way back; the
        // others are at work.
        if kill % 4 > 0 {
            eventually("clients are at work", || counts.all().snapshot().unwrap() != before);
        }
        std::thread::sleep(Duration::from_micros(random(&mut seed, 50_000)));
        server.kill();
        server.start_again();
        let now = counts.all().snapshot().unwrap();
        assert!(now.iter().zip(&before).all(|(n, b)| n >= b), "{kill}: {before:?}, then {now:?}");
        busy += u32::from(now != before);
        before = now;
    }
    let took = begun.elapsed();
    let journals: String = workers.into_iter().map(Worker::stop).collect();

    let events = watcher.events("events", PROCESSES * THREADS, 2).unwrap();
    let transitions = events.all().transitions().unwrap();
    let totals = counts.all().snapshot().unwrap();
    let lines = |first: &str| {
        let fields = journals.lines().map(|l| l.split(' ').collect::<Vec<_>>());
        fields.filter(|f| f[0] == first).map(|f| f[1..].to_vec()).collect::<Vec<_>>()
    };
    let (mut done, mut unknown) = ([0; 4], [0; 4]);
    for fields in lines("thread") {
        let n: Vec<i64> = fields.iter().map(|f| f.parse().unwrap()).collect();
        let me = n[0] as usize;
        done[me % 4] += n[1];
        unknown[me % 4] += n[2];
        assert_eq!(transitions[me * 2] as i64, n[5], "the event of thread {me}");
        // Each round sets it once; each take, known or not, clears it once, and
        // one that did not happen leaves the next set without a change.
        let token = transitions[me * 2 + 1] as i64;
        let (known, perhaps) = (2 * n[3], 2 * n[4] + 1);
        assert!((known..=known + perhaps).contains(&token), "thread {me}: {token}, {n:?}");
    }
    for cell in 0..4 {
        let range = done[cell]..=done[cell] + unknown[cell];
        assert!(range.contains(&totals[cell]), "cell {cell}: {} not in {range:?}", totals[cell]);
    }
    let exist: Vec<String> = watcher.list().unwrap().into_iter().map(|a| a.name).collect();
    let mut arrays = [0; 3];
    for fields in lines("array") {
        let (name, journaled): (&str, i64) = (fields[0], fields[1].parse().unwrap());
        let exists = exist.iter().any(|e| e == name);
        assert!(journaled == -1 || exists == (journaled == 1), "{name}: {exists}, {journaled}");
        arrays[(journaled + 1) as usize] += 1;
        if exists {
            assert!(watcher.events(name, 1, 3).unwrap().at(0, 2).unwrap().is_set().unwrap());
        }
    }
    let turns: i64 = lines("turns").iter().map(|f| f[0].parse::<i64>().unwrap()).sum();
    println!(
        "{kills} kills in {took:?}, {busy} of them after further counts; adds: {} acknowledged, {} unknown, {} in the cells; {} transitions; {turns} turns; arrays: {} there, {} removed, {} unknown",
        done.iter().sum::<i64>(),
        unknown.iter().sum::<i64>(),
        totals.iter().sum::<i64>(),
        transitions.iter().sum::<u64>(),
        arrays[2],
        arrays[1],
        arrays[0],
    );
    assert!(busy >= kills / 4 * 3, "clients were at work in {busy} lives of {kills} only");
    assert!(unknown.iter().sum::<i64>() > 0, "no kill has met an operation");
    assert!(arrays[2] > 0 && arrays[1] > 0, "{arrays:?}");
}
