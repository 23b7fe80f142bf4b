//! What goes into a snapshot: arrays, cells and messages as of one moment.
//!
//! Messages first, each as a reader gets it. Then all cells at one moment, among
//! them the versions of the messages: those that are still what was copied belong
//! to that moment. What has been replaced meanwhile is copied again, and another
//! moment is looked for, a few times; the last times also while the server stands
//! still, and of rows that are being written a message is waited for.

use super::snapshot::{At, CHUNK, Saved, Writer};
use crate::catalog::{Entry, Kind, Placed};
use crate::engine::{Actor, Engine, Moment};
use crate::slot::Version;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Moments that are looked for.
const TRIES: u32 = 7;
/// From this one on messages are copied while the server stands still.
const HOLDING: u32 = 3;
/// Bytes of messages that are copied so.
const HELD: u64 = 64 << 20;

/// Messages that are in the file, by the first cell of their array and their row.
type Copied = HashMap<(u32, u32), (Version, At)>;

/// The rows of arrays of slots, with what the cell said at that moment.
fn rows(moment: &Moment) -> impl Iterator<Item = (&Arc<Entry>, u32, Version)> {
    let slots = moment.arrays.iter().filter(|(entry, _)| entry.form.kind == Kind::Slots);
    slots.flat_map(move |(entry, at)| {
        let shape = entry.form.shape;
        (0..shape.rows).map(move |row| {
            let offset = shape.offset(row, 0).unwrap_or(0) as usize;
            (entry, row, Version::of(moment.words[at + offset]))
        })
    })
}

/// Copies a message to the file. `None`: there is no whole one, or it changed.
fn message<A: Actor>(
    engine: &Engine<A>,
    entry: &Entry,
    row: u32,
    buffer: &mut [u8],
    out: &mut Writer,
) -> io::Result<Option<(Version, At)>> {
    let place = out.place();
    let copied = engine.copy_row(entry, row, buffer, |bytes| out.bytes(bytes))?;
    Ok(copied.map(|(version, len)| (version, At { place, len })))
}

/// Copies everything to the file and ends it. Whether it is of one moment.
pub fn all<A: Actor>(engine: &Engine<A>, mut out: Writer) -> io::Result<bool> {
    let mut buffer = vec![0; CHUNK as usize * 8];
    let mut copied = Copied::new();
    for entry in engine.arrays().iter().filter(|entry| entry.form.kind == Kind::Slots) {
        for row in 0..entry.form.shape.rows {
            if let Some(found) = message(engine, entry, row, &mut buffer, &mut out)? {
                copied.insert((entry.base, row), found);
            }
        }
    }
    let mut moment = Moment::default();
    for attempt in 1..=TRIES {
        let held = engine.moment(&mut moment, |moment| match attempt >= HOLDING {
            true => hold(engine, moment, &copied, &mut buffer),
            false => Vec::new(),
        });
        let held = held.map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))?;
        for (base, row, version, bytes) in held {
            let at = At { place: out.place(), len: bytes.len() as u64 };
            out.bytes(&bytes)?;
            copied.insert((base, row), (version, at));
        }
        let missing = |(entry, row, version): &(&Arc<Entry>, u32, Version)| {
            let found = copied.get(&(entry.base, *row)).map(|(version, _)| *version);
            *version != Version::whole(0) && found != Some(*version)
        };
        // Torn ones stay so.
        let waits = |(.., version): &(&Arc<Entry>, u32, Version)| !version.is_torn();
        let stale: Vec<(Arc<Entry>, u32)> = rows(&moment)
            .filter(|row| missing(row) && waits(row))
            .map(|(entry, row, _)| (entry.clone(), row))
            .collect();
        if attempt == TRIES || stale.is_empty() && moment.at_once {
            break;
        }
        std::thread::sleep(Duration::from_millis(1 << attempt.min(4)));
        for (entry, row) in stale {
            if let Some(found) = message(engine, &entry, row, &mut buffer, &mut out)? {
                copied.insert((entry.base, row), found);
            }
        }
    }
    write(&mut moment, &copied, &mut out).and_then(|saved| {
        out.end(&saved, moment.at_once)?;
        Ok(moment.at_once)
    })
}

/// Copies messages that are others by now, while nobody but clients in memory can
/// replace them.
fn hold<A: Actor>(
    engine: &Engine<A>,
    moment: &Moment,
    copied: &Copied,
    buffer: &mut [u8],
) -> Vec<(u32, u32, Version, Vec<u8>)> {
    let mut held = Vec::new();
    let mut left = HELD;
    for (entry, row, version) in rows(moment) {
        let known = copied.get(&(entry.base, row)).is_some_and(|(found, _)| *found == version);
        if known || !version.is_whole() || entry.form.param > left {
            continue;
        }
        let mut bytes = Vec::new();
        let found = engine.copy_row(entry, row, buffer, |piece| {
            bytes.extend_from_slice(piece);
            Ok::<(), std::convert::Infallible>(())
        });
        if matches!(found, Ok(Some((found, _))) if found == version) {
            left = left.saturating_sub(bytes.len() as u64);
            held.push((entry.base, row, version, bytes));
        }
    }
    held
}

/// Writes the cells; where everything is. Rows without their message are torn.
fn write(moment: &mut Moment, copied: &Copied, out: &mut Writer) -> io::Result<Vec<Saved>> {
    let mut saved = Vec::new();
    for (entry, at) in &moment.arrays {
        let mut messages = Vec::new();
        if entry.form.kind == Kind::Slots {
            for row in 0..entry.form.shape.rows {
                let offset = entry.form.shape.offset(row, 0).unwrap_or(0) as usize;
                let word = &mut moment.words[at + offset];
                let version = Version::of(*word);
                let found = copied.get(&(entry.base, row)).filter(|(found, _)| *found == version);
                if found.is_none() && version != Version::whole(0) {
                    *word = Version::whole(version.number()).left().word();
                }
                messages.push(found.map_or(At::default(), |(_, at)| *at));
            }
        }
        let cells = out.place();
        out.cells(&moment.words[*at..*at + entry.extent as usize])?;
        saved.push(Saved { array: Placed::from(&**entry), cells, messages });
    }
    Ok(saved)
}
