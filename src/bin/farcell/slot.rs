//! `farcell slot`

use crate::args::seconds;
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::{Output, plain};
use farcell::{Slot as OneSlot, SlotArray};
use serde::Serialize;
use std::fs::File;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::Duration;

/// Make slots, and write and read the messages in them.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  farcell slot create params 4 16777216
  farcell slot put params 0 weights.bin
  farcell slot get params 0 > weights.bin

JSON, instead of text: create {\"name\", \"rows\", \"bytes\"}; put {\"name\", \"row\",
\"version\", \"len\"}. get prints the message and nothing else, also with --json.

Exit codes: 0 done, 1 get: never written, or nothing newer in time, 2 usage, 3
unreachable, 4 refused (someone is writing it, too large), 5 any other failure,
such as a torn message")]
pub struct Slot {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Make an array of slots, or see that it exists with this size
    Create {
        /// The array
        name: String,
        /// How many slots, one a row
        rows: usize,
        /// Most bytes of a message
        #[arg(value_parser = clap::value_parser!(u64).range(1..=16 << 30))]
        bytes: u64,
    },
    /// Replace a message by what a file holds
    Put {
        /// The array
        name: String,
        /// Row, from 0 on
        row: usize,
        /// The file; stdin without one
        file: Option<PathBuf>,
    },
    /// Print a message
    Get {
        /// The array
        name: String,
        /// Row, from 0 on
        row: usize,
        /// The file to write it to; stdout without one
        file: Option<PathBuf>,
        /// Wait for a message with a higher version than this
        #[arg(long, value_name = "VERSION")]
        newer: Option<u64>,
        /// How long to wait for it [default: for ever]
        #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "newer")]
        timeout: Option<Duration>,
    },
}

#[derive(Serialize)]
struct Created<'a> {
    name: &'a str,
    rows: usize,
    bytes: u64,
}

#[derive(Serialize)]
struct Put<'a> {
    name: &'a str,
    row: usize,
    version: u64,
    len: usize,
}

impl Slot {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let client = connection.connect()?;
        match self.what {
            What::Create { name, rows, bytes } => {
                client.slots(&name, rows, bytes)?;
                out.print("", &Created { name: &name, rows, bytes })?;
                Ok(Answer::Yes)
            }
            What::Put { name, row, file } => {
                let array = client.open_slots(&name)?;
                let message = load(&array, file)?;
                let version = array.at(row)?.write(&message)?;
                let len = message.len();
                let text = format!("version {version}, {len} bytes");
                out.print(text, &Put { name: &name, row, version, len })?;
                Ok(Answer::Yes)
            }
            What::Get { name, row, file, newer, timeout } => {
                let array = client.open_slots(&name)?;
                let slot = array.at(row)?;
                if let Some(than) = newer
                    && !slot.wait_newer(than, timeout, None)?
                {
                    return Ok(Answer::No);
                }
                let Some(message) = take(&slot)? else {
                    return Ok(Answer::No);
                };
                store(&message, file)?;
                Ok(Answer::Yes)
            }
        }
    }
}

/// What is to be written, and no more of it than fits.
fn load(array: &SlotArray, file: Option<PathBuf>) -> Result<Vec<u8>, Failure> {
    let mut message = Vec::new();
    let most = array.bytes() + 1;
    let read = match &file {
        Some(path) => File::open(path).and_then(|file| file.take(most).read_to_end(&mut message)),
        None => std::io::stdin().take(most).read_to_end(&mut message),
    };
    let from = file.map_or_else(|| "stdin".to_owned(), |path| path.display().to_string());
    read.map_err(|e| Failure::Other(format!("cannot read {from}: {}", plain(&e))))?;
    Ok(message)
}

/// The message, by as many looks as it takes to know its size. `None`: it was
/// never written.
fn take(slot: &OneSlot) -> Result<Option<Vec<u8>>, Failure> {
    let mut message = vec![0; 4096.min(slot.bytes() as usize)];
    loop {
        let received = slot.read_at(0, &mut message)?;
        if received.version == 0 {
            return Ok(None);
        }
        if received.total <= message.len() as u64 {
            message.truncate(received.len);
            return Ok(Some(message));
        }
        message.resize(received.total as usize, 0);
    }
}

fn store(message: &[u8], file: Option<PathBuf>) -> Result<(), Failure> {
    let written = match &file {
        Some(path) => std::fs::write(path, message),
        None => {
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(message).and_then(|()| stdout.flush())
        }
    };
    let to = file.map_or_else(|| "stdout".to_owned(), |path| path.display().to_string());
    written.map_err(|e| Failure::Other(format!("cannot write {to}: {}", plain(&e))))
}
