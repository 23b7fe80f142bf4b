//! Learner processes: this program, started again.

use super::gossip::Gossip;
use super::task::{Line, Summary, Task};
use crate::failure::Failure;
use crate::output::plain;
use farcell::{Client, Error, Key, TransportChoice};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::Sender;

/// The argument that makes this program a learner.
pub const COMMAND: &str = "__demo-learner";

/// What the demo hears.
pub enum News {
    /// A learner is connected.
    Ready,
    /// A learner has ended well.
    Done(usize, Summary),
    /// A learner cannot go on.
    Failed(usize, String),
    /// A learner has closed its output.
    Gone(usize),
    /// The demo is asked to end.
    Signal(i32),
}

/// The learners, as their parent sees them. They end when this is dropped, and
/// by themselves when the parent is gone.
pub struct Learners(Vec<Child>);

impl Learners {
    /// Starts them all, and a thread for each that reads what it says.
    pub fn start(task: &Task, news: &Sender<News>) -> Result<Learners, Failure> {
        let mut learners = Learners(Vec::new());
        for learner in 0..task.learners {
            let cannot = |e: io::Error| {
                Failure::Other(format!("cannot start learner {learner}: {}", plain(&e)))
            };
            let mut child = Command::new(own_program())
                .arg(COMMAND)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                // Ctrl-C is for the parent, which ends them in good order.
                .process_group(0)
                .spawn()
                .map_err(cannot)?;
            let stdout = child.stdout.take();
            let told = tell(&mut child, &Task { learner, ..task.clone() });
            learners.0.push(child);
            told.map_err(cannot)?;
            let news = news.clone();
            let listen = move || {
                for line in stdout.into_iter().flat_map(|s| BufReader::new(s).lines()) {
                    let Ok(line) = line else { break };
                    let heard = match serde_json::from_str(&line) {
                        Ok(Line::Ready) => News::Ready,
                        Ok(Line::Done(summary)) => News::Done(learner, summary),
                        Ok(Line::Failed(what)) => News::Failed(learner, what),
                        Err(e) => News::Failed(learner, format!("it said {line:?} ({e})")),
                    };
                    // The demo is over if nobody listens.
                    let _ = news.send(heard);
                }
                let _ = news.send(News::Gone(learner));
            };
            std::thread::Builder::new().spawn(listen).map_err(cannot)?;
        }
        Ok(learners)
    }

    /// The process of a learner.
    pub fn pid(&self, learner: usize) -> u32 {
        self.0[learner].id()
    }

    /// Their processes.
    pub fn pids(&self) -> Vec<u32> {
        self.0.iter().map(Child::id).collect()
    }

    /// How a learner ended that has closed its output, in words.
    pub fn ending(&mut self, learner: usize) -> String {
        match self.0[learner].wait() {
            Ok(status) => match (status.signal(), status.code()) {
                (Some(signal), _) => format!("was killed by signal {signal}"),
                (None, code) => format!("ended with exit code {}", code.unwrap_or(-1)),
            },
            Err(e) => format!("cannot be waited for ({e})"),
        }
    }
}

impl Drop for Learners {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Fails for those that have ended, which is as good.
            let _ = child.kill();
        }
        for child in &mut self.0 {
            let _ = child.wait();
        }
    }
}

/// This very program, also when its file was replaced meanwhile.
fn own_program() -> PathBuf {
    std::env::current_exe().ok().filter(|p| p.exists()).unwrap_or("/proc/self/exe".into())
}

/// Writes the task; the pipe stays open, so that its end tells the learner
/// that its parent is gone.
fn tell(child: &mut Child, task: &Task) -> io::Result<()> {
    let mut line = serde_json::to_vec(task)?;
    line.push(b'\n');
    match &mut child.stdin {
        Some(stdin) => stdin.write_all(&line),
        None => Err(io::ErrorKind::BrokenPipe.into()),
    }
}

/// The whole life of a learner process.
pub fn main() -> ExitCode {
    let line = match live() {
        Ok(summary) => Line::Done(summary),
        Err(what) => Line::Failed(what),
    };
    match say(&line) {
        Ok(()) if matches!(line, Line::Done(_)) => ExitCode::SUCCESS,
        _ => ExitCode::from(5),
    }
}

fn live() -> Result<Summary, String> {
    let mut line = String::new();
    io::stdin().read_line(&mut line).map_err(|e| e.to_string())?;
    let task: Task = serde_json::from_str(&line)
        .map_err(|_| "this is a part of `farcell demo`, which starts it".to_owned())?;
    end_with_parent().map_err(|e| e.to_string())?;
    gossip(task).map_err(|e| e.to_string())
}

fn gossip(task: Task) -> Result<Summary, Error> {
    let key = Key::new(task.key.clone().into_bytes())?;
    // Whatever the environment says: the demo's server speaks nothing else.
    let client = Client::builder().addr(&task.addr).key(key).transport(TransportChoice::Tcp);
    let client = client.connect()?;
    let mut gossip = Gossip::new(task, client)?;
    // If the parent is gone, the thread below ends this process.
    let _ = say(&Line::Ready);
    gossip.wait_for_start()?;
    gossip.run()
}

/// Ends this process when its stdin does.
fn end_with_parent() -> io::Result<()> {
    let watch = || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        std::process::exit(5);
    };
    std::thread::Builder::new().spawn(watch).map(drop)
}

fn say(line: &Line) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(line)?;
    bytes.push(b'\n');
    let mut stdout = io::stdout().lock();
    stdout.write_all(&bytes)?;
    stdout.flush()
}
