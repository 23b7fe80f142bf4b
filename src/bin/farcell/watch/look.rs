//! Looking at an array again and again, in a thread of its own, so that
//! nothing that the server does keeps the program from ending.

use crate::args::{Array, open};
use crate::failure::Failure;
use crate::output::plain;
use farcell::{Client, ClientBuilder, Error, Kind};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

/// What a watch hears.
pub enum News {
    /// What the array holds.
    Look(Look),
    /// The array cannot be seen now; we go on trying.
    Trouble(String),
    /// It will not be seen any more.
    End(Failure),
    /// The program is asked to end.
    Asked,
}

/// A look at the upper left part of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Look {
    pub kind: Kind,
    /// Of the whole array.
    pub rows: usize,
    pub cols: usize,
    /// How many rows and columns were looked at.
    pub seen_rows: usize,
    pub seen_cols: usize,
    /// Transitions or values, row by row.
    pub numbers: Vec<i64>,
    pub waiters: Vec<usize>,
}

impl Look {
    /// Whether the cells of another look can be compared to ours.
    pub fn is_like(&self, other: &Look) -> bool {
        (self.kind, self.rows, self.cols, self.seen_rows, self.seen_cols)
            == (other.kind, other.rows, other.cols, other.seen_rows, other.seen_cols)
    }

    /// Whether an event is set, or a counter not 0.
    pub fn is_on(&self, i: usize) -> bool {
        match self.kind {
            Kind::Event => self.numbers[i] & 1 == 1,
            _ => self.numbers[i] != 0,
        }
    }

    /// Which cells are other than in the look before. Without one, everything
    /// was clear or 0.
    pub fn changes(&self, before: Option<&Look>) -> Vec<bool> {
        match before.filter(|before| self.is_like(before)) {
            Some(before) => self.numbers.iter().zip(&before.numbers).map(|(a, b)| a != b).collect(),
            None => (0..self.numbers.len()).map(|i| self.is_on(i)).collect(),
        }
    }
}

/// How many rows and columns are worth looking at. Shared by the one who draws
/// and the one who looks.
#[derive(Clone, Debug)]
pub struct Window(Arc<AtomicU64>);

impl Default for Window {
    fn default() -> Window {
        Window(Arc::new(AtomicU64::new(u64::MAX)))
    }
}

impl Window {
    /// What can be seen on a terminal of this size: a cell takes two columns
    /// of it at least.
    pub fn fit(&self, (width, height): (u16, u16)) {
        let (cols, rows) = (u64::from(width / 2 + 1), u64::from(height) + 1);
        // Relaxed: a hint that orders nothing.
        self.0.store(rows << 32 | cols, Ordering::Relaxed);
    }

    fn clip(&self, rows: usize, cols: usize) -> (usize, usize) {
        let most = self.0.load(Ordering::Relaxed);
        let (most_rows, most_cols) = ((most >> 32) as usize, (most & 0xffff_ffff) as usize);
        (rows.min(most_rows), cols.min(most_cols))
    }
}

/// The one who looks.
pub struct Looker {
    pub builder: ClientBuilder,
    pub name: String,
    pub interval: Duration,
    pub window: Window,
    /// How long trouble may last; for ever if `None`.
    pub patience: Option<Duration>,
}

impl Looker {
    /// Looks from a thread of its own, until nobody wants the news any more.
    pub fn start(self, news: Sender<News>) -> Result<(), Failure> {
        std::thread::Builder::new()
            .name("farcell-looker".to_owned())
            .spawn(move || self.run(&news))
            .map(drop)
            .map_err(|e| Failure::Other(format!("cannot start a thread: {}", plain(&e))))
    }

    fn run(&self, news: &Sender<News>) {
        let mut client: Option<Client> = None;
        let mut array: Option<Array> = None;
        let mut ever = false;
        let mut trouble: Option<Instant> = None;
        loop {
            let item = match self.look(&mut client, &mut array) {
                Ok(look) => {
                    ever = true;
                    trouble = None;
                    News::Look(look)
                }
                Err(error) => {
                    let since = *trouble.get_or_insert_with(Instant::now);
                    let patient = self.patience.is_none_or(|p| since.elapsed() < p);
                    array = None;
                    if error.is_unreachable() {
                        client = None;
                    }
                    match describe(&error) {
                        Some(state) if ever && patient => News::Trouble(state),
                        _ => News::End(error.into()),
                    }
                }
            };
            let over = matches!(item, News::End(_));
            if news.send(item).is_err() || over {
                return;
            }
            std::thread::sleep(self.interval);
        }
    }

    fn look(&self, client: &mut Option<Client>, array: &mut Option<Array>) -> Result<Look, Error> {
        let client = match client {
            Some(client) => client,
            None => client.insert(self.builder.clone().connect()?),
        };
        let array = match array {
            Some(array) => array,
            None => array.insert(open(client, &self.name)?),
        };
        match array {
            Array::Events(array) => {
                let (rows, cols) = (array.rows(), array.cols());
                let (seen_rows, seen_cols) = self.window.clip(rows, cols);
                let events = if (seen_rows, seen_cols) == (rows, cols) {
                    array.all()
                } else {
                    array.cells(&cells(0..seen_rows, seen_cols))?
                };
                // A count of transitions has 63 bits.
                let numbers = events.transitions()?.into_iter().map(|n| n as i64).collect();
                let waiters = events.waiters()?;
                let kind = Kind::Event;
                Ok(Look { kind, rows, cols, seen_rows, seen_cols, numbers, waiters })
            }
            Array::Counters(array) => {
                let (rows, cols) = (array.rows(), array.cols());
                let (seen_rows, seen_cols) = self.window.clip(rows, cols);
                let counters = if (seen_rows, seen_cols) == (rows, cols) {
                    array.all()
                } else {
                    array.cells(&cells(0..seen_rows, seen_cols))?
                };
                let numbers = counters.snapshot()?;
                let waiters = counters.waiters()?;
                let kind = Kind::Counter;
                Ok(Look { kind, rows, cols, seen_rows, seen_cols, numbers, waiters })
            }
        }
    }
}

fn cells(rows: Range<usize>, cols: usize) -> Vec<(usize, usize)> {
    rows.flat_map(|row| (0..cols).map(move |col| (row, col))).collect()
}

/// What to show for trouble that may pass, in few words.
fn describe(error: &Error) -> Option<String> {
    match error {
        Error::ServerGoingAway { .. } => Some("reconnecting: the server went away".to_owned()),
        Error::Unreachable { why, .. } => Some(format!("reconnecting: {why}")),
        Error::NoSuchArray { .. } | Error::ArrayRemoved { .. } => {
            Some("the array was removed; waiting for a new one".to_owned())
        }
        error if error.is_unreachable() => Some("reconnecting".to_owned()),
        _ => None,
    }
}
