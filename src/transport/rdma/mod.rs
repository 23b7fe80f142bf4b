//! Operations as one-sided READs and atomics, with TCP behind them.
//!
//! The session's control connection stays: it opens arrays, parks waits, and
//! takes everything over when the RDMA connection breaks.

mod doorbells;
mod lane;
mod rails;
mod slots;

pub(crate) use slots::{From as SlotFrom, Into as SlotInto, SlotWay, put as slot_put};

use super::tcp::{Canceller, Link};
use super::{CellOp, Failure, Follower, Transport, Waited, fell};
use crate::auth::{Access, Welcome};
use crate::cell::sync::{Lock, MAX_TOKEN};
use crate::cell::{Op, is_suspect, is_waiting};
use crate::engine::Way;
use crate::error::Error;
use crate::layout::Run;
use crate::rdma::Adapter;
use crate::verbs::library;
use crate::wire::{Tag, WaitRecord};
use lane::Trouble;
use rails::{Rails, Unconnected};
use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

/// How long the server may take to make its end.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the server may take to say that nothing more can happen by RDMA.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two looks whether operations that were under way have ended.
const STILL_UNDER_WAY: Duration = Duration::from_micros(50);

/// How RDMA is brought up.
#[derive(Clone, Debug)]
pub(crate) struct RdmaSettings {
    /// `NAME` or `NAME:PORT`.
    pub device: Option<String>,
    /// Place of the GID in the port's table.
    pub gid_index: Option<u32>,
    /// A peer that does not answer for this long is given up.
    pub dead_after: Duration,
    /// Queue pairs.
    pub lanes: usize,
    /// Why there is to be none, whatever there could be.
    pub kept_off: Option<String>,
}

/// What a client registers for this many queue pairs.
pub(crate) fn pinned_bytes(lanes: usize) -> u64 {
    rails::pinned_bytes(lanes)
}

/// What RDMA would lack on this side as well, where the server's not offering
/// it was reason enough to look no further.
pub(crate) fn lacking(link: &Link) -> Option<String> {
    if link.welcome().offers_rdma {
        return None;
    }
    library().err().map(|error| error.to_string())
}

/// Why the server has none, in its own words: there is nothing to be given up, and
/// the answer says so.
fn not_offered(link: &Link) -> String {
    match link.ask_later(Tag::RdmaClose, &[], CLOSE_TIMEOUT) {
        Ok(Some((Tag::RdmaRefused, why))) => fell::not_offered(&why),
        _ => "the server does not offer it (farcell serve -v says why)".to_owned(),
    }
}

/// An array: the way to it, where its cells are, and what was last seen in each.
#[derive(Debug)]
struct Bound {
    rails: Arc<Rails>,
    base: u32,
    guesses: Box<[AtomicU64]>,
}

/// Tokens by the session's number of the array and the place in it.
type Taken = HashMap<(u16, u32), u64>;

/// RDMA with TCP behind it. See the [module](self).
#[derive(Debug)]
pub(crate) struct Rdma {
    link: Arc<Link>,
    rails: RwLock<Option<Arc<Rails>>>,
    /// By the session's numbers of them; none when RDMA was given up.
    bound: RwLock<Vec<Option<Arc<Bound>>>>,
    /// Whether the session may change cells.
    may_change: bool,
    /// Why RDMA was given up, once it was.
    lost: RwLock<Option<String>>,
    /// Held while it is being given up.
    giving_up: Mutex<()>,
    /// The tokens by which this client last took locks, by array and cell; in
    /// parts, each held while a lock of it is being taken.
    taken: Box<[Mutex<Taken>]>,
}

