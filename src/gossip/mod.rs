//! Gossip: learners that mix their parameters with those of a few others, as in
//! gossip-based actor-learner training (GALA).
//!
//! Each learner has a [`Buffer`]. In its own time it offers its parameters with
//! [`Buffer::write_message`], which is skipped while a peer has yet to read what
//! was offered before, and mixes what others have offered into its own with
//! [`Buffer::aggregate`], which puts up with peers that lag behind for so many
//! rounds, and then waits for them. Own parameters and messages have the weight
//! `1 / (peers + 1)` each.
//!
//! A learner that dies hangs nobody. Its readers go on without it and give its
//! weight to their own parameters, and its writers do not wait until it has read.
//! Learners call their sessions by name for that ([`Client::join`]), or the
//! buffer does.
//!
//! All of it is made of events and slots: `NAME.written` and `NAME.read` hold an
//! event for each writer and reader, `NAME.messages` a slot for each writer.

mod topology;

pub use topology::Topology;

use crate::{Client, Error, Event, EventArray, Result, Slot, WaitOptions};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What parameters are: `f32` or `f64`.
pub trait Number: bytemuck::Pod + private::Sealed {
    /// A product, a sum, and the inverse of a count.
    #[doc(hidden)]
    fn mix(own: Self, weight: f64, message: Self) -> Self;
    /// `value * weight`.
    #[doc(hidden)]
    fn scale(value: Self, weight: f64) -> Self;
    /// As [`mix`](Self::mix), of a message where it is, which may change meanwhile.
    /// Loads are relaxed: the message's version says behind them what they were.
    #[doc(hidden)]
    fn mix_words(mixed: &mut [Self], own: &[Self], weight: f64, words: &[AtomicU64]);
}

mod private {
    /// Nobody else implements [`Number`](super::Number).
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

impl Number for f32 {
    fn mix(own: f32, weight: f64, message: f32) -> f32 {
        own + message * weight as f32
    }
    fn scale(value: f32, weight: f64) -> f32 {
        value * weight as f32
    }
    fn mix_words(mixed: &mut [f32], own: &[f32], weight: f64, words: &[AtomicU64]) {
        let halves = |word: &AtomicU64| {
            let word = word.load(Ordering::Relaxed);
            [word as u32, (word >> 32) as u32].map(f32::from_bits)
        };
        let ((pairs, odd), (own, last)) = (mixed.as_chunks_mut::<2>(), own.as_chunks::<2>());
        let rest = words.get(pairs.len());
        for ((pair, own), word) in pairs.iter_mut().zip(own).zip(words) {
            let [low, high] = halves(word);
            *pair = [f32::mix(own[0], weight, low), f32::mix(own[1], weight, high)];
        }
        if let ([odd], [own], Some(word)) = (odd, last, rest) {
            *odd = f32::mix(*own, weight, halves(word)[0]);
        }
    }
}

impl Number for f64 {
    fn mix(own: f64, weight: f64, message: f64) -> f64 {
        own + message * weight
    }
    fn scale(value: f64, weight: f64) -> f64 {
        value * weight
    }
    fn mix_words(mixed: &mut [f64], own: &[f64], weight: f64, words: &[AtomicU64]) {
        for ((mixed, own), word) in mixed.iter_mut().zip(own).zip(words) {
            *mixed = f64::mix(*own, weight, f64::from_bits(word.load(Ordering::Relaxed)));
        }
    }
}

/// How a learner gossips.
#[derive(Clone, Debug)]
pub struct Options {
    topology: Topology,
    peers: usize,
    rotate: bool,
    staleness: u64,
    wait_for_readers: bool,
    patience: Duration,
    names: Option<Vec<String>>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            topology: Topology::Ring,
            peers: 1,
            rotate: false,
            staleness: 0,
            wait_for_readers: false,
            patience: Duration::from_secs(30),
            names: None,
        }
    }
}

impl Options {
    /// A ring, one peer, no staleness.
    #[must_use]
    pub fn new() -> Options {
        Options::default()
    }

    /// Who sends to whom.
    #[must_use]
    pub fn topology(mut self, topology: Topology) -> Options {
        self.topology = topology;
        self
    }

