//! What is said over a connection for messages, beside the session's own.
//!
//! A request is a [`Header`](super::Header) with a [`SlotRequest`], 64 bytes,
//! and as many bytes of the message as it says. An answer is a header with a
//! [`SlotReply`] or an [`ErrorRecord`](super::ErrorRecord), 48 bytes, and as
//! many bytes of the message as it says. So both ends know before each piece
//! of a message how long it is and where it belongs, and can have the system
//! move it there.

use super::{HEADER, Violation};
use crate::auth::Secret;
use crate::catalog::CatalogError;
use bytemuck::{Pod, Zeroable};

/// Most connections for messages that one session may have.
pub const MAX_BESIDE: u32 = 16;

/// Most writes whose end a client may keep unacknowledged.
pub const MAX_WRITES: usize = 1024;

/// What is asked for. The number is its code on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SlotTag {
    /// Bytes for a row; they follow. See [`BEGIN`], [`COMMIT`], [`ANSWER`].
    Write = 40,
    /// Gives up the write that is under way. Answered.
    Abort = 41,
    /// Bytes of a row. Answered with them.
    Read = 42,
}

impl SlotTag {
    /// The tag with this code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<SlotTag> {
        match code {
            40 => Some(SlotTag::Write),
            41 => Some(SlotTag::Abort),
            42 => Some(SlotTag::Read),
            _ => None,
        }
    }
}

/// Answer to a write: [`SlotReply`].
pub const WRITTEN: u8 = 100;
/// Answer to a read: [`SlotReply`]; the bytes follow, and then, if there are
/// any, the version word as it is behind them.
pub const DATA: u8 = 101;

/// Flag of a write: the row is to be claimed first. A write that was begun
/// before by the same session under the same number begins anew; one that was
/// committed under it is not done again, and answered as it was.
pub const BEGIN: u16 = 1;
/// Flag of a write: behind these bytes the message is whole. Answered.
pub const COMMIT: u16 = 2;
/// Flag of a write: answered also if it does not commit.
pub const ANSWER: u16 = 4;

/// Flag of a write with [`BEGIN`]: the bytes come by RDMA, so the row counts as
/// touched from the start. Without [`BEGIN`], in such a write: these bytes have
/// come by RDMA, and none follow.
pub const REMOTE: u16 = 8;

/// In [`SlotRequest::total`]: the message is as long as it was before, or as
/// long as these bytes make it.
pub const KEEP: u64 = u64::MAX;

/// What is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SlotRequest {
    /// The session's number of the array.
    pub array: u16,
    /// Of a write.
    pub flags: u16,
    /// The row.
    pub row: u32,
    /// The client's number of the write, 0 for reads.
    pub write: u64,
    /// The client has the answers of all its writes with lower numbers.
    pub oldest: u64,
    /// Where in the row the bytes begin.
    pub offset: u64,
    /// How many bytes follow; of a read, how many are wanted at most.
    pub bytes: u64,
    /// With [`COMMIT`]: how long the whole message is, or [`KEEP`].
    pub total: u64,
}

/// What has become of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SlotReply {
    /// The version word: before the bytes that follow, or after a write.
    pub word: u64,
    /// How long the whole message is.
    pub total: u64,
    /// How many bytes of it follow.
    pub bytes: u64,
    /// 0.
    pub reserved: u64,
}

/// Which array's messages are wanted by RDMA, or in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SlotsRecord {
    /// The session's number of the array.
    pub array: u16,
    /// 0.
    pub reserved: [u8; 6],
}

/// Where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RdmaSlotsAnswer {
    /// Address of the first byte of row 0: its length, then, 64 bytes behind
    /// it, its message.
    pub address: u64,
    /// Key of the registration.
    pub key: u32,
    /// 0.
    pub reserved: u32,
}

