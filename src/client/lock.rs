//! Locks.

mod later;

use super::array::{Array, array_handle};
use crate::cell::{Op, WAITING, is_waiting, sync};
use crate::error::{Error, Result};
use crate::transport::tcp::{Canceller, Patience};
use crate::transport::{CellOp, Failure, Transport};
use crate::wire::{AcquireRecord, Refusal};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A named array of locks, `rows` x `cols`. A handle: cheap to clone, and
/// indexing it is arithmetic.
#[derive(Clone, Debug)]
pub struct LockArray {
    array: Arc<Array>,
}

array_handle!(LockArray, Lock, "lock");

/// One lock. One guard in all programs holds it; those who queue for it get it
/// in the order in which they came to the server.
///
/// It is not reentrant: a thread that locks it twice waits for itself. When the
/// session of the holder ends, because its process was killed or was silent for
/// its lease, the lock is freed, and the next holder
/// [learns it](LockGuard::was_abandoned). A server that is killed and comes back
/// with its state leaves the lock with its holder; those who queued queue again, in
/// the order in which they come back.
///
/// What a holder did before it unlocked is visible to the next one (release and
/// acquire).
#[derive(Clone, Debug)]
pub struct Lock {
    array: Arc<Array>,
    offset: u32,
    row: usize,
    col: usize,
}

/// The word of a lock that cannot be had without queueing.
const TAKEN: u64 = WAITING;

impl Lock {
    fn new(array: &Arc<Array>, offset: u32, row: usize, col: usize) -> Lock {
        Lock { array: array.clone(), offset, row, col }
    }

    /// Takes it, or sleeps until it can. If nobody holds it that is one round
    /// trip, over RDMA and in shared memory one atomic.
    ///
    /// # Errors
    /// As [`Event::set`](crate::Event::set); [`Error::Limit`] when the session
    /// queues as often as it may.
    pub fn lock(&self) -> Result<LockGuard> {
        loop {
            if let Some(guard) = self.lock_with(None, None)? {
                return Ok(guard);
            }
        }
    }

    /// Takes it if nobody holds it and nobody queues for it. One round trip.
    /// `None` may also mean an attempt of another one that was under way when the
    /// server was started again: it can have the lock for a moment and give it back.
    ///
    /// # Errors
    /// As [`lock`](Self::lock).
    pub fn try_lock(&self) -> Result<Option<LockGuard>> {
        self.lock_with(Some(Duration::ZERO), None)
    }

    /// As [`lock`](Self::lock), for this long at most. `None`: the time was
    /// over.
    ///
    /// # Errors
    /// As [`lock`](Self::lock).
    pub fn lock_timeout(&self, timeout: Duration) -> Result<Option<LockGuard>> {
        self.lock_with(Some(timeout), None)
    }

    /// As [`lock`](Self::lock), with a time and a way to cancel, both optional.
    /// `None`: the time was over.
    ///
    /// # Errors
    /// As [`lock`](Self::lock), and [`Error::Cancelled`].
    pub fn lock_with(
        &self,
        timeout: Option<Duration>,
        cancel: Option<&Canceller>,
    ) -> Result<Option<LockGuard>> {
        let link = &self.array.client.core.link;
        let deadline = timeout.and_then(|time| Instant::now().checked_add(time));
        let at_once = timeout.is_some_and(|time| time.is_zero());
        loop {
            if cancel.is_some_and(Canceller::is_cancelled) {
                return Err(Error::Cancelled);
            }
            let (welcome, round) = link.standing();
            if welcome.seat == 0 {
                let what = "the server has more sessions than can hold locks".to_owned();
                return Err(Error::Limit { addr: link.addr(), what });
            }
            let (number, offset) = (self.array.number, self.offset);
            let a = u64::from(welcome.seat);
            // Where the server is asked anyway it may as well queue at once.
            let tried = if at_once || self.array.client.core.is_one_sided() {
                self.array.attempt(Op::Acquire, offset, a, 0)
            } else {
                Ok(TAKEN)
            };
            let mut queued = false;
            let (mut session, mut seat) = (welcome.session, welcome.seat);
            let found = match tried {
                Ok(word) if sync::Lock::of(word).seat == 0 && !is_waiting(word) => Some(word),
                Ok(_) if at_once => return Ok(None),
                Ok(_) => {
                    let record = AcquireRecord {
                        array: number,
                        offset,
                        seat: welcome.seat,
                        ..AcquireRecord::default()
                    };
                    queued = true;
                    let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
                    match link.queue(record, &Patience { timeout: left, cancel, bound: None }) {
                        Ok(None) => return Ok(None),
                        Ok(Some(grant)) => {
                            // Another session may have come while we queued.
                            (session, seat) = (grant.session, grant.seat);
                            Some(grant.word)
                        }
                        Err(Failure::Refused(Refusal::StaleSeat, _)) => None,
                        Err(failure) => return Err(self.array.explain(failure, "lock")),
                    }
                }
                // The session is another one since: once more, with its seat.
                Err(Failure::Refused(Refusal::StaleSeat, _)) => None,
                Err(failure) => return Err(self.array.explain(failure, "lock")),
            };
            if let Some(word) = found {
                let before = sync::Lock::of(word);
                let token = before.taken(seat, false).token;
                if !queued && !link.hold(round, number, offset, token) {
                    // The server was started again meanwhile, and may not have
                    // known that we have it.
                    self.give_back(token, seat)?;
                    continue;
                }
                return Ok(Some(LockGuard {
                    lock: self.clone(),
                    session,
                    seat,
                    token,
                    abandoned: before.abandoned,
                    held: true,
                }));
            }
        }
    }

