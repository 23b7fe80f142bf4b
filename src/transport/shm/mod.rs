//! Operations as the CPU's own atomics in the server's memory, for clients on
//! the server's machine.
//!
//! The session's control connection stays: it opens arrays, waits on many
//! cells at once, keeps the lease, and takes everything over while there is no
//! memory. Another transport lies under it for what cannot be done here: TCP, or
//! RDMA where the adapter is the one that changes cells.

mod attach;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod map;
mod messages;
pub(crate) mod protocol;
mod quicker;
pub(crate) mod seqlock;
mod sleep;
mod slot;
mod watch;

pub(crate) use messages::{Message, Messages, Put, Which};
pub(crate) use quicker::Quicker;
pub(crate) use slot::{Fast, Place, Slot};

use super::tcp::{Canceller, Link, Patience};
use super::{CellOp, Failure, Follower, Transport, Waited, fell};
use crate::auth::{Tenure, Welcome};
use crate::cell::sync::Lock;
use crate::cell::{self, Change, Op};
use crate::engine::{Way, lock};
use crate::error::Error;
use crate::layout::Run;
use crate::wire::{Refusal, WaitRecord};
use map::Window;
use protocol::Changed;
use sleep::{Here, Sleepers};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::Duration;

/// An array that is open: the way to it, and where it is.
#[derive(Clone, Copy, Debug)]
struct Bound {
    slot: &'static Slot,
    /// Its first cell, in the segment of the server of this session.
    base: Option<(Tenure, u32)>,
    extent: u32,
    /// Handles.
    users: usize,
}

#[derive(Debug, Default)]
struct State {
    /// The memory that goes with the session, also while the connection is down.
    window: Option<Arc<Window>>,
    /// The session, and the life of the server.
    tenure: Tenure,
    /// The connection is there, so the memory is that of a living server.
    up: bool,
    closed: bool,
    /// By the session's numbers of them.
    bound: Vec<Option<Bound>>,
    /// Why there is no memory any more.
    lost: String,
}

/// Shared memory with another transport under it. See the [module](self).
#[derive(Debug)]
pub(crate) struct Shm {
    link: Arc<Link>,
    under: Arc<dyn Transport>,
    /// Counts the windows: another number, another memory.
    epoch: AtomicU64,
    state: RwLock<State>,
    sleepers: Sleepers,
    /// Every window that there has been: a handle may be about to use an
    /// address in it. All but the last are empty.
    windows: Mutex<Vec<Arc<Window>>>,
    me: Weak<Shm>,
}

impl Shm {
    /// Brings shared memory up next to a session, with `under` for what cannot
    /// be done in it.
    ///
    /// # Errors
    /// Why there is none, in words.
    pub fn open(link: &Arc<Link>, under: Arc<dyn Transport>) -> Result<Arc<Shm>, String> {
        // So that it is known by now whether there can be any.
        slot::give(slot::take().map_err(|e| format!("memory that a forked child lacks: {e}"))?);
        let tenure = link.welcome().tenure();
        let window = Arc::new(attach::attach(link)?);
        let shm = Arc::new_cyclic(|me| Shm {
            link: link.clone(),
            under,
            epoch: AtomicU64::new(0),
            state: RwLock::new(State { window: Some(window.clone()), tenure, ..State::default() }),
            sleepers: Sleepers::default(),
            windows: Mutex::new(vec![window]),
            me: me.clone(),
        });
        link.follow(shm.me.clone());
        shm.watch().map_err(|e| format!("a thread that watches the connection: {e}"))?;
        // The connection may have gone before anyone followed it.
        let mut state = shm.write();
        state.up = link.is_connected() && link.welcome().tenure() == tenure;
        drop(state);
        Ok(shm)
    }

