//! How a message goes through memory: a seqlock (Boehm, "Can seqlocks get along with
//! programming language memory models?", 2012) whose sequence is the version word of a
//! row. Bytes are put and taken between these steps, by relaxed atomics; so is the
//! place of a row, which changes while the row is claimed. Tests run the same steps
//! under every schedule (`engine::tests::local::messages`).

use crate::slot::Version;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A version word.
pub(crate) trait Word {
    /// As that of an atomic.
    fn load(&self, order: Ordering) -> u64;

    /// Acquires and releases; acquires when it fails.
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64>;

    /// As [`fence`].
    fn fence(&self, order: Ordering);
}

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
    }

    fn fence(&self, order: Ordering) {
        fence(order);
    }
}

/// The word, before bytes of a message are taken.
pub(crate) fn begin(word: &impl Word) -> u64 {
    // Acquire: the bytes of this version are there for those who see it.
    word.load(Ordering::Acquire)
}

/// Whether all that was taken since [`begin`] is of this version.
pub(crate) fn is_still(word: &impl Word, version: Version) -> bool {
    // Acquire: whoever has taken a byte of a later version sees that its row was
    // claimed before, by the fence in `claim`.
    word.fence(Ordering::Acquire);
    Version::of(word.load(Ordering::Relaxed)) == version
}

/// Claims a row of which this word was found; the word before. `Err`: another one is
/// there.
pub(crate) fn claim(word: &impl Word, found: u64, claimed: Version) -> Result<u64, u64> {
    let old = word.compare_exchange(found, claimed.word())?;
    // Release: the claim is seen before anything that is put behind it. The swap alone
    // does not see to that: it orders what was before it.
    word.fence(Ordering::Release);
    Ok(old)
}

/// Makes the message of a claimed row whole; the word before. `Err`: the claim was
/// taken away, and another word is there.
pub(crate) fn commit(word: &impl Word, claimed: Version) -> Result<u64, u64> {
    loop {
        let found = word.load(Ordering::Acquire);
        if Version::of(found) != claimed {
            return Err(found);
        }
        // It releases the bytes. Someone may have begun to wait meanwhile.
        if let Ok(old) = word.compare_exchange(found, claimed.next().word()) {
            return Ok(old);
        }
    }
}
