//! The client's end of its RDMA connections: a few queue pairs, and the cells
//! at their other end.

use super::doorbells::{DOORBELLS, Doorbells};
use super::lane::{Lane, PIPELINE, Trouble};
use crate::cell::{Change, Op, WAITING, change, is_suspect, is_waiting, must_ring, sync};
use crate::layout::{CELLS_AT, HEADER_BYTES, MAGIC_WORD, Run, header};
use crate::rdma::{Adapter, random_psn, read_offer};
use crate::server::NOTE_BYTES;
use crate::transport::Bell;
use crate::verbs::{
    Access, Completion, CompletionChannel, CompletionQueue, Error, Gid, GidEntry, Notify,
    ProtectionDomain, QueuePair, QueuePairConfig, Receive, Region, Remote, Request,
    UnconnectedQueuePair,
};
use crate::wire::{LaneRecord, RdmaRecord, Tag};
use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

/// Requests that one lane may have outstanding.
const DEPTH: u32 = 128;
/// Notifications that may be waiting for us.
const NOTES: u32 = 64;
/// Bytes of a lane's buffer that READs go into.
const BUFFER: usize = 64 << 10;

/// What so many lanes register: their buffers, and the notifications' receives.
pub(super) fn pinned_bytes(lanes: usize) -> u64 {
    (lanes * BUFFER + NOTES as usize * NOTE_BYTES) as u64
}

/// A number of the calling thread's own.
#[inline]
fn home() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static HOME: Cell<Option<usize>> = const { Cell::new(None) };
    }
    HOME.with(|home| {
        home.get().unwrap_or_else(|| {
            // Relaxed: a number, which orders no other memory.
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            home.set(Some(number));
            number
        })
    })
}

/// The swap to try where, by a guess, `op` would change nothing: that the cell
/// has gone one step further meanwhile, as it does when two take turns. It
/// costs no more than looking, since a swap that fails brings the word, too.
/// `None`: a look is as good.
fn likely(op: Op, word: u64, a: u64, b: u64) -> Option<(u64, u64)> {
    let word = match op {
        Op::Set | Op::Clear | Op::Take => (word & !WAITING).wrapping_add(2),
        Op::CompareExchange => a << 1,
        // It is ours, so the server has handed it to us meanwhile.
        Op::Release => {
            let seat = u32::try_from(b).unwrap_or(0);
            sync::Lock { token: a, granted: true, abandoned: false, seat }.word()
        }
        _ => return None,
    };
    match change(op, word, a, b) {
        Change::Swap(new) => Some((word, new)),
        _ => None,
    }
}

/// Queue pairs that have no peer yet, for one of our addresses.
#[derive(Debug)]
pub(super) struct Unconnected {
    gid: Option<GidEntry>,
    domain: Arc<ProtectionDomain>,
    lanes: Vec<(UnconnectedQueuePair, Arc<CompletionQueue>, Arc<CompletionChannel>)>,
    bell: (Arc<CompletionQueue>, Arc<CompletionChannel>),
    /// What the server is told.
    pub offer: Vec<u8>,
}

impl Unconnected {
    /// Makes `count` queue pairs, and one more for the doorbells, and says what
    /// the server must know of them.
    pub fn new(adapter: &Adapter, gid: Option<GidEntry>, count: usize) -> Result<Self, Error> {
        let context = &adapter.context;
        let domain = ProtectionDomain::new(context)?;
        let bell_channel = CompletionChannel::new(context)?;
        let bell = CompletionQueue::new(context, NOTES, Some((&bell_channel, 0)))?;
        let address = gid.as_ref().map_or(Gid::default(), |entry| entry.gid);
        let mut offer = bytemuck::bytes_of(&adapter.describe(address)).to_vec();
        let mut lanes = Vec::new();
        for i in 0..=count {
            let depth = if i < count { DEPTH } else { DOORBELLS };
            let channel = CompletionChannel::new(context)?;
            let completions = CompletionQueue::new(context, depth, Some((&channel, 0)))?;
            let receive = match i {
                0 => Receive::Own { completions: &bell, slots: NOTES, bytes: NOTE_BYTES as u32 },
                _ => Receive::Nothing,
            };
            let config = QueuePairConfig {
                port: adapter.port,
                depth,
                inline_bytes: 0,
                // The server only sends.
                access: Access::NONE,
                psn: random_psn(),
                completions: &completions,
                receive,
            };
            let queue = UnconnectedQueuePair::new(&domain, &config)?;
            let end = queue.endpoint(address)?;
            let record = LaneRecord { queue_pair: end.queue_pair, psn: end.psn };
            offer.extend_from_slice(bytemuck::bytes_of(&record));
            lanes.push((queue, completions, channel));
        }
        Ok(Unconnected { gid, domain, lanes, bell: (bell, bell_channel), offer })
    }