impl Rdma {
    /// Brings RDMA up next to a session.
    ///
    /// # Errors
    /// Why there is none, a sentence for each thing that was tried.
    pub fn open(link: &Arc<Link>, settings: &RdmaSettings) -> Result<Rdma, Vec<String>> {
        if !link.welcome().offers_rdma {
            return Err(vec![not_offered(link)]);
        }
        let adapter = Adapter::open(settings.device.as_deref()).map_err(|e| vec![e.to_string()])?;
        let candidates = if adapter.by_lid() {
            vec![None]
        } else {
            let mut gids = adapter.addresses(link.local_ip()).map_err(|e| vec![e.to_string()])?;
            if let Some(index) = settings.gid_index {
                gids.retain(|entry| entry.index == index);
            }
            if gids.is_empty() {
                return Err(vec![adapter.no_address(settings.gid_index)]);
            }
            gids.into_iter().map(Some).collect()
        };
        let place = format!("{} port {}", adapter.context.name(), adapter.port);
        // Each with what it was met by: most have nothing to do with the address.
        let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
        for gid in candidates {
            let name = match &gid {
                Some(entry) => format!("GID {} ({})", entry.index, entry.gid),
                None => format!("LID {}", adapter.state.lid),
            };
            match Rdma::attempt(link, &adapter, gid, settings) {
                Ok(rails) => {
                    let rails = Arc::new(rails);
                    link.set_bell(Some(rails.clone()));
                    return Ok(Rdma {
                        link: link.clone(),
                        rails: RwLock::new(Some(rails)),
                        bound: RwLock::default(),
                        may_change: link.welcome().access == Access::ReadWrite,
                        lost: RwLock::default(),
                        giving_up: Mutex::default(),
                        taken: (0..64).map(|_| Mutex::default()).collect(),
                    });
                }
                Err(why) => match reasons.iter_mut().find(|(known, _)| *known == why) {
                    Some((_, names)) => names.push(name),
                    None => reasons.push((why, vec![name])),
                },
            }
        }
        // Nothing half-made stays on the server.
        let _ = link.ask_later(Tag::RdmaClose, &[], CLOSE_TIMEOUT);
        let told = |(why, names): (String, Vec<String>)| {
            format!("{place}, {}: {why}", names.join(" and "))
        };
        Err(reasons.into_iter().map(told).collect())
    }

    fn attempt(
        link: &Link,
        adapter: &Adapter,
        gid: Option<crate::verbs::GidEntry>,
        settings: &RdmaSettings,
    ) -> Result<Rails, String> {
        let unconnected =
            Unconnected::new(adapter, gid, settings.lanes.max(1)).map_err(|e| e.to_string())?;
        let answer = link
            .ask_later(Tag::RdmaOpen, &unconnected.offer, OPEN_TIMEOUT)
            .map_err(|f| format!("{f:?}"))?;
        match answer {
            Some((Tag::RdmaOpened, bytes)) => {
                let capacity = link.welcome().capacity;
                unconnected.connect(adapter, &bytes, capacity, settings.dead_after)
            }
            Some((_, why)) => Err(String::from_utf8_lossy(&why).into_owned()),
            None => Err("the server did not answer in time".to_owned()),
        }
    }

    /// Notes where an array's cells are.
    pub fn bind(&self, number: u16, base: u32, extent: u64) {
        // The lock first: when RDMA is given up meanwhile, what is put here is
        // taken away again.
        let mut bound = self.bound.write().unwrap_or_else(PoisonError::into_inner);
        let Some(rails) = self.rails() else {
            return;
        };
        let number = usize::from(number);
        if bound.len() <= number {
            bound.resize(number + 1, None);
        }
        if bound[number].as_ref().is_none_or(|b| b.base != base) {
            let guesses = (0..extent).map(|_| AtomicU64::new(0)).collect();
            bound[number] = Some(Arc::new(Bound { rails, base, guesses }));
        }
    }

    /// Whether operations go by RDMA now; why not, otherwise.
    pub fn state(&self) -> Result<String, String> {
        if let Some(rails) = self.rails() {
            let way = if rails.atomics { "READ and atomics" } else { "READ" };
            return Ok(format!("{} queue pairs, {way} one-sided", rails.count()));
        }
        let lost = self.lost.read().unwrap_or_else(PoisonError::into_inner);
        Err(lost.clone().unwrap_or_default())
    }

    /// Whether changes go by RDMA now.
    pub fn is_one_sided(&self) -> bool {
        self.rails().is_some_and(|rails| self.changes_here(&rails))
    }

    /// Goes to the server's memory and back, as when the rails were new.
    ///
    /// # Errors
    /// Why that does not work, in words.
    pub fn try_out(&self) -> Result<(), String> {
        let rails = self.rails().ok_or("RDMA was given up")?;
        rails.try_out().map_err(|trouble| trouble.why)
    }

    /// For tests: whether the header of the segment refuses a change. `None`:
    /// RDMA is lost.
    pub fn header_refuses(&self, own_key: bool) -> Option<bool> {
        Some(self.rails()?.header_refuses(own_key))
    }

