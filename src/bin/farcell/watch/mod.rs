//! `farcell watch`

mod draw;
mod lines;
mod look;
mod screen;

use crate::args::seconds;
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use crate::signals;
use look::{Looker, News, Window};
use screen::Screen;
use std::io::{self, IsTerminal};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Silence that is worth a word, on top of the interval.
const SILENCE: Duration = Duration::from_secs(1);

/// Show an array and its changes until Ctrl-C.
///
/// On a terminal it is drawn as a grid again and again: what is set, what is
/// clear, what has changed since the frame before, and how many waits are
/// parked on each cell. Elsewhere, and with --json, each change is a line. A
/// server that goes away is waited for.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farcell watch read_events
  farcell watch rounds --interval 2 | tee log
  farcell watch rounds --once --json

Lines are `ROW COL set|clear TRANSITIONS` of events and `ROW COL VALUE` of
counters. For the first look everything was clear or 0 before. Set-and-clear
pulses between two looks show as a change, too.

JSON of events:   {\"name\", \"kind\", \"row\", \"col\", \"set\", \"transitions\", \"waiters\"}
JSON of counters: {\"name\", \"kind\", \"row\", \"col\", \"value\", \"waiters\"}

Exit codes: 0 ended by Ctrl-C, --count or --once; 2 usage; 3 unreachable at the
start, or for longer than --reconnect if that is given; 4 refused, or there was
no such array at the start; 5 any other failure")]
pub struct Watch {
    /// The array
    name: String,
    /// Time from one look to the next
    #[arg(short, long, value_name = "SECONDS", default_value = "0.5", value_parser = seconds)]
    interval: Duration,
    /// End after this many looks
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Look once: the same as --count 1
    #[arg(long, conflicts_with = "count")]
    once: bool,
}

impl Watch {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let (news, arrivals) = mpsc::channel();
        let on_signal = news.clone();
        signals::on_end(move |_| {
            // Nobody listens any more when we are ending anyway.
            let _ = on_signal.send(News::Asked);
        })?;
        let window = Window::default();
        let on_terminal = io::stdout().is_terminal() && !out.json;
        if on_terminal {
            window.fit(screen::size());
        }
        let looker = Looker {
            builder: connection.builder()?.reconnect_for(SILENCE),
            name: self.name.clone(),
            interval: self.interval.max(Duration::from_millis(10)),
            window: window.clone(),
            patience: connection.reconnect,
        };
        looker.start(news)?;
        let looks = if self.once { Some(1) } else { self.count };
        if on_terminal {
            self.on_terminal(&connection.addr()?, looks, &arrivals, &window)
        } else {
            lines::print(&self.name, looks, &arrivals, out)
        }
    }

    fn on_terminal(
        &self,
        addr: &str,
        looks: Option<u64>,
        arrivals: &Receiver<News>,
        window: &Window,
    ) -> Result<Answer, Failure> {
        let mut view = draw::View::new(&self.name, addr);
        // One look needs no screen of its own.
        let mut screen = if looks == Some(1) { None } else { Some(Screen::enter()?) };
        let mut looked = 0;
        let mut heard = Instant::now();
        loop {
            let size = screen::size();
            window.fit(size);
            match arrivals.recv_timeout(SILENCE) {
                Ok(News::Look(look)) => {
                    view.show(look);
                    looked += 1;
                    heard = Instant::now();
                }
                Ok(News::Trouble(what)) => {
                    view.state = Some(what);
                    heard = Instant::now();
                }
                Ok(News::End(failure)) => return Err(failure),
                Ok(News::Asked) | Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    let silent = heard.elapsed();
                    if silent > self.interval + SILENCE {
                        view.state = Some(format!("no answer for {} s", silent.as_secs()));
                    }
                }
            }
            if let Some(screen) = &mut screen {
                screen.draw(&view.lines(size))?;
            }
            if looks.is_some_and(|n| looked >= n) {
                break;
            }
        }
        // What was seen last stays in the terminal.
        drop(screen);
        screen::print(&view.lines(screen::size()))?;
        Ok(Answer::Yes)
    }
}
