//! `farcell snapshot`

use crate::failure::{Answer, Failure};
use crate::output::{Output, table};
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Look at snapshots of a server.
#[derive(Debug, clap::Args)]
pub struct Snapshot {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Inspect(Inspect),
}

/// Check a snapshot whole, and say what is in it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell snapshot inspect ~/farcell/snapshot-0000000012

JSON: {\"file\", \"taken_unix\", \"bytes\", \"capacity\", \"at_once\", \"messages\", \"arrays\":
[{\"name\", \"kind\", \"rows\", \"cols\"}]}; at_once says whether all of it is of one moment

Exit codes: 0 it is whole, 2 usage, 4 it is damaged, foreign or not there, 5 any
other failure")]
pub struct Inspect {
    /// The snapshot
    file: PathBuf,
}

#[derive(Serialize)]
struct Found<'a> {
    file: &'a PathBuf,
    taken_unix: u64,
    bytes: u64,
    capacity: u32,
    at_once: bool,
    messages: usize,
    arrays: Vec<Entry<'a>>,
}

#[derive(Serialize)]
struct Entry<'a> {
    name: &'a str,
    kind: &'a str,
    rows: u32,
    cols: u32,
}

impl Snapshot {
    /// Runs the command.
    pub fn run(self, out: &Output) -> Result<Answer, Failure> {
        let What::Inspect(Inspect { file }) = self.what;
        let info = farcell::inspect_snapshot(&file)?;
        let arrays: Vec<Entry> = info
            .arrays
            .iter()
            .map(|(name, kind, shape)| Entry {
                name,
                kind: kind.name(),
                rows: shape.rows,
                cols: shape.cols,
            })
            .collect();
        let since_1970 = info.taken.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let head = ["NAME", "KIND", "ROWS", "COLS"].map(str::to_owned).to_vec();
        let row = |e: &Entry| {
            vec![e.name.to_owned(), e.kind.to_owned(), e.rows.to_string(), e.cols.to_string()]
        };
        let rows: Vec<_> = std::iter::once(head).chain(arrays.iter().map(row)).collect();
        let text = format!(
            "{}\nwhole, {} bytes, taken {}, {} cells, {} messages, {}\n",
            table(&rows, 2),
            info.bytes,
            age(info.taken),
            info.capacity,
            info.messages,
            if info.at_once {
                "all as of one moment"
            } else {
                "each cell as of a moment of its own"
            }
        );
        let found = Found {
            file: &file,
            taken_unix: since_1970.as_secs(),
            bytes: info.bytes,
            capacity: info.capacity,
            at_once: info.at_once,
            messages: info.messages,
            arrays,
        };
        out.print(text, &found)?;
        Ok(Answer::Yes)
    }
}

/// How long ago that was, for a person.
fn age(taken: SystemTime) -> String {
    let seconds = SystemTime::now().duration_since(taken).unwrap_or(Duration::ZERO).as_secs();
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} days ago", seconds / 86_400),
    }
}
