//! Snapshots: copies of all arrays in one file, on any file system.
//!
//! A head, messages, the cells of one array after the other, where the messages of
//! each array of slots are, a table of the arrays, and a tail with a checksum over
//! all of it. The table comes last: a message that was replaced while the copy was
//! made is not in it, and its bytes in the file are of no account.

use super::folder::open_alone;
use super::record::{Arrays, Bad, Change, Head, VERSION};
use crate::catalog::{Catalog, Kind, Placed};
use crate::error::{Error, Result};
use crate::layout::MAX_CELLS;
use bytemuck::{Pod, Zeroable};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::SystemTime;

/// What a snapshot begins with.
pub const MAGIC: [u8; 8] = *b"farcellS";
/// What its tail begins with.
const TAIL_MAGIC: [u8; 8] = *b"farcellE";
/// Cells that are copied or read at a time.
pub const CHUNK: u32 = 8192;
/// Most bytes of a table: what [`MAX_ARRAYS`](crate::catalog::MAX_ARRAYS)
/// arrays with the longest names need.
const MOST_TABLE: u64 = 65_536 * (16 + 32 + 128);
/// The cells are not all of one moment.
const SPREAD: u64 = 1;

#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct Tail {
    magic: [u8; 8],
    /// Where the table begins.
    table_at: u64,
    /// Its arrays.
    arrays: u64,
    /// [`SPREAD`], or 0.
    flags: u64,
    /// SHA-256 of everything before this.
    digest: [u8; 32],
}

impl Tail {
    /// How long it is in this version: in the first one it had no flags.
    const fn len(version: u32) -> usize {
        if version < 2 { size_of::<Tail>() - 8 } else { size_of::<Tail>() }
    }

    fn read(bytes: &[u8]) -> Tail {
        let (front, digest) = bytes.split_at(bytes.len() - 32);
        let word = |at: usize| front.get(at..).and_then(|b| b.first_chunk()).copied();
        let number = |at: usize| u64::from_le_bytes(word(at).unwrap_or_default());
        let digest = digest.first_chunk().copied().unwrap_or_default();
        let magic = word(0).unwrap_or_default();
        Tail { magic, table_at: number(8), arrays: number(16), flags: number(24), digest }
    }
}

/// Where a message is in the file, and its length; 0 and 0: there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct At {
    /// Its first byte.
    pub place: Place,
    /// Its bytes.
    pub len: u64,
}

/// An array in the file.
#[derive(Clone, Debug)]
pub struct Saved {
    /// Which it is.
    pub array: Placed,
    /// Where its cells begin.
    pub cells: Place,
    /// Its messages, one a row, if it is one of slots.
    pub messages: Vec<At>,
}

/// A snapshot that is being written.
pub struct Writer {
    out: BufWriter<File>,
    hasher: Sha256,
    at: u64,
}

/// A place in the file where the cells of an array begin.
pub type Place = u64;

impl Writer {
    /// Begins a snapshot of that many cells, of that incarnation.
    ///
    /// # Errors
    /// From write(2).
    pub fn begin(file: File, capacity: u32, incarnation: u64) -> io::Result<Writer> {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let head = Head {
            magic: MAGIC,
            version: VERSION,
            capacity,
            state: (incarnation >> 32) as u32,
            life: incarnation as u32,
            time: time.as_secs(),
        };
        let out = BufWriter::with_capacity(CHUNK as usize * 8, file);
        let mut this = Writer { out, hasher: Sha256::new(), at: 0 };
        this.put(bytemuck::bytes_of(&head))?;
        Ok(this)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.at += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// Where the next cells will be.
    pub fn place(&self) -> Place {
        self.at
    }

    /// Appends cells.
    ///
    /// # Errors
    /// From write(2).
    pub fn cells(&mut self, words: &[u64]) -> io::Result<()> {
        self.put(bytemuck::cast_slice(words))
    }

    /// Appends bytes of a message.
    ///
    /// # Errors
    /// From write(2).
    pub fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.put(bytes)
    }

