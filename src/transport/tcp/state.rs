//! What a link knows: the requests and waits under way, and what has become of
//! each. Pure bookkeeping, under the link's lock.

use super::super::Bell;
use super::holds::Holds;
use super::later::{Ended, Pump, Then};
use super::{Failure, Waited};
use crate::auth::Welcome;
use crate::error::Error;
use crate::transport::socket::Socket;
use crate::wire::{self, AcquireRecord, HEADER, Header, OpRecord, Tag};
use crossbeam::sync::Unparker;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

/// What a request is answered by.
#[derive(Debug)]
pub(crate) enum Reply {
    /// One word.
    Word(u64),
    /// A frame of this kind with this payload.
    Frame(Tag, Vec<u8>),
}

/// Bytes of a frame with one operation.
const ONE_OP: usize = HEADER + size_of::<OpRecord>();

/// Where the seat is in the frame of a claim.
const SEAT_OF_CLAIM: std::ops::Range<usize> = {
    let at = HEADER + std::mem::offset_of!(AcquireRecord, seat);
    at..at + size_of::<u32>()
};

/// A frame to be sent, perhaps more than once.
#[derive(Clone, Debug)]
pub(super) enum Frame {
    /// One operation, as nearly every request is: no allocation.
    One([u8; ONE_OP]),
    /// Any other.
    Many(Arc<Vec<u8>>),
}

impl Frame {
    /// The frame of one operation, its id not filled in.
    pub fn one(record: &OpRecord) -> Frame {
        let mut bytes = [0; ONE_OP];
        let header = Header::new(Tag::Ops, 0, size_of::<OpRecord>());
        bytes[..HEADER].copy_from_slice(bytemuck::bytes_of(&header));
        bytes[HEADER..].copy_from_slice(bytemuck::bytes_of(record));
        Frame::One(bytes)
    }

    /// Any frame.
    pub fn many(frame: Vec<u8>) -> Frame {
        Frame::Many(Arc::new(frame))
    }

    pub(super) fn as_slice(&self) -> &[u8] {
        match self {
            Frame::One(bytes) => bytes,
            Frame::Many(bytes) => bytes,
        }
    }

    /// Fills in a request's number. Nobody has a copy yet.
    pub(super) fn stamp(&mut self, id: u64, answered: u64) {
        match self {
            Frame::One(bytes) => stamp(bytes, id, answered),
            Frame::Many(bytes) => stamp(Arc::make_mut(bytes).as_mut_slice(), id, answered),
        }
    }
}

/// A request, and what is known of it before it is sent.
#[derive(Debug)]
pub(super) struct Request {
    /// The whole frame; its id and span are filled in here.
    pub frame: Frame,
    /// What a person calls it.
    pub name: &'static str,
    /// It may be sent to a server that has forgotten whether it did it.
    pub repeatable: bool,
    /// It changes nothing.
    pub reads: bool,
    /// Bytes of its reply, at most.
    pub reply_bytes: usize,
}

#[derive(Debug)]
pub(super) enum Status {
    Pending,
    Answered(Result<Reply, Failure>),
    /// Answered and collected, or given up: nobody will ask for it.
    Finished,
}

#[derive(Debug)]
pub(super) struct Call {
    pub(super) id: u64,
    pub(super) bytes: Frame,
    pub(super) name: &'static str,
    pub(super) repeatable: bool,
    pub(super) reads: bool,
    pub(super) reply_bytes: usize,
    /// It has been written to a connection, in part at least.
    pub(super) sent: bool,
    /// It was so before the connection that there is now.
    pub(super) sent_again: bool,
    /// The server has answered, or never will: it need not be sent again.
    pub(super) over: bool,
    pub(super) status: Status,
    pub(super) sleeper: Option<Unparker>,
}

/// What a frame with an id of the waits is answered by.
#[derive(Debug)]
pub(super) enum Answer {
    Waited(Waited),
    Told(Tag, Vec<u8>),
    Granted(Grant),
}

/// What a claim has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    /// The word before.
    pub(crate) word: u64,
    /// The session that has it, which need not be the one that began to queue.
    pub(crate) session: u64,
    /// Its seat.
    pub(crate) seat: u32,
}

