//! What of a server outlives it: a folder on tmpfs with its memory and its
//! catalog, and snapshots on disk.
//!
//! The folder holds `segment`, the memory itself, which the server maps and
//! registers; `catalog`, which arrays there are ([`catalog`]); `slots-N`, the
//! messages of an array ([`slots`]); `sessions`, who was there ([`sessions`]); and
//! `lock`. The kernel keeps all of it when the server is killed.

mod catalog;
mod copy;
mod folder;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod record;
mod sealed;
mod sessions;
mod slots;
mod snapshot;
mod store;

pub use folder::Folder;
pub use store::{SnapshotInfo, Snapshots, inspect};

use crate::catalog::{Catalog, Placed};
use crate::cell::WAITING;
use crate::engine::{Formers, Kept};
use crate::error::{Error, Result};
use crate::layout::{MAGIC_WORD, header};
use crate::segment::{Payload, Segment};
use crate::slot::Version;
use catalog::CatalogFile;
use folder::refused;
use record::{Arrays, Bad, Head};
use rustix::io::Errno;
use sessions::{Sessions, SessionsFile};
use slots::SlotFiles;
use snapshot::Snapshot;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The file with the memory.
const SEGMENT: &str = "segment";
/// The same while it is made.
const SEGMENT_NEW: &str = "segment.new";

/// What a server began with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// With nothing.
    Nothing,
    /// With what its former life left in the state folder.
    State {
        /// Which life this is; the first is 1.
        life: u32,
    },
    /// With this snapshot.
    Snapshot(PathBuf),
}

/// What a server works with.
#[derive(Debug)]
pub struct Beginning {
    /// Its memory. The cells of its arrays hold what they should; no waiting
    /// bit is set.
    pub segment: Segment,
    /// Its arrays.
    pub catalog: Catalog,
    /// Which life of which state this is: see [`incarnation`].
    pub incarnation: u64,
    /// Where to note changes of the catalog.
    pub journal: Option<CatalogFile>,
    /// Who was there in the life before.
    pub formers: Formers,
    /// Where to note who is there.
    pub roster: Option<SessionsFile>,
    /// Its messages.
    pub kept: Kept,
    /// Where those of further arrays are to be.
    pub shelf: Option<SlotFiles>,
    /// Where all that came from.
    pub origin: Origin,
}

/// The number of a life: `state`, random and not 0, in the upper half, and the
/// life, counted from 1, in the lower one. Clients that come back see from the
/// upper half whether the server still has what it had.
const fn incarnation(state: u32, life: u32) -> u64 {
    (state as u64) << 32 | life as u64
}

fn new_state() -> Result<u32> {
    Ok(getrandom::u32().map_err(|e| Error::os("asking for random numbers", e.into()))?.max(1))
}

/// What a server may begin with.
#[derive(Debug)]
pub struct Sources {
    /// For its state. Without one the memory ends with the process.
    pub folder: Option<Arc<Folder>>,
    /// The snapshot that it must begin with.
    pub restore: Option<PathBuf>,
    /// The snapshot to begin with if there is no state.
    pub newest: Option<PathBuf>,
    /// Cells of the segment; as many as the state or the snapshot has without
    /// that, or `usual`.
    pub capacity: Option<u32>,
    /// See `capacity`.
    pub usual: u32,
}

