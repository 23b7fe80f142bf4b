//! A file of changes, one after the other, behind a head and a seal.
//!
//! The seal says how many bytes of changes count, and their checksum; it is
//! written behind each change and before anyone hears of it. So what a killed
//! server has written behind the sealed part is of no account, and anything else
//! that is not as it was written is noticed.

use super::folder::Folder;
use super::record::{Bad, Head};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Where the seal is.
const SEAL_AT: usize = size_of::<Head>();
/// Where the changes begin.
const CHANGES_AT: usize = SEAL_AT + size_of::<Seal>();
/// Bytes of changes below which a file is not written anew.
const SHORT: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
struct Seal {
    /// Bytes of changes.
    len: u64,
    /// SHA-256 of the head and of those.
    digest: [u8; 32],
}

/// What kind of file it is.
#[derive(Clone, Copy, Debug)]
pub struct Sort {
    /// Its name.
    pub name: &'static str,
    /// Its name while it is written anew.
    pub new: &'static str,
    /// What it begins with.
    pub magic: [u8; 8],
    /// Most bytes that it can have.
    pub most: u64,
}

/// The head of a file, and the bytes of the changes that count.
///
/// # Errors
/// It is foreign, of another version, cut short or damaged. Bytes behind the
/// sealed part are no damage.
pub fn unseal(bytes: &[u8], sort: Sort) -> Result<(Head, &[u8]), Bad> {
    let head = Head::read(bytes, sort.magic, sort.name)?;
    let got = bytes.len() as u64;
    let Some((front, changes)) = bytes.split_at_checked(CHANGES_AT) else {
        return Err(Bad::Short { got, want: CHANGES_AT as u64 });
    };
    let seal: Seal = bytemuck::pod_read_unaligned(&front[SEAL_AT..]);
    let sealed = usize::try_from(seal.len).ok().and_then(|len| changes.get(..len));
    let Some(changes) = sealed else {
        return Err(Bad::Short { got, want: seal.len.saturating_add(CHANGES_AT as u64) });
    };
    let digest = Sha256::new().chain_update(&front[..SEAL_AT]).chain_update(changes).finalize();
    if digest[..] != seal.digest {
        return Err(Bad::Checksum);
    }
    Ok((head, changes))
}

/// Such a file, as the server that uses it writes it.
#[derive(Debug)]
pub struct Sealed {
    folder: Arc<Folder>,
    sort: Sort,
    head: Head,
    file: File,
    len: u64,
    /// Over the head and all changes so far.
    hasher: Sha256,
    /// From this many bytes of changes on it is to be written anew.
    long: u64,
}

impl Sealed {
    /// Writes a new file, under the name for that, with these changes;
    /// [`publish`](Self::publish) gives it its own.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn draft(folder: &Arc<Folder>, sort: Sort, head: Head, changes: &[u8]) -> Result<Sealed> {
        let file = folder.make_file(sort.new)?;
        let hasher = Sha256::new().chain_update(bytemuck::bytes_of(&head));
        let long = SHORT.max(4 * changes.len() as u64);
        let mut this = Sealed { folder: folder.clone(), sort, head, file, len: 0, hasher, long };
        this.file
            .write_all_at(bytemuck::bytes_of(&head), 0)
            .and_then(|()| this.append(changes))
            .map_err(|e| Error::os(format!("writing {}", folder.file(sort.new).display()), e))?;
        Ok(this)
    }

    /// Gives a draft its name. No name is needed on disk: tmpfs has none.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn publish(&self) -> Result<()> {
        self.folder.rename(self.sort.new, self.sort.name)
    }

    /// Writes changes behind the others, then the seal over all. If the second
    /// is not reached, the first counts for nothing and is overwritten.
    ///
    /// # Errors
    /// The system's, or that the file would be longer than it may be.
    pub fn append(&mut self, changes: &[u8]) -> io::Result<()> {
        let len = self.len + changes.len() as u64;
        if len + CHANGES_AT as u64 > self.sort.most {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.file.write_all_at(changes, CHANGES_AT as u64 + self.len)?;
        let hasher = self.hasher.clone().chain_update(changes);
        let seal = Seal { len, digest: hasher.clone().finalize().into() };
        // 40 bytes in one page: the kernel copies them in one go, so that a
        // process that is killed has written all or nothing.
        self.file.write_all_at(bytemuck::bytes_of(&seal), SEAL_AT as u64)?;
        (self.hasher, self.len) = (hasher, len);
        Ok(())
    }

    /// Whether it is long enough to be written anew.
    pub fn is_long(&self) -> bool {
        self.len > self.long
    }

    /// Writes the file anew, with the fewest changes that lead to where things
    /// stand. If that cannot be, the long one goes on.
    pub fn shorten(&mut self, changes: &[u8]) -> Result<()> {
        let draft = Sealed::draft(&self.folder, self.sort, self.head, changes);
        match draft.and_then(|new| new.publish().map(|()| new)) {
            Ok(new) => {
                *self = new;
                Ok(())
            }
            Err(error) => {
                self.folder.remove(self.sort.new);
                self.long = self.len * 2;
                Err(error)
            }
        }
    }

    /// Where it is, for messages.
    pub fn path(&self) -> std::path::PathBuf {
        self.folder.file(self.sort.name)
    }
}
