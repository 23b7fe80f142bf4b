//! What can go wrong, in words for the person who has to mend it.

use crate::auth::KeyError;
use crate::catalog::{Form, Kind, NameError};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Every error of this crate. Each says what happened, to what, and what to
/// do next. An operation that failed did not happen, unless the error is
/// [`Error::OutcomeUnknown`].
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address is no `HOST:PORT`, or its host has no address.
    #[error("{addr:?} is no usable address: {why}; give HOST:PORT, for example node0:7117")]
    BadAddress {
        /// What was given.
        addr: String,
        /// What is wrong with it.
        why: String,
    },
    /// No connection to the server, and the time to get one is over. The
    /// operation did not happen.
    #[error(
        "{addr}: cannot reach the server: {why}; is `farcell serve` running there, and the port open?"
    )]
    Unreachable {
        /// The server.
        addr: String,
        /// What the last attempt met.
        why: String,
    },
    /// Something listens there, but it is no farcell server.
    #[error("{addr}: {what} answers there, no farcell server; check host and port")]
    NotFarcell {
        /// The server.
        addr: String,
        /// What it seems to be.
        what: String,
    },
    /// One side wants to encrypt and the other does not, or what answers there is no
    /// TLS that is spoken here. Nothing was sent in clear.
    #[error("{addr}: no encrypted connection: {what}")]
    Tls {
        /// The server.
        addr: String,
        /// Why not, and what to do.
        what: String,
    },
    /// The encrypted connection that was made ends at someone who is not the server:
    /// the server says that it is at the end of another one. Nothing was sent by
    /// it.
    #[error(
        "{addr}: someone stands between this program and the server: the encrypted connection ends at somebody else; check the address, and who can get between"
    )]
    Intercepted {
        /// The server, as it was addressed.
        addr: String,
    },
    /// The server speaks another version of the protocol.
    #[error(
        "{addr}: the server speaks version {theirs} of the protocol, this program version {ours}; install the same release on both"
    )]
    VersionMismatch {
        /// The server.
        addr: String,
        /// The server's version.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// The server does not know our key.
    #[error(
        "{addr}: the server refused the key from {key}: the keys do not match; use a copy of the server's key file"
    )]
    AuthenticationFailed {
        /// The server.
        addr: String,
        /// Where our key came from.
        key: String,
    },
    /// The server could not prove that it knows the key: it is another one's,
    /// or someone stands between.
    #[error(
        "{addr}: what answers there could not prove that it knows the key from {key}; nothing but our own proof was sent to it, check the address"
    )]
    Impostor {
        /// The server.
        addr: String,
        /// Where our key came from.
        key: String,
    },
    /// The server has as many clients as it may.
    #[error(
        "{addr}: the server has as many clients as its limits allow; raise its file limit (ulimit -n) or its --max-clients"
    )]
    ServerFull {
        /// The server.
        addr: String,
    },
    /// The server was asked to stop. The operation did not happen.
    #[error(
        "{addr}: server going away: it was asked to stop, and this operation did not happen; start it again or use another one"
    )]
    ServerGoingAway {
        /// The server.
        addr: String,
    },
    /// The connection was lost for good while the operation was under way: it
    /// may have happened or not.
    #[error(
        "{addr}: the outcome of {op} is unknown: {why}; read the cell to see whether it happened"
    )]
    OutcomeUnknown {
        /// The server.
        addr: String,
        /// The operation.
        op: &'static str,
        /// Why it cannot be known.
        why: String,
    },
    /// Shared memory was asked for, and cannot be had.
    #[error("no shared memory: {why}; use the transport auto, or a client on the server's machine")]
    Shm {
        /// Why not.
        why: String,
    },
    /// The server sent something that makes no sense.
    #[error("{addr}: the server broke the protocol: {what}; are both ends of one release?")]
    Protocol {
        /// The server.
        addr: String,
        /// What it was.
        what: String,
    },
    /// The array exists with another kind or shape.
    #[error(
        "array {name:?} exists as {exists}, asked for was {asked}; use another name, or the same kind and shape"
    )]
    ArrayMismatch {
        /// The array.
        name: String,
        /// What it is.
        exists: Form,
        /// What it was taken for.
        asked: Form,
    },
    /// No array has this name.
    #[error("there is no array {name:?}; create it, or see `farcell ls` for those that exist")]
    NoSuchArray {
        /// The name.
        name: String,
    },
    /// The array was removed while a handle to it was in use.
    #[error("array {name:?} was removed; open it again to make a new one")]
    ArrayRemoved {
        /// The array.
        name: String,
    },
    /// The array is of another kind.
    #[error("array {name:?} holds {kind} cells, which have no {op}; {}", use_for(*kind))]
    WrongKind {
        /// The array.
        name: String,
        /// Its kind.
        kind: Kind,
        /// The operation.
        op: &'static str,
    },
    /// The name cannot be the name of an array.
    #[error("{name:?} cannot name an array: {why}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: NameError,
    },
    /// Rows or columns are 0, or more than 2^32 - 1.
    #[error(
        "array {name:?} cannot have {rows} x {cols} cells: rows and columns go from 1 to 4294967295"
    )]
    BadShape {
        /// The array.
        name: String,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// The segment has not enough cells left in one piece.
    #[error(
        "no room for array {name:?}: {asked} cells asked for (padding included), {free} free, at most {largest} in one piece; start the server with a larger --capacity or remove arrays (what removed ones had comes back when the clients that had them open have let go, within two leases of one that died)"
    )]
    SegmentFull {
        /// The array.
        name: String,
        /// Cells that it would take up.
        asked: u64,
        /// Cells that are free.
        free: u64,
        /// Cells of the largest free piece.
        largest: u64,
    },
    /// The server has not enough memory left for the messages of an array of
    /// slots.
    #[error(
        "no room for the messages of array {name:?}: {asked} bytes asked for, {free} free; start the server with a larger --slot-bytes or remove arrays of slots (what removed ones had comes back when the clients that had them open have let go, within two leases of one that died)"
    )]
    SlotsFull {
        /// The array.
        name: String,
        /// Bytes that it would take up.
        asked: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// Someone is writing the row, and was still at it when patience ended. A
    /// write did not happen.
    #[error(
        "row {row} of array {name:?} is being written; {op} found no moment when it was not: let its writer and readers take turns, by an event for example, or try again"
    )]
    SlotBusy {
        /// The array.
        name: String,
        /// The row.
        row: usize,
        /// The operation.
        op: &'static str,
    },
    /// The one who wrote the row has gone in the middle, or gave up: there is
    /// no whole message in it.
    #[error(
        "row {row} of array {name:?} is torn: its writer went in the middle of a message, after version {version}; wait for the next whole one (read_newer), or write one"
    )]
    Torn {
        /// The array.
        name: String,
        /// The row.
        row: usize,
        /// The last whole message.
        version: u64,
    },
    /// The row was torn before a write that was not of a whole message, and
    /// stays so: what that left out may be of any message.
    #[error(
        "row {row} of array {name:?} was torn, its writer having gone in the middle after version {version}, and a part does not make it whole: it stays torn; write the whole message"
    )]
    PartOfTorn {
        /// The array.
        name: String,
        /// The row.
        row: usize,
        /// The last whole message.
        version: u64,
    },
    /// The row was taken away from the write, which did not happen.
    #[error(
        "the write to row {row} of array {name:?} has lost its claim: its session or its connection ended in the middle; write the message again"
    )]
    WriteLost {
        /// The array.
        name: String,
        /// The row.
        row: usize,
    },
    /// A message that does not fit the row, or one that does not fit the
    /// buffer.
    #[error("row {row} of array {name:?}: {what}")]
    SlotSize {
        /// The array.
        name: String,
        /// The row.
        row: usize,
        /// Which, and how large it may be.
        what: String,
    },
    /// A limit of the server.
    #[error("{addr}: {what}")]
    Limit {
        /// The server.
        addr: String,
        /// Which.
        what: String,
    },
    /// Row or column lie outside of the array.
    #[error(
        "cell ({row}, {col}) is outside of array {name:?} with {rows} rows and {cols} columns; both are counted from 0"
    )]
    OutOfRange {
        /// The array.
        name: String,
        /// Row asked for.
        row: usize,
        /// Column asked for.
        col: usize,
        /// Rows that there are.
        rows: usize,
        /// Columns that there are.
        cols: usize,
    },
    /// A number that a counter cannot hold.
    #[error("{value} does not fit a counter; it holds -4611686018427387904 to 4611686018427387903")]
    ValueTooLarge {
        /// The number.
        value: i64,
    },
    /// More cells, or fewer, than a call takes.
    #[error("{what}")]
    BadSelection {
        /// What is wrong with the selection.
        what: String,
    },
    /// The session may read only.
    #[error("{op} refused: this session is read-only; connect with the full key to change cells")]
    ReadOnly {
        /// The operation.
        op: &'static str,
    },
    /// The wait was cancelled from another thread.
    #[error("the wait was cancelled")]
    Cancelled,
    /// The session that this belonged to is over: the server heard nothing of
    /// it for its lease, or was started again without its state. What the session held is free and
    /// may be held by others, and nothing was changed. The client goes on with a
    /// new session.
    #[error(
        "{what}: the lease is over: the server has ended the session that this belonged to and freed what it held; nothing was changed"
    )]
    LeaseLost {
        /// What is lost.
        what: String,
    },
    /// A peer that the wait named is lost: its session has ended without being
    /// released.
    #[error("peer {peer:?} is lost: {how} {} ago", seconds(*ago))]
    PeerLost {
        /// What it called itself.
        peer: String,
        /// How its session ended.
        how: Parted,
        /// How long ago when the server told.
        ago: Duration,
    },
    /// The barrier is broken: nobody can pass it until it is reset.
    #[error("barrier {name:?} ({row}, {col}) is broken: {why}; reset it when all parties know")]
    BarrierBroken {
        /// The array.
        name: String,
        /// Row.
        row: usize,
        /// Column.
        col: usize,
        /// The party that has gone: what it called itself, or its seat.
        by: Option<String>,
        /// What has happened.
        why: String,
    },
    /// A living session is called so.
    #[error(
        "the name {peer:?} is taken by session {seat}, which lives; use another one, or wait until its lease is over"
    )]
    NameTaken {
        /// The name.
        peer: String,
        /// The seat of the one who has it.
        seat: u32,
    },
    /// Nobody can be called so.
    #[error("{peer:?} cannot name a peer: 1 to 128 bytes without control characters are possible")]
    BadPeerName {
        /// The name.
        peer: String,
    },
    /// More permits would come back than the semaphore has.
    #[error(
        "semaphore {name:?} ({row}, {col}) has {bound} permits, and giving back {count} more is too much; nothing was changed"
    )]
    TooManyPermits {
        /// The array.
        name: String,
        /// Row.
        row: usize,
        /// Column.
        col: usize,
        /// Permits to be given back.
        count: u32,
        /// Permits that there can be.
        bound: u32,
    },
    /// The client was closed.
    #[error("this client was closed")]
    Closed,
    /// The server serves another job.
    #[error(
        "{addr}: the server there serves another job than {job:?}; give each job a server of its own, or the same FARCELL_JOB to all that belong together"
    )]
    OtherJob {
        /// The server.
        addr: String,
        /// Our job.
        job: String,
    },
    /// A key that is none.
    #[error("bad key from {source_name}: {why}")]
    BadKey {
        /// Where it came from.
        source_name: String,
        /// What is wrong with it.
        why: KeyError,
    },
    /// A key file that cannot be used.
    #[error("key file {}: {what}", path.display())]
    KeyFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, and how to mend it.
        what: String,
    },
    /// No key was given, and none was found.
    #[error("no key: {} does not exist; start `farcell serve` once as this user, copy the server's key file there, or name one with FARCELL_AUTHKEY_FILE", path.display())]
    NoKey {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The server cannot listen there.
    #[error("cannot listen on {addr}: {why}")]
    Bind {
        /// The address.
        addr: String,
        /// Why not, and what to do.
        why: String,
    },
    /// The server's settings make no sense.
    #[error("{what}")]
    BadSetting {
        /// Which, and what would.
        what: String,
    },
    /// The state of a server, or a snapshot of it, cannot be used or written.
    #[error("{}: {what}", path.display())]
    State {
        /// The folder or file.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// RDMA was asked for and cannot be had.
    #[error("no RDMA: {what}")]
    Rdma {
        /// Why, and what to do.
        what: String,
    },
    /// The client or server was made before this process was forked, and is
    /// its parent's alone. Nothing was sent.
    #[error(
        "{what} was opened before this process was forked, and is its parent's alone: reopen before use"
    )]
    Forked {
        /// What it was.
        what: String,
    },
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: String,
        /// The system's answer.
        source: Arc<io::Error>,
    },
}

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parted {
    /// Nothing was heard of it for its lease: its process was killed or stopped,
    /// or its network is gone.
    Silent,
    /// Its client was closed without being released.
    Closed,
    /// It was released.
    Released,
}

