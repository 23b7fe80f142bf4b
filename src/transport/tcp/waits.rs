//! Waits: sent, answered whenever they are, given up in time.

use super::super::Bell;
use super::link::Link;
use super::reading::Begun;
use super::state::{Answer, Wait, take_done};
use super::{Canceller, Failure, Waited};
use crate::engine::lock;
use crate::error::{Error, seconds};
use crate::wire::{self, Refusal, Tag};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A timed-out wait gives the server this long to say how the wait stood; then
/// the caller goes on without.
const CANCEL_GRACE: Duration = Duration::from_millis(500);

/// How long a wait may take, and what else ends it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Patience<'p> {
    /// `None`: for ever.
    pub timeout: Option<Duration>,
    /// What cancels it.
    pub cancel: Option<&'p Canceller>,
    /// The session to which alone it means something: it fails when that is lost.
    pub bound: Option<u64>,
}

impl Link {
    /// Sends a wait and waits for its answer. The header's id is filled in.
    pub(super) fn wait(&self, frame: Vec<u8>, patience: &Patience<'_>) -> Result<Waited, Failure> {
        match self.exchange(frame, patience)? {
            Answer::Waited(waited) => Ok(waited),
            Answer::Told(..) | Answer::Granted(_) => {
                Err(self.senseless("another answer than that of a wait"))
            }
        }
    }

    /// Sends a frame whose answer comes when it comes. `None`: not in time.
    pub(crate) fn ask_later(
        &self,
        tag: Tag,
        payload: &[u8],
        timeout: Duration,
    ) -> Result<Option<(Tag, Vec<u8>)>, Failure> {
        let mut frame = Vec::new();
        wire::push(&mut frame, tag, 0, &[payload]);
        match self.exchange(frame, &Patience { timeout: Some(timeout), ..Patience::default() })? {
            Answer::Told(tag, bytes) => Ok(Some((tag, bytes))),
            Answer::Waited(_) | Answer::Granted(_) => Ok(None),
        }
    }

    /// A second way by which the server's frames come, or none.
    pub(crate) fn set_bell(&self, bell: Option<Arc<dyn Bell>>) {
        lock(&self.state).bell = bell;
    }

    /// This end of the connection.
    pub(crate) fn local_ip(&self) -> Option<IpAddr> {
        let socket = lock(&self.state).socket.clone()?;
        Some(socket.local_addr().ok()?.ip().to_canonical())
    }

