//! A connection's end, its return, and the signs of life in between.

use super::link::Link;
use super::state::{Binding, Down, Status, stamp, take_done};
use crate::auth::{Resume, Welcome};
use crate::engine::lock;
use crate::error::{Error, seconds};
use crate::transport::socket::Socket;
use crate::wire::{self, Tag};
use rustix::net::{RecvFlags, SendFlags};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Link {
    /// This connection is of no use any more. Someone else may have found out
    /// before, and there may be another one already.
    pub(super) fn broken(&self, socket: &Arc<Socket>, why: &str) {
        let mut state = lock(&self.state);
        if !state.socket.as_ref().is_some_and(|s| Arc::ptr_eq(s, socket)) {
            return;
        }
        state.socket = None;
        // Whoever reads or writes it wakes up. It may be closed already.
        let _ = socket.shutdown(Shutdown::Both);
        // Connections that come back and bring nothing count as one trouble, or
        // an operation would never give up.
        let since = *state.trouble_since.get_or_insert_with(Instant::now);
        state.down = Some(Down { since, why: why.to_owned() });
        state.wake_all();
        drop(state);
        tracing::info!(target: "farcell::tcp", addr = self.settings.target.addr, why, "lost the connection");
        for follower in self.followers() {
            follower.lost();
        }
        self.bring_back();
    }

    /// Starts a thread that connects again, unless there is one.
    pub(super) fn bring_back(&self) {
        let mut state = lock(&self.state);
        if state.closed || state.socket.is_some() || state.reconnecting {
            return;
        }
        let me = self.me.clone();
        let spawned = std::thread::Builder::new()
            .name("farcell-reconnect".to_owned())
            .spawn(move || super::resume::reconnect(&me));
        match spawned {
            Ok(_) => state.reconnecting = true,
            // The keeper tries again with its next look.
            Err(error) => {
                tracing::warn!(target: "farcell::tcp", %error, "cannot start a thread to reconnect")
            }
        }
    }

    /// What to ask the server for when connecting again; `None` when there is
    /// no need to connect.
    pub(super) fn resume_request(&self) -> Option<Resume> {
        let mut state = lock(&self.state);
        if state.closed || state.socket.is_some() {
            state.reconnecting = false;
            return None;
        }
        Some(Resume {
            incarnation: state.welcome.incarnation,
            session: state.welcome.session,
            next_request: state.answered + 1,
            beside: false,
        })
    }

    /// How many connections have come back and brought nothing.
    pub(super) fn fruitless(&self) -> u32 {
        lock(&self.state).fruitless
    }

    /// An attempt to connect has failed.
    pub(super) fn still_down(&self, error: &Error) {
        let why = match error {
            Error::Unreachable { why, .. } => why.clone(),
            other => other.to_string(),
        };
        if let Some(down) = &mut lock(&self.state).down {
            down.why = why;
        }
    }

    /// The frames that open the session's arrays, name it, and leave its will.
    pub(super) fn bindings(&self) -> Vec<Arc<Vec<u8>>> {
        let state = lock(&self.state);
        let arrays = state.bindings.iter().flatten().map(|b| b.frame.clone());
        let name = state.name.iter().chain(state.will.iter().map(|(frame, _)| frame));
        arrays.chain(name.map(|frame| Arc::new(frame.clone()))).collect()
    }

    /// One more user of an array's number.
    pub(super) fn keep_binding(&self, number: u16) {
        if let Some(Some(binding)) = lock(&self.state).bindings.get_mut(usize::from(number)) {
            binding.users += 1;
        }
    }

    /// Remembers how an array is opened under a free number, and returns that
    /// number, for one more user. An array that is opened in the same way
    /// keeps the one it has.
    pub(super) fn add_binding(&self, frame: impl Fn(u16) -> Vec<u8>) -> Option<u16> {
        let mut state = lock(&self.state);
        let mut free = state.bindings.len();
        for (number, binding) in state.bindings.iter_mut().enumerate() {
            match binding {
                Some(known) if *known.frame == frame(number as u16) => {
                    known.users += 1;
                    return Some(number as u16);
                }
                Some(_) => {}
                None => free = free.min(number),
            }
        }
        let number = u16::try_from(free).ok()?;
        if free >= wire::MAX_ARRAYS_OPEN {
            return None;
        }
        if free == state.bindings.len() {
            state.bindings.push(None);
        }
        state.bindings[free] = Some(Binding { frame: Arc::new(frame(number)), users: 1 });
        Some(number)
    }

    /// One user of an array's number has gone. With the last one the number is
    /// free, and the array is not opened again after a reconnect.
    pub(crate) fn drop_binding(&self, number: u16) {
        if !self.is_ours() {
            return;
        }
        let mut state = lock(&self.state);
        if let Some(slot) = state.bindings.get_mut(usize::from(number))
            && let Some(binding) = slot
        {
            binding.users -= 1;
            if binding.users == 0 {
                *slot = None;
            }
        }
    }

    /// The connection is back: sends all that is pending.
    pub(super) fn back(&self, socket: Socket, welcome: Welcome) {
        let _writing = lock(&self.writing);
        let mut state = lock(&self.state);
        state.reconnecting = false;
        if state.closed {
            return;
        }
        if !welcome.resumed {
            let kept = welcome.session == state.welcome.session;
            state.forget_unrepeatable(&self.settings.target.addr, kept);
            // The server knows nothing of them.
            state.done_waits.clear();
            state.told.clear();
        }
        let socket = Arc::new(socket);
        let mut bytes = Vec::new();
        let answered = state.answered;
        for call in state.calls.iter_mut().filter(|call| !call.over) {
            let start = bytes.len();
            bytes.extend_from_slice(call.bytes.as_slice());
            stamp(&mut bytes[start..], call.id, answered);
            call.sent_again = call.sent;
            call.sent = true;
        }
        for (&id, wait) in &mut state.waits {
            if wait.answer.is_some() {
                continue;
            }
            wait.claim_with(welcome.seat);
            if !wait.abandoned {
                bytes.extend_from_slice(&wait.bytes);
            }
            if wait.cancelling {
                wire::push(&mut bytes, Tag::Cancel, id, &[]);
            }
        }
        // What it was told over the old connection, it may not have heard.
        let told = std::mem::take(&mut state.told);
        state.told_before = 0;
        state.done_waits.extend(told);
        let done = take_done(&mut state);
        state.welcome = welcome;
        state.fruitless = state.fruitless.saturating_add(1);
        state.socket = Some(socket.clone());
        state.down = None;
        state.going = false;
        state.last_heard = Instant::now();
        state.wake_all();
        drop(state);
        tracing::info!(
            target: "farcell::tcp", addr = self.settings.target.addr,
            resumed = welcome.resumed,
            "the connection is back"
        );
        self.write(&socket, &[&done, &bytes]);
    }

    /// Keeps the lease, and finds out whether the server is still there. When
    /// to call again; `None` for never.
    pub(crate) fn tend(&self, now: Instant) -> Option<Instant> {
        if !self.is_ours() {
            return None;
        }
        let (lease, socket, lead) = {
            let mut state = lock(&self.state);
            if state.closed {
                return None;
            }
            let lease = Duration::from_millis(state.welcome.lease_ms);
            let Some(socket) = state.socket.clone() else {
                drop(state);
                self.bring_back();
                return Some(now + lease / 3);
            };
            (lease, socket, !std::mem::replace(&mut state.led, true))
        };
        if lead {
            self.read_all(&socket);
            self.stop_leading();
        }
        let mut frame = {
            let mut state = lock(&self.state);
            if std::mem::take(&mut state.heard) {
                state.last_heard = now;
            }
            if now.saturating_duration_since(state.last_heard) > lease {
                drop(state);
                let time = seconds(lease);
                self.broken(&socket, &format!("no sign of life from the server for {time}"));
                return Some(now + lease / 3);
            }
            // Whoever writes now keeps the lease as well.
            let Ok(_writing) = self.writing.try_lock() else {
                return Some(now + lease / 3);
            };
            let mut frame = take_done(&mut state);
            wire::push(&mut frame, Tag::Heartbeat, 0, &[]);
            if state.told_before == 0 {
                state.told_before = state.told.len();
            }
            drop(state);
            match socket.send(&frame, SendFlags::DONTWAIT) {
                Ok(n) => frame.drain(..n).for_each(drop),
                Err(_) => frame.clear(),
            }
            frame
        };
        if !frame.is_empty() {
            // A part of it: the rest must follow before anything else can.
            frame.clear();
            self.broken(&socket, "the server takes no more bytes");
        }
        Some(now + lease / 3)
    }

    /// Ends the session. Whoever still waits gets [`Error::Closed`]. A forked
    /// child, whose session it is not, ends nothing.
    pub(crate) fn close(&self) {
        if !self.is_ours() {
            // The session goes on, and a goodbye would be its own.
            return;
        }
        let socket = {
            let mut state = lock(&self.state);
            if std::mem::replace(&mut state.closed, true) {
                return;
            }
            state.socket.take()
        };
        self.close_beside();
        for follower in self.followers() {
            follower.closed();
        }
        if let Some(socket) = socket {
            // In the middle of another thread's frame it would be no goodbye.
            // Should it not go out, the server finds the connection closed and
            // ends the session with its lease.
            if let Ok(_writing) = self.writing.try_lock() {
                let mut bye = Vec::new();
                wire::push(&mut bye, Tag::Bye, 0, &[]);
                let _ = socket.send(&bye, SendFlags::DONTWAIT);
            }
            let _ = socket.shutdown(Shutdown::Write);
            // What the server had sent by then is read away: closing with
            // bytes unread resets the connection, and the goodbye with it.
            let mut rest = [0; 4096];
            while matches!(socket.recv(&mut rest, RecvFlags::DONTWAIT), Ok(n) if n > 0) {}
            let _ = socket.shutdown(Shutdown::Read);
        }
        let mut state = lock(&self.state);
        for call in &mut state.calls {
            if matches!(call.status, Status::Pending) {
                call.status = Status::Answered(Err(Error::Closed.into()));
                call.over = true;
            }
        }
        state.end_later(|| Error::Closed);
        state.wake_all();
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}
