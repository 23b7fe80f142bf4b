//! Arrays as handles see them: opened for this process when first used.

use crate::errors::OrRaise;
use crate::session::{Origin, lock};
use crate::waiting;
use farcell::{Client, CounterArray, EventArray};
use farcell_sys::fork::{self, Generation};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex};

/// An array of the library, which a client opens by name and shape.
pub trait Opens: Clone + Send + Sync + 'static {
    /// `param` is what else belongs to the kind: see `sync`.
    fn open(
        client: &Client,
        name: &str,
        rows: usize,
        cols: usize,
        param: u64,
    ) -> farcell::Result<Self>;
}

impl Opens for EventArray {
    fn open(
        client: &Client,
        name: &str,
        rows: usize,
        cols: usize,
        _: u64,
    ) -> farcell::Result<Self> {
        client.events(name, rows, cols)
    }
}

impl Opens for CounterArray {
    fn open(
        client: &Client,
        name: &str,
        rows: usize,
        cols: usize,
        _: u64,
    ) -> farcell::Result<Self> {
        client.counters(name, rows, cols)
    }
}

/// What the handles of an array share. Name and shape are all that is pickled.
pub struct Shared<A> {
    pub origin: Arc<Origin>,
    pub name: String,
    pub rows: usize,
    pub cols: usize,
    pub param: u64,
    live: Mutex<Option<(Generation, A)>>,
}

impl<A: Opens> Shared<A> {
    pub fn new(origin: Arc<Origin>, name: String, rows: usize, cols: usize) -> Arc<Shared<A>> {
        Shared::with_param(origin, name, rows, cols, 0)
    }

    pub fn with_param(
        origin: Arc<Origin>,
        name: String,
        rows: usize,
        cols: usize,
        param: u64,
    ) -> Arc<Shared<A>> {
        Arc::new(Shared { origin, name, rows, cols, param, live: Mutex::new(None) })
    }

    /// The array of this process's session, opened if need be. As in
    /// [`Origin::client`], the lock is held with the interpreter's and never
    /// while anything blocks.
    pub fn get(&self, py: Python<'_>) -> PyResult<A> {
        waiting::watch_signals();
        let now = fork::generation();
        if let Some((born, array)) = &*lock(&self.live)
            && *born == now
        {
            return Ok(array.clone());
        }
        let client = self.origin.client(py)?;
        let Shared { name, rows, cols, param, .. } = self;
        let array = py.detach(|| A::open(&client, name, *rows, *cols, *param)).or_raise(py)?;
        *lock(&self.live) = Some((now, array.clone()));
        Ok(array)
    }

    pub fn is_same(&self, other: &Shared<A>) -> bool {
        self.origin.id == other.origin.id
            && (&self.name, self.rows, self.cols) == (&other.name, other.rows, other.cols)
    }
}
