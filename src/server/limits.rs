//! How much there may be.

use super::ServerBuilder;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

impl ServerBuilder {
    /// Most waits that one session may have at a time, on four times as many cells;
    /// 65,536 unless told otherwise. About 150 bytes of the server's memory go with
    /// each of these cells.
    #[must_use]
    pub fn max_waits(mut self, most: usize) -> ServerBuilder {
        self.max_waits = Some(most);
        self
    }
}

/// Half of what this machine has, see sysinfo(2).
pub(super) fn half_of_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into()) / 2
}

/// Raises the soft limit of open files to the hard one, and says what it is.
pub(super) fn raise_file_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, wanted)
    {
        tracing::warn!(
            "cannot raise the limit of open files above {:?} ({error}); each client needs one: ulimit -n",
            limit.current
        );
    }
    getrlimit(Resource::Nofile)
        .current
        .map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}
