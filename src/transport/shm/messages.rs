//! Messages in memory: the bytes are copied straight from and into the server's
//! own, a word at a time by relaxed atomics, since others may be at work there.
//!
//! A reader takes the version word, the bytes, and the word again. In the domain
//! of the CPU a writer claims the row with a compare-and-swap from a version that
//! nobody writes to one that has its seat, and makes the message whole with
//! another one from there: it fails if the server has torn the row meanwhile,
//! since the writer's session was over. Elsewhere the server is asked to claim and
//! to commit.
//!
//! Nothing takes a mapping away from a process that has it. So when the session of
//! a writer ends that may only be stopped, the server moves the row to memory that
//! the writer has not been told of ([`spares`](crate::slot::spares)): what it still
//! puts where the row was is nobody's. It looks before each [`PIECE`] bytes whether
//! the row is still its own.

use super::map::{Map, Window};
use super::protocol::{self, Ground};
use super::sleep::Here;
use super::{Shm, attach, seqlock};
use crate::cell::is_suspect;
use crate::engine::lock;
use crate::segment::words::{load, store};
use crate::slot::{HEAD, Version, extent, pitch};
use crate::transport::tcp::Look;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

/// Bytes that a writer copies between two looks at its claim.
const PIECE: usize = 64 << 10;

/// The messages of an array, in memory.
#[derive(Debug)]
struct Rows {
    map: Map,
    /// They may be changed.
    writable: bool,
    bytes: u64,
}

/// The memory of an array's messages: found out when first needed, and again
/// when the server's is another.
#[derive(Debug, Default)]
pub(crate) struct Messages(Mutex<Option<Known>>);

/// The rows that go with a window, if there are any.
type Known = (Arc<Window>, Option<Arc<Rows>>);

/// Which message is meant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Which {
    /// The session's number of the array.
    pub array: u16,
    /// The version word, counted from the start of the array.
    pub cell: u32,
    /// The row.
    pub row: u32,
    /// Rows of the array.
    pub rows: u32,
    /// Most bytes of a message.
    pub bytes: u64,
}

/// A message in memory.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    window: Arc<Window>,
    rows: Arc<Rows>,
    /// The version word, in the segment.
    place: u32,
    row: u32,
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Put {
    /// It is there, with this version.
    Done(Version),
    /// Someone else is writing it; the version word.
    Busy(u64),
    /// The claim was taken away; the version word.
    Lost(u64),
    /// The row is torn, and these are not all bytes of a message; its version
    /// word.
    Torn(u64),
    /// It must go another way.
    Not,
}

impl Rows {
    /// The length of a row's message, and its words, where they are now. `None`:
    /// that makes no sense. Of use to those who have seen the version before.
    fn area(&self, row: u32) -> Option<(&AtomicU64, &[AtomicU64])> {
        let words = self.map.words();
        let area = |number: u64| {
            let start = number.checked_mul(pitch(self.bytes))? / 8;
            words.get(usize::try_from(start).ok()?..)?.get(..(pitch(self.bytes) / 8) as usize)
        };
        // Relaxed: ordered by the version word, under which the server changes it.
        let area = match area(row.into())?[1].load(Ordering::Relaxed) {
            0 => area(row.into())?,
            number => area(number - 1)?,
        };
        Some((&area[0], &area[HEAD as usize / 8..][..self.bytes.div_ceil(8) as usize]))
    }
}

impl Message {
    /// Its words, as many as the longest message has.
    pub fn words(&self) -> &[AtomicU64] {
        self.rows.area(self.row).map_or(&[], |(_, words)| words)
    }
}

impl Shm {
    /// A message in memory, if it is there now. May ask the server.
    pub fn message(&self, messages: &Messages, which: Which) -> Option<Message> {
        if !self.link.is_ours() {
            return None;
        }
        let (window, place) = self.here(which.array, which.cell)?;
        let mut known = lock(&messages.0);
        let rows = match &*known {
            Some((then, rows)) if Arc::ptr_eq(then, &window) => rows.clone(),
            _ => {
                let tenure = self.read().tenure;
                let found =
                    attach::messages(&self.link, which.array).and_then(|(map, writable)| {
                        if (map.words().len() as u64) < extent(which.rows, which.bytes) / 8 {
                            return Err("the server's memory is smaller than its rows".to_owned());
                        }
                        Ok(Arc::new(Rows { map, writable, bytes: which.bytes }))
                    });
                // What has come must belong to this window.
                let (now, _) = self.here(which.array, which.cell)?;
                if !Arc::ptr_eq(&now, &window) || !self.link.has(tenure) {
                    return None;
                }
                let found = found
                    .inspect_err(|why| tracing::info!(target: "farcell::shm", why, "messages do not go through memory"))
                    .ok();
                *known = Some((window.clone(), found.clone()));
                found
            }
        };
        drop(known);
        (which.row < which.rows).then_some(())?;
        Some(Message { window, rows: rows?, place, row: which.row })
    }

    /// Whether this is the memory of the server that the session is with.
    fn is_current(&self, window: &Arc<Window>) -> bool {
        self.read().window.as_ref().is_some_and(|now| Arc::ptr_eq(now, window))
    }

    /// The same, and the server is there.
    fn is_up(&self, window: &Arc<Window>) -> bool {
        let state = self.read();
        state.up && state.window.as_ref().is_some_and(|now| Arc::ptr_eq(now, window))
    }

