//! One thread a process that keeps the leases of all its clients.

use super::tcp::Link;
use crate::engine::lock;
use farcell_sys::fork::{self, Generation};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError, Weak};
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

#[derive(Default)]
struct Keeper {
    due: Mutex<BinaryHeap<Reverse<Due>>>,
    earlier: Condvar,
}

/// Looks after a link until it is dropped: calls [`Link::tend`] each time that
/// it asks for.
pub(crate) fn keep(link: Weak<Link>, first: Instant) -> std::io::Result<()> {
    match keeper() {
        Ok(keeper) => {
            let mut due = lock(&keeper.due);
            // It sleeps until the first one that it knows; a later one need
            // not wake it.
            let earlier = due.peek().is_none_or(|Reverse(known)| first < known.at);
            due.push(Reverse(Due { at: first, link }));
            drop(due);
            if earlier {
                keeper.earlier.notify_one();
            }
            Ok(())
        }
        Err(e) => Err(e.kind().into()),
    }
}

/// The keeper of one process, and behind it that of a child.
struct OfProcess {
    keeper: OnceLock<(Generation, std::io::Result<&'static Keeper>)>,
    child: OnceLock<Box<OfProcess>>,
}

/// This process's keeper. A forked child has its parent's memory but not its
/// threads, and whoever held the lock of the parent's keeper is not there to
/// let go: it gets one of its own.
fn keeper() -> &'static std::io::Result<&'static Keeper> {
    static FIRST: OfProcess = OfProcess { keeper: OnceLock::new(), child: OnceLock::new() };
    let now = fork::generation();
    let mut at = &FIRST;
    loop {
        let (born, keeper) = at.keeper.get_or_init(|| (now, start()));
        if *born == now {
            return keeper;
        }
        at = at.child.get_or_init(|| {
            Box::new(OfProcess { keeper: OnceLock::new(), child: OnceLock::new() })
        });
    }
}

fn start() -> std::io::Result<&'static Keeper> {
    let keeper: &'static Keeper = Box::leak(Box::default());
    std::thread::Builder::new().name("farcell-keeper".to_owned()).spawn(|| keeper.run())?;
    Ok(keeper)
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