    fn rails(&self) -> Option<Arc<Rails>> {
        self.rails.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn way(&self, array: u16) -> Option<Arc<Bound>> {
        let bound = self.bound.read().unwrap_or_else(PoisonError::into_inner);
        bound.get(usize::from(array))?.clone()
    }

    /// Carries out an operation on a cell if it is one that goes by RDMA. The
    /// lock is held meanwhile, which is cheaper than a reference of one's own.
    #[inline]
    fn one_sided(&self, op: CellOp) -> Option<Result<u64, (Arc<Rails>, Trouble)>> {
        let all = self.bound.read().unwrap_or_else(PoisonError::into_inner);
        let bound = all.get(usize::from(op.array))?.as_deref()?;
        let guess = bound.guesses.get(op.offset as usize)?;
        let rails = &bound.rails;
        let here = op.op == Op::Load || !op.op.is_read() && self.changes_here(rails);
        here.then(|| {
            let done = rails.execute(bound.base + op.offset, op.op, op.a, op.b, guess);
            done.map_err(|trouble| (rails.clone(), trouble))
        })
    }

    /// The rails are broken: from here on everything goes over TCP. Returns
    /// when nothing that was sent by them can happen any more, as far as the
    /// server can still be asked: for every caller, not the first alone, since
    /// each may be about to do again what it has sent.
    fn give_up(&self, rails: &Arc<Rails>, trouble: &Trouble) {
        let _one = crate::engine::lock(&self.giving_up);
        {
            let mut current = self.rails.write().unwrap_or_else(PoisonError::into_inner);
            if !current.as_ref().is_some_and(|now| Arc::ptr_eq(now, rails)) {
                return;
            }
            *current = None;
        }
        tracing::warn!(target: "farcell::rdma", why = trouble.why, "RDMA is lost; going on over TCP");
        *self.lost.write().unwrap_or_else(PoisonError::into_inner) = Some(trouble.why.clone());
        // Whoever else waits for an answer need not wait for its time to end;
        // and we would wait for them, who hold the lock.
        rails.shut();
        self.bound.write().unwrap_or_else(PoisonError::into_inner).clear();
        self.link.set_bell(None);
        fell::tell_lost(&self.link, Way::Rdma, &trouble.why);
        // The server then repeats what it has sent us by the rails.
        match self.link.ask_later(Tag::RdmaClose, &[], CLOSE_TIMEOUT) {
            Ok(Some(_)) => {}
            _ => {
                tracing::warn!(target: "farcell::rdma", "the server has not confirmed that RDMA is over")
            }
        }
    }

    /// After trouble: an operation that may have happened is not done again,
    /// unless doing it twice is as good as once.
    fn unknown(&self, op: Op, trouble: &Trouble) -> Option<Failure> {
        if op.is_repeatable() || trouble.undone {
            return None;
        }
        let addr = self.link.addr();
        let why = format!("the RDMA connection broke: {}", trouble.why);
        Some(Error::OutcomeUnknown { addr, op: op.name(), why }.into())
    }

    /// Loads and adds that are under way together.
    fn load_and_add(&self, ops: &[CellOp]) -> Result<Vec<u64>, Failure> {
        let adds = ops.iter().any(|op| op.op == Op::Add);
        let rails = self.rails().filter(|rails| !adds || self.changes_here(rails));
        // What is held is under way, for whoever opens its array again.
        let mut held: Vec<Arc<Bound>> = Vec::new();
        let placed = {
            let bound = self.bound.read().unwrap_or_else(PoisonError::into_inner);
            ops.iter()
                .map(|op| {
                    let bound = bound.get(usize::from(op.array))?.as_ref()?;
                    bound.guesses.get(op.offset as usize)?;
                    if held.last().is_none_or(|last| !Arc::ptr_eq(last, bound)) {
                        held.push(bound.clone());
                    }
                    Some((bound.base + op.offset, op.op, op.a))
                })
                .collect::<Option<Vec<_>>>()
        };
        let (Some(rails), Some(placed)) = (rails, placed) else {
            return self.link.execute_all(ops);
        };
        let mut words = vec![None; ops.len()];
        let streamed = rails.load_and_add(&placed, &mut words);
        drop(held);
        let mut words: Vec<u64> = words.into_iter().flatten().collect();
        let rest = &ops[words.len()..];
        if let Err(trouble) = streamed {
            self.give_up(&rails, &trouble);
            if let Some(failure) = rest.iter().find_map(|op| self.unknown(op.op, &trouble)) {
                return Err(failure);
            }
        }
        if words.iter().any(|&word| is_suspect(word)) {
            self.ask(ops, &mut words)?;
        }
        if !rest.is_empty() {
            let late = self.link.execute_all(rest).map_err(|f| f.behind(words.len()))?;
            words.extend(late);
        }
        Ok(words)
    }

    /// Some of these words may be tombstones: the server knows whether their
    /// arrays live. Only adds have been done where a word is suspect; anything
    /// else the server does, and its answer takes the word's place.
    #[cold]
    fn ask(&self, ops: &[CellOp], words: &mut [u64]) -> Result<(), Failure> {
        for i in 0..words.len() {
            if !is_suspect(words[i]) {
                continue;
            }
            let (op, add) = (ops[i], ops[i].op.adds());
            let asked = if add { CellOp { op: Op::Load, a: 0, b: 0, ..op } } else { op };
            match self.link.execute(asked) {
                Ok(_) if add => {}
                Ok(word) => words[i] = word,
                Err(Failure::Error(error)) if add => {
                    let (addr, why) = (self.link.addr(), error.to_string());
                    return Err(Error::OutcomeUnknown { addr, op: op.op.name(), why }.into());
                }
                Err(failure @ Failure::Error(_)) => return Err(failure),
                Err(Failure::Refused(refusal, _)) => {
                    let theirs = ops.iter().zip(&*words).filter(|(o, _)| o.array == op.array);
                    let added = theirs.filter(|(o, word)| o.op.adds() && is_suspect(**word));
                    self.leave(op.array, added.map(|(o, _)| *o));
                    return Err(Failure::Refused(refusal, i as u32));
                }
            }
        }
        Ok(())
    }

    /// The array is gone: what is done with it from here on is the server's to
    /// refuse. What has been `added` to its tombstones is taken off again, so
    /// that others know them by their value also after a large one.
    fn leave(&self, array: u16, added: impl Iterator<Item = CellOp>) {
        let Some(bound) = self.way(array) else {
            return;
        };
        for op in added {
            let amount = if op.op == Op::Arrive { 1 } else { op.a };
            let (place, off) = (bound.base + op.offset, amount.wrapping_neg());
            // Trouble here is found by whoever uses the rails next.
            let _ = bound.rails.execute(place, Op::Add, off, 0, &AtomicU64::new(0));
        }
        let mut all = self.bound.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = all.get_mut(usize::from(array)) {
            *slot = None;
        }
    }

    /// Takes a lock, or finds that it cannot be had now. If the connection breaks
    /// in between, the lock itself tells whether we have it: it is in our seat,
    /// nobody has handed it to us, and no other thread of ours has taken it,
    /// since those who try are written down and come one by one.
    fn acquire(&self, op: CellOp) -> Result<u64, Failure> {
        let mut taken = crate::engine::lock(&self.taken[op.offset as usize % self.taken.len()]);
        let seat = op.a as u32;
        let one_sided = self.way(op.array).filter(|bound| self.changes_here(&bound.rails));
        let tried = one_sided.and_then(|bound| {
            let guess = bound.guesses.get(op.offset as usize)?;
            let place = bound.base + op.offset;
            Some((bound.rails.execute(place, op.op, op.a, op.b, guess), bound.rails.clone()))
        });
        let found = match tried {
            None => self.link.execute(op)?,
            Some((Ok(mut word), _)) => {
                if is_suspect(word) {
                    self.ask(&[op], std::slice::from_mut(&mut word))?;
                }
                word
            }
            Some((Err(trouble), rails)) => {
                self.give_up(&rails, &trouble);
                let now = Lock::of(self.link.execute(CellOp { op: Op::Load, a: 0, b: 0, ..op })?);
                let known = taken.get(&(op.array, op.offset)) == Some(&now.token);
                if !trouble.undone && now.seat == seat && !now.granted && !known {
                    let token = now.token.wrapping_sub(1) & MAX_TOKEN;
                    // Whether it was abandoned before went with the answer: take
                    // the worse for granted.
                    Lock { token, granted: false, abandoned: true, seat: 0 }.word()
                } else {
                    self.link.execute(op)?
                }
            }
        };
        let before = Lock::of(found);
        if before.seat == 0 && !is_waiting(found) {
            taken.insert((op.array, op.offset), before.taken(seat, false).token);
        }
        Ok(found)
    }

    fn changes_here(&self, rails: &Rails) -> bool {
        rails.atomics && self.may_change
    }
}

/// An array may be removed, and its name and number open another one, with other
/// cells or refused: what was known of the number leads to cells that the server
/// then gives to anyone.
impl Follower for Rdma {
    fn lost(&self) {}