/// Where a client on the server's machine gets the memory of the messages of an
/// array, as the segment's: see [`ShmRecord`](super::ShmRecord).
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct ShmSlotsAnswer {
    /// Name of the server's socket, in the abstract namespace.
    pub name: [u8; 16],
    /// What the client says there: good once, and for seconds.
    pub token: Secret<16>,
    /// What the server says to it.
    pub echo: Secret<16>,
    /// Bytes of the file.
    pub bytes: u64,
    /// 1: the client may change messages in memory.
    pub writable: u8,
    /// 1: nobody can make the file shorter. 0: it belongs to the server's state,
    /// and only its owner can.
    pub sealed: u8,
    /// 0.
    pub reserved: [u8; 6],
}

/// Bytes of a request.
pub const REQUEST: usize = HEADER + size_of::<SlotRequest>();
/// Bytes of an answer.
pub const REPLY: usize = HEADER + size_of::<SlotReply>();

const _: () = assert!(size_of::<SlotReply>() == size_of::<super::ErrorRecord>());

/// The request that these bytes are.
///
/// # Errors
/// They are none.
pub fn request(bytes: &[u8; REQUEST]) -> Result<(SlotTag, SlotRequest), Violation> {
    let header: super::Header = bytemuck::pod_read_unaligned(&bytes[..HEADER]);
    let tag = SlotTag::from_code(header.tag).ok_or(Violation::Tag(header.tag))?;
    if header.len as usize != size_of::<SlotRequest>() {
        return Err(Violation::Size(header.tag, header.len as usize));
    }
    let request: SlotRequest = bytemuck::pod_read_unaligned(&bytes[HEADER..]);
    if request.flags & !(BEGIN | COMMIT | ANSWER | REMOTE) != 0 {
        return Err(Violation::Field("flags"));
    }
    Ok((tag, request))
}

/// The bytes of a request or an answer, without the part of the message.
pub fn push<T: Pod>(out: &mut Vec<u8>, tag: u8, record: &T) {
    let len = size_of::<T>() as u32;
    let header = super::Header { len, tag, ..Default::default() };
    out.extend_from_slice(bytemuck::bytes_of(&header));
    out.extend_from_slice(bytemuck::bytes_of(record));
}

/// Why the server did not write or read a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotRefusal {
    /// Someone else is writing the row: the version word.
    Busy(u64),
    /// The write was not begun, or has been taken away: the version word.
    NotClaimed(u64),
    /// The bytes do not fit the row: how many there can be.
    TooLong(u64),
    /// The row was torn before, and the write has not brought all bytes of a
    /// message: the version word.
    Torn(u64),
}

impl SlotRefusal {
    pub(super) fn code(self) -> (u16, [u64; 3]) {
        match self {
            SlotRefusal::Busy(word) => (48, [word, 0, 0]),
            SlotRefusal::NotClaimed(word) => (49, [word, 0, 0]),
            SlotRefusal::TooLong(most) => (50, [most, 0, 0]),
            SlotRefusal::Torn(word) => (51, [word, 0, 0]),
        }
    }

    pub(super) fn from_code(code: u16, a: u64) -> Option<SlotRefusal> {
        match code {
            48 => Some(SlotRefusal::Busy(a)),
            49 => Some(SlotRefusal::NotClaimed(a)),
            50 => Some(SlotRefusal::TooLong(a)),
            51 => Some(SlotRefusal::Torn(a)),
            _ => None,
        }
    }
}

/// The catalog's answers that are about the memory of messages.
pub(super) fn memory_refusal(code: u16, a: u64, b: u64) -> Option<CatalogError> {
    match code {
        54 => Some(CatalogError::SlotsFull { asked: a, free: b }),
        55 => Some(CatalogError::NoMemory { asked: a, errno: u32::try_from(b).ok()? }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_request_or_a_violation(bytes: [u8; 32], tag: u8, len in 0u32..100) {
            let mut whole = [0; REQUEST];
            whole[HEADER..HEADER + 32].copy_from_slice(&bytes);
            whole[..4].copy_from_slice(&len.to_le_bytes());
            whole[4] = tag;
            if let Ok((known, request)) = request(&whole) {
                prop_assert_eq!(known as u8, tag);
                let mut again = Vec::new();
                push(&mut again, tag, &request);
                prop_assert_eq!(&again[..], &whole[..]);
            }
        }
    }
}
