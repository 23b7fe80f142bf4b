//! One authenticated client: what it is called, what it has open, and the
//! replies that it may ask for again.

use super::counts::Tally;
use super::peers::nanos;
use crate::auth::Access;
use crate::catalog::{Entry, Kind};
use crate::wire::slots::{MAX_BESIDE, MAX_WRITES};
use crate::wire::{MAX_ARRAYS_OPEN, MAX_UNANSWERED, MAX_UNANSWERED_BYTES, Violation};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Where the frames for a session go. The engine passes it on and never looks
/// into it.
pub type Route = u64;

/// A reply that the client has not acknowledged yet.
#[derive(Debug)]
enum Reply {
    /// One word: what nearly every request is answered by, kept without an
    /// allocation.
    Word(u64),
    /// A whole frame.
    Frame(Box<[u8]>),
}

/// What is to be done with a request that has arrived.
#[derive(Debug, PartialEq, Eq)]
pub enum Arrival {
    /// It is new: carry it out.
    New,
    /// It came before and its reply is known: this word.
    Word(u64),
    /// It came before and its reply is known: this frame.
    Frame(Vec<u8>),
    /// It came before and its reply was not kept, since it changed nothing:
    /// carry it out again.
    Again,
}

/// The state of a session.
#[derive(Debug)]
pub struct Session {
    /// Its number.
    pub id: u64,
    /// What it may do.
    pub access: Access,
    /// Its connection, if it has one.
    pub route: Option<Route>,
    /// When its client last gave a sign, since the start of the server.
    pub last_heard: Duration,
    /// It is over: said goodbye, or silent for too long.
    pub ended: bool,
    /// Its place among the peers, 0 if there was none left.
    pub seat: u32,
    /// The same as `last_heard`, for those who only list it.
    pub heard: Arc<AtomicU64>,
    /// What it has asked for.
    pub tally: Arc<Tally>,
    /// It has handed over what it held: its end is no loss.
    pub released: bool,
    /// The array that its next frame opens has been made as far as it can be, and
    /// whether that was for this frame.
    pub prepared: Option<bool>,
    /// It has had an array of locks open.
    pub may_hold: bool,
    last_request: u64,
    replies: VecDeque<(u64, Reply)>,
    reply_bytes: usize,
    bindings: Vec<Option<Binding>>,
    /// Its client may reach cells without asking.
    one_sided: bool,
    /// Its client was given memory to write, which cannot be taken back.
    writes_memory: bool,
    /// It has ended by its client's silence.
    pub lapsed: bool,
    /// Connections for messages.
    beside: u32,
    /// Writes of messages whose end the client may not know: number and
    /// version word.
    writes: BTreeMap<u64, u64>,
}

/// An array that a session has open.
#[derive(Clone, Debug)]
struct Binding {
    entry: Arc<Entry>,
    /// Its client may reach the cells without asking.
    hold: Option<Arc<()>>,
}

impl Session {
    /// A session whose first request will have the number `next_request`.
    #[must_use]
    pub fn new(id: u64, access: Access, next_request: u64, now: Duration) -> Session {
        Session {
            id,
            access,
            route: None,
            last_heard: now,
            ended: false,
            seat: 0,
            heard: Arc::default(),
            tally: Arc::default(),
            released: false,
            prepared: None,
            may_hold: false,
            last_request: next_request.saturating_sub(1),
            replies: VecDeque::new(),
            reply_bytes: 0,
            bindings: Vec::new(),
            one_sided: false,
            writes_memory: false,
            lapsed: false,
            beside: 0,
            writes: BTreeMap::new(),
        }
    }

    /// From here on the client may reach the cells of its arrays without asking:
    /// those of a removed one are not given to others as long as the session has
    /// it open.
    pub fn set_one_sided(&mut self) {
        self.one_sided = true;
        for binding in self.bindings.iter_mut().flatten() {
            binding.hold = Some(binding.entry.hold());
        }
    }

    /// As [`set_one_sided`](Self::set_one_sided), by memory that its client may
    /// write from here on, and that cannot be taken back.
    pub fn set_writes_memory(&mut self) {
        self.writes_memory = true;
        self.set_one_sided();
    }

    /// The holds on cells that outlive a session that has ended by the silence of
    /// a client with memory to write: a process that was stopped may go on in the
    /// middle of an operation. To be dropped when the process has let go of its
    /// connection. Empty for any other session.
    pub fn take_holds(&mut self) -> Vec<Arc<()>> {
        if !(self.ended && self.lapsed && self.writes_memory) {
            return Vec::new();
        }
        self.bindings.iter_mut().flatten().filter_map(|binding| binding.hold.take()).collect()
    }

    /// Its client gave a sign.
    #[inline]
    pub fn hear(&mut self, now: Duration) {
        self.last_heard = now;
        // Relaxed: a time for people to read.
        self.heard.store(nanos(now), Ordering::Relaxed);
    }

