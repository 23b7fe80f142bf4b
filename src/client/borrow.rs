//! Looking at a message where it is.

use super::slots::{PATIENCE, Received, Slot, TRIES};
use crate::error::{Error, Result};
use crate::slot::Version;
use crate::transport::shm::{Message, Shm};
use crate::transport::tcp::Look;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

/// A message that is looked at where it is: in shared memory in the server's own,
/// where a writer may replace it at any moment; by any other transport in a copy.
/// What was made of the words counts only if [`is_whole`](SlotBorrow::is_whole)
/// says so behind it.
#[derive(Debug)]
pub struct SlotBorrow {
    version: Version,
    len: usize,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Memory(Arc<Shm>, Message),
    Copy(Vec<AtomicU64>),
}

impl SlotBorrow {
    /// Which message it is. 0: none was written yet.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version.number()
    }

    /// How many bytes it has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its bytes, 8 in each word, the first one lowest; those of the last word
    /// behind [`len`](Self::len) may be anything. Load them relaxed: the
    /// versions order what must be.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        let count = self.len.div_ceil(8);
        match &self.source {
            Source::Memory(_, message) => message.words().get(..count).unwrap_or_default(),
            Source::Copy(words) => words.get(..count).unwrap_or_default(),
        }
    }

    /// Whether the message has not been touched since it was borrowed, so that
    /// all that was read of it so far is of one message. Does not block.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        match &self.source {
            Source::Memory(shm, message) => shm.is_still(message, self.version),
            Source::Copy(_) => true,
        }
    }
}

impl Slot {
    /// Borrows the message as it is now. Waits while someone writes it, as
    /// [`read`](Self::read) does.
    ///
    /// # Errors
    /// As [`read`](Self::read), but for the size.
    pub fn borrow(&self) -> Result<SlotBorrow> {
        let Some((shm, message)) = self.in_memory() else {
            return self.copied();
        };
        let mut version = Version::of(0);
        let mut elsewhere = false;
        let received = self.settle(|| {
            match shm.look(&message, 0, &mut []) {
                Some(look) => {
                    if let Look::Got { version: found, .. } = look {
                        version = found;
                    }
                    Ok(look)
                }
                None => {
                    // Lost at this moment: any answer ends this.
                    elsewhere = true;
                    Ok(Look::Got { version, total: 0, bytes: 0 })
                }
            }
        })?;
        if elsewhere {
            return self.copied();
        }
        let len = received.total as usize;
        Ok(SlotBorrow { version, len, source: Source::Memory(shm, message) })
    }

    fn copied(&self) -> Result<SlotBorrow> {
        let mut bytes = Vec::new();
        let received = loop {
            let received = self.read_at(0, &mut bytes)?;
            if received.total <= bytes.len() as u64 {
                break received;
            }
            bytes.resize(received.total as usize, 0);
        };
        let words = bytes[..received.len].chunks(8).map(|part| {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            AtomicU64::new(u64::from_le_bytes(word))
        });
        let source = Source::Copy(words.collect());
        Ok(SlotBorrow { version: Version::whole(received.version), len: received.len, source })
    }

    /// Gives the message's words and its length in bytes to `look`, where they
    /// are, and what `look` has made of them if they were of one message;
    /// otherwise it is called again. So it must stand any bytes, and leave
    /// nothing behind but its answer. The words are as those of
    /// [`SlotBorrow::words`].
    ///
    /// # Errors
    /// As [`borrow`](Self::borrow); [`Error::SlotBusy`] when no look found a
    /// whole message for two seconds.
    pub fn read_with<R>(
        &self,
        mut look: impl FnMut(&[AtomicU64], usize) -> R,
    ) -> Result<(R, Received)> {
        let begun = Instant::now();
        let mut tries = 0;
        loop {
            let borrowed = self.borrow()?;
            let made = look(borrowed.words(), borrowed.len);
            if borrowed.is_whole() {
                let (version, len) = (borrowed.version(), borrowed.len);
                return Ok((made, Received { version, len, total: len as u64 }));
            }
            tries += 1;
            if tries >= TRIES && begun.elapsed() > PATIENCE {
                return Err(self.busy("read_with"));
            }
        }
    }

    pub(super) fn busy(&self, op: &'static str) -> Error {
        Error::SlotBusy { name: self.name(), row: self.row(), op }
    }
}