    fn reopening(&self, number: u16) {
        let mut all = self.bound.write().unwrap_or_else(PoisonError::into_inner);
        let Some(old) = all.get_mut(usize::from(number)).and_then(Option::take) else {
            return;
        };
        drop(all);
        // Each of those who have it is about to end, or is given up with the rails.
        while Arc::strong_count(&old) > 1 {
            std::thread::sleep(STILL_UNDER_WAY);
        }
    }

    fn back(&self, _: &Welcome, _: &[(u16, u32)]) {}

    fn closed(&self) {
        // A client that was closed changes no cell, though its queue pairs work until
        // the server has heard of it.
        let _one = crate::engine::lock(&self.giving_up);
        let rails = self.rails.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(rails) = rails else { return };
        let why = "this client was closed".to_owned();
        *self.lost.write().unwrap_or_else(PoisonError::into_inner) = Some(why);
        // Whoever waits for an answer holds the lock that we want.
        rails.shut();
        self.bound.write().unwrap_or_else(PoisonError::into_inner).clear();
        self.link.set_bell(None);
    }
}

impl Transport for Rdma {
    fn execute(&self, op: CellOp) -> Result<u64, Failure> {
        self.link.check()?;
        if op.op == Op::Acquire {
            return self.acquire(op);
        }
        match self.one_sided(op) {
            Some(Ok(word)) if !is_suspect(word) => Ok(word),
            Some(Ok(mut word)) => self.ask(&[op], std::slice::from_mut(&mut word)).map(|()| word),
            Some(Err((rails, trouble))) => {
                self.give_up(&rails, &trouble);
                match self.unknown(op.op, &trouble) {
                    Some(failure) => Err(failure),
                    None => self.link.execute(op),
                }
            }
            None => self.link.execute(op),
        }
    }

