//! Promise: while a server with `--state` is killed at random moments and
//! started again, a lock has one holder at a time: two cells that are changed
//! one after the other under it are never found different, nothing that was
//! counted under it is lost, and each holder's token is larger than the last. And
//! while its holders are killed, in shared memory or over TCP, the next one has
//! it, and knows that what it protects may be half done.
//!
//! FARCELL_KILLS says how often the server, or a holder, is killed, FARCELL_SEED
//! when.
#![cfg(feature = "cli")]

mod common;

use common::another::{Speaker, role};
use common::process::Process;
use common::{client, key, random, server};
use farcell::{Client, Error, Lock, LockGuard, TransportChoice};
use std::io::Read;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PROCESSES: usize = 4;
const THREADS: usize = 3;
/// The server and the file for what was counted.
const ROLE: &str = "FARCELL_LOCK_CLIENT";
/// The server.
const MORTAL: &str = "FARCELL_LOCK_MORTAL";
const LONG: Duration = Duration::from_secs(30);

/// Those who only try would not get the lock of those who queue.
const LOCKS: usize = 2;

/// How a mortal ends whose lease was over while it had the lock.
const LAPSED: i32 = 3;

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

/// How often each way has had the lock. `mortal`: holders are killed.
fn work(client: &Client, way: usize, over: &AtomicBool, mortal: bool) -> i64 {
    let lock = client.locks("locks", 1, LOCKS).unwrap().at(0, lock_of(way)).unwrap();
    let cells = client.counters("pairs", LOCKS, 3).unwrap();
    let [one, two, last] = [0, 1, 2].map(|col| cells.at(lock_of(way), col).unwrap());
    let mut counted = 0;
    while !over.load(Ordering::Relaxed) {
        let Some(guard) = take(&lock, way) else { continue };
        let (a, b) = (one.load().unwrap(), two.load().unwrap());
        let (token, before) = (guard.token() as i64, last.load().unwrap());
        // On a machine that stood still for the lease the lock may be another one's
        // by now, which a look at it tells.
        let alone = token > before && (a == b || mortal && guard.was_abandoned());
        if mortal && !alone && matches!(guard.check(), Err(Error::LeaseLost { .. })) {
            std::process::exit(LAPSED);
        }
        assert!(token > before, "the token {token} came behind {before}");
        assert!(alone, "another one was at work: {a} and {b}");
        if a != b {
            two.store(a).unwrap();
        }
        let b = a;
        last.store(token).unwrap();
        one.store(a + 1).unwrap();
        two.store(b + 1).unwrap();
        match guard.unlock() {
            Err(Error::LeaseLost { .. }) if mortal => std::process::exit(LAPSED),
            unlocked => unlocked.unwrap(),
        }
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
    // From here on it outlives the server; a first connection needs one.
    println!("#works");
    let over = AtomicBool::new(false);
    let counted: Vec<i64> = std::thread::scope(|s| {
        let workers: Vec<_> = (0..THREADS)
            .map(|way| {
                let (client, over) = (&client, &over);
                s.spawn(move || work(client, way, over, false))
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
    process: Speaker,
    file: PathBuf,
}

impl Worker {
    fn start(me: usize, server: &Process) -> Worker {
        let file = server.dir.path().join(format!("counted-{me}"));
        let what = format!("{} {}", server.addr, file.display());
        let mut command = role("role_of_a_client", ROLE, what);
        let mut process = Speaker::start(command.stdin(Stdio::piped()));
        process.says("#works");
        Worker { process, file }
    }

    /// How often each of its threads has had the lock.
    fn stop(mut self) -> Vec<i64> {
        self.process.process.end();
        let text = std::fs::read_to_string(&self.file).unwrap();
        text.split(' ').map(|n| n.parse().unwrap()).collect()
    }
}

fn variable(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().map_or(usual, |n| n.parse().expect("a number"))
}

#[test]
#[ignore = "the role of a client process of the test below"]
fn role_of_a_mortal() {
    let Ok(addr) = std::env::var(MORTAL) else { return };
    let client = Client::builder().addr(addr).key(key()).connect().unwrap();
    println!("#works");
    std::thread::scope(|s| {
        for way in 0..THREADS {
            let client = &client;
            s.spawn(move || {
                let over = AtomicBool::new(false);
                let work = || work(client, way, &over, true);
                // The others would work on, and nobody would hear of it.
                if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
                    std::process::exit(1);
                }
            });
        }
    });
}

/// Kills one that may have ended by itself: because its lease was over, which is
/// counted, but for no other reason. What it did behind its lease the others may find.
fn kill(mortal: &mut Speaker, lapses: &mut usize) {
    match mortal.process.0.try_wait().unwrap().map(|status| status.code()) {
        None => mortal.process.kill(),
        Some(Some(LAPSED)) => *lapses += 1,
        Some(code) => assert!(*lapses > 0, "a client has failed ({code:?}); see above"),
    }
}

/// Holders are killed, and after each the lock goes on.
fn holders_are_killed(choice: TransportChoice, name: &str) {
    let kills = variable("FARCELL_KILLS", 200) as usize;
    let mut seed = variable("FARCELL_SEED", u64::from(std::process::id()));
    println!("seed {seed}, {kills} kills, over {name}");
    let server = server().lease(Duration::from_millis(400)).start().unwrap();
    let client = client(&server).transport(choice).connect().unwrap();
    let pairs = client.counters("pairs", LOCKS, 3).unwrap();
    let locks = client.locks("locks", 1, LOCKS).unwrap();
    let start = || {
        let mut command = role("role_of_a_mortal", MORTAL, server.address());
        let mut mortal = Speaker::start(command.env("FARCELL_TRANSPORT", name));
        mortal.says("#works");
        mortal
    };
    let mut mortals: Vec<Speaker> = (0..PROCESSES).map(|_| start()).collect();
    let (mut abandoned, mut lapses) = (0, 0);
    for kill in 0..kills {
        std::thread::sleep(Duration::from_micros(random(&mut seed, 4_000)));
        self::kill(&mut mortals[kill % PROCESSES], &mut lapses);
        mortals[kill % PROCESSES] = start();
        if kill % 8 == 0 {
            // The one in whose way the others do not get behind each other.
            let guard = locks.at(0, 0).unwrap().lock_timeout(LONG).unwrap().expect("it goes on");
            abandoned += u32::from(guard.was_abandoned());
            let (a, b) = (pairs.at(0, 0).unwrap(), pairs.at(0, 1).unwrap());
            if a.load().unwrap() != b.load().unwrap() {
                assert!(guard.was_abandoned() || lapses > 0, "another one was at work");
                b.store(a.load().unwrap()).unwrap();
            }
            guard.unlock().unwrap();
        }
    }
    mortals.iter_mut().for_each(|mortal| kill(mortal, &mut lapses));
    println!("{lapses} leases were over");
    for at in 0..LOCKS {
        let guard = locks.at(0, at).unwrap().lock_timeout(LONG).unwrap().expect("it is free");
        abandoned += u32::from(guard.was_abandoned());
        let had = pairs.at(at, 0).unwrap().load().unwrap();
        println!("lock {at}: {had} times, token {}", guard.token());
        assert!(had > 0 && guard.token() as i64 > had);
        guard.unlock().unwrap();
    }
    println!("{abandoned} of those that were looked at had been abandoned");
    assert_eq!(server.parked_waits(), 0);
}

#[test]
fn holders_killed_in_shared_memory_leave_the_lock_to_the_next() {
    holders_are_killed(TransportChoice::Shm, "shm");
}

#[test]
fn holders_killed_over_tcp_leave_the_lock_to_the_next() {
    holders_are_killed(TransportChoice::Tcp, "tcp");
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