    /// How many peers each message goes to.
    #[must_use]
    pub fn peers(mut self, peers: usize) -> Options {
        self.peers = peers;
        self
    }

    /// The next message goes to the next peers.
    #[must_use]
    pub fn rotate(mut self, yes: bool) -> Options {
        self.rotate = yes;
        self
    }

    /// How often in a row [`Buffer::aggregate`] may find a message missing and
    /// go on without mixing. 0: it always waits for all.
    #[must_use]
    pub fn staleness(mut self, rounds: u64) -> Options {
        self.staleness = rounds;
        self
    }

    /// [`Buffer::write_message`] waits for its readers, and skips nothing: all
    /// learners make the same rounds.
    #[must_use]
    pub fn wait_for_readers(mut self, yes: bool) -> Options {
        self.wait_for_readers = yes;
        self
    }

    /// How long to wait for a peer that lives and does nothing; 30 s unless told
    /// otherwise. Then it counts as lost in this round.
    #[must_use]
    pub fn patience(mut self, time: Duration) -> Options {
        self.patience = time;
        self
    }

    /// What the sessions of the learners are called, by rank, where they call
    /// themselves so. Otherwise the buffer calls them `NAME/RANK`.
    #[must_use]
    pub fn names(mut self, names: Vec<String>) -> Options {
        self.names = Some(names);
        self
    }
}

/// What became of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is there, for these many peers.
    Written(usize),
    /// A peer has not read the one before.
    Skipped,
}

/// What became of own parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mixed {
    /// They were mixed with the messages of all peers but those who are lost.
    Done {
        /// How many messages there were.
        messages: usize,
        /// Ranks whose message never came.
        lost: Vec<usize>,
    },
    /// They are as they were: a message is missing, for so many times in a row.
    Stale(u64),
}

/// A learner's place in the gossip. See the [module](self).
#[derive(Debug)]
pub struct Buffer<T> {
    rank: usize,
    len: usize,
    options: Options,
    names: Vec<String>,
    /// Whom each learner sends to, by group.
    book: Vec<Vec<usize>>,
    slots: Vec<Slot>,
    /// `[writer][reader]`: there is a message.
    written: EventArray,
    /// `[writer][reader]`: it was read.
    read: EventArray,
    /// Messages written, and times mixed: which groups are in use.
    writes: u64,
    mixes: u64,
    stale: u64,
    /// Who has yet to read our last message.
    readers: Vec<usize>,
    /// A message that was copied, or what comes of mixing one where it is.
    message: Vec<T>,
    sums: Vec<T>,
}

/// Who is shown the messages.
type Onlooker<'l, T> = &'l mut dyn FnMut(usize, &[T]);

impl<T: Number> Buffer<T> {
    /// A place for the learner `rank` of `learners` under this name, for
    /// messages of `len` numbers. All must have the same options.
    ///
    /// # Errors
    /// [`Error::BadSetting`]; those of [`Client::events`], [`Client::slots`] and
    /// [`Client::join`].
    pub fn new(
        client: &Client,
        name: &str,
        rank: usize,
        learners: usize,
        len: usize,
        options: Options,
    ) -> Result<Buffer<T>> {
        let bad = |what: String| Err(Error::BadSetting { what });
        let book = options.topology.peers(learners)?;
        if rank >= learners {
            return bad(format!("rank {rank} of {learners} learners: ranks are counted from 0"));
        }
        let groups = book[rank].len();
        if options.peers == 0 || options.peers > groups {
            let Options { topology, peers, .. } = &options;
            return bad(format!(
                "{peers} peers of {learners} learners, {topology:?}: from 1 to {groups} are possible"
            ));
        }
        let names = match &options.names {
            Some(names) if names.len() == learners => names.clone(),
            Some(names) => return bad(format!("{} names for {learners} learners", names.len())),
            None => {
                let names: Vec<_> = (0..learners).map(|rank| format!("{name}/{rank}")).collect();
                client.join(&names[rank])?;
                names
            }
        };
        let written = client.events(&format!("{name}.written"), learners, learners)?;
        let read = client.events(&format!("{name}.read"), learners, learners)?;
        let size = (len as u64).saturating_mul(size_of::<T>() as u64);
        let messages = client.slots(&format!("{name}.messages"), learners, size.max(1))?;
        Ok(Buffer {
            rank,
            len,
            options,
            names,
            book,
            slots: (0..learners).map(|row| messages.at(row)).collect::<Result<_>>()?,
            written,
            read,
            writes: 0,
            mixes: 0,
            stale: 0,
            readers: Vec::new(),
            message: vec![T::zeroed(); len],
            sums: Vec::with_capacity(len),
        })
    }

