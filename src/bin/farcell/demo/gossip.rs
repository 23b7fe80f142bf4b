//! One learner's rounds, as GALA's learners make them.

use super::task::{Fault, FaultKind, READ, ROWS, START, Summary, Task, WRITE};
use farcell::{Client, Counter, Counters, Error, Events};
use hdrhistogram::Histogram;
use std::time::Instant;

/// A message: the round, the last round if it is known (or 0), and cells that
/// follow from writer and round.
const ROUND: usize = 0;
const LAST: usize = 1;
const PAYLOAD: usize = 2;

/// A learner with its place in the ring.
pub struct Gossip {
    task: Task,
    client: Client,
    /// Our readers have read our message.
    read: Events,
    /// Our message is there for our readers.
    written: Events,
    message: Vec<Counter>,
    /// Our writers' messages are there for us.
    theirs_written: Events,
    /// We have read our writers' messages.
    theirs_read: Events,
    rows: Vec<(usize, Counters)>,
}

impl Gossip {
    /// Opens the arrays. Handles cost nothing: one is made for each group of
    /// cells that is used in a round.
    pub fn new(task: Task, client: Client) -> Result<Gossip, Error> {
        let me = task.learner;
        let read = client.open_events(READ)?;
        let write = client.open_events(WRITE)?;
        let rows = client.open_counters(ROWS)?;
        let outgoing: Vec<_> = task.readers().map(|reader| (me, reader)).collect();
        let incoming: Vec<_> = task.writers().map(|writer| (writer, me)).collect();
        Ok(Gossip {
            read: read.cells(&outgoing)?,
            written: write.cells(&outgoing)?,
            message: (0..task.cells).map(|c| rows.at(me, c)).collect::<Result<_, _>>()?,
            theirs_written: write.cells(&incoming)?,
            theirs_read: read.cells(&incoming)?,
            rows: task.writers().map(|w| Ok((w, rows.row(w)?))).collect::<Result<_, Error>>()?,
            task,
            client,
        })
    }

    /// Sleeps until all learners are there.
    pub fn wait_for_start(&self) -> Result<(), Error> {
        self.client.open_events(START)?.at(0, 0)?.wait()
    }

    /// Makes all rounds, or those up to the first fault.
    pub fn run(&self) -> Result<Summary, Error> {
        let mut latencies = Histogram::<u64>::new(3).map_err(|e| strange(&e))?;
        let mut summary = Summary::default();
        let mut last = self.task.rounds;
        let begun = Instant::now();
        let mut now = begun;
        for round in 1.. {
            if let Some(seconds) = self.task.seconds
                && self.task.learner == 0
                && last.is_none()
                && (now - begun).as_secs_f64() >= seconds
            {
                // The news travels with the messages, one neighbour a round.
                last = Some(round + self.task.learners as u64);
            }
            self.write(round, last)?;
            let fault = self.read(round, &mut last, &mut summary.checks)?;
            let before = std::mem::replace(&mut now, Instant::now());
            latencies.record((now - before).as_nanos() as u64).map_err(|e| strange(&e))?;
            summary.rounds = round;
            summary.fault = fault;
            if summary.fault.is_some() || last == Some(round) {
                break;
            }
        }
        summary.seconds = begun.elapsed().as_secs_f64();
        summary.latencies = latencies
            .iter_recorded()
            .map(|v| (v.value_iterated_to(), v.count_since_last_iteration()))
            .collect();
        Ok(summary)
    }

    /// Waits until the message before was read, and writes the next one.
    fn write(&self, round: u64, last: Option<u64>) -> Result<(), Error> {
        if !self.task.break_protocol {
            self.read.wait_all(None)?;
        }
        self.read.clear_all()?;
        let mut batch = self.client.batch();
        for (c, counter) in self.message.iter().enumerate() {
            let value = match c {
                ROUND => round as i64,
                LAST => last.unwrap_or(0) as i64,
                _ => payload(self.task.learner, round, c),
            };
            batch.store(counter, value);
        }
        batch.run()?;
        self.written.set_all()?;
        Ok(())
    }

    /// Waits for the messages of this round, reads and checks them.
    fn read(
        &self,
        round: u64,
        last: &mut Option<u64>,
        checks: &mut u64,
    ) -> Result<Option<Fault>, Error> {
        self.theirs_written.wait_all(None)?;
        self.theirs_written.clear_all()?;
        for (writer, row) in &self.rows {
            let row = row.snapshot()?;
            if let Some(fault) = check(*writer, round, &row) {
                return Ok(Some(fault));
            }
            *checks += 1;
            if last.is_none() && row[LAST] > 0 {
                *last = Some(row[LAST] as u64);
            }
        }
        self.theirs_read.set_all()?;
        Ok(None)
    }
}

/// What a cell of a message must hold: it follows from the cell, the round and
/// the writer, and fits a counter.
fn payload(writer: usize, round: u64, cell: usize) -> i64 {
    // The finalizer of splitmix64, which leaves no two rounds alike.
    let mut x = round ^ ((writer as u64) << 48) ^ ((cell as u64) << 32);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 2) as i64
}

/// What is wrong with a message that was read in this round.
fn check(writer: usize, round: u64, row: &[i64]) -> Option<Fault> {
    let theirs = row[ROUND] as u64;
    let whole =
        (PAYLOAD..row.len()).filter(|&c| row[c] == payload(writer, theirs, c)).count() + PAYLOAD;
    let (kind, what) = if whole < row.len() {
        let others = row.len() - whole;
        let what = format!("{others} of {} cells are not of round {theirs}", row.len());
        (FaultKind::Torn, what)
    } else if theirs < round {
        (FaultKind::Repeated, format!("it is of round {theirs}"))
    } else if theirs > round {
        (FaultKind::Skipped, format!("it is of round {theirs}"))
    } else {
        return None;
    };
    Some(Fault { writer, round, kind, what })
}

fn strange(e: &dyn std::fmt::Display) -> Error {
    Error::BadSetting { what: format!("no histogram: {e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(writer: usize, round: u64, cells: usize) -> Vec<i64> {
        let payload = (PAYLOAD..cells).map(|c| payload(writer, round, c));
        [round as i64, 0].into_iter().chain(payload).collect()
    }

    #[test]
    fn every_fault_is_seen() {
        let kind = |row: &[i64]| check(3, 7, row).map(|f| f.kind);
        assert_eq!(kind(&message(3, 7, 16)), None);
        assert_eq!(kind(&message(3, 6, 16)), Some(FaultKind::Repeated));
        assert_eq!(kind(&message(3, 8, 16)), Some(FaultKind::Skipped));
        for cell in PAYLOAD..16 {
            let mut torn = message(3, 7, 16);
            torn[cell] = payload(3, 6, cell);
            assert_eq!(kind(&torn), Some(FaultKind::Torn));
        }
        let mut torn = message(3, 7, 16);
        torn[ROUND] = 8;
        assert_eq!(kind(&torn), Some(FaultKind::Torn));
        assert_eq!(kind(&message(2, 7, 16)), Some(FaultKind::Torn), "of another writer");
    }
}
