//! Records about locks, barriers, and who is here.

use super::{Tag, Violation};
use bytemuck::{Pod, Zeroable};

/// Most bytes of names of peers in one wait: they fit beside its records.
pub const MAX_PEER_BYTES: usize = 32 << 10;

/// Most operations of a will.
pub const MAX_WILL: usize = 1024;

/// Most of what a session holds that is named in a list of members.
pub const MAX_HOLDS: usize = 32;

/// Most locks in one [`Tag::Keep`].
pub const MAX_KEPT: usize = super::MAX_PAYLOAD / size_of::<KeepRecord>();

/// Bytes after which a list of members ends, to be asked for further.
pub const MEMBERS_BYTES: usize = 128 << 10;

const _: () = {
    let largest = super::MAX_WAIT_CELLS * size_of::<super::WaitRecord>();
    assert!(largest + size_of::<super::WaitHead>() + MAX_PEER_BYTES <= super::MAX_PAYLOAD);
    assert!(MAX_WILL <= super::MAX_OPS);
};

/// A claim that may have to queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AcquireRecord {
    /// The session's number of the array: of locks or of semaphores.
    pub array: u16,
    /// 0.
    pub reserved: u16,
    /// The cell, counted from the start of the array.
    pub offset: u32,
    /// The session's seat, as it was told when it was let in.
    pub seat: u32,
    /// 0.
    pub reserved_too: u32,
}

/// A lock that a client holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct KeepRecord {
    /// The session's number of the array.
    pub array: u16,
    /// 0.
    pub reserved: u16,
    /// The cell, counted from the start of the array.
    pub offset: u32,
    /// Its token.
    pub token: u64,
}

/// A cell of a barrier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PartyRecord {
    /// The session's number of the array.
    pub array: u16,
    /// 0.
    pub reserved: u16,
    /// The cell, counted from the start of the array.
    pub offset: u32,
    /// In [`Tag::WhoBroke`]: the epoch that is asked for.
    pub epoch: u64,
}

/// How a session ended; its name follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BrokenRecord {
    /// 1: silent for its lease, 2: closed without being released, 3: released.
    /// 0: not known, and no name follows.
    pub how: u8,
    /// 0.
    pub reserved: [u8; 7],
    /// How long ago, in milliseconds.
    pub ago_ms: u64,
}

/// A session in a list of members; `name_len` bytes of name and `holds`
/// [`HoldRecord`]s follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MemberRecord {
    /// Its seat.
    pub seat: u32,
    /// 1: tcp, 2: rdma, 3: shm.
    pub way: u8,
    /// 1: it may read only.
    pub reads_only: u8,
    /// Bytes of the name; 0: it has none.
    pub name_len: u8,
    /// 0.
    pub reserved: u8,
    /// How long it has been here, in milliseconds.
    pub age_ms: u64,
    /// Since when nothing was heard of it, in milliseconds.
    pub silent_ms: u64,
    /// How many records of what it holds follow.
    pub holds: u32,
    /// How much it holds, at most [`MAX_HOLDS`] of it listed.
    pub all: u32,
}

/// Something that a session holds; `name_len` bytes follow, the array's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HoldRecord {
    /// 1: a lock, 2: it is a party of a barrier, 3: it waits for a cell, 4: it
    /// queues for a lock or a permit.
    pub what: u8,
    /// Bytes of the array's name.
    pub name_len: u8,
    /// 0.
    pub reserved: u16,
    /// Row of the cell.
    pub row: u32,
    /// Column of the cell.
    pub col: u32,
    /// 0.
    pub reserved_too: u32,
    /// Of a lock: the fencing token.
    pub token: u64,
}

/// The names of peers in front of the records of a wait.
///
/// # Errors
/// They are longer than allowed, do not fill their bytes, or are no text.
pub fn peers(tag: Tag, bytes: u32, payload: &[u8]) -> Result<(Vec<&str>, &[u8]), Violation> {
    let size = Violation::Size(tag as u8, payload.len());
    if bytes as usize > MAX_PEER_BYTES {
        return Err(Violation::Field("peers"));
    }
    let (mut names, rest) = payload.split_at_checked(bytes as usize).ok_or(size)?;
    let mut peers = Vec::new();
    while let Some((len, behind)) = names.split_first() {
        let (name, behind) = behind.split_at_checked(usize::from(*len)).ok_or(size)?;
        peers.push(std::str::from_utf8(name).map_err(|_| Violation::Field("peers"))?);
        names = behind;
    }
    Ok((peers, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn names_of_peers_fill_their_bytes(names in prop::collection::vec("[a-z ]{0,20}", 0..6), rest in prop::collection::vec(any::<u8>(), 0..9)) {
            let mut bytes = Vec::new();
            for name in &names {
                bytes.push(name.len() as u8);
                bytes.extend_from_slice(name.as_bytes());
            }
            let len = bytes.len() as u32;
            bytes.extend_from_slice(&rest);
            let (read, behind) = peers(Tag::Wait, len, &bytes).unwrap();
            prop_assert_eq!(read, names.iter().map(String::as_str).collect::<Vec<_>>());
            prop_assert_eq!(behind, &rest[..]);
        }

        #[test]
        fn any_bytes_are_names_or_an_error(len in 0u32..80, bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            if let Ok((_, rest)) = peers(Tag::Wait, len, &bytes) {
                prop_assert_eq!(rest.len() + len as usize, bytes.len());
            }
        }
    }
}
