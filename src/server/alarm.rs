//! A timer that wakes a worker in time.

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Ends the worker's sleep when something is due. A timeout of epoll would do
/// too, but it sets and cancels a timer with every request.
#[derive(Debug)]
pub(super) struct Alarm {
    pub(super) timer: OwnedFd,
    /// When it goes off.
    pub(super) at: Option<Instant>,
}

impl Alarm {
    pub(super) fn new() -> io::Result<Alarm> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        Ok(Alarm { timer: timerfd_create(TimerfdClockId::Monotonic, flags)?, at: None })
    }

    /// Goes off at `next` or before; costs nothing if it does so already. `now`
    /// may be a moment old: it does not go off early by that.
    pub(super) fn set(&mut self, next: Instant, now: Instant) {
        if self.at.is_some_and(|at| at <= next) {
            return;
        }
        // No time at all would switch it off.
        let left = next.saturating_duration_since(now).max(Duration::from_nanos(1));
        let value = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let once = Itimerspec { it_interval: Timespec::default(), it_value: value };
        match timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            Ok(_) => self.at = Some(next),
            // A timer that exists cannot refuse; requests still wake us.
            Err(error) => tracing::error!(%error, "cannot set a worker's alarm"),
        }
    }
}
