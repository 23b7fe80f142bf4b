//! The folder that snapshots are kept in.

use super::copy;
use super::folder::{Folder, refused};
use super::snapshot::{self, Writer};
use crate::catalog::Placed;
use crate::engine::{Actor, Engine};
use crate::error::{Error, Result};
use crate::layout::Shape;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The file while it is written.
const NEW: &str = "snapshot.new";
const PREFIX: &str = "snapshot-";
/// How many are kept.
const KEPT: usize = 2;

/// A folder of snapshots, which this server alone writes to.
#[derive(Debug)]
pub struct Snapshots {
    folder: Folder,
}

/// What a snapshot says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SnapshotInfo {
    /// When it was begun.
    pub taken: SystemTime,
    /// Cells of the segment that it is of.
    pub capacity: u32,
    /// Bytes of the file.
    pub bytes: u64,
    /// Its arrays, cells and messages are of one moment. Otherwise the cells
    /// changed faster than they could be copied, each is of a moment of its own,
    /// and so it is in files of version 1.
    pub at_once: bool,
    /// How many messages there are.
    pub messages: usize,
    /// Its arrays: name, kind ("event") and shape.
    pub arrays: Vec<(String, crate::Kind, Shape)>,
}

/// Checks a snapshot whole, and says what it is. Reads all of the file.
///
/// # Errors
/// [`Error::State`] says why it is none; [`Error::Os`].
pub fn inspect(path: impl AsRef<Path>) -> Result<SnapshotInfo> {
    let snapshot = snapshot::open(path.as_ref())?;
    let of = |p: &Placed| (p.name.clone(), p.form.kind, p.form.shape);
    let mut arrays: Vec<_> = snapshot.arrays.iter().map(|saved| of(&saved.array)).collect();
    arrays.sort_by(|a, b| a.0.cmp(&b.0));
    let messages = snapshot.arrays.iter().flat_map(|saved| &saved.messages);
    Ok(SnapshotInfo {
        taken: SystemTime::UNIX_EPOCH
            .checked_add(Duration::from_secs(snapshot.head.time))
            .unwrap_or(SystemTime::UNIX_EPOCH),
        capacity: snapshot.head.capacity,
        bytes: snapshot.bytes,
        at_once: snapshot.at_once,
        messages: messages.filter(|at| at.place != 0).count(),
        arrays,
    })
}

fn name(number: u64) -> String {
    format!("{PREFIX}{number:010}")
}

impl Snapshots {
    /// Opens the folder, which is made if it does not exist, and locks it.
    ///
    /// # Errors
    /// As [`Folder::open`].
    pub fn open(path: &Path) -> Result<Snapshots> {
        Ok(Snapshots { folder: Folder::open(path, false)? })
    }

    /// The numbers of those that there are, in order.
    fn numbers(&self) -> Result<Vec<u64>> {
        let path = self.folder.path();
        let failed = |e| Error::os(format!("listing {}", path.display()), e);
        let mut numbers = Vec::new();
        for entry in std::fs::read_dir(path).map_err(failed)? {
            let file = entry.map_err(failed)?.file_name();
            if let Some(number) = file.to_str().and_then(|f| f.strip_prefix(PREFIX)?.parse().ok())
                && file.to_str() == Some(&name(number))
            {
                numbers.push(number);
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// The newest one.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn newest(&self) -> Result<Option<PathBuf>> {
        Ok(self.numbers()?.last().map(|&number| self.folder.file(&name(number))))
    }

    /// Writes one more, and removes all but the newest two. Blocks until it is
    /// on disk. Arrays, cells and messages are as they were at one moment meanwhile,
    /// or the flag says that there was none: see [`copy`]. If it fails, those before
    /// are there as they were.
    ///
    /// # Errors
    /// [`Error::State`] when the file system is full; [`Error::Os`].
    pub fn write<A: Actor>(
        &self,
        engine: &Engine<A>,
        capacity: u32,
        incarnation: u64,
    ) -> Result<(PathBuf, bool)> {
        let numbers = self.numbers()?;
        let number = numbers.last().map_or(1, |&last| last.saturating_add(1));
        let (to, path) = (name(number), self.folder.file(&name(number)));
        let at_once = self
            .draft(engine, capacity, incarnation, &path)
            .inspect_err(|_| self.folder.remove(NEW))?;
        self.folder.rename(NEW, &to)?;
        // Before the older ones go.
        self.folder.sync()?;
        for &old in numbers.iter().rev().skip(KEPT - 1) {
            self.folder.remove(&name(old));
        }
        Ok((path, at_once))
    }

    fn draft<A: Actor>(
        &self,
        engine: &Engine<A>,
        capacity: u32,
        incarnation: u64,
        path: &Path,
    ) -> Result<bool> {
        let failed = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::StorageFull => {
                refused(path, "cannot be written: the file system is full; make room there")
            }
            _ => Error::os(format!("writing {}", path.display()), e),
        };
        let file = self.folder.make_file(NEW)?;
        let out = Writer::begin(file, capacity, incarnation).map_err(failed)?;
        copy::all(engine, out).map_err(failed)
    }
}
