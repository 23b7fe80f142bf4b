//! The thread that makes memory of messages where that takes long: a server that
//! keeps its state takes all pages of a file at once, a second for a few gigabytes,
//! and a worker would keep all of its clients waiting for that long.

use super::Shared;
use super::connection::Phase;
use super::worker::{Mail, Worker};
use crate::engine::{Route, lock};
use crate::error::{Error, Result};
use crate::wire;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Requests that may wait for the thread. Who comes behind them is served by the
/// worker itself, and so cannot ask for more.
const MOST: usize = 64;

/// A request to open an array, which its worker goes on with once the array is there.
pub(super) struct Job {
    worker: usize,
    route: Route,
    frame: Vec<u8>,
}

/// How workers reach the thread.
pub(super) type Jobs = SyncSender<Job>;

/// Starts the thread, which ends when no worker has a way to it any more.
///
/// # Errors
/// [`Error::Os`].
pub(super) fn start(shared: &Arc<Shared>) -> Result<(Jobs, JoinHandle<()>)> {
    let (jobs, waiting) = sync_channel(MOST);
    let shared = shared.clone();
    let thread = std::thread::Builder::new()
        .name("farcell-maker".to_owned())
        .spawn(move || run(&shared, &waiting))
        .map_err(|e| Error::os("starting a thread for the memory of messages", e))?;
    Ok((jobs, thread))
}

fn run(shared: &Shared, waiting: &Receiver<Job>) {
    // One after the other: of many clients that open the same array the first one
    // makes it.
    for Job { worker, route, frame } in waiting {
        let made = shared.engine.prepare(&frame);
        shared.mailboxes[worker].post(Mail::Prepared(route, made));
    }
}

impl Worker {
    /// The first of these frames opens an array that takes long to make: has that done
    /// elsewhere, and handles nothing more of this client until it is.
    pub(super) fn prepare_first(&mut self, key: usize, serial: u32, frames: &[u8]) {
        let Ok(Some((_, payload))) = wire::split(frames) else { return };
        let frame = &frames[..wire::HEADER + payload.len()];
        let route = self.route(key, serial);
        let job = Job { worker: self.index, route, frame: frame.to_vec() };
        match self.jobs.as_ref().map(|jobs| jobs.try_send(job)) {
            Some(Ok(())) => {
                self.clients[key].held = true;
                self.held.push(route);
            }
            // There are too many, or the server is about to stop.
            Some(Err(_)) | None => self.go_on(route, false),
        }
    }

    /// Goes on with a client: what it asks for now is there, or cannot be made.
    pub(super) fn go_on(&mut self, route: Route, made: bool) {
        self.held.retain(|other| *other != route);
        let Some(key) = self.client_of(route) else { return };
        let client = &mut self.clients[key];
        client.held = false;
        if let Phase::Open { session, .. } = &client.phase {
            let mut session = lock(session);
            session.prepared = Some(made);
            session.hear(self.shared.now());
        }
        self.again.push((key, client.serial));
    }

    /// Whoever is held up by us is not silent.
    pub(super) fn hear_held(&self) {
        for key in self.held.iter().filter_map(|route| self.client_of(*route)) {
            if let Phase::Open { session, .. } = &self.clients[key].phase {
                lock(session).hear(self.shared.now());
            }
        }
    }
}