/// Begins with the state in the folder if there is any, otherwise with a
/// snapshot, otherwise with nothing.
///
/// # Errors
/// [`Error::State`]: something is damaged, foreign, or of another capacity;
/// nothing has been changed then. [`Error::Os`].
pub fn begin(sources: Sources) -> Result<Beginning> {
    let Sources { folder, restore, newest, capacity, usual } = sources;
    let folder = folder.as_ref();
    if let Some(folder) = folder {
        if restore.is_some() && has_state(folder)? {
            let what = "has a state already, so no snapshot can take its place: leave --restore out, or move the folder away";
            return Err(refused(folder.path(), what));
        }
        if let Some(beginning) = resume(folder, capacity)? {
            return Ok(beginning);
        }
    }
    let snapshot = restore.or(newest);
    let snapshot =
        snapshot.map(|path| snapshot::open(&path).map(|found| (found, path))).transpose()?;
    let wanted = snapshot.as_ref().map_or(usual, |(s, _)| s.head.capacity);
    let capacity = capacity.unwrap_or(wanted);
    let arrays = snapshot.as_ref().map(|(s, _)| s.catalog()).unwrap_or_default();
    let catalog = match Catalog::restore(capacity, placed(&arrays), &[]) {
        Ok(catalog) => catalog,
        Err(damage) => {
            let path = snapshot.as_ref().map(|(_, path)| path.clone()).unwrap_or_default();
            let what = format!("does not fit into {capacity} cells: {damage}; it had {wanted}");
            return Err(refused(&path, what));
        }
    };
    let segment = match folder {
        Some(folder) => Segment::in_file(make_segment(folder, capacity)?, capacity),
        None => Segment::anonymous(capacity),
    };
    let segment = segment.map_err(|e| Error::os(format!("mapping {capacity} cells"), e))?;
    if let Some((snapshot, path)) = &snapshot {
        fill(&segment, snapshot)
            .map_err(|e| Error::os(format!("reading {}", path.display()), e))?;
    }
    let state = new_state()?;
    let shelf = folder.map(|folder| SlotFiles::new(folder, state));
    let kept = match &snapshot {
        Some((snapshot, path)) => take_messages(&segment, snapshot, shelf.as_ref())
            .map_err(|e| Error::os(format!("taking the messages of {}", path.display()), e))?,
        None => Kept::new(),
    };
    write_header(&segment, capacity, incarnation(state, 1));
    clear_waiting(&segment, &catalog);
    let files = folder
        .map(|folder| {
            let (_, sessions) =
                SessionsFile::make(folder, capacity, (state, 1), Sessions::default())?;
            // The catalog comes last: the state is there when it is.
            let file = CatalogFile::draft(folder, capacity, (state, 1), arrays)?;
            folder.rename(SEGMENT_NEW, SEGMENT)?;
            file.publish()?;
            Ok::<_, Error>((file, sessions))
        })
        .transpose()?;
    let (journal, roster) = files.unzip();
    let origin = snapshot.map_or(Origin::Nothing, |(_, path)| Origin::Snapshot(path));
    if let Some(shelf) = &shelf {
        shelf.sweep(&catalog);
    }
    let (incarnation, formers) = (incarnation(state, 1), Formers::default());
    Ok(Beginning { segment, catalog, incarnation, journal, formers, roster, kept, shelf, origin })
}

fn has_state(folder: &Folder) -> Result<bool> {
    Ok(folder.open_file(SEGMENT)?.is_some() || folder.open_file(catalog::NAME)?.is_some())
}

/// Takes up the state in a folder, if there is one.
fn resume(folder: &Arc<Folder>, capacity: Option<u32>) -> Result<Option<Beginning>> {
    let segment = folder.open_file(SEGMENT)?;
    let (name, file) = match (folder.open_file(catalog::NAME)?, &segment) {
        (Some(file), _) => (catalog::NAME, file),
        (None, None) => return Ok(None),
        // The first start was killed between its last two steps; the segment
        // got its name with all that it begins with, and nobody has used it.
        (None, Some(_)) => match folder.open_file(catalog::NEW)? {
            Some(file) => (catalog::NEW, file),
            None => return Err(lost(folder, SEGMENT, catalog::NAME)),
        },
    };
    let path = folder.file(name);
    let bytes = read(&file, &path, catalog::MOST)?;
    let (head, arrays) =
        bytes.and_then(|bytes| catalog::read(&bytes)).map_err(|bad| useless(&path, &bad))?;
    let damaged = |what: String| useless(&path, &Bad::Content(what));
    let catalog = Catalog::restore(head.capacity, placed(&arrays), &arrays.held)
        .map_err(|damage| damaged(damage.to_string()))?;
    let Some(segment) = segment else {
        return Err(lost(folder, catalog::NAME, SEGMENT));
    };
    let segment = map_segment(folder, segment, &head)?;
    let sessions = read_sessions(folder, &head)?;
    let shelf = SlotFiles::new(folder, head.state);
    let kept = shelf.open(&catalog, head.version)?;
    if let Some(asked) = capacity.filter(|&asked| asked != head.capacity) {
        let what = format!(
            "has a capacity of {} cells, and {asked} are asked for; leave --capacity out, or begin in another folder with a snapshot",
            head.capacity
        );
        return Err(refused(folder.path(), what));
    }
    // Nothing has been changed up to here.
    if name == catalog::NEW {
        // The next one is written under this name.
        folder.rename(catalog::NEW, catalog::NAME)?;
    }
    if head.version < 2 {
        // A release that kept no messages has been at work here: what is there is
        // older than the arrays.
        shelf.clear(&catalog);
    }
    let life = head.life.wrapping_add(1).max(1);
    let (formers, roster) =
        SessionsFile::make(folder, head.capacity, (head.state, life), sessions)?;
    let journal = CatalogFile::draft(folder, head.capacity, (head.state, life), arrays)?;
    write_header(&segment, head.capacity, incarnation(head.state, life));
    clear_waiting(&segment, &catalog);
    journal.publish()?;
    folder.remove(SEGMENT_NEW);
    shelf.sweep(&catalog);
    Ok(Some(Beginning {
        segment,
        catalog,
        incarnation: incarnation(head.state, life),
        journal: Some(journal),
        formers,
        roster: Some(roster),
        kept,
        shelf: Some(shelf),
        origin: Origin::State { life },
    }))
}

