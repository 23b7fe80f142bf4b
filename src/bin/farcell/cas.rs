//! `farcell cas`

use crate::args::CellArgs;
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use serde::Serialize;

/// Give a counter a new value if it has the expected one (compare and swap).
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell cas leader 0 0 0 42 && echo 'we lead'

Prints the value that was found: EXPECTED if it was swapped, another if not.

JSON: {\"name\", \"row\", \"col\", \"swapped\", \"found\"}

Exit codes: 0 swapped, 1 another value was found, 2 usage, 3 unreachable, or the
server died and nobody knows whether it was done, 4 refused, 5 any other failure")]
pub struct Cas {
    #[command(flatten)]
    cell: CellArgs,
    /// The value that it must have
    #[arg(allow_negative_numbers = true)]
    expected: i64,
    /// The value to give it
    #[arg(allow_negative_numbers = true)]
    new: i64,
}

#[derive(Serialize)]
struct Swapped<'a> {
    name: &'a str,
    row: usize,
    col: usize,
    swapped: bool,
    found: i64,
}

impl Cas {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        let counter = self.cell.counter(&client, "compare-and-swap")?;
        let (swapped, found) = match counter.compare_exchange(self.expected, self.new)? {
            Ok(found) => (true, found),
            Err(found) => (false, found),
        };
        let CellArgs { name, row, col } = &self.cell;
        out.print(found, &Swapped { name, row: *row, col: *col, swapped, found })?;
        Ok(swapped.into())
    }
}
