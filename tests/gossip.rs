//! Learners that gossip come to the mean of where they began, whatever the
//! topology, and one that dies neither hangs its readers nor silences its writers.
//!
//! In the two machines of `scripts/soft-roce pair`, `the_server` on a and
//! `the_other_machine` on b, learners of both gossip by RDMA and by TCP.

mod common;

use common::another::{Another, role};
use common::rdma::{LONG, device};
use common::{key, server};
use farcell::gossip::{Buffer, Mixed, Options, Sent, Topology};
use farcell::{Client, RdmaChoice, Server, TransportChoice};
use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

const ROLE: &str = "FARCELL_TEST_GOSSIP_ROLE";
/// Numbers of a message: 800 KB of them.
const LEN: usize = 100_000;

/// Where a learner begins.
fn start(rank: usize) -> Vec<f64> {
    (0..LEN).map(|i| (rank * 1000) as f64 + (i % 17) as f64 * (rank as f64 + 0.5)).collect()
}

/// The mean of where all begin.
fn mean(learners: usize) -> Vec<f64> {
    let all: Vec<_> = (0..learners).map(start).collect();
    (0..LEN).map(|i| all.iter().map(|v| v[i]).sum::<f64>() / learners as f64).collect()
}

/// How far it is from there, at most.
fn distance(parameters: &[f64], mean: &[f64]) -> f64 {
    parameters.iter().zip(mean).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn connect(addr: &str, choice: TransportChoice) -> Client {
    let builder = Client::builder().addr(addr).key(key()).transport(choice);
    builder.wait_for_server(LONG).connect().unwrap()
}

/// All learners make the same rounds, and so keep the mean.
fn together(client: &Client, rank: usize, learners: usize, options: Options, rounds: usize) -> f64 {
    let options = options.wait_for_readers(true).patience(LONG);
    let mut buffer = Buffer::new(client, "g", rank, learners, LEN, options).unwrap();
    let mut parameters = start(rank);
    for _ in 0..rounds {
        let sent = buffer.write_message(&parameters).unwrap();
        assert!(matches!(sent, Sent::Written(_)));
        let mixed = buffer.aggregate(&mut parameters).unwrap();
        assert!(matches!(mixed, Mixed::Done { ref lost, .. } if lost.is_empty()), "{mixed:?}");
    }
    distance(&parameters, &mean(learners))
}

/// What is mixed where it lies is what is mixed in a copy, of an odd number of
/// numbers, too, while the messages are replaced all the time.
#[test]
fn messages_are_mixed_where_they_are_and_as_in_a_copy() {
    let server = server().start().unwrap();
    for (choice, way) in [(TransportChoice::Shm, "shm"), (TransportChoice::Tcp, "tcp")] {
        let clients = [0, 1].map(|_| connect(&server.address(), choice));
        assert_eq!(clients[0].transport().name, way);
        let mut pair: Vec<Buffer<f32>> = clients
            .iter()
            .enumerate()
            .map(|(rank, c)| Buffer::new(c, way, rank, 2, 10_001, Options::new()).unwrap())
            .collect();
        let theirs: Vec<f32> = (0..10_001).map(|i| i as f32 * 0.25 - 7.0).collect();
        let ours: Vec<f32> = (0..10_001).map(|i| 3.0 - i as f32).collect();
        let mean: Vec<f32> = ours.iter().zip(&theirs).map(|(a, b)| (a + b) / 2.0).collect();
        for looks in [false, true] {
            let mut mixed = ours.clone();
            pair[1].write_message(&theirs).unwrap();
            // Otherwise it would wait for us.
            pair[0].write_message(&ours).unwrap();
            let done = match looks {
                false => pair[0].aggregate(&mut mixed),
                true => pair[0].aggregate_with(&mut mixed, |_, seen| assert_eq!(seen, theirs)),
            };
            assert_eq!(done.unwrap(), Mixed::Done { messages: 1, lost: vec![] });
            assert_eq!(mixed, mean, "{way}, looks: {looks}");
            pair[1].aggregate(&mut theirs.clone()).unwrap();
        }
    }
}

/// Messages that are replaced while they are mixed are mixed as one of them.
#[test]
fn a_message_that_is_replaced_meanwhile_is_mixed_again() {
    let server = server().start().unwrap();
    let client = connect(&server.address(), TransportChoice::Shm);
    let mut buffer = Buffer::new(&client, "g", 0, 2, LEN, Options::new()).unwrap();
    let slot = client.open_slots("g.messages").unwrap().at(1).unwrap();
    let written = client.open_events("g.written").unwrap().at(1, 0).unwrap();
    // Before it is mixed for the first time.
    slot.write(bytemuck::cast_slice(&vec![0.0; LEN])).unwrap();
    let over = std::sync::atomic::AtomicBool::new(false);
    let relaxed = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|s| {
        s.spawn(|| {
            for number in (1..).map(f64::from) {
                if over.load(relaxed) {
                    return;
                }
                slot.write(bytemuck::cast_slice(&vec![number; LEN])).unwrap();
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        // A panic here is to end the other thread too.
        let rounds = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..60 {
                let mut mixed = vec![0.0; LEN];
                buffer.write_message(&vec![0.0; LEN]).unwrap();
                written.set().unwrap();
                buffer.aggregate(&mut mixed).unwrap();
                client.open_events("g.read").unwrap().at(0, 1).unwrap().set().unwrap();
                assert!(mixed.iter().all(|&m| m == mixed[0]), "parts of two messages");
            }
        }));
        over.store(true, relaxed);
        if let Err(panic) = rounds {
            std::panic::resume_unwind(panic);
        }
    });
}

