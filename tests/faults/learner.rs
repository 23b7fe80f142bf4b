//! A learner: a process that adds, passes a ball to another one and takes a lock,
//! and keeps a journal that outlives it.

use super::common::key;
use farcell::{Client, Error, LockGuard, TransportChoice, WaitOptions};
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// What a learner is to be: its number, the transport, the server, its journal.
pub const ROLE: &str = "FARCELL_FAULT_LEARNER";
/// How many there are. Each two of them pass a ball.
pub const LEARNERS: usize = 4;

/// What is counted, each at its place in the journal.
#[derive(Clone, Copy)]
pub enum Count {
    /// fetch_adds that were begun.
    Begun,
    /// fetch_adds that returned `Ok`.
    Done,
    /// fetch_adds with an unknown outcome.
    Unknown,
    /// Errors that say that something did not happen.
    Told,
    /// How often the ball was passed on.
    Passes,
    /// How often a wait ended with `PeerLost`.
    PeersLost,
    /// When the first of them came, in microseconds since the system started.
    LostAt,
    /// How often the lock was had.
    Locks,
    /// Locks that were found abandoned.
    Abandoned,
    /// How often a lease was found to be over.
    LeasesLost,
    /// The slowest fetch_add, in microseconds.
    Slowest,
}

/// Microseconds of the clock that no one sets, the same in all processes.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000
}

/// A file of counts. The page cache keeps it when its writer is killed.
pub struct Journal {
    file: File,
    path: PathBuf,
}

impl Journal {
    pub fn new(path: &Path) -> Journal {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        Journal { file: options.open(path).unwrap(), path: path.to_owned() }
    }

    /// Each count has one thread that changes it.
    fn put(&self, count: Count, value: u64) {
        self.file.write_all_at(&value.to_le_bytes(), count as u64 * 8).unwrap();
    }

    fn add(&self, count: Count) {
        self.put(count, self.get(count) + 1);
    }

    pub fn get(&self, count: Count) -> u64 {
        let mut bytes = [0; 8];
        // What was never written is not there yet.
        let _ = self.file.read_at(&mut bytes, count as u64 * 8).unwrap();
        u64::from_le_bytes(bytes)
    }

    /// What went against a promise.
    fn violation(&self, what: &str) {
        eprintln!("{what}");
        std::fs::write(self.path.with_extension("violation"), what).unwrap();
    }

    pub fn violations(&self) -> Option<String> {
        std::fs::read_to_string(self.path.with_extension("violation")).ok()
    }

