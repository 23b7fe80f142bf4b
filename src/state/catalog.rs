//! The file `catalog` of a state folder: which arrays there are, as changes of
//! the catalog under a [seal](super::sealed).

use super::folder::Folder;
use super::record::{Arrays, Bad, Change, Head, VERSION};
use super::sealed::{Sealed, Sort, unseal};
use crate::catalog::{Entry, Placed};
use crate::engine::Journal;
use crate::error::Result;
use rustix::io::Errno;
use std::sync::Arc;

/// The file.
pub const NAME: &str = SORT.name;
/// The file while it is written anew.
pub const NEW: &str = SORT.new;
/// 8 times what the largest catalog needs.
pub const MOST: u64 = SORT.most;

const SORT: Sort =
    Sort { name: "catalog", new: "catalog.new", magic: *b"farcellC", most: 128 << 20 };

/// What a catalog says.
///
/// # Errors
/// It is foreign, of another version, cut short or damaged. Bytes behind the
/// sealed part are no damage.
pub fn read(bytes: &[u8]) -> Result<(Head, Arrays), Bad> {
    let (head, mut changes) = unseal(bytes, SORT)?;
    let mut arrays = Arrays::default();
    while !changes.is_empty() {
        arrays.apply(Change::read(&mut changes)?)?;
    }
    Ok((head, arrays))
}

/// The catalog of a state folder, as the server that uses it writes it.
#[derive(Debug)]
pub struct CatalogFile {
    file: Sealed,
    arrays: Arrays,
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
        let head = Head { magic: SORT.magic, version: VERSION, capacity, state, life, time: 0 };
        let file = Sealed::draft(folder, SORT, head, &arrays.to_bytes())?;
        Ok(CatalogFile { file, arrays })
    }

    /// Gives a draft its name.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os).
    pub fn publish(&self) -> Result<()> {
        self.file.publish()
    }

    fn note(&mut self, changes: &[Change]) -> Result<(), i32> {
        let mut bytes = Vec::new();
        changes.iter().for_each(|change| change.write(&mut bytes));
        self.file.append(&bytes).map_err(|error| {
            let path = self.file.path();
            tracing::error!(path = %path.display(), %error, "cannot note a change of the arrays");
            error.raw_os_error().unwrap_or(Errno::IO.raw_os_error())
        })?;
        for change in changes {
            if let Err(error) = self.arrays.apply(change.clone()) {
                // The engine asks for nothing that its own catalog refuses.
                tracing::error!(%error, "the catalog and its file differ");
            }
        }
        if self.file.is_long()
            && let Err(error) = self.file.shorten(&self.arrays.to_bytes())
        {
            tracing::warn!(%error, "cannot shorten the catalog; going on with the long one");
        }
        Ok(())
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