    /// Looks at a message once: brings its bytes from `offset` on. `None`: it
    /// must go another way.
    pub fn look(&self, message: &Message, offset: u64, into: &mut [u8]) -> Option<Look> {
        let Message { window, rows, row, .. } = message;
        let cell = window.cell(message.place)?;
        let word = seqlock::begin(cell);
        if is_suspect(word) || !self.is_current(window) {
            return None;
        }
        let version = Version::of(word);
        if version.is_writing() || version.is_torn() || version.number() == 0 {
            return Some(Look::Unsettled(version));
        }
        // Relaxed: if it changes meanwhile, so does the version. It counts only
        // as far as the row goes, whatever stands there.
        let (length, words) = rows.area(*row)?;
        let total = length.load(Ordering::Relaxed).min(rows.bytes);
        let left = usize::try_from(total.saturating_sub(offset)).unwrap_or(usize::MAX);
        let bytes = left.min(into.len());
        if bytes > 0 {
            load(words, offset as usize, &mut into[..bytes]);
        }
        match self.is_still(message, version) {
            true => Some(Look::Got { version, total, bytes }),
            false => {
                let word = cell.load(Ordering::Acquire);
                let other = is_suspect(word) || !self.is_current(window);
                (!other).then(|| Look::Unsettled(Version::of(word)))
            }
        }
    }

    /// Whether all that was taken of a message before this is of this version.
    pub fn is_still(&self, message: &Message, version: Version) -> bool {
        let cell = message.window.cell(message.place);
        cell.is_some_and(|cell| seqlock::is_still(cell, version))
    }

    /// Whether rows are claimed here, and not by the server.
    pub fn claims(&self, message: &Message) -> bool {
        message.window.writable && message.rows.writable && self.link.welcome().seat != 0
    }

    /// Writes bytes of a message and makes it whole.
    pub fn put(&self, message: &Message, offset: u64, bytes: &[u8], total: Option<u64>) -> Put {
        let Message { window, rows, row, .. } = message;
        let Some(here) = Here::new(self, window, message.place).filter(|_| rows.writable) else {
            return Put::Not;
        };
        let welcome = self.link.welcome();
        if welcome.seat == 0 || welcome.tenure() != self.read().tenure {
            return Put::Not;
        }
        let claimed = loop {
            let word = here.load();
            if is_suspect(word) || !self.is_current(window) {
                return Put::Not;
            }
            let before = Version::of(word);
            if before.is_writing() {
                return Put::Busy(word);
            }
            if before.is_torn() {
                // Nobody changes the length before someone has claimed the row,
                // and then the swap below fails. Relaxed as further down.
                let kept = || {
                    let length = rows.area(*row)?.0.load(Ordering::Relaxed);
                    Some(length.min(rows.bytes).max(bytes.len() as u64))
                };
                let Some(total) = total.or_else(kept) else { return Put::Not };
                if total > 0 && (offset > 0 || (bytes.len() as u64) < total) {
                    return Put::Torn(word);
                }
            }
            let claimed = before.claimed(welcome.seat);
            if let Ok(old) = seqlock::claim(here.word(), word, claimed) {
                protocol::answer(&here, old);
                break claimed;
            }
        };
        // A session that is over has lost its claim also if there is another by now;
        // one of a server that has gone never had one that counts.
        let lost = |word| match is_suspect(word)
            || self.link.welcome().incarnation != welcome.incarnation
        {
            true => Put::Not,
            false => Put::Lost(word),
        };
        // Once and for all: if the row moves it is no longer ours.
        let Some((length, words)) = rows.area(*row) else {
            return Put::Lost(claimed.word());
        };
        let ours = |word| Version::of(word) == claimed;
        if let Err(word) = copy(message, words, offset, bytes, ours) {
            return lost(word);
        }
        let reached = offset + bytes.len() as u64;
        // Relaxed: ordered by the version word, as the bytes are.
        let total = match total {
            Some(total) => total,
            None => length.load(Ordering::Relaxed).min(rows.bytes).max(reached),
        };
        length.store(total, Ordering::Relaxed);
        match seqlock::commit(here.word(), claimed) {
            Err(word) => lost(word),
            // Perhaps it was the memory of one who has gone. A message can be written
            // twice.
            Ok(_) if !self.is_up(window) => Put::Not,
            Ok(old) => {
                protocol::answer(&here, old);
                Put::Done(claimed.next())
            }
        }
    }

    /// Whether bytes can be put into a row that the server has claimed for us.
    pub fn may_fill(&self, message: &Message) -> bool {
        message.rows.writable && self.is_current(&message.window)
    }

    /// Puts bytes into a row that the server has claimed for us. `false`: all of
    /// them must go another way.
    pub fn fill(&self, message: &Message, offset: u64, bytes: &[u8]) -> bool {
        let seat = self.link.welcome().seat;
        let ours = |word| {
            let version = Version::of(word);
            version.is_writing() && version.seat() == seat && !is_suspect(word)
        };
        let Some((_, words)) = message.rows.area(message.row) else { return false };
        let done = self.may_fill(message)
            && copy(message, words, offset, bytes, ours).is_ok()
            && self.is_current(&message.window);
        // Release: before the request that makes the message whole.
        fence(Ordering::SeqCst);
        done
    }
}

/// Copies bytes in for as long as the version word is that of a claim of ours; the
/// word otherwise.
fn copy(
    message: &Message,
    words: &[AtomicU64],
    offset: u64,
    bytes: &[u8],
    ours: impl Fn(u64) -> bool,
) -> Result<(), u64> {
    let mut at = offset as usize;
    for piece in bytes.chunks(PIECE) {
        let word = message.window.cell(message.place).map_or(0, |c| c.load(Ordering::Acquire));
        if !ours(word) {
            return Err(word);
        }
        store(words, at, piece);
        at += piece.len();
    }
    Ok(())
}