    /// The groups that are in use in this round.
    fn groups(&self, round: u64) -> Vec<usize> {
        let (count, peers) = (self.book[self.rank].len(), self.options.peers);
        let first = if self.options.rotate { round % count as u64 * peers as u64 } else { 0 };
        (0..peers).map(|i| (first as usize + i) % count).collect()
    }

    /// Whom the next message goes to.
    #[must_use]
    pub fn out_peers(&self) -> Vec<usize> {
        self.groups(self.writes).into_iter().map(|group| self.book[self.rank][group]).collect()
    }

    /// Whose messages are mixed next.
    #[must_use]
    pub fn in_peers(&self) -> Vec<usize> {
        let groups = self.groups(self.mixes);
        let sends = |peer: &usize| groups.iter().any(|&group| self.book[*peer][group] == self.rank);
        (0..self.book.len()).filter(sends).collect()
    }

    /// Offers these parameters to the peers whose turn it is. Blocks only with
    /// [`Options::wait_for_readers`].
    ///
    /// # Errors
    /// [`Error::BadSetting`] for another length; those of [`Slot::write`] and of
    /// [`Event::set`].
    pub fn write_message(&mut self, parameters: &[T]) -> Result<Sent> {
        self.check(parameters.len())?;
        let wait = self.options.wait_for_readers;
        let patience = if wait { self.options.patience } else { Duration::ZERO };
        if !self.were_read(patience)? && !wait {
            return Ok(Sent::Skipped);
        }
        let peers = self.out_peers();
        for &peer in &peers {
            self.read.at(self.rank, peer)?.clear()?;
        }
        self.slots[self.rank].write(bytemuck::cast_slice(parameters))?;
        for &peer in &peers {
            // Behind the message: who sees it finds the message.
            self.written.at(self.rank, peer)?.set()?;
        }
        self.writes += 1;
        self.readers = peers;
        Ok(Sent::Written(self.readers.len()))
    }

    /// Mixes the messages of the peers whose turn it is into these parameters.
    /// Waits for those that are missing once it has gone on without them as
    /// often as it may. In shared memory messages are mixed where they are, again
    /// if one was replaced meanwhile; by any other way they are copied first.
    ///
    /// # Errors
    /// [`Error::BadSetting`] for another length, also of a message; those of
    /// [`Slot::read`] and of [`Event::wait`].
    pub fn aggregate(&mut self, parameters: &mut [T]) -> Result<Mixed> {
        self.mix(parameters, None)
    }

    /// As [`aggregate`](Self::aggregate), and shows a copy of each message to
    /// `look`, with the rank of its writer, before any is mixed in for good.
    ///
    /// # Errors
    /// As [`aggregate`](Self::aggregate).
    pub fn aggregate_with(
        &mut self,
        parameters: &mut [T],
        mut look: impl FnMut(usize, &[T]),
    ) -> Result<Mixed> {
        self.mix(parameters, Some(&mut look))
    }