// ---- learners in processes of their own ------------------------------------------

struct Learner(Another);

impl Learner {
    fn start(role_of: &str, way: &str, addr: &str, rank: usize, learners: usize) -> Learner {
        let what = format!("{role_of} {addr} {rank} {learners} {way}");
        let mut command = role("role_of_a_learner", ROLE, what);
        Learner(Another::start(command.stdout(Stdio::piped())))
    }

    /// What it says behind `RESULT`.
    fn result(&mut self) -> f64 {
        let lines = BufReader::new(self.0.0.stdout.take().unwrap()).lines();
        let said: Vec<String> = lines.map_while(Result::ok).collect();
        let result = said.iter().find_map(|line| line.split_once("RESULT "));
        result.unwrap_or_else(|| panic!("{said:?}")).1.parse().unwrap()
    }
}

#[test]
#[ignore = "it is what the other tests start"]
fn role_of_a_learner() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let (rank, learners) = (words[2].parse().unwrap(), words[3].parse().unwrap());
    let client = connect(words[1], words[4].parse().unwrap());
    assert_eq!(client.transport().name, words[4]);
    let options = Options::new();
    let result = match words[0] {
        "ring" => together(&client, rank, learners, options, 120),
        "exponential" => {
            let options = options.topology(Topology::Exponential).rotate(true);
            together(&client, rank, learners, options, 40)
        }
        "bipartite" => {
            let options = options.topology(Topology::Bipartite).rotate(true);
            together(&client, rank, learners, options, 60)
        }
        "full" => {
            let options = options.topology(Topology::Full).peers(learners - 1);
            together(&client, rank, learners, options, 3)
        }
        // In its own time, with staleness, until it has mixed often enough.
        "free" | "victim" => {
            let options = options.staleness(3).patience(LONG);
            let mut buffer = Buffer::new(&client, "g", rank, learners, LEN, options).unwrap();
            let mut parameters = start(rank);
            let done = client.counters("done", 1, 1).unwrap().at(0, 0).unwrap();
            let (mut mixes, mut lost_in) = (0, 0);
            // Nobody leaves before all that live have mixed often enough.
            while mixes < 60 || done.load().unwrap() < 3 {
                if words[0] == "victim" && mixes == 5 {
                    // In the middle of everything.
                    std::process::abort();
                }
                buffer.write_message(&parameters).unwrap();
                if let Mixed::Done { lost, .. } = buffer.aggregate(&mut parameters).unwrap() {
                    mixes += 1;
                    if mixes == 60 {
                        done.fetch_add(1).unwrap();
                    }
                    lost_in += if mixes <= 60 { lost.len() } else { 0 };
                }
            }
            lost_in as f64
        }
        other => panic!("no role {other}"),
    };
    println!("RESULT {result}");
}

fn run(role: &str, way: &str, learners: usize) -> Vec<f64> {
    let server = server().start().unwrap();
    let addr = server.address();
    let mut all: Vec<_> =
        (0..learners).map(|rank| Learner::start(role, way, &addr, rank, learners)).collect();
    all.iter_mut().map(Learner::result).collect()
}

#[test]
fn learners_come_to_the_mean_of_where_they_began() {
    for way in ["shm", "tcp"] {
        for (role, learners) in [("ring", 4), ("exponential", 4), ("bipartite", 4), ("full", 3)] {
            let distances = run(role, way, learners);
            let furthest = distances.iter().copied().fold(0.0, f64::max);
            assert!(furthest < 1e-6, "{role} over {way}: {distances:?}");
        }
    }
}

#[test]
fn a_learner_that_dies_hangs_nobody() {
    for way in ["shm", "tcp"] {
        a_learner_dies(way);
    }
}

