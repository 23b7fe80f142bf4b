//! The file `sessions` of a state folder: which sessions live, and what of them
//! outlives the server, as changes under a [seal](super::sealed).

use super::folder::Folder;
use super::record::{Bad, Head, VERSION};
use super::sealed::{Sealed, Sort, unseal};
use crate::auth::Access;
use crate::cell::Op;
use crate::cell::sync::MAX_SEAT;
use crate::engine::{
    Former, Formers, Gone, Left, MAX_LOST, MAX_PEER_NAME, Note, Roster, check_former,
};
use crate::error::Result;
use bytemuck::{Pod, Zeroable};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// The file.
pub const NAME: &str = SORT.name;
/// Room for a million sessions with names and barriers.
pub const MOST: u64 = SORT.most;

const SORT: Sort =
    Sort { name: "sessions", new: "sessions.new", magic: *b"farcellP", most: 256 << 20 };

const BEGAN: u8 = 1;
const ENDED: u8 = 2;
const NAMED: u8 = 3;
const PARTY: u8 = 4;
const WILL: u8 = 5;
const RELEASED: u8 = 6;
const CLEARED: u8 = 7;
const LOST: u8 = 8;
const LAST_SEAT: u8 = 9;

/// A change, before the bytes that belong to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Record {
    tag: u8,
    /// Access, or how it ended.
    code: u8,
    reserved: u16,
    seat: u32,
    session: u64,
    /// A cell.
    place: u32,
    /// Cells, or bytes that follow.
    len: u32,
}

/// An operation of a will.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct LeftRecord {
    op: u8,
    reserved: [u8; 3],
    base: u32,
    offset: u32,
    reserved_too: u32,
    a: u64,
    b: u64,
}

fn push(out: &mut Vec<u8>, record: Record, bytes: &[u8]) {
    out.extend_from_slice(bytemuck::bytes_of(&record));
    out.extend_from_slice(bytes);
    out.resize(out.len().next_multiple_of(8), 0);
}

fn push_name(out: &mut Vec<u8>, record: Record, name: &str) {
    push(out, Record { len: name.len() as u32, ..record }, name.as_bytes());
}

fn push_will(out: &mut Vec<u8>, seat: u32, will: impl Iterator<Item = Left>) {
    let records = will.map(|left| {
        let Left { op, base, offset, a, b } = left;
        LeftRecord { op: op as u8, base, offset, a, b, ..LeftRecord::zeroed() }
    });
    let records: Vec<LeftRecord> = records.collect();
    let bytes: &[u8] = bytemuck::cast_slice(&records);
    push(out, Record { tag: WILL, seat, len: bytes.len() as u32, ..Record::zeroed() }, bytes);
}

/// What the changes lead to.
#[derive(Debug, Default, PartialEq, Eq)]
struct Register {
    sessions: HashMap<u32, Former>,
    numbers: HashSet<u64>,
    lost: HashMap<Arc<str>, Gone>,
    lost_in_order: VecDeque<Arc<str>>,
    last_seat: u32,
}

impl Register {
    fn at(&mut self, seat: u32) -> Result<&mut Former, Bad> {
        let nobody = || Bad::Content(format!("nobody has the seat {seat}"));
        self.sessions.get_mut(&seat).ok_or_else(nobody)
    }

    fn miss(&mut self, name: Arc<str>, how: Gone) {
        if self.lost.insert(name.clone(), how).is_none() {
            self.lost_in_order.push_back(name);
        }
        if self.lost_in_order.len() > MAX_LOST
            && let Some(oldest) = self.lost_in_order.pop_front()
        {
            self.lost.remove(&oldest);
        }
    }

