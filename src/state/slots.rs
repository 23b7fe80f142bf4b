//! The files `slots-N` of a state folder: the messages of the array of slots
//! whose first cell is N.
//!
//! The rows, as clients on this machine and adapters are given them, and behind
//! them a page that says what file this is. It has all of its pages from the
//! start: who touches one that tmpfs has no room for is ended by the kernel.

use super::folder::Folder;
use super::record::{Bad, VERSION};
use crate::catalog::{Catalog, Entry, Form};
use crate::engine::{Kept, Shelf};
use crate::error::{Error, Result};
use crate::segment::Segment;
use crate::slot::{extent, pitch};
use bytemuck::{Pod, Zeroable};
use rustix::fs::{FallocateFlags, fallocate};
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: [u8; 8] = *b"farcellM";
const PREFIX: &str = "slots-";
/// A file that belongs to no array yet.
const NEW: &str = "slots.new-";
/// The page behind the rows.
const PAGE: u64 = 4096;

/// What the page behind the rows begins with; the rest of it is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Label {
    magic: [u8; 8],
    version: u32,
    /// Which state it belongs to.
    state: u32,
    /// The first cell of its array.
    base: u32,
    rows: u32,
    /// Most bytes of a message.
    bytes: u64,
    /// SHA-256 of everything before this.
    digest: [u8; 32],
}

impl Label {
    fn new(state: u32, base: u32, form: Form) -> Label {
        let (rows, bytes) = (form.shape.rows, form.param);
        let mut label =
            Label { magic: MAGIC, version: VERSION, state, base, rows, bytes, digest: [0; 32] };
        let front = size_of::<Label>() - size_of_val(&label.digest);
        label.digest = Sha256::digest(&bytemuck::bytes_of(&label)[..front]).into();
        label
    }
}

fn name(base: u32) -> String {
    format!("{PREFIX}{base}")
}

fn draft_name(number: u64) -> String {
    format!("{NEW}{number}")
}

/// Where the label is, if a file can be that long.
fn label_at(form: Form) -> Option<u64> {
    let rows = extent(form.shape.rows, form.param).checked_next_multiple_of(PAGE)?;
    rows.checked_add(PAGE).filter(|&all| i64::try_from(all).is_ok()).map(|_| rows)
}

/// The messages of a state.
#[derive(Debug)]
pub struct SlotFiles {
    folder: Arc<Folder>,
    state: u32,
    /// The number of the last draft.
    drafts: AtomicU64,
}

impl SlotFiles {
    /// Those of the state with this number, in this folder.
    pub fn new(folder: &Arc<Folder>, state: u32) -> SlotFiles {
        SlotFiles { folder: folder.clone(), state, drafts: AtomicU64::new(0) }
    }

    /// Makes a file for an array at once, for a state that is being made.
    ///
    /// # Errors
    /// The system's, also for want of room.
    pub fn make(&self, form: Form, base: u32) -> io::Result<Segment> {
        let (memory, draft) = self.draft(form)?;
        self.keep(draft, form, base)?;
        Ok(memory)
    }

    /// The messages of the arrays of a catalog of version `version`. Nothing is
    /// changed. Arrays without a file are left out.
    ///
    /// # Errors
    /// [`Error::State`](crate::Error::State): a file is damaged or foreign.
    pub fn open(&self, catalog: &Catalog, version: u32) -> Result<Kept> {
        let mut kept = Kept::new();
        for entry in catalog.slots() {
            let path = self.folder.file(&name(entry.base));
            // A release that kept no messages may have left another's file.
            let file = match version {
                ..2 => None,
                _ => self.folder.open_file(&name(entry.base))?,
            };
            let Some(file) = file else {
                tracing::warn!(path = %path.display(), array = entry.name, "there is no file of these messages: they are torn");
                continue;
            };
            let os = |e| Error::os(format!("reading {}", path.display()), e);
            if let Err(bad) = self.check(&file, entry).map_err(os)? {
                return Err(useless(&path, &entry.name, &bad));
            }
            kept.insert(entry.base, map(file, entry.form).map_err(os)?);
        }
        Ok(kept)
    }

