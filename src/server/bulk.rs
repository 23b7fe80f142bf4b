//! Connections for messages: the bytes go between the socket and the memory of
//! the slots, and nowhere else.

use super::connection::Phase;
use super::loopback::{ServerActor, take_unclear};
use super::meter::bump;
use super::pipe::Pipe;
use super::worker::Worker;
use crate::auth::{Proven, ServerHandshake, Welcome};
use crate::engine::{Begun, Brought, Engine, Out, SharedSession, SlotRow, Writing, lock};
use crate::wire::slots::{self, ANSWER, BEGIN, COMMIT, REMOTE, SlotRequest, SlotTag};
use crate::wire::{Refusal, Tag, Violation};
use std::io;

/// Bytes that go through one connection before the others have their turn.
const TURN: usize = 512 << 10;
/// Bytes that one call of the system moves.
const PIECE: u64 = 512 << 10;

/// What such a connection is at.
#[derive(Debug)]
pub struct Bulk {
    session: SharedSession,
    /// The session's number, for the log.
    pub id: u64,
    head: [u8; slots::REQUEST],
    filled: usize,
    /// The write whose bytes come, and where the next of them belongs.
    coming: Option<(SlotRequest, u64)>,
    left: u64,
    /// The socket has just had less than there was room for.
    dry: bool,
    writing: Option<Writing>,
    /// Which bytes of the row this write brings.
    brought: Brought,
    /// They may come by RDMA.
    remote: bool,
    /// Why the write that is under way is not done, to be told at its end.
    refused: Option<Refusal>,
    /// The write was done before: the word that it made.
    before: Option<u64>,
    /// Answers that wait to be sent, and how much of them is.
    outbox: Vec<u8>,
    sent: usize,
    /// The bytes that go behind them: where, from where on, how many, and the
    /// version word before them.
    going: Option<(SlotRow, u64, u64, u64)>,
    /// Since the last look of the one who counts.
    moved: Moved,
}

/// What has gone through a connection.
#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    bytes_in: u64,
    bytes_out: u64,
    written: u64,
    read: u64,
}

/// Why a connection does not go on by itself.
enum Stop {
    /// The socket has nothing, or takes nothing.
    Blocked,
    /// A signal came in between.
    Again,
    /// It is over.
    Over(&'static str),
    /// The client broke the protocol.
    Violation(Violation),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        match error.kind() {
            io::ErrorKind::WouldBlock => Stop::Blocked,
            io::ErrorKind::Interrupted => Stop::Again,
            _ => Stop::Over("reset the connection"),
        }
    }
}

impl Bulk {
    fn new(session: SharedSession, id: u64) -> Bulk {
        Bulk {
            session,
            id,
            head: [0; slots::REQUEST],
            filled: 0,
            coming: None,
            left: 0,
            dry: false,
            writing: None,
            brought: Brought::default(),
            remote: false,
            refused: None,
            before: None,
            outbox: Vec::new(),
            sent: 0,
            going: None,
            moved: Moved::default(),
        }
    }

    /// Moves bytes until the socket or the turn ends it, and says which.
    fn work(
        &mut self,
        engine: &Engine<ServerActor>,
        pipe: &mut Pipe<'_>,
        scratch: &mut [u8],
        out: &mut Out,
    ) -> Result<(), Stop> {
        let mut turn = TURN;
        while turn > 0 {
            let moved = if self.sent < self.outbox.len() {
                self.send(pipe)?
            } else if self.going.is_some() {
                self.send_row(engine, pipe, scratch)?
            } else if self.coming.is_some() {
                self.receive(pipe, scratch)?
            } else {
                self.receive_head(engine, pipe, out)?
            };
            turn = turn.saturating_sub(moved);
            if let Some((request, _)) = self.coming
                && self.left == 0
            {
                self.coming = None;
                self.end_of_write(engine, &request, out)?;
            } else if std::mem::take(&mut self.dry) {
                // It had less than asked for: more comes with another event.
                return Err(Stop::Blocked);
            }
        }
        Ok(())
    }

