//! Arguments that several commands share: cells, shapes, times.

use farcell::{
    Client, Comparison, Counter, CounterArray, Counters, Error, Event, EventArray, Events, Kind,
};
use std::str::FromStr;
use std::time::Duration;

/// A row or a column, or all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Index {
    /// The one with this number, counted from 0.
    At(usize),
    /// `:`
    All,
}

impl FromStr for Index {
    type Err = String;
    fn from_str(s: &str) -> Result<Index, String> {
        if s == ":" {
            return Ok(Index::All);
        }
        s.parse().map(Index::At).map_err(|_| "give a number from 0 on, or : for all".to_owned())
    }
}

/// Cells of an array.
#[derive(Clone, Debug, clap::Args)]
pub struct Region {
    /// The array
    pub name: String,
    /// Row, from 0 on; `:` or nothing for all
    #[arg(allow_negative_numbers = true)]
    row: Option<Index>,
    /// Column, from 0 on; `:` or nothing for all
    #[arg(allow_negative_numbers = true)]
    col: Option<Index>,
}

/// Which cells of an array are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    /// All of them.
    All,
    /// A row.
    Row(usize),
    /// A column.
    Col(usize),
    /// One cell.
    One(usize, usize),
}

impl Region {
    /// Which cells are meant.
    pub fn pick(&self) -> Pick {
        match (self.row.unwrap_or(Index::All), self.col.unwrap_or(Index::All)) {
            (Index::All, Index::All) => Pick::All,
            (Index::At(row), Index::All) => Pick::Row(row),
            (Index::All, Index::At(col)) => Pick::Col(col),
            (Index::At(row), Index::At(col)) => Pick::One(row, col),
        }
    }
}

impl Pick {
    /// The row, unless all are meant.
    pub fn row(self) -> Option<usize> {
        match self {
            Pick::Row(row) | Pick::One(row, _) => Some(row),
            Pick::All | Pick::Col(_) => None,
        }
    }

    /// The column, unless all are meant.
    pub fn col(self) -> Option<usize> {
        match self {
            Pick::Col(col) | Pick::One(_, col) => Some(col),
            Pick::All | Pick::Row(_) => None,
        }
    }

    /// These cells of an array of events.
    pub fn events(self, array: &EventArray) -> Result<Events, Error> {
        match self {
            Pick::All => Ok(array.all()),
            Pick::Row(row) => array.row(row),
            Pick::Col(col) => array.column(col),
            Pick::One(row, col) => array.cells(&[(row, col)]),
        }
    }

    /// These cells of an array of counters.
    pub fn counters(self, array: &CounterArray) -> Result<Counters, Error> {
        match self {
            Pick::All => Ok(array.all()),
            Pick::Row(row) => array.row(row),
            Pick::Col(col) => array.column(col),
            Pick::One(row, col) => array.cells(&[(row, col)]),
        }
    }

    /// How many of these cells a line of output takes.
    pub fn line(self, cols: usize) -> usize {
        match self {
            Pick::All | Pick::Row(_) => cols,
            Pick::Col(_) | Pick::One(..) => 1,
        }
    }
}

/// One cell of an array.
#[derive(Clone, Debug, clap::Args)]
pub struct CellArgs {
    /// The array
    pub name: String,
    /// Row, from 0 on
    #[arg(value_parser = index)]
    pub row: usize,
    /// Column, from 0 on
    #[arg(value_parser = index)]
    pub col: usize,
}

/// A row or column, where one cell is meant.
fn index(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| "one cell is meant here: give a number from 0 on".to_owned())
}

impl CellArgs {
    /// The event there; `op` is what someone wants to do with it.
    pub fn event(&self, client: &Client, op: &'static str) -> Result<Event, Error> {
        match open_for(client, &self.name, op)? {
            Array::Events(array) => array.at(self.row, self.col),
            Array::Counters(_) => {
                Err(Error::WrongKind { name: self.name.clone(), kind: Kind::Counter, op })
            }
        }
    }

