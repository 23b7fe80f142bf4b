//! `farcell get`

use crate::args::{Array, Pick, Region, open_for};
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use farcell::{CounterArray, EventArray};
use serde::Serialize;

/// Read an event, a counter, a row, a column or a whole array.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farcell get read_events 0 1      one cell: set or clear
  farcell get read_events : 1      column 1
  farcell get rounds               the whole array, a line for each row

Several events are printed as 1 (set) and 0 (clear). Each cell is read
atomically, several of them not at one instant.

JSON of one event:   {\"name\", \"kind\", \"row\", \"col\", \"set\", \"transitions\"}
JSON of one counter: {\"name\", \"kind\", \"row\", \"col\", \"value\"}
JSON of several:     {\"name\", \"kind\", \"row\", \"col\", \"cells\": [[...], ...]}, a list
for each row, of true and false, of transitions, or of values; row or col is
null if all of them are meant.

Exit codes: 0 done; for one event 0 set, 1 clear (0 with --transitions);
2 usage, 3 unreachable, 4 refused, 5 any other failure")]
pub struct Get {
    #[command(flatten)]
    region: Region,
    /// Of events: print how often each was set or cleared; odd means set.
    /// `farcell wait --after` takes this number
    #[arg(long)]
    transitions: bool,
}

#[derive(Serialize)]
struct OneEvent<'a> {
    name: &'a str,
    kind: &'a str,
    row: usize,
    col: usize,
    set: bool,
    transitions: u64,
}

#[derive(Serialize)]
struct OneCounter<'a> {
    name: &'a str,
    kind: &'a str,
    row: usize,
    col: usize,
    value: i64,
}

#[derive(Serialize)]
struct Several<'a, T> {
    name: &'a str,
    kind: &'a str,
    row: Option<usize>,
    col: Option<usize>,
    cells: Vec<&'a [T]>,
}

impl Get {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        match open_for(&client, &self.region.name, "get")? {
            Array::Events(array) => self.events(&array, out),
            Array::Counters(_) if self.transitions => Err(Failure::Usage(format!(
                "array {:?} holds counters, which have no transitions; leave out --transitions",
                self.region.name
            ))),
            Array::Counters(array) => self.counters(&array, out),
        }
    }

    fn events(&self, array: &EventArray, out: &Output) -> Result<Answer, Failure> {
        let pick = self.region.pick();
        let name = &self.region.name;
        let counts = pick.events(array)?.transitions()?;
        if let (Pick::One(row, col), &[transitions]) = (pick, counts.as_slice()) {
            let set = transitions % 2 == 1;
            let text = match (self.transitions, set) {
                (true, _) => transitions.to_string(),
                (false, true) => "set".to_owned(),
                (false, false) => "clear".to_owned(),
            };
            out.print(text, &OneEvent { name, kind: "event", row, col, set, transitions })?;
            return Ok(Answer::from(set || self.transitions));
        }
        if self.transitions {
            return self.several("event", &counts, pick.line(array.cols()), u64::to_string, out);
        }
        let set: Vec<bool> = counts.iter().map(|n| n % 2 == 1).collect();
        let digit = |&set: &bool| if set { "1" } else { "0" }.to_owned();
        self.several("event", &set, pick.line(array.cols()), digit, out)
    }

    fn counters(&self, array: &CounterArray, out: &Output) -> Result<Answer, Failure> {
        let pick = self.region.pick();
        let name = &self.region.name;
        let values = pick.counters(array)?.snapshot()?;
        if let (Pick::One(row, col), &[value]) = (pick, values.as_slice()) {
            out.print(value, &OneCounter { name, kind: "counter", row, col, value })?;
            return Ok(Answer::Yes);
        }
        self.several("counter", &values, pick.line(array.cols()), i64::to_string, out)
    }

    /// Prints a region, `line` cells a line.
    fn several<T: Serialize>(
        &self,
        kind: &str,
        cells: &[T],
        line: usize,
        text: impl Fn(&T) -> String,
        out: &Output,
    ) -> Result<Answer, Failure> {
        let pick = self.region.pick();
        let rows: Vec<&[T]> = cells.chunks(line).collect();
        if out.json {
            let name = &self.region.name;
            out.value(&Several { name, kind, row: pick.row(), col: pick.col(), cells: rows })?;
        } else {
            out.text(grid(&rows, text))?;
        }
        Ok(Answer::Yes)
    }
}

/// Lines of cells, right-aligned.
fn grid<T>(rows: &[&[T]], text: impl Fn(&T) -> String) -> String {
    let words: Vec<Vec<String>> = rows.iter().map(|r| r.iter().map(&text).collect()).collect();
    let width = words.iter().flatten().map(String::len).max().unwrap_or(0);
    let mut grid = String::new();
    for row in words {
        for (col, word) in row.iter().enumerate() {
            let gap = if col == 0 { "" } else { " " };
            grid.push_str(&format!("{gap}{word:>width$}"));
        }
        grid.push('\n');
    }
    grid
}
