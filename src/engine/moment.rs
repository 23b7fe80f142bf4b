//! All cells as of one moment, although some change without the engine's doing.
//!
//! Whatever is asked of the server is kept out by the catalog's lock. Clients in
//! memory and adapters are not, so cells are collected twice: if both times are
//! alike, all of it was so at every moment between the two. Cells that differ are
//! looked at by themselves, again and again, until two looks at all of them, right
//! behind each other, are alike, and then the others must be as they were. A cell
//! that changed and changed back in between goes unnoticed; events, versions and
//! locks never do that, since they count.

use super::Engine;
use super::actor::Actor;
use crate::catalog::{Catalog, Entry};
use crate::cell::WAITING;
use crate::slot::Version;
use std::collections::HashSet;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, PoisonError};

/// Times that all cells are looked at again.
const ROUNDS: u32 = 8;
/// Looks at single cells in all of that: some milliseconds.
const LOOKS: usize = 200_000;

/// Arrays and their cells.
#[derive(Debug, Default)]
pub struct Moment {
    /// The arrays, and where the words of each begin.
    pub arrays: Vec<(Arc<Entry>, usize)>,
    /// Their words, one array behind the other, padding included.
    pub words: Vec<u64>,
    /// All of it was so at one moment. Otherwise each word was at one of its own.
    pub at_once: bool,
}

/// The words of one array, from the first cell on, in the order of `words`.
fn places(arrays: &[(Arc<Entry>, usize)]) -> impl Iterator<Item = u32> + '_ {
    arrays.iter().flat_map(|(entry, _)| entry.base..entry.base + entry.extent)
}

/// What of a word counts: who waits does not.
const fn counts(word: u64) -> u64 {
    word & !WAITING
}

impl<A: Actor> Engine<A> {
    /// Every array that there is now.
    pub fn arrays(&self) -> Vec<Arc<Entry>> {
        self.catalogued().list("", usize::MAX).cloned().collect()
    }

    /// Takes all arrays and cells as of one moment, if it can be found, into
    /// `moment`, whose memory is used again. `then` is done while nothing that the
    /// server is asked for happens.
    ///
    /// # Errors
    /// There is no memory for that many words.
    pub fn moment<T>(
        &self,
        moment: &mut Moment,
        then: impl FnOnce(&Moment) -> T,
    ) -> Result<T, std::collections::TryReserveError> {
        // The memory is touched before anyone has to wait.
        let size = |catalog: &Catalog| {
            catalog.list("", usize::MAX).map(|entry| entry.extent as usize).sum::<usize>()
        };
        let expected = size(&self.catalogued());
        moment.words.clear();
        moment.words.try_reserve(expected)?;
        moment.words.resize(expected, 0);
        let catalog = self.catalog.write().unwrap_or_else(PoisonError::into_inner);
        moment.words.clear();
        moment.words.try_reserve(size(&catalog))?;
        moment.arrays.clear();
        for entry in catalog.list("", usize::MAX) {
            moment.arrays.push((entry.clone(), moment.words.len()));
            let cells = entry.base..entry.base + entry.extent;
            moment.words.extend(cells.map(|place| self.actor.load(place)));
        }
        moment.at_once = self.find_moment(moment);
        let done = then(moment);
        drop(catalog);
        Ok(done)
    }

    /// Looks until there was one moment at which all cells held these words.
    fn find_moment(&self, moment: &mut Moment) -> bool {
        let Moment { arrays, words, .. } = moment;
        // Places in the segment and in the words.
        let mut moving: Vec<(u32, usize)> = Vec::new();
        let mut known: HashSet<usize> = HashSet::new();
        let mut looks = LOOKS;
        for _ in 0..ROUNDS {
            if !self.still(&moving, words, &mut looks) {
                return false;
            }
            let before = moving.len();
            // The words were taken before the last of those looks, and are
            // compared behind it. Acquire, each: in this order.
            for (index, place) in places(arrays).enumerate() {
                let word = self.actor.load(place);
                if counts(word) != counts(words[index]) && known.insert(index) {
                    words[index] = word;
                    moving.push((place, index));
                }
            }
            if moving.len() == before {
                return true;
            }
        }
        false
    }

    /// Looks at some cells until two looks behind each other are alike, which then
    /// are their words.
    fn still(&self, moving: &[(u32, usize)], words: &mut [u64], looks: &mut usize) -> bool {
        loop {
            let mut alike = true;
            for &(place, index) in moving {
                let word = self.actor.load(place);
                alike &= counts(word) == counts(words[index]);
                words[index] = word;
            }
            if alike {
                return true;
            }
            match looks.checked_sub(moving.len()) {
                Some(left) => *looks = left,
                None => return false,
            }
        }
    }

    /// Brings the message of a row, piece by piece, to `to`, and says which it is
    /// and how long, if there is a whole one that stayed the same meanwhile. What
    /// has come counts for nothing otherwise. It is one of this array if the array
    /// is there afterwards.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn copy_row<E>(
        &self,
        entry: &Entry,
        row: u32,
        buffer: &mut [u8],
        mut to: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<Option<(Version, u64)>, E> {
        let Some(payload) = entry.payload.get() else { return Ok(None) };
        let place = entry.base + entry.form.shape.offset(row, 0).unwrap_or(0);
        // Acquire: the bytes are taken behind it.
        let version = Version::of(self.actor.load(place));
        if !version.is_whole() {
            return Ok(None);
        }
        // Relaxed: if it changes meanwhile, so does the version.
        let length = payload.length(row).load(Ordering::Relaxed).min(payload.bytes());
        let mut at = 0;
        while at < length {
            let piece = (length - at).min(buffer.len() as u64) as usize;
            if !payload.copy(row, at, &mut buffer[..piece]) {
                return Ok(None);
            }
            to(&buffer[..piece])?;
            at += piece as u64;
        }
        // Acquire: the bytes were taken before the word is (a seqlock's reader).
        fence(Ordering::Acquire);
        let still = Version::of(self.actor.load(place)) == version;
        Ok(still.then_some((version, length)))
    }
}
