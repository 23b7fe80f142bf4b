//! Memory that messages go straight from and into.

use super::slots::{Received, Slot, broke};
use crate::engine::lock;
use crate::error::{Error, Result};
use crate::transport::rdma::{Rdma, SlotFrom, SlotInto};
use crate::verbs::Region;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Memory for messages that the client's adapter reaches, so that they go
/// straight from and into it; without RDMA it is memory like any other. Made by
/// [`Client::register`](super::Client::register). Its bytes are reached through
/// methods, since an adapter may be at work on them: what is copied in while a
/// message is written from it, or out while one is read into it, is a mix.
/// Clones are the same memory.
#[derive(Clone, Debug)]
pub struct Registered {
    inner: Inner,
    len: usize,
}

#[derive(Clone, Debug)]
enum Inner {
    Region(Arc<Region>),
    Bytes(Arc<Mutex<Vec<u8>>>),
}

impl Registered {
    pub(super) fn new(rdma: Option<&Arc<Rdma>>, len: usize) -> Registered {
        let region = rdma.and_then(|rdma| {
            let made = rdma.register(len.max(1));
            made.inspect_err(|why| tracing::info!(why, "memory is not registered")).ok()
        });
        let inner = match region {
            Some(region) => Inner::Region(region),
            None => Inner::Bytes(Arc::new(Mutex::new(vec![0; len]))),
        };
        Registered { inner, len }
    }

    /// Whether an adapter reaches it.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        matches!(self.inner, Inner::Region(_))
    }

    /// Its size in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn check(&self, range: &Range<usize>) -> Result<()> {
        if range.start <= range.end && range.end <= self.len {
            return Ok(());
        }
        let what = format!("bytes {range:?} of registered memory with {} bytes", self.len);
        Err(Error::BadSelection { what })
    }

    /// Copies bytes in, from `offset` on.
    ///
    /// # Errors
    /// [`Error::BadSelection`] for bytes outside of it; [`Error::Rdma`] in a
    /// forked child.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let range = offset..offset.saturating_add(bytes.len());
        self.check(&range)?;
        match &self.inner {
            Inner::Bytes(memory) => lock(memory)[range].copy_from_slice(bytes),
            Inner::Region(_) if bytes.is_empty() => {}
            Inner::Region(region) => region.write(offset, bytes).map_err(broke)?,
        }
        Ok(())
    }

    /// Copies bytes out, from `offset` on.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let range = offset..offset.saturating_add(into.len());
        self.check(&range)?;
        match &self.inner {
            Inner::Bytes(memory) => into.copy_from_slice(&lock(memory)[range]),
            Inner::Region(_) if into.is_empty() => {}
            Inner::Region(region) => region.read(offset, into).map_err(broke)?,
        }
        Ok(())
    }
}

impl Slot {
    /// As [`write`](Self::write), straight from registered memory.
    ///
    /// # Errors
    /// As [`write`](Self::write); [`Error::BadSelection`] for bytes outside of
    /// the memory.
    pub fn write_registered(&self, from: &Registered, range: Range<usize>) -> Result<u64> {
        self.check()?;
        from.check(&range)?;
        let total = Some(range.len() as u64);
        match &from.inner {
            Inner::Bytes(memory) => self.write(&lock(memory)[range]),
            // A region has no piece of no bytes.
            Inner::Region(_) if range.is_empty() => self.write(&[]),
            Inner::Region(region) => self.put(0, &SlotFrom::Region(region, range), total, "write"),
        }
    }

    /// As [`read`](Self::read), straight into registered memory.
    ///
    /// # Errors
    /// As [`read`](Self::read); [`Error::BadSelection`] for bytes outside of
    /// the memory.
    pub fn read_registered(&self, into: &Registered, range: Range<usize>) -> Result<Received> {
        self.check()?;
        into.check(&range)?;
        match &into.inner {
            Inner::Bytes(memory) => self.read(&mut lock(memory)[range]),
            Inner::Region(_) if range.is_empty() => self.read(&mut []),
            Inner::Region(region) => {
                let room = range.len();
                let look = || self.look(0, SlotInto::Region(region, range.clone()));
                self.all_of(self.settle(look)?, room)
            }
        }
    }
}
