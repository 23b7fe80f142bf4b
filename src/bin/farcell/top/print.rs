//! One look as text and as JSON, for scripts.

use super::scene::{Model, Scene, short};
use crate::failure::Failure;
use crate::output::{Output, table};
use farcell::{ArrayInfo, WaitingHow};
use serde::Serialize;

#[derive(Serialize)]
struct Listing<'a> {
    domain: String,
    sessions: usize,
    parked_waits: usize,
    cells: u64,
    cells_free: u64,
    arrays: Vec<Array<'a>>,
    members: Vec<Member<'a>>,
    waits: Vec<Wait<'a>>,
    chains: Vec<String>,
    deadlocks: Vec<Deadlock<'a>>,
}

#[derive(Serialize)]
struct Array<'a> {
    name: &'a str,
    kind: &'a str,
    rows: usize,
    cols: usize,
}

#[derive(Serialize)]
struct Member<'a> {
    name: Option<&'a str>,
    seat: u32,
    transport: &'a str,
    operations: u64,
    requests: u64,
    waits: u64,
    idle_s: Option<f64>,
    holds: String,
    waits_for: String,
    stuck: bool,
    fallbacks: Vec<Fallback<'a>>,
}

#[derive(Serialize)]
struct Fallback<'a> {
    wanted: &'a str,
    reason: &'a str,
    text: &'a str,
}

#[derive(Serialize)]
struct Wait<'a> {
    seat: u32,
    how: &'a str,
    since_s: Option<f64>,
    need: usize,
    cells: Vec<Cell<'a>>,
    cells_in_all: usize,
    peers: &'a [String],
    peers_in_all: usize,
}

#[derive(Serialize)]
struct Cell<'a> {
    name: &'a str,
    kind: &'a str,
    row: usize,
    col: usize,
    comparison: Option<&'static str>,
    value: Option<i64>,
}

#[derive(Serialize)]
struct Deadlock<'a> {
    seats: &'a [u32],
    sure: bool,
    text: &'a str,
}

fn sign(comparison: farcell::Comparison) -> &'static str {
    use farcell::Comparison::{Eq, Ge, Gt, Le, Lt, Ne};
    match comparison {
        Ne => "!=",
        Eq => "==",
        Gt => ">",
        Ge => ">=",
        Lt => "<",
        Le => "<=",
    }
}

/// Prints what was seen.
pub fn print(model: &Model, scene: &Scene, out: &Output) -> Result<bool, Failure> {
    if out.json { out.value(&listing(model, scene)) } else { out.text(text(model, scene)) }
}

fn listing<'a>(model: &'a Model, scene: &'a Scene) -> Listing<'a> {
    let rows = model.rows();
    let member = |(member, row): (&'a farcell::Member, super::scene::Row)| {
        let tally = scene.tallies.iter().find(|tally| tally.seat == member.seat);
        let fallbacks = tally.map_or(&[][..], |tally| &tally.fallbacks);
        let told = |f: &'a farcell::Fallback| Fallback {
            wanted: f.wanted,
            reason: f.reason,
            text: &f.text,
        };
        Member {
            name: member.name.as_deref(),
            seat: member.seat,
            transport: member.transport,
            operations: tally.map_or(0, |tally| tally.operations),
            requests: tally.map_or(0, |tally| tally.requests),
            waits: tally.map_or(0, |tally| tally.waits),
            idle_s: tally.and_then(|tally| tally.idle).map(|idle| idle.as_secs_f64()),
            holds: row.holds,
            waits_for: row.waits,
            stuck: row.stuck,
            fallbacks: fallbacks.iter().map(told).collect(),
        }
    };
    let wait = |wait: &'a farcell::Waiting| Wait {
        seat: wait.seat,
        how: match wait.how {
            WaitingHow::Parked => "parked",
            WaitingHow::Queued => "queued",
            WaitingHow::Asleep => "asleep",
        },
        since_s: wait.since.map(|since| since.as_secs_f64()),
        need: wait.need,
        cells: wait
            .cells
            .iter()
            .map(|cell| Cell {
                name: &cell.name,
                kind: cell.kind.name(),
                row: cell.row,
                col: cell.col,
                comparison: cell.until.map(|(comparison, _)| sign(comparison)),
                value: cell.until.map(|(_, value)| value),
            })
            .collect(),
        cells_in_all: wait.cells_in_all,
        peers: &wait.peers,
        peers_in_all: wait.peers_in_all,
    };
    let array = |array: &'a ArrayInfo| Array {
        name: &array.name,
        kind: array.kind.name(),
        rows: array.rows,
        cols: array.cols,
    };
    let cycles = model.cycles().iter();
    Listing {
        domain: scene.info.domain.to_string(),
        sessions: scene.info.sessions,
        parked_waits: scene.info.parked_waits,
        cells: scene.info.capacity,
        cells_free: scene.info.free,
        arrays: scene.arrays.iter().map(array).collect(),
        members: scene.members.iter().zip(rows).map(member).collect(),
        waits: scene.waits.iter().map(wait).collect(),
        chains: model.waits().into_iter().filter(|(_, cycle)| !cycle).map(|(l, _)| l).collect(),
        deadlocks: cycles
            .map(|c| Deadlock { seats: &c.seats, sure: c.sure, text: &c.text })
            .collect(),
    }
}

fn text(model: &Model, scene: &Scene) -> String {
    let info = &scene.info;
    let mut text = format!(
        "{} domain, {} sessions, {} waits parked, {} of {} cells free\n\n",
        info.domain, info.sessions, info.parked_waits, info.free, info.capacity
    );
    let head = ["NAME", "SEAT", "WAY", "HEARD", "HOLDS", "WAITS FOR"].map(str::to_owned).to_vec();
    let rows = model.rows().into_iter().map(|row| {
        let heard = short(row.last_heard);
        vec![row.name, row.seat.to_string(), row.transport.to_owned(), heard, row.holds, row.waits]
    });
    text.push_str(&table(&std::iter::once(head).chain(rows).collect::<Vec<_>>(), 6));
    let waits = model.waits();
    if !waits.is_empty() {
        text.push('\n');
    }
    for (line, _) in waits {
        text.push_str(&line);
        text.push('\n');
    }
    text
}