    fn watch(&self) -> std::io::Result<()> {
        match self.link.socket() {
            Some(socket) => watch::watch(socket, Arc::downgrade(&self.link)),
            None => Ok(()),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes where an array's cells are that was opened in this session, and
    /// gives the way to them. To be given back with [`unbind`](Self::unbind).
    pub fn bind(&self, number: u16, tenure: Tenure, base: u32, extent: u64) -> &'static Slot {
        let Ok(extent) = u32::try_from(extent) else {
            return Slot::none();
        };
        let mut state = self.write();
        let at = usize::from(number);
        if state.bound.len() <= at {
            state.bound.resize(at + 1, None);
        }
        let base = Some((tenure, base));
        let bound = match state.bound[at] {
            // A handle relies on the number of cells behind its slot.
            Some(known) if known.extent != extent => return Slot::none(),
            Some(known) => Bound { base, users: known.users + 1, ..known },
            None => match slot::take() {
                Ok(slot) => Bound { slot, base, extent, users: 1 },
                Err(error) => {
                    tracing::warn!(target: "farcell::shm", %error, "an array is not reached in memory");
                    return Slot::none();
                }
            },
        };
        state.bound[at] = Some(bound);
        state.show(&bound);
        bound.slot
    }

    /// A handle that has this slot is gone.
    pub fn unbind(&self, number: u16, slot: &'static Slot) {
        if std::ptr::eq(slot, Slot::none()) {
            return;
        }
        let mut state = self.write();
        if let Some(known) = state.bound.get_mut(usize::from(number))
            && let Some(bound) = known
        {
            bound.users -= 1;
            if bound.users == 0 {
                slot::give(bound.slot);
                *known = None;
            }
        }
    }

    /// Waits for a cell as long as this session lives: the wait means nothing to
    /// another one.
    pub fn wait_bound(
        &self,
        target: WaitRecord,
        patience: &Patience<'_>,
    ) -> Result<Option<u64>, Failure> {
        self.link.check()?;
        let Patience { timeout, cancel, bound } = *patience;
        self.wait_here(target, timeout, cancel, |timeout| {
            let patience = Patience { timeout, cancel, bound };
            let waited = self.link.wait_for(1, &[target], &[], &patience)?;
            Ok(waited.fired.first().map(|(_, word)| *word).filter(|_| waited.satisfied))
        })
    }

    /// Whether changes are made here too.
    pub fn changes(&self) -> bool {
        self.read().window.as_ref().is_some_and(|window| window.writable)
    }

    /// The same, right now.
    pub fn changes_now(&self) -> bool {
        let state = self.read();
        state.up && state.window.as_ref().is_some_and(|window| window.writable)
    }

    /// What is there now; why nothing, otherwise.
    pub fn report(&self) -> Result<String, String> {
        let state = self.read();
        match &state.window {
            Some(window) if state.up && window.writable => {
                Ok("loads and changes by this CPU, in the server's memory".to_owned())
            }
            Some(_) if state.up => Ok("loads by this CPU, in the server's memory".to_owned()),
            Some(_) => Err("the connection is down".to_owned()),
            None => Err(state.lost.clone()),
        }
    }

    /// Looks into the memory that is mapped now: the server's marks are in it, and
    /// its cells can be read.
    ///
    /// # Errors
    /// Why that does not work, in words.
    pub fn try_out(&self) -> Result<(), String> {
        let state = self.read();
        let window = state.window.as_ref().filter(|_| state.up).ok_or("there is no memory")?;
        window.recognise(state.tenure.1)?;
        // Acquire: as every load of a cell. What is in it does not matter.
        window.cell(0).map(|cell| cell.load(Ordering::Acquire)).ok_or("it has no cells")?;
        Ok(())
    }

    /// The memory is no longer that of our session.
    fn count(&self) {
        // SeqCst: before the memory is emptied, which is a system call.
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// The cell in memory, if it is there now.
    fn here(&self, array: u16, offset: u32) -> Option<(Arc<Window>, u32)> {
        self.here_and_when(array, offset).map(|(window, place, _)| (window, place))
    }

    /// The same, and in which session, and life of the server.
    fn here_and_when(&self, array: u16, offset: u32) -> Option<(Arc<Window>, u32, Tenure)> {
        let state = self.read();
        let window = state.window.clone().filter(|_| state.up)?;
        let bound = state.bound.get(usize::from(array))?.as_ref()?;
        let (tenure, base) = bound.base?;
        (tenure == state.tenure && offset < bound.extent).then(|| (window, base + offset, tenure))
    }

    fn slot(&self, array: u16) -> Option<(&'static Slot, u32)> {
        let state = self.read();
        let bound = state.bound.get(usize::from(array))?.as_ref()?;
        Some((bound.slot, bound.extent))
    }

    /// Goes on where the way through the slot ended.
    pub fn settle(&self, fast: Fast, op: CellOp) -> Result<u64, Failure> {
        self.link.check()?;
        match fast {
            Fast::Done(word) => Ok(word),
            Fast::Not if matches!(op.op, Op::Acquire | Op::Arrive) => self.while_it_lives(op),
            Fast::Not => self.under.execute(op),
            Fast::Same(word) if self.here(op.array, op.offset).is_some() => Ok(word),
            Fast::Same(_) => self.repeat(op),
            Fast::Told(old, at) | Fast::Stale(old, at) => {
                let Some((window, place)) = self.still(at) else {
                    return self.repeat(op);
                };
                let Some(here) = Here::new(self, &window, place) else {
                    return self.repeat(op);
                };
                if op.op == Op::Add {
                    if protocol::added(&here, old, op.a) == Changed::Suspect {
                        return self.under.execute(op);
                    }
                } else {
                    protocol::answer(&here, old);
                }
                Ok(old)
            }
        }
    }

    /// The place of the cell at this address, if that memory is still the server's.
    /// Memory that was given up stays mapped, so no other one gets its addresses;
    /// whether the array is just being opened once more does not matter here.
    fn still(&self, address: usize) -> Option<(Arc<Window>, u32)> {
        let state = self.read();
        let window = state.window.clone().filter(|_| state.up)?;
        let place = window.place_of(address)?;
        Some((window, place))
    }

    /// Carries out what the session alone may do.
    fn while_it_lives(&self, op: CellOp) -> Result<u64, Failure> {
        // Before the window is found, so that a later one has a higher number.
        let epoch = self.epoch.load(Ordering::Acquire);
        let Some((window, place, tenure)) = self.here_and_when(op.array, op.offset) else {
            return self.under.execute(op);
        };
        let Some(here) = Here::new(self, &window, place) else {
            return self.under.execute(op);
        };
        // Another session than the one that is a party.
        if op.op == Op::Arrive && op.a != tenure.0 {
            return Err(Failure::Refused(Refusal::StaleSeat, 0));
        }
        let here = here.since(epoch);
        match protocol::change(&here, op.op, op.a, op.b) {
            Changed::Done(word) if here.is_ours() => Ok(word),
            Changed::Done(word) if op.op == Op::Acquire => self.perhaps_taken(op, word, tenure),
            Changed::Done(_) => self.repeat(op),
            Changed::Suspect => self.under.execute(op),
            // It names the session's seat, so the server knows.
            Changed::Over if op.op == Op::Acquire => self.under.execute(op),
            Changed::Over => Err(Failure::Refused(Refusal::StaleSeat, 0)),
        }
    }

    /// The memory was given up while a lock was being taken in it, whose word was
    /// `found`. If the server has the same memory, or had it in its life before,
    /// the lock itself tells whether we have it: nobody else gets this token.
    fn perhaps_taken(&self, op: CellOp, found: u64, then: Tenure) -> Result<u64, Failure> {
        if let Change::Swap(new) = cell::change(op.op, found, op.a, op.b) {
            let now = self.under.execute(CellOp { op: Op::Load, a: 0, b: 0, ..op })?;
            let (session, incarnation) = self.link.welcome().tenure();
            // The lower half counts the lives of one state.
            let same = (session, incarnation >> 32) == (then.0, then.1 >> 32);
            if same && Lock::of(now) == Lock::of(new) {
                return Ok(found);
            }
        }
        self.under.execute(op)
    }

    /// The memory was given up while the operation was under way in it.
    fn repeat(&self, op: CellOp) -> Result<u64, Failure> {
        if op.op.is_repeatable() {
            return self.under.execute(op);
        }
        let why = "the server went away under it".to_owned();
        Err(Error::OutcomeUnknown { addr: self.link.addr(), op: op.op.name(), why }.into())
    }

    /// Does many operations here, or none of them: `None`.
    fn all_here(
        &self,
        ops: impl Iterator<Item = CellOp> + Clone,
    ) -> Option<Result<Vec<u64>, Failure>> {
        let mut last = None;
        let mut way = move |op: &CellOp| match last {
            Some((array, slot, extent)) if array == op.array => Some((slot, extent)),
            _ => {
                let (slot, extent) = self.slot(op.array)?;
                last = Some((op.array, slot, extent));
                Some((slot, extent))
            }
        };
        // If one is refused none is done, so the cells of removed arrays are
        // looked for first.
        for op in ops.clone() {
            let (slot, extent) = way(&op)?;
            let there = op.offset < extent
                && slot.takes(op.op)
                && matches!(slot.execute(Op::Load, op.offset, 0, 0), Fast::Done(_));
            if !there {
                return None;
            }
        }
        let mut words = Vec::new();
        for (index, op) in ops.enumerate() {
            let (slot, _) = way(&op)?;
            let word = match slot.execute(op.op, op.offset, op.a, op.b) {
                Fast::Done(word) => Ok(word),
                fast => self.settle(fast, op),
            };
            match word {
                Ok(word) => words.push(word),
                Err(Failure::Refused(refusal, _)) => {
                    return Some(Err(Failure::Refused(refusal, index as u32)));
                }
                Err(failure) => return Some(Err(failure)),
            }
        }
        Some(Ok(words))
    }
}

impl State {
    /// Opens the way to an array, or closes it.
    fn show(&self, bound: &Bound) {
        let here = self.window.as_ref().filter(|_| self.up && !self.closed);
        let place = bound.base.filter(|(tenure, _)| *tenure == self.tenure);
        // `Shm::windows` keeps the window as long as the client lives.
        let shown = here
            .zip(place)
            .is_some_and(|(window, (_, base))| window.show(bound.slot, base, bound.extent));
        if !shown {
            bound.slot.clear();
        }
    }

    fn show_all(&self) {
        for bound in self.bound.iter().flatten() {
            self.show(bound);
        }
    }
}

impl Follower for Shm {
    fn lost(&self) {
        let mut state = self.write();
        // It may be back by now.
        state.up = state.up && self.link.has(state.tenure);
        state.show_all();
        let window = state.window.clone();
        drop(state);
        // The server may have said that it does not come back.
        self.sleepers.wake_all(window.as_deref());
    }

    fn reopening(&self, number: u16) {
        if let Some(Some(bound)) = self.write().bound.get_mut(usize::from(number)) {
            bound.base = None;
            bound.slot.clear();
        }
    }

    fn closed(&self) {
        let mut state = self.write();
        state.up = false;
        state.closed = true;
        state.show_all();
        let window = state.window.take();
        self.count();
        drop(state);
        self.sleepers.wake_all(window.as_deref());
    }

    fn back(&self, welcome: &Welcome, opened: &[(u16, u32)]) {
        if let Err(error) = self.watch() {
            tracing::warn!(target: "farcell::shm", %error, "nobody watches the connection; going on without memory");
            return;
        }
        let mut state = self.write();
        let same = welcome.tenure() == state.tenure;
        if welcome.resumed && same && state.window.is_some() {
            state.up = self.link.has(welcome.tenure());
            state.show_all();
            return;
        }
        // Another server, or a session that has none of our arrays.
        let old = state.window.take();
        self.count();
        state.up = false;
        state.tenure = welcome.tenure();
        for (number, bound) in state.bound.iter_mut().enumerate() {
            if let Some(bound) = bound
                && bound.base.is_none_or(|(tenure, _)| tenure != welcome.tenure())
            {
                let found = opened.iter().find(|(n, _)| usize::from(*n) == number);
                bound.base = found.map(|(_, base)| (welcome.tenure(), *base));
            }
        }
        state.show_all();
        drop(state);
        self.sleepers.wake_all(old.as_deref());
        if let Some(old) = old {
            old.empty();
        }
        let attached = attach::attach(&self.link);
        let mut state = self.write();
        if state.closed || state.tenure != welcome.tenure() {
            return;
        }
        match attached {
            Ok(window) => {
                let window = Arc::new(window);
                lock(&self.windows).push(window.clone());
                state.window = Some(window);
                state.up = self.link.has(welcome.tenure());
                state.show_all();
            }
            Err(why) => {
                tracing::warn!(target: "farcell::shm", why, "shared memory is lost");
                fell::tell_lost(&self.link, Way::Shm, &why);
                state.lost = why;
            }
        }
    }
}

impl Transport for Shm {
    fn execute(&self, op: CellOp) -> Result<u64, Failure> {
        let fast = match self.slot(op.array) {
            Some((slot, extent)) if op.offset < extent => {
                slot.execute(op.op, op.offset, op.a, op.b)
            }
            _ => Fast::Not,
        };
        self.settle(fast, op)
    }

    fn execute_all(&self, ops: &[CellOp]) -> Result<Vec<u64>, Failure> {
        self.link.check()?;
        match self.all_here(ops.iter().copied()) {
            Some(done) => done,
            None => self.under.execute_all(ops),
        }
    }

    fn execute_runs(&self, op: Op, array: u16, runs: &[Run]) -> Result<Vec<u64>, Failure> {
        self.link.check()?;
        let cells = runs.iter().flat_map(|run| run.offsets());
        match self.all_here(cells.map(|offset| CellOp { op, array, offset, a: 0, b: 0 })) {
            Some(done) => done,
            None => self.under.execute_runs(op, array, runs),
        }
    }

    fn wait(
        &self,
        need: u32,
        targets: &[WaitRecord],
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Waited, Failure> {
        let &[target] = targets else {
            return self.under.wait(need, targets, timeout, cancel);
        };
        if need != 1 || target.run.count != 1 {
            return self.under.wait(need, targets, timeout, cancel);
        }
        let word = self.wait_one(target, timeout, cancel)?;
        Ok(Waited {
            satisfied: word.is_some(),
            fired: word.map(|word| (0, word)).into_iter().collect(),
        })
    }

    fn wait_one(
        &self,
        target: WaitRecord,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Option<u64>, Failure> {
        self.link.check()?;
        let by_server = |timeout| self.under.wait_one(target, timeout, cancel);
        self.wait_here(target, timeout, cancel, by_server)
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        for bound in self.write().bound.drain(..).flatten() {
            slot::give(bound.slot);
        }
    }
}
