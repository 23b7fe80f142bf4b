//! Waits without a thread: their answers are given to a function.
//!
//! For programs that wait for hundreds of things on one thread. As long as
//! there are such waits, a thread of the link's own reads the socket when
//! nobody else does, and calls what the waits left to be called.

use super::link::Link;
use super::reading::Begun;
use super::state::{Answer, Grant, State, Wait, take_done};
use super::{Failure, Waited, frame};
use crate::engine::lock;
use crate::error::{Error, seconds};
use crate::wire::{AcquireRecord, Refusal, Tag};
use crossbeam::sync::{Parker, Unparker};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the thread stays when there is nothing left to wait for.
const LINGER: Duration = Duration::from_secs(2);

/// What is called with the answer of a wait.
pub(crate) enum Then {
    /// Of cells.
    Woken(Box<dyn FnOnce(Result<Waited, Failure>) + Send>),
    /// Of a claim.
    Granted(Box<dyn FnOnce(Result<Grant, Failure>) + Send>),
}

impl std::fmt::Debug for Then {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Then")
    }
}

/// A wait that has ended, and nobody has been told.
#[derive(Debug)]
pub(super) struct Ended {
    pub then: Then,
    pub answer: Result<Answer, Failure>,
}

/// The thread that calls.
#[derive(Debug, Default)]
pub(super) struct Pump {
    /// There is one.
    runs: bool,
    /// Where it sleeps while another thread reads.
    pub sleeper: Option<Unparker>,
    /// Where it sleeps while there is nothing to wait for.
    idle: Option<Unparker>,
}

impl Pump {
    /// There is something for it.
    pub fn wake(&mut self) {
        for sleeper in [self.sleeper.take(), self.idle.take()].into_iter().flatten() {
            sleeper.unpark();
        }
    }
}

/// A wait under way whose end will be told to a function. Dropping this does
/// not end it.
#[derive(Clone, Debug)]
pub struct Pending {
    link: Weak<Link>,
    id: u64,
}

impl Pending {
    /// What has ended already.
    pub(crate) fn over() -> Pending {
        Pending { link: Weak::new(), id: 0 }
    }

    /// Gives the wait up. Its function is called all the same, with
    /// [`Error::Cancelled`] unless the wait was satisfied just before. Does not
    /// wait for that.
    pub fn cancel(&self) {
        if let Some(link) = self.link.upgrade()
            && link.is_ours()
        {
            link.cancel_later(self.id);
        }
    }
}

impl State {
    /// Ends every wait without a thread like this.
    pub(super) fn end_later(&mut self, error: impl Fn() -> Error) {
        let later = self.waits.iter_mut().filter_map(|(&id, wait)| Some((id, wait.then.take()?)));
        for (id, then) in later.collect::<Vec<_>>() {
            // What a claim may have got by now goes back.
            self.abandon(id);
            self.ended.push(Ended { then, answer: Err(error().into()) });
        }
        if !self.ended.is_empty() {
            self.pump.wake();
        }
    }

    fn has_later(&self) -> bool {
        !self.ended.is_empty() || self.waits.values().any(|wait| wait.then.is_some())
    }
}

