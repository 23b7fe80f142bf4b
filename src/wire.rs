//! Frames: what client and server say to each other after the handshake.
//!
//! A frame is a [`Header`] of 16 bytes and a payload of `len` bytes, all
//! little-endian. The structs here are the bytes: `bytemuck` copies them in
//! and out, so there is no encoder that could disagree with the decoder.
//! Nothing here allocates by a number that a peer sent.
//!
//! Requests carry a number, counted up by the client, and are answered in
//! their order. Waits have numbers of their own, because they are answered
//! whenever they are satisfied.

pub mod slots;

use crate::cell::{Comparison, Condition, Op};
use crate::layout::Run;
use bytemuck::{Pod, Zeroable};

mod listing;
mod overview;
mod refusal;
mod shm;
mod sync;

pub use listing::{InfoRecord, ListRecord};
pub use overview::{
    FellReason, FellRecord, HeldRecord, HoldersHead, LISTED_PARTIES, LOOKED_AT, MAX_FELL_TEXT,
    PartyAtRecord, SINCE_UNKNOWN, TallyRecord, WAITING_CELLS, WAITING_PEERS, WaitedRecord,
    WaitingRecord, WaitsAfter, plain_text,
};
pub use refusal::Refusal;
pub use shm::ShmRecord;
pub use sync::{
    AcquireRecord, BrokenRecord, HoldRecord, KeepRecord, MAX_HOLDS, MAX_KEPT, MAX_PEER_BYTES,
    MAX_WILL, MEMBERS_BYTES, MemberRecord, PartyRecord, peers,
};

/// The version of the protocol that this code speaks.
pub const VERSION: u16 = 2;

/// Largest payload of a frame.
pub const MAX_PAYLOAD: usize = 1 << 20;

/// Most cells that one request may touch.
pub const MAX_CELLS: usize = MAX_PAYLOAD / 8;

/// Most operations in one frame of single operations.
pub const MAX_OPS: usize = 32 * 1024;

/// Most runs in one frame.
pub const MAX_RUNS: usize = 64 * 1024;

/// Most cells that one wait may name.
pub const MAX_WAIT_CELLS: usize = 40 * 1024;

/// Most arrays that one session may have open.
pub const MAX_ARRAYS_OPEN: usize = 4096;

/// Most requests that a client may have unanswered.
pub const MAX_UNANSWERED: usize = 4096;

/// Most bytes of replies that a client may have unanswered. The server holds
/// that much for a client that does not read, so a client that keeps to it can
/// always write without reading first.
pub const MAX_UNANSWERED_BYTES: usize = 4 << 20;

/// Every limit fits into its frame.
const _: () = {
    assert!(MAX_OPS * size_of::<OpRecord>() <= MAX_PAYLOAD);
    assert!(MAX_RUNS * size_of::<RunRecord>() + size_of::<RunsHead>() <= MAX_PAYLOAD);
    assert!(MAX_CELLS * 8 <= MAX_PAYLOAD);
    assert!(MAX_WAIT_CELLS * size_of::<FiredRecord>() <= MAX_PAYLOAD);
    assert!(MAX_WAIT_CELLS * size_of::<WaitRecord>() + size_of::<WaitHead>() <= MAX_PAYLOAD);
};

