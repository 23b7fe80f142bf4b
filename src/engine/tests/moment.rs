//! Moments, with others that change cells between any two looks of the server.

use crate::catalog::{Form, Kind};
use crate::cell::WAITING;
use crate::engine::{Actor, Engine, Moment};
use crate::layout::Shape;
use crate::segment::Segment;
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

const PAIRS: u32 = 3;

/// Cells that someone else changes before every so many-th look: of each pair the
/// first one, then the second one.
struct Moving {
    segment: Segment,
    /// How often, of 256 looks.
    often: u64,
    seed: Cell<u64>,
    places: Cell<Option<(u32, u32)>>,
    halves: [Cell<bool>; PAIRS as usize],
}

impl Moving {
    fn someone_changes_a_cell(&self) {
        let mut seed = self.seed.get();
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        self.seed.set(seed);
        let Some((first, second)) = self.places.get().filter(|_| seed % 256 < self.often) else {
            return;
        };
        let pair = (seed >> 20) as u32 % PAIRS;
        let half = &self.halves[pair as usize];
        let place = if half.get() { second } else { first } + pair;
        half.set(!half.get());
        self.segment.fetch_add(place, 2);
        if seed >> 40 & 1 == 0 {
            // Who waits is of no account.
            let word = self.segment.load(place);
            let _ = self.segment.compare_exchange(place, word, word ^ WAITING);
        }
    }
}

impl Actor for Moving {
    fn load(&self, place: u32) -> u64 {
        self.someone_changes_a_cell();
        self.segment.load(place)
    }

    fn compare_exchange(&self, place: u32, current: u64, new: u64) -> Result<u64, u64> {
        self.segment.compare_exchange(place, current, new)
    }

    fn fetch_add(&self, place: u32, delta: u64) -> u64 {
        self.segment.fetch_add(place, delta)
    }
}

/// Takes a moment while cells change so often; the values of all pairs, if it is one.
fn values(often: u64, seed: u64, first_is_first: bool) -> Option<Vec<(u64, u64)>> {
    let segment = Segment::anonymous(512).unwrap();
    let (places, halves) = (Cell::new(None), Default::default());
    let actor = Moving { segment, often, seed: Cell::new(seed | 1), places, halves };
    let engine = Engine::new(actor, 512, Duration::from_secs(1));
    let form = |kind, cols| Form { kind, shape: Shape { rows: 1, cols }, param: 0 };
    let names = if first_is_first { ["a", "c"] } else { ["c", "a"] };
    let places = names.map(|name| engine.open(name, form(Kind::Counter, PAIRS)).unwrap().0.base);
    engine.open("b", form(Kind::Event, 100)).unwrap();
    engine.actor.places.set(Some((places[0], places[1])));
    let mut moment = Moment::default();
    engine.moment(&mut moment, |moment| assert_eq!(moment.arrays.len(), 3)).unwrap();
    let begin: BTreeMap<&str, usize> =
        moment.arrays.iter().map(|(entry, at)| (&*entry.name, *at)).collect();
    let value = |name: &str, pair: u32| moment.words[begin[name] + pair as usize] >> 1;
    let all = (0..PAIRS).map(|pair| (value(names[0], pair), value(names[1], pair)));
    moment.at_once.then(|| all.collect())
}

proptest! {
    #[test]
    fn no_moment_has_an_effect_without_its_cause(
        often in 1u64..100,
        seed: u64,
        first_is_first: bool,
    ) {
        for (a, b) in values(often, seed, first_is_first).into_iter().flatten() {
            prop_assert!(a >= b && a - b <= 1, "{} {}", a, b);
        }
    }
}

#[test]
fn a_moment_is_found_where_there_is_one_and_else_that_is_said() {
    for seed in 1..20 {
        assert!(values(0, seed, true).is_some());
        // As often as a client that changes a cell every fourth look.
        assert!(values(64, seed, true).is_some());
        assert!(values(256, seed, true).is_none(), "each look finds another one changed");
    }
}
