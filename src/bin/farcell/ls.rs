//! `farcell ls`

use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::{Output, table};
use farcell::{Access, ArrayInfo, Kind, ServerInfo};
use serde::Serialize;

/// List the arrays of a server.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell ls --long

JSON: {\"arrays\": [{\"name\", \"kind\", \"rows\", \"cols\", and of slots \"bytes\", of barriers
\"parties\", of semaphores \"permits\" at first and their \"bound\"}], \"server\": {\"addr\",
\"capacity\", \"free\", \"largest_free\", \"sessions\", \"parked_waits\", \"domain\",
\"read_only\", \"lease_s\"}}; capacity and free are cells.

Exit codes: 0 done, 2 usage, 3 unreachable, 4 refused, 5 any other failure")]
pub struct Ls {
    /// Tell of the server, too: its capacity, sessions and parked waits
    #[arg(short, long)]
    long: bool,
}

#[derive(Serialize)]
struct Listing<'a> {
    arrays: Vec<Entry<'a>>,
    server: About,
}

#[derive(Serialize)]
struct Entry<'a> {
    name: &'a str,
    kind: &'a str,
    rows: usize,
    cols: usize,
    /// Of slots: most bytes of a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// Of barriers.
    #[serde(skip_serializing_if = "Option::is_none")]
    parties: Option<u64>,
    /// Of semaphores: permits at first.
    #[serde(skip_serializing_if = "Option::is_none")]
    permits: Option<u64>,
    /// Of semaphores: most permits.
    #[serde(skip_serializing_if = "Option::is_none")]
    bound: Option<u64>,
}

#[derive(Serialize)]
struct About {
    addr: String,
    capacity: u64,
    free: u64,
    largest_free: u64,
    sessions: usize,
    parked_waits: usize,
    domain: String,
    read_only: bool,
    lease_s: f64,
}

impl Ls {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        let arrays = client.list()?;
        if !out.json && !self.long {
            out.text(text(&arrays))?;
            return Ok(Answer::Yes);
        }
        let server = about(connection.addr()?, &client.info()?);
        let mut long = text(&arrays);
        long.push_str(&format!(
            "\nserver         {}\ncells          {} of {} free, {} in one piece\nsessions       {}\nparked waits   {}\natomic domain  {}\nthis session   {}, lease {} s\n",
            server.addr,
            server.free,
            server.capacity,
            server.largest_free,
            server.sessions,
            server.parked_waits,
            server.domain,
            if server.read_only { "read-only" } else { "read and write" },
            server.lease_s,
        ));
        let arrays = arrays
            .iter()
            .map(|a| Entry {
                name: &a.name,
                kind: a.kind.name(),
                rows: a.rows,
                cols: a.cols,
                bytes: bytes(a),
                parties: (a.kind == Kind::Barrier).then_some(a.param),
                permits: permits(a).map(|(permits, _)| permits),
                bound: permits(a).map(|(_, bound)| bound),
            })
            .collect();
        out.print(long, &Listing { arrays, server })?;
        Ok(Answer::Yes)
    }
}

/// Most bytes of a message, if it has any.
fn bytes(array: &ArrayInfo) -> Option<u64> {
    (array.kind == Kind::Slots).then_some(array.param)
}

/// Permits at first and at most, of a semaphore.
fn permits(array: &ArrayInfo) -> Option<(u64, u64)> {
    let is_one = array.kind == Kind::Semaphore;
    is_one.then_some((array.param & u64::from(u32::MAX), array.param >> 32))
}

fn text(arrays: &[ArrayInfo]) -> String {
    if arrays.is_empty() {
        return "no arrays\n".to_owned();
    }
    let head = ["NAME", "KIND", "ROWS", "COLS"].map(str::to_owned).to_vec();
    let row = |a: &ArrayInfo| {
        let kind = match (a.kind, permits(a)) {
            (Kind::Slots, _) => format!("{} of {} bytes", a.kind, a.param),
            (Kind::Barrier, _) => format!("{} of {} parties", a.kind, a.param),
            (_, Some((permits, bound))) => format!("{} of {permits}/{bound} permits", a.kind),
            _ => a.kind.to_string(),
        };
        vec![a.name.clone(), kind, a.rows.to_string(), a.cols.to_string()]
    };
    let rows: Vec<_> = std::iter::once(head).chain(arrays.iter().map(row)).collect();
    table(&rows, 2)
}

fn about(addr: String, info: &ServerInfo) -> About {
    About {
        addr,
        capacity: info.capacity,
        free: info.free,
        largest_free: info.largest_free,
        sessions: info.sessions,
        parked_waits: info.parked_waits,
        domain: info.domain.to_string(),
        read_only: info.access == Access::ReadOnly,
        lease_s: info.lease.as_secs_f64(),
    }
}