/// What a frame is. The number is its code on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Tag {
    /// Request: [`OpRecord`]s. Reply: [`Tag::Words`], one each.
    Ops = 1,
    /// Request: [`RunsHead`] and [`RunRecord`]s, one operation on many cells.
    /// Reply: [`Tag::Words`], one for each cell in order.
    Runs = 2,
    /// Request: [`OpenRecord`] and the name. Reply: [`Tag::Opened`].
    Open = 3,
    /// Request: the name. Reply: [`Tag::Words`] with none.
    Remove = 4,
    /// Request: the name after which to start. Reply: [`Tag::Listed`].
    List = 5,
    /// Request: nothing. Reply: [`Tag::Info`].
    GetInfo = 6,
    /// Request: the seat after which to start, 4 bytes. Reply:
    /// [`Tag::MembersListed`].
    Members = 7,
    /// Request: what the session is to be called. Reply: [`Tag::Words`] with none.
    Join = 8,
    /// Request: [`OpRecord`]s, or nothing. They are done when the session ends
    /// without [`Tag::Release`]. Reply: [`Tag::Words`] with none.
    SetWill = 9,
    /// Request: [`PartyRecord`]: the session is a party of this barrier. Reply:
    /// [`Tag::Words`] with none.
    Party = 10,
    /// Request: [`PartyRecord`]: who broke this barrier? Reply: [`Tag::Broken`].
    WhoBroke = 11,
    /// Request: nothing. Hands over all that the session holds, and its name.
    /// Reply: [`Tag::Words`] with none.
    Release = 12,
    /// Request: [`KeepRecord`]s, or nothing. All locks that the client holds,
    /// after its session went on in another life of the server; others of its
    /// seat are freed. Reply: [`Tag::Words`] with none.
    Keep = 13,
    /// Asks for RDMA: [`RdmaRecord`] and [`LaneRecord`]s, what the client has.
    /// The id is a wait's, since the answer, [`Tag::RdmaOpened`] or
    /// [`Tag::RdmaRefused`], comes when it comes.
    RdmaOpen = 19,
    /// Asks for the messages of an array of slots by RDMA:
    /// [`slots::SlotsRecord`]. Answered, as [`Tag::RdmaOpen`] is, by
    /// [`Tag::RdmaSlotsOpened`] or [`Tag::RdmaRefused`].
    RdmaSlots = 43,
    /// Asks for the memory of the messages of an array of slots:
    /// [`slots::SlotsRecord`]. Answered, as [`Tag::ShmOpen`] is, by
    /// [`Tag::ShmSlotsOpened`] or [`Tag::ShmRefused`].
    ShmSlots = 44,
    /// Gives RDMA up. Answered by [`Tag::RdmaRefused`] when no operation of
    /// this client can happen any more that way.
    RdmaClose = 20,
    /// Asks for the segment's memory. The id is a wait's; answered by
    /// [`Tag::ShmOpened`] or [`Tag::ShmRefused`].
    ShmOpen = 21,
    /// The index of a cell, 4 bytes: it was changed in memory under its waiting
    /// bit. Not answered.
    Ring = 23,
    /// [`WaitHead`] and [`WaitRecord`]s; the id is the wait's. Answered by
    /// [`Tag::Woken`] when satisfied.
    Wait = 16,
    /// Gives up the wait with this id. Answered by [`Tag::Woken`] if it was
    /// satisfied before, by [`Tag::Cancelled`] otherwise.
    Cancel = 17,
    /// The answer to the wait with this id has arrived; the server may forget it.
    WaitDone = 18,
    /// [`AcquireRecord`]: queues for a lock or a permit. The id is a wait's, and
    /// so are the answers: [`Tag::Woken`] with the word before when it is had.
    Acquire = 24,
    /// Gives up the [`Tag::Acquire`] with this id, and what it was given, if it
    /// was. Not answered.
    Forfeit = 25,
    /// "I am here", in both directions.
    Heartbeat = 32,
    /// The client ends its session.
    Bye = 33,
    /// Reply: the words before each change.
    Words = 64,
    /// Reply: [`OpenedRecord`].
    Opened = 65,
    /// Reply: [`ListRecord`]s, each with its name behind it.
    Listed = 66,
    /// Reply: [`InfoRecord`].
    Info = 67,
    /// Reply: [`ErrorRecord`]. The request changed nothing.
    Refused = 68,
    /// Reply: [`MemberRecord`]s, each with its name and [`HoldRecord`]s behind it.
    MembersListed = 69,
    /// Reply: [`BrokenRecord`] and the name of who did it, if it is known.
    Broken = 70,
    /// [`BrokenRecord`] and a name: the wait with this id has ended because the
    /// peer of this name is lost.
    PeerLost = 71,
    /// [`FiredRecord`]s: the wait with this id is over, these cells satisfy it.
    Woken = 80,
    /// [`FiredRecord`]s: the wait with this id was given up; these satisfied it.
    Cancelled = 81,
    /// [`ErrorRecord`]: the wait with this id cannot go on.
    WaitRefused = 82,
    /// [`RdmaRecord`] and [`LaneRecord`]s, what the server has.
    RdmaOpened = 83,
    /// [`slots::RdmaSlotsAnswer`].
    RdmaSlotsOpened = 103,
    /// [`slots::ShmSlotsAnswer`].
    ShmSlotsOpened = 104,
    /// Why there is no RDMA, in words.
    RdmaRefused = 84,
    /// [`ShmRecord`]: where the memory can be had.
    ShmOpened = 85,
    /// Why there is no shared memory, in words.
    ShmRefused = 86,
    /// The server stops; no request behind the last reply was carried out.
    GoingAway = 96,
    /// Request: [`WaitsAfter`]: who waits? Reply: [`Tag::WaitsListed`].
    Waits = 120,
    /// Request: the cell to start with, 4 bytes: which locks, barriers and
    /// semaphores does anyone hold or want? Reply: [`Tag::HoldersListed`].
    Holders = 121,
    /// Request: the seat after which to start, 4 bytes: how busy is everyone?
    /// Reply: [`Tag::TalliesListed`].
    Tallies = 122,
    /// [`FellRecord`] and why, in words: the client does not have this transport.
    /// Not answered.
    Fell = 123,
    /// Reply: [`WaitingRecord`]s, each with what belongs to it.
    WaitsListed = 125,
    /// Reply: [`HoldersHead`] and [`HeldRecord`]s, each with what belongs to it.
    HoldersListed = 126,
    /// Reply: [`TallyRecord`]s, each with what belongs to it.
    TalliesListed = 127,
}

