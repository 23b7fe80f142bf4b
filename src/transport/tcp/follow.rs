//! What others ask of a link, and are told by it.

use super::super::Follower;
use super::link::Link;
use crate::auth::{Tenure, Welcome};
use crate::engine::lock;
use crate::error::{Error, seconds};
use crate::transport::socket::Socket;
use crate::wire::{self, FellRecord, Tag};
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

impl Link {
    /// Tells this one too from here on how it stands with the connection.
    pub(crate) fn follow(&self, follower: Weak<dyn Follower>) {
        lock(&self.followers).push(follower);
    }

    /// Those who follow, in the order in which they came.
    pub(super) fn followers(&self) -> Vec<Arc<dyn Follower>> {
        lock(&self.followers).iter().filter_map(Weak::upgrade).collect()
    }

    /// An array is about to be opened again under a number that it has: from the
    /// moment in which the server hears that, the number may mean other cells.
    /// Blocks as long as the followers do.
    pub(super) fn tell_reopening(&self, number: u16) {
        for follower in self.followers() {
            follower.reopening(number);
        }
    }

    /// The connection is back, and everything pending is sent. Blocks as long
    /// as the followers do.
    pub(super) fn tell_back(&self, welcome: &Welcome, opened: &[(u16, u32)]) {
        for follower in self.followers() {
            follower.back(welcome, opened);
        }
    }

    /// Whether there is a connection, and with this session.
    pub(crate) fn has(&self, tenure: Tenure) -> bool {
        let state = lock(&self.state);
        state.socket.is_some() && state.welcome.tenure() == tenure && !state.closed
    }

    /// The connection, if there is one.
    pub(crate) fn socket(&self) -> Option<Arc<Socket>> {
        lock(&self.state).socket.clone()
    }

    /// The addresses of both ends of the connection.
    pub(crate) fn ends(&self) -> Option<(IpAddr, IpAddr)> {
        let socket = self.socket()?;
        let here = socket.local_addr().ok()?.ip().to_canonical();
        Some((here, socket.peer_addr().ok()?.ip().to_canonical()))
    }

    /// How long whoever waits may look before it sleeps.
    pub(crate) fn spin(&self) -> Duration {
        self.settings.spin
    }

    /// The other end of this connection has closed it: reads what there is
    /// left, and finds out, unless someone else does.
    pub(crate) fn look(&self, socket: &Arc<Socket>) {
        let lead = {
            let mut state = lock(&self.state);
            let current = state.socket.as_ref().is_some_and(|s| Arc::ptr_eq(s, socket));
            current && !std::mem::replace(&mut state.led, true)
        };
        if lead {
            self.read_all(socket);
            self.stop_leading();
        }
    }

    /// Tells the server that a cell was changed in memory under its waiting
    /// bit. If it does not hear that, its sweep finds the cell.
    pub(crate) fn ring(&self, place: u32) {
        let mut frame = Vec::new();
        wire::push(&mut frame, Tag::Ring, 0, &[&place.to_le_bytes()]);
        let _writing = lock(&self.writing);
        if let Some(socket) = self.socket() {
            self.write(&socket, &[&frame]);
        }
    }

    /// Tells the server of a transport that is not had. It is not told again if
    /// this gets lost.
    pub(crate) fn tell_fell(&self, record: &FellRecord, text: &str) {
        let mut frame = Vec::new();
        wire::push(&mut frame, Tag::Fell, 0, &[bytemuck::bytes_of(record), text.as_bytes()]);
        let _writing = lock(&self.writing);
        if let Some(socket) = self.socket() {
            self.write(&socket, &[&frame]);
        }
    }

    /// The error for one who began then, when the server has gone away, or the
    /// connection has been down for too long since.
    pub(crate) fn given_up_since(&self, begun: Instant) -> Option<Error> {
        let state = lock(&self.state);
        let down = state.down.as_ref()?;
        if state.going {
            return Some(Error::ServerGoingAway { addr: self.addr() });
        }
        if down.since.max(begun).elapsed() < self.settings.reconnect_for {
            return None;
        }
        let time = seconds(self.settings.reconnect_for);
        let why = format!("no connection for {time}: {}", down.why);
        Some(Error::Unreachable { addr: self.addr(), why })
    }
}
