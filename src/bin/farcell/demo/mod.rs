//! `farcell demo`: a server, and learner processes that gossip through it.

mod gossip;
mod learner;
mod progress;
mod report;
mod task;

pub use learner::{COMMAND, main as learner};

use crate::failure::{Answer, Failure};
use crate::output::Output;
use crate::signals;
use farcell::{Client, Error, Key, Server, TransportChoice};
use gossip::HEAD;
use learner::{Learners, News};
use progress::Progress;
use report::Results;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use task::{MESSAGES, START, Task};

/// How often we look how far the learners are.
const LOOK: Duration = Duration::from_millis(200);

/// A round takes milliseconds. Learners that do nothing for so long hang.
const STALL: Duration = Duration::from_secs(60);

/// Show the main job: learner processes that gossip through a server.
///
/// Starts a server on loopback with a key of its own and N learner processes
/// in a ring, each with parameters of its own. In every round each of them waits
/// until its readers have read, writes its parameters, waits for those of its
/// writers, and mixes them into its own. It checks that each message is whole and
/// of the right round, and in the end that its parameters have come to the mean of
/// all starts, as close as so many rounds must bring them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell demo --learners 8 --peers 3 --seconds 10

Needs no server, no key and no network, and leaves nothing behind. Progress goes
to stderr, the result to stdout.

JSON: {\"ok\", \"learners\", \"peers\", \"cells\", \"transport\", \"rounds\", \"seconds\",
\"rounds_per_second\", \"p50_us\", \"p99_us\", \"max_us\", \"checks\", \"torn\", \"repeated\",
\"skipped\", \"astray\", \"distance\", \"tolerance\", \"faults\": [{\"learner\", \"writer\", \"round\", \"kind\", \"what\"}], \"each\":
[{\"learner\", \"rounds\", \"seconds\", \"p50_us\", \"p99_us\", \"max_us\", \"checks\",
\"distance\"}]}; times are those of one round of one learner, distances those of
parameters from the mean of all starts.

Exit codes: 0 every check was right, 1 a learner saw a torn, repeated or skipped
round or is astray from the mean, 2 usage, 5 anything else, such as a learner that died; 130 after Ctrl-C")]
pub struct Demo {
    /// Learner processes
    #[arg(long, value_name = "N", default_value_t = 4,
        value_parser = clap::value_parser!(u16).range(2..=256))]
    learners: u16,
    /// How many next neighbours each learner sends its parameters to
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..))]
    peers: u16,
    /// Rounds that each learner makes [default: 2000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Run for this time instead
    #[arg(long, value_name = "SECONDS", conflicts_with = "rounds",
        value_parser = crate::args::seconds)]
    seconds: Option<Duration>,
    /// Parameters, 8 bytes each
    #[arg(long, value_name = "N", default_value_t = 1000,
        value_parser = clap::value_parser!(u32).range(1..=4_000_000))]
    cells: u32,
    /// Writers do not wait for their readers: the checks must find it
    #[arg(long, hide = true)]
    break_protocol: bool,
}

impl Demo {
    /// Runs the command.
    pub fn run(self, out: &Output) -> Result<Answer, Failure> {
        if self.peers >= self.learners {
            return Err(Failure::Usage(format!(
                "--peers {}: a learner has at most {} others among {}",
                self.peers,
                self.learners - 1,
                self.learners
            )));
        }
        let (news, arrivals) = mpsc::channel();
        let on_signal = news.clone();
        signals::on_end(move |signal| {
            // Nobody listens any more when we are ending anyway.
            let _ = on_signal.send(News::Signal(signal));
        })?;
        let secret = random_key()?;
        let key = Key::new(secret.clone()).map_err(Error::from)?;
        let server = self.server(key.clone())?;
        let client = Client::builder().addr(server.address()).key(key);
        let client = client.transport(TransportChoice::Tcp).connect()?;
        let task = Task {
            addr: server.address(),
            key: secret,
            learner: 0,
            learners: self.learners.into(),
            peers: self.peers.into(),
            cells: self.cells as usize,
            rounds: match self.seconds {
                None => Some(self.rounds.unwrap_or(2000).into()),
                Some(_) => None,
            },
            seconds: self.seconds.map(|s| s.as_secs_f64()),
            break_protocol: self.break_protocol,
        };
        task.prepare(&client)?;

        let mut learners = Learners::start(&task, &news)?;
        let progress = Progress::new(&task, &learners.pids());
        let results = gather(&client, &task, &mut learners, &arrivals, progress)?;
        drop(learners);
        client.close();
        server.stop()?;
        out.print(results.text(), &results.json())?;
        Ok(results.is_ok().into())
    }

