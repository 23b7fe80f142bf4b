//! How a client's operations reach the cells: one file a transport, one trait.

pub(crate) mod connect;
pub(crate) mod fell;
pub(crate) mod interrupt;
pub(crate) mod keeper;
pub(crate) mod rdma;
pub(crate) mod shm;
pub(crate) mod socket;
pub(crate) mod tcp;

use crate::auth::Welcome;
use crate::cell::Op;
use crate::error::Error;
use crate::layout::Run;
use crate::wire::{Refusal, WaitRecord};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// An operation on one cell, as a transport takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CellOp {
    /// What to do.
    pub op: Op,
    /// The session's number of the array.
    pub array: u16,
    /// The cell, counted from the start of the array.
    pub offset: u32,
    /// First operand.
    pub a: u64,
    /// Second operand.
    pub b: u64,
}

/// Why an operation failed, before anyone has put names to the numbers.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server refused it. The number says which operation of several.
    Refused(Refusal, u32),
    /// Anything else.
    Error(Error),
}

impl Failure {
    /// The same, of an operation that stands behind `count` others.
    pub fn behind(self, count: usize) -> Failure {
        match self {
            Failure::Refused(refusal, index) => Failure::Refused(refusal, index + count as u32),
            error @ Failure::Error(_) => error,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Error(error)
    }
}

/// How a wait ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waited {
    /// Enough cells satisfied it; otherwise its time was over or it was
    /// cancelled.
    pub satisfied: bool,
    /// Which targets satisfied it, counted in their order, and by what word.
    pub fired: Vec<(u32, u64)>,
}

/// A second way by which the server's frames reach a client.
pub(crate) trait Bell: Send + Sync + std::fmt::Debug {
    /// Becomes readable when there is a frame, after [`take`](Self::take).
    fn fd(&self) -> BorrowedFd<'_>;

    /// Appends the frames that are there. Does not block. `false`: this way is
    /// broken.
    fn take(&self, frames: &mut Vec<u8>) -> bool;
}

/// One who must know how it stands with a link's connection.
pub(crate) trait Follower: Send + Sync + std::fmt::Debug {
    /// The connection is lost, or was at some moment.
    fn lost(&self);

    /// The number of an array may mean other cells from here on, or none, until
    /// it has been opened again. May block: nothing that was begun with the cells
    /// that it meant may be under way afterwards.
    fn reopening(&self, number: u16);

    /// It is back. If the session is a new one, these arrays are open in it:
    /// their numbers, and the first cell of each. May block.
    fn back(&self, welcome: &Welcome, opened: &[(u16, u32)]);

    /// The session is over.
    fn closed(&self);
}

/// The way of a client's operations to the cells. Every method may be called
/// by many threads at once and blocks until the answer is there or the
/// transport gives up.
pub(crate) trait Transport: Send + Sync + std::fmt::Debug {
    /// Carries out one operation and returns the word before it.
    fn execute(&self, op: CellOp) -> Result<u64, Failure>;

    /// Carries out many operations, on as few trips as it takes, and returns
    /// the words before each. If one is refused, none of its trip is done; a
    /// one-sided operation is a trip of its own.
    fn execute_all(&self, ops: &[CellOp]) -> Result<Vec<u64>, Failure>;

    /// Carries out one operation without operands on many cells of an array.
    fn execute_runs(&self, op: Op, array: u16, runs: &[Run]) -> Result<Vec<u64>, Failure>;

    /// Waits until `need` of the targets are satisfied.
    fn wait(
        &self,
        need: u32,
        targets: &[WaitRecord],
        timeout: Option<Duration>,
        cancel: Option<&tcp::Canceller>,
    ) -> Result<Waited, Failure>;

    /// Waits for one cell; the word that satisfied it.
    fn wait_one(
        &self,
        target: WaitRecord,
        timeout: Option<Duration>,
        cancel: Option<&tcp::Canceller>,
    ) -> Result<Option<u64>, Failure> {
        let waited = self.wait(1, &[target], timeout, cancel)?;
        Ok(waited.fired.first().map(|(_, word)| *word).filter(|_| waited.satisfied))
    }
}
