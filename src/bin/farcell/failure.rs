//! How a command ends, and the exit code for it.

use farcell::Error;
use std::fmt;

/// What a command that did not fail found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Yes, or done: exit code 0.
    Yes,
    /// No, or the time was over: exit code 1.
    No,
}

impl From<bool> for Answer {
    fn from(yes: bool) -> Answer {
        if yes { Answer::Yes } else { Answer::No }
    }
}

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// The command line is wrong.
    Usage(String),
    /// What the library says.
    Library(Error),
    /// Anything else, in a whole sentence.
    Other(String),
    /// A signal ended it.
    Interrupted(i32),
}

impl Failure {
    /// The exit code, as `farcell --help` lists them.
    pub fn code(&self) -> u8 {
        match self {
            Failure::Usage(_) => 2,
            Failure::Library(e) if e.is_unreachable() => 3,
            Failure::Library(e) if e.is_refusal() => 4,
            Failure::Library(_) | Failure::Other(_) => 5,
            // As a shell has it.
            Failure::Interrupted(signal) => u8::try_from(128 + signal).unwrap_or(5),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Usage(what) | Failure::Other(what) => f.write_str(what),
            Failure::Library(error) => error.fmt(f),
            Failure::Interrupted(signal) => {
                write!(f, "interrupted by signal {signal}; everything that was started has ended")
            }
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Library(error)
    }
}