    /// What the fetch_adds found, at the end of a learner that was not killed.
    pub fn olds(&self) -> Vec<i64> {
        let bytes = std::fs::read(self.path.with_extension("olds")).unwrap_or_default();
        bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

struct Learner {
    me: usize,
    client: Client,
    journal: Journal,
    over: AtomicBool,
}

impl Learner {
    fn over(&self) -> bool {
        self.over.load(Relaxed)
    }

    /// Adds to a cell of all and to one of its own.
    fn adds(&self) -> Vec<i64> {
        let all = self.client.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
        let mut olds = Vec::new();
        let mut last = -1;
        while !self.over() {
            self.journal.add(Count::Begun);
            let begun = Instant::now();
            match all.fetch_add(1) {
                Ok(old) => {
                    self.journal.add(Count::Done);
                    if old <= last {
                        self.journal.violation(&format!("the sum went from {last} to {old}"));
                    }
                    last = old;
                    olds.push(old);
                }
                Err(Error::OutcomeUnknown { .. }) => self.journal.add(Count::Unknown),
                Err(_) => {
                    self.journal.add(Count::Told);
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            let took = begun.elapsed().as_micros() as u64;
            if took > self.journal.get(Count::Slowest) {
                self.journal.put(Count::Slowest, took);
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        olds
    }

    /// Passes a ball on each time it comes, and names the other one in its waits.
    fn passes(&self) {
        let balls = self.client.events("balls", 1, LEARNERS).unwrap();
        let other = self.me ^ 1;
        let (mine, theirs) = (balls.flat(self.me).unwrap(), balls.flat(other).unwrap());
        let options = WaitOptions::new()
            .timeout(Duration::from_millis(500))
            .peers([format!("learner {other}")]);
        while !self.over() {
            match mine.wait_with_options(&options) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(error) => {
                    if let Error::PeerLost { .. } = error {
                        if self.journal.get(Count::PeersLost) == 0 {
                            self.journal.put(Count::LostAt, now());
                        }
                        self.journal.add(Count::PeersLost);
                    }
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                }
            }
            // Both may be done again: it is ours to clear and theirs to be set.
            while mine.clear().is_err() && !self.over() {}
            while theirs.set().is_err() && !self.over() {}
            self.journal.add(Count::Passes);
        }
    }

    /// Takes the lock, and looks whether it is alone with it.
    fn locks(&self) {
        let lock = self.client.locks("lock", 1, 1).unwrap().at(0, 0).unwrap();
        let mut last = 0;
        while !self.over() {
            let guard = match lock.lock_timeout(Duration::from_millis(500)) {
                Ok(Some(guard)) => guard,
                Ok(None) => continue,
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                }
            };
            if guard.token() <= last {
                let token = guard.token();
                self.journal.violation(&format!("the token {token} came behind {last}"));
            }
            last = guard.token();
            if guard.was_abandoned() {
                self.journal.add(Count::Abandoned);
            }
            match self.alone(&guard) {
                Ok(()) => self.journal.add(Count::Locks),
                Err(Error::LeaseLost { .. }) => self.journal.add(Count::LeasesLost),
                Err(_) => {}
            }
            if let Err(Error::LeaseLost { .. }) = guard.unlock() {
                self.journal.add(Count::LeasesLost);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Writes its token where the holder's belongs, and finds it there still. As
    /// whoever keeps things under a lock must, it takes nothing from a holder
    /// with a larger token: that one came later, so the lock is no longer ours.
    fn alone(&self, guard: &LockGuard) -> farcell::Result<()> {
        let holder = self.client.counters("holder", 1, 1)?.at(0, 0)?;
        let mine = guard.token() as i64;
        let before = holder.load()?;
        if before > mine || holder.compare_exchange(before, mine)?.is_err() {
            return self.not_alone(guard, "another holder came");
        }
        if holder.load()? != mine {
            return self.not_alone(guard, "another holder was there too");
        }
        Ok(())
    }

    /// That may be if the lease is over, and then only.
    fn not_alone(&self, guard: &LockGuard, what: &str) -> farcell::Result<()> {
        guard.check()?;
        self.journal.violation(&format!("{what}, and the lease is not over"));
        Ok(())
    }
}

/// In a process that was started to be one: works until its standard input ends.
pub fn learn_if_asked() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let [me, transport, addr, file] = role.splitn(4, ' ').collect::<Vec<_>>().try_into().unwrap();
    let me: usize = me.parse().unwrap();
    let choice = match transport {
        "tcp" => TransportChoice::Tcp,
        "shm" => TransportChoice::Shm,
        "rdma" => TransportChoice::Rdma,
        _ => TransportChoice::Auto,
    };
    let client = Client::builder()
        .addr(addr)
        .key(key())
        .transport(choice)
        .wait_for_server(Duration::from_secs(60))
        .connect()
        .unwrap();
    let report = client.transport();
    std::fs::write(
        Path::new(file).with_extension("transport"),
        format!("{}: {}", report.name, report.reasons.join("; ")),
    )
    .unwrap();
    client.join(&format!("learner {me}")).unwrap();
    let learner = Learner {
        me,
        client,
        journal: Journal::new(Path::new(file)),
        over: AtomicBool::new(false),
    };
    let learner = &learner;
    let olds = std::thread::scope(|s| {
        let adds = s.spawn(|| learner.adds());
        s.spawn(|| learner.passes());
        s.spawn(|| learner.locks());
        let _ = std::io::stdin().read(&mut [0]);
        learner.over.store(true, Relaxed);
        adds.join().unwrap()
    });
    let distinct: HashSet<i64> = olds.iter().copied().collect();
    if distinct.len() != olds.len() {
        learner.journal.violation("two fetch_adds found the same sum");
    }
    let bytes: Vec<u8> = olds.iter().flat_map(|old| old.to_le_bytes()).collect();
    std::fs::write(Path::new(file).with_extension("olds"), bytes).unwrap();
}
