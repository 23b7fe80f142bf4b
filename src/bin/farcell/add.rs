//! `farcell add`

use crate::args::CellArgs;
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use serde::Serialize;

/// Add to a counter, and print its new value.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell add rounds 0 1 -5

A counter holds 63 bits, -2^62 to 2^62 - 1, and wraps; a DELTA that does not fit
is refused.

JSON: {\"name\", \"row\", \"col\", \"old\", \"new\"}

Exit codes: 0 done, 2 usage, 3 unreachable, or the server died and nobody knows
whether it was done, 4 refused, 5 any other failure")]
pub struct Add {
    #[command(flatten)]
    cell: CellArgs,
    /// What to add
    #[arg(allow_negative_numbers = true)]
    delta: i64,
}

#[derive(Serialize)]
struct Added<'a> {
    name: &'a str,
    row: usize,
    col: usize,
    old: i64,
    new: i64,
}

impl Add {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        let old = self.cell.counter(&client, "add")?.fetch_add(self.delta)?;
        let new = wrapping_sum(old, self.delta);
        let CellArgs { name, row, col } = &self.cell;
        out.print(new, &Added { name, row: *row, col: *col, old, new })?;
        Ok(Answer::Yes)
    }
}

/// The sum in 63 bits, as the counter has it.
fn wrapping_sum(a: i64, b: i64) -> i64 {
    a.wrapping_add(b) << 1 >> 1
}

#[cfg(test)]
mod tests {
    use super::wrapping_sum;

    #[test]
    fn sums_wrap_at_63_bits() {
        assert_eq!(wrapping_sum(2, -5), -3);
        assert_eq!(wrapping_sum((1 << 62) - 1, 1), -(1 << 62));
    }
}
