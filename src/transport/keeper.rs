//! One thread a process that keeps the leases of all its clients.

use super::tcp::Link;
use crate::engine::lock;
use crossbeam::atomic::AtomicCell;
use farcell_sys::fork::{self, Generation};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Condvar, Mutex, PoisonError, Weak};
use std::time::Instant;

struct Due {
    at: Instant,
    link: Weak<Link>,
}

impl PartialEq for Due {
    fn eq(&self, other: &Due) -> bool {
        self.at == other.at
    }
}
impl Eq for Due {}
impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Due {
    fn cmp(&self, other: &Due) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

/// What the thread of one process works on.
struct Keeper {
    generation: Generation,
    due: Mutex<BinaryHeap<Reverse<Due>>>,
    earlier: Condvar,
    /// Whether the thread runs.
    runs: Mutex<bool>,
}

impl PartialEq for Keeper {
    fn eq(&self, other: &Keeper) -> bool {
        std::ptr::eq(self, other)
    }
}
impl Eq for Keeper {}

/// The keeper of this process. A forked child has its parent's, whose thread it
/// has not, and whose locks may be held for ever: it gets one of its own, and
/// no lock is on the way to it.
fn keeper() -> &'static Keeper {
    static CURRENT: AtomicCell<Option<&'static Keeper>> = AtomicCell::new(None);
    const { assert!(AtomicCell::<Option<&'static Keeper>>::is_lock_free()) };
    let generation = fork::generation();
    let known = CURRENT.load();
    if let Some(known) = known.filter(|known| known.generation == generation) {
        return known;
    }
    let made: &'static Keeper = Box::leak(Box::new(Keeper {
        generation,
        due: Mutex::default(),
        earlier: Condvar::new(),
        runs: Mutex::new(false),
    }));
    match CURRENT.compare_exchange(known, Some(made)) {
        Ok(_) => made,
        // Another thread of this process was first.
        Err(first) => first.unwrap_or(made),
    }
}

/// Looks after a link until it is dropped: calls [`Link::tend`] each time that
/// it asks for.
///
/// # Errors
/// The system refuses the thread; the next call tries again.
pub(crate) fn keep(link: Weak<Link>, first: Instant) -> std::io::Result<()> {
    let keeper = keeper();
    {
        let mut runs = lock(&keeper.runs);
        if !*runs {
            std::thread::Builder::new().name("farcell-keeper".to_owned()).spawn(|| keeper.run())?;
            *runs = true;
        }
    }
    let mut due = lock(&keeper.due);
    // It sleeps until the first one that it knows; a later one need not wake
    // it.
    let earlier = due.peek().is_none_or(|Reverse(known)| first < known.at);
    due.push(Reverse(Due { at: first, link }));
    drop(due);
    if earlier {
        keeper.earlier.notify_one();
    }
    Ok(())
}

impl Keeper {
    fn run(&self) {
        let mut due = lock(&self.due);
        loop {
            let now = Instant::now();
            let wait = due.peek().map(|Reverse(first)| first.at.saturating_duration_since(now));
            match wait {
                None => due = self.earlier.wait(due).unwrap_or_else(PoisonError::into_inner),
                Some(wait) if !wait.is_zero() => {
                    due = self
                        .earlier
                        .wait_timeout(due, wait)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0;
                }
                Some(_) => {
                    let Some(Reverse(Due { link, .. })) = due.pop() else {
                        continue;
                    };
                    drop(due);
                    let next = link.upgrade().and_then(|link| link.tend(now));
                    due = lock(&self.due);
                    if let Some(at) = next {
                        due.push(Reverse(Due { at, link }));
                    }
                }
            }
        }
    }
}