    /// Appends the table and the tail, and waits until the file is on disk.
    ///
    /// # Errors
    /// From write(2) and fsync(2).
    pub fn end(mut self, arrays: &[Saved], at_once: bool) -> io::Result<u64> {
        let mut lists = Vec::new();
        for saved in arrays {
            lists.push(if saved.messages.is_empty() { 0 } else { self.at });
            self.put(bytemuck::cast_slice(&saved.messages))?;
        }
        let table_at = self.at;
        for (saved, list) in arrays.iter().zip(lists) {
            let mut entry = saved.cells.to_le_bytes().to_vec();
            entry.extend_from_slice(&list.to_le_bytes());
            Change::Created(saved.array.clone()).write(&mut entry);
            self.put(&entry)?;
        }
        let (magic, arrays) = (TAIL_MAGIC, arrays.len() as u64);
        let flags = if at_once { 0 } else { SPREAD };
        let mut tail = Tail { magic, table_at, arrays, flags, digest: [0; 32] };
        let front = size_of::<Tail>() - size_of_val(&tail.digest);
        self.put(&bytemuck::bytes_of(&tail)[..front])?;
        tail.digest = self.hasher.clone().finalize().into();
        self.out.write_all(&tail.digest)?;
        let file = self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok(self.at + size_of_val(&tail.digest) as u64)
    }
}

/// What a snapshot is, all of it checked.
#[derive(Debug)]
pub struct Snapshot {
    /// How it begins.
    pub head: Head,
    /// Its arrays in the order of their places.
    pub arrays: Vec<Saved>,
    /// Its cells are of one moment.
    pub at_once: bool,
    /// Its bytes.
    pub bytes: u64,
    file: File,
}

/// Opens a snapshot and checks it whole. Reads all of the file.
///
/// # Errors
/// [`Error::State`]: there is none, it is foreign, of another version, cut
/// short or damaged; [`Error::Os`].
pub fn open(path: &Path) -> Result<Snapshot> {
    let file = open_alone(path)?;
    let os = |e| Error::os(format!("reading {}", path.display()), e);
    match check(file).map_err(os)? {
        Ok(snapshot) => Ok(snapshot),
        Err(bad) => Err(super::folder::refused(
            path,
            format!(
                "{bad}; nothing of it was used: name another snapshot, or move it away, then the one before it is taken"
            ),
        )),
    }
}

pub(super) fn check(mut file: File) -> io::Result<Result<Snapshot, Bad>> {
    let bytes = file.metadata()?.len();
    let mut front = vec![0; size_of::<Head>().min(bytes as usize)];
    file.read_exact_at(&mut front, 0)?;
    let head = match Head::read(&front, MAGIC, "snapshot") {
        Ok(head) => head,
        Err(bad) => return Ok(Err(bad)),
    };
    let tail_len = Tail::len(head.version);
    let least = (size_of::<Head>() + tail_len) as u64;
    if bytes < least {
        return Ok(Err(Bad::Short { got: bytes, want: least }));
    }
    let mut tail = vec![0; tail_len];
    file.read_exact_at(&mut tail, bytes - tail_len as u64)?;
    let mut tail = Tail::read(&tail);
    if head.version < 2 {
        // Each cell was of a moment of its own.
        tail.flags = SPREAD;
    }
    if tail.magic != TAIL_MAGIC {
        return Ok(Err(Bad::Content("its end is not there; it was cut short".to_owned())));
    }
    let mut hasher = Sha256::new();
    let mut rest = (&mut file).take(bytes - size_of_val(&tail.digest) as u64);
    let mut chunk = vec![0; CHUNK as usize * 8];
    loop {
        match rest.read(&mut chunk)? {
            0 => break,
            n => hasher.update(&chunk[..n]),
        }
    }
    if hasher.finalize()[..] != tail.digest {
        return Ok(Err(Bad::Checksum));
    }
    let table_end = bytes - tail_len as u64;
    let Some(len) = table_end.checked_sub(tail.table_at).filter(|&len| len <= MOST_TABLE) else {
        return Ok(Err(Bad::Content("its table is not where it should be".to_owned())));
    };
    let mut table = vec![0; len as usize];
    file.read_exact_at(&mut table, tail.table_at)?;
    let arrays = match read_table(head, &table, &tail) {
        Ok(arrays) => arrays,
        Err(bad) => return Ok(Err(bad)),
    };
    let mut saved = Vec::new();
    for (array, cells, list) in arrays {
        let mut messages = Vec::new();
        if list != 0 {
            messages = vec![At::default(); array.form.shape.rows as usize];
            file.read_exact_at(bytemuck::cast_slice_mut(&mut messages), list)?;
            let fits = |at: &At| match at.place {
                0 => at.len == 0,
                place => {
                    place >= size_of::<Head>() as u64
                        && at.len <= array.form.param
                        && place.checked_add(at.len).is_some_and(|end| end <= tail.table_at)
                }
            };
            if !messages.iter().all(fits) {
                return Ok(Err(Bad::Content("a message is not in it".to_owned())));
            }
        }
        saved.push(Saved { array, cells, messages });
    }
    let at_once = tail.flags & SPREAD == 0;
    Ok(Ok(Snapshot { head, arrays: saved, at_once, bytes, file }))
}

