//! Learners that gossip: each begins with parameters of its own, and after some
//! rounds all have the mean of them.
//!
//! `cargo run --example gossip [LEARNERS [TOPOLOGY [ADDR]]]`; without an address
//! it starts a server of its own. The learners are threads here, each with a
//! client of its own; in processes on other machines they would look the same.

use farcell::gossip::{Buffer, Options, Topology};
use farcell::{Client, Error, Key, Server};
use std::process::ExitCode;
use std::thread;

/// Numbers of a message, 4 MB of them.
const LEN: usize = 1_000_000;

/// Rounds until the farthest learner is as near to the mean as an f32 can tell.
/// In a ring, the slowest of the topologies, each round leaves cos(pi / n) of
/// the distance.
fn rounds(learners: usize) -> usize {
    if learners < 3 {
        return 40;
    }
    let n = learners as f64;
    let left = (std::f64::consts::PI / n).cos();
    ((14.0 + n.ln()) / -left.ln()).ceil().max(40.0) as usize
}

fn learn(client: &Client, rank: usize, learners: usize, options: Options) -> Result<f32, Error> {
    let mut buffer = Buffer::new(client, "params", rank, learners, LEN, options)?;
    let mut parameters = vec![rank as f32; LEN];
    for _ in 0..rounds(learners) {
        // Here a learner would take a step of its own.
        buffer.write_message(&parameters)?;
        buffer.aggregate(&mut parameters)?;
    }
    let mean = (learners - 1) as f32 / 2.0;
    Ok(parameters.iter().map(|p| (p - mean).abs()).fold(0.0, f32::max))
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let learners = match arguments.first().map_or(Ok(4), |n| n.parse()) {
        Ok(n @ 1..=64) => n,
        _ => {
            eprintln!("LEARNERS is a number from 1 to 64");
            return ExitCode::from(2);
        }
    };
    let topology: Topology = match arguments.get(1).map_or(Ok(Topology::Exponential), |t| t.parse())
    {
        Ok(topology) => topology,
        Err(why) => {
            eprintln!("TOPOLOGY: {why}");
            return ExitCode::from(2);
        }
    };
    let (key, server) = match arguments.get(2) {
        Some(_) => (None, None),
        None => {
            let key = Key::new(*b"a key for this example").expect("16 bytes and more");
            let server = Server::builder(key.clone()).bind("127.0.0.1:0").start();
            (Some(key), Some(server.expect("a server")))
        }
    };
    let addr = arguments.get(2).cloned().or(server.as_ref().map(Server::address));
    let connect = || {
        let mut builder = Client::builder().addr(addr.clone().unwrap_or_default());
        if let Some(key) = &key {
            builder = builder.key(key.clone());
        }
        builder.connect()
    };
    let options = Options::new().topology(topology).rotate(true).wait_for_readers(true);
    let results: Vec<Result<f32, Error>> = thread::scope(|scope| {
        let learner = |rank| {
            let (options, connect) = (options.clone(), &connect);
            scope.spawn(move || learn(&connect()?, rank, learners, options))
        };
        let all: Vec<_> = (0..learners).map(learner).collect();
        all.into_iter().map(|l| l.join().expect("a learner that does not panic")).collect()
    });
    let mut right = true;
    for (rank, result) in results.iter().enumerate() {
        match result {
            Ok(distance) => println!("learner {rank}: {distance} from the mean at most"),
            Err(error) => eprintln!("learner {rank}: {error}"),
        }
        // f32 has 24 bits; the sums of many rounds lose a few.
        right &= result.as_ref().is_ok_and(|&d| d < 1e-4);
    }
    if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