    /// Counts one more connection for messages, unless there are enough.
    pub fn take_beside(&mut self) -> bool {
        let takes = self.beside < MAX_BESIDE;
        self.beside += u32::from(takes);
        takes
    }

    /// One of those is gone.
    pub fn give_beside(&mut self) {
        self.beside = self.beside.saturating_sub(1);
    }

    /// What the write with this number has made, if it was committed; forgets
    /// those before `oldest`.
    ///
    /// # Errors
    /// The client keeps more of them than it may.
    pub fn written(&mut self, write: u64, oldest: u64) -> Result<Option<u64>, Violation> {
        while self.writes.first_key_value().is_some_and(|(&first, _)| first < oldest) {
            self.writes.pop_first();
        }
        if self.writes.len() >= MAX_WRITES {
            return Err(Violation::Limit("writes of messages"));
        }
        Ok(self.writes.get(&write).copied())
    }

    /// Keeps what a write has made.
    pub fn has_written(&mut self, write: u64, word: u64) {
        self.writes.insert(write, word);
    }

    /// The array that the client calls by this number, if it is alive.
    #[inline]
    #[must_use]
    pub fn binding(&self, number: u16) -> Option<&Arc<Entry>> {
        let binding = self.bindings.get(usize::from(number))?.as_ref();
        binding.map(|b| &b.entry).filter(|entry| entry.is_alive())
    }

    /// Lets a number of the client's mean this array.
    ///
    /// # Errors
    /// The number is [`MAX_ARRAYS_OPEN`] or more.
    pub fn bind(&mut self, number: u16, entry: Option<Arc<Entry>>) -> Result<(), Violation> {
        let number = usize::from(number);
        if number >= MAX_ARRAYS_OPEN {
            return Err(Violation::Field("array"));
        }
        if number >= self.bindings.len() {
            // No more than needed: most clients open a handful.
            self.bindings.reserve_exact(number + 1 - self.bindings.len());
            self.bindings.resize(number + 1, None);
        }
        self.may_hold |= entry.as_ref().is_some_and(|e| e.form.kind == Kind::Lock);
        let hold = |entry: &Arc<Entry>| self.one_sided.then(|| entry.hold());
        self.bindings[number] = entry.map(|entry| Binding { hold: hold(&entry), entry });
        Ok(())
    }

    /// Takes note of a request: forgets what it acknowledges, and says whether
    /// it came before. Requests with id 0 stand outside the count.
    ///
    /// # Errors
    /// The client has acknowledged the reply to this very request, or keeps
    /// more replies unacknowledged than it may.
    pub fn arrive(&mut self, id: u64, span: u16, read_only: bool) -> Result<Arrival, Violation> {
        if id == 0 {
            return Ok(Arrival::Again);
        }
        let oldest = id.saturating_sub(u64::from(span));
        while let Some((kept, reply)) = self.replies.front() {
            if *kept >= oldest {
                break;
            }
            if let Reply::Frame(bytes) = reply {
                self.reply_bytes -= bytes.len();
            }
            self.replies.pop_front();
        }
        if self.replies.is_empty() && self.replies.capacity() > 64 {
            self.replies = VecDeque::new();
        }
        if id > self.last_request {
            if self.replies.len() >= MAX_UNANSWERED {
                return Err(Violation::Limit("unanswered requests"));
            }
            self.last_request = id;
            return Ok(Arrival::New);
        }
        match self.replies.binary_search_by_key(&id, |(kept, _)| *kept) {
            Ok(at) => Ok(match &self.replies[at].1 {
                Reply::Word(word) => Arrival::Word(*word),
                Reply::Frame(bytes) => Arrival::Frame(bytes.to_vec()),
            }),
            Err(_) if read_only => Ok(Arrival::Again),
            Err(_) => Err(Violation::Forgotten(id)),
        }
    }

    /// Whether a request has not been carried out before.
    pub fn is_new(&self, id: u64) -> bool {
        id == 0 || id > self.last_request
    }

    /// Keeps the reply to a request that changed something: one word.
    #[inline]
    pub fn keep_word(&mut self, id: u64, word: u64) {
        self.replies.push_back((id, Reply::Word(word)));
    }

    /// Keeps the reply to a request that changed something: a whole frame.
    ///
    /// # Errors
    /// The client has more bytes of replies unacknowledged than it may.
    pub fn keep_frame(&mut self, id: u64, frame: &[u8]) -> Result<(), Violation> {
        if self.reply_bytes + frame.len() > 2 * MAX_UNANSWERED_BYTES {
            return Err(Violation::Limit("bytes of unanswered requests"));
        }
        self.reply_bytes += frame.len();
        self.replies.push_back((id, Reply::Frame(frame.into())));
        Ok(())
    }
}
