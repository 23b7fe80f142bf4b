//! Looking at the server, from a thread of its own.

use super::scene::{Cells, Scene};
use crate::failure::Failure;
use crate::output::plain;
use crossterm::event::Event;
use farcell::{ArrayInfo, Client, ClientBuilder, Error, Kind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What there is to know.
pub enum News {
    /// How it stands.
    Scene(Box<Scene>),
    /// No look was possible just now, and why.
    Trouble(String),
    /// No look will be possible.
    End(Failure),
    /// A key, or another size of the terminal.
    Event(Event),
    /// A signal asks for the end.
    Asked,
}

/// Which cells are to be looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The array; the first one if it is `None` or gone.
    pub array: Option<String>,
    /// How many rows and columns fit.
    pub room: (usize, usize),
}

/// The one who looks.
pub struct Looker {
    pub builder: ClientBuilder,
    pub interval: Duration,
    pub wanted: Arc<Mutex<Wanted>>,
    /// How long trouble may last; for ever if `None`.
    pub patience: Option<Duration>,
}

impl Looker {
    /// Looks until nobody wants the news any more; at once when it is nudged.
    pub fn start(self, news: Sender<News>, nudges: Receiver<()>) -> Result<(), Failure> {
        std::thread::Builder::new()
            .name("farcell-looker".to_owned())
            .spawn(move || self.run(&news, &nudges))
            .map(drop)
            .map_err(|e| Failure::Other(format!("cannot start a thread: {}", plain(&e))))
    }

    fn run(&self, news: &Sender<News>, nudges: &Receiver<()>) {
        let mut client: Option<Client> = None;
        let (mut ever, mut trouble) = (false, None::<Instant>);
        loop {
            let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let item = match self.look(&mut client, &wanted) {
                Ok(scene) => {
                    (ever, trouble) = (true, None);
                    News::Scene(Box::new(scene))
                }
                Err(error) => {
                    let since = *trouble.get_or_insert_with(Instant::now);
                    let patient = self.patience.is_none_or(|p| since.elapsed() < p);
                    if error.is_unreachable() {
                        client = None;
                    }
                    match describe(&error) {
                        Some(what) if ever && patient => News::Trouble(what),
                        _ => News::End(error.into()),
                    }
                }
            };
            let over = matches!(item, News::End(_));
            if news.send(item).is_err() || over {
                return;
            }
            match nudges.recv_timeout(self.interval) {
                Ok(()) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn look(&self, client: &mut Option<Client>, wanted: &Wanted) -> Result<Scene, Error> {
        let client = match client {
            Some(client) => client,
            None => client.insert(self.builder.clone().connect()?),
        };
        look(client, wanted)
    }
}

/// One look. Waits first, holders behind them: who got a lock in between is then
/// seen to hold what he is said to wait for, which is no cycle.
pub fn look(client: &Client, wanted: &Wanted) -> Result<Scene, Error> {
    let waits = client.waits()?;
    let held = client.holders()?;
    let tallies = client.tallies()?;
    let members = client.members()?;
    let info = client.info()?;
    let arrays = client.list()?;
    let named = |name: &String| arrays.iter().find(|array| array.name == *name);
    let shown = wanted.array.as_ref().and_then(named).or(arrays.first());
    let cells = match shown {
        Some(array) => match cells(client, array, wanted.room, &held) {
            // It was removed, or made anew as something else, since it was listed.
            Err(
                Error::NoSuchArray { .. } | Error::ArrayRemoved { .. } | Error::WrongKind { .. },
            ) => None,
            other => other?,
        },
        None => None,
    };
    Ok(Scene { info, arrays, members, waits, held, tallies, cells, own: client.seat() })
}

fn cells(
    client: &Client,
    array: &ArrayInfo,
    (rows, cols): (usize, usize),
    held: &[farcell::Held],
) -> Result<Option<Cells>, Error> {
    let (rows, cols) = (array.rows.min(rows), array.cols.min(cols));
    if rows == 0 || cols == 0 {
        return Ok(None);
    }
    let list: Vec<(usize, usize)> =
        (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))).collect();
    let (name, kind) = (array.name.clone(), array.kind);
    Ok(match kind {
        Kind::Event => {
            let events = client.open_events(&name)?.cells(&list)?;
            // A count of transitions has 63 bits.
            let numbers = events.transitions()?.into_iter().map(|n| n as i64).collect();
            let waiters = events.waiters()?;
            Some(Cells { name, kind, rows, cols, numbers, waiters })
        }
        Kind::Counter => {
            let counters = client.open_counters(&name)?.cells(&list)?;
            let (numbers, waiters) = (counters.snapshot()?, counters.waiters()?);
            Some(Cells { name, kind, rows, cols, numbers, waiters })
        }
        Kind::Lock | Kind::Barrier | Kind::Semaphore => {
            Some(Cells::of_held(array, rows, cols, held))
        }
        Kind::Slots => None,
    })
}

/// What to show for trouble that may pass, in few words.
fn describe(error: &Error) -> Option<String> {
    match error {
        Error::ServerGoingAway { .. } => Some("reconnecting: the server went away".to_owned()),
        Error::Unreachable { why, .. } => Some(format!("reconnecting: {why}")),
        error if error.is_unreachable() => Some("reconnecting".to_owned()),
        _ => None,
    }
}