    /// Goes on by the first change of the bytes.
    fn apply(&mut self, bytes: &mut &[u8]) -> Result<(), Bad> {
        let bad = |what: &str| Bad::Content(what.to_owned());
        let cut = || bad("a record is not whole");
        let (head, rest) = bytes.split_at_checked(size_of::<Record>()).ok_or_else(cut)?;
        let record: Record = bytemuck::pod_read_unaligned(head);
        let Record { tag, code, seat, session, place, len, .. } = record;
        let follow = if matches!(tag, NAMED | WILL | LOST) { len as usize } else { 0 };
        let (body, rest) = rest.split_at_checked(follow.next_multiple_of(8)).ok_or_else(cut)?;
        let body = &body[..follow];
        *bytes = rest;
        let name = || match std::str::from_utf8(body) {
            Ok(name) if !name.is_empty() && name.len() <= MAX_PEER_NAME => Ok(Arc::from(name)),
            _ => Err(bad("a name is none")),
        };
        let gone = || Gone::from_code(code).ok_or_else(|| bad("an end of no kind"));
        match tag {
            BEGAN => {
                let access = match code {
                    1 => Access::ReadWrite,
                    2 => Access::ReadOnly,
                    _ => return Err(bad("a session may do things of no kind")),
                };
                if seat == 0 || seat > MAX_SEAT {
                    return Err(bad("a seat is none"));
                }
                let (name, parties, will) = (None, HashSet::new(), Vec::new());
                let former = Former { session, access, name, parties, will };
                if self.sessions.insert(seat, former).is_some() || !self.numbers.insert(session) {
                    return Err(bad("a session began twice"));
                }
                self.last_seat = seat;
            }
            ENDED => {
                let how = gone()?;
                self.at(seat)?;
                let Some(former) = self.sessions.remove(&seat) else { unreachable!("just looked") };
                self.numbers.remove(&former.session);
                if let Some(name) = former.name.filter(|_| how != Gone::Released) {
                    self.miss(name, how);
                }
            }
            NAMED => {
                let name: Arc<str> = name()?;
                self.at(seat)?.name = Some(name.clone());
                if self.lost.remove(&name).is_some() {
                    self.lost_in_order.retain(|lost| *lost != name);
                }
            }
            PARTY => drop(self.at(seat)?.parties.insert(place)),
            WILL => self.at(seat)?.will = read_will(body)?,
            RELEASED => {
                let former = self.at(seat)?;
                former.name = None;
                former.parties.clear();
                former.will.clear();
            }
            CLEARED => {
                let cells = u64::from(place)..u64::from(place) + u64::from(len);
                let gone = |cell: u32| cells.contains(&u64::from(cell));
                for former in self.sessions.values_mut() {
                    former.parties.retain(|cell| !gone(*cell));
                    former.will.retain(|left| !gone(left.base));
                }
            }
            LOST => {
                let (name, how) = (name()?, gone()?);
                self.miss(name, how);
            }
            LAST_SEAT if seat <= MAX_SEAT => self.last_seat = seat,
            LAST_SEAT => return Err(bad("a seat is none")),
            tag => return Err(bad(&format!("a record has the tag {tag}"))),
        }
        Ok(())
    }

    /// Whether all of it can be, over that many cells.
    fn check(&self, capacity: u32) -> Result<(), Bad> {
        let mut names = HashSet::new();
        for former in self.sessions.values() {
            check_former(former, capacity).map_err(|what| Bad::Content(what.to_owned()))?;
            if former.name.as_ref().is_some_and(|name| !names.insert(name.clone())) {
                return Err(Bad::Content("two sessions have one name".to_owned()));
            }
        }
        Ok(())
    }

    /// The fewest changes that lead here.
    fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, how) in self.lost_in_order.iter().filter_map(|n| self.lost.get_key_value(n)) {
            push_name(&mut out, Record { tag: LOST, code: *how as u8, ..Record::zeroed() }, name);
        }
        for (&seat, former) in &self.sessions {
            let (code, session) = (former.access as u8, former.session);
            push(&mut out, Record { tag: BEGAN, code, seat, session, ..Record::zeroed() }, &[]);
            if let Some(name) = &former.name {
                push_name(&mut out, Record { tag: NAMED, seat, ..Record::zeroed() }, name);
            }
            for &place in &former.parties {
                push(&mut out, Record { tag: PARTY, seat, place, ..Record::zeroed() }, &[]);
            }
            if !former.will.is_empty() {
                push_will(&mut out, seat, former.will.iter().copied());
            }
        }
        let seat = self.last_seat;
        push(&mut out, Record { tag: LAST_SEAT, seat, ..Record::zeroed() }, &[]);
        out
    }

    fn formers(&self) -> Formers {
        let lost = self.lost_in_order.iter().filter_map(|name| self.lost.get_key_value(name));
        Formers {
            sessions: self.sessions.clone(),
            lost: lost.map(|(name, how)| (name.clone(), *how)).collect(),
            last_seat: self.last_seat,
        }
    }
}

fn read_will(body: &[u8]) -> Result<Vec<Left>, Bad> {
    let bad = |what: &str| Bad::Content(what.to_owned());
    if !body.len().is_multiple_of(size_of::<LeftRecord>()) {
        return Err(bad("a will is not whole"));
    }
    body.chunks_exact(size_of::<LeftRecord>())
        .map(|bytes| {
            let record: LeftRecord = bytemuck::pod_read_unaligned(bytes);
            let LeftRecord { op, base, offset, a, b, .. } = record;
            let op = Op::from_code(op).ok_or_else(|| bad("a will has an operation of no kind"))?;
            Ok(Left { op, base, offset, a, b })
        })
        .collect()
}