    fn server(&self, key: Key) -> Result<Server, Failure> {
        // Rows are padded by less than 16 cells: two arrays of events, and the
        // versions of the messages.
        let n = u32::from(self.learners);
        let capacity = 2 * n * (n + 16) + n * 16 + 64;
        Ok(Server::builder(key).bind("127.0.0.1:0").capacity(capacity).start()?)
    }
}

/// Starts the learners' rounds and collects what they found. Returns early
/// when one of them saw what it must not see.
fn gather(
    client: &Client,
    task: &Task,
    learners: &mut Learners,
    arrivals: &Receiver<News>,
    mut progress: Progress,
) -> Result<Results, Failure> {
    // Every message is a round.
    let messages = client.open_slots(&format!("{MESSAGES}.messages"))?;
    let rounds = || messages.versions();
    let start = client.open_events(START)?.at(0, 0)?;
    let mut results = Results::new(task);
    let mut ready = 0;
    let mut moved = (0, Instant::now());
    while !results.is_complete() && !results.has_fault() {
        match arrivals.recv_timeout(LOOK) {
            Ok(News::Ready) => {
                ready += 1;
                if ready == task.learners {
                    start.set()?;
                    progress.start();
                }
            }
            Ok(News::Done(learner, summary)) => results.add(learner, &summary)?,
            Ok(News::Failed(learner, what)) => {
                return Err(Failure::Other(format!(
                    "learner {learner} (process {}) failed: {what}",
                    learners.pid(learner)
                )));
            }
            Ok(News::Gone(learner)) if results.has(learner) => {}
            Ok(News::Gone(learner)) => {
                let round = rounds()?.get(learner).copied().unwrap_or(0);
                return Err(Failure::Other(format!(
                    "learner {learner} (process {}) {} in round {round}, so the others were stopped; run the demo again",
                    learners.pid(learner),
                    learners.ending(learner),
                )));
            }
            Ok(News::Signal(signal)) => return Err(Failure::Interrupted(signal)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::Other("nobody reports any more".to_owned()));
            }
        }
        if progress.is_due(LOOK) {
            let at = rounds()?;
            let least = at.iter().copied().min().unwrap_or(0);
            progress.show(least);
            if at.iter().sum::<u64>() != moved.0 {
                moved = (at.iter().sum(), Instant::now());
            }
        }
        if moved.1.elapsed() > STALL {
            return Err(Failure::Other(format!(
                "no learner has moved for {} s (rounds: {:?}); is one of them stopped?",
                STALL.as_secs(),
                rounds()?
            )));
        }
    }
    Ok(results)
}

/// A key as text, so that it can travel in a line.
fn random_key() -> Result<String, Failure> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes)
        .map_err(|e| Failure::Other(format!("no random numbers for a key: {e}")))?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

impl Task {
    /// Makes the arrays that this process uses itself.
    fn prepare(&self, client: &Client) -> Result<(), Failure> {
        client.events(START, 1, 1)?;
        let bytes = (self.cells + HEAD) * size_of::<f64>();
        client.slots(&format!("{MESSAGES}.messages"), self.learners, bytes as u64)?;
        Ok(())
    }
}