    fn send(&mut self, pipe: &mut Pipe<'_>) -> Result<usize, Stop> {
        // The bytes follow at once, in the same packet if they are few.
        let n = pipe.send(&self.outbox[self.sent..], self.going.is_some())?;
        self.sent += n;
        self.moved.bytes_out += n as u64;
        if self.sent == self.outbox.len() {
            self.outbox.clear();
            self.sent = 0;
        }
        Ok(n)
    }

    fn send_row(
        &mut self,
        engine: &Engine<ServerActor>,
        pipe: &mut Pipe<'_>,
        scratch: &mut [u8],
    ) -> Result<usize, Stop> {
        let Some((row, at, left, before)) = &mut self.going else {
            return Ok(0);
        };
        // Behind the last of them comes the version word.
        let piece = (row.row, *at, (*left).min(PIECE) as usize);
        let n = pipe.send_row(&row.payload, piece, *left <= PIECE, scratch)?;
        *at += n as u64;
        *left -= n as u64;
        self.moved.bytes_out += n as u64;
        if *left == 0 {
            let word = engine.slot_check(row, *before);
            self.outbox.extend_from_slice(&word.to_le_bytes());
            self.going = None;
        }
        Ok(n)
    }

    fn receive(&mut self, pipe: &mut Pipe<'_>, scratch: &mut [u8]) -> Result<usize, Stop> {
        let Some((_, at)) = &mut self.coming else {
            return Ok(0);
        };
        let mut most = (self.left.min(PIECE) as usize).min(pipe.most(scratch));
        let mut received = None;
        if let (Some(writing), None) = (&self.writing, &self.refused) {
            let row = &writing.row;
            let claim = (&*row.payload, writing.serial);
            received = pipe.receive_row(claim, (row.row, *at, most), scratch)?;
        }
        let n = match received {
            Some(n) => n,
            // They are not wanted, but what comes behind them is.
            None => {
                most = most.min(scratch.len());
                pipe.recv(&mut scratch[..most])?
            }
        };
        if n == 0 {
            return Err(Stop::Over("closed the connection in the middle of a message"));
        }
        // Of bytes that are thrown away it means nothing.
        *at = at.wrapping_add(n as u64);
        self.left -= n as u64;
        self.moved.bytes_in += n as u64;
        self.dry = self.left > 0 && n < most;
        Ok(n)
    }

    fn receive_head(
        &mut self,
        engine: &Engine<ServerActor>,
        pipe: &mut Pipe<'_>,
        out: &mut Out,
    ) -> Result<usize, Stop> {
        let n = match pipe.recv(&mut self.head[self.filled..])? {
            0 => return Err(Stop::Over("closed the connection")),
            n => n,
        };
        self.filled += n;
        self.moved.bytes_in += n as u64;
        if self.filled == self.head.len() {
            self.filled = 0;
            let (tag, request) = slots::request(&self.head).map_err(Stop::Violation)?;
            self.begin(engine, tag, request, out)?;
        }
        Ok(n)
    }