    fn check(&self, file: &File, entry: &Entry) -> io::Result<std::result::Result<(), Bad>> {
        let form = entry.form;
        let bad = |what: String| Ok(Err(Bad::Content(what)));
        let Some(at) = label_at(form) else { return Err(io::ErrorKind::InvalidInput.into()) };
        let got = file.metadata()?.len();
        if got != at + PAGE {
            return bad(format!("it has {got} bytes, and not {}", at + PAGE));
        }
        let mut page = [0; PAGE as usize];
        file.read_exact_at(&mut page, at)?;
        let (front, rest) = page.split_at(size_of::<Label>());
        let label: Label = bytemuck::pod_read_unaligned(front);
        if label.magic != MAGIC {
            return Ok(Err(Bad::Foreign("file of messages")));
        }
        let digest = Sha256::digest(&front[..size_of::<Label>() - size_of_val(&label.digest)]);
        if digest[..] != label.digest || rest.iter().any(|&byte| byte != 0) {
            return Ok(Err(Bad::Checksum));
        }
        if !(2..=VERSION).contains(&label.version) {
            return Ok(Err(Bad::Version(label.version)));
        }
        if (Label { version: VERSION, ..label }) != Label::new(self.state, entry.base, form) {
            return bad("it belongs to another array or another state".to_owned());
        }
        for row in 0..form.shape.rows {
            let mut head = [0; 16];
            file.read_exact_at(&mut head, u64::from(row) * pitch(form.param))?;
            let [length, area]: [u64; 2] = bytemuck::pod_read_unaligned(&head);
            if length > form.param {
                return bad(format!("row {row} has a message of {length} bytes"));
            }
            if area != 0 {
                return bad(format!("row {row} has moved to the area {area}, which is none"));
            }
        }
        Ok(Ok(()))
    }

    /// Removes the files that stand where those of these arrays are to be.
    pub fn clear(&self, catalog: &Catalog) {
        catalog.slots().for_each(|entry| self.remove(entry.base));
    }

    /// Removes the files that belong to no array: those of a server that was
    /// killed while it made or removed one.
    pub fn sweep(&self, catalog: &Catalog) {
        let ours: HashSet<String> = catalog.slots().map(|entry| name(entry.base)).collect();
        let Ok(files) = std::fs::read_dir(self.folder.path()) else { return };
        for file in files.flatten() {
            let Ok(found) = file.file_name().into_string() else { continue };
            let number = found.strip_prefix(PREFIX).or_else(|| found.strip_prefix(NEW));
            let is_number = number
                .is_some_and(|n| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()));
            if is_number && !ours.contains(&found) {
                self.folder.remove(&found);
            }
        }
    }
}

fn useless(path: &Path, array: &str, bad: &Bad) -> Error {
    super::folder::refused(
        path,
        format!(
            "{bad}; nothing was changed: move this file away to start without the messages of array {array:?}, which are torn then"
        ),
    )
}

/// Maps a file with messages. What is there stays as it is, and what is not there
/// is made.
fn map(file: File, form: Form) -> io::Result<Segment> {
    let bytes = label_at(form).ok_or(io::ErrorKind::InvalidInput)? + PAGE;
    fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
    Segment::of_bytes(file, usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?)
}

fn plain(error: Error) -> io::Error {
    match error {
        Error::Os { source, .. } => match source.raw_os_error() {
            Some(number) => io::Error::from_raw_os_error(number),
            None => source.kind().into(),
        },
        other => io::Error::other(other),
    }
}

impl Shelf for SlotFiles {
    fn draft(&self, form: Form) -> io::Result<(Segment, u64)> {
        // Relaxed: a number that differs from all others.
        let number = self.drafts.fetch_add(1, Ordering::Relaxed) + 1;
        let made = self.folder.make_file(&draft_name(number)).map_err(plain);
        let mapped = made.and_then(|file| map(file, form));
        mapped.map(|memory| (memory, number)).inspect_err(|_| self.discard(number))
    }

    fn keep(&self, draft: u64, form: Form, base: u32) -> io::Result<()> {
        let label = Label::new(self.state, base, form);
        let at = label_at(form).ok_or(io::ErrorKind::InvalidInput)?;
        let opened = self.folder.open_file(&draft_name(draft)).map_err(plain)?;
        let file = opened.ok_or(io::ErrorKind::NotFound)?;
        file.write_all_at(bytemuck::bytes_of(&label), at)
            .and_then(|()| self.folder.rename(&draft_name(draft), &name(base)).map_err(plain))
            .inspect_err(|_| self.discard(draft))
    }

    fn discard(&self, draft: u64) {
        self.folder.remove(&draft_name(draft));
    }

    fn remove(&self, base: u32) {
        self.folder.remove(&name(base));
    }
}
