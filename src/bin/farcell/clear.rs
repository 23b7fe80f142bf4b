//! `farcell clear`

use crate::args::{Array, Region, open_for};
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use crate::set::Changed;
use farcell::{Error, Kind};

/// Clear events.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farcell clear read_events 0 1    one event
  farcell clear read_events        the whole array

An event that is clear already stays so, and the exit code is 0 all the same;
`farcell take` says whether it was set. Prints nothing but JSON:
{\"name\", \"kind\", \"row\", \"col\", \"cells\", \"changed\"}; cells is how many there are,
changed how many were set before.

Exit codes: 0 done, 2 usage, 3 unreachable, 4 refused, 5 any other failure")]
pub struct Clear {
    #[command(flatten)]
    region: Region,
}

impl Clear {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        let name = self.region.name.as_str();
        let pick = self.region.pick();
        let Array::Events(array) = open_for(&client, name, "clear")? else {
            let name = name.to_owned();
            return Err(Error::WrongKind { name, kind: Kind::Counter, op: "clear" }.into());
        };
        let events = pick.events(&array)?;
        let changed = events.clear_all()?;
        let (row, col, cells) = (pick.row(), pick.col(), events.len());
        out.print("", &Changed { name, kind: "event", row, col, cells, changed })?;
        Ok(Answer::Yes)
    }
}
