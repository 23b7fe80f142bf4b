//! One round: a server, clients over all transports in processes of their own, what
//! happens to them meanwhile, and the verdict.

use crate::checker::Call;
use crate::common::another::{Another, role};
use crate::common::process::Process;
use crate::common::proxy::Proxy;
use crate::common::{eventually_within, key, random, rdma};
use crate::journal::{self, Journal, Kind, now};
use crate::judge::{Faults, Seen, histories, judge};
use crate::spec::{Op, Ret};
use crate::workload::{Plan, work};
use farcell::{Client, TransportChoice};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What a process is to be: its number, transport, server, folder and plan.
const ROLE: &str = "FARCELL_TEST_HISTORIES";
const THREADS: usize = 2;

/// What happens to the processes of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Menu {
    /// Nothing.
    Quiet,
    /// Connections are cut, clients killed, clients and the server stopped for less
    /// than a lease.
    Clients,
    /// As that, and the server is killed and comes back with its state.
    Server,
    /// As the first, and clients are stopped for longer than their lease.
    Lapses,
}

/// The seed: that of `FARCELL_SEED`, or one of our own.
pub fn seed() -> u64 {
    let own = || now() ^ u64::from(std::process::id()) << 32;
    std::env::var("FARCELL_SEED").map_or_else(|_| own(), |text| text.parse().expect("FARCELL_SEED"))
}

/// How long to go on: as `FARCELL_TEST_SECONDS` says, or as is usual.
pub fn seconds(usual: u64) -> u64 {
    let set = std::env::var("FARCELL_TEST_SECONDS");
    set.map_or(usual, |text| text.parse().expect("FARCELL_TEST_SECONDS"))
}

/// In a process that a round has started: a client. Otherwise nothing.
#[test]
#[ignore = "only a process of a round"]
fn role_of_a_client() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let process: usize = words[0].parse().unwrap();
    let plan = Plan::from_words(words[4]);
    let builder = Client::builder().addr(words[2]).key(key()).transport(words[1].parse().unwrap());
    let client = builder.wait_for_server(Duration::from_secs(20)).connect().unwrap();
    std::thread::scope(|s| {
        for thread in 0..THREADS {
            let journal = Journal::create(Path::new(words[3]), process, thread);
            let (client, plan) = (&client, &plan);
            s.spawn(move || work(plan, client, journal, process, thread));
        }
    });
    println!("{} at the end", client.transport().name);
}

/// A client process, and what it is.
struct Worker {
    number: usize,
    way: &'static str,
    process: Another,
}

/// Who takes part: a transport, and whether its connections go through the proxy.
fn cast(with_rdma: bool) -> Vec<(&'static str, bool)> {
    let mut cast = vec![("tcp", true), ("shm", true), ("tcp", false), ("shm", false)];
    if with_rdma {
        cast.splice(2..4, [("rdma", true), ("rdma", false)]);
    }
    cast
}

/// One round.
pub struct Round {
    plan: Plan,
    menu: Menu,
    server: Process,
    /// Where the state of the server is.
    _state: tempfile::TempDir,
    folder: PathBuf,
    proxy: Proxy,
    workers: Vec<Worker>,
    ways: Vec<&'static str>,
    cast: Vec<(&'static str, bool)>,
    faults: Faults,
    seed: u64,
}

impl Round {
    /// Starts all that takes part.
    pub fn start(seed: u64, seconds: u64, menu: Menu) -> Round {
        let slow = rdma::device();
        // What the emulated machine needs to start processes, and for a call.
        let (ahead, run) = if slow { (8_000, 60) } else { (400, 5) };
        let runs = (seconds * 1000 / run).max(1) as usize;
        let state = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = state.path().join("state");
        let rdma = if slow { "auto" } else { "off" };
        let lease = if menu == Menu::Lapses { "0.6" } else { "2" };
        let mut arguments = vec!["--rdma", rdma, "--lease", lease];
        if menu == Menu::Server {
            arguments.extend(["--state", path.to_str().unwrap()]);
        }
        let server = Process::start(&arguments);
        let folder = server.dir.path().join("journals");
        std::fs::create_dir(&folder).unwrap();
        let proxy = Proxy::start(server.addr.parse().unwrap(), Vec::new());
        let plan = Plan {
            seed,
            begin: now() + ahead * 1_000_000,
            run: run * 1_000_000,
            runs,
            calls: 9,
            what: 0,
            timeouts_tell: menu == Menu::Quiet,
        };
        let mut round = Round {
            plan,
            menu,
            server,
            _state: state,
            folder,
            proxy,
            workers: Vec::new(),
            ways: Vec::new(),
            cast: cast(slow),
            faults: Faults::default(),
            seed,
        };
        drop(plan.arrays(&round.watcher()));
        for place in 0..round.cast.len() {
            round.begin(place);
        }
        round
    }

