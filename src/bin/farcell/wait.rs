//! `farcell wait`

use crate::args::{Array, Pick, Region, Until, open_for, seconds};
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use farcell::{CounterArray, EventArray, Woken};
use serde::Serialize;
use std::time::Duration;

/// Sleep until events are set, or counters have a value.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farcell wait read_events 0 1 --timeout 10     one event
  farcell wait read_events : 1 --any            one of the events of column 1
  farcell wait rounds 0 0 --until ge:5          until a counter is 5 or more
  seen=$(farcell get go 0 0 --transitions)
  seen=$(farcell wait go 0 0 --after $seen)     each further set or clear

An event that was set and cleared again meanwhile ends the wait, too. Of one cell
the transitions (odd: set) or the value is printed, of several cells a line
`ROW COL NUMBER` for each that ended the wait. When the time is over, those that
did by then are printed.

JSON: {\"name\", \"kind\", \"satisfied\", \"need\", \"cells\": [{\"row\", \"col\",
\"transitions\" or \"value\"}]}; satisfied is false when the time was over.

Exit codes: 0 satisfied, 1 the time was over, 2 usage, 3 unreachable or the
server stopped, 4 refused, or the array was removed, 5 any other failure")]
pub struct Wait {
    #[command(flatten)]
    region: Region,
    /// Give up after this time; 0 only looks [default: never]
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
    /// Wait for all of the cells, which need not be set at one instant [default]
    #[arg(long)]
    all: bool,
    /// Wait for any of the cells
    #[arg(long, conflicts_with = "all")]
    any: bool,
    /// Wait for this many of the cells
    #[arg(long, value_name = "N", conflicts_with_all = ["all", "any"])]
    count: Option<usize>,
    /// Of events: wait until it was set or cleared after it had SEEN transitions
    #[arg(long, value_name = "SEEN", value_parser = clap::value_parser!(u64).range(..1 << 62))]
    after: Option<u64>,
    /// Of counters: wait until the value compares like this; OP is ne, eq, gt,
    /// ge, lt or le
    #[arg(long, value_name = "OP:VALUE", conflicts_with = "after")]
    until: Option<Until>,
}

#[derive(Serialize)]
struct Waited<'a> {
    name: &'a str,
    kind: &'a str,
    satisfied: bool,
    need: usize,
    cells: Vec<CellJson>,
}

#[derive(Serialize)]
struct CellJson {
    row: usize,
    col: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    transitions: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<i64>,
}

impl Wait {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        let name = &self.region.name;
        let (need, woken, kind) = match (open_for(&client, name, "wait")?, self.until) {
            (Array::Events(array), None) => {
                let (need, woken) = self.events(&array)?;
                (need, woken, "event")
            }
            (Array::Counters(array), Some(until)) => {
                let (need, woken) = self.counters(&array, until)?;
                (need, woken, "counter")
            }
            (Array::Events(_), Some(_)) => {
                return Err(Failure::Usage(format!(
                    "array {name:?} holds events, and --until is for counters; leave it out"
                )));
            }
            (Array::Counters(_), None) => {
                return Err(Failure::Usage(format!(
                    "array {name:?} holds counters; say what to wait for, for example --until ge:5"
                )));
            }
        };
        self.report(kind, need, &woken, out)?;
        Ok(woken.is_satisfied().into())
    }

    fn need(&self, cells: usize) -> usize {
        match self.count {
            Some(count) => count,
            None if self.any => 1,
            None => cells,
        }
    }

    fn events(&self, array: &EventArray) -> Result<(usize, Woken), Failure> {
        let events = self.region.pick().events(array)?;
        let need = self.need(events.len());
        let woken = match self.after {
            Some(seen) => events.wait_after(need, &vec![seen; events.len()], self.timeout, None),
            None => events.wait_with(need, self.timeout, None),
        }?;
        Ok((need, woken))
    }

    fn counters(&self, array: &CounterArray, until: Until) -> Result<(usize, Woken), Failure> {
        let counters = self.region.pick().counters(array)?;
        let need = self.need(counters.len());
        let Until { comparison, value } = until;
        Ok((need, counters.wait_some(need, comparison, value, self.timeout, None)?))
    }

    fn report(&self, kind: &str, need: usize, woken: &Woken, out: &Output) -> Result<(), Failure> {
        let is_event = kind == "event";
        if out.json {
            let cells = woken.cells().iter().map(|cell| CellJson {
                row: cell.row,
                col: cell.col,
                transitions: is_event.then(|| cell.transitions()),
                value: (!is_event).then(|| cell.value()),
            });
            let satisfied = woken.is_satisfied();
            let name = &self.region.name;
            out.value(&Waited { name, kind, satisfied, need, cells: cells.collect() })?;
            return Ok(());
        }
        let one = matches!(self.region.pick(), Pick::One(..));
        let mut text = String::new();
        for cell in woken.cells() {
            // The transitions of an event are its value, and never negative.
            let number = cell.value();
            match one {
                true => text.push_str(&format!("{number}\n")),
                false => text.push_str(&format!("{} {} {number}\n", cell.row, cell.col)),
            }
        }
        out.text(text)?;
        Ok(())
    }
}
