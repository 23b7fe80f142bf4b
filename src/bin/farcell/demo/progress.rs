//! How far the learners are, on stderr.

use super::task::Task;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// How often a line is written when stderr is no terminal.
const LINE: Duration = Duration::from_secs(5);

/// One line that changes on a terminal, a few lines elsewhere.
pub struct Progress {
    terminal: bool,
    rounds: Option<u64>,
    seconds: Option<f64>,
    begun: Option<Instant>,
    looked: Instant,
    written: Instant,
}

impl Progress {
    /// Says who runs.
    pub fn new(task: &Task, pids: &[u32]) -> Progress {
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        let server = &task.addr;
        line(&format!(
            "server on {server}, {} learners: processes {}\n",
            pids.len(),
            pids.join(" ")
        ));
        let now = Instant::now();
        Progress {
            terminal: io::stderr().is_terminal(),
            rounds: task.rounds,
            seconds: task.seconds,
            begun: None,
            looked: now,
            written: now,
        }
    }

    /// The learners start now.
    pub fn start(&mut self) {
        self.begun = Some(Instant::now());
    }

    /// Whether it is time to look again, after this time.
    pub fn is_due(&mut self, time: Duration) -> bool {
        let due = self.looked.elapsed() >= time;
        if due {
            self.looked = Instant::now();
        }
        due
    }

    /// Shows that the slowest learner is in this round.
    pub fn show(&mut self, round: u64) {
        let Some(begun) = self.begun else { return };
        if !self.terminal && self.written.elapsed() < LINE {
            return;
        }
        self.written = Instant::now();
        let passed = begun.elapsed().as_secs_f64();
        let rate = round as f64 / passed.max(0.001);
        let goal = match (self.rounds, self.seconds) {
            (Some(rounds), _) => format!("round {round} of {rounds}"),
            (_, Some(seconds)) => format!("{passed:.1} of {seconds} s, round {round}"),
            _ => format!("round {round}"),
        };
        match self.terminal {
            true => line(&format!("\r\x1b[K{goal}, {rate:.0} rounds/s")),
            false => line(&format!("{goal}, {rate:.0} rounds/s\n")),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.terminal {
            line("\r\x1b[K");
        }
    }
}

fn line(text: &str) {
    // Nobody has to look.
    let _ = io::stderr().write_all(text.as_bytes());
}
