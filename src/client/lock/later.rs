//! Locks without a thread that waits.

use super::{Lock, LockGuard};
use crate::cell::sync;
use crate::error::{Error, Result};
use crate::transport::tcp::{Grant, Pending, Then};
use crate::wire::AcquireRecord;

impl Lock {
    /// As [`lock`](Self::lock), without a thread: `then` is called with the guard
    /// once the lock is held, on a thread of the client's that must not be kept
    /// for long. There is one such thread for all waits of a client. After
    /// [`Pending::cancel`] it is called with [`Error::Cancelled`], or with the
    /// guard if the lock was given at that moment; whoever does not want that
    /// drops it.
    ///
    /// # Errors
    /// As [`lock`](Self::lock); `then` gets those that come later.
    pub fn lock_then(
        &self,
        then: impl FnOnce(Result<LockGuard>) + Send + 'static,
    ) -> Result<Pending> {
        let link = &self.array.client.core.link;
        if link.welcome().seat == 0 {
            let what = "the server has more sessions than can hold locks".to_owned();
            return Err(Error::Limit { addr: link.addr(), what });
        }
        let (array, offset) = (self.array.number, self.offset);
        let record = AcquireRecord { array, offset, ..AcquireRecord::default() };
        // The array is kept: its number must mean the same until the end.
        let lock = self.clone();
        let ended = Then::Granted(Box::new(move |got| {
            then(match got {
                Ok(grant) => Ok(lock.granted(&grant)),
                Err(failure) => Err(lock.array.explain(failure, "lock")),
            });
        }));
        link.queue_then(record, ended).map_err(|f| self.array.explain(f, "lock"))
    }

    /// What holds the lock that was queued for.
    fn granted(&self, grant: &Grant) -> LockGuard {
        let before = sync::Lock::of(grant.word);
        LockGuard {
            lock: self.clone(),
            session: grant.session,
            seat: grant.seat,
            token: before.taken(grant.seat, false).token,
            abandoned: before.abandoned,
            held: true,
        }
    }
}
