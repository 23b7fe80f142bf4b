//! Time as leases count it: a worker that is at work on something long hears no
//! client meanwhile, and what it does not hear must not count as silence.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A turn of a worker's loop that takes longer than this has kept clients
/// waiting.
const LONG: Duration = Duration::from_millis(250);

/// What the workers' loops are doing. Nanoseconds since the start of the server.
/// Relaxed wherever it is used: the numbers carry nothing else with them, and a
/// lease is far longer than any of them is late.
#[derive(Debug)]
pub(super) struct Pace {
    /// When each worker began its turn; 0 while it has none.
    turns: Box<[AtomicU64]>,
    /// The long turns so far, together.
    lost: AtomicU64,
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Pace {
    pub fn new(workers: usize) -> Pace {
        let turns = (0..workers).map(|_| AtomicU64::new(0)).collect();
        Pace { turns, lost: AtomicU64::new(0) }
    }

    /// A worker begins a turn.
    pub fn begin(&self, worker: usize, now: Duration) {
        self.turns[worker].store(nanos(now).max(1), Ordering::Relaxed);
    }

    /// A worker has ended its turn.
    pub fn end(&self, worker: usize, now: Duration) {
        let began = self.turns[worker].swap(0, Ordering::Relaxed);
        let took = nanos(now).saturating_sub(began);
        if took > nanos(LONG) {
            self.lost.fetch_add(took, Ordering::Relaxed);
        }
    }

    /// The time since the start of the server without the long turns, those
    /// counted that are not over.
    pub fn time(&self, now: Duration) -> Duration {
        let now = nanos(now);
        let began = self.turns.iter().map(|turn| turn.load(Ordering::Relaxed));
        let longest = began.filter(|&began| began > 0).map(|began| now.saturating_sub(began)).max();
        let under_way = longest.filter(|&took| took > nanos(LONG)).unwrap_or(0);
        let lost = self.lost.load(Ordering::Relaxed);
        Duration::from_nanos(now.saturating_sub(lost).saturating_sub(under_way))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn time_stands_still_while_a_worker_hears_nobody() {
        let pace = Pace::new(2);
        pace.begin(0, ms(1000));
        assert_eq!(pace.time(ms(1100)), ms(1100));
        pace.end(0, ms(1100));
        assert_eq!(pace.time(ms(2000)), ms(2000));
        // Seen by the others while it lasts, and by all behind it.
        pace.begin(1, ms(2000));
        assert_eq!(pace.time(ms(2200)), ms(2200));
        assert_eq!(pace.time(ms(9000)), ms(2000));
        pace.end(1, ms(10_000));
        assert_eq!(pace.time(ms(10_000)), ms(2000));
        assert_eq!(pace.time(ms(10_500)), ms(2500));
    }
}