impl Answer {
    pub(super) fn nothing() -> Answer {
        Answer::Waited(Waited { satisfied: false, fired: Vec::new() })
    }
}

#[derive(Debug)]
pub(super) struct Wait {
    pub(super) bytes: Arc<Vec<u8>>,
    pub(super) cancelling: bool,
    /// Nobody waits for the answer any more.
    pub(super) abandoned: bool,
    pub(super) answer: Option<Result<Answer, Failure>>,
    pub(super) sleeper: Option<Unparker>,
    /// It means nothing to another session.
    pub(super) bound: bool,
    /// What to do with the answer, if no thread waits for it.
    pub(super) then: Option<Then>,
}

impl Wait {
    /// Whether its answer may have brought something that must go back when
    /// nobody takes it.
    pub(super) fn is_claim(&self) -> bool {
        self.bytes.get(4) == Some(&(Tag::Acquire as u8))
    }

    /// A claim is made by the session that has this seat from now on.
    pub(super) fn claim_with(&mut self, seat: u32) {
        if self.is_claim()
            && let Some(bytes) = Arc::make_mut(&mut self.bytes).get_mut(SEAT_OF_CLAIM)
        {
            bytes.copy_from_slice(&seat.to_le_bytes());
        }
    }
}

/// What the server is to be told of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    /// Its answer has arrived.
    Heard(u64),
    /// Nobody wants what it may have got.
    Forfeit(u64),
}

/// An array that the session has open.
#[derive(Debug)]
pub(super) struct Binding {
    /// What opens it.
    pub(super) frame: Arc<Vec<u8>>,
    /// Handles that use its number.
    pub(super) users: usize,
}

/// Why there is no connection, and since when.
#[derive(Clone, Debug)]
pub(super) struct Down {
    pub(super) since: Instant,
    pub(super) why: String,
}

#[derive(Debug)]
pub(super) struct State {
    /// The connection, unless it is down.
    pub(super) socket: Option<Arc<Socket>>,
    pub(super) down: Option<Down>,
    /// Since when no connection has brought anything that made sense.
    pub(super) trouble_since: Option<Instant>,
    /// How many connections have come back since then.
    pub(super) fruitless: u32,
    /// A thread is at work to bring it back.
    pub(super) reconnecting: bool,
    pub(super) welcome: Welcome,
    pub(super) closed: bool,
    /// The server has said that it goes away, and is not back yet.
    pub(super) going: bool,
    pub(super) next_request: u64,
    /// Every request up to this one has been answered.
    pub(super) answered: u64,
    /// Requests with consecutive ids, those finished in front removed.
    pub(super) calls: VecDeque<Call>,
    pub(super) unanswered_bytes: usize,
    pub(super) next_wait: u64,
    pub(super) waits: BTreeMap<u64, Wait>,
    /// What the server is to be told of waits.
    pub(super) done_waits: Vec<Done>,
    /// Those that it was told over this connection, as long as it is not
    /// certain that it has heard it.
    pub(super) told: Vec<Done>,
    /// How many of these were told before the last heartbeat.
    pub(super) told_before: usize,
    /// Someone reads the socket.
    pub(super) led: bool,
    /// Threads that sleep until they are woken.
    pub(super) sleeping: usize,
    pub(super) bell: Option<Arc<dyn Bell>>,
    /// Something came since the keeper looked.
    pub(super) heard: bool,
    pub(super) last_heard: Instant,
    /// The session's arrays, by their number. `None`: the number is free.
    pub(super) bindings: Vec<Option<Binding>>,
    /// What gives the session its name.
    pub(super) name: Option<Vec<u8>>,
    /// The session's will, and the arrays that it needs.
    pub(super) will: Option<(Vec<u8>, Vec<u16>)>,
    /// The locks that are held.
    pub(super) holds: Holds,
    /// Waits without a thread that have ended.
    pub(super) ended: Vec<Ended>,
    /// The thread that hears of them.
    pub(super) pump: Pump,
}

impl State {
    pub(super) fn call_at(&self, id: u64) -> Option<usize> {
        let first = self.calls.front()?.id;
        let at = usize::try_from(id.checked_sub(first)?).ok()?;
        (at < self.calls.len()).then_some(at)
    }

