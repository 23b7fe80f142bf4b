//! A server, its learners, what befalls them, and what came of it.

use super::common::another::{Another, role};
use super::common::process::Process;
use super::common::{eventually_within, key};
use super::learner::{Count, Journal, LEARNERS, ROLE, now};
use super::net::Net;
use farcell::{Client, Member, TransportChoice};
use std::collections::HashSet;
use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long learners may take until they are at work again, in a machine that may
/// be slow, once nothing keeps them from it.
const PATIENCE: Duration = Duration::from_secs(90);

struct Learner {
    process: Another,
    journal: Journal,
    /// Whether it is to be at work at the end.
    lives: bool,
}

/// A server and its learners at work.
pub struct World {
    pub server: Process,
    pub net: Option<Net>,
    learners: Vec<Learner>,
    transport: &'static str,
    /// What learners' command lines begin with.
    first: Vec<String>,
    /// What was seen besides.
    seen: Vec<String>,
}

impl World {
    /// On this machine: learners over `tcp`, `shm` or `rdma`.
    pub fn here(transport: &'static str, serve: &[&str]) -> World {
        World::with(transport, Process::start(serve), &[])
    }

    /// Learners in a network namespace, over TCP. None where none can be made.
    pub fn apart(serve: &[&str]) -> Option<World> {
        let Some(net) = Net::new() else {
            println!("NOT TESTED: no network namespace can be made here; root can");
            return None;
        };
        let server = Process::start_at(&format!("{}:0", net.address), &[], serve);
        let addr = server.addr.clone();
        let first = net.inside();
        let mut world = World { first, net: Some(net), ..World::empty("tcp", server) };
        world.start_learners(&addr);
        Some(world)
    }

    /// As [`World::here`], with the learners' server behind this address.
    pub fn behind(server: Process, addr: &str) -> World {
        let mut world = World::empty("tcp", server);
        world.start_learners(addr);
        world
    }

    /// A server that has been started, and learners at the end of this command line.
    pub fn with(transport: &'static str, server: Process, first: &[&str]) -> World {
        let addr = server.addr.clone();
        let first = first.iter().map(|s| (*s).to_owned()).collect();
        let mut world = World { first, ..World::empty(transport, server) };
        world.start_learners(&addr);
        world
    }

    fn empty(transport: &'static str, server: Process) -> World {
        World { server, net: None, learners: vec![], transport, first: vec![], seen: vec![] }
    }

    fn start_learners(&mut self, addr: &str) {
        for me in 0..LEARNERS {
            let file = self.server.dir.path().join(format!("learner-{me}"));
            let what = format!("{me} {} {addr} {}", self.transport, file.display());
            let mut command = role("role_of_a_learner", ROLE, what);
            // Where there is a second adapter, learners have that one.
            if let Ok(device) = std::env::var("SOFT_ROCE_DEVICE_2") {
                command.env("FARCELL_DEVICE", device);
            }
            if !self.first.is_empty() {
                command = through(&self.first, &command);
            }
            let process = Another::start(command.stdin(Stdio::piped()));
            self.learners.push(Learner { process, journal: Journal::new(&file), lives: true });
        }
        let client = self.client();
        let balls = client.events("balls", 1, LEARNERS).unwrap();
        self.eventually("all learners are there", || {
            client.members().unwrap().iter().filter(|m| is_learner(m)).count() == LEARNERS
        });
        // One ball for two of them.
        for i in (0..LEARNERS).step_by(2) {
            balls.flat(i).unwrap().set().unwrap();
        }
        self.at_work();
    }

    /// The wire to the learners.
    pub fn net(&self) -> &Net {
        self.net.as_ref().expect("learners in a namespace")
    }

