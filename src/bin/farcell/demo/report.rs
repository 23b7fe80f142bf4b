//! What the learners found, as a table and as JSON.

use super::task::{Fault, FaultKind, Summary, Task};
use crate::failure::Failure;
use crate::output::table;
use hdrhistogram::Histogram;
use serde::Serialize;

/// What all learners found.
pub struct Results {
    task: Task,
    each: Vec<Option<One>>,
    all: Option<Histogram<u64>>,
    faults: Vec<(usize, Fault)>,
}

struct One {
    rounds: u64,
    seconds: f64,
    checks: u64,
    latencies: Histogram<u64>,
    distance: f64,
    tolerance: f64,
}

/// Times of a round, in microseconds.
#[derive(Clone, Copy, Serialize)]
struct Times {
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

impl Times {
    fn of(latencies: &Histogram<u64>) -> Times {
        let us = |ns: u64| (ns as f64 / 100.0).round() / 10.0;
        Times {
            p50_us: us(latencies.value_at_quantile(0.5)),
            p99_us: us(latencies.value_at_quantile(0.99)),
            max_us: us(latencies.max()),
        }
    }

    fn words(self) -> [String; 3] {
        [self.p50_us, self.p99_us, self.max_us].map(|us| format!("{us:.0}"))
    }
}

#[derive(Serialize)]
pub struct Json {
    ok: bool,
    learners: usize,
    peers: usize,
    cells: usize,
    transport: &'static str,
    rounds: u64,
    seconds: f64,
    rounds_per_second: f64,
    #[serde(flatten)]
    times: Times,
    checks: u64,
    torn: usize,
    repeated: usize,
    skipped: usize,
    astray: usize,
    distance: f64,
    tolerance: f64,
    faults: Vec<FaultJson>,
    each: Vec<OneJson>,
}

#[derive(Serialize)]
struct FaultJson {
    learner: usize,
    #[serde(flatten)]
    fault: Fault,
}

#[derive(Serialize)]
struct OneJson {
    learner: usize,
    rounds: u64,
    seconds: f64,
    #[serde(flatten)]
    times: Times,
    checks: u64,
    distance: f64,
}

impl Results {
    /// Nothing yet.
    pub fn new(task: &Task) -> Results {
        Results {
            task: task.clone(),
            each: (0..task.learners).map(|_| None).collect(),
            all: None,
            faults: Vec::new(),
        }
    }

    /// Adds what a learner found.
    pub fn add(&mut self, learner: usize, summary: &Summary) -> Result<(), Failure> {
        let strange = |e: &dyn std::fmt::Display| Failure::Other(format!("no histogram: {e}"));
        let mut latencies = Histogram::new(3).map_err(|e| strange(&e))?;
        for &(value, count) in &summary.latencies {
            latencies.record_n(value, count).map_err(|e| strange(&e))?;
        }
        match &mut self.all {
            Some(all) => all.add(&latencies).map_err(|e| strange(&e))?,
            None => self.all = Some(latencies.clone()),
        }
        self.faults.extend(summary.fault.clone().map(|fault| (learner, fault)));
        let &Summary { rounds, seconds, checks, distance, tolerance, .. } = summary;
        let one = One { rounds, seconds, checks, latencies, distance, tolerance };
        self.each[learner] = Some(one);
        Ok(())
    }

    /// Whether this learner has reported.
    pub fn has(&self, learner: usize) -> bool {
        self.each[learner].is_some()
    }

    /// Whether all have.
    pub fn is_complete(&self) -> bool {
        self.each.iter().all(Option::is_some)
    }

