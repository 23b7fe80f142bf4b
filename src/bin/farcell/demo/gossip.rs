//! One learner's rounds, as GALA's learners make them, and what must be true of
//! them.

use super::task::{Fault, FaultKind, MESSAGES, START, Summary, Task};
use farcell::gossip::{Buffer, Mixed, Options, Sent, Topology};
use farcell::{Client, Error};
use hdrhistogram::Histogram;
use std::time::{Duration, Instant};

/// A message: the round, the last round if it is known (or 0), a sum over the
/// parameters, and these.
const ROUND: usize = 0;
const LAST: usize = 1;
const SUM: usize = 2;
/// Numbers before the parameters.
pub const HEAD: usize = 3;

/// A learner with its place in the ring.
pub struct Gossip {
    task: Task,
    client: Client,
    buffer: Buffer<f64>,
}

impl Gossip {
    /// Takes its place. A ring in which each writes to so many next ones is the
    /// first of the groups in which each writes to all others.
    pub fn new(task: Task, client: Client) -> Result<Gossip, Error> {
        let options = Options::new()
            .topology(Topology::Full)
            .peers(task.peers)
            .patience(Duration::from_secs(3600))
            .wait_for_readers(!task.break_protocol);
        let len = task.cells + HEAD;
        let buffer = Buffer::new(&client, MESSAGES, task.learner, task.learners, len, options)?;
        Ok(Gossip { task, client, buffer })
    }

    /// Sleeps until all learners are there.
    pub fn wait_for_start(&self) -> Result<(), Error> {
        self.client.open_events(START)?.at(0, 0)?.wait()
    }

    /// Makes all rounds, or those up to the first fault.
    pub fn run(&mut self) -> Result<Summary, Error> {
        let mut latencies = Histogram::<u64>::new(3).map_err(|e| strange(&e))?;
        let mut summary = Summary::default();
        let mut last = self.task.rounds;
        let mut parameters = vec![0.0; HEAD];
        parameters.extend(start(self.task.learner, self.task.cells));
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
            parameters[ROUND] = round as f64;
            parameters[LAST] = last.unwrap_or(0) as f64;
            parameters[SUM] = sum(&parameters);
            let sent = self.buffer.write_message(&parameters)?;
            // Only one who breaks the protocol goes on without having written.
            debug_assert!(self.task.break_protocol || matches!(sent, Sent::Written(_)));
            let fault = self.read(round, &mut parameters, &mut last, &mut summary.checks)?;
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
        let goal = Goal::new(self.task.learners, self.task.peers, self.task.cells);
        summary.distance = goal.distance(&parameters[HEAD..]);
        summary.tolerance = goal.tolerance(summary.rounds);
        if summary.fault.is_none() && summary.distance > summary.tolerance {
            let (round, kind) = (summary.rounds, FaultKind::Astray);
            let what = format!(
                "its parameters are {:e} from the mean of all starts, at most {:e} is right",
                summary.distance, summary.tolerance
            );
            summary.fault = Some(Fault { writer: self.task.learner, round, kind, what });
        }
        Ok(summary)
    }

    /// Waits for the messages of this round, checks them and mixes them in.
    fn read(
        &mut self,
        round: u64,
        parameters: &mut [f64],
        last: &mut Option<u64>,
        checks: &mut u64,
    ) -> Result<Option<Fault>, Error> {
        let mut fault = None;
        let mixed = self.buffer.aggregate_with(parameters, |writer, message| {
            fault = fault.take().or_else(|| check(writer, round, message));
            *checks += u64::from(fault.is_none());
            if last.is_none() && message[LAST] > 0.0 {
                *last = Some(message[LAST] as u64);
            }
        })?;
        match mixed {
            Mixed::Done { lost, .. } if !lost.is_empty() => {
                let what = format!("learner {} is lost", lost[0]);
                Err(Error::BadSetting { what })
            }
            // A message is missing that only one who breaks the protocol can miss.
            Mixed::Done { .. } | Mixed::Stale(_) => Ok(fault),
        }
    }
}

/// Where a learner begins: numbers between -1000 and 1000 that follow from the
/// learner and the cell.
fn start(learner: usize, cells: usize) -> impl Iterator<Item = f64> {
    (0..cells).map(move |cell| {
        // The finalizer of splitmix64, which leaves no two alike.
        let mut x = ((learner as u64 + 1) << 32) ^ cell as u64;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        (x >> 11) as f64 / (1u64 << 52) as f64 * 1000.0 - 1000.0
    })
}

/// A sum by which torn parameters show, as a number that `f64` holds exactly.
fn sum(message: &[f64]) -> f64 {
    let head = [message[ROUND], message[LAST]];
    let all = head.iter().chain(&message[HEAD..]);
    // FNV-1a, a number at a time.
    let sum = all.fold(0xcbf2_9ce4_8422_2325, |sum: u64, number| {
        (sum ^ number.to_bits()).wrapping_mul(0x0000_0100_0000_01b3)
    });
    (sum >> 12) as f64
}

