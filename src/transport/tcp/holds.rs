//! Which locks this client holds, so that a server that is in another life can
//! tell them from those whose grant was lost with the life before.
//!
//! A lock is written down in the same moment in which the client learns that it
//! has it, and stays so until its unlocking is answered. The list is read in
//! rounds, one for each time that it is sent. A lock that was taken without this
//! table, by one operation, is written down only if no round has begun since the
//! operation did: otherwise the server may have freed it, and it is given back.

use super::super::Waited;
use super::frame;
use super::link::Link;
use super::state::{Answer, Grant, State, Wait};
use crate::auth::Welcome;
use crate::cell::sync::Lock;
use crate::engine::lock;
use crate::wire::{AcquireRecord, HEADER, KeepRecord, MAX_KEPT, Tag};
use std::collections::HashMap;

/// The locks that a client holds. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Holds {
    round: u64,
    /// Tokens, by the session's number of the array and the place in it.
    tokens: HashMap<(u16, u32), u64>,
}

impl Holds {
    fn put(&mut self, array: u16, offset: u32, token: u64) {
        self.tokens.insert((array, offset), token);
    }

    fn remove(&mut self, array: u16, offset: u32, token: u64) {
        // Another thread may have it by now.
        if self.tokens.get(&(array, offset)) == Some(&token) {
            self.tokens.remove(&(array, offset));
        }
    }

    /// The session has ended, and with it all that it held. A lock that is being
    /// tried with its seat goes back.
    pub(super) fn clear(&mut self) {
        self.round += 1;
        self.tokens.clear();
    }
}

impl State {
    /// A claim was met: what it has got is held from now on, by the session of
    /// now. The same is done of a permit, and means nothing. Other answers stay as
    /// they are.
    pub(super) fn hold_granted(&mut self, id: u64, answer: Answer) -> Answer {
        let Answer::Waited(Waited { satisfied: true, fired }) = &answer else {
            return answer;
        };
        let claim = self.waits.get(&id).filter(|wait| wait.is_claim());
        let (Some(claim), &[(_, word)]) = (claim, fired.as_slice()) else {
            return answer;
        };
        let Some(bytes) = claim.bytes.get(HEADER..HEADER + size_of::<AcquireRecord>()) else {
            return answer;
        };
        let record: AcquireRecord = bytemuck::pod_read_unaligned(bytes);
        let (session, seat) = (self.welcome.session, record.seat);
        let token = Lock::of(word).taken(seat, true).token;
        self.holds.put(record.array, record.offset, token);
        Answer::Granted(Grant { word, session, seat })
    }

    /// Whether this is an answer to a claim.
    pub(super) fn is_of_claim(&self, tag: u8, id: u64) -> bool {
        let ends = [Tag::Woken, Tag::Cancelled, Tag::WaitRefused];
        ends.iter().any(|end| *end as u8 == tag) && self.waits.get(&id).is_some_and(Wait::is_claim)
    }
}

impl Link {
    /// What the server said when it let us in, and the round: from here on a
    /// lock may be tried.
    pub(crate) fn standing(&self) -> (Welcome, u64) {
        let state = lock(&self.state);
        (state.welcome, state.holds.round)
    }

    /// A lock was taken that was tried from this round on. `false`: the server
    /// may have freed it since; it must be given back.
    #[must_use]
    pub(crate) fn hold(&self, round: u64, array: u16, offset: u32, token: u64) -> bool {
        let mut state = lock(&self.state);
        if state.holds.round != round {
            return false;
        }
        state.holds.put(array, offset, token);
        true
    }

    /// A lock is not held any more, or what was queued for was no lock.
    pub(crate) fn let_go(&self, array: u16, offset: u32, token: u64) {
        lock(&self.state).holds.remove(array, offset, token);
    }

    /// The frame that tells the server which locks are held, for a session that
    /// goes on in another life of it, and before anything else is said. `None`:
    /// they are too many for a frame, and the server frees none.
    pub(super) fn keep_frame(&self) -> Option<Vec<u8>> {
        let bell = lock(&self.state).bell.clone();
        if let Some(bell) = bell {
            // The server that rang it is no more: this is the last of it.
            while self.listen(&*bell) {}
        }
        let mut state = lock(&self.state);
        state.bell = None;
        state.holds.round += 1;
        if state.holds.tokens.len() > MAX_KEPT {
            tracing::warn!(target: "farcell::tcp", "too many locks are held to tell the server which");
            return None;
        }
        let records: Vec<KeepRecord> = state
            .holds
            .tokens
            .iter()
            .map(|(&(array, offset), &token)| KeepRecord { array, reserved: 0, offset, token })
            .collect();
        Some(frame(Tag::Keep, &[bytemuck::cast_slice(&records)]))
    }
}
