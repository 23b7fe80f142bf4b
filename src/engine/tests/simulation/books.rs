//! What clients were told, against what the cells say.

use std::collections::{BTreeMap, BTreeSet};

pub const EVENTS: usize = 3;
pub const COUNTERS: usize = 3;
pub const LOCKS: usize = 2;
pub const ROWS: usize = 2;
pub const PARTIES: u64 = 3;
/// Permits at first.
pub const PERMITS: u64 = 2;

/// Changes of one cell by 1 each.
#[derive(Debug, Default)]
pub struct Count {
    /// The values from which acknowledged ones went out.
    acknowledged: BTreeSet<i64>,
    /// Of so many nobody knows whether they happened.
    unknown: usize,
}

impl Count {
    pub fn acknowledge(&mut self, from: i64, what: &str) {
        assert!(self.acknowledged.insert(from), "{what}: two changes from the value {from}");
    }

    pub fn lose(&mut self) {
        self.unknown += 1;
    }

    /// The value at the end, when nothing is under way any more; so many more may
    /// have happened.
    pub fn check(&self, value: i64, more: usize, what: &str) {
        let least = self.acknowledged.len();
        let most = least + self.unknown + more;
        assert!(
            value >= least as i64,
            "{what}: {value}, but {least} were acknowledged: some are lost"
        );
        assert!(
            value <= most as i64,
            "{what}: {value}, but {most} were asked for: some are doubled"
        );
        if let Some(last) = self.acknowledged.last() {
            assert!(*last < value, "{what}: acknowledged from {last}, and {value} at the end");
        }
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Books {
    pub counters: [Count; COUNTERS],
    pub events: [Count; EVENTS],
    pub rows: [Count; ROWS],
    /// Arrivals at the barrier, by its epoch.
    pub arrivals: BTreeMap<u64, Count>,
    /// Arrivals, in whatever epoch, of which nobody knows whether they happened.
    pub arrivals_lost: usize,
    /// Permits that went away with the sessions that had them, at most.
    pub permits_lost: u64,
    /// What the wills of those who have gone should have added.
    pub wills: i64,
    /// The highest token of each lock, and who has it.
    pub tokens: [u64; LOCKS],
    /// Who queues for each lock, by session, the first first.
    pub queues: [Vec<u64>; LOCKS],
}

impl Books {
    /// The word of a lock behind one thing that the engine did: tokens grow by one
    /// with each holder, and go to the first in the queue.
    pub fn lock(
        &mut self,
        which: usize,
        token: u64,
        holder: Option<u64>,
        queues: impl Fn(u64) -> bool,
    ) {
        let before = std::mem::replace(&mut self.tokens[which], token);
        assert!(token >= before, "lock {which}: token {token} behind {before}");
        let queue = &mut self.queues[which];
        if token > before
            && let Some(holder) = holder
        {
            let place = queue.iter().position(|session| *session == holder);
            let passed = &queue[..place.unwrap_or(queue.len())];
            for session in passed {
                assert!(!queues(*session), "lock {which}: session {session} was passed over");
            }
        }
        queue.retain(|session| queues(*session));
        assert!(
            holder.is_some() || queue.is_empty(),
            "lock {which} is free, and {queue:?} are left"
        );
    }

    /// One more queues.
    pub fn queue(&mut self, which: usize, session: u64) {
        if !self.queues[which].contains(&session) {
            self.queues[which].push(session);
        }
    }

    /// Permits are never more than there were.
    pub fn permits(there: u64, held: u64) {
        assert!(there + held <= PERMITS, "{there} permits are there and {held} are held");
    }
}
