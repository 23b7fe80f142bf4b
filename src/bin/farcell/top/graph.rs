//! Who waits for whom: chains, and cycles. Pure.
//!
//! A session is stuck if each of its waits needs someone who is stuck. That is
//! found by taking away, again and again, whoever can go on: one who waits for
//! nothing, or has a wait that those who can go on can end. What is left, is
//! stuck. Where it is not known who could end a wait, someone can: a permit can
//! be given back by anyone, and so can an event be set for which no peer was
//! named. So what is called a deadlock is one, as far as a server can see: it
//! knows sessions, and not which of a session's threads does what.

use farcell::{Held, HeldState, Kind, Member, Tally, Waiting, WaitingHow};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A session that did something this long after it began to wait has a thread
/// that does not wait.
const ALIVE: Duration = Duration::from_millis(50);

/// Longest chain that is drawn.
const LONGEST: usize = 16;

/// A wait, and who can end it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gate {
    /// What is waited for, such as `lock gate 0 0`.
    pub what: String,
    /// What binds it to those that it needs, such as `held by`.
    pub bond: &'static str,
    /// For how long.
    pub since: Option<Duration>,
    /// Those who can end it, as far as they are known.
    pub on: Vec<u32>,
    /// How many of them it takes.
    pub need: usize,
    /// Others could end it, too.
    pub open: bool,
    /// None but these can end it; otherwise they are those who are meant to.
    pub sure: bool,
}

/// A cycle of waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cycle {
    /// Each waits for the next, and the last for the first.
    pub seats: Vec<u32>,
    /// Nobody else could end it.
    pub sure: bool,
    /// All of it in words.
    pub text: String,
}

/// Who waits for whom.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// What each session waits for.
    pub gates: BTreeMap<u32, Vec<Gate>>,
    names: BTreeMap<u32, String>,
    stuck: BTreeSet<u32>,
}

/// What to call a session.
pub fn called(member: &Member) -> String {
    member.name.clone().unwrap_or_else(|| format!("session {}", member.seat))
}

impl Graph {
    /// From what a server tells.
    pub fn new(members: &[Member], waits: &[Waiting], held: &[Held], tallies: &[Tally]) -> Graph {
        let names = members.iter().map(|m| (m.seat, called(m))).collect();
        let mut graph = Graph { names, ..Graph::default() };
        let by_name: BTreeMap<&str, u32> =
            members.iter().filter_map(|m| Some((m.name.as_deref()?, m.seat))).collect();
        for wait in waits.iter().filter(|wait| graph.names.contains_key(&wait.seat)) {
            let gate = gate(wait, held, &by_name, &graph.names);
            graph.gates.entry(wait.seat).or_default().push(gate);
        }
        let alive = |seat: &u32| {
            let youngest = graph.gates[seat].iter().filter_map(|gate| gate.since).min();
            let idle = tallies.iter().find(|t| t.seat == *seat).and_then(|t| t.idle);
            matches!((youngest, idle), (Some(since), Some(idle)) if idle + ALIVE < since)
        };
        graph.stuck = graph.gates.keys().copied().filter(|seat| !alive(seat)).collect();
        graph.reduce();
        graph
    }

    fn reduce(&mut self) {
        loop {
            let stuck = &self.stuck;
            let goes_on = |gate: &Gate| {
                gate.open
                    || gate.on.iter().filter(|seat| !stuck.contains(seat)).count() >= gate.need
            };
            let free: Vec<u32> =
                stuck.iter().copied().filter(|seat| self.gates[seat].iter().any(goes_on)).collect();
            if free.is_empty() {
                return;
            }
            for seat in free {
                self.stuck.remove(&seat);
            }
        }
    }

    /// What a session is called.
    pub fn name(&self, seat: u32) -> String {
        self.names.get(&seat).cloned().unwrap_or_else(|| format!("session {seat}"))
    }

    /// Whether a session cannot go on.
    pub fn is_stuck(&self, seat: u32) -> bool {
        self.stuck.contains(&seat)
    }

    /// The wait of a stuck session that leads on, and to whom.
    fn onward(&self, seat: u32) -> Option<(&Gate, u32)> {
        self.gates.get(&seat)?.iter().find_map(|gate| {
            let next = gate.on.iter().copied().find(|next| self.stuck.contains(next))?;
            Some((gate, next))
        })
    }

    /// The cycles, one for each group of sessions that hold each other up.
    pub fn cycles(&self) -> Vec<Cycle> {
        let (mut seen, mut cycles) = (BTreeSet::new(), Vec::new());
        for &start in &self.stuck {
            let (mut path, mut seat) = (Vec::new(), start);
            while seen.insert(seat) {
                path.push(seat);
                match self.onward(seat) {
                    Some((_, next)) => seat = next,
                    None => break,
                }
            }
            if let Some(at) = path.iter().position(|&on_it| on_it == seat)
                && self.onward(path[path.len() - 1]).is_some_and(|(_, next)| next == seat)
            {
                cycles.push(self.cycle(path.split_off(at)));
            }
        }
        cycles
    }