    fn watcher(&self) -> Client {
        let builder = Client::builder().addr(&self.server.addr).key(key());
        builder.transport(TransportChoice::Tcp).connect().unwrap()
    }

    /// Starts the client of this place in the cast.
    fn begin(&mut self, place: usize) {
        let (way, proxied) = self.cast[place];
        let number = self.ways.len();
        self.ways.push(way);
        let addr = if proxied { self.proxy.addr() } else { self.server.addr.clone() };
        let what =
            format!("{number} {way} {addr} {} {}", self.folder.display(), self.plan.to_words());
        let process = Another::start(&mut role("round::role_of_a_client", ROLE, what));
        let worker = Worker { number, way, process };
        if place < self.workers.len() {
            self.workers[place] = worker;
        } else {
            self.workers.push(worker);
        }
    }

    fn sleep(&mut self, least: u64, most: u64) {
        let time = least + random(&mut self.seed, most - least);
        std::thread::sleep(Duration::from_millis(time));
    }

    /// Something happens to someone.
    fn fault(&mut self) {
        let place = random(&mut self.seed, self.workers.len() as u64) as usize;
        match (random(&mut self.seed, 6), self.menu) {
            (0, _) => {
                self.faults.killed.push((self.workers[place].number, now()));
                self.workers[place].process.kill();
                self.begin(place);
            }
            (1, Menu::Lapses) => {
                let (number, from) = (self.workers[place].number, now());
                self.workers[place].process.signal("STOP");
                self.sleep(1000, 1400);
                self.workers[place].process.signal("CONT");
                // What it had begun before, it may come back with for a while.
                self.faults.stopped.push((number, from, now() + 1_000_000_000));
            }
            (1, _) => {
                let from = now();
                self.workers[place].process.signal("STOP");
                self.sleep(1, 150);
                self.workers[place].process.signal("CONT");
                let what = format!("client #{} was stopped", self.workers[place].number);
                self.faults.others.push((what, from, now()));
            }
            (2, _) => {
                let from = now();
                self.server.signal("STOP");
                self.sleep(1, 150);
                self.server.signal("CONT");
                self.faults.others.push(("the server was stopped".to_owned(), from, now()));
            }
            (3 | 4, Menu::Server) => {
                let from = now();
                self.server.kill();
                self.sleep(0, 30);
                self.server.start_again();
                self.faults.server_away.push((from, now()));
            }
            _ => {
                let from = now();
                self.proxy.cut_all();
                self.faults.others.push(("connections were cut".to_owned(), from, now()));
            }
        }
    }

    /// Lets things happen until the plan is over; the verdict.
    pub fn verdict(mut self) -> (Seen, Faults) {
        while now() < self.plan.end() {
            // There a server alone needs seconds to be back.
            if rdma::device() && self.menu == Menu::Server {
                self.sleep(1500, 2500);
            }
            self.sleep(20, 250);
            if self.menu != Menu::Quiet {
                self.fault();
            }
        }
        for worker in &mut self.workers {
            let mut status = None;
            eventually_within(Duration::from_secs(60), "a client comes to its end", || {
                status = worker.process.0.try_wait().unwrap();
                status.is_some()
            });
            let Worker { number, way, .. } = worker;
            assert!(status.unwrap().success(), "client {number} ({way}) failed, see above");
        }
        let entries = journal::read(&self.folder);
        let ways = &self.ways;
        let mut all = histories(&entries, &self.faults, &|n| format!("{}#{n}", ways[n]));
        let (begin, events, counters) = {
            let watcher = self.watcher();
            let (events, counters, _) = self.plan.arrays(&watcher);
            (now(), events.all().transitions().unwrap(), counters.all().snapshot().unwrap())
        };
        // What is there in the end is the last thing in each history.
        for ((kind, run), calls) in &mut all {
            let (op, value) = match kind {
                Kind::Event => (Op::Transitions, events[*run] as i64),
                Kind::Counter => (Op::Load, counters[*run]),
                Kind::Lock => continue,
            };
            let (who, ret) = ("in the end".to_owned(), Some(Ret::Value(value)));
            let number = u32::MAX;
            calls.push(Call { number, who, op, ret, begin, end: now(), happened: true });
        }
        (judge(&all), self.faults)
    }
}
