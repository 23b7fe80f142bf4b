//! Seeded simulation: many clients with the engine, over a network that is slow,
//! breaks and falls apart, in a time of its own. All that happens follows from one
//! number, the seed.
//!
//! A run is a list of steps. What a step does depends on the seed and its number
//! alone, so steps can be left out: that is how a run that fails becomes a short
//! one, and how it is written down. The command that repeats it is printed.
//!
//! `FARCELL_SIMULATE=SECONDS` runs for so long instead of a moment,
//! `FARCELL_SIMULATE_SEED=SEED` begins with another seed, and
//! `FARCELL_SIMULATE_RUN=SEED:STEPS` repeats one run.

mod books;
mod client;
mod faults;
mod network;
mod random;
mod world;

use faults::Fault;
use random::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use world::World;

/// Steps of a run.
const STEPS: u32 = 400;

/// A seed, and the numbers of the steps.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    seed: u64,
    steps: Vec<u32>,
}

impl Run {
    fn whole(seed: u64) -> Run {
        Run { seed, steps: (0..STEPS).collect() }
    }

    /// `SEED:` and the steps, as ranges.
    fn written(&self) -> String {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for &step in &self.steps {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == step => *last = step,
                _ => ranges.push((step, step)),
            }
        }
        let ranges =
            ranges.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") });
        format!("{}:{}", self.seed, ranges.collect::<Vec<_>>().join(","))
    }

    fn read(text: &str) -> Option<Run> {
        let (seed, ranges) = text.split_once(':')?;
        let mut steps = Vec::new();
        for range in ranges.split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            steps.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
        }
        Some(Run { seed: seed.parse().ok()?, steps })
    }

    fn play(&self, fault: Fault) {
        let mut world = World::new(fault);
        for &step in &self.steps {
            world.step(Random::of(self.seed, step));
        }
        world.finish(Random::of(self.seed, u32::MAX));
    }

    /// What breaks, if something does.
    fn breaks(&self, fault: Fault) -> Option<String> {
        let broken = catch_unwind(AssertUnwindSafe(|| self.play(fault))).err()?;
        let text = broken.downcast_ref::<String>().cloned();
        Some(
            text.or_else(|| broken.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                .unwrap_or_default(),
        )
    }

    /// The same in as few steps as can be found in this time: pieces are left out
    /// as long as something still breaks.
    fn shrink(mut self, fault: Fault, time: Duration) -> Run {
        let begun = Instant::now();
        let mut piece = self.steps.len().div_ceil(2);
        while piece > 0 {
            let mut from = 0;
            while from < self.steps.len() && begun.elapsed() < time {
                let mut less = self.clone();
                less.steps.drain(from..self.steps.len().min(from + piece));
                if less.breaks(fault).is_some() {
                    self = less;
                } else {
                    from += piece;
                }
            }
            piece /= 2;
        }
        self
    }
}

/// Plays runs with one seed after the other; how many, and the first that breaks.
fn search(first: u64, fault: Fault, time: Duration) -> (u64, Option<(Run, String)>) {
    let begun = Instant::now();
    let mut runs = 0;
    while begun.elapsed() < time {
        let run = Run::whole(first.wrapping_add(runs));
        runs += 1;
        if let Some(why) = run.breaks(fault) {
            return (runs, Some((run, why)));
        }
    }
    (runs, None)
}

fn number_from(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn whatever_the_network_does_the_engine_keeps_its_promises() {
    let seconds = number_from("FARCELL_SIMULATE").unwrap_or(6);
    let first = number_from("FARCELL_SIMULATE_SEED").unwrap_or(1);
    let (runs, broken) = search(first, Fault::None, Duration::from_secs(seconds));
    println!("{runs} runs of {STEPS} steps, seeds from {first} on");
    if let Some((run, why)) = broken {
        let short = run.shrink(Fault::None, Duration::from_secs(60));
        panic!(
            "{why}\nto see it again, in {} steps: FARCELL_SIMULATE_RUN={} cargo test --lib simulation::one_run",
            short.steps.len(),
            short.written()
        );
    }
}

#[test]
fn one_run_as_it_was_written_down() {
    let Ok(text) = std::env::var("FARCELL_SIMULATE_RUN") else {
        return Run::whole(7).play(Fault::None);
    };
    Run::read(&text).expect("SEED:STEPS, as it was printed").play(Fault::None);
}

#[test]
fn every_planted_fault_is_found_and_made_short() {
    for fault in Fault::ALL {
        let (runs, broken) = search(1, fault, Duration::from_secs(20));
        let (run, why) = broken.unwrap_or_else(|| panic!("{fault:?} was not found in {runs} runs"));
        let short = run.shrink(fault, Duration::from_millis(400));
        assert!(short.breaks(fault).is_some(), "the short run does not break");
        assert_eq!(Run::read(&short.written()), Some(short.clone()));
        let line = why.lines().next().unwrap_or_default();
        println!("{fault:?}: run {runs}, {} steps: {line}", short.steps.len());
    }
}
