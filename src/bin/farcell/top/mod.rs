//! `farcell top`

mod graph;
mod input;
mod look;
mod print;
mod scene;
mod view;

use crate::args::seconds;
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::{Output, plain};
use crate::signals;
use crossterm::event;
use input::{Action, action};
use look::{Looker, News, Wanted};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use scene::Model;
use std::io::{self, IsTerminal, Stdout};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use view::View;

/// Silence that is worth a word, on top of the interval.
const SILENCE: Duration = Duration::from_secs(1);

/// Show who waits for whom, who holds what and how busy everyone is.
///
/// On a terminal it is drawn again and again: an array as a map, the sessions,
/// and the chains of waits. A cycle of them is named as a deadlock. With --once or
/// --json it is printed once. A server that goes away is waited for.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farcell top
  farcell top node0:7117
  farcell top --once
  farcell top --json | jq -r .deadlocks[].text

Keys: q or Ctrl-C ends it, Tab goes to the next part, Up and Down choose there, z
gives it all of the screen, p pauses.

The server knows sessions, and not what each of their threads does: a session is
stuck if each of its waits needs someone who is stuck, and it has done nothing
since. A wait that names peers counts as one for any of them; nobody knows who has
the permits of a semaphore. Requests in a second are those that the server sees:
what clients do over RDMA or in shared memory is not among them.

JSON: {\"domain\", \"sessions\", \"parked_waits\", \"cells\", \"cells_free\",
\"arrays\": [{\"name\", \"kind\", \"rows\", \"cols\"}], \"members\": [{\"name\", \"seat\",
\"transport\", \"operations\", \"requests\", \"waits\", \"idle_s\", \"holds\",
\"waits_for\", \"stuck\", \"fallbacks\": [{\"wanted\", \"reason\", \"text\"}]}],
\"waits\": [{\"seat\", \"how\", \"since_s\", \"need\", \"cells\": [{\"name\", \"kind\",
\"row\", \"col\", \"comparison\", \"value\"}], \"cells_in_all\", \"peers\",
\"peers_in_all\"}], \"chains\": [...], \"deadlocks\": [{\"seats\", \"sure\", \"text\"}]}

Exit codes: 0 ended, or printed and there is no deadlock; 1 printed and there is
one; 2 usage; 3 unreachable at the start, or for longer than --reconnect if that is
given; 4 refused; 5 any other failure")]
pub struct Top {
    /// The server; the same as --addr
    #[arg(value_name = "HOST:PORT", conflicts_with = "addr")]
    server: Option<String>,
    /// Time from one look to the next
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// Print it once and end
    #[arg(long)]
    once: bool,
}

impl Top {
    /// Runs the command.
    pub fn run(self, mut connection: Connection, out: &Output) -> Result<Answer, Failure> {
        if self.server.is_some() {
            connection.addr = self.server;
        }
        if self.once || out.json {
            let client = connection.connect()?;
            let seen = look::look(&client, &Wanted::default())?;
            let mut model = Model::default();
            model.show(seen, Duration::ZERO);
            if let Some(scene) = model.scene() {
                print::print(&model, scene, out)?;
            }
            return Ok(if model.cycles().is_empty() { Answer::Yes } else { Answer::No });
        }
        if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
            return Err(Failure::Usage(
                "top draws on a terminal, and there is none; give --once or --json".to_owned(),
            ));
        }
        let (news, arrivals) = mpsc::channel();
        let on_signal = news.clone();
        signals::on_end(move |_| {
            // Nobody listens any more when we are ending anyway.
            let _ = on_signal.send(News::Asked);
        })?;
        let view = View::new(&connection.addr()?);
        let wanted = Arc::new(Mutex::new(Wanted { array: None, room: view.room }));
        let looker = Looker {
            builder: connection.builder()?.reconnect_for(SILENCE),
            interval: self.interval.max(Duration::from_millis(20)),
            wanted: wanted.clone(),
            patience: connection.reconnect,
        };
        let interval = looker.interval;
        let (nudge, nudges) = mpsc::channel();
        looker.start(news.clone(), nudges)?;
        // Before there is a screen, so that what is wrong at the start is a line.
        let first = arrivals.recv().unwrap_or(News::Asked);
        match first {
            News::End(failure) => return Err(failure),
            News::Asked => return Ok(Answer::Yes),
            _ => {}
        }
        let mut screen = Screen::enter()?;
        listen(news)?;
        let desk = Desk { view, model: Model::default(), wanted, nudge, interval };
        desk.run(first, &arrivals, &mut screen)
    }
}