    fn cycle(&self, seats: Vec<u32>) -> Cycle {
        let mut sure = true;
        let parts: Vec<String> = seats
            .iter()
            .filter_map(|&seat| {
                let (gate, next) = self.onward(seat)?;
                sure &= gate.sure;
                let (who, whom) = (self.name(seat), self.name(next));
                Some(format!("{who} waits for {}, {} {whom}", gate.what, gate.bond))
            })
            .collect();
        let unless = if sure { "" } else { " (unless someone else ends one of these waits)" };
        Cycle { seats, sure, text: format!("{}{unless}", parts.join("; ")) }
    }

    /// Each chain as a line, the longest wait first; cycles are not among them.
    pub fn chains(&self) -> Vec<String> {
        let waited_for: BTreeSet<u32> =
            self.gates.values().flatten().flat_map(|gate| gate.on.iter().copied()).collect();
        let mut lines = Vec::new();
        for (&seat, gates) in &self.gates {
            // Whoever is in the middle of another one's chain is drawn there.
            if waited_for.contains(&seat) {
                continue;
            }
            for gate in gates {
                let mut line = self.name(seat);
                self.follow(gate, &mut line, &mut vec![seat]);
                lines.push((gate.since, line));
            }
        }
        lines.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.cmp(&b.1)));
        lines.into_iter().map(|(_, line)| line).collect()
    }

    fn follow(&self, gate: &Gate, line: &mut String, path: &mut Vec<u32>) {
        line.push_str(&format!(" -> {}", gate.what));
        if let Some(since) = gate.since {
            line.push_str(&format!(" ({:.1} s)", since.as_secs_f64()));
        }
        let Some((&first, others)) = gate.on.split_first() else {
            return;
        };
        line.push_str(&format!(" -> {} {}", gate.bond, self.name(first)));
        for other in others.iter().take(3) {
            line.push_str(&format!(", {}", self.name(*other)));
        }
        if others.len() > 3 {
            line.push_str(&format!(" and {} more", others.len() - 3));
        }
        if path.contains(&first) || path.len() >= LONGEST {
            line.push_str(" ...");
            return;
        }
        path.push(first);
        if let Some(next) = self.gates.get(&first).and_then(|gates| gates.first()) {
            self.follow(next, line, path);
        }
    }
}

/// Who can end a wait.
fn gate(
    wait: &Waiting,
    held: &[Held],
    by_name: &BTreeMap<&str, u32>,
    living: &BTreeMap<u32, String>,
) -> Gate {
    let what = match wait.cells.first() {
        None => "a cell that is gone".to_owned(),
        Some(cell) => {
            let kind = if wait.how == WaitingHow::Queued && cell.kind == Kind::Semaphore {
                "permit of"
            } else {
                cell.kind.name()
            };
            let mut what = format!("{kind} {} {} {}", cell.name, cell.row, cell.col);
            if wait.cells_in_all > 1 {
                what.push_str(&format!(" and {} more", wait.cells_in_all - 1));
                what.push_str(if wait.need < wait.cells_in_all { ", any" } else { ", all" });
            }
            what
        }
    };
    let mut gate = Gate {
        what,
        bond: "",
        since: wait.since,
        on: Vec::new(),
        need: 1,
        open: true,
        sure: false,
    };
    let [cell] = &wait.cells[..] else {
        return name_peers(gate, wait, by_name);
    };
    let state = held
        .iter()
        .find(|held| (&held.name, held.row, held.col) == (&cell.name, cell.row, cell.col))
        .map(|held| &held.state);
    match state {
        Some(HeldState::Lock { holder: Some(holder), .. }) => {
            gate.bond = "held by";
            gate.on = vec![*holder];
            // One of its own threads has it, or one who has gone, whose locks
            // the server frees.
            gate.open = *holder == wait.seat || !living.contains_key(holder);
            gate.sure = true;
            gate
        }
        Some(HeldState::Barrier { needed, arrived, broken, parties, parties_in_all }) => {
            let missing = parties.iter().filter(|(seat, here)| !here && *seat != wait.seat);
            gate.bond = "which lacks";
            gate.on = missing.map(|(seat, _)| *seat).collect();
            gate.need = usize::try_from(needed.saturating_sub((*arrived).into())).unwrap_or(0);
            let known = *parties_in_all == parties.len() && gate.on.len() >= gate.need;
            gate.open = *broken || !known || gate.need == 0;
            gate.sure = true;
            gate
        }
        _ => name_peers(gate, wait, by_name),
    }
}

/// The peers that a wait names are those who are meant to end it: any of them.
fn name_peers(mut gate: Gate, wait: &Waiting, by_name: &BTreeMap<&str, u32>) -> Gate {
    let claims = wait.how == WaitingHow::Queued;
    if wait.peers.is_empty() || claims {
        return gate;
    }
    gate.bond = "of";
    gate.on = wait.peers.iter().filter_map(|peer| by_name.get(peer.as_str()).copied()).collect();
    let known = wait.peers_in_all == gate.on.len();
    gate.open = !known || gate.on.contains(&wait.seat);
    gate
}

#[cfg(test)]
#[path = "graph_tests.rs"]
pub mod tests;