/// What is wrong with a message that was read in this round.
fn check(writer: usize, round: u64, message: &[f64]) -> Option<Fault> {
    let theirs = message[ROUND] as u64;
    let (kind, what) = if message[SUM] != sum(message) {
        let what = format!("its parameters are not those that were written in round {theirs}");
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

/// Where mixing must lead. All learners mix with the same weights, in and out, so
/// the matrix of weights is doubly stochastic and keeps the mean of all learners.
/// It is a circulant one, so each round shrinks the distance of all from the mean
/// (as the root of the sum of squares) by its second largest eigenvalue at least.
struct Goal {
    mean: Vec<f64>,
    /// The largest distance of all from it, over the cells.
    distance: f64,
    eigenvalue: f64,
    peers: usize,
}

impl Goal {
    fn new(learners: usize, peers: usize, cells: usize) -> Goal {
        let mut mean = vec![0.0; cells];
        let mut squares = vec![0.0; cells];
        for learner in 0..learners {
            for (mean, start) in mean.iter_mut().zip(start(learner, cells)) {
                *mean += start / learners as f64;
            }
        }
        for learner in 0..learners {
            for ((square, mean), start) in squares.iter_mut().zip(&mean).zip(start(learner, cells))
            {
                *square += (start - mean) * (start - mean);
            }
        }
        let distance = squares.iter().map(|s: &f64| s.sqrt()).fold(0.0, f64::max);
        let eigenvalue = (1..learners)
            .map(|k| {
                let angle = std::f64::consts::TAU * k as f64 / learners as f64;
                let turns = (0..=peers).map(|d| (angle * d as f64).sin_cos());
                let (y, x) = turns.fold((0.0, 0.0), |sum, (y, x)| (sum.0 + y, sum.1 + x));
                f64::hypot(x, y) / (peers + 1) as f64
            })
            .fold(0.0, f64::max);
        Goal { mean, distance, eigenvalue, peers }
    }

    /// How far a learner is from the mean, at most over the cells.
    fn distance(&self, parameters: &[f64]) -> f64 {
        // A number that is none is as far as can be.
        let far = |(p, m): (&f64, &f64)| if p.is_nan() { f64::MAX } else { (p - m).abs() };
        parameters.iter().zip(&self.mean).map(far).fold(0.0, f64::max)
    }

    /// How far a learner can be from it after so many rounds: what is left of the
    /// distance at the start, and what rounding adds in each round.
    fn tolerance(&self, rounds: u64) -> f64 {
        let left = self.distance * self.eigenvalue.powf(rounds as f64);
        let rounding = (self.peers + 2) as f64 * 1000.0 * f64::EPSILON;
        left + rounding * (rounds + 1) as f64
    }
}

fn strange(e: &dyn std::fmt::Display) -> Error {
    Error::BadSetting { what: format!("no histogram: {e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(writer: usize, round: u64, cells: usize) -> Vec<f64> {
        let mut all = vec![round as f64, 0.0, 0.0];
        all.extend(start(writer, cells));
        all[SUM] = sum(&all);
        all
    }

    #[test]
    fn every_fault_is_seen() {
        let kind = |message: &[f64]| check(3, 7, message).map(|f| f.kind);
        assert_eq!(kind(&message(3, 7, 16)), None);
        assert_eq!(kind(&message(3, 6, 16)), Some(FaultKind::Repeated));
        assert_eq!(kind(&message(3, 8, 16)), Some(FaultKind::Skipped));
        for at in 0..16 + HEAD {
            let mut torn = message(3, 7, 16);
            torn[at] += 0.5;
            assert_eq!(kind(&torn), Some(FaultKind::Torn));
        }
    }

    /// Rounds of all learners, with `weight` for each message.
    fn mix(learners: usize, peers: usize, cells: usize, rounds: u64, weight: f64) -> Vec<Vec<f64>> {
        let mut all: Vec<Vec<f64>> = (0..learners).map(|l| start(l, cells).collect()).collect();
        for _ in 0..rounds {
            let before = all.clone();
            for (me, mine) in all.iter_mut().enumerate() {
                for (cell, number) in mine.iter_mut().enumerate() {
                    let theirs = (1..=peers)
                        .map(|d| before[(me + learners - d) % learners][cell] * weight)
                        .sum::<f64>();
                    *number = *number * (1.0 - weight * peers as f64) + theirs;
                }
            }
        }
        all
    }

    #[test]
    fn the_tolerance_holds_in_every_round_and_tells_other_weights_apart() {
        for (learners, peers) in [(2, 1), (3, 1), (4, 1), (5, 2), (8, 3), (4, 3)] {
            let goal = Goal::new(learners, peers, 9);
            let right = 1.0 / (peers + 1) as f64;
            for rounds in [0, 1, 2, 5, 20, 200] {
                for one in mix(learners, peers, 9, rounds, right) {
                    let (distance, most) = (goal.distance(&one), goal.tolerance(rounds));
                    assert!(distance <= most, "{learners} {peers} {rounds}: {distance} {most}");
                }
            }
            assert!(goal.tolerance(500) < 1e-8, "{learners} {peers}");
            // One who weighs a message wrongly, once.
            let mut wrong = mix(learners, peers, 9, 200, right);
            wrong[0][4] += 1e-3 * start(1, 9).nth(4).unwrap();
            assert!(goal.distance(&wrong[0]) > goal.tolerance(200));
        }
        assert_eq!(Goal::new(2, 1, 3).distance(&[0.0, f64::NAN, 0.0]), f64::MAX);
    }
}
