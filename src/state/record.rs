//! Arrays as they are written down: in the catalog of a state folder and in
//! snapshots. Pure.

use crate::catalog::{Form, Kind, MAX_NAME, Placed};
use crate::layout::Shape;
use bytemuck::{Pod, Zeroable};
use std::collections::BTreeMap;

/// Which version of the formats this is. Those before it are read as well: in
/// version 1 messages were not kept.
pub const VERSION: u32 = 2;

/// An array exists.
const CREATED: u8 = 1;
/// An array was removed.
const REMOVED: u8 = 2;
/// Cells of a removed array that some client may still reach.
const HELD: u8 = 3;

/// What both kinds of file begin with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Head {
    /// What kind of file it is.
    pub magic: [u8; 8],
    /// [`VERSION`], or one before it.
    pub version: u32,
    /// Cells of the segment.
    pub capacity: u32,
    /// Which state: random, not 0. The upper half of the incarnation.
    pub state: u32,
    /// Which life of that state: the lower half of the incarnation.
    pub life: u32,
    /// When a snapshot was begun, in seconds since 1970; 0 in a catalog.
    pub time: u64,
}

/// What is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    /// It is something else.
    #[error("is no {0} of farcell")]
    Foreign(&'static str),
    /// It is of another release.
    #[error("has version {0} of its format, this program reads versions up to {VERSION}")]
    Version(u32),
    /// Its end is not there.
    #[error("is cut short: {got} bytes, and at least {want} are wanted")]
    Short {
        /// Bytes that there are.
        got: u64,
        /// Bytes that there should be.
        want: u64,
    },
    /// Not what was written.
    #[error("is damaged: its content does not match its checksum")]
    Checksum,
    /// What was written makes no sense.
    #[error("is damaged: {0}")]
    Content(String),
}

impl Head {
    /// The head of a file, checked as far as it goes without a checksum.
    ///
    /// # Errors
    /// Foreign, too short, of another version.
    pub fn read(bytes: &[u8], magic: [u8; 8], what: &'static str) -> Result<Head, Bad> {
        if !bytes.starts_with(&magic) {
            return Err(Bad::Foreign(what));
        }
        let Some((head, _)) = bytes.split_at_checked(size_of::<Head>()) else {
            return Err(Bad::Short { got: bytes.len() as u64, want: size_of::<Head>() as u64 });
        };
        let head: Head = bytemuck::pod_read_unaligned(head);
        if !(1..=VERSION).contains(&head.version) {
            return Err(Bad::Version(head.version));
        }
        Ok(head)
    }
}

/// A change of the catalog, before the name of the array that it is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Record {
    tag: u8,
    kind: u8,
    name_len: u8,
    reserved: u8,
    rows: u32,
    cols: u32,
    base: u32,
    extent: u32,
    reserved_too: u32,
    param: u64,
}

/// A change of the catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// An array exists from now on.
    Created(Placed),
    /// The array of this name exists no more.
    Removed(String),
    /// These cells, first and how many, are to stay out of use for now.
    Held(u32, u32),
}

impl Change {
    /// Appends it as bytes: 32, and the name, filled up with zeros to 8.
    pub fn write(&self, out: &mut Vec<u8>) {
        let (record, name) = match self {
            Change::Created(Placed { name, form, base }) => {
                let Form { kind, shape: Shape { rows, cols }, param } = *form;
                let extent = form.shape.extent() as u32;
                let (tag, kind, base) = (CREATED, kind as u8, *base);
                let record =
                    Record { tag, kind, rows, cols, base, extent, param, ..Record::zeroed() };
                (record, name.as_str())
            }
            Change::Removed(name) => (Record { tag: REMOVED, ..Record::zeroed() }, name.as_str()),
            &Change::Held(base, extent) => {
                (Record { tag: HELD, base, extent, ..Record::zeroed() }, "")
            }
        };
        // A name has at most 128 bytes.
        let record = Record { name_len: name.len() as u8, ..record };
        out.extend_from_slice(bytemuck::bytes_of(&record));
        out.extend_from_slice(name.as_bytes());
        out.resize(out.len().next_multiple_of(8), 0);
    }