fn a_learner_dies(way: &str) {
    let server = server().lease(Duration::from_secs(1)).start().unwrap();
    let addr = server.address();
    let roles = ["free", "free", "victim", "free"];
    let mut all: Vec<_> =
        (0..4).map(|rank| Learner::start(roles[rank], way, &addr, rank, 4)).collect();
    let begun = Instant::now();
    let lost: Vec<f64> = [0, 1, 3].map(|rank: usize| all[rank].result()).into();
    assert!(begun.elapsed() < LONG, "by the lease, not by their patience");
    // Learner 3 reads from the victim; learner 1 writes to it, and goes on.
    assert_eq!((lost[0], lost[1]), (0.0, 0.0), "{lost:?}");
    assert!(lost[2] > 10.0, "{lost:?}");
}

#[test]
fn a_message_that_was_not_read_is_not_replaced_and_staleness_has_a_bound() {
    let server = server().start().unwrap();
    let clients = [0, 1].map(|_| common::client(&server).connect().unwrap());
    let options = || Options::new().staleness(2).patience(Duration::from_millis(200));
    let mut one = Buffer::new(&clients[0], "g", 0, 2, 3, options()).unwrap();
    let mut two = Buffer::new(&clients[1], "g", 1, 2, 3, options()).unwrap();
    let (mut a, mut b) = ([1.0f32, 2.0, 3.0], [3.0f32, 6.0, 9.0]);
    assert_eq!(one.write_message(&a).unwrap(), Sent::Written(1));
    assert_eq!(one.write_message(&[9.0; 3]).unwrap(), Sent::Skipped);
    // Two's message is not there yet, which is put up with twice.
    assert_eq!(one.aggregate(&mut a).unwrap(), Mixed::Stale(1));
    assert_eq!(one.aggregate(&mut a).unwrap(), Mixed::Stale(2));
    assert_eq!(a, [1.0, 2.0, 3.0]);
    // Then it waits, and goes on without.
    let mixed = one.aggregate(&mut a).unwrap();
    assert_eq!(mixed, Mixed::Done { messages: 0, lost: vec![1] });
    assert_eq!(a, [1.0, 2.0, 3.0], "the weight of the lost one is its own");
    assert_eq!(two.write_message(&b).unwrap(), Sent::Written(1));
    assert_eq!(two.aggregate(&mut b).unwrap(), Mixed::Done { messages: 1, lost: vec![] });
    assert_eq!(b, [2.0, 4.0, 6.0], "half of each, and not of what was skipped");
    assert_eq!(one.aggregate(&mut a).unwrap(), Mixed::Done { messages: 1, lost: vec![] });
    assert_eq!(a, [2.0, 4.0, 6.0]);
    assert_eq!(one.write_message(&a).unwrap(), Sent::Written(1));
    assert!(one.write_message(&[0.0; 4]).is_err());
    assert!(Buffer::<f32>::new(&clients[0], "h", 2, 2, 3, options()).is_err());
    assert!(Buffer::<f32>::new(&clients[0], "h", 0, 2, 3, options().peers(2)).is_err());
}

// ---- two machines -----------------------------------------------------------------

fn machine() -> String {
    let machine = std::env::var("SOFT_ROCE").unwrap_or_default();
    if machine != "a" && machine != "b" {
        println!("NOT TESTED: outside of a pair of scripts/soft-roce");
    }
    machine
}

/// Two learners by RDMA, one on each machine, and on b one more by TCP.
fn over_two_machines(choices: &[(usize, TransportChoice)]) {
    std::thread::scope(|scope| {
        for &(rank, choice) in choices {
            scope.spawn(move || {
                let client = connect("10.0.0.1:7117", choice);
                let options = Options::new().topology(Topology::Exponential).rotate(true);
                let distance = together(&client, rank, 3, options, 60);
                println!("learner {rank} over {}: {distance}", client.transport().name);
                assert!(distance < 1e-6);
                assert_eq!(client.transport().name == "tcp", choice == TransportChoice::Tcp);
                let done = client.counters("done", 1, 1).unwrap().at(0, 0).unwrap();
                done.fetch_add(1).unwrap();
                let all = farcell::Comparison::Ge;
                assert!(done.wait_until(all, 3, Some(LONG), None).unwrap().is_some());
            });
        }
    });
}

#[test]
fn the_server() {
    if machine() != "a" || !device() {
        return;
    }
    let server =
        Server::builder(key()).bind("0.0.0.0:7117").rdma(RdmaChoice::Auto).start().unwrap();
    over_two_machines(&[(0, TransportChoice::Rdma)]);
    // Those on b take their leave.
    common::rdma::eventually("the others have gone", || server.sessions() == 0);
}

#[test]
fn the_other_machine() {
    if machine() != "b" || !device() {
        return;
    }
    over_two_machines(&[(1, TransportChoice::Rdma), (2, TransportChoice::Tcp)]);
}