    /// Frees it, if it is held with this token by this seat.
    fn give_back(&self, token: u64, seat: u32) -> Result<()> {
        let Lock { array, offset, .. } = self;
        match array.attempt(Op::Release, *offset, token, u64::from(seat)) {
            Ok(_) | Err(Failure::Refused(Refusal::StaleSeat, _)) => Ok(()),
            Err(failure) => Err(array.explain(failure, "lock")),
        }
    }

    /// Whether someone holds it. One round trip.
    ///
    /// # Errors
    /// As [`Event::is_set`](crate::Event::is_set).
    pub fn is_locked(&self) -> Result<bool> {
        Ok(sync::Lock::of(self.array.execute(Op::Load, self.offset, 0, 0)?).seat != 0)
    }

    /// The token of its holder, or of the last one: how often it was taken so
    /// far. One round trip.
    ///
    /// # Errors
    /// As [`is_locked`](Self::is_locked).
    pub fn token(&self) -> Result<u64> {
        Ok(sync::Lock::of(self.array.execute(Op::Load, self.offset, 0, 0)?).token)
    }
}

/// Holds a [`Lock`]. Dropping it unlocks; [`unlock`](Self::unlock) also says how
/// that went. Both can take as long as any operation on a connection that is
/// lost.
#[derive(Debug)]
#[must_use = "dropping it unlocks at once"]
pub struct LockGuard {
    lock: Lock,
    session: u64,
    seat: u32,
    token: u64,
    abandoned: bool,
    held: bool,
}

impl LockGuard {
    /// The fencing token: larger than that of every holder before. Whoever keeps
    /// what the lock protects can refuse those that come with a smaller one,
    /// since their lease is over.
    #[must_use]
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Whether the holder before ended without unlocking: what the lock
    /// protects may be half done.
    #[must_use]
    pub fn was_abandoned(&self) -> bool {
        self.abandoned
    }

    /// Asks the server whether the lock is still held by this guard. One round
    /// trip.
    ///
    /// # Errors
    /// [`Error::LeaseLost`] if it is not; as [`Lock::is_locked`].
    pub fn check(&self) -> Result<()> {
        let lock = &self.lock;
        let word = lock.array.execute(Op::Load, lock.offset, 0, 0)?;
        let now = sync::Lock::of(word);
        if now.seat == self.seat && now.token == self.token && self.is_of_this_session() {
            return Ok(());
        }
        Err(self.lost())
    }

    /// Frees the lock for the next one. One round trip, over RDMA and in shared
    /// memory one atomic.
    ///
    /// # Errors
    /// [`Error::LeaseLost`]: the session that took it has ended, and the lock
    /// was freed by that and may be held by someone else; nothing was changed.
    /// Otherwise as [`Lock::lock`]; the lock is then freed when the session
    /// ends.
    pub fn unlock(mut self) -> Result<()> {
        self.free()
    }

    fn is_of_this_session(&self) -> bool {
        self.lock.array.client.core.link.welcome().session == self.session
    }

    fn lost(&self) -> Error {
        let Lock { array, row, col, .. } = &self.lock;
        let token = self.token;
        Error::LeaseLost { what: format!("lock {:?} ({row}, {col}), token {token}", array.name) }
    }

    fn free(&mut self) -> Result<()> {
        if !std::mem::replace(&mut self.held, false) {
            return Ok(());
        }
        let freed = self.try_free();
        // Only now: until then a server that comes back must leave it to us.
        let Lock { array, offset, .. } = &self.lock;
        array.client.core.link.let_go(array.number, *offset, self.token);
        freed
    }

    fn try_free(&self) -> Result<()> {
        if !self.is_of_this_session() {
            return Err(self.lost());
        }
        let Lock { array, offset, .. } = &self.lock;
        match array.attempt(Op::Release, *offset, self.token, u64::from(self.seat)) {
            Ok(word) => {
                let found = sync::Lock::of(word);
                if found.seat == self.seat && found.token == self.token {
                    return Ok(());
                }
                // As long as the session lives nobody else frees it, so an RDMA
                // connection broke behind the first attempt. But who changes the
                // cells by himself may not have heard yet that it is over.
                let link = &array.client.core.link;
                let look =
                    CellOp { op: Op::Load, array: array.number, offset: *offset, a: 0, b: 0 };
                match Transport::execute(&**link, look) {
                    Ok(_) if self.is_of_this_session() => Ok(()),
                    Ok(_) => Err(self.lost()),
                    Err(failure) => Err(array.explain(failure, "unlock")),
                }
            }
            Err(Failure::Refused(Refusal::StaleSeat, _)) => Err(self.lost()),
            Err(failure) => Err(array.explain(failure, "unlock")),
        }
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        match self.free() {
            // It went with the session, as whoever closed that has wanted; or it
            // is the parent's, and this is a forked child.
            Ok(()) | Err(Error::Closed | Error::Forked { .. }) => {}
            Err(error) => {
                tracing::warn!(%error, "a lock that was dropped could not be unlocked");
            }
        }
    }
}
