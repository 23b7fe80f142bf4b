//! What is shown, and what has changed since it was looked at before. Pure: the
//! time is given.

use super::graph::{Cycle, Graph};
use farcell::{ArrayInfo, Held, HeldState, Kind, Member, ServerInfo, Tally, Waiting};
use std::collections::BTreeMap;
use std::time::Duration;

/// All that one look brings.
#[derive(Clone, Debug)]
pub struct Scene {
    pub info: ServerInfo,
    pub arrays: Vec<ArrayInfo>,
    pub members: Vec<Member>,
    pub waits: Vec<Waiting>,
    pub held: Vec<Held>,
    pub tallies: Vec<Tally>,
    /// The cells of the array that is shown.
    pub cells: Option<Cells>,
    /// The session of the one who looks.
    pub own: u32,
}

/// Some of the cells of an array, from its first row and column on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cells {
    pub name: String,
    pub kind: Kind,
    pub rows: usize,
    pub cols: usize,
    /// Row by row: of events their transitions, of counters their values, of locks
    /// the holder's seat, of barriers who has arrived, of semaphores the permits.
    pub numbers: Vec<i64>,
    /// Who waits or queues there.
    pub waiters: Vec<usize>,
}

impl Cells {
    /// Locks, barriers and semaphores, of which only those are told that someone
    /// holds or wants.
    pub fn of_held(array: &ArrayInfo, rows: usize, cols: usize, held: &[Held]) -> Cells {
        let idle = match array.kind {
            // All permits are there.
            Kind::Semaphore => (array.param >> 32) as i64,
            _ => 0,
        };
        let (mut numbers, mut waiters) = (vec![idle; rows * cols], vec![0; rows * cols]);
        let here = held.iter().filter(|h| h.name == array.name && h.row < rows && h.col < cols);
        for held in here {
            let at = held.row * cols + held.col;
            waiters[at] = held.queued;
            numbers[at] = match &held.state {
                HeldState::Lock { holder, .. } => holder.unwrap_or(0).into(),
                HeldState::Barrier { arrived, parties, .. } => {
                    waiters[at] = parties.iter().filter(|(_, here)| *here).count();
                    (*arrived).into()
                }
                HeldState::Semaphore { free, .. } => *free as i64,
            };
        }
        let (name, kind) = (array.name.clone(), array.kind);
        Cells { name, kind, rows, cols, numbers, waiters }
    }

    /// Whether a cell is set, held, or not 0.
    pub fn is_on(&self, at: usize) -> bool {
        match self.kind {
            Kind::Event => self.numbers[at] & 1 == 1,
            _ => self.numbers[at] != 0,
        }
    }

    fn is_like(&self, other: &Cells) -> bool {
        (&self.name, self.kind, self.rows, self.cols)
            == (&other.name, other.kind, other.rows, other.cols)
    }
}

/// A session, as it is shown.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub seat: u32,
    pub name: String,
    pub transport: &'static str,
    /// Requests and waits in a second, since the look before.
    pub rate: Option<f64>,
    pub last_heard: Duration,
    pub holds: String,
    pub waits: String,
    pub stuck: bool,
    /// Why it does not have a better transport.
    pub fallback: Option<String>,
}

/// What is known so far.
#[derive(Default)]
pub struct Model {
    scene: Option<Scene>,
    graph: Graph,
    cycles: Vec<Cycle>,
    rates: BTreeMap<u32, f64>,
    /// When each cell that is shown was seen to change.
    changed: Vec<Option<Duration>>,
    looked: Duration,
    /// What is wrong at the moment.
    pub trouble: Option<String>,
}

