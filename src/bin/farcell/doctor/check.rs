//! What was looked at, and what came of it.

use serde::Serialize;
use std::fmt::Write;

/// What came of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// It works, or is not needed, and could be better.
    Warn,
    /// Something does not work.
    Fail,
    /// There was nothing to look at, or something before it has failed.
    Skipped,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Which, of the names in `farcell doctor --help`.
    pub check: &'static str,
    /// Of what, where there are several.
    pub subject: Option<String>,
    /// What came of it.
    pub verdict: Verdict,
    /// What was found, in a sentence.
    pub what: String,
    /// The command that mends it.
    pub fix: Option<String>,
}

impl Check {
    fn new(check: &'static str, verdict: Verdict, what: impl Into<String>) -> Check {
        Check { check, subject: None, verdict, what: what.into(), fix: None }
    }

    /// All is well.
    pub fn ok(check: &'static str, what: impl Into<String>) -> Check {
        Check::new(check, Verdict::Ok, what)
    }

    /// Not looked at.
    pub fn skipped(check: &'static str, what: impl Into<String>) -> Check {
        Check::new(check, Verdict::Skipped, what)
    }

    /// It could be better, by this command.
    pub fn warn(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Check {
        Check::new(check, Verdict::Warn, what).mended_by(fix)
    }

    /// It does not work; this command mends it.
    pub fn fail(check: &'static str, what: impl Into<String>, fix: impl Into<String>) -> Check {
        Check::new(check, Verdict::Fail, what).mended_by(fix)
    }

    /// Names the command that mends it.
    pub fn mended_by(mut self, fix: impl Into<String>) -> Check {
        self.fix = Some(fix.into());
        self
    }

    /// Says which of several it is about.
    pub fn of(mut self, subject: impl Into<String>) -> Check {
        self.subject = Some(subject.into());
        self
    }
}

/// A way to the server that was tried.
#[derive(Clone, Debug, Serialize)]
pub struct Path {
    /// `shm`, `rdma` or `tcp`.
    pub way: &'static str,
    /// Whether it works.
    pub works: bool,
    /// What it is like, or why it does not work.
    pub why: String,
    /// The least time of a few trips to the cells and back.
    pub round_trip_us: Option<f64>,
    /// Whether a client takes it.
    pub chosen: bool,
}

/// All of it.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// The server, as it is dialled; null if there is none to look at.
    pub server: Option<String>,
    /// How it was found: `argument`, `environment`, `address file`, `launcher`,
    /// `this machine`.
    pub found_by: Option<&'static str>,
    /// In their order.
    pub checks: Vec<Check>,
    /// Between here and the server; empty if it was not reached.
    pub paths: Vec<Path>,
    /// Whether no check has failed.
    pub fine: bool,
}

impl Report {
    /// Notes a check.
    pub fn add(&mut self, check: Check) {
        self.checks.push(check);
    }

    /// Whether nothing has failed so far.
    pub fn is_fine(&self) -> bool {
        self.count(Verdict::Fail) == 0
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.checks.iter().filter(|check| check.verdict == verdict).count()
    }

    /// One line a check, and a last one that counts them.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let width = self.checks.iter().map(|check| check.check.len()).max().unwrap_or(0);
        for Check { check, subject, verdict, what, fix } in &self.checks {
            let verdict = match verdict {
                Verdict::Ok => "ok",
                Verdict::Warn => "warn",
                Verdict::Fail => "FAIL",
                Verdict::Skipped => "skipped",
            };
            let subject = subject.as_ref().map(|of| format!("{of}: ")).unwrap_or_default();
            let fix = fix.as_ref().map(|fix| format!(" -> {fix}")).unwrap_or_default();
            let line = format!("{verdict:<7}  {check:<width$}  {subject}{what}{fix}");
            // One line, whatever someone else's message or an address has in it.
            let line = line.replace(|c: char| c.is_control(), " ");
            // Writing to a string does not fail.
            let _ = writeln!(text, "{line}");
        }
        let [ok, warn, fail, skipped] =
            [Verdict::Ok, Verdict::Warn, Verdict::Fail, Verdict::Skipped].map(|v| self.count(v));
        let _ = writeln!(text, "{ok} ok, {warn} to look at, {fail} wrong, {skipped} skipped");
        text
    }
}

/// A number of bytes, for people.
pub fn bytes(n: u64) -> String {
    match n {
        0..1024 => format!("{n} bytes"),
        1024..1_048_576 => format!("{:.0} KiB", n as f64 / 1024.0),
        _ => format!("{:.1} MiB", n as f64 / 1_048_576.0),
    }
}

/// A time, for people.
pub fn time(time: std::time::Duration) -> String {
    let us = time.as_secs_f64() * 1e6;
    match us {
        us if us < 10.0 => format!("{us:.2} us"),
        us if us < 1000.0 => format!("{us:.0} us"),
        us if us < 1e6 => format!("{:.1} ms", us / 1e3),
        us => format!("{:.1} s", us / 1e6),
    }
}
