//! `farcell take`

use crate::args::CellArgs;
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use serde::Serialize;

/// Clear an event if it is set, and say whether it was.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell take jobs 0 3 && ./job3

Of all who take the same set exactly one gets it. Prints `taken` or `clear`.

JSON: {\"name\", \"row\", \"col\", \"taken\"}

Exit codes: 0 taken, 1 it was clear, 2 usage, 3 unreachable, 4 refused, 5 any
other failure")]
pub struct Take {
    #[command(flatten)]
    cell: CellArgs,
}

#[derive(Serialize)]
struct Taken<'a> {
    name: &'a str,
    row: usize,
    col: usize,
    taken: bool,
}

impl Take {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        let taken = self.cell.event(&client, "take")?.take()?;
        let CellArgs { name, row, col } = &self.cell;
        let text = if taken { "taken" } else { "clear" };
        out.print(text, &Taken { name, row: *row, col: *col, taken })?;
        Ok(taken.into())
    }
}