impl Tag {
    /// The tag with this code.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Tag> {
        Some(match code {
            1 => Tag::Ops,
            2 => Tag::Runs,
            3 => Tag::Open,
            4 => Tag::Remove,
            5 => Tag::List,
            6 => Tag::GetInfo,
            7 => Tag::Members,
            8 => Tag::Join,
            9 => Tag::SetWill,
            10 => Tag::Party,
            11 => Tag::WhoBroke,
            12 => Tag::Release,
            13 => Tag::Keep,
            16 => Tag::Wait,
            17 => Tag::Cancel,
            18 => Tag::WaitDone,
            19 => Tag::RdmaOpen,
            20 => Tag::RdmaClose,
            24 => Tag::Acquire,
            25 => Tag::Forfeit,
            21 => Tag::ShmOpen,
            23 => Tag::Ring,
            43 => Tag::RdmaSlots,
            44 => Tag::ShmSlots,
            103 => Tag::RdmaSlotsOpened,
            104 => Tag::ShmSlotsOpened,
            32 => Tag::Heartbeat,
            33 => Tag::Bye,
            64 => Tag::Words,
            65 => Tag::Opened,
            66 => Tag::Listed,
            67 => Tag::Info,
            68 => Tag::Refused,
            69 => Tag::MembersListed,
            70 => Tag::Broken,
            71 => Tag::PeerLost,
            80 => Tag::Woken,
            81 => Tag::Cancelled,
            82 => Tag::WaitRefused,
            83 => Tag::RdmaOpened,
            84 => Tag::RdmaRefused,
            85 => Tag::ShmOpened,
            86 => Tag::ShmRefused,
            96 => Tag::GoingAway,
            120 => Tag::Waits,
            121 => Tag::Holders,
            122 => Tag::Tallies,
            123 => Tag::Fell,
            125 => Tag::WaitsListed,
            126 => Tag::HoldersListed,
            127 => Tag::TalliesListed,
            _ => return None,
        })
    }
}

/// The first 16 bytes of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Header {
    /// Bytes behind the header.
    pub len: u32,
    /// A [`Tag`].
    pub tag: u8,
    /// 0.
    pub reserved: u8,
    /// In a request: how far its id is ahead of the oldest one unanswered.
    /// The server forgets the replies to all before that.
    pub span: u16,
    /// Number of the request or wait, 0 where there is none.
    pub id: u64,
}

/// Bytes of a [`Header`].
pub const HEADER: usize = size_of::<Header>();

impl Header {
    /// The header of a frame with `len` bytes of payload.
    #[must_use]
    pub const fn new(tag: Tag, id: u64, len: usize) -> Header {
        Header { len: len as u32, tag: tag as u8, reserved: 0, span: 0, id }
    }
}

