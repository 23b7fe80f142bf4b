//! `farcell rm`

use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use serde::Serialize;

/// Remove arrays and give their cells back.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell rm read_events write_events

Whoever waits on a removed array is told so.

JSON, a line for each array: {\"name\", \"removed\": true}

Exit codes: 0 done, 2 usage, 3 unreachable, 4 refused (no such array, or the
session is read-only), 5 any other failure")]
pub struct Rm {
    /// The arrays
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
}

#[derive(Serialize)]
struct Removed<'a> {
    name: &'a str,
    removed: bool,
}

impl Rm {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        for name in &self.names {
            client.remove(name)?;
            out.print("", &Removed { name, removed: true })?;
        }
        Ok(Answer::Yes)
    }
}