    /// Connects them to what the server has made, and tries them.
    pub fn connect(
        self,
        adapter: &Adapter,
        answer: &[u8],
        capacity: u64,
        dead_after: Duration,
    ) -> Result<Rails, String> {
        let (peer, records) =
            read_offer(Tag::RdmaOpened, answer).ok_or("the server's answer makes no sense")?;
        if records.len() != self.lanes.len() {
            return Err("the server's answer has another number of queue pairs".to_owned());
        }
        let index = self.gid.as_ref().map_or(0, |entry| entry.index);
        let (mut ends, mut lanes, mut queues) = (Vec::new(), Vec::new(), Vec::new());
        let broken = Arc::new(AtomicBool::new(false));
        for ((queue, completions, channel), record) in self.lanes.into_iter().zip(records) {
            let queue = adapter
                .connect(queue, index, &peer, &record, dead_after)
                .map_err(|e| e.to_string())?;
            let queue = Arc::new(queue);
            queues.push(queue.clone());
            ends.push((queue, completions, channel));
        }
        let (queue, completions, _) = ends.pop().ok_or("no queue pairs were asked for")?;
        let doorbells = Doorbells { queue, completions };
        for (queue, completions, channel) in ends {
            let buffer =
                Region::pages(&self.domain, BUFFER, Access::LOCAL).map_err(|e| e.to_string())?;
            lanes.push(Mutex::new(Lane {
                queue,
                completions,
                channel,
                buffer,
                staging: OnceLock::new(),
                broken: broken.clone(),
                patience: dead_after.saturating_mul(3),
            }));
        }
        let rails = Rails {
            lanes,
            doorbells,
            queues,
            broken,
            remote: peer,
            capacity,
            max_message: adapter.state.max_message,
            bell: self.bell,
            atomics: peer.atomics != 0,
        };
        rails.try_out().map_err(|t| format!("it does not work: {}", t.why))?;
        Ok(rails)
    }
}

/// Connected queue pairs. See the [module](self).
#[derive(Debug)]
pub(super) struct Rails {
    pub(super) lanes: Vec<Mutex<Lane>>,
    /// Bytes of the largest message that the adapter's port moves.
    pub(super) max_message: u32,
    doorbells: Doorbells,
    /// Those of the lanes, and that of the doorbells.
    queues: Vec<Arc<QueuePair>>,
    broken: Arc<AtomicBool>,
    remote: RdmaRecord,
    capacity: u64,
    bell: (Arc<CompletionQueue>, Arc<CompletionChannel>),
    /// Whether changes are ours to make.
    pub atomics: bool,
}