/// One operation on one cell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OpRecord {
    /// An [`Op`].
    pub op: u8,
    /// 0.
    pub reserved: u8,
    /// The session's number of the array.
    pub array: u16,
    /// The cell, counted from the start of the array.
    pub offset: u32,
    /// First operand, a value.
    pub a: u64,
    /// Second operand, a value.
    pub b: u64,
}

/// One operation on many cells of one array: what stands before the runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RunsHead {
    /// An [`Op`] without operands.
    pub op: u8,
    /// 0.
    pub reserved: [u8; 5],
    /// The session's number of the array.
    pub array: u16,
}

/// A [`Run`] on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RunRecord {
    /// First cell, counted from the start of the array.
    pub offset: u32,
    /// How many.
    pub count: u32,
    /// From one to the next.
    pub stride: u32,
}

impl From<Run> for RunRecord {
    fn from(run: Run) -> RunRecord {
        let Run { offset, count, stride } = run;
        RunRecord { offset, count, stride }
    }
}

impl From<RunRecord> for Run {
    fn from(r: RunRecord) -> Run {
        Run { offset: r.offset, count: r.count, stride: r.stride }
    }
}

/// Opens an array under a number of the client's choice below
/// [`MAX_ARRAYS_OPEN`], which means the same after a reconnect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OpenRecord {
    /// The session's number for the array from now on.
    pub array: u16,
    /// A [`Kind`], or 0 to open whatever has the name and make nothing.
    pub kind: u8,
    /// 1 to make nothing: an array that does not exist is refused.
    pub existing: u8,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// 0.
    pub reserved: u32,
    /// What else belongs to the kind; 0 for events and counters.
    pub param: u64,
}

/// What was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct OpenedRecord {
    /// A [`Kind`].
    pub kind: u8,
    /// 1 if it did not exist before.
    pub created: u8,
    /// 0.
    pub reserved: u16,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Its first cell, counted from the start of the segment.
    pub base: u32,
    /// What else belongs to the kind; 0 for events and counters.
    pub param: u64,
}

/// One side of an RDMA connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RdmaRecord {
    /// The GID to be reached by; 0 for the LID alone.
    pub gid: [u8; 16],
    /// Address of the segment's first byte. 0 from the client.
    pub address: u64,
    /// Key of the registration of the segment behind its header. 0 from the
    /// client.
    pub key: u32,
    /// The LID; 0 on Ethernet.
    pub lid: u16,
    /// Largest packet, in bytes.
    pub mtu: u16,
    /// READs and atomics that it can have outstanding.
    pub initiator_depth: u8,
    /// READs and atomics of the other side that it can serve at once.
    pub responder_depth: u8,
    /// 1: the client's atomics are the ones that count. 0: changes go to the
    /// server as requests.
    pub atomics: u8,
    /// 0.
    pub reserved: u8,
    /// Key of the registration of the segment's header. 0 from the client.
    pub header_key: u32,
}

/// One queue pair of a side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LaneRecord {
    /// Its number, 24 bits.
    pub queue_pair: u32,
    /// The number of its first packet, 24 bits.
    pub psn: u32,
}

/// Most queue pairs that one session may have, that of its doorbells included.
pub const MAX_LANES: usize = 17;

/// What stands before the records of a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WaitHead {
    /// How many of the cells must be satisfied, at least 1.
    pub need: u32,
    /// Bytes of names of peers behind this, in front of the records: a byte
    /// with the length of the name, and the name, one after another.
    pub peers: u32,
}

/// In [`WaitRecord::comparison`]: satisfied if the event is set when the
/// server first looks, or by any transition after that.
pub const UNTIL_SET: u8 = 0;

/// Cells of one array, and what they are waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WaitRecord {
    /// The session's number of the array.
    pub array: u16,
    /// A [`Comparison`] with `value`, or [`UNTIL_SET`].
    pub comparison: u8,
    /// 0.
    pub reserved: u8,
    /// The cells.
    pub run: RunRecord,
    /// The value to compare with.
    pub value: i64,
}

impl WaitRecord {
    /// The condition, `None` for [`UNTIL_SET`].
    ///
    /// # Errors
    /// The comparison is none.
    pub fn condition(&self) -> Result<Option<Condition>, Violation> {
        if self.comparison == UNTIL_SET {
            return Ok(None);
        }
        let comparison =
            Comparison::from_code(self.comparison).ok_or(Violation::Field("comparison"))?;
        Ok(Some(Condition { comparison, value: self.value }))
    }
}

