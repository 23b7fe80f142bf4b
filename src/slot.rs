//! What the version word of a slot means, and where its bytes are. Pure.
//!
//! The 63 bits of value, from the top: the version (41 bits), how many whole
//! messages were written; the seat of the session that is writing, or has left
//! it torn (20; otherwise 0), by which the server finds what one who has gone was
//! writing; two flags, torn and writing. Versions are on top, so that "newer than" is a
//! comparison of whole words.
//!
//! The word is a sequence lock. A writer swaps it to *writing*, changes the
//! bytes, and swaps it to the next version. A reader takes the word, the bytes,
//! and the word again: the message is whole if both are the same and neither
//! says *writing*.

use crate::cell::value;

/// Bytes before the message in its row: its length, and in the word behind that
/// the row's [area](spares).
pub const HEAD: u64 = 64;

/// Areas behind those of the rows. Each row has the area with its own number, until
/// one who was writing it in memory has gone without anyone knowing whether it
/// still does: then the row moves to one that nobody knows. The second word of its
/// first area says where it is: 0, or the number of the area and 1.
#[must_use]
pub const fn spares(rows: u32) -> u32 {
    match rows {
        0..4 => 4,
        4..64 => rows,
        _ => 64,
    }
}

/// Most bytes of a row: 16 GiB.
pub const MAX_BYTES: u64 = 16 << 30;

/// Versions count up to this and go on with 1.
pub const MAX_VERSION: u64 = (1 << 40) - 1;

const SEATS: u64 = 1 << 20;
const WRITING: i64 = 1;
const TORN: i64 = 2;
const SEAT_SHIFT: u32 = 2;
const VERSION_SHIFT: u32 = 22;

/// The value of a version word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Version(i64);

impl Version {
    /// What a cell's word says.
    #[must_use]
    pub const fn of(word: u64) -> Version {
        Version(value(word))
    }

    /// A whole message with this number.
    #[must_use]
    pub const fn whole(number: u64) -> Version {
        Version(((number & MAX_VERSION) as i64) << VERSION_SHIFT)
    }

    /// The value of the cell, to be waited for.
    #[must_use]
    pub const fn value(self) -> i64 {
        self.0
    }

    /// The word that holds it, with nobody waiting.
    #[must_use]
    pub const fn word(self) -> u64 {
        (self.0 as u64) << 1
    }

    /// How many whole messages were written.
    #[must_use]
    pub const fn number(self) -> u64 {
        (self.0 >> VERSION_SHIFT) as u64 & MAX_VERSION
    }

    /// Who began to write last, if the message is not whole.
    #[must_use]
    pub const fn seat(self) -> u32 {
        ((self.0 >> SEAT_SHIFT) as u64 & (SEATS - 1)) as u32
    }

    /// Whether someone is writing.
    #[must_use]
    pub const fn is_writing(self) -> bool {
        self.0 & WRITING != 0
    }

    /// Whether a writer has gone in the middle of it.
    #[must_use]
    pub const fn is_torn(self) -> bool {
        self.0 & TORN != 0
    }

    /// Claimed by the session with this seat.
    #[must_use]
    pub const fn claimed(self, seat: u32) -> Version {
        let seat = ((seat as u64 & (SEATS - 1)) as i64) << SEAT_SHIFT;
        Version(Version::whole(self.number()).0 | seat | (self.0 & TORN) | WRITING)
    }

    /// Whether it is that of a message that can be read.
    #[must_use]
    pub const fn is_whole(self) -> bool {
        self.number() > 0 && !self.is_writing() && !self.is_torn()
    }

    /// Whether a cell can have come to hold it by what writers and the server do.
    #[must_use]
    pub const fn is_possible(self) -> bool {
        self.0 >= 0 && (self.seat() == 0 || self.is_writing() || self.is_torn())
    }

    /// Left by its writer in the middle.
    #[must_use]
    pub const fn left(self) -> Version {
        Version((self.0 | TORN) & !WRITING)
    }

    /// The next whole message.
    #[must_use]
    pub const fn next(self) -> Version {
        match self.number() {
            MAX_VERSION => Version::whole(1),
            number => Version::whole(number + 1),
        }
    }
}

/// Bytes from one row to the next: whole cache lines, and whole pages where
/// that is little.
#[must_use]
pub const fn pitch(bytes: u64) -> u64 {
    let all = HEAD.saturating_add(bytes);
    match all.checked_next_multiple_of(if all <= 4096 { 64 } else { 4096 }) {
        Some(pitch) => pitch,
        None => u64::MAX,
    }
}

/// Bytes of all rows; saturates.
#[must_use]
pub const fn extent(rows: u32, bytes: u64) -> u64 {
    pitch(bytes).saturating_mul(rows as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_word_keeps_its_parts(number in 0..=MAX_VERSION, seat in 1u32..1 << 20) {
            let whole = Version::whole(number);
            let claimed = whole.claimed(seat);
            prop_assert!(claimed.is_writing() && !claimed.is_torn());
            prop_assert_eq!((claimed.number(), claimed.seat()), (number, seat));
            let left = claimed.left();
            prop_assert!(!left.is_writing() && left.is_torn());
            prop_assert_eq!(left.number(), number);
            prop_assert!(left.claimed(seat).is_torn());
            prop_assert!(left.is_possible() && claimed.is_possible() && whole.is_possible());
            prop_assert!(!Version(whole.0 | i64::MIN).is_possible());
            prop_assert!(!Version(claimed.0 & !WRITING).is_possible());
            for version in [whole, claimed, left] {
                prop_assert_eq!(Version::of(version.word() | crate::cell::WAITING), version);
                if number < MAX_VERSION {
                    prop_assert!(version.value() < version.next().value());
                }
                prop_assert!(!version.next().is_writing() && !version.next().is_torn());
            }
        }

        #[test]
        fn rows_have_room(bytes in 1..=MAX_BYTES) {
            let pitch = pitch(bytes);
            prop_assert!(pitch >= HEAD + bytes && pitch.is_multiple_of(64));
            prop_assert!(pitch < HEAD + bytes + 4096);
        }
    }

    #[test]
    fn versions_go_round() {
        assert_eq!(Version::whole(MAX_VERSION).next(), Version::whole(1));
        assert_eq!(extent(u32::MAX, MAX_BYTES), u64::MAX);
        assert_eq!(extent(3, 100), 3 * 192);
    }
}