    fn execute_all(&self, ops: &[CellOp]) -> Result<Vec<u64>, Failure> {
        self.link.check()?;
        // In their order: loads and adds can be under way together, since they
        // never have to be tried again; each of the others goes alone.
        let together = |op: &CellOp| matches!(op.op, Op::Load | Op::Add);
        let mut words = Vec::with_capacity(ops.len());
        for part in ops.chunk_by(|a, b| together(a) && together(b)) {
            // Refusals count the operations of all parts.
            let done = words.len();
            match part {
                [one] => words.push(self.execute(*one).map_err(|f| f.behind(done))?),
                _ => words.extend(self.load_and_add(part).map_err(|f| f.behind(done))?),
            }
        }
        Ok(words)
    }

    fn execute_runs(&self, op: Op, array: u16, runs: &[Run]) -> Result<Vec<u64>, Failure> {
        self.link.check()?;
        let Some(bound) = self.way(array) else {
            return self.link.execute_runs(op, array, runs);
        };
        let rails = &bound.rails;
        if op == Op::Load {
            let mut words = Vec::new();
            return match rails.read(bound.base, runs, &mut words) {
                Ok(()) if words.iter().any(|&word| is_suspect(word)) => {
                    self.link.execute_runs(op, array, runs)
                }
                Ok(()) => Ok(words),
                Err(trouble) => {
                    self.give_up(rails, &trouble);
                    self.link.execute_runs(op, array, runs)
                }
            };
        }
        if op.is_read() || !self.changes_here(rails) {
            return self.link.execute_runs(op, array, runs);
        }
        let offsets: Vec<u32> = runs.iter().flat_map(|run| run.offsets()).collect();
        let cells = offsets
            .iter()
            .map(|&offset| Some((bound.base + offset, bound.guesses.get(offset as usize)?)))
            .collect::<Option<Vec<_>>>();
        let Some(cells) = cells else {
            return self.link.execute_runs(op, array, runs);
        };
        let mut words = vec![None; cells.len()];
        if let Err(trouble) = rails.change_all(op, &cells, &mut words) {
            self.give_up(rails, &trouble);
        }
        if words.iter().any(Option::is_none) {
            // Suspect, or not known to be done; setting and clearing can be
            // done twice.
            let rest = offsets.iter().zip(&words).filter(|(_, word)| word.is_none());
            let rest: Vec<Run> = rest.map(|(&offset, _)| Run::one(offset)).collect();
            let mut late = self.link.execute_runs(op, array, &rest)?.into_iter();
            for word in words.iter_mut().filter(|word| word.is_none()) {
                *word = late.next();
            }
        }
        Ok(words.into_iter().flatten().collect())
    }

    fn wait(
        &self,
        need: u32,
        targets: &[WaitRecord],
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Waited, Failure> {
        Transport::wait(&*self.link, need, targets, timeout, cancel)
    }
}
