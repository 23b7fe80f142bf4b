//! Promise: a client that works in memory can be killed at any instruction, and
//! nothing is corrupted by that: what it had done counts, what it had not does
//! not, and whoever waits is woken by the next who sets.
//!
//! 150 kills; `FARCELL_KILLS=5000` for more.

mod common;
use common::{client, eventually, key, server};
use farcell::segment::Segment;
use farcell::{Client, Server, TransportChoice};
use std::fs::{File, OpenOptions};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(20);
/// Children at a time.
const CHILDREN: usize = 3;
const ADDR: &str = "FARCELL_TEST_SHM_ADDR";
const JOURNAL: &str = "FARCELL_TEST_SHM_JOURNAL";
const CHILD: &str = "FARCELL_TEST_SHM_CHILD";

/// What a child writes down in memory that is not farcell's, words of a cache
/// line of its own.
struct Journal<'j>(&'j [AtomicU64]);

impl Journal<'_> {
    fn of(journal: &Segment, child: usize) -> Journal<'_> {
        Journal(&journal.cells()[child * 8..child * 8 + 8])
    }
    fn count(&self, at: usize) {
        self.0[at].fetch_add(1, Ordering::SeqCst);
    }
    fn get(&self, at: usize) -> u64 {
        self.0[at].load(Ordering::SeqCst)
    }
}

const BEGUN: usize = 0;
const DONE: usize = 1;
const READY: usize = 2;

fn open(path: &str) -> Segment {
    Segment::of_file(OpenOptions::new().read(true).write(true).open(path).unwrap()).unwrap()
}

/// The child: works without end. Nothing to do when it runs as a test.
#[test]
fn a_child() {
    let Ok(addr) = std::env::var(ADDR) else { return };
    let number: usize = std::env::var(CHILD).unwrap().parse().unwrap();
    let journal = open(&std::env::var(JOURNAL).unwrap());
    let journal = Journal::of(&journal, number);
    let client =
        Client::builder().addr(addr).key(key()).transport(TransportChoice::Shm).connect().unwrap();
    let events = client.events("events", 2, 8).unwrap();
    let counters = client.counters("counters", 1, 2).unwrap();
    let (total, other) = (counters.at(0, 0).unwrap(), counters.at(0, 1).unwrap());
    std::thread::scope(|s| {
        // One that sleeps, and is killed in its sleep.
        s.spawn(|| {
            for i in 0.. {
                let event = events.at(1, i % 8).unwrap();
                let time = Duration::from_micros(i as u64 * 37 % 3000);
                let _ = event.wait_timeout(time).unwrap();
                let seen = other.load().unwrap();
                let _ = other
                    .wait_until(farcell::Comparison::Gt, seen, Some(Duration::from_millis(1)), None)
                    .unwrap();
            }
        });
        journal.count(READY);
        for i in 0.. {
            let event = events.at(i % 2, i / 2 % 8).unwrap();
            match i % 5 {
                0 | 1 => drop(event.set().unwrap()),
                2 => drop(event.clear().unwrap()),
                3 => drop(event.take().unwrap()),
                _ => drop(other.fetch_xor(5).unwrap()),
            }
            journal.count(BEGUN);
            total.fetch_add(1).unwrap();
            journal.count(DONE);
        }
    });
}

fn start(server: &Server, journal: &str, number: usize) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["a_child", "--exact", "--nocapture"])
        .env(ADDR, server.address())
        .env(JOURNAL, journal)
        .env(CHILD, number.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn clients_killed_at_any_moment_leave_everything_whole() {
    let kills: usize = std::env::var("FARCELL_KILLS").map_or(150, |n| n.parse().unwrap());
    let server = server().lease(Duration::from_secs(2)).start().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal");
    let bytes = Segment::bytes_of(8 * CHILDREN as u32).unwrap();
    File::create(&path).unwrap().set_len(bytes as u64).unwrap();
    let path = path.to_str().unwrap();
    let journal = open(path);
    let shm = client(&server).transport(TransportChoice::Shm).connect().unwrap();
    let tcp = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    let free = shm.info().unwrap().free;
    let events = shm.events("events", 2, 8).unwrap();
    let over_tcp = tcp.events("events", 2, 8).unwrap();
    let counters = shm.counters("counters", 1, 2).unwrap();
    let total = counters.at(0, 0).unwrap();
    let mut children: Vec<Child> = (0..CHILDREN).map(|n| start(&server, path, n)).collect();
    let mut in_flight = 0;
    for kill in 0..kills {
        let number = kill % CHILDREN;
        let its = Journal::of(&journal, number);
        let starts = (kill / CHILDREN + 1) as u64;
        eventually("the child works", || its.get(READY) == starts);
        // Some are killed at their start, others in the middle of it all.
        let pause = getrandom_us() % 4000;
        std::thread::sleep(Duration::from_micros(pause));
        children[number].kill().unwrap();
        children[number].wait().unwrap();
        // At most one operation was under way.
        let flying = its.get(BEGUN) - its.get(DONE);
        assert!(flying <= starts);
        in_flight = in_flight.max(flying);
        if kill % 10 == 9 {
            // Whoever waits is woken, here and elsewhere, by the next who sets.
            let (here, there) = (events.at(0, 3).unwrap(), over_tcp.at(0, 3).unwrap());
            std::thread::scope(|s| {
                let a = s.spawn(|| here.wait_timeout(LONG).unwrap());
                let b = s.spawn(|| there.wait_timeout(LONG).unwrap());
                here.set().unwrap();
                assert!(a.join().unwrap() && b.join().unwrap());
            });
        }
        children[number] = start(&server, path, number);
    }
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let sum = |at| (0..CHILDREN).map(|n| Journal::of(&journal, n).get(at)).sum::<u64>();
    let (begun, done) = (sum(BEGUN), sum(DONE));
    let found = total.load().unwrap() as u64;
    println!("{kills} kills; {done} done, {begun} begun, {found} found");
    assert!(done > kills as u64, "the children have hardly worked");
    assert!((done..=begun).contains(&found), "{done} done, {begun} begun, {found} found");
    assert!(begun - done <= (kills + CHILDREN) as u64);
    eventually("the sessions of the dead are over", || server.sessions() == 2);
    eventually("their waits too", || server.parked_waits() == 0);
    // Nothing that they left hinders anyone: every event can be set, cleared,
    // taken and waited for, and the counts of transitions go on by one.
    for index in 0..16 {
        let (here, there) = (events.flat(index).unwrap(), over_tcp.flat(index).unwrap());
        here.clear().unwrap();
        let before = there.transitions().unwrap();
        assert_eq!(before % 2, 0);
        std::thread::scope(|s| {
            let a = s.spawn(|| here.wait_timeout(LONG).unwrap());
            let b = s.spawn(|| there.wait_timeout(LONG).unwrap());
            eventually("both wait", || server.parked_waits() == 2);
            assert!(if index % 2 == 0 { here.set() } else { there.set() }.unwrap());
            assert!(a.join().unwrap() && b.join().unwrap());
        });
        assert!(there.take().unwrap());
        assert_eq!(here.transitions().unwrap(), before + 2);
    }
    // The cells of removed arrays come back: no dead session holds them.
    shm.remove("events").unwrap();
    shm.remove("counters").unwrap();
    drop((events, over_tcp, counters, total));
    tcp.close();
    shm.close();
    let last = client(&server).connect().unwrap();
    eventually("all cells are free", || {
        drop(last.events("one", 1, 1).unwrap());
        last.remove("one").unwrap();
        last.info().unwrap().free + 8 * 64 >= free
    });
}

/// A random number of microseconds.
fn getrandom_us() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}