impl Rails {
    /// A lane that nobody uses, the thread's own if it can be: what it used last
    /// is near, on both ends.
    #[inline]
    pub(super) fn lane(&self) -> MutexGuard<'_, Lane> {
        let home = &self.lanes[home() % self.lanes.len()];
        home.try_lock().unwrap_or_else(|_| self.another(home))
    }

    #[cold]
    fn another<'a>(&'a self, home: &'a Mutex<Lane>) -> MutexGuard<'a, Lane> {
        let free = self.lanes.iter().find_map(|lane| lane.try_lock().ok());
        free.unwrap_or_else(|| crate::engine::lock(home))
    }

    #[inline]
    fn at(&self, byte: u64) -> Remote {
        let in_header = byte < HEADER_BYTES as u64;
        let key = if in_header { self.remote.header_key } else { self.remote.key };
        Remote { address: self.remote.address + byte, key }
    }

    #[inline]
    pub(super) fn cell(&self, place: u32) -> Remote {
        self.at(CELLS_AT as u64 + u64::from(place) * 8)
    }

    /// Reads the header, and tries each atomic on the scratch word: what came
    /// back is right, in value and byte order, on every lane.
    pub(super) fn try_out(&self) -> Result<(), Trouble> {
        let wrong = |what: &str| Trouble { why: what.to_owned(), undone: true };
        for lane in &self.lanes {
            let lane = crate::engine::lock(lane);
            let header = lane.buffer.slice(0..24).map_err(|e| Trouble::before(&e))?;
            lane.run(Request::read(header, self.at(0)))?;
            if lane.value(header::MAGIC) != MAGIC_WORD {
                return Err(wrong("a READ of the segment's header brought something else"));
            }
            if lane.value(header::CAPACITY) != self.capacity {
                return Err(wrong("the segment's header has another capacity"));
            }
            if !self.atomics {
                continue;
            }
            let scratch = self.at(header::SCRATCH as u64 * 8);
            let random = getrandom::u64().unwrap_or(0x0102_0304_0506_0708);
            lane.run(Request::read(lane.word(0)?, scratch))?;
            let mut seen = lane.value(0);
            // Other clients try theirs on the same word.
            for _ in 0..1000 {
                lane.run(Request::compare_swap(lane.word(0)?, scratch, seen, random))?;
                let found = lane.value(0);
                if found == seen {
                    lane.run(Request::fetch_add(lane.word(0)?, scratch, 1))?;
                    return match lane.value(0) {
                        old if old == random => Ok(()),
                        // Someone else came between the two.
                        _ => continue,
                    };
                }
                seen = found;
            }
            return Err(wrong("atomics bring back other values than they should"));
        }
        Ok(())
    }

    /// One operation on one cell: one atomic or READ if the guess is right.
    /// The word before it. If that is suspect, only an add has changed the cell.
    /// A guess never is.
    pub fn execute(
        &self,
        place: u32,
        op: Op,
        a: u64,
        b: u64,
        guess: &AtomicU64,
    ) -> Result<u64, Trouble> {
        let lane = self.lane();
        let cell = self.cell(place);
        if op.is_read() {
            lane.run(Request::read(lane.word(0)?, cell)).map_err(Trouble::in_read)?;
            let word = lane.value(0);
            if !is_suspect(word) {
                // Relaxed, here and below: a guess is checked by the adapter.
                guess.store(word, Ordering::Relaxed);
            }
            return Ok(word);
        }
        let mut word = guess.load(Ordering::Relaxed);
        let mut sure = false;
        loop {
            let new = match change(op, word, a, b) {
                Change::Swap(new) => new,
                Change::None if sure => return Ok(word),
                // Nothing to change, by a guess.
                Change::None => {
                    sure = true;
                    match likely(op, word, a, b) {
                        Some(swap) => {
                            word = swap.0;
                            swap.1
                        }
                        None => {
                            lane.run(Request::read(lane.word(0)?, cell))
                                .map_err(Trouble::in_read)?;
                            word = lane.value(0);
                            if is_suspect(word) {
                                return Ok(word);
                            }
                            guess.store(word, Ordering::Relaxed);
                            continue;
                        }
                    }
                }
                // Whatever the word is.
                Change::Add(delta) => {
                    lane.run(Request::fetch_add(lane.word(0)?, cell, delta))?;
                    let old = lane.value(0);
                    if must_ring(op, old, b) {
                        self.ring(place);
                    }
                    if !is_suspect(old) {
                        guess.store(old.wrapping_add(delta), Ordering::Relaxed);
                    }
                    return Ok(old);
                }
            };
            lane.run(Request::compare_swap(lane.word(0)?, cell, word, new))?;
            let found = lane.value(0);
            if found == word {
                guess.store(new, Ordering::Relaxed);
                if must_ring(op, found, b) {
                    self.ring(place);
                }
                return Ok(found);
            }
            if is_suspect(found) {
                return Ok(found);
            }
            guess.store(found, Ordering::Relaxed);
            sure = true;
            word = found;
        }
    }

    /// Tells the server's CPU that a cell with waiters was changed. The change is
    /// done. Should the bell not get through, the server's sweep finds the cell;
    /// so this is no trouble of the operation.
    fn ring(&self, place: u32) {
        if let Err(error) = self.doorbells.ring(place) {
            tracing::warn!(target: "farcell::rdma", %error, "a doorbell did not get through");
            self.broken.store(true, Ordering::Relaxed);
        }
    }

    /// Breaks the queue pairs: what they have under way ends, and what has not
    /// reached the server never does.
    pub fn shut(&self) {
        self.broken.store(true, Ordering::Relaxed);
        for queue in &self.queues {
            if let Err(error) = queue.shut() {
                tracing::warn!(target: "farcell::rdma", %error, "cannot shut a queue pair");
            }
        }
    }

    /// Loads and adds, as many under way as there can be, done in their order.
    /// The answers of those that are known to be done are filled in.
    pub fn load_and_add(
        &self,
        ops: &[(u32, Op, u64)],
        words: &mut [Option<u64>],
    ) -> Result<(), Trouble> {
        let lane = self.lane();
        let mut watched = Vec::new();
        let make = |i: usize, word| {
            let (place, op, a) = ops[i];
            match op {
                Op::Add => Request::fetch_add(word, self.cell(place), a << 1),
                _ => Request::read(word, self.cell(place)),
            }
        };
        let streamed = lane.stream(ops.len(), make, |i, old| {
            words[i] = Some(old);
            if ops[i].1 == Op::Add && is_waiting(old) {
                watched.push(ops[i].0);
            }
        });
        self.ring_all(watched);
        streamed
    }

    /// Rings once for each of these cells.
    fn ring_all(&self, mut places: Vec<u32>) {
        places.sort_unstable();
        places.dedup();
        for place in places {
            self.ring(place);
        }
    }

    /// Sets or clears many events, in no particular order among them, with as
    /// many atomics under way as there can be. The answers of those that are
    /// known to be done are filled in; a suspect cell stays as it is, without
    /// an answer.
    pub fn change_all(
        &self,
        op: Op,
        cells: &[(u32, &AtomicU64)],
        words: &mut [Option<u64>],
    ) -> Result<(), Trouble> {
        let lane = self.lane();
        // Which cell, and the word that it is taken to hold. Relaxed: a guess is
        // checked by the adapter.
        let mut tries: Vec<(usize, u64)> = cells
            .iter()
            .enumerate()
            .map(|(i, (_, guess))| (i, guess.load(Ordering::Relaxed)))
            .collect();
        for (_, word) in &mut tries {
            if let (Change::None, Some(swap)) = (change(op, *word, 0, 0), likely(op, *word, 0, 0)) {
                *word = swap.0;
            }
        }
        while !tries.is_empty() {
            let (mut again, mut watched) = (Vec::new(), Vec::new());
            let make = |n: usize, into| {
                let (i, word) = tries[n];
                let cell = self.cell(cells[i].0);
                match change(op, word, 0, 0) {
                    Change::Swap(new) => Request::compare_swap(into, cell, word, new),
                    _ => Request::read(into, cell),
                }
            };
            let streamed = lane.stream(tries.len(), make, |n, found| {
                let (i, word) = tries[n];
                let (place, guess) = cells[i];
                match change(op, word, 0, 0) {
                    Change::Swap(new) if found == word => {
                        guess.store(new, Ordering::Relaxed);
                        words[i] = Some(found);
                        if is_waiting(found) {
                            watched.push(place);
                        }
                        return;
                    }
                    _ if is_suspect(found) => return,
                    _ => guess.store(found, Ordering::Relaxed),
                }
                match change(op, found, 0, 0) {
                    Change::Swap(_) => again.push((i, found)),
                    _ => words[i] = Some(found),
                }
            });
            self.ring_all(watched);
            streamed?;
            tries = again;
        }
        Ok(())
    }

    /// Reads many cells, with as many READs under way as there can be.
    pub fn read(&self, base: u32, runs: &[Run], words: &mut Vec<u64>) -> Result<(), Trouble> {
        let lane = self.lane();
        let capacity = BUFFER / 8;
        // (first word of the buffer, cells, place), each one READ.
        let mut parts: Vec<(usize, usize, u32)> = Vec::new();
        let mut filled = 0;
        let flush = |parts: &mut Vec<(usize, usize, u32)>,
                     filled: &mut usize,
                     words: &mut Vec<u64>| {
            let mut requests = parts
                .iter()
                .map(|&(at, n, place)| {
                    let into =
                        lane.buffer.slice(at * 8..(at + n) * 8).map_err(|e| Trouble::before(&e))?;
                    Ok(Request::read(into, self.cell(place)))
                })
                .collect::<Result<Vec<_>, Trouble>>()?;
            lane.run_all(&mut requests)?;
            let buffer = lane.buffer.words();
            // Relaxed: see `Lane::value`.
            words.extend(buffer[..*filled].iter().map(|w| w.load(Ordering::Relaxed)));
            parts.clear();
            *filled = 0;
            Ok::<(), Trouble>(())
        };
        for run in runs {
            let mut at = 0;
            while at < run.count {
                if filled == capacity || parts.len() == PIPELINE {
                    flush(&mut parts, &mut filled, words)?;
                }
                let n = if run.stride == 1 {
                    (run.count - at).min((capacity - filled) as u32)
                } else {
                    1
                };
                parts.push((filled, n as usize, base + run.offset + at * run.stride));
                filled += n as usize;
                at += n;
            }
        }
        if filled > 0 {
            flush(&mut parts, &mut filled, words)?;
        }
        Ok(())
    }

    /// For tests: tries to change a word of the header by this key of the
    /// session's two. Whether it was refused.
    pub fn header_refuses(&self, own_key: bool) -> bool {
        let Remote { address, key } = self.at(header::CAPACITY as u64 * 8);
        let to = Remote { address, key: if own_key { key } else { self.remote.key } };
        let lane = self.lane();
        let word = lane.word(0);
        word.and_then(|word| lane.run(Request::fetch_add(word, to, 1))).is_err_and(|t| t.undone)
    }

    /// How many queue pairs there are.
    pub fn count(&self) -> usize {
        self.lanes.len()
    }
}

