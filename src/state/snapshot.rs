//! Snapshots: copies of all arrays in one file, on any file system.
//!
//! A head, the cells of one array after the other, a table of the arrays, and a
//! tail with a checksum over all of it. The table comes last: an array that is
//! removed while the copy is made is not in it, and its cells in the file are
//! of no account.

use super::folder::open_alone;
use super::record::{Arrays, Bad, Change, Head, VERSION};
use crate::catalog::{Catalog, Placed};
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
const MOST_TABLE: u64 = 65_536 * (8 + 32 + 128);

#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct Tail {
    magic: [u8; 8],
    /// Where the table begins.
    table_at: u64,
    /// Its arrays.
    arrays: u64,
    /// SHA-256 of everything before this.
    digest: [u8; 32],
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

    /// Appends the table and the tail, and waits until the file is on disk.
    ///
    /// # Errors
    /// From write(2) and fsync(2).
    pub fn end(mut self, arrays: &[(Placed, Place)]) -> io::Result<u64> {
        let table_at = self.at;
        for (placed, place) in arrays {
            let mut entry = place.to_le_bytes().to_vec();
            Change::Created(placed.clone()).write(&mut entry);
            self.put(&entry)?;
        }
        let mut tail =
            Tail { magic: TAIL_MAGIC, table_at, arrays: arrays.len() as u64, digest: [0; 32] };
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
    /// Its arrays, and where their cells are, in the order of their places.
    pub arrays: Vec<(Placed, Place)>,
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

fn check(mut file: File) -> io::Result<Result<Snapshot, Bad>> {
    let bytes = file.metadata()?.len();
    let least = (size_of::<Head>() + size_of::<Tail>()) as u64;
    let mut front = vec![0; size_of::<Head>().min(bytes as usize)];
    file.read_exact_at(&mut front, 0)?;
    let head = match Head::read(&front, MAGIC, "snapshot") {
        Ok(head) => head,
        Err(bad) => return Ok(Err(bad)),
    };
    if bytes < least {
        return Ok(Err(Bad::Short { got: bytes, want: least }));
    }
    let mut tail = [0; size_of::<Tail>()];
    file.read_exact_at(&mut tail, bytes - size_of::<Tail>() as u64)?;
    let tail: Tail = bytemuck::pod_read_unaligned(&tail);
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
    let table_end = bytes - size_of::<Tail>() as u64;
    let Some(len) = table_end.checked_sub(tail.table_at).filter(|&len| len <= MOST_TABLE) else {
        return Ok(Err(Bad::Content("its table is not where it should be".to_owned())));
    };
    let mut table = vec![0; len as usize];
    file.read_exact_at(&mut table, tail.table_at)?;
    Ok(read_table(head, &table, &tail).map(|arrays| Snapshot { head, arrays, bytes, file }))
}

fn read_table(head: Head, mut table: &[u8], tail: &Tail) -> Result<Vec<(Placed, Place)>, Bad> {
    let bad = |what: &str| Bad::Content(what.to_owned());
    if head.capacity == 0 || head.capacity > MAX_CELLS {
        return Err(bad("its capacity is none"));
    }
    let mut arrays = Vec::new();
    while let Some((place, rest)) = table.split_first_chunk::<8>() {
        table = rest;
        let place = u64::from_le_bytes(*place);
        let Change::Created(placed) = Change::read(&mut table)? else {
            return Err(bad("its table holds something else than arrays"));
        };
        let end = placed.form.shape.extent().saturating_mul(8).saturating_add(place);
        if place < size_of::<Head>() as u64 || end > tail.table_at {
            return Err(bad("the cells of an array are not in it"));
        }
        arrays.push((placed, place));
    }
    if !table.is_empty() || arrays.len() as u64 != tail.arrays {
        return Err(bad("its table is not whole"));
    }
    let placed = arrays.iter().map(|(placed, _)| placed.clone()).collect();
    Catalog::restore(head.capacity, placed, &[]).map_err(|e| Bad::Content(e.to_string()))?;
    arrays.sort_by_key(|(placed, _)| placed.base);
    Ok(arrays)
}

impl Snapshot {
    /// Its arrays.
    pub fn catalog(&self) -> Arrays {
        let arrays = self.arrays.iter().map(|(p, _)| (p.name.clone(), p.clone())).collect();
        Arrays { arrays, held: Vec::new() }
    }

    /// Hands over the cells of all arrays: a place in the segment and the words
    /// from there on.
    ///
    /// # Errors
    /// From read(2).
    pub fn cells(&self, mut to: impl FnMut(u32, &[u64])) -> io::Result<()> {
        let mut words = vec![0; CHUNK as usize];
        for (placed, place) in &self.arrays {
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
}