    /// The counter there; `op` is what someone wants to do with it.
    pub fn counter(&self, client: &Client, op: &'static str) -> Result<Counter, Error> {
        match open_for(client, &self.name, op)? {
            Array::Counters(array) => array.at(self.row, self.col),
            Array::Events(_) => {
                Err(Error::WrongKind { name: self.name.clone(), kind: Kind::Event, op })
            }
        }
    }
}

/// An array of either kind.
#[derive(Clone, Debug)]
pub enum Array {
    /// Events.
    Events(EventArray),
    /// Counters.
    Counters(CounterArray),
}

/// Opens an array of events or counters, to be looked at.
pub fn open(client: &Client, name: &str) -> Result<Array, Error> {
    open_for(client, name, "watch")
}

/// Opens an array of events or counters of whatever shape it has; `op` is what
/// someone wants to do with it.
pub fn open_for(client: &Client, name: &str, op: &'static str) -> Result<Array, Error> {
    match client.open_events(name) {
        Err(Error::WrongKind { kind: Kind::Counter, .. }) => {
            client.open_counters(name).map(Array::Counters)
        }
        Err(Error::WrongKind { name, kind, .. }) => Err(Error::WrongKind { name, kind, op }),
        other => other.map(Array::Events),
    }
}

/// An array to be made: `NAME:KIND:ROWSxCOLS`, and for barriers and semaphores
/// one part more: the parties, or `PERMITS` or `PERMITS/BOUND`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// Its rows.
    pub rows: usize,
    /// Its columns.
    pub cols: usize,
    /// What else belongs to its kind.
    pub param: u64,
}

impl FromStr for Spec {
    type Err = String;
    fn from_str(s: &str) -> Result<Spec, String> {
        let example = "for example read_events:event:4x4";
        let mut parts = s.splitn(4, ':');
        let (name, kind, shape) = match (parts.next(), parts.next(), parts.next()) {
            (Some(name), Some(kind), Some(shape)) => (name, kind, shape),
            (_, None, _) => return Err(format!("the kind and the shape are missing, {example}")),
            _ => return Err(format!("the kind or the shape is missing, {example}")),
        };
        let rest = parts.next();
        if name.is_empty() {
            return Err(format!("the name is missing, {example}"));
        }
        let kind: Kind = kind.parse()?;
        if kind == Kind::Slots {
            return Err("slots have a size: make them with `farcell slot create`".to_owned());
        }
        let (rows, cols) = shape
            .split_once(['x', 'X'])
            .ok_or_else(|| format!("the shape {shape:?} is not ROWSxCOLS, {example}"))?;
        let number = |what: &str, s: &str| {
            s.parse().map_err(|_| format!("the {what} {s:?} in the shape are no number, {example}"))
        };
        Ok(Spec {
            name: name.to_owned(),
            kind,
            rows: number("rows", rows)?,
            cols: number("columns", cols)?,
            param: param(kind, rest)?,
        })
    }
}

/// The last part of a spec, as the parameter of that kind of array.
fn param(kind: Kind, rest: Option<&str>) -> Result<u64, String> {
    match (kind, rest) {
        (Kind::Barrier, Some(parties)) => match parties.parse::<u32>() {
            Ok(n) if n > 0 => Ok(n.into()),
            _ => {
                Err(format!("{parties:?} is no number of parties, for example start:barrier:1x1:4"))
            }
        },
        (Kind::Barrier, None) => {
            Err("the number of parties is missing, for example start:barrier:1x1:4".to_owned())
        }
        (Kind::Semaphore, Some(permits)) => {
            let (initial, bound) = permits.split_once('/').unwrap_or((permits, permits));
            match (initial.parse::<u32>(), bound.parse::<u32>()) {
                (Ok(n), Ok(most)) if n <= most && most > 0 && most <= i32::MAX as u32 => {
                    Ok(u64::from(most) << 32 | u64::from(n))
                }
                _ => Err(format!(
                    "{permits:?} are no permits, for example gpus:semaphore:1x1:3 or gpus:semaphore:1x1:0/3"
                )),
            }
        }
        (Kind::Semaphore, None) => {
            Err("the permits are missing, for example gpus:semaphore:1x1:3".to_owned())
        }
        (_, Some(rest)) => Err(format!("{rest:?} behind the shape means nothing for a {kind}")),
        (_, None) => Ok(0),
    }
}