impl Bell for Rails {
    fn fd(&self) -> BorrowedFd<'_> {
        self.bell.1.as_fd()
    }

    /// Takes the frames that the server has sent to our queue pair. After it
    /// the descriptor becomes readable with the next one.
    fn take(&self, frames: &mut Vec<u8>) -> bool {
        let (queue, channel) = &self.bell;
        // Not by way of its lane, which may be locked for as long as an
        // operation takes to find its peer dead.
        let lane = &self.queues[0];
        let mut work = || -> Result<(), Error> {
            while channel.next()?.is_some() {}
            queue.arm(Notify::Any)?;
            let mut batch = [Completion::default(); 16];
            let mut note = Vec::new();
            loop {
                let n = queue.poll(&mut batch)?;
                if n == 0 {
                    return Ok(());
                }
                for completion in &batch[..n] {
                    let received = lane.received(completion)?;
                    note.clear();
                    lane.read(&received, &mut note)?;
                    frames.extend_from_slice(&note);
                    lane.repost(received.slot)?;
                }
            }
        };
        // A broken connection shows in the next operation; the sweep and the
        // heartbeats over TCP cover the time until then.
        work().is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_step_is_guessed() {
        // Set by us as transition 5, and most likely cleared since.
        assert_eq!(likely(Op::Set, 5 << 1, 0, 0), Some((6 << 1, 7 << 1)));
        assert_eq!(likely(Op::Set, 5 << 1 | WAITING, 0, 0), Some((6 << 1, 7 << 1)));
        assert_eq!(likely(Op::Take, 0, 0, 0), Some((1 << 1, 2 << 1)));
        assert_eq!(likely(Op::CompareExchange, 9 << 1, 3, 4), Some((3 << 1, 4 << 1)));
        // Nothing would be changed: a look will do.
        assert_eq!(likely(Op::CompareExchange, 9 << 1, 3, 3), None);
        assert_eq!(likely(Op::Store, 9 << 1, 9, 0), None);
    }
}
