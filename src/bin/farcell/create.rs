//! `farcell create`

use crate::args::Spec;
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use farcell::Kind;
use serde::Serialize;

/// Create arrays, or see that they exist with this kind and shape.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell create read_events:event:4x4 rounds:counter:1x4
  farcell create gate:lock:1x1 start:barrier:1x1:4 gpus:semaphore:1x1:3

A new event is clear, a new counter 0, a new lock free. A barrier needs the
number of its parties; a semaphore its permits, or PERMITS/BOUND. An array that exists with the same kind
and shape is left as it is; with another one the command fails.

JSON, a line for each array: {\"name\", \"kind\", \"rows\", \"cols\"}

Exit codes: 0 done, 2 usage, 3 unreachable, 4 refused, 5 any other failure")]
pub struct Create {
    /// The arrays; the kind is event, counter, lock, barrier or semaphore
    #[arg(required = true, value_name = "NAME:KIND:ROWSxCOLS[:PARAM]")]
    arrays: Vec<Spec>,
}

#[derive(Serialize)]
struct Created<'a> {
    name: &'a str,
    kind: &'a str,
    rows: usize,
    cols: usize,
}

impl Create {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        for Spec { name, kind, rows, cols, param } in &self.arrays {
            match kind {
                Kind::Event => drop(client.events(name, *rows, *cols)?),
                Kind::Counter => drop(client.counters(name, *rows, *cols)?),
                Kind::Lock => drop(client.locks(name, *rows, *cols)?),
                Kind::Barrier => drop(client.barriers(name, *rows, *cols, *param as usize)?),
                Kind::Semaphore => {
                    let (initial, bound) = (*param as u32, (*param >> 32) as u32);
                    drop(client.semaphores(name, *rows, *cols, initial, bound)?);
                }
                Kind::Slots => drop(client.slots(name, *rows, 0)?),
            }
            let created = Created { name, kind: kind.name(), rows: *rows, cols: *cols };
            out.print("", &created)?;
        }
        Ok(Answer::Yes)
    }
}
