//! The file `catalog` of a state folder: which arrays there are.
//!
//! A head, a seal, and changes of the catalog one after the other. The seal
//! says how many bytes of changes count, and their checksum; it is written
//! behind each change and before anyone hears of it. So what a killed server
//! has written behind the sealed part is of no account, and anything else that
//! is not as it was written is noticed.

use super::folder::Folder;
use super::record::{Arrays, Bad, Change, Head, VERSION};
use crate::catalog::{Entry, Placed};
use crate::engine::Journal;
use crate::error::Result;
use bytemuck::{Pod, Zeroable};
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// The file.
pub const NAME: &str = "catalog";
/// The file while it is written anew.
pub const NEW: &str = "catalog.new";
/// What it begins with.
pub const MAGIC: [u8; 8] = *b"farcellC";

/// Where the seal is.
const SEAL_AT: usize = size_of::<Head>();
/// Where the changes begin.
const CHANGES_AT: usize = SEAL_AT + size_of::<Seal>();
/// Most bytes that it can have: 8 times what the largest catalog needs.
pub const MOST: u64 = 128 << 20;
/// Bytes of changes below which it is not written anew.
const SHORT: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct Seal {
    /// Bytes of changes.
    len: u64,
    /// SHA-256 of the head and of those.
    digest: [u8; 32],
}

/// What a catalog says.
///
/// # Errors
/// It is foreign, of another version, cut short or damaged. Bytes behind the
/// sealed part are no damage.
pub fn read(bytes: &[u8]) -> Result<(Head, Arrays), Bad> {
    let head = Head::read(bytes, MAGIC, "catalog")?;
    let got = bytes.len() as u64;
    let Some((front, changes)) = bytes.split_at_checked(CHANGES_AT) else {
        return Err(Bad::Short { got, want: CHANGES_AT as u64 });
    };
    let seal: Seal = bytemuck::pod_read_unaligned(&front[SEAL_AT..]);
    let sealed = usize::try_from(seal.len).ok().and_then(|len| changes.get(..len));
    let Some(mut changes) = sealed else {
        return Err(Bad::Short { got, want: seal.len.saturating_add(CHANGES_AT as u64) });
    };
    let digest = Sha256::new().chain_update(&front[..SEAL_AT]).chain_update(changes).finalize();
    if digest[..] != seal.digest {
        return Err(Bad::Checksum);
    }
    let mut arrays = Arrays::default();
    while !changes.is_empty() {
        arrays.apply(Change::read(&mut changes)?)?;
    }
    Ok((head, arrays))
}

/// The catalog of a state folder, as the server that uses it writes it.
#[derive(Debug)]
pub struct CatalogFile {
    folder: Arc<Folder>,
    head: Head,
    arrays: Arrays,
    file: File,
    len: u64,
    /// Over the head and all changes so far.
    hasher: Sha256,
    /// From this many bytes of changes on it is written anew.
    long: u64,
}

impl CatalogFile {
    /// Writes the file [`NEW`] with these arrays; [`publish`](Self::publish)
    /// makes it the catalog.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os).
    pub fn draft(
        folder: &Arc<Folder>,
        capacity: u32,
        (state, life): (u32, u32),
        arrays: Arrays,
    ) -> Result<CatalogFile> {
        let head = Head { magic: MAGIC, version: VERSION, capacity, state, life, time: 0 };
        let file = folder.make_file(NEW)?;
        let hasher = Sha256::new().chain_update(bytemuck::bytes_of(&head));
        let folder = folder.clone();
        let mut this = CatalogFile { folder, head, arrays, file, len: 0, hasher, long: SHORT };
        let changes = this.arrays.to_bytes();
        this.long = SHORT.max(4 * changes.len() as u64);
        this.file
            .write_all_at(bytemuck::bytes_of(&head), 0)
            .and_then(|()| this.append(&changes))
            .map_err(|e| {
                crate::Error::os(format!("writing {}", this.folder.file(NEW).display()), e)
            })?;
        Ok(this)
    }

    /// Gives a draft its name. No name is needed on disk: tmpfs has none.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os).
    pub fn publish(&self) -> Result<()> {
        self.folder.rename(NEW, NAME)
    }

    /// Writes changes behind the others, then the seal over all. If the second
    /// is not reached, the first counts for nothing and is overwritten.
    fn append(&mut self, changes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(changes, CHANGES_AT as u64 + self.len)?;
        let hasher = self.hasher.clone().chain_update(changes);
        let len = self.len + changes.len() as u64;
        let seal = Seal { len, digest: hasher.clone().finalize().into() };
        // 40 bytes in one page: the kernel copies them in one go, so that a
        // process that is killed has written all or nothing.
        self.file.write_all_at(bytemuck::bytes_of(&seal), SEAL_AT as u64)?;
        (self.hasher, self.len) = (hasher, len);
        Ok(())
    }

    fn note(&mut self, changes: &[Change]) -> Result<(), i32> {
        let mut bytes = Vec::new();
        changes.iter().for_each(|change| change.write(&mut bytes));
        self.append(&bytes).map_err(|error| {
            let path = self.folder.file(NAME);
            tracing::error!(path = %path.display(), %error, "cannot note a change of the arrays");
            error.raw_os_error().unwrap_or(Errno::IO.raw_os_error())
        })?;
        for change in changes {
            if let Err(error) = self.arrays.apply(change.clone()) {
                // The engine asks for nothing that its own catalog refuses.
                tracing::error!(%error, "the catalog and its file differ");
            }
        }
        if self.len > self.long {
            self.shorten();
        }
        Ok(())
    }

    /// Writes the file anew, without what has been undone since.
    fn shorten(&mut self) {
        let identity = (self.head.state, self.head.life);
        let draft =
            CatalogFile::draft(&self.folder, self.head.capacity, identity, self.arrays.clone());
        match draft.and_then(|new| new.publish().map(|()| new)) {
            Ok(new) => *self = new,
            Err(error) => {
                tracing::warn!(%error, "cannot shorten the catalog; going on with the long one");
                self.folder.remove(NEW);
                self.long = self.len * 2;
            }
        }
    }
}

impl Journal for CatalogFile {
    fn created(&mut self, entry: &Entry) -> Result<(), i32> {
        self.note(&[Change::Created(Placed::from(entry))])
    }

    fn removed(&mut self, entry: &Entry, held: bool) -> Result<(), i32> {
        let removed = Change::Removed(entry.name.clone());
        if held {
            self.note(&[removed, Change::Held(entry.base, entry.extent)])
        } else {
            self.note(&[removed])
        }
    }
}