    /// By which way the learners came.
    pub fn transport(&self) -> &'static str {
        self.transport
    }

    /// Waits until those other than this one, and the one who passes a ball with it, are
    /// at work.
    pub fn others_at_work(&mut self, i: usize) {
        self.learners[i].lives = false;
        self.at_work();
        self.learners[i].lives = true;
    }

    /// Notes by which way each learner goes now.
    pub fn note_transports(&mut self) {
        self.at_work();
        let client = self.client();
        let members = client.members().unwrap();
        let mut ways: Vec<String> =
            members.iter().filter(|m| is_learner(m)).map(|m| m.transport.to_string()).collect();
        ways.sort();
        self.note(format!("then over {}", ways.join(", ")));
    }

    /// A client of the server that no fault is in the way of.
    pub fn client(&self) -> Client {
        let builder = Client::builder().addr(&self.server.addr).key(key());
        builder.transport(TransportChoice::Tcp).connect().unwrap()
    }

    fn eventually(&self, what: &str, so: impl FnMut() -> bool) {
        eventually_within(PATIENCE, what, so);
    }

    /// Waits until each learner that lives has added and had the lock a few times more,
    /// and each two of them have passed the ball. How long it took.
    pub fn at_work(&self) -> Duration {
        let begun = Instant::now();
        let lives = |i: usize| self.learners[i].lives;
        for (i, learner) in self.learners.iter().enumerate().filter(|(_, l)| l.lives) {
            for (count, name) in
                [(Count::Done, "adds"), (Count::Locks, "locks"), (Count::Passes, "passes the ball")]
            {
                if name == "passes the ball" && !lives(i ^ 1) {
                    continue;
                }
                let want = learner.journal.get(count) + 5;
                self.eventually(&format!("learner {i} {name} (again)"), || {
                    if let Some(what) = learner.journal.violations() {
                        panic!("learner {i}: {what}");
                    }
                    learner.journal.get(count) >= want
                });
            }
        }
        begun.elapsed()
    }

    /// SIGKILL for a learner. Waits until the one that names it is told, and says
    /// how long that took.
    pub fn kill_learner(&mut self, i: usize) {
        let at = now();
        self.learners[i].process.kill();
        self.learners[i].lives = false;
        self.told_of(i, at);
    }

    /// Waits until the one that passes a ball to this learner is told of its end.
    pub fn told_of(&mut self, i: usize, at: u64) {
        let other = &self.learners[i ^ 1].journal;
        self.eventually("the other one is told", || other.get(Count::PeersLost) > 0);
        let after = other.get(Count::LostAt).saturating_sub(at);
        self.note(format!("PeerLost after {:.2} s", after as f64 / 1e6));
    }

    /// Sends a signal to a learner.
    pub fn signal_learner(&self, i: usize, name: &str) {
        self.learners[i].process.signal(name);
    }

    /// Something else to be told.
    pub fn note(&mut self, what: String) {
        self.seen.push(what);
    }

    /// By which transport a learner was connected first, and why.
    pub fn transport_of(&self, i: usize) -> String {
        let file = self.server.dir.path().join(format!("learner-{i}.transport"));
        std::fs::read_to_string(file).unwrap()
    }

    /// Sum of a count over all learners.
    pub fn sum(&self, count: Count) -> u64 {
        self.learners.iter().map(|l| l.journal.get(count)).sum()
    }

    /// Ends it all and compares what the learners were told with what is there.
    /// What was seen, as a sentence.
    pub fn settle(mut self, went_on: Duration, usual: Duration) -> String {
        for learner in self.learners.iter_mut().filter(|l| l.lives) {
            learner.process.end();
        }
        for (i, learner) in self.learners.iter().enumerate() {
            if let Some(what) = learner.journal.violations() {
                panic!("learner {i}: {what}");
            }
        }
        let total = self.client().counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
        let total = total.load().unwrap() as u64;
        let (done, unknown) = (self.sum(Count::Done), self.sum(Count::Unknown));
        // What a killed one had under way may have happened.
        let cut: u64 = self
            .learners
            .iter()
            .filter(|l| !l.lives)
            .map(|l| &l.journal)
            .map(|j| j.get(Count::Begun) - j.get(Count::Done) - j.get(Count::Unknown))
            .sum();
        assert!(done <= total, "{done} were acknowledged, {total} happened: some are lost");
        assert!(
            total <= done + unknown + cut,
            "{total} happened, {done} were acknowledged, {unknown} unknown: some were doubled"
        );
        let mut olds = HashSet::new();
        for old in self.learners.iter().flat_map(|l| l.journal.olds()) {
            assert!(olds.insert(old), "two fetch_adds found {old}");
        }
        let slowest = self.learners.iter().map(|l| l.journal.get(Count::Slowest)).max().unwrap();
        let mut said = format!(
            "{done} adds, none lost, none doubled, {unknown} unknown; {} passes, {} locks; \
             slowest add {}; at work again in {} ({} without a fault)",
            self.sum(Count::Passes),
            self.sum(Count::Locks),
            seconds(Duration::from_micros(slowest)),
            seconds(went_on),
            seconds(usual),
        );
        for more in &self.seen {
            write!(said, "; {more}").unwrap();
        }
        said
    }
}

fn is_learner(member: &Member) -> bool {
    member.name.as_ref().is_some_and(|name| name.starts_with("learner"))
}

/// For people.
pub fn seconds(time: Duration) -> String {
    match time.as_secs_f64() {
        t if t < 0.1 => format!("{:.0} ms", t * 1e3),
        t => format!("{t:.1} s"),
    }
}

/// A command at the end of another one.
fn through(first: &[String], command: &Command) -> Command {
    let mut whole = Command::new(&first[0]);
    whole.args(&first[1..]).arg(command.get_program()).args(command.get_args());
    whole.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    whole.stdin(Stdio::null()).stdout(Stdio::null());
    whole
}

/// A line of the table, for people and, where FARCELL_FAULT_TABLE is set, for
/// `scripts/faults`.
pub fn row(fault: &str, over: &str, promised: &str, seen: &str) {
    println!("{fault} ({over}): {seen}");
    if std::env::var_os("FARCELL_FAULT_TABLE").is_some() {
        println!("ROW\t{fault}\t{over}\t{promised}\t{seen}");
    }
}