/// The sessions that lived when a file was written last.
#[derive(Debug, Default)]
pub struct Sessions {
    register: Register,
}

impl Sessions {
    /// Reads the file.
    ///
    /// # Errors
    /// It is foreign, of another version, cut short or damaged, or not of this
    /// catalog. Bytes behind the sealed part are no damage.
    pub fn read(bytes: &[u8], catalog: &Head) -> Result<Sessions, Bad> {
        let (head, mut changes) = unseal(bytes, SORT)?;
        // It gets its number before the catalog does.
        let same = head.state == catalog.state && head.capacity == catalog.capacity;
        if !same || ![0, 1].contains(&head.life.wrapping_sub(catalog.life)) {
            return Err(Bad::Content("it does not belong to its catalog".to_owned()));
        }
        let mut register = Register::default();
        while !changes.is_empty() {
            register.apply(&mut changes)?;
        }
        register.check(head.capacity)?;
        Ok(Sessions { register })
    }

    /// Who lived.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn formers(&self) -> Formers {
        self.register.formers()
    }
}

/// The file, as the server that uses it writes it.
#[derive(Debug)]
pub struct SessionsFile {
    file: Sealed,
    register: Register,
    /// What could not be noted is missing in the file; so many notes more, and
    /// it is tried to write it anew.
    behind: Option<u32>,
    pause: u32,
}

impl SessionsFile {
    /// Writes the file anew for the next life, and says who lived.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os).
    pub fn make(
        folder: &Arc<Folder>,
        capacity: u32,
        (state, life): (u32, u32),
        sessions: Sessions,
    ) -> Result<(Formers, SessionsFile)> {
        let Sessions { register } = sessions;
        let head = Head { magic: SORT.magic, version: VERSION, capacity, state, life, time: 0 };
        let file = Sealed::draft(folder, SORT, head, &register.to_bytes())?;
        file.publish()?;
        let formers = register.formers();
        Ok((formers, SessionsFile { file, register, behind: None, pause: 1 }))
    }

    /// Something could not be noted, or is missing since: tries to write all
    /// anew, each time later.
    fn catch_up(&mut self) {
        match &mut self.behind {
            None => return,
            Some(0) => {}
            Some(left) => {
                *left -= 1;
                return;
            }
        }
        match self.file.shorten(&self.register.to_bytes()) {
            Ok(()) => (self.behind, self.pause) = (None, 1),
            Err(_) => {
                self.pause = (self.pause * 2).min(1 << 12);
                self.behind = Some(self.pause);
            }
        }
    }
}

impl Roster for SessionsFile {
    fn note(&mut self, note: &Note<'_>) {
        let mut bytes = Vec::new();
        let out = &mut bytes;
        let none = Record::zeroed();
        match *note {
            Note::Began { session, access, seat } => {
                push(out, Record { tag: BEGAN, code: access as u8, seat, session, ..none }, &[]);
            }
            Note::Ended { seat, how } => {
                push(out, Record { tag: ENDED, code: how as u8, seat, ..none }, &[]);
            }
            Note::Named { seat, name } => {
                push_name(out, Record { tag: NAMED, seat, ..none }, name);
            }
            Note::Party { seat, place } => {
                push(out, Record { tag: PARTY, seat, place, ..none }, &[]);
            }
            Note::Will { seat, will } => {
                let will = will.iter().map(|b| {
                    let (base, offset) = (b.entry.base, b.offset);
                    Left { op: b.op, base, offset, a: b.a, b: b.b }
                });
                push_will(out, seat, will);
            }
            Note::Released { seat } => push(out, Record { tag: RELEASED, seat, ..none }, &[]),
            Note::Cleared { base, extent } => {
                push(out, Record { tag: CLEARED, place: base, len: extent, ..none }, &[]);
            }
        }
        if let Err(error) = self.register.apply(&mut &bytes[..]) {
            // The engine notes nothing that cannot be.
            tracing::error!(%error, ?note, "the sessions and their file differ");
            return;
        }
        if self.behind.is_some() {
            return self.catch_up();
        }
        if let Err(error) = self.file.append(&bytes) {
            let path = self.file.path();
            tracing::error!(path = %path.display(), %error, "cannot note a change of the sessions; those that begin now end with this life of the server");
            self.behind = Some(0);
        } else if self.file.is_long()
            && let Err(error) = self.file.shorten(&self.register.to_bytes())
        {
            tracing::warn!(%error, "cannot shorten the file of sessions; going on with the long one");
        }
    }
}

#[cfg(test)]
mod tests;