fn placed(arrays: &Arrays) -> Vec<Placed> {
    arrays.arrays.values().cloned().collect()
}

const MEND: &str = "nothing was changed: move the folder away and start with a snapshot, or with nothing in a new folder";

fn useless(path: &std::path::Path, bad: &Bad) -> Error {
    refused(path, format!("{bad}; {MEND}"))
}

fn lost(folder: &Folder, there: &str, missing: &str) -> Error {
    refused(folder.path(), format!("holds the file {there} and no {missing}; {MEND}"))
}

/// Who was there in the life before. Without the file nobody was: each lock is
/// free then, and each barrier that is half full is broken.
fn read_sessions(folder: &Folder, catalog: &Head) -> Result<Sessions> {
    let path = folder.file(sessions::NAME);
    let Some(file) = folder.open_file(sessions::NAME)? else {
        tracing::warn!(path = %path.display(), "there is no file of the sessions: all locks come free");
        return Ok(Sessions::default());
    };
    let bytes = read(&file, &path, sessions::MOST)?;
    bytes.and_then(|bytes| Sessions::read(&bytes, catalog)).map_err(|bad| {
        refused(&path, format!("{bad}; nothing was changed: move this file away to start without the sessions that there were, so that their locks are free and abandoned"))
    })
}

fn read(
    file: &File,
    path: &std::path::Path,
    most: u64,
) -> Result<std::result::Result<Vec<u8>, Bad>> {
    let mut bytes = Vec::new();
    let read = file.take(most + 1).read_to_end(&mut bytes);
    read.map_err(|e| Error::os(format!("reading {}", path.display()), e))?;
    Ok(match bytes.len() as u64 > most {
        true => Err(Bad::Content("it is too long".to_owned())),
        false => Ok(bytes),
    })
}

/// Makes the file for the memory, with all of its pages: a page that tmpfs has
/// no room for when it is first touched ends the process with SIGBUS.
fn make_segment(folder: &Folder, capacity: u32) -> Result<File> {
    let path = folder.file(SEGMENT_NEW);
    let file = folder.make_file(SEGMENT_NEW)?;
    let bytes = Segment::bytes_of(capacity)
        .map_err(|e| Error::os(format!("a segment of {capacity} cells"), e))?;
    let none = rustix::fs::FallocateFlags::empty();
    match rustix::fs::fallocate(&file, none, 0, bytes as u64) {
        Ok(()) => Ok(file),
        Err(e) => {
            folder.remove(SEGMENT_NEW);
            if e != Errno::NOSPC {
                return Err(Error::os(format!("allocating {}", path.display()), e.into()));
            }
            let free = rustix::fs::statfs(folder.path())
                .map(|fs| fs.f_bavail.saturating_mul(fs.f_bsize as u64))
                .unwrap_or(0);
            let what = format!(
                "has no room: {capacity} cells need {bytes} bytes, and the file system has {free} free; make it larger (mount -o remount,size=...), or give a smaller --capacity"
            );
            Err(refused(folder.path(), what))
        }
    }
}

