//! `farcell members`

use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::{Output, table};
use farcell::{Holding, HoldingKind, Member};
use serde::Serialize;

/// List who is connected, and what they hold.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell members

A line for each session: its name, if it has one, its seat, the way of its
operations, how many seconds it has been here, how many seconds ago it was last
heard of, and what it holds: `lock gate 0 0 #7` a lock with its fencing token,
`party start 0 0` a barrier that it is a party of, `wait go 0 1` a cell that it
waits for, `queue gate 0 0` a lock or a permit that it queues for. Of each
session 32 things are listed at most. This command is a session, too.

JSON: {\"members\": [{\"name\", \"seat\", \"transport\", \"read_only\", \"age_s\",
\"last_heard_s\", \"holds_in_all\", \"holds\": [{\"what\", \"name\", \"row\", \"col\",
\"token\"}]}]}; name and token can be null.

Exit codes: 0 done, 2 usage, 3 unreachable, 4 refused, 5 any other failure")]
pub struct Members {}

#[derive(Serialize)]
struct Listing<'a> {
    members: Vec<Entry<'a>>,
}

#[derive(Serialize)]
struct Entry<'a> {
    name: Option<&'a str>,
    seat: u32,
    transport: &'a str,
    read_only: bool,
    age_s: f64,
    last_heard_s: f64,
    holds_in_all: usize,
    holds: Vec<Held<'a>>,
}

#[derive(Serialize)]
struct Held<'a> {
    what: &'a str,
    name: &'a str,
    row: usize,
    col: usize,
    token: Option<u64>,
}

fn what(holding: &Holding) -> (&'static str, Option<u64>) {
    match holding.what {
        HoldingKind::Lock { token } => ("lock", Some(token)),
        HoldingKind::Party => ("party", None),
        HoldingKind::Wait => ("wait", None),
        HoldingKind::Queue => ("queue", None),
    }
}

impl Members {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let members = connection.connect()?.members()?;
        let listing = Listing { members: members.iter().map(entry).collect() };
        out.print(text(&members), &listing)?;
        Ok(Answer::Yes)
    }
}

fn entry(member: &Member) -> Entry<'_> {
    let held = |holding| {
        let (what, token) = what(holding);
        Held { what, name: &holding.name, row: holding.row, col: holding.col, token }
    };
    Entry {
        name: member.name.as_deref(),
        seat: member.seat,
        transport: member.transport,
        read_only: member.reads_only,
        age_s: member.age.as_secs_f64(),
        last_heard_s: member.last_heard.as_secs_f64(),
        holds_in_all: member.holds_in_all,
        holds: member.holds.iter().map(held).collect(),
    }
}

fn text(members: &[Member]) -> String {
    let head = ["NAME", "SEAT", "WAY", "AGE", "HEARD", "HOLDS"].map(str::to_owned).to_vec();
    let row = |member: &Member| {
        let mut holds: Vec<String> = member
            .holds
            .iter()
            .map(|holding| {
                let (what, token) = what(holding);
                let token = token.map_or(String::new(), |token| format!(" #{token}"));
                format!("{what} {} {} {}{token}", holding.name, holding.row, holding.col)
            })
            .collect();
        if member.holds_in_all > member.holds.len() {
            holds.push(format!("{} more", member.holds_in_all - member.holds.len()));
        }
        vec![
            member.name.clone().unwrap_or_else(|| "-".to_owned()),
            member.seat.to_string(),
            member.transport.to_owned(),
            format!("{:.1}", member.age.as_secs_f64()),
            format!("{:.1}", member.last_heard.as_secs_f64()),
            holds.join(", "),
        ]
    };
    let rows: Vec<_> = std::iter::once(head).chain(members.iter().map(row)).collect();
    table(&rows, 6)
}
