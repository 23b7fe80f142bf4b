//! `farcell set`

use crate::args::{Array, Pick, Region, open_for};
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use farcell::{Client, CounterArray, Error};
use serde::Serialize;

/// Set events, or give counters a value.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farcell set read_events 0 1      one event
  farcell set read_events 0 :      the events of row 0
  farcell set rounds 0 1 -5        a counter
  farcell set rounds : : 0         every counter of an array

Whoever waits for the event is woken. An event that is set already stays so, and
the exit code is 0 all the same. Prints nothing but JSON:
events:   {\"name\", \"kind\", \"row\", \"col\", \"cells\", \"changed\"}
counters: {\"name\", \"kind\", \"row\", \"col\", \"cells\", \"value\"}
cells is how many there are, changed how many were clear before.

Exit codes: 0 done, 2 usage, 3 unreachable, 4 refused, 5 any other failure")]
pub struct Set {
    #[command(flatten)]
    region: Region,
    /// The value, of counters
    #[arg(allow_negative_numbers = true)]
    value: Option<i64>,
}

/// What was done to events.
#[derive(Serialize)]
pub struct Changed<'a> {
    pub name: &'a str,
    pub kind: &'a str,
    pub row: Option<usize>,
    pub col: Option<usize>,
    pub cells: usize,
    pub changed: usize,
}

#[derive(Serialize)]
struct Stored<'a> {
    name: &'a str,
    kind: &'a str,
    row: Option<usize>,
    col: Option<usize>,
    cells: usize,
    value: i64,
}

impl Set {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        let name = self.region.name.as_str();
        let pick = self.region.pick();
        let (row, col) = (pick.row(), pick.col());
        match (open_for(&client, name, "set")?, self.value) {
            (Array::Events(array), None) => {
                let events = pick.events(&array)?;
                let changed = events.set_all()?;
                let cells = events.len();
                out.print("", &Changed { name, kind: "event", row, col, cells, changed })?;
            }
            (Array::Counters(array), Some(value)) => {
                let cells = store(&client, &array, pick, value)?;
                out.print("", &Stored { name, kind: "counter", row, col, cells, value })?;
            }
            (Array::Events(_), Some(_)) => {
                return Err(Failure::Usage(format!(
                    "array {name:?} holds events, which have no value; leave it out"
                )));
            }
            (Array::Counters(_), None) => {
                return Err(Failure::Usage(format!(
                    "array {name:?} holds counters; say which value: farcell set {name} ROW COL VALUE"
                )));
            }
        }
        Ok(Answer::Yes)
    }
}

/// Puts a value into counters, and says how many they are.
fn store(client: &Client, array: &CounterArray, pick: Pick, value: i64) -> Result<usize, Error> {
    let rows = pick.row().map_or(0..array.rows(), |row| row..row + 1);
    let cols = pick.col().map_or(0..array.cols(), |col| col..col + 1);
    let mut cells = rows.flat_map(|row| cols.clone().map(move |col| (row, col))).peekable();
    let mut stored = 0;
    while cells.peek().is_some() {
        let mut batch = client.batch();
        for (row, col) in cells.by_ref().take(32_768) {
            batch.store(&array.at(row, col)?, value);
        }
        stored += batch.run()?.len();
    }
    Ok(stored)
}