impl Link {
    /// Sends a wait, and has `then` called with what becomes of it, on a
    /// thread of the link's. `then` must not block for long. `bound`: the session
    /// to which alone it means something: it fails when that is lost.
    pub(crate) fn wait_then(
        &self,
        mut frame: Vec<u8>,
        bound: Option<u64>,
        then: Then,
    ) -> Result<Pending, Failure> {
        self.check()?;
        let _writing = lock(&self.writing);
        let mut state = lock(&self.state);
        if state.closed {
            return Err(Error::Closed.into());
        }
        if bound.is_some_and(|session| session != state.welcome.session) {
            return Err(Failure::Refused(Refusal::StaleSeat, 0));
        }
        if !state.pump.runs {
            let me = self.me.clone();
            std::thread::Builder::new()
                .name("farcell-waits".to_owned())
                .spawn(move || {
                    if let Some(link) = me.upgrade() {
                        link.pump();
                    }
                })
                .map_err(|e| Error::os("starting the thread that waits", e))?;
            state.pump.runs = true;
        }
        let id = state.next_wait;
        state.next_wait += 1;
        frame[8..16].copy_from_slice(&id.to_le_bytes());
        let mut wait = Wait {
            bytes: Arc::new(frame),
            cancelling: false,
            abandoned: false,
            answer: None,
            sleeper: None,
            bound: bound.is_some(),
            then: Some(then),
        };
        // The session of now: with the next one it is claimed anew.
        wait.claim_with(state.welcome.seat);
        let bytes = wait.bytes.clone();
        state.waits.insert(id, wait);
        // Only one that has nothing to do needs to hear of more.
        if let Some(idle) = state.pump.idle.take() {
            idle.unpark();
        }
        if let Some(socket) = state.socket.clone() {
            let done = take_done(&mut state);
            drop(state);
            self.write(&socket, &[&done, &bytes]);
        }
        Ok(Pending { link: self.me.clone(), id })
    }

    /// Queues for a lock or a permit, as [`queue`](Link::queue), and has `then`
    /// called with what was had. The record's seat is filled in.
    pub(crate) fn queue_then(&self, record: AcquireRecord, then: Then) -> Result<Pending, Failure> {
        self.wait_then(frame(Tag::Acquire, &[bytemuck::bytes_of(&record)]), None, then)
    }

    fn cancel_later(&self, id: u64) {
        if self.cancel_wait(id) {
            return;
        }
        let mut state = lock(&self.state);
        if state.socket.is_some() {
            // The server has been asked before, and will answer.
            return;
        }
        // The server is told when it is back.
        if let Some(then) = state.waits.get_mut(&id).and_then(|wait| wait.then.take()) {
            state.abandon(id);
            state.ended.push(Ended { then, answer: Ok(Answer::nothing()) });
            state.pump.wake();
        }
    }

    /// Reads and calls, until there has been nothing to wait for for a while.
    fn pump(&self) {
        let parker = Parker::new();
        loop {
            let ended = self.pump_until(
                &mut Begun::default(),
                None,
                |link, state, _| {
                    let reconnect_for = link.settings.reconnect_for;
                    if let Some(down) = &state.down
                        && down.since.elapsed() >= reconnect_for
                    {
                        let why =
                            format!("no connection for {}: {}", seconds(reconnect_for), down.why);
                        let addr = link.addr();
                        state.end_later(|| Error::Unreachable {
                            addr: addr.clone(),
                            why: why.clone(),
                        });
                    }
                    if state.closed {
                        state.end_later(|| Error::Closed);
                    }
                    if !state.ended.is_empty() || !state.has_later() {
                        return Some(std::mem::take(&mut state.ended));
                    }
                    None
                },
                |state, sleeper| state.pump.sleeper = sleeper,
            );
            for Ended { then, answer } in ended {
                let senseless = || self.senseless("another answer than that of a wait");
                let answer = match answer {
                    Ok(Answer::Waited(Waited { satisfied: false, .. })) => {
                        Err(Error::Cancelled.into())
                    }
                    answer => answer,
                };
                match then {
                    Then::Woken(then) => then(match answer {
                        Ok(Answer::Waited(waited)) => Ok(waited),
                        Ok(_) => Err(senseless()),
                        Err(failure) => Err(failure),
                    }),
                    Then::Granted(then) => then(match answer {
                        Ok(Answer::Granted(grant)) => Ok(grant),
                        Ok(_) => Err(senseless()),
                        Err(failure) => Err(failure),
                    }),
                }
            }
            let begun = Instant::now();
            loop {
                {
                    let mut state = lock(&self.state);
                    state.pump.idle = None;
                    if state.has_later() {
                        break;
                    }
                    if state.closed || begun.elapsed() >= LINGER {
                        state.pump.runs = false;
                        return;
                    }
                    state.pump.idle = Some(parker.unparker().clone());
                }
                parker.park_deadline(begun + LINGER);
            }
        }
    }
}