    /// Whether one of them saw what it must not see.
    pub fn has_fault(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Whether everything was right.
    pub fn is_ok(&self) -> bool {
        self.is_complete() && !self.has_fault()
    }

    fn known(&self) -> impl Iterator<Item = (usize, &One)> {
        self.each.iter().enumerate().filter_map(|(i, one)| Some((i, one.as_ref()?)))
    }

    fn seconds(&self) -> f64 {
        self.known().map(|(_, one)| one.seconds).fold(0.0, f64::max)
    }

    /// Rounds that every learner made.
    fn rounds(&self) -> u64 {
        self.known().map(|(_, one)| one.rounds).min().unwrap_or(0)
    }

    fn checks(&self) -> u64 {
        self.known().map(|(_, one)| one.checks).sum()
    }

    /// How far one is from the mean at most, and how far one may be.
    fn distance(&self) -> (f64, f64) {
        self.known().fold((0.0, 0.0), |(distance, tolerance), (_, one)| {
            (one.distance.max(distance), one.tolerance.max(tolerance))
        })
    }

    fn times(&self) -> Times {
        let nothing = Times { p50_us: 0.0, p99_us: 0.0, max_us: 0.0 };
        self.all.as_ref().map_or(nothing, Times::of)
    }

    /// For a program.
    pub fn json(&self) -> Json {
        let count = |kind| self.faults.iter().filter(|(_, f)| f.kind == kind).count();
        let (distance, tolerance) = self.distance();
        Json {
            ok: self.is_ok(),
            learners: self.task.learners,
            peers: self.task.peers,
            cells: self.task.cells,
            transport: "tcp",
            rounds: self.rounds(),
            seconds: self.seconds(),
            rounds_per_second: rate(self.rounds(), self.seconds()),
            times: self.times(),
            checks: self.checks(),
            torn: count(FaultKind::Torn),
            repeated: count(FaultKind::Repeated),
            skipped: count(FaultKind::Skipped),
            astray: count(FaultKind::Astray),
            distance,
            tolerance,
            faults: self
                .faults
                .iter()
                .map(|(learner, fault)| FaultJson { learner: *learner, fault: fault.clone() })
                .collect(),
            each: self
                .known()
                .map(|(learner, one)| OneJson {
                    learner,
                    rounds: one.rounds,
                    seconds: one.seconds,
                    times: Times::of(&one.latencies),
                    checks: one.checks,
                    distance: one.distance,
                })
                .collect(),
        }
    }

    /// For a person.
    pub fn text(&self) -> String {
        let Task { learners, peers, cells, addr, .. } = &self.task;
        let mut text = format!(
            "{learners} learner processes in a ring, each mixes {cells} numbers with those of {peers} {}, over TCP through {addr}\n\n",
            if *peers == 1 { "peer" } else { "peers" },
        );
        let head = ["learner", "rounds", "rounds/s", "p50 us", "p99 us", "max us", "checks"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for (learner, one) in self.known() {
            let [p50, p99, max] = Times::of(&one.latencies).words();
            let rate = format!("{:.0}", rate(one.rounds, one.seconds));
            let (rounds, checks) = (one.rounds.to_string(), one.checks.to_string());
            rows.push(vec![learner.to_string(), rounds, rate, p50, p99, max, checks]);
        }
        let [p50, p99, max] = self.times().words();
        let rate = format!("{:.0}", rate(self.rounds(), self.seconds()));
        let (rounds, checks) = (self.rounds().to_string(), self.checks().to_string());
        rows.push(vec!["all".to_owned(), rounds, rate, p50, p99, max, checks]);
        text.push_str(&table(&rows, 1));
        text.push('\n');
        for (learner, Fault { writer, round, kind, what }) in &self.faults {
            let kind = format!("{kind:?}").to_lowercase();
            text.push_str(&match kind.as_str() {
                "astray" => format!("WRONG: learner {learner} in round {round}: {what}\n"),
                _ => format!(
                    "WRONG: learner {learner} read a {kind} message of learner {writer} in round {round}: {what}\n"
                ),
            });
        }
        if self.is_ok() {
            let (distance, tolerance) = self.distance();
            text.push_str("right: no learner saw a torn, repeated or skipped round\n");
            text.push_str(&format!(
                "right: all parameters are within {distance:.1e} of the mean of all starts ({tolerance:.1e} is allowed)\n"
            ));
        }
        text
    }
}

fn rate(rounds: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { (rounds as f64 / seconds * 10.0).round() / 10.0 } else { 0.0 }
}