/// What is drawn, and how to have something else looked at.
struct Desk {
    view: View,
    model: Model,
    wanted: Arc<Mutex<Wanted>>,
    nudge: Sender<()>,
    interval: Duration,
}

impl Desk {
    fn run(
        mut self,
        first: News,
        arrivals: &Receiver<News>,
        screen: &mut Screen,
    ) -> Result<Answer, Failure> {
        let begun = Instant::now();
        let (mut heard, mut next) = (begun, Some(first));
        loop {
            match next.take() {
                Some(News::Scene(scene)) => {
                    heard = Instant::now();
                    if !self.view.paused {
                        self.model.show(*scene, begun.elapsed());
                    }
                }
                Some(News::Trouble(what)) => {
                    heard = Instant::now();
                    self.model.trouble = Some(what);
                }
                Some(News::End(failure)) => return Err(failure),
                Some(News::Asked) => return Ok(Answer::Yes),
                Some(News::Event(event)) => match action(&event) {
                    Some(Action::Quit) => return Ok(Answer::Yes),
                    Some(asked) => {
                        if asked == Action::Redraw {
                            screen.clear()?;
                        }
                        if self.view.act(asked, &self.model) {
                            self.want();
                        }
                    }
                    None => {}
                },
                None => {
                    let silent = heard.elapsed();
                    if silent > self.interval + SILENCE {
                        let what = format!("no answer for {} s", silent.as_secs());
                        self.model.trouble = Some(what);
                    }
                }
            }
            let room = self.view.room;
            let (view, model) = (&mut self.view, &self.model);
            screen.draw(|frame| view.draw(frame, model, begun.elapsed()))?;
            if self.view.room != room {
                self.want();
            }
            next = match arrivals.recv_timeout(SILENCE / 2) {
                Ok(news) => Some(news),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return Ok(Answer::Yes),
            };
        }
    }

    /// Has what is to be seen looked at, now.
    fn want(&self) {
        let (array, room) = (self.view.array.clone(), self.view.room);
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = Wanted { array, room };
        // It is gone only at the end.
        let _ = self.nudge.send(());
    }
}

/// Hands on what the terminal says, from a thread of its own, which ends with the
/// program.
fn listen(news: Sender<News>) -> Result<(), Failure> {
    let read = move || {
        while let Ok(event) = event::read() {
            if news.send(News::Event(event)).is_err() {
                return;
            }
        }
        // The terminal is gone.
        let _ = news.send(News::Asked);
    };
    std::thread::Builder::new()
        .name("farcell-keys".to_owned())
        .spawn(read)
        .map(drop)
        .map_err(|e| Failure::Other(format!("cannot start a thread: {}", plain(&e))))
}

/// The terminal while we have it. Dropped, it gives it back as it was.
struct Screen(Terminal<CrosstermBackend<Stdout>>);

impl Screen {
    fn enter() -> Result<Screen, Failure> {
        // Also gives the terminal back should we panic.
        ratatui::try_init().map(Screen).map_err(|e| {
            ratatui::restore();
            cannot(&e)
        })
    }

    fn draw(&mut self, what: impl FnOnce(&mut ratatui::Frame<'_>)) -> Result<(), Failure> {
        self.0.draw(what).map(drop).map_err(|e| cannot(&e))
    }

    fn clear(&mut self) -> Result<(), Failure> {
        // `Terminal::clear` would ask the terminal where the cursor is, and the
        // thread that reads keys would get the answer.
        let size = self.0.size().map_err(|e| cannot(&e))?;
        self.0.resize(size.into()).map_err(|e| cannot(&e))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal is gone there is nothing to give back.
        let _ = self.0.show_cursor();
        ratatui::restore();
    }
}

fn cannot(e: &io::Error) -> Failure {
    Failure::Other(format!("cannot draw on the terminal: {}", plain(e)))
}
