//! What a learner is told, and what it tells.

use serde::{Deserialize, Serialize};

/// What the gossip is called: its arrays are `demo.messages`, a slot for each
/// writer, and `demo.written` and `demo.read`, an event for each writer and reader.
pub const MESSAGES: &str = "demo";
/// Set when all learners are there.
pub const START: &str = "start";

/// A learner's work, as one line of JSON on its stdin: no argument and no file
/// ever holds the key.
#[derive(Clone, Serialize, Deserialize)]
pub struct Task {
    pub addr: String,
    pub key: String,
    /// Which learner it is.
    pub learner: usize,
    pub learners: usize,
    pub peers: usize,
    pub cells: usize,
    /// How many rounds to make, unless a time counts.
    pub rounds: Option<u64>,
    /// For how long, by the clock of learner 0.
    pub seconds: Option<f64>,
    pub break_protocol: bool,
}

/// A line of a learner's stdout.
#[derive(Debug, Serialize, Deserialize)]
pub enum Line {
    /// It is connected and waits for the start.
    Ready,
    /// It has made all its rounds, or seen what it must not see.
    Done(Summary),
    /// It cannot go on.
    Failed(String),
}

/// What a learner did.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Summary {
    pub rounds: u64,
    pub seconds: f64,
    /// Messages that were checked.
    pub checks: u64,
    pub fault: Option<Fault>,
    /// How far its parameters are from the mean of all starts, and how far they
    /// may be.
    pub distance: f64,
    pub tolerance: f64,
    /// Nanoseconds of a round, and how many rounds took so long.
    pub latencies: Vec<(u64, u64)>,
}

/// What a learner must never see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Whose message it was.
    pub writer: usize,
    /// The reader's round.
    pub round: u64,
    pub kind: FaultKind,
    /// In words.
    pub what: String,
}

/// What was wrong with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FaultKind {
    /// Its parts come from different rounds.
    Torn,
    /// It was read before.
    Repeated,
    /// One before it was never read.
    Skipped,
    /// The learner's own parameters are not where mixing leads.
    Astray,
}