    fn mix(&mut self, parameters: &mut [T], mut look: Option<Onlooker<'_, T>>) -> Result<Mixed> {
        self.check(parameters.len())?;
        let peers = self.in_peers();
        let mut missing = Vec::new();
        for &peer in &peers {
            if !self.written.at(peer, self.rank)?.is_set()? {
                missing.push(peer);
            }
        }
        let mut lost = Vec::new();
        if !missing.is_empty() {
            if self.stale < self.options.staleness {
                self.stale += 1;
                return Ok(Mixed::Stale(self.stale));
            }
            if self.writes <= self.mixes {
                // Those whom we would wait for may be waiting for us, who have
                // skipped a message. It is our turn first.
                self.were_read(self.options.patience)?;
                self.stale += 1;
                return Ok(Mixed::Stale(self.stale));
            }
            let deadline = Instant::now() + self.options.patience;
            for &peer in &missing {
                let event = self.written.at(peer, self.rank)?;
                if !self.await_peer(&event, peer, deadline)? {
                    lost.push(peer);
                }
            }
        }
        let weight = 1.0 / (peers.len() + 1) as f64;
        // What a lost peer would have had.
        let own = weight * (1 + lost.len()) as f64;
        self.sums.clear();
        self.sums.extend(parameters.iter().map(|&p| T::scale(p, own)));
        for &peer in peers.iter().filter(|peer| !lost.contains(peer)) {
            self.mix_in(peer, weight, &mut look)?;
        }
        // Only now, so that an error leaves all as it was.
        for &peer in peers.iter().filter(|peer| !lost.contains(peer)) {
            self.written.at(peer, self.rank)?.clear()?;
            self.read.at(peer, self.rank)?.set()?;
        }
        parameters.copy_from_slice(&self.sums);
        self.mixes += 1;
        self.stale = 0;
        Ok(Mixed::Done { messages: peers.len() - lost.len(), lost })
    }

    /// Mixes the message of one peer into the sums.
    fn mix_in(
        &mut self,
        peer: usize,
        weight: f64,
        look: &mut Option<Onlooker<'_, T>>,
    ) -> Result<()> {
        let (slot, size) = (&self.slots[peer], self.len * size_of::<T>());
        let differs = |len: usize| {
            let what =
                format!("the message of rank {peer} has {len} bytes where others have {size}");
            Err(Error::BadSetting { what })
        };
        if look.is_none() && slot.is_in_memory()? {
            let (sums, mixed) = (&mut self.sums, &mut self.message);
            let ((), received) = slot.read_with(|words, len| {
                if len == size {
                    T::mix_words(mixed, sums, weight, words);
                }
            })?;
            if received.len != size {
                return differs(received.len);
            }
            std::mem::swap(sums, mixed);
            return Ok(());
        }
        let received = slot.read(bytemuck::cast_slice_mut(&mut self.message))?;
        if received.len != size {
            return differs(received.len);
        }
        if let Some(look) = look {
            look(peer, &self.message);
        }
        for (sum, &number) in self.sums.iter_mut().zip(&self.message) {
            *sum = T::mix(*sum, weight, number);
        }
        Ok(())
    }

    fn check(&self, len: usize) -> Result<()> {
        if len == self.len {
            return Ok(());
        }
        let what = format!("{len} parameters where messages have {}", self.len);
        Err(Error::BadSetting { what })
    }

    /// Whether those who have not read our last message have, or are lost.
    fn were_read(&mut self, patience: Duration) -> Result<bool> {
        let deadline = Instant::now() + patience;
        let mut left = Vec::new();
        for &peer in &self.readers {
            let event = self.read.at(self.rank, peer)?;
            if event.is_set()? || self.await_peer(&event, peer, deadline)? {
                continue;
            }
            if !self.is_lost(&event, peer)? {
                left.push(peer);
            }
        }
        self.readers = left;
        Ok(self.readers.is_empty())
    }

    /// Waits for an event of a peer. `false`: the peer is lost, or the time over.
    fn await_peer(&self, event: &Event, peer: usize, deadline: Instant) -> Result<bool> {
        let left = deadline.saturating_duration_since(Instant::now());
        let options = WaitOptions::new().timeout(left).peers([self.names[peer].as_str()]);
        match event.wait_with_options(&options) {
            Ok(set) => Ok(set),
            Err(Error::PeerLost { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn is_lost(&self, event: &Event, peer: usize) -> Result<bool> {
        let options = WaitOptions::new().timeout(Duration::ZERO).peers([self.names[peer].as_str()]);
        match event.wait_with_options(&options) {
            Err(Error::PeerLost { .. }) => Ok(true),
            other => other.map(|_| false),
        }
    }
}
