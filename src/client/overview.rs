//! Who waits for what, who holds what, and how busy everyone is: what a person
//! wants to know of a job that stands still.

use super::Client;
use crate::catalog::Kind;
use crate::cell::Comparison;
use crate::error::Result;
use crate::wire::{
    self, FellReason, FellRecord, HeldRecord, HoldersHead, PartyAtRecord, SINCE_UNKNOWN, Tag,
    TallyRecord, WaitedRecord, WaitingRecord, WaitsAfter,
};
use std::time::Duration;

/// A wait of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The seat of the session, see [`Member::seat`](super::Member::seat).
    pub seat: u32,
    /// How it waits.
    pub how: WaitingHow,
    /// For how long; not known of one that sleeps in shared memory.
    pub since: Option<Duration>,
    /// How many of its cells must be satisfied.
    pub need: usize,
    /// The cells: 16 of them at most.
    pub cells: Vec<WaitedCell>,
    /// How many cells it has, those counted that are not listed.
    pub cells_in_all: usize,
    /// The peers that it names: 16 of them at most.
    pub peers: Vec<String>,
    /// How many peers it names, those counted that are not listed.
    pub peers_in_all: usize,
}

/// How a session waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WaitingHow {
    /// For cells, at the server.
    Parked,
    /// In the queue for a lock or a permit.
    Queued,
    /// For a cell, in shared memory, without the server.
    Asleep,
}

/// A cell of a wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitedCell {
    /// The array.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Row.
    pub row: usize,
    /// Column.
    pub col: usize,
    /// What its value is waited to be; `None` for a claim, and asleep.
    pub until: Option<(Comparison, i64)>,
    /// It is so already; other cells of the wait are not.
    pub satisfied: bool,
}

/// A lock, a barrier or a semaphore that someone holds or wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The array.
    pub name: String,
    /// Row.
    pub row: usize,
    /// Column.
    pub col: usize,
    /// How many queue for it.
    pub queued: usize,
    /// What it is, and how it stands with it.
    pub state: HeldState,
}

/// How it stands with a lock, a barrier or a semaphore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldState {
    /// A lock.
    Lock {
        /// The seat of the holder, if it is held.
        holder: Option<u32>,
        /// The fencing token of the holder, or of the last one.
        token: u64,
        /// The last holder's session ended before it unlocked.
        abandoned: bool,
    },
    /// A barrier.
    Barrier {
        /// How many must arrive.
        needed: u64,
        /// How many have, in this generation.
        arrived: u32,
        /// It is broken.
        broken: bool,
        /// Seats that are known to be parties, 256 at most, and whether each
        /// waits there now. A session is a party from its first wait on.
        parties: Vec<(u32, bool)>,
        /// How many are known, those counted that are not listed.
        parties_in_all: usize,
    },
    /// A semaphore. Nobody knows who has its permits.
    Semaphore {
        /// Permits that can be had.
        free: u64,
        /// Permits that there can be.
        most: u64,
    },
}

/// What a session has asked of the server. What it does by itself, over RDMA or
/// in shared memory, the server does not see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tally {
    /// The seat of the session.
    pub seat: u32,
    /// Operations on cells.
    pub operations: u64,
    /// Requests; one may hold many operations.
    pub requests: u64,
    /// Waits and claims.
    pub waits: u64,
    /// Cells that it changed in shared memory and rang the server for.
    pub rings: u64,
    /// How long ago the last of these was; `None`: there was none.
    pub idle: Option<Duration>,
    /// Transports that its client says it does not have.
    pub fallbacks: Vec<Fallback>,
}

/// A transport that a client does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// Which: `rdma` or `shm`.
    pub wanted: &'static str,
    /// Why, in a word: `no_device`, `memlock`, and so on.
    pub reason: &'static str,
    /// Why, in the client's own words, without control characters.
    pub text: String,
}

fn since(ms: u64) -> Option<Duration> {
    (ms != SINCE_UNKNOWN).then(|| Duration::from_millis(ms))
}

/// Takes `len` bytes of text off the front.
fn take_text<'b>(bytes: &mut &'b [u8], len: usize) -> Option<&'b str> {
    let (text, rest) = bytes.split_at_checked(len)?;
    *bytes = rest;
    std::str::from_utf8(text).ok()
}

fn take<T: bytemuck::Pod>(bytes: &mut &[u8]) -> Option<T> {
    let (record, rest) = wire::take::<T>(Tag::WaitsListed, bytes).ok()?;
    *bytes = rest;
    Some(record)
}

impl Client {
    /// Every wait that anyone has, by seat. Not one moment's picture if there are
    /// very many: the list comes in parts. Blocks for a round trip a part. A
    /// read-only session may ask too.
    ///
    /// # Errors
    /// [`Error::Unreachable`](crate::Error::Unreachable).
    pub fn waits(&self) -> Result<Vec<Waiting>> {
        let (mut all, mut after) = (Vec::new(), WaitsAfter::default());
        loop {
            let bytes = self.look(Tag::Waits, "waits", bytemuck::bytes_of(&after))?;
            if bytes.is_empty() {
                return Ok(all);
            }
            let last = read_waits(&bytes, &mut all);
            let last = last.ok_or_else(|| self.senseless("a list of waits"))?;
            if (last.seat, last.wait) <= (after.seat, after.wait) && after.seat != 0 {
                return Err(self.senseless("a list of waits"));
            }
            after = last;
        }
    }

