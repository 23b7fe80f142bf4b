//! Records that tell who waits for what, who holds what, and how busy everyone is.

use bytemuck::{Pod, Zeroable};

/// Most cells of one wait that are listed.
pub const WAITING_CELLS: usize = 16;

/// Most names of peers of one wait that are listed.
pub const WAITING_PEERS: usize = 16;

/// Most parties of one barrier that are listed.
pub const LISTED_PARTIES: usize = 256;

/// Most cells that are looked at for one [`Tag::Holders`](super::Tag::Holders).
pub const LOOKED_AT: u32 = 1 << 16;

/// Longest text of a [`Tag::Fell`](super::Tag::Fell), in bytes.
pub const MAX_FELL_TEXT: usize = 256;

/// In [`WaitingRecord::since_ms`]: not known.
pub const SINCE_UNKNOWN: u64 = u64::MAX;

/// Where a list of waits goes on: behind this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WaitsAfter {
    /// The wait's number in its session.
    pub wait: u64,
    /// The session's seat; 0: from the start.
    pub seat: u32,
    /// 0.
    pub reserved: u32,
}

/// A wait; `cells` [`WaitedRecord`]s, each with the name of its array, and
/// `peers` names, each behind a byte with its length, follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WaitingRecord {
    /// Who waits.
    pub seat: u32,
    /// 1: it waits for cells, 2: it queues for a lock or a permit, 3: it sleeps
    /// in shared memory.
    pub what: u8,
    /// 0.
    pub reserved: u8,
    /// How many cells are listed, at most [`WAITING_CELLS`].
    pub cells: u16,
    /// How many peers are listed, at most [`WAITING_PEERS`].
    pub peers: u16,
    /// 0.
    pub reserved_too: u16,
    /// How many of its cells must be satisfied.
    pub need: u32,
    /// How many cells it has.
    pub all_cells: u32,
    /// How many peers it names.
    pub all_peers: u32,
    /// Its number in its session; 0 of a sleep.
    pub wait: u64,
    /// For how long it has waited, in milliseconds, or [`SINCE_UNKNOWN`].
    pub since_ms: u64,
}

/// A cell of a wait; `name_len` bytes follow, the array's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WaitedRecord {
    /// Row of the cell.
    pub row: u32,
    /// Column of the cell.
    pub col: u32,
    /// The array's [`Kind`](crate::catalog::Kind).
    pub kind: u8,
    /// A [`Comparison`](crate::cell::Comparison) with `value`; 0: of a claim or a
    /// sleep, which have none.
    pub comparison: u8,
    /// Bytes of the array's name.
    pub name_len: u8,
    /// 1: it is satisfied already; others of the wait are not.
    pub fired: u8,
    /// 0.
    pub reserved: u32,
    /// The value to compare with.
    pub value: i64,
}

/// In front of a list of what is held: where it goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HoldersHead {
    /// The cell to ask for next, counted from the start of the segment; 0: this
    /// was the end.
    pub next: u32,
    /// 0.
    pub reserved: u32,
}

/// A lock, a barrier or a semaphore that someone holds, waits at or queues for;
/// the array's name, `name_len` bytes, and `parties` [`PartyAtRecord`]s follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct HeldRecord {
    /// The array's [`Kind`](crate::catalog::Kind).
    pub kind: u8,
    /// Bytes of the array's name.
    pub name_len: u8,
    /// 1: a lock whose last holder was lost, or a barrier that is broken.
    pub broken: u8,
    /// 0.
    pub reserved: u8,
    /// Row of the cell.
    pub row: u32,
    /// Column of the cell.
    pub col: u32,
    /// Of a lock: the holder's seat, 0 while it is free.
    pub seat: u32,
    /// How many queue for it.
    pub queued: u32,
    /// How many parties are listed, at most [`LISTED_PARTIES`].
    pub parties: u32,
    /// Of a lock: the fencing token. Of a barrier: its epoch. Of a semaphore: the
    /// permits that can be had.
    pub value: u64,
    /// Of a barrier: its parties. Of a semaphore: the most permits.
    pub most: u64,
    /// Of a barrier: how many have arrived in this generation.
    pub arrived: u32,
    /// Of a barrier: how many sessions are known to be parties.
    pub all_parties: u32,
}

/// A party of a barrier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PartyAtRecord {
    /// Its seat.
    pub seat: u32,
    /// 1: it waits there.
    pub arrived: u32,
}