    /// A request is there, but for the bytes that come behind it.
    fn begin(
        &mut self,
        engine: &Engine<ServerActor>,
        tag: SlotTag,
        request: SlotRequest,
        out: &mut Out,
    ) -> Result<(), Stop> {
        let shared = self.session.clone();
        let mut session = lock(&shared);
        if session.ended {
            return Err(Stop::Over("has a session that is over"));
        }
        match tag {
            SlotTag::Read => match engine.slot_read(&session, &request) {
                Ok((row, reply)) => {
                    self.moved.read += 1;
                    slots::push(&mut self.outbox, slots::DATA, &reply);
                    if reply.bytes > 0 {
                        self.going = Some((row, request.offset, reply.bytes, reply.word));
                    }
                }
                Err(refusal) => self.refuse(&refusal),
            },
            SlotTag::Abort => {
                if let Some(writing) = self.writing.take() {
                    engine.slot_abandon(&writing, out);
                }
                self.refused = None;
                self.before = None;
                slots::push(&mut self.outbox, slots::WRITTEN, &slots::SlotReply::default());
            }
            SlotTag::Write => {
                if request.flags & BEGIN != 0 {
                    // One that was not brought to its end, unless it is this one.
                    let before = self.writing.take();
                    let (again, other) = match before {
                        Some(writing) if writing.write == request.write => (Some(writing), None),
                        other => (None, other),
                    };
                    if let Some(writing) = other {
                        engine.slot_abandon(&writing, out);
                    }
                    (self.refused, self.before) = (None, None);
                    self.brought = Brought::default();
                    self.remote = request.flags & REMOTE != 0;
                    let begun =
                        engine.slot_begin(&mut session, &request, out).map_err(Stop::Violation)?;
                    match begun {
                        Ok(Begun::Claimed(writing)) => self.writing = Some(writing),
                        Ok(Begun::Before(word)) => self.before = Some(word),
                        Err(refusal) => self.refused = Some(refusal),
                    }
                    // Nothing happens if its claim was taken over.
                    if let Some(writing) = again {
                        engine.slot_abandon(&writing, out);
                    }
                }
                let most = match &self.writing {
                    Some(writing) => writing.row.payload.bytes(),
                    None if self.refused.is_some() || self.before.is_some() => u64::MAX,
                    None => return Err(Stop::Violation(Violation::Field("flags"))),
                };
                // Those bytes are there already.
                let arrived = request.flags & (BEGIN | REMOTE) == REMOTE;
                if arrived && !self.remote {
                    return Err(Stop::Violation(Violation::Field("flags")));
                }
                let end = request.offset.checked_add(request.bytes);
                match end.filter(|&end| end <= most) {
                    Some(end) => self.brought.add(request.offset, end),
                    None => {
                        self.refused = Some(Refusal::Slot(slots::SlotRefusal::TooLong(most)));
                    }
                }
                self.coming = Some((request, request.offset));
                self.left = if arrived { 0 } else { request.bytes };
            }
        }
        if take_unclear() {
            engine.forget(&mut session, out);
            return Err(Stop::Over("has asked for what cannot be known"));
        }
        Ok(())
    }

    /// All bytes of a write are there.
    fn end_of_write(
        &mut self,
        engine: &Engine<ServerActor>,
        request: &SlotRequest,
        out: &mut Out,
    ) -> Result<(), Stop> {
        let commits = request.flags & COMMIT != 0;
        if !commits && request.flags & ANSWER == 0 {
            return Ok(());
        }
        let shared = self.session.clone();
        let mut session = lock(&shared);
        if session.ended {
            return Err(Stop::Over("has a session that is over"));
        }
        let mut reply = slots::SlotReply::default();
        if let Some(word) = self.before {
            reply.word = word;
        } else if let Some(refusal) = self.refused.clone() {
            self.refuse(&refusal);
            // The rest of it finds nothing that is under way, unless it is
            // asked to be told again.
            if commits {
                self.refused = None;
            }
            if let Some(writing) = self.writing.take() {
                engine.slot_abandon(&writing, out);
            }
            return Ok(());
        } else if let Some(writing) = self.writing.take_if(|_| commits) {
            let (total, brought) = (request.total, &self.brought);
            match engine.slot_commit(&mut session, &writing, total, brought, out) {
                Ok(done) => {
                    reply = done;
                    self.moved.written += 1;
                }
                Err(refusal) => {
                    engine.slot_abandon(&writing, out);
                    self.refuse(&refusal);
                    return Ok(());
                }
            }
        }
        slots::push(&mut self.outbox, slots::WRITTEN, &reply);
        if commits {
            self.before = None;
        }
        if take_unclear() {
            engine.forget(&mut session, out);
            return Err(Stop::Over("has asked for what cannot be known"));
        }
        Ok(())
    }

    fn refuse(&mut self, refusal: &Refusal) {
        slots::push(&mut self.outbox, Tag::Refused as u8, &refusal.record(0));
    }

    /// The connection is gone: what it was writing is given up.
    pub(super) fn end(&mut self, engine: &Engine<ServerActor>, out: &mut Out) {
        lock(&self.session).give_beside();
        if let Some(writing) = self.writing.take() {
            engine.slot_lost(&writing, out);
        }
    }
}