    pub(super) fn drop_finished(&mut self) {
        while let Some(call) = self.calls.front()
            && call.over
            && matches!(call.status, Status::Finished)
        {
            self.calls.pop_front();
        }
    }

    /// The caller has gone without an answer while the connection is down. The
    /// request is not sent again: it must not happen behind the caller's back.
    pub(super) fn give_up(&mut self, at: usize) {
        let call = &mut self.calls[at];
        call.status = Status::Finished;
        if !std::mem::replace(&mut call.over, true) {
            self.unanswered_bytes -= call.reply_bytes;
        }
        self.settle();
        self.drop_finished();
    }

    /// Finds the oldest unanswered request anew, after some were answered out
    /// of their order.
    pub(super) fn settle(&mut self) {
        let oldest = self.calls.iter().find(|c| !c.over).map_or(self.next_request, |c| c.id);
        self.answered = oldest - 1;
    }

    /// The server's answer to a request, or that it never will answer.
    pub(super) fn answer(&mut self, id: u64, answer: Result<Reply, Failure>) -> Result<(), String> {
        let Some(at) = self.call_at(id) else {
            return Err(format!("it answered request {id}, which was not asked"));
        };
        let call = &mut self.calls[at];
        if std::mem::replace(&mut call.over, true) {
            return Err(format!("it answered request {id} twice"));
        }
        self.answered = self.answered.max(id);
        self.unanswered_bytes -= call.reply_bytes;
        if matches!(call.status, Status::Pending) {
            call.status = Status::Answered(answer);
            if let Some(sleeper) = call.sleeper.take() {
                sleeper.unpark();
            }
        } else {
            self.drop_finished();
        }
        Ok(())
    }

    pub(super) fn wait_over(&mut self, id: u64, answer: Result<Answer, Failure>) {
        self.done_waits.push(Done::Heard(id));
        if self.waits.get(&id).is_some_and(|wait| wait.answer.is_some()) {
            // To a cancel that crossed the answer. The server may have forgotten
            // the wait by then, and what it says of it now counts for nothing.
            return;
        }
        let answer = answer.map(|answer| self.hold_granted(id, answer));
        // Unknown: the answer to a cancel of a wait that was answered before.
        let Some(wait) = self.waits.get_mut(&id) else {
            return;
        };
        if wait.abandoned {
            self.waits.remove(&id);
            return;
        }
        if let Some(then) = wait.then.take() {
            self.waits.remove(&id);
            self.ended.push(Ended { then, answer });
            self.pump.wake();
            return;
        }
        wait.answer = Some(answer);
        if let Some(sleeper) = wait.sleeper.take() {
            sleeper.unpark();
        }
    }

    /// The owner of a wait is about to go, unless the wait is answered by now.
    pub(super) fn answer_or_abandon(&mut self, id: u64) -> Option<Result<Answer, Failure>> {
        let answer = self.waits.get_mut(&id).and_then(|wait| wait.answer.take());
        match answer {
            Some(_) => drop(self.waits.remove(&id)),
            None => self.abandon(id),
        }
        answer
    }

    /// The owner of a wait has gone. The server has to be told, now or with
    /// the next connection.
    pub(super) fn abandon(&mut self, id: u64) {
        if self.waits.get(&id).is_some_and(Wait::is_claim) {
            // Whatever it gets goes back. Nothing can be made of its answer.
            self.waits.remove(&id);
            self.done_waits.push(Done::Forfeit(id));
        } else if let Some(wait) = self.waits.get_mut(&id) {
            wait.abandoned = true;
            wait.cancelling = true;
            wait.sleeper = None;
        }
    }