/// An array, where its cells are, and where the places of its messages are, or 0.
type Listed = (Placed, Place, Place);

fn read_table(head: Head, mut table: &[u8], tail: &Tail) -> Result<Vec<Listed>, Bad> {
    let bad = |what: &str| Bad::Content(what.to_owned());
    if head.capacity == 0 || head.capacity > MAX_CELLS {
        return Err(bad("its capacity is none"));
    }
    let mut arrays: Vec<Listed> = Vec::new();
    let number = |table: &mut &[u8]| {
        let (number, rest) = table.split_first_chunk::<8>()?;
        *table = rest;
        Some(u64::from_le_bytes(*number))
    };
    while let Some(place) = number(&mut table) {
        let list = if head.version < 2 { Some(0) } else { number(&mut table) };
        let list = list.ok_or_else(|| bad("its table is not whole"))?;
        let Change::Created(placed) = Change::read(&mut table)? else {
            return Err(bad("its table holds something else than arrays"));
        };
        let first = size_of::<Head>() as u64;
        let end = placed.form.shape.extent().saturating_mul(8).saturating_add(place);
        if place < first || end > tail.table_at {
            return Err(bad("the cells of an array are not in it"));
        }
        let lists = u64::from(placed.form.shape.rows) * size_of::<At>() as u64;
        let is_none = list == 0 && (head.version < 2 || placed.form.kind != Kind::Slots);
        let is_list = placed.form.kind == Kind::Slots
            && list >= first
            && list.checked_add(lists).is_some_and(|end| end <= tail.table_at);
        if !is_none && !is_list {
            return Err(bad("the messages of an array are not in it"));
        }
        arrays.push((placed, place, list));
    }
    if !table.is_empty() || arrays.len() as u64 != tail.arrays {
        return Err(bad("its table is not whole"));
    }
    let placed = arrays.iter().map(|(placed, ..)| placed.clone()).collect();
    Catalog::restore(head.capacity, placed, &[]).map_err(|e| Bad::Content(e.to_string()))?;
    arrays.sort_by_key(|(placed, ..)| placed.base);
    Ok(arrays)
}

impl Snapshot {
    /// Its arrays.
    pub fn catalog(&self) -> Arrays {
        let arrays = self.arrays.iter().map(|s| (s.array.name.clone(), s.array.clone())).collect();
        Arrays { arrays, held: Vec::new() }
    }

    /// Hands over the cells of all arrays: a place in the segment and the words
    /// from there on.
    ///
    /// # Errors
    /// From read(2).
    pub fn cells(&self, mut to: impl FnMut(u32, &[u64])) -> io::Result<()> {
        let mut words = vec![0; CHUNK as usize];
        for Saved { array: placed, cells: place, .. } in &self.arrays {
            let extent = placed.form.shape.extent() as u32;
            let mut done = 0;
            while done < extent {
                let part = &mut words[..CHUNK.min(extent - done) as usize];
                let at = place + u64::from(done) * 8;
                self.file.read_exact_at(bytemuck::cast_slice_mut(part), at)?;
                to(placed.base + done, part);
                done += part.len() as u32;
            }
        }
        Ok(())
    }

    /// Hands over a message piece by piece: where in it, and the bytes from there
    /// on. A piece begins with a whole word.
    ///
    /// # Errors
    /// From read(2).
    pub fn message(&self, at: At, mut to: impl FnMut(u64, &[u8])) -> io::Result<()> {
        let mut bytes = vec![0; CHUNK as usize * 8];
        let mut done = 0;
        to(0, &[]);
        while done < at.len {
            let part = &mut bytes[..(at.len - done).min(CHUNK as u64 * 8) as usize];
            self.file.read_exact_at(part, at.place + done)?;
            to(done, part);
            done += part.len() as u64;
        }
        Ok(())
    }
}