/// What a session has asked of the server; `fallbacks` [`FellRecord`]s, each with
/// its text, follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct TallyRecord {
    /// Its seat.
    pub seat: u32,
    /// How many transports it has reported not to have.
    pub fallbacks: u32,
    /// Operations on cells that it sent as requests.
    pub operations: u64,
    /// Numbered requests.
    pub requests: u64,
    /// Waits and claims.
    pub waits: u64,
    /// Cells that it changed by itself in shared memory and rang for.
    pub rings: u64,
    /// How long ago the last of these was, in milliseconds, or
    /// [`SINCE_UNKNOWN`] if there was none.
    pub idle_ms: u64,
}

/// A transport that a client does not have; `text` bytes of words follow. As
/// [`Tag::Fell`](super::Tag::Fell) the text is the rest of the frame, and `text` is
/// 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FellRecord {
    /// Which: 2: rdma, 3: shm.
    pub wanted: u8,
    /// Why: a [`FellReason`].
    pub reason: u8,
    /// Bytes of the text.
    pub text: u16,
    /// 0.
    pub reserved: u32,
}

/// Why a client does not have a transport. The number is its code on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FellReason {
    /// None of the others.
    #[default]
    Other = 0,
    /// The program or the user wanted another one.
    Asked = 1,
    /// The server does not offer it.
    NotOffered = 2,
    /// The server is on another machine, or in another namespace.
    Elsewhere = 3,
    /// There is no libibverbs.
    NoLibrary = 4,
    /// There is no device, or none that may be opened.
    NoDevice = 5,
    /// The port is down.
    PortDown = 6,
    /// Too little memory may be locked.
    Memlock = 7,
    /// The trial did not get through.
    Unreachable = 8,
    /// It worked, and was lost.
    Lost = 9,
}

impl FellReason {
    /// Every one, in the order of its code.
    pub const ALL: [FellReason; 10] = [
        FellReason::Other,
        FellReason::Asked,
        FellReason::NotOffered,
        FellReason::Elsewhere,
        FellReason::NoLibrary,
        FellReason::NoDevice,
        FellReason::PortDown,
        FellReason::Memlock,
        FellReason::Unreachable,
        FellReason::Lost,
    ];

    /// The one with this code; a code that is not known is [`FellReason::Other`].
    #[must_use]
    pub fn from_code(code: u8) -> FellReason {
        Self::ALL.get(usize::from(code)).copied().unwrap_or_default()
    }

    /// A word for it, the same for ever: a label of metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            FellReason::Other => "other",
            FellReason::Asked => "asked",
            FellReason::NotOffered => "not_offered",
            FellReason::Elsewhere => "elsewhere",
            FellReason::NoLibrary => "no_library",
            FellReason::NoDevice => "no_device",
            FellReason::PortDown => "port_down",
            FellReason::Memlock => "memlock",
            FellReason::Unreachable => "unreachable",
            FellReason::Lost => "lost",
        }
    }
}

/// Words of a peer as they may be shown and logged: no control characters, no
/// more than [`MAX_FELL_TEXT`] bytes.
#[must_use]
pub fn plain_text(bytes: &[u8]) -> String {
    let mut plain = String::new();
    for c in String::from_utf8_lossy(bytes).chars() {
        // Such as turn the direction of writing, or take no room.
        let hidden = matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
        let c = if c.is_control() || hidden { ' ' } else { c };
        if plain.len() + c.len_utf8() > MAX_FELL_TEXT {
            break;
        }
        plain.push(c);
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_their_codes() {
        for (code, reason) in FellReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, code);
            assert_eq!(FellReason::from_code(code as u8), reason);
        }
        assert_eq!(FellReason::from_code(200), FellReason::Other);
    }

    #[test]
    fn words_of_a_peer_become_harmless() {
        assert_eq!(plain_text(b"port 1 is \x1b[31mDOWN\n"), "port 1 is  [31mDOWN ");
        assert_eq!(plain_text("a\u{202e}b".as_bytes()), "a b");
        assert_eq!(plain_text(&[0xff, b'x']), "\u{fffd}x");
        let long = "ä".repeat(MAX_FELL_TEXT);
        assert_eq!(plain_text(long.as_bytes()).len(), MAX_FELL_TEXT);
    }
}