    /// The server has forgotten this session, or all but what is `kept` over its
    /// lives. What it may have done before cannot be known any more, and is not
    /// done again.
    pub(super) fn forget_unrepeatable(&mut self, addr: &str, kept: bool) {
        let lost: Vec<(u64, &'static str)> = self
            .calls
            .iter()
            .filter(|c| !c.over && c.sent && !c.repeatable)
            .map(|c| (c.id, c.name))
            .collect();
        for (id, op) in lost {
            let why = "the server was restarted, or our lease was over, before its answer came";
            let error = Error::OutcomeUnknown { addr: addr.to_owned(), op, why: why.to_owned() };
            // It is in the list, so it is known.
            let _ = self.answer(id, Err(error.into()));
        }
        self.settle();
        // No wait that is being given up is known to the new session.
        self.waits.retain(|_, wait| !wait.abandoned);
        if kept {
            return;
        }
        self.holds.clear();
        // What the server has rung for the session before means nothing now.
        self.bell = None;
        let lost = || Failure::from(Error::LeaseLost { what: format!("{addr}: a wait") });
        for wait in self.waits.values_mut().filter(|wait| wait.bound && wait.answer.is_none()) {
            if let Some(then) = wait.then.take() {
                self.ended.push(Ended { then, answer: Err(lost()) });
                self.pump.wake();
                continue;
            }
            wait.answer = Some(Err(lost()));
            if let Some(sleeper) = wait.sleeper.take() {
                sleeper.unpark();
            }
        }
        self.waits.retain(|_, wait| !wait.bound || wait.answer.is_some());
    }

    /// The server stops, and has carried out nothing that came over this
    /// connection and that it has not answered.
    pub(super) fn going_away(&mut self, addr: &str) {
        let error = || Error::ServerGoingAway { addr: addr.to_owned() };
        self.going = true;
        let pending: Vec<(u64, Error)> = self
            .calls
            .iter()
            .filter(|call| !call.over)
            .map(|call| {
                // It may have been carried out when it came the first time.
                let unknown = call.sent_again && !call.reads;
                let why = "the server was asked to stop before it could answer again";
                let error = match unknown {
                    true => Error::OutcomeUnknown {
                        addr: addr.to_owned(),
                        op: call.name,
                        why: why.to_owned(),
                    },
                    false => error(),
                };
                (call.id, error)
            })
            .collect();
        for (id, error) in pending {
            // It is in the list, so it is known.
            let _ = self.answer(id, Err(error.into()));
        }
        self.settle();
        self.told.clear();
        let waits: Vec<u64> =
            self.waits.iter().filter(|(_, w)| w.answer.is_none()).map(|(&id, _)| id).collect();
        for id in waits {
            self.wait_over(id, Err(error().into()));
        }
        self.done_waits.clear();
    }

    /// A heartbeat was answered: the server has heard all that it was told
    /// before it.
    pub(super) fn heartbeat(&mut self) {
        let heard = std::mem::take(&mut self.told_before).min(self.told.len());
        self.told.drain(..heard);
    }

    /// Wakes one thread to take the lead, if nobody has it.
    pub(super) fn wake_one(&mut self) {
        if self.led || self.sleeping == 0 {
            return;
        }
        let call = self.calls.iter().find_map(|c| c.sleeper.as_ref());
        let sleeper = call
            .or_else(|| self.waits.values().find_map(|w| w.sleeper.as_ref()))
            .or(self.pump.sleeper.as_ref());
        if let Some(sleeper) = sleeper {
            sleeper.unpark();
        }
    }

    /// Wakes every thread that sleeps, to look at what has changed.
    pub(super) fn wake_all(&mut self) {
        let calls = self.calls.iter().filter_map(|c| c.sleeper.as_ref());
        let waits = self.waits.values().filter_map(|w| w.sleeper.as_ref());
        for sleeper in calls.chain(waits).chain(&self.pump.sleeper) {
            sleeper.unpark();
        }
    }
}

/// Fills in a request's number, and how far it is ahead of the oldest one
/// that is unanswered.
pub(super) fn stamp(frame: &mut [u8], id: u64, answered: u64) {
    let span = u16::try_from(id - answered - 1).unwrap_or(u16::MAX);
    frame[6..8].copy_from_slice(&span.to_le_bytes());
    frame[8..16].copy_from_slice(&id.to_le_bytes());
}

/// The frames that tell the server which answers of waits have arrived.
pub(super) fn take_done(state: &mut State) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &done in &state.done_waits {
        let (tag, id) = match done {
            Done::Heard(id) => (Tag::WaitDone, id),
            Done::Forfeit(id) => (Tag::Forfeit, id),
        };
        wire::push(&mut bytes, tag, id, &[]);
    }
    state.told.append(&mut state.done_waits);
    bytes
}
