//! Waits that name peers, queues, and the requests about peers.

use super::super::{Failure, Waited};
use super::frame;
use super::link::Link;
use super::state::{Answer, Frame, Grant, Reply, Request, take_done};
use super::waits::Patience;
use crate::engine::{Gone, lock};
use crate::error::{Error, Parted};
use crate::wire::{
    self, AcquireRecord, BrokenRecord, HEADER, MEMBERS_BYTES, Tag, WaitHead, WaitRecord,
};
use std::time::Duration;

impl From<Gone> for Parted {
    fn from(how: Gone) -> Parted {
        match how {
            Gone::Silent => Parted::Silent,
            Gone::Closed => Parted::Closed,
            Gone::Released => Parted::Released,
        }
    }
}

/// What the server says of a peer that is lost.
pub(super) fn peer_lost(payload: &[u8]) -> Result<Error, String> {
    let (record, name) =
        wire::take::<BrokenRecord>(Tag::PeerLost, payload).map_err(|v| v.to_string())?;
    let how = Gone::from_code(record.how).ok_or("it told of a loss of no kind")?;
    let peer = String::from_utf8_lossy(name).into_owned();
    Ok(Error::PeerLost { peer, how: how.into(), ago: Duration::from_millis(record.ago_ms) })
}

impl Link {
    /// Waits until `need` of the targets are satisfied, or one of the peers is
    /// lost.
    pub(crate) fn wait_for(
        &self,
        need: u32,
        targets: &[WaitRecord],
        peers: &[String],
        patience: &Patience<'_>,
    ) -> Result<Waited, Failure> {
        let mut names = Vec::new();
        for peer in peers {
            // None is longer; see `WaitOptions`.
            names.push(peer.len().min(255) as u8);
            names.extend_from_slice(&peer.as_bytes()[..peer.len().min(255)]);
        }
        let head = WaitHead { need, peers: names.len() as u32 };
        let records = bytemuck::cast_slice(targets);
        self.wait(frame(Tag::Wait, &[bytemuck::bytes_of(&head), &names, records]), patience)
    }

    /// Queues for a lock or a permit. What was had, if it was in time. Where the
    /// session is lost meanwhile, the next one queues, with its seat.
    pub(crate) fn queue(
        &self,
        record: AcquireRecord,
        patience: &Patience<'_>,
    ) -> Result<Option<Grant>, Failure> {
        let frame = frame(Tag::Acquire, &[bytemuck::bytes_of(&record)]);
        match self.exchange(frame, patience)? {
            Answer::Granted(grant) => Ok(Some(grant)),
            Answer::Waited(waited) if !waited.satisfied => Ok(None),
            _ => Err(self.senseless("a grant without a word")),
        }
    }

    /// Tells the server at once what has become of waits, so that it does not
    /// give back what has arrived.
    pub(crate) fn tell_done(&self) {
        if !self.is_ours() {
            return;
        }
        let _writing = lock(&self.writing);
        let mut state = lock(&self.state);
        let Some(socket) = state.socket.clone() else {
            return;
        };
        let frames = take_done(&mut state);
        drop(state);
        if !frames.is_empty() {
            self.write(&socket, &[&frames]);
        }
    }

    /// A request of this kind; the payload of its reply.
    pub(crate) fn request(
        &self,
        tag: Tag,
        name: &'static str,
        payload: &[u8],
    ) -> Result<Vec<u8>, Failure> {
        let lists = matches!(tag, Tag::Members | Tag::Waits | Tag::Holders | Tag::Tallies);
        let reads = lists || tag == Tag::WhoBroke;
        let reply = self.call(Request {
            frame: Frame::many(frame(tag, &[payload])),
            name,
            // Each says how things are to be, whatever they were.
            repeatable: true,
            reads,
            reply_bytes: HEADER + if lists { 2 * MEMBERS_BYTES } else { 512 },
        })?;
        match reply {
            Reply::Frame(_, bytes) => Ok(bytes),
            Reply::Word(_) => Err(self.senseless("a word in reply to a question")),
        }
    }

    /// Names the session, and every one that comes in its place.
    pub(crate) fn join(&self, name: &str) -> Result<(), Failure> {
        self.check()?;
        let again = frame(Tag::Join, &[name.as_bytes()]);
        let before = lock(&self.state).name.replace(again);
        let joined = self.request(Tag::Join, "join", name.as_bytes()).map(drop);
        if joined.is_err() {
            lock(&self.state).name = before;
        }
        joined
    }

    /// Leaves a will, and leaves it again with every session that comes in this
    /// one's place.
    pub(crate) fn set_will(&self, records: &[u8], numbers: Vec<u16>) -> Result<(), Failure> {
        self.check()?;
        for &number in &numbers {
            self.keep_binding(number);
        }
        let will = (!records.is_empty()).then(|| (frame(Tag::SetWill, &[records]), numbers));
        let before = std::mem::replace(&mut lock(&self.state).will, will);
        let left = self.request(Tag::SetWill, "leave a will", records).map(drop);
        let gone = if left.is_err() {
            std::mem::replace(&mut lock(&self.state).will, before)
        } else {
            before
        };
        for number in gone.into_iter().flat_map(|(_, numbers)| numbers) {
            self.drop_binding(number);
        }
        left
    }

    /// Hands over what the session holds and ends it.
    pub(crate) fn release(&self) -> Result<(), Failure> {
        self.check()?;
        let handed_over = self.request(Tag::Release, "release", &[]).map(drop);
        {
            let mut state = lock(&self.state);
            state.name = None;
            state.will = None;
        }
        self.close();
        handed_over
    }
}