    /// Takes the first one off the bytes.
    ///
    /// # Errors
    /// It is none.
    pub fn read(bytes: &mut &[u8]) -> Result<Change, Bad> {
        let bad = |what: &str| Bad::Content(what.to_owned());
        let cut = || bad("a record is not whole");
        let (head, rest) = bytes.split_at_checked(size_of::<Record>()).ok_or_else(cut)?;
        let record: Record = bytemuck::pod_read_unaligned(head);
        let len = usize::from(record.name_len);
        let (name, rest) = rest.split_at_checked(len.next_multiple_of(8)).ok_or_else(cut)?;
        if len > MAX_NAME {
            return Err(bad("a name is too long"));
        }
        let name = std::str::from_utf8(&name[..len]).map_err(|_| bad("a name is no text"))?;
        *bytes = rest;
        match record.tag {
            CREATED => {
                let kind = Kind::from_code(record.kind)
                    .ok_or_else(|| bad("an array has a kind that this program does not know"))?;
                let shape = Shape { rows: record.rows, cols: record.cols };
                if u64::from(record.extent) != shape.extent() {
                    return Err(bad("an array takes up another number of cells than it should"));
                }
                let form = Form { kind, shape, param: record.param };
                Ok(Change::Created(Placed { name: name.to_owned(), form, base: record.base }))
            }
            REMOVED => Ok(Change::Removed(name.to_owned())),
            HELD => Ok(Change::Held(record.base, record.extent)),
            tag => Err(bad(&format!("a record has the tag {tag}"))),
        }
    }
}

/// The arrays that there are after some changes, and the cells that are to stay
/// out of use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Arrays {
    /// By their names.
    pub arrays: BTreeMap<String, Placed>,
    /// First cell and how many.
    pub held: Vec<(u32, u32)>,
}

impl Arrays {
    /// Goes on by one change.
    ///
    /// # Errors
    /// It cannot have happened.
    pub fn apply(&mut self, change: Change) -> Result<(), Bad> {
        match change {
            Change::Created(placed) => {
                let from = u64::from(placed.base);
                let to = from.saturating_add(placed.form.shape.extent());
                // Cells that have a new owner are not out of use any more.
                self.held.retain(|&(base, len)| {
                    to <= u64::from(base) || u64::from(base) + u64::from(len) <= from
                });
                if let Some(before) = self.arrays.insert(placed.name.clone(), placed) {
                    return Err(Bad::Content(format!("array {:?} was made twice", before.name)));
                }
            }
            Change::Removed(name) => {
                if self.arrays.remove(&name).is_none() {
                    return Err(Bad::Content(format!("array {name:?} was removed before it was")));
                }
            }
            Change::Held(base, len) => self.held.push((base, len)),
        }
        Ok(())
    }

    /// The fewest changes that lead here.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for placed in self.arrays.values() {
            Change::Created(placed.clone()).write(&mut bytes);
        }
        for &(base, len) in &self.held {
            Change::Held(base, len).write(&mut bytes);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn placed(name: &str, base: u32) -> Placed {
        let form = Form { kind: Kind::Counter, shape: Shape { rows: 2, cols: 3 }, param: 0 };
        Placed { name: name.to_owned(), form, base }
    }

    #[test]
    fn changes_are_read_as_they_were_written() {
        let changes = [
            Change::Created(placed("abc", 8)),
            Change::Removed("a".repeat(128)),
            Change::Held(8, 24),
        ];
        let mut bytes = Vec::new();
        changes.iter().for_each(|c| c.write(&mut bytes));
        let mut rest = &bytes[..];
        for change in changes {
            assert_eq!(Change::read(&mut rest), Ok(change));
        }
        assert!(rest.is_empty());
    }

    #[test]
    fn what_follows_is_in_order() {
        let mut arrays = Arrays::default();
        arrays.apply(Change::Created(placed("a", 0))).unwrap();
        arrays.apply(Change::Removed("a".to_owned())).unwrap();
        arrays.apply(Change::Held(0, 16)).unwrap();
        arrays.apply(Change::Held(16, 8)).unwrap();
        arrays.apply(Change::Created(placed("b", 0))).unwrap();
        assert_eq!(arrays.held, [(16, 8)], "cells with a new owner are not held");
        let again = arrays.clone();
        assert!(arrays.apply(Change::Created(placed("b", 64))).is_err());
        assert!(arrays.apply(Change::Removed("c".to_owned())).is_err());
        let bytes = again.to_bytes();
        let mut rest = &bytes[..];
        let mut read = Arrays::default();
        while !rest.is_empty() {
            read.apply(Change::read(&mut rest).unwrap()).unwrap();
        }
        assert_eq!(read, again);
    }

    proptest! {
        #[test]
        fn any_bytes_are_changes_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300), tag in 0u8..5, len in 0u8..20) {
            let mut bytes = bytes;
            if let [t, k, n, ..] = &mut bytes[..] { (*t, *k, *n) = (tag, 1, len); }
            let mut rest = &bytes[..];
            let mut arrays = Arrays::default();
            while let Ok(change) = Change::read(&mut rest) {
                let _ = arrays.apply(change);
            }
        }
    }
}
