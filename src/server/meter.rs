//! What the workers count. Each has numbers of its own, in cache lines of its
//! own; nothing hangs on them, so all is Relaxed.

use crate::auth::Denial;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the buckets for the time of a wake-up, in nanoseconds.
pub(super) const WAKE_BOUNDS: [u64; 15] = [
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    1_000_000_000,
];

/// What one worker has done. Only its thread changes it.
#[derive(Debug, Default)]
pub(super) struct Meter {
    /// Bytes of sessions' connections.
    pub bytes_in: AtomicU64,
    /// The same, sent.
    pub bytes_out: AtomicU64,
    /// Bytes of connections for messages.
    pub message_bytes_in: AtomicU64,
    /// The same, sent.
    pub message_bytes_out: AtomicU64,
    /// Messages committed over such a connection.
    pub messages_in: AtomicU64,
    /// Reads of messages over such a connection.
    pub messages_out: AtomicU64,
    /// Cells that clients changed by RDMA and rang for.
    pub doorbells: AtomicU64,
    /// Answers of waits by how long they took, and those that took longer.
    pub wakes: [AtomicU64; WAKE_BOUNDS.len() + 1],
    /// All of that time together, in nanoseconds.
    pub wake_time: AtomicU64,
}

/// Adds to a number that only this thread changes.
#[inline]
pub(super) fn bump(number: &AtomicU64, by: u64) {
    number.store(number.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

impl Meter {
    /// So many answers of waits have gone out, that long after the change came to
    /// the server.
    pub fn woke(&self, answers: u64, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let bucket = WAKE_BOUNDS.partition_point(|&bound| bound < nanos);
        bump(&self.wakes[bucket], answers);
        bump(&self.wake_time, nanos.saturating_mul(answers));
    }
}

/// Why a connection did not become a session. The number is its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turned {
    Version = 0,
    Key = 1,
    Full = 2,
    GoingAway = 3,
    Job = 4,
    /// It did not speak the protocol.
    Stranger = 5,
    /// It did not prove itself in time.
    Slow = 6,
    /// Newer ones needed the room.
    Crowded = 7,
    /// It did not encrypt, which is required here.
    Clear = 8,
    /// Somebody stood in between.
    Intercepted = 9,
}

impl Turned {
    pub const ALL: [Turned; 10] = [
        Turned::Version,
        Turned::Key,
        Turned::Full,
        Turned::GoingAway,
        Turned::Job,
        Turned::Stranger,
        Turned::Slow,
        Turned::Crowded,
        Turned::Clear,
        Turned::Intercepted,
    ];

    /// A label of metrics: the same for ever.
    #[cfg(feature = "metrics")]
    pub const fn name(self) -> &'static str {
        match self {
            Turned::Version => "version",
            Turned::Key => "key",
            Turned::Full => "full",
            Turned::GoingAway => "going_away",
            Turned::Job => "job",
            Turned::Stranger => "not_farcell",
            Turned::Slow => "timeout",
            Turned::Crowded => "crowded_out",
            Turned::Clear => "not_encrypted",
            Turned::Intercepted => "intercepted",
        }
    }
}

impl From<Denial> for Turned {
    fn from(denial: Denial) -> Turned {
        match denial {
            Denial::Version => Turned::Version,
            Denial::Key => Turned::Key,
            Denial::Full => Turned::Full,
            Denial::GoingAway => Turned::GoingAway,
            Denial::Job => Turned::Job,
            Denial::TlsRequired => Turned::Clear,
            Denial::Intercepted => Turned::Intercepted,
        }
    }
}

/// What happens seldom, on whichever thread.
#[derive(Debug, Default)]
pub(super) struct Tolls {
    /// Connections that did not become sessions, by [`Turned`].
    pub turned: [AtomicU64; Turned::ALL.len()],
    /// Snapshots written, and those that failed.
    pub snapshots: [AtomicU64; 2],
    /// When the last one was whole, in nanoseconds since the start; 0: none is.
    pub snapshot_at: AtomicU64,
    /// How long it took, in nanoseconds.
    pub snapshot_took: AtomicU64,
}

impl Tolls {
    /// A connection did not become a session.
    pub fn turn(&self, why: Turned) {
        self.turned[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// A snapshot was written in so long, or not.
    pub fn snapshot(&self, written: bool, took: Duration, since_start: Duration) {
        self.snapshots[usize::from(!written)].fetch_add(1, Ordering::Relaxed);
        if written {
            let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            self.snapshot_took.store(nanos(took), Ordering::Relaxed);
            self.snapshot_at.store(nanos(since_start).max(1), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_goes_into_the_bucket_that_has_it() {
        let meter = Meter::default();
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        for (nanos, bucket) in [(0, 0), (5_000, 0), (5_001, 1), (1_000_000_000, 14)] {
            let before = read(&meter.wakes[bucket]);
            meter.woke(2, Duration::from_nanos(nanos));
            assert_eq!(read(&meter.wakes[bucket]), before + 2, "{nanos}");
        }
        meter.woke(1, Duration::MAX);
        assert_eq!(read(&meter.wakes[WAKE_BOUNDS.len()]), 1);
    }

    #[test]
    fn reasons_have_their_places() {
        for (place, why) in Turned::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, place);
        }
    }
}
