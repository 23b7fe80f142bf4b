//! Promise: while a server with `--state` is killed at random moments and
//! started again, a lock has one holder at a time: two cells that are changed
//! one after the other under it are never found different, nothing that was
//! counted under it is lost, and each holder's token is larger than the last.
//!
//! FARCELL_KILLS says how often the server is killed, FARCELL_SEED when.
#![cfg(feature = "cli")]

mod common;

use common::another::{Another, role};
use common::process::Process;
use common::{key, random};
use farcell::{Client, Lock, LockGuard};
use std::io::Read;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PROCESSES: usize = 4;
const THREADS: usize = 3;
/// The server and the file for what was counted.
const ROLE: &str = "FARCELL_LOCK_CLIENT";

/// Those who only try would not get the lock of those who queue.
const LOCKS: usize = 2;

fn lock_of(way: usize) -> usize {
    way / 2
}

/// Each thread takes its lock in its own way.
fn take(lock: &Lock, way: usize) -> Option<LockGuard> {
    match way % THREADS {
        0 => Some(lock.lock().unwrap()),
        1 => lock.lock_timeout(Duration::from_millis(3)).unwrap(),
        _ => {
            let guard = lock.try_lock().unwrap();
            if guard.is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            guard
        }
    }
}

/// How often each way has had the lock.
fn work(client: &Client, way: usize, over: &AtomicBool) -> i64 {
    let lock = client.locks("locks", 1, LOCKS).unwrap().at(0, lock_of(way)).unwrap();
    let cells = client.counters("pairs", LOCKS, 3).unwrap();
    let [one, two, last] = [0, 1, 2].map(|col| cells.at(lock_of(way), col).unwrap());
    let mut counted = 0;
    while !over.load(Ordering::Relaxed) {
        let Some(guard) = take(&lock, way) else { continue };
        let (a, b) = (one.load().unwrap(), two.load().unwrap());
        assert_eq!(a, b, "another one was at work");
        let (token, before) = (guard.token() as i64, last.load().unwrap());
        assert!(token > before, "the token {token} came behind {before}");
        last.store(token).unwrap();
        one.store(a + 1).unwrap();
        two.store(b + 1).unwrap();
        guard.unlock().unwrap();
        counted += 1;
    }
    counted
}

#[test]
#[ignore = "the role of a client process of the test below"]
fn role_of_a_client() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let (addr, file) = role.split_once(' ').unwrap();
    let client = Client::builder().addr(addr).key(key()).connect().unwrap();
    let over = AtomicBool::new(false);
    let counted: Vec<i64> = std::thread::scope(|s| {
        let workers: Vec<_> = (0..THREADS)
            .map(|way| {
                let (client, over) = (&client, &over);
                s.spawn(move || work(client, way, over))
            })
            .collect();
        // It ends when we are to stop.
        let _ = std::io::stdin().read(&mut [0]);
        over.store(true, Ordering::Relaxed);
        workers.into_iter().map(|w| w.join().unwrap()).collect()
    });
    let text: Vec<String> = counted.iter().map(ToString::to_string).collect();
    std::fs::write(file, text.join(" ")).unwrap();
}

struct Worker {
    process: Another,
    file: PathBuf,
}

impl Worker {
    fn start(me: usize, server: &Process) -> Worker {
        let file = server.dir.path().join(format!("counted-{me}"));
        let what = format!("{} {}", server.addr, file.display());
        let mut command = role("role_of_a_client", ROLE, what);
        let process = Another::start(command.stdin(Stdio::piped()));
        Worker { process, file }
    }

    /// How often each of its threads has had the lock.
    fn stop(mut self) -> Vec<i64> {
        self.process.end();
        let text = std::fs::read_to_string(&self.file).unwrap();
        text.split(' ').map(|n| n.parse().unwrap()).collect()
    }
}

fn variable(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().map_or(usual, |n| n.parse().expect("a number"))
}

#[test]
fn a_lock_has_one_holder_over_all_lives() {
    let kills = variable("FARCELL_KILLS", 40);
    let mut seed = variable("FARCELL_SEED", u64::from(std::process::id()));
    println!("seed {seed}, {kills} kills");
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = memory.path().join("state");
    let mut server = Process::start(&["--state", state.to_str().unwrap()]);
    let watcher = Client::builder().addr(&server.addr).key(key()).connect().unwrap();
    let pairs = watcher.counters("pairs", LOCKS, 3).unwrap();
    let locks = watcher.locks("locks", 1, LOCKS).unwrap();
    let workers: Vec<Worker> = (0..PROCESSES).map(|me| Worker::start(me, &server)).collect();
    let mut held = 0;
    let mut before = vec![0; LOCKS];
    for _ in 0..kills {
        // In each life someone gets each lock.
        let begun = Instant::now();
        loop {
            let now = pairs.column(0).unwrap().snapshot().unwrap();
            if now.iter().zip(&before).all(|(now, before)| now > before) {
                break;
            }
            let late = begun.elapsed() > Duration::from_secs(20);
            assert!(!late, "{before:?}, now {now:?}; {:#?}", watcher.members().unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_micros(random(&mut seed, 30_000)));
        server.kill();
        server.start_again();
        before = pairs.column(0).unwrap().snapshot().unwrap();
        held += u32::from(locks.at(0, 0).unwrap().is_locked().unwrap());
    }
    let counted: Vec<Vec<i64>> = workers.into_iter().map(Worker::stop).collect();
    let by_way = |way: usize| counted.iter().map(|c| c[way]).sum::<i64>();
    let ways = [0, 1, 2].map(by_way);
    println!("{kills} kills, {held} of a lock that was held; the ways had it {ways:?} times");
    for (at, total) in [ways[0] + ways[1], ways[2]].into_iter().enumerate() {
        let pair = pairs.row(at).unwrap().snapshot().unwrap();
        assert_eq!(pair[..2], [total, total], "lock {at}");
        let lock = locks.at(0, at).unwrap();
        assert!(!lock.is_locked().unwrap(), "nobody is left");
        assert!(lock.token().unwrap() as i64 >= total);
    }
    assert!(held > 0, "no kill has met a held lock");
    assert!(ways.iter().all(|&n| n > 0), "{ways:?}");
}
