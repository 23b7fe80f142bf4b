//! Messages in memory: the seqlock of `transport::shm` as it is, over loom's atomics.
//! A message is two words that are the number of its version, so that a mix, or the
//! bytes of another version, can be told.

use super::{Fault, join};
use crate::slot::Version;
use crate::transport::shm::seqlock::{self, Word};
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;
use std::sync::Arc;

/// A row, the area that it moves to, and what says where it is.
struct Row {
    fault: Fault,
    version: AtomicU64,
    area: AtomicU64,
    areas: [[AtomicU64; 2]; 2],
}

impl Word for Row {
    fn load(&self, order: Ordering) -> u64 {
        self.version.load(order)
    }

    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.version.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }

    fn fence(&self, order: Ordering) {
        let left_out = match self.fault {
            Fault::NoWriterFence => order == Ordering::Release,
            Fault::NoReaderFence => order == Ordering::Acquire,
            _ => false,
        };
        if !left_out {
            fence(order);
        }
    }
}

impl Row {
    fn words(&self) -> &[AtomicU64; 2] {
        &self.areas[self.area.load(Ordering::Relaxed) as usize]
    }

    /// A client writes once, if the row is free. Whether it made a message whole.
    fn write(&self, seat: u32) -> bool {
        let found = self.version.load(Ordering::Acquire);
        let before = Version::of(found);
        if before.is_writing() {
            return false;
        }
        let claimed = before.claimed(seat);
        if seqlock::claim(self, found, claimed).is_err() {
            return false;
        }
        // Once and for all.
        for word in self.words() {
            word.store(claimed.next().number(), Ordering::Relaxed);
        }
        if self.fault == Fault::BlindCommit {
            self.version.store(claimed.next().word(), Ordering::Release);
            return true;
        }
        seqlock::commit(self, claimed).is_ok()
    }

    /// A client reads once; the version that it has got.
    fn read(&self) -> Option<u64> {
        let version = Version::of(seqlock::begin(self));
        if version.is_writing() || version.is_torn() {
            return None;
        }
        let got = self.words().each_ref().map(|word| word.load(Ordering::Relaxed));
        if !seqlock::is_still(self, version) {
            return None;
        }
        assert_eq!(got, [version.number(); 2], "not that message");
        Some(version.number())
    }

    /// The server takes the row from a writer that has gone and may still write, as
    /// `Engine::tear_rows` does.
    fn tear(&self) {
        let found = self.version.load(Ordering::Acquire);
        let version = Version::of(found);
        if !version.is_writing() {
            return;
        }
        let nobodys = version.left().claimed(0);
        if self.compare_exchange(found, nobodys.word()).is_err() {
            return;
        }
        if self.fault != Fault::EarlyMove {
            fence(Ordering::Release);
        }
        self.area.store(1, Ordering::Relaxed);
        let torn = self.compare_exchange(nobodys.word(), nobodys.left().word());
        assert!(torn.is_ok(), "it is claimed");
    }
}

fn explore(fault: Fault, switches: usize, model: impl Fn(&Arc<Row>) + Send + Sync + 'static) {
    let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counter = count.clone();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(switches);
    builder.check(move || {
        counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        // Nobody may take what is in the area that nobody has had.
        let words = |n| [AtomicU64::new(n), AtomicU64::new(n)];
        let row = Row {
            fault,
            version: AtomicU64::new(Version::whole(0).word()),
            area: AtomicU64::new(0),
            areas: [0, 99].map(words),
        };
        model(&Arc::new(row));
    });
    let count = count.load(std::sync::atomic::Ordering::Relaxed);
    println!("{fault:?}: {count} schedules");
    assert!(count > 1, "nothing was interleaved");
}

fn spawn(row: &Arc<Row>, work: impl FnOnce(&Row) + Send + 'static) -> thread::JoinHandle<()> {
    let row = row.clone();
    thread::spawn(move || work(&row))
}

fn one_writes_and_one_reads(row: &Arc<Row>) {
    let writer = spawn(row, |row| {
        assert!(row.write(1));
        assert!(row.write(1));
    });
    let first = row.read();
    let second = row.read();
    assert!(first <= second || second.is_none(), "back from {first:?} to {second:?}");
    join([writer]);
    assert_eq!(row.read(), Some(2));
}

fn two_write(row: &Arc<Row>) {
    let other = spawn(row, |row| {
        row.write(2);
    });
    let reader = spawn(row, |row| {
        row.read();
    });
    row.write(1);
    join([other, reader]);
    assert!(row.read().is_some_and(|number| number >= 1), "one of them at least was first");
}

/// A writer's session ends while it writes; somebody writes behind that.
fn one_is_stopped(row: &Arc<Row>) {
    let stopped = spawn(row, |row| {
        row.write(1);
    });
    let reader = spawn(row, |row| {
        row.read();
    });
    row.tear();
    row.write(2);
    row.read();
    join([stopped, reader]);
    row.read();
}

#[test]
fn a_message_in_memory_is_read_whole_or_not_at_all() {
    explore(Fault::None, 3, one_writes_and_one_reads);
}

#[test]
fn two_writers_in_memory_do_not_mix() {
    explore(Fault::None, 2, two_write);
}

#[test]
fn what_a_stopped_writer_still_puts_is_in_no_message() {
    explore(Fault::None, 2, one_is_stopped);
}

// ---- that the models would find faults --------------------------------------

#[test]
#[should_panic(expected = "not that message")]
fn a_claim_that_is_seen_behind_the_bytes_is_found() {
    explore(Fault::NoWriterFence, 3, one_writes_and_one_reads);
}

#[test]
#[should_panic(expected = "not that message")]
fn a_version_that_is_looked_at_before_the_bytes_is_found() {
    explore(Fault::NoReaderFence, 3, one_writes_and_one_reads);
}

#[test]
#[should_panic(expected = "not that message")]
fn one_who_makes_whole_what_was_taken_away_is_found() {
    explore(Fault::BlindCommit, 2, one_is_stopped);
}

#[test]
#[should_panic(expected = "not that message")]
fn a_row_that_is_seen_to_move_before_it_is_claimed_is_found() {
    explore(Fault::EarlyMove, 2, one_is_stopped);
}