/// Maps the memory that a catalog belongs to.
fn map_segment(folder: &Folder, file: File, head: &Head) -> Result<Segment> {
    let path = folder.file(SEGMENT);
    let bytes = Segment::bytes_of(head.capacity)
        .map_err(|_| useless(&path, &Bad::Content("its capacity is none".to_owned())))?;
    let os = |e| Error::os(format!("mapping {}", path.display()), e);
    let meta = file.metadata().map_err(os)?;
    if meta.len() != bytes as u64 {
        let bad = Bad::Content(format!("it has {} bytes, and not {bytes}", meta.len()));
        return Err(useless(&path, &bad));
    }
    // All of it is allocated, or a hole that tmpfs has no room for later ends
    // the process. What is there stays as it is.
    let none = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&file, none, 0, bytes as u64).map_err(|e| os(e.into()))?;
    let segment = Segment::in_file(file, head.capacity).map_err(os)?;
    // Relaxed: whoever wrote it has ended.
    let word = |at: usize| segment.header()[at].load(Ordering::Relaxed);
    if word(header::MAGIC) != MAGIC_WORD {
        return Err(useless(&path, &Bad::Foreign("segment")));
    }
    // The life is that of the catalog, or the next one if a start was killed
    // between the two.
    let (state, life) = (word(header::INCARNATION) >> 32, word(header::INCARNATION) as u32);
    let next = head.life.wrapping_add(1).max(1);
    if word(header::CAPACITY) != u64::from(head.capacity)
        || state != u64::from(head.state)
        || (life != head.life && life != next)
    {
        return Err(useless(&path, &Bad::Content("it does not belong to its catalog".to_owned())));
    }
    // The scratch word behind this page is for anyone to write to.
    let front = &segment.header()[header::CAPACITY + 1..header::SCRATCH];
    if front.iter().any(|word| word.load(Ordering::Relaxed) != 0) {
        return Err(useless(
            &path,
            &Bad::Content("its header holds more than it should".to_owned()),
        ));
    }
    Ok(segment)
}

fn write_header(segment: &Segment, capacity: u32, incarnation: u64) {
    // Relaxed: nobody else looks at the segment yet.
    for (at, word) in [
        (header::MAGIC, MAGIC_WORD),
        (header::INCARNATION, incarnation),
        (header::CAPACITY, capacity.into()),
    ] {
        segment.header()[at].store(word, Ordering::Relaxed);
    }
}

/// Takes the waiting bits off the cells of all arrays: those who waited in a
/// former life ask again. A bit that nobody stands behind would make each add
/// to its cell ring for nothing, for ever. By fetch_and, so that a process of
/// this machine that still changes cells of the former life loses nothing.
fn clear_waiting(segment: &Segment, catalog: &Catalog) {
    for entry in catalog.list("", usize::MAX) {
        for cell in &segment.cells()[entry.base as usize..(entry.base + entry.extent) as usize] {
            // Relaxed: one word alone, and the threads that look at it later
            // are started behind this.
            if cell.load(Ordering::Relaxed) & WAITING != 0 {
                cell.fetch_and(!WAITING, Ordering::Relaxed);
            }
        }
    }
}

fn fill(segment: &Segment, snapshot: &Snapshot) -> std::io::Result<()> {
    snapshot.cells(|at, words| {
        for (cell, &word) in segment.cells()[at as usize..].iter().zip(words) {
            // Relaxed: nobody else looks at the segment yet.
            cell.store(word, Ordering::Relaxed);
        }
    })
}

/// Takes the messages of a snapshot. Rows whose message is not in it are torn.
fn take_messages(
    segment: &Segment,
    snapshot: &Snapshot,
    shelf: Option<&SlotFiles>,
) -> std::io::Result<Kept> {
    let mut kept = Kept::new();
    for saved in snapshot.arrays.iter().filter(|saved| !saved.messages.is_empty()) {
        let Placed { form, base, .. } = saved.array;
        let memory = match shelf {
            Some(shelf) => shelf.make(form, base)?,
            None => Payload::blank(form.shape.rows, form.param)?,
        };
        for (row, &at) in (0..form.shape.rows).zip(&saved.messages) {
            if at.place != 0 {
                snapshot.message(at, |from, bytes| {
                    Payload::fill(&memory, row, form.param, at.len, from, bytes);
                })?;
                continue;
            }
            let cell = &segment.cells()[(base + form.shape.offset(row, 0).unwrap_or(0)) as usize];
            // Relaxed, both: nobody else looks at the segment yet.
            let version = Version::of(cell.load(Ordering::Relaxed));
            if version.is_whole() {
                cell.store(version.left().word(), Ordering::Relaxed);
            }
        }
        kept.insert(base, memory);
    }
    Ok(kept)
}

#[cfg(test)]
mod tests;