/// What a counter is waited for: `OP:VALUE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Until {
    /// How to compare.
    pub comparison: Comparison,
    /// What with.
    pub value: i64,
}

impl FromStr for Until {
    type Err = String;
    fn from_str(s: &str) -> Result<Until, String> {
        let (op, value) =
            s.split_once(':').ok_or("give OP:VALUE, for example ge:5 (ne, eq, gt, ge, lt, le)")?;
        let comparison = match op {
            "ne" => Comparison::Ne,
            "eq" => Comparison::Eq,
            "gt" => Comparison::Gt,
            "ge" => Comparison::Ge,
            "lt" => Comparison::Lt,
            "le" => Comparison::Le,
            _ => return Err(format!("{op:?} is no comparison; use ne, eq, gt, ge, lt or le")),
        };
        let value = value.parse().map_err(|_| format!("{value:?} is no number"))?;
        Ok(Until { comparison, value })
    }
}

/// Seconds, with a fraction or without.
pub fn seconds(s: &str) -> Result<Duration, String> {
    // More than 30 years would not fit every clock.
    s.parse()
        .ok()
        .filter(|n| (0.0..=1e9).contains(n))
        .and_then(|n| Duration::try_from_secs_f64(n).ok())
        .ok_or_else(|| "give seconds from 0 on, for example 2.5".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs() {
        let spec: Spec = "a/b:counter:2x30".parse().unwrap();
        let name = "a/b".to_owned();
        assert_eq!(spec, Spec { name, kind: Kind::Counter, rows: 2, cols: 30, param: 0 });
        for (text, param) in [
            ("b:barrier:1x1:4", 4),
            ("l:lock:2x2", 0),
            ("s:semaphore:1x1:3", 3 << 32 | 3),
            ("s:semaphore:1x1:0/3", 3 << 32),
        ] {
            assert_eq!(text.parse::<Spec>().unwrap().param, param, "{text}");
        }
        for (bad, part) in [
            ("a", "kind and the shape are missing"),
            ("a:event", "kind or the shape is missing"),
            (":event:1x1", "name is missing"),
            ("a:evnt:1x1", "\"evnt\" is no kind"),
            ("a:event:4", "\"4\" is not ROWSxCOLS"),
            ("a:event:ax4", "rows \"a\""),
            ("a:event:4x", "columns \"\""),
            ("a:event:4x-1", "columns \"-1\""),
            ("a:event:4x1:3", "\"3\" behind the shape"),
            ("a:barrier:4x1", "parties is missing"),
            ("a:barrier:4x1:0", "\"0\" is no number of parties"),
            ("a:semaphore:4x1", "permits are missing"),
            ("a:semaphore:4x1:4/3", "\"4/3\" are no permits"),
        ] {
            let error = bad.parse::<Spec>().unwrap_err();
            assert!(error.contains(part), "{bad}: {error}");
        }
    }

    #[test]
    fn comparisons() {
        let until: Until = "le:-3".parse().unwrap();
        assert_eq!(until, Until { comparison: Comparison::Le, value: -3 });
        for bad in ["5", "xx:5", "ge:", "ge:x"] {
            assert!(bad.parse::<Until>().is_err(), "{bad}");
        }
    }

    #[test]
    fn times() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "x", "-1", "inf", "nan", "1e10"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }
}