impl std::fmt::Display for Parted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Parted::Silent => "nothing was heard of it for its lease, which was over",
            Parted::Closed => "it was closed without being released",
            Parted::Released => "it was released",
        })
    }
}

impl Error {
    pub(crate) fn os(what: impl Into<String>, source: io::Error) -> Error {
        Error::Os { what: what.into(), source: Arc::new(source) }
    }

    /// Whether the error means that the server cannot be reached, now or any
    /// more.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Error::Unreachable { .. }
                | Error::ServerGoingAway { .. }
                | Error::NotFarcell { .. }
                | Error::BadAddress { .. }
                | Error::OutcomeUnknown { .. }
        )
    }

    /// Whether the error means that the server, or this library in its place,
    /// refused.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Error::AuthenticationFailed { .. }
                | Error::Impostor { .. }
                | Error::Intercepted { .. }
                | Error::Tls { .. }
                | Error::VersionMismatch { .. }
                | Error::OtherJob { .. }
                | Error::ServerFull { .. }
                | Error::ReadOnly { .. }
                | Error::ArrayMismatch { .. }
                | Error::SegmentFull { .. }
                | Error::SlotsFull { .. }
                | Error::SlotBusy { .. }
                | Error::SlotSize { .. }
                | Error::NoSuchArray { .. }
                | Error::ArrayRemoved { .. }
                | Error::WrongKind { .. }
                | Error::BadName { .. }
                | Error::BadShape { .. }
                | Error::OutOfRange { .. }
                | Error::ValueTooLarge { .. }
                | Error::BadSelection { .. }
                | Error::Limit { .. }
                | Error::NameTaken { .. }
                | Error::BadPeerName { .. }
                | Error::TooManyPermits { .. }
                | Error::NoKey { .. }
                | Error::BadKey { .. }
                | Error::KeyFile { .. }
                | Error::State { .. }
        )
    }
}

impl From<KeyError> for Error {
    fn from(why: KeyError) -> Error {
        Error::BadKey { source_name: "the program".to_owned(), why }
    }
}

/// What an array of this kind is for, and how to look at it.
fn use_for(kind: Kind) -> &'static str {
    match kind {
        Kind::Event => "events are set, cleared, taken and waited for",
        Kind::Counter => "counters are read, stored, added to, compared and waited for",
        Kind::Lock => {
            "a lock is taken by a program (Client::locks), and `farcell members` shows who has it"
        }
        Kind::Barrier => {
            "programs meet at a barrier (Client::barriers), and `farcell members` shows who waits there"
        }
        Kind::Semaphore => {
            "permits are taken by programs (Client::semaphores), and `farcell members` shows who queues"
        }
        Kind::Slots => "messages are read and written: `farcell slot get` and `farcell slot put`",
    }
}

/// Seconds with as many digits as a person wants to read.
pub(crate) fn seconds(d: Duration) -> String {
    format!("{} s", (d.as_secs_f64() * 1000.0).round() / 1000.0)
}
