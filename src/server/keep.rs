//! What outlives the server: its settings for that, and the thread that writes
//! snapshots.

use super::worker::Mail;
use super::{Server, ServerBuilder, Shared};
use crate::engine::lock;
use crate::error::{Error, Result};
use crate::state::{Beginning, Folder, Origin, Snapshots, Sources, begin};
use farcell_sys::fork;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Where a server keeps what is to outlive it.
#[derive(Clone, Debug, Default)]
pub(super) struct Keep {
    state: Option<PathBuf>,
    snapshots: Option<PathBuf>,
    every: Option<Duration>,
    restore: Option<PathBuf>,
}

impl ServerBuilder {
    /// Keeps memory and catalog in this folder on tmpfs, and begins with what a
    /// former server left there: cells and arrays are as they were, however it
    /// ended. The folder is made if it does not exist, and belongs to one
    /// server at a time.
    #[must_use]
    pub fn state(mut self, folder: impl Into<PathBuf>) -> ServerBuilder {
        self.keep.state = Some(folder.into());
        self
    }

    /// Writes a snapshot to this folder, on any file system, when the server
    /// stops, and begins with the newest one there if there is no state to
    /// begin with. The newest two are kept. The folder is made if it does not
    /// exist, and belongs to one server at a time.
    #[must_use]
    pub fn snapshots(mut self, folder: impl Into<PathBuf>) -> ServerBuilder {
        self.keep.snapshots = Some(folder.into());
        self
    }

    /// Writes a snapshot this often too, from a thread of its own: at least
    /// 0.01 s from the end of one to the start of the next. One that fails goes
    /// to the log.
    #[must_use]
    pub fn snapshot_every(mut self, pause: Duration) -> ServerBuilder {
        self.keep.every = Some(pause);
        self
    }

    /// Begins with this snapshot. [`start`](Self::start) refuses if the folder
    /// for the state has one already.
    #[must_use]
    pub fn restore(mut self, snapshot: impl Into<PathBuf>) -> ServerBuilder {
        self.keep.restore = Some(snapshot.into());
        self
    }
}

impl Keep {
    pub(super) fn every(&self) -> Option<Duration> {
        self.every
    }

    pub(super) fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::BadSetting { what: what.to_owned() });
        match self.every {
            Some(_) if self.snapshots.is_none() => {
                bad("snapshot-every needs a folder for the snapshots")
            }
            Some(every)
                if every < Duration::from_millis(10) || every > Duration::from_secs(1 << 31) =>
            {
                bad("snapshot-every: from 0.01 to 2147483648 seconds are possible")
            }
            _ => Ok(()),
        }
    }

    /// Locks the folders, and takes up what there is.
    pub(super) fn begin(
        self,
        capacity: Option<u32>,
        usual: u32,
    ) -> Result<(Beginning, Option<Snapshots>)> {
        let snapshots = self.snapshots.map(|path| Snapshots::open(&path)).transpose()?;
        let folder = self.state.map(|path| Folder::open(&path, true)).transpose()?.map(Arc::new);
        let newest = match &snapshots {
            Some(snapshots) if self.restore.is_none() => snapshots.newest()?,
            _ => None,
        };
        let sources = Sources { folder, restore: self.restore, newest, capacity, usual };
        Ok((begin(sources)?, snapshots))
    }
}

/// Writes snapshots, now and then and at the end.
#[derive(Debug)]
pub(super) struct Keeper {
    snapshots: Arc<Snapshots>,
    over: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the thread, if one is needed.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub(super) fn start(
        shared: &Arc<Shared>,
        snapshots: Snapshots,
        every: Option<Duration>,
    ) -> Result<Keeper> {
        let (snapshots, over) = (Arc::new(snapshots), Arc::default());
        let mut keeper = Keeper { snapshots, over, thread: None };
        if let Some(every) = every {
            let (shared, snapshots) = (shared.clone(), keeper.snapshots.clone());
            let over = keeper.over.clone();
            let thread = std::thread::Builder::new()
                .name("farcell-snapshot".to_owned())
                .spawn(move || {
                    while !is_over(&over, every) {
                        // The next one may succeed; the log says why this one did not.
                        let _ = write(&shared, &snapshots);
                    }
                })
                .map_err(|e| Error::os("starting a thread for snapshots", e))?;
            keeper.thread = Some(thread);
        }
        Ok(keeper)
    }

    /// Ends the thread and writes the last snapshot.
    ///
    /// # Errors
    /// Why it could not be written.
    fn end(self, shared: &Shared) -> Result<()> {
        *lock(&self.over.0) = true;
        self.over.1.notify_all();
        if self.thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread for snapshots had panicked");
        }
        write(shared, &self.snapshots)
    }
}

/// Waits for that long, or until the server stops.
fn is_over((over, change): &(Mutex<bool>, Condvar), pause: Duration) -> bool {
    let waited = change.wait_timeout_while(lock(over), pause, |over| !*over);
    *waited.unwrap_or_else(PoisonError::into_inner).0
}

fn write(shared: &Shared, snapshots: &Snapshots) -> Result<()> {
    let begun = Instant::now();
    match snapshots.write(&shared.engine, shared.capacity, shared.incarnation) {
        Ok((path, at_once)) => {
            shared.tolls.snapshot(true, begun.elapsed(), shared.started.elapsed());
            tracing::debug!(path = %path.display(), at_once, took = ?begun.elapsed(), "a snapshot");
            if !at_once {
                tracing::warn!(path = %path.display(), "cells changed faster than they could be copied: this snapshot has each as of a moment of its own");
            }
            Ok(())
        }
        Err(error) => {
            shared.tolls.snapshot(false, begun.elapsed(), shared.started.elapsed());
            tracing::error!(%error, "a snapshot failed; those before it are as they were");
            Err(error)
        }
    }
}

impl Server {
    /// What it began with.
    #[must_use]
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Stops: tells every client, ends when they have been told, half a second
    /// at most, and writes a snapshot if it has a folder for that. Dropping the
    /// server does the same, and says only in the log what went wrong.
    ///
    /// # Errors
    /// [`Error::State`] and [`Error::Os`]: the last snapshot could not be written.
    /// The server has stopped all the same.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    /// Stops, if it has not.
    pub(super) fn end(&mut self) -> Result<()> {
        if fork::generation() != self.generation {
            // A forked child has the parent's server, and none of its threads:
            // there is nothing to stop and nobody to wait for.
            self.threads.drain(..).for_each(std::mem::forget);
            std::mem::forget(self.keeper.take());
            #[cfg(feature = "metrics")]
            std::mem::forget(self.page.take());
            return Ok(());
        }
        #[cfg(feature = "metrics")]
        if let Some(page) = self.page.take() {
            page.end();
        }
        for mailbox in self.shared.mailboxes.iter().filter(|_| !self.threads.is_empty()) {
            mailbox.post(Mail::Stop);
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a worker had panicked");
            }
        }
        let Some(keeper) = self.keeper.take() else { return Ok(()) };
        if let Some(rdma) = &self.shared.rdma {
            // Or clients would still change cells by themselves.
            rdma.break_queue_pairs();
        }
        keeper.end(&self.shared)
    }
}