    /// Every lock, barrier and semaphore that anyone holds, queues for, or is a
    /// party of, by its place. As [`waits`](Self::waits).
    ///
    /// # Errors
    /// [`Error::Unreachable`](crate::Error::Unreachable).
    pub fn holders(&self) -> Result<Vec<Held>> {
        let (mut all, mut next) = (Vec::new(), 0u32);
        loop {
            let bytes = self.look(Tag::Holders, "holders", &next.to_le_bytes())?;
            let further = read_holders(&bytes, &mut all)
                .filter(|&further| further == 0 || further > next)
                .ok_or_else(|| self.senseless("a list of holders"))?;
            if further == 0 {
                return Ok(all);
            }
            next = further;
        }
    }

    /// What every session has asked of the server so far, by seat.
    ///
    /// # Errors
    /// [`Error::Unreachable`](crate::Error::Unreachable).
    pub fn tallies(&self) -> Result<Vec<Tally>> {
        let mut all: Vec<Tally> = Vec::new();
        loop {
            let after = all.last().map_or(0, |tally| tally.seat);
            let bytes = self.look(Tag::Tallies, "tallies", &after.to_le_bytes())?;
            if bytes.is_empty() {
                return Ok(all);
            }
            read_tallies(&bytes, &mut all).ok_or_else(|| self.senseless("a list of tallies"))?;
            if all.last().is_none_or(|tally| tally.seat <= after) {
                return Err(self.senseless("a list of tallies"));
            }
        }
    }

    fn look(&self, tag: Tag, name: &'static str, payload: &[u8]) -> Result<Vec<u8>> {
        self.core.link.request(tag, name, payload).map_err(|failure| match failure {
            crate::transport::Failure::Error(error) => error,
            crate::transport::Failure::Refused(..) => self.senseless("a refusal to tell"),
        })
    }
}

/// Appends what is listed, and says where the list goes on.
fn read_waits(mut bytes: &[u8], all: &mut Vec<Waiting>) -> Option<WaitsAfter> {
    let mut last = None;
    while !bytes.is_empty() {
        let record: WaitingRecord = take(&mut bytes)?;
        let mut cells = Vec::new();
        for _ in 0..record.cells {
            let cell: WaitedRecord = take(&mut bytes)?;
            let until = match cell.comparison {
                0 => None,
                code => Some((Comparison::from_code(code)?, cell.value)),
            };
            cells.push(WaitedCell {
                name: take_text(&mut bytes, cell.name_len.into())?.to_owned(),
                kind: Kind::from_code(cell.kind)?,
                row: cell.row as usize,
                col: cell.col as usize,
                until,
                satisfied: cell.fired != 0,
            });
        }
        let mut peers = Vec::new();
        for _ in 0..record.peers {
            let len: u8 = take(&mut bytes)?;
            peers.push(take_text(&mut bytes, len.into())?.to_owned());
        }
        last = Some(WaitsAfter { wait: record.wait, seat: record.seat, reserved: 0 });
        all.push(Waiting {
            seat: record.seat,
            how: match record.what {
                1 => WaitingHow::Parked,
                2 => WaitingHow::Queued,
                3 => WaitingHow::Asleep,
                _ => return None,
            },
            since: since(record.since_ms),
            need: record.need as usize,
            cells,
            cells_in_all: record.all_cells as usize,
            peers,
            peers_in_all: record.all_peers as usize,
        });
    }
    last
}

fn read_holders(mut bytes: &[u8], all: &mut Vec<Held>) -> Option<u32> {
    let head: HoldersHead = take(&mut bytes)?;
    while !bytes.is_empty() {
        let record: HeldRecord = take(&mut bytes)?;
        let name = take_text(&mut bytes, record.name_len.into())?.to_owned();
        let mut parties = Vec::new();
        for _ in 0..record.parties {
            let party: PartyAtRecord = take(&mut bytes)?;
            parties.push((party.seat, party.arrived != 0));
        }
        let broken = record.broken != 0;
        let state = match Kind::from_code(record.kind)? {
            Kind::Lock => HeldState::Lock {
                holder: (record.seat != 0).then_some(record.seat),
                token: record.value,
                abandoned: broken,
            },
            Kind::Barrier => HeldState::Barrier {
                needed: record.most,
                arrived: record.arrived,
                broken,
                parties,
                parties_in_all: record.all_parties as usize,
            },
            Kind::Semaphore => HeldState::Semaphore { free: record.value, most: record.most },
            _ => return None,
        };
        let (row, col) = (record.row as usize, record.col as usize);
        all.push(Held { name, row, col, queued: record.queued as usize, state });
    }
    Some(head.next)
}

fn read_tallies(mut bytes: &[u8], all: &mut Vec<Tally>) -> Option<()> {
    while !bytes.is_empty() {
        let record: TallyRecord = take(&mut bytes)?;
        let mut fallbacks = Vec::new();
        for _ in 0..record.fallbacks {
            let fell: FellRecord = take(&mut bytes)?;
            fallbacks.push(Fallback {
                wanted: match fell.wanted {
                    2 => "rdma",
                    3 => "shm",
                    _ => return None,
                },
                reason: FellReason::from_code(fell.reason).name(),
                text: take_text(&mut bytes, fell.text.into())?.to_owned(),
            });
        }
        all.push(Tally {
            seat: record.seat,
            operations: record.operations,
            requests: record.requests,
            waits: record.waits,
            rings: record.rings,
            idle: since(record.idle_ms),
            fallbacks,
        });
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_list_or_none(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = read_waits(&bytes, &mut Vec::new());
            let _ = read_holders(&bytes, &mut Vec::new());
            let _ = read_tallies(&bytes, &mut Vec::new());
        }
    }
}