impl Model {
    /// Takes in what was seen at this time.
    pub fn show(&mut self, scene: Scene, now: Duration) {
        let passed = now.saturating_sub(self.looked).as_secs_f64();
        let asked = |tally: &Tally| tally.requests + tally.waits + tally.rings;
        self.rates.clear();
        if let Some(before) = self.scene.as_ref().filter(|_| passed > 0.0) {
            for tally in &scene.tallies {
                let known = before.tallies.iter().find(|known| known.seat == tally.seat);
                if let Some(known) = known {
                    let more = asked(tally).saturating_sub(asked(known));
                    self.rates.insert(tally.seat, more as f64 / passed);
                }
            }
        }
        let before = self.scene.as_ref().and_then(|scene| scene.cells.as_ref());
        match (before, &scene.cells) {
            (Some(before), Some(cells)) if before.is_like(cells) => {
                for (at, changed) in self.changed.iter_mut().enumerate() {
                    if before.numbers[at] != cells.numbers[at] {
                        *changed = Some(now);
                    }
                }
            }
            (_, cells) => {
                self.changed = vec![None; cells.as_ref().map_or(0, |cells| cells.numbers.len())];
            }
        }
        self.graph = Graph::new(&scene.members, &scene.waits, &scene.held, &scene.tallies);
        self.cycles = self.graph.cycles();
        self.looked = now;
        self.scene = Some(scene);
        self.trouble = None;
    }

    /// What was seen last.
    pub fn scene(&self) -> Option<&Scene> {
        self.scene.as_ref()
    }

    /// The cycles of waits.
    pub fn cycles(&self) -> &[Cycle] {
        &self.cycles
    }

    /// How long ago this cell was seen to change.
    pub fn age(&self, at: usize, now: Duration) -> Option<Duration> {
        Some(now.saturating_sub((*self.changed.get(at)?)?))
    }

    /// The lines about who waits: cycles first.
    pub fn waits(&self) -> Vec<(String, bool)> {
        let cycles = self.cycles.iter().map(|cycle| (format!("DEADLOCK: {}", cycle.text), true));
        cycles.chain(self.graph.chains().into_iter().map(|line| (line, false))).collect()
    }

    /// The sessions, by seat.
    pub fn rows(&self) -> Vec<Row> {
        let Some(scene) = &self.scene else {
            return Vec::new();
        };
        scene.members.iter().map(|member| self.row(scene, member)).collect()
    }

    fn row(&self, scene: &Scene, member: &Member) -> Row {
        use farcell::HoldingKind::{Lock, Party};
        let held: Vec<String> = member
            .holds
            .iter()
            .filter_map(|holding| {
                let what = match holding.what {
                    Lock { .. } => "lock",
                    Party => "party",
                    _ => return None,
                };
                Some(format!("{what} {} {} {}", holding.name, holding.row, holding.col))
            })
            .collect();
        let gates = self.graph.gates.get(&member.seat).map_or(&[][..], Vec::as_slice);
        let waits: Vec<&str> = gates.iter().map(|gate| gate.what.as_str()).collect();
        let mut name = self.graph.name(member.seat);
        if member.seat == scene.own {
            name.push_str(" (this view)");
        }
        let tally = scene.tallies.iter().find(|tally| tally.seat == member.seat);
        let fallback = tally.and_then(|tally| {
            // Where rdma was not had, that is the better news than the rest.
            let wanted = |name| tally.fallbacks.iter().find(|f| f.wanted == name);
            let fell = wanted("rdma").or_else(|| wanted("shm"))?;
            Some(format!("no {}: {}", fell.wanted, fell.text))
        });
        Row {
            seat: member.seat,
            name,
            transport: member.transport,
            rate: self.rates.get(&member.seat).copied(),
            last_heard: member.last_heard,
            holds: held.join(", "),
            waits: waits.join(", "),
            stuck: self.graph.is_stuck(member.seat),
            fallback,
        }
    }
}

/// A time in few characters.
pub fn short(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        s @ 10..600 => format!("{s} s"),
        s @ 600..36_000 => format!("{} min", s / 60),
        s => format!("{} h", s / 3600),
    }
}

#[cfg(test)]
#[path = "scene_tests.rs"]
pub mod tests;
