//! Who else is here, and what is left behind.

use super::options::is_peer;
use super::{Batch, Client};
use crate::error::{Error, Result};
use crate::transport::Failure;
use crate::wire::{self, HoldRecord, MemberRecord, Refusal, Tag};
use std::time::Duration;

/// A session of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// What it has called itself with [`Client::join`].
    pub name: Option<String>,
    /// Its number among the sessions that live.
    pub seat: u32,
    /// By which way its operations go: `tcp`, `rdma` or `shm`.
    pub transport: &'static str,
    /// It may read only.
    pub reads_only: bool,
    /// How long it has been here.
    pub age: Duration,
    /// How long ago the server last heard of it.
    pub last_heard: Duration,
    /// What it holds and waits for: 32 things at most.
    pub holds: Vec<Holding>,
    /// How many things that are, those counted that are not listed.
    pub holds_in_all: usize,
}

/// Something that a session holds or waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// What it does there.
    pub what: HoldingKind,
    /// The array.
    pub name: String,
    /// Row.
    pub row: usize,
    /// Column.
    pub col: usize,
}

/// What a session does with a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HoldingKind {
    /// It holds the lock.
    Lock {
        /// With this fencing token.
        token: u64,
    },
    /// It is a party of the barrier.
    Party,
    /// It waits for the cell to change.
    Wait,
    /// It queues for the lock or for a permit.
    Queue,
}

impl Client {
    /// Calls this session so, for others to name it in their waits and to see it
    /// among the [`members`](Self::members). A session that comes in its place,
    /// because its lease was over, gets the name again if it is free. Another
    /// name replaces it.
    ///
    /// # Errors
    /// [`Error::NameTaken`] if a living session is called so, also if its process
    /// has died and its lease is not yet over; [`Error::BadPeerName`];
    /// [`Error::ReadOnly`]; [`Error::Unreachable`].
    pub fn join(&self, name: &str) -> Result<()> {
        let peer = name.to_owned();
        if !is_peer(name) {
            return Err(Error::BadPeerName { peer });
        }
        self.core.link.join(name).map_err(|failure| match failure {
            Failure::Error(error) => error,
            Failure::Refused(Refusal::NameTaken(seat), _) => Error::NameTaken { peer, seat },
            Failure::Refused(Refusal::ReadOnly, _) => Error::ReadOnly { op: "join" },
            Failure::Refused(refusal, _) => self.senseless(&format!("a refusal ({refusal:?})")),
        })
    }

    /// Every session that lives, by seat: the one that has been here longest
    /// first, mostly.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    pub fn members(&self) -> Result<Vec<Member>> {
        let mut all: Vec<Member> = Vec::new();
        loop {
            let after = all.last().map_or(0, |member| member.seat).to_le_bytes();
            let bytes = self.core.link.request(Tag::Members, "members", &after);
            let bytes = bytes.map_err(|failure| match failure {
                Failure::Error(error) => error,
                Failure::Refused(..) => self.senseless("a refusal to list members"),
            })?;
            if bytes.is_empty() {
                return Ok(all);
            }
            all.extend(read_members(&bytes).ok_or_else(|| self.senseless("a list of members"))?);
        }
    }

    /// The seat of this session: its number among those that live, 0 if it has
    /// none. A session that comes in its place has another one.
    #[must_use]
    pub fn seat(&self) -> u32 {
        self.core.link.welcome().seat
    }

    /// Leaves operations to be done by the server when this session ends in any
    /// other way than by [`release`](Self::release): set an event, for example.
    /// They take the place of those left before; an empty batch leaves none.
    ///
    /// A batch of set, clear, take, store, add and their like: what only reads
    /// is refused. A session that comes in this one's place leaves them again.
    ///
    /// # Errors
    /// [`Error::BadSelection`] for an operation that cannot be left or more than
    /// 1,024; as the operations themselves.
    pub fn set_will(&self, will: &Batch) -> Result<()> {
        let (records, numbers) = will.as_records(self)?;
        if records.len() > wire::MAX_WILL {
            let what =
                format!("a will of {} operations: {} are possible", records.len(), wire::MAX_WILL);
            return Err(Error::BadSelection { what });
        }
        let left = self.core.link.set_will(bytemuck::cast_slice(&records), numbers);
        left.map_err(|failure| match failure {
            Failure::Refused(Refusal::BadOperand, index) => Error::BadSelection {
                what: format!("operation {index} of the will cannot be left to the server"),
            },
            other => will.explain(other),
        })
    }

    /// Hands over cleanly and ends the session: locks are freed as if they were
    /// unlocked, barriers are left, the name is withdrawn, the will is void, and
    /// no wait that names this peer ends by it. Whoever of this program still
    /// waits gets [`Error::Closed`].
    ///
    /// # Errors
    /// [`Error::Unreachable`]: nothing was handed over, and the session ends with
    /// its lease.
    pub fn release(&self) -> Result<()> {
        self.core.link.release().map_err(|failure| match failure {
            Failure::Error(error) => error,
            Failure::Refused(..) => self.senseless("a refusal to be released"),
        })
    }
}

pub(super) fn read_members(mut bytes: &[u8]) -> Option<Vec<Member>> {
    let mut members = Vec::new();
    while !bytes.is_empty() {
        let (record, rest) = wire::take::<MemberRecord>(Tag::MembersListed, bytes).ok()?;
        let (name, mut rest) = rest.split_at_checked(record.name_len.into())?;
        let mut holds = Vec::new();
        for _ in 0..record.holds {
            let (hold, behind) = wire::take::<HoldRecord>(Tag::MembersListed, rest).ok()?;
            let (array, behind) = behind.split_at_checked(hold.name_len.into())?;
            rest = behind;
            let what = match hold.what {
                1 => HoldingKind::Lock { token: hold.token },
                2 => HoldingKind::Party,
                3 => HoldingKind::Wait,
                4 => HoldingKind::Queue,
                _ => return None,
            };
            let name = std::str::from_utf8(array).ok()?.to_owned();
            holds.push(Holding { what, name, row: hold.row as usize, col: hold.col as usize });
        }
        bytes = rest;
        let name = std::str::from_utf8(name).ok()?;
        members.push(Member {
            name: (!name.is_empty()).then(|| name.to_owned()),
            seat: record.seat,
            transport: match record.way {
                1 => "tcp",
                2 => "rdma",
                3 => "shm",
                _ => return None,
            },
            reads_only: record.reads_only != 0,
            age: Duration::from_millis(record.age_ms),
            last_heard: Duration::from_millis(record.silent_ms),
            holds,
            holds_in_all: record.all as usize,
        });
    }
    Some(members)
}