    pub(super) fn exchange(
        &self,
        mut frame: Vec<u8>,
        patience: &Patience<'_>,
    ) -> Result<Answer, Failure> {
        self.check()?;
        let Patience { timeout, cancel, bound } = *patience;
        let begun = Instant::now();
        // A wait of no time is a question: it is answered at once, or fails as
        // any other operation does.
        let at_once = timeout.is_some_and(|t| t.is_zero());
        let mut deadline = timeout.filter(|_| !at_once).and_then(|t| begun.checked_add(t));
        let mut patience = Begun::at(begun);
        let id = {
            let _writing = lock(&self.writing);
            let mut state = lock(&self.state);
            if state.closed {
                return Err(Error::Closed.into());
            }
            if bound.is_some_and(|session| session != state.welcome.session) {
                return Err(Failure::Refused(Refusal::StaleSeat, 0));
            }
            let id = state.next_wait;
            state.next_wait += 1;
            frame[8..16].copy_from_slice(&id.to_le_bytes());
            let bytes = Arc::new(frame);
            state.waits.insert(
                id,
                Wait {
                    bytes: bytes.clone(),
                    cancelling: at_once,
                    abandoned: false,
                    answer: None,
                    sleeper: None,
                    bound: bound.is_some(),
                    then: None,
                },
            );
            if let Some(socket) = state.socket.clone() {
                let done = take_done(&mut state);
                drop(state);
                let mut last = Vec::new();
                if at_once {
                    wire::push(&mut last, Tag::Cancel, id, &[]);
                }
                self.write(&socket, &[&done, &bytes, &last]);
            }
            id
        };
        // From here on a cancel from another thread finds the wait.
        let _entry = cancel.map(|c| c.enter(self.me.clone(), id));
        if cancel.is_some_and(Canceller::is_cancelled) {
            self.cancel_wait(id);
        }
        let mut look = cancel.and_then(Canceller::look).map(|look| (look, begun + look.every));
        loop {
            let next_look = look.as_ref().map(|(_, at)| *at);
            let until = [deadline, next_look].into_iter().flatten().min();
            let ended = self.pump_until(
                &mut patience,
                until,
                |link, state, begun| {
                    let wait = state.waits.get_mut(&id)?;
                    if let Some(answer) = wait.answer.take() {
                        state.waits.remove(&id);
                        return Some(Some(answer));
                    }
                    let why = match &state.down {
                        _ if state.closed => return Some(Some(Err(Error::Closed.into()))),
                        Some(d)
                            if d.since.max(begun.get()).elapsed()
                                >= link.settings.reconnect_for =>
                        {
                            d.why.clone()
                        }
                        Some(_) if wait.cancelling && !at_once => {
                            // The server is told when it is back.
                            state.abandon(id);
                            return Some(Some(Ok(Answer::nothing())));
                        }
                        _ => {
                            let over = until.is_some_and(|at| Instant::now() >= at);
                            return over.then_some(None);
                        }
                    };
                    state.abandon(id);
                    let time = seconds(link.settings.reconnect_for);
                    let why = format!("no connection for {time}: {why}");
                    Some(Some(Err(Error::Unreachable { addr: link.addr(), why }.into())))
                },
                |state, sleeper| {
                    if let Some(wait) = state.waits.get_mut(&id) {
                        wait.sleeper = sleeper;
                    }
                },
            );
            if let Some(answer) = ended {
                if cancel.is_some_and(Canceller::is_cancelled)
                    && matches!(answer, Ok(Answer::Waited(Waited { satisfied: false, .. })))
                {
                    return Err(Error::Cancelled.into());
                }
                return answer;
            }
            if let Some((asked, at)) = &mut look
                && deadline.is_none_or(|deadline| *at < deadline)
            {
                if (asked.stop)() {
                    if let Some(cancel) = cancel {
                        cancel.cancel();
                    }
                    look = None;
                    deadline = Some(Instant::now() + CANCEL_GRACE);
                } else {
                    *at = Instant::now() + asked.every;
                }
                continue;
            }
            // Time is over: take the wait back, and take what the server says
            // to that, since it may have been satisfied at the last moment.
            if !self.cancel_wait(id) {
                let answer = lock(&self.state).answer_or_abandon(id);
                self.tell_done();
                return answer.unwrap_or_else(|| {
                    match cancel.is_some_and(Canceller::is_cancelled) {
                        true => Err(Error::Cancelled.into()),
                        false => Ok(Answer::nothing()),
                    }
                });
            }
            deadline = Some(Instant::now() + CANCEL_GRACE);
        }
    }

    /// Asks the server to give up a wait. `false` if that was done before, or
    /// cannot be done now.
    pub(super) fn cancel_wait(&self, id: u64) -> bool {
        if !self.is_ours() {
            return false;
        }
        let _writing = lock(&self.writing);
        let mut state = lock(&self.state);
        let Some(wait) = state.waits.get_mut(&id) else {
            return false;
        };
        if std::mem::replace(&mut wait.cancelling, true) {
            return false;
        }
        let Some(socket) = state.socket.clone() else {
            // Its owner sees that it is being given up.
            if let Some(sleeper) = state.waits.get(&id).and_then(|w| w.sleeper.as_ref()) {
                sleeper.unpark();
            }
            return false;
        };
        let mut frame = take_done(&mut state);
        drop(state);
        wire::push(&mut frame, Tag::Cancel, id, &[]);
        self.write(&socket, &[&frame]);
        true
    }
}