impl Worker {
    /// One more connection of a session.
    pub(super) fn admit_beside(
        &mut self,
        key: usize,
        handshake: &ServerHandshake,
        proven: &Proven,
        mut welcome: Welcome,
    ) {
        let resume = proven.resume;
        let session = (resume.incarnation == self.shared.incarnation)
            .then(|| self.shared.engine.beside(resume.session, proven.access))
            .flatten();
        welcome.resumed = session.is_some();
        welcome.session = if session.is_some() { resume.session } else { 0 };
        let bytes = handshake.welcome(proven, &welcome, &self.shared.keys);
        self.clients[key].queue(&bytes);
        match session {
            Some(session) => {
                self.clients[key].phase =
                    Phase::Beside(Box::new(Bulk::new(session, resume.session)));
                self.flush(key);
                // Not at once: the buffer is in use, by whoever read the hello, and
                // a client that is quick has sent its first request by now.
                if let Some(client) = self.clients.get(key) {
                    self.again.push((key, client.serial));
                }
            }
            None => self.finish(key),
        }
    }

    /// Goes on with a connection for messages. `false`: it is none.
    pub(super) fn serve_beside(&mut self, key: usize) -> bool {
        let Some(client) = self.clients.get_mut(key) else {
            return false;
        };
        if !matches!(client.phase, Phase::Beside(_)) {
            return false;
        }
        if client.flush().is_err() {
            self.close(key, "cannot be sent to");
            return true;
        }
        let serial = client.serial;
        let waiting = client.waiting() > 0;
        let (Phase::Beside(bulk), mut pipe) = client.parts() else {
            return false;
        };
        if waiting {
            return true;
        }
        let id = bulk.id;
        take_unclear();
        let engine = &self.shared.engine;
        let result = bulk.work(engine, &mut pipe, &mut self.scratch, &mut self.out);
        let (moved, meter) = (std::mem::take(&mut bulk.moved), &self.shared.meters[self.index]);
        bump(&meter.message_bytes_in, moved.bytes_in);
        bump(&meter.message_bytes_out, moved.bytes_out);
        bump(&meter.messages_in, moved.written);
        bump(&meter.messages_out, moved.read);
        match result {
            // Its turn is over, and the others have theirs.
            Ok(()) | Err(Stop::Again) => {
                if !self.again.contains(&(key, serial)) {
                    self.again.push((key, serial));
                }
            }
            Err(Stop::Blocked) => {}
            Err(Stop::Over(why)) => self.close(key, why),
            Err(Stop::Violation(violation)) => {
                if self.may_complain() {
                    tracing::warn!(session = id, "dropped a client that sent {violation}");
                }
                self.close(key, "broke the protocol");
            }
        }
        self.post_out();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Access;
    use crate::catalog::{Form, Kind};
    use crate::engine::Newcomer;
    use crate::layout::Shape;
    use crate::segment::Segment;
    use crate::wire::Header;
    use proptest::prelude::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::time::Duration;

    fn place() -> (Engine<ServerActor>, Bulk) {
        let segment = Arc::new(Segment::anonymous(64).unwrap());
        let actor = ServerActor::alone(segment);
        let engine = Engine::new(actor, 64, Duration::from_secs(1));
        let form = Form { kind: Kind::Slots, shape: Shape { rows: 2, cols: 1 }, param: 300 };
        let (entry, _) = engine.open("params", form).unwrap();
        let access = Access::ReadWrite;
        let newcomer = Newcomer { access, resume: None, next_request: 1, fresh: 1, route: 1 };
        let attached = engine.attach(&newcomer, Duration::ZERO, &mut Out::default());
        lock(&attached.session).bind(0, Some(entry)).unwrap();
        (engine, Bulk::new(attached.session, 1))
    }

    /// What becomes of a connection by which these bytes come, as they come;
    /// and how much was sent back.
    fn talk(parts: &[Vec<u8>]) -> (Option<Stop>, Vec<u8>) {
        let (engine, mut bulk) = place();
        let (mut client, server) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let (mut scratch, mut out) = (vec![0; 4096], Out::default());
        let (mut answers, mut stop) = (Vec::new(), None);
        for part in parts {
            if client.write_all(part).is_err() {
                break;
            }
            while stop.is_none() {
                match bulk.work(&engine, &mut Pipe::Plain(server.as_fd()), &mut scratch, &mut out) {
                    Ok(()) | Err(Stop::Again) => {}
                    Err(Stop::Blocked) => break,
                    Err(other) => stop = Some(other),
                }
                let _ = client.read_to_end(&mut answers);
            }
            let _ = client.read_to_end(&mut answers);
        }
        bulk.end(&engine, &mut out);
        engine.end_writes(1, &mut out);
        (stop, answers)
    }

    fn head(tag: u8, request: SlotRequest) -> Vec<u8> {
        let mut bytes = Vec::new();
        slots::push(&mut bytes, tag, &request);
        bytes
    }

    fn tags(mut answers: &[u8]) -> Vec<u8> {
        let mut tags = Vec::new();
        while answers.len() >= slots::REPLY {
            let header: Header = bytemuck::pod_read_unaligned(&answers[..crate::wire::HEADER]);
            let reply: slots::SlotReply =
                bytemuck::pod_read_unaligned(&answers[crate::wire::HEADER..slots::REPLY]);
            let bytes = if header.tag == slots::DATA { reply.bytes as usize } else { 0 };
            let more = if bytes > 0 { bytes + 8 } else { 0 };
            tags.push(header.tag);
            answers = &answers[slots::REPLY + more..];
        }
        assert!(answers.is_empty());
        tags
    }

    #[test]
    fn parts_without_a_beginning_end_the_connection() {
        for flags in [0, COMMIT, ANSWER, REMOTE] {
            let (stop, answers) = talk(&[head(40, SlotRequest { flags, ..Default::default() })]);
            assert!(matches!(stop, Some(Stop::Violation(Violation::Field("flags")))));
            assert!(answers.is_empty());
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_and_what_follows_is_understood() {
        let huge = |offset, bytes: u64, total| SlotRequest {
            flags: BEGIN | COMMIT,
            write: 1,
            offset,
            bytes,
            total,
            ..Default::default()
        };
        let follows = SlotRequest { bytes: 1000, ..Default::default() };
        for request in [huge(0, 301, 301), huge(300, 1, 301), huge(u64::MAX, 2, 2)] {
            let bytes = vec![1; request.bytes as usize];
            let (stop, answers) = talk(&[head(40, request), bytes, head(42, follows)]);
            assert!(stop.is_none());
            assert_eq!(tags(&answers), [Tag::Refused as u8, slots::DATA]);
        }
        let (stop, answers) = talk(&[head(40, huge(0, 0, 301)), head(42, follows)]);
        assert!(stop.is_none());
        assert_eq!(tags(&answers), [Tag::Refused as u8, slots::DATA]);
        // More than anyone can send: it just goes on.
        let (stop, answers) = talk(&[head(40, huge(0, u64::MAX, 1)), vec![1; 10_000]]);
        assert!(stop.is_none() && answers.is_empty());
    }

    #[test]
    fn bytes_come_by_rdma_only_in_a_write_that_was_begun_so() {
        let begin = |flags| SlotRequest { flags: BEGIN | flags, write: 1, ..Default::default() };
        let came = SlotRequest { flags: REMOTE, bytes: 200, ..Default::default() };
        let commit = SlotRequest { flags: COMMIT, total: slots::KEEP, ..Default::default() };
        let (stop, _) = talk(&[head(40, begin(0)), head(40, came)]);
        assert!(matches!(stop, Some(Stop::Violation(Violation::Field("flags")))));
        // No byte follows it: what does is understood.
        let (stop, answers) = talk(&[head(40, begin(REMOTE)), head(40, came), head(40, commit)]);
        assert!(stop.is_none());
        assert_eq!(tags(&answers), [slots::WRITTEN]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_or_end_the_connection(
            parts in prop::collection::vec(prop_oneof![
                (38u8..45, 0u16..20, 0u32..4, 0u64..3, prop::collection::vec(0u64..400, 3)).prop_map(
                    |(tag, flags, row, write, n)| {
                        let request = SlotRequest {
                            flags, row, write, offset: n[0], bytes: n[1], total: n[2],
                            ..Default::default()
                        };
                        head(tag, request)
                    }
                ),
                prop::collection::vec(any::<u8>(), 0..400),
            ], 0..12),
        ) {
            let sent: usize = parts.iter().map(Vec::len).sum();
            let (_, answers) = talk(&parts);
            // A head is answered by a row at most.
            prop_assert!(answers.len() <= sent / slots::REQUEST * (slots::REPLY + 308));
        }
    }
}
