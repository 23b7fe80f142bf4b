//! Which bytes of a row a write has brought.

use std::collections::BTreeMap;

/// Most pieces that are kept of one write, for a client that sends crumbs.
const MAX_PIECES: usize = 1024;

/// The bytes of a row that a write has brought so far.
#[derive(Debug, Default)]
pub struct Brought {
    /// Where each piece begins and ends; they do not touch each other.
    pieces: BTreeMap<u64, u64>,
    reached: u64,
}

impl Brought {
    /// Bytes have come, from here up to there. Behind 1,024 pieces with gaps
    /// between them, one that touches none of them counts as not brought.
    pub fn add(&mut self, from: u64, to: u64) {
        self.reached = self.reached.max(to);
        if from >= to {
            return;
        }
        let (mut from, mut to) = (from, to);
        while let Some((&start, &end)) = self.pieces.range(..=to).next_back()
            && end >= from
        {
            self.pieces.remove(&start);
            (from, to) = (from.min(start), to.max(end));
        }
        if self.pieces.len() < MAX_PIECES {
            self.pieces.insert(from, to);
        }
    }

    /// How far they go.
    pub fn reached(&self) -> u64 {
        self.reached
    }

    /// Whether they are all bytes of a message of this length.
    pub fn is_all(&self, total: u64) -> bool {
        total == 0 || self.pieces.get(&0).is_some_and(|&end| end >= total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_all_when_every_byte_has_come(
            parts in prop::collection::vec((0u64..40, 0u64..20), 0..12),
        ) {
            let (mut brought, mut bytes) = (Brought::default(), [false; 60]);
            for (from, len) in parts {
                brought.add(from, from + len);
                bytes[from as usize..(from + len) as usize].fill(true);
                for total in 0..=60 {
                    let all = bytes[..total].iter().all(|&byte| byte);
                    prop_assert_eq!(brought.is_all(total as u64), all);
                }
            }
        }
    }

    #[test]
    fn crumbs_take_no_more_memory_than_there_is_for_them() {
        let mut brought = Brought::default();
        for n in 0..10_000 {
            brought.add(2 * n, 2 * n + 1);
        }
        assert_eq!((brought.pieces.len(), brought.reached()), (MAX_PIECES, 19_999));
        brought.add(0, 20_000);
        assert!(brought.is_all(20_000) && brought.pieces.len() == 1);
    }
}