/// A cell of a wait that is satisfied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FiredRecord {
    /// Which of the wait's cells, counted in the order of its records.
    pub index: u32,
    /// 0.
    pub reserved: u32,
    /// The word that satisfied it.
    pub word: u64,
}

/// Why a request was refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct ErrorRecord {
    /// A [`Refusal`].
    pub code: u16,
    /// 0.
    pub reserved: u16,
    /// Which operation of the frame.
    pub index: u32,
    /// Details, by code.
    pub detail: [u64; 3],
}

/// The peer broke the protocol: the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// A payload longer than [`MAX_PAYLOAD`].
    #[error("a frame of {0} bytes; at most {MAX_PAYLOAD} are allowed")]
    TooLong(u32),
    /// A tag that is none, or none that this side may send.
    #[error("an unexpected frame of type {0}")]
    Tag(u8),
    /// A payload whose size does not fit its tag.
    #[error("a payload of {1} bytes in a frame of type {0}")]
    Size(u8, usize),
    /// A field with a value outside of its range.
    #[error("a bad value in the field {0:?}")]
    Field(&'static str),
    /// A request id that goes backwards over replies already acknowledged.
    #[error("request {0} was acknowledged before")]
    Forgotten(u64),
    /// More unanswered requests, waits or bytes than allowed.
    #[error("more than the allowed {0}")]
    Limit(&'static str),
}

/// Splits the first frame off `bytes`: its header and payload, or `None` while
/// it is not whole yet.
///
/// # Errors
/// The frame is longer than allowed.
pub fn split(bytes: &[u8]) -> Result<Option<(Header, &[u8])>, Violation> {
    let Some((head, rest)) = bytes.split_at_checked(HEADER) else {
        return Ok(None);
    };
    let header: Header = bytemuck::pod_read_unaligned(head);
    if header.len as usize > MAX_PAYLOAD {
        return Err(Violation::TooLong(header.len));
    }
    Ok(rest.get(..header.len as usize).map(|p| (header, p)))
}

/// Appends a frame whose payload is the bytes of `parts`, one after another.
pub fn push(out: &mut Vec<u8>, tag: Tag, id: u64, parts: &[&[u8]]) {
    let len = parts.iter().map(|p| p.len()).sum();
    out.extend_from_slice(bytemuck::bytes_of(&Header::new(tag, id, len)));
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Takes a record off the front of a payload.
///
/// # Errors
/// The payload is shorter than that.
pub fn take<T: Pod>(tag: Tag, payload: &[u8]) -> Result<(T, &[u8]), Violation> {
    let (head, rest) = payload
        .split_at_checked(size_of::<T>())
        .ok_or(Violation::Size(tag as u8, payload.len()))?;
    Ok((bytemuck::pod_read_unaligned(head), rest))
}

/// The records that fill a payload to its end.
///
/// # Errors
/// A rest remains, or there are none, or more than `most`.
pub fn records<'a, T: Pod>(
    tag: Tag,
    payload: &'a [u8],
    most: usize,
) -> Result<impl ExactSizeIterator<Item = T> + Clone + use<'a, T>, Violation> {
    let size = size_of::<T>();
    if !payload.len().is_multiple_of(size) || payload.is_empty() || payload.len() / size > most {
        return Err(Violation::Size(tag as u8, payload.len()));
    }
    Ok(payload.chunks_exact(size).map(bytemuck::pod_read_unaligned))
}

/// The name of an array that fills a payload.
///
/// # Errors
/// It is no UTF-8 or longer than a name can be.
pub fn name(tag: Tag, payload: &[u8]) -> Result<&str, Violation> {
    // One byte more than the longest name, so that the catalog can say that it
    // is too long; what is longer did not come from our client.
    if payload.len() > crate::catalog::MAX_NAME + 1 {
        return Err(Violation::Size(tag as u8, payload.len()));
    }
    std::str::from_utf8(payload).map_err(|_| Violation::Field("name"))
}

/// The operation of a record.
///
/// # Errors
/// The code is none.
pub fn op(code: u8) -> Result<Op, Violation> {
    Op::from_code(code).ok_or(Violation::Field("op"))
}

#[cfg(test)]
mod tests;
