//! Bytes in memory that several processes may change: words, by relaxed atomics.

use std::sync::atomic::{AtomicU64, Ordering};

/// Copies bytes out of words. Relaxed: whoever calls has another word
/// that orders it, as the version word does for messages.
pub(crate) fn load(words: &[AtomicU64], at: usize, into: &mut [u8]) {
    let words = &words[at / 8..];
    let skip = at % 8;
    // Up to a whole word of the memory, then whole words, then the rest.
    let (head, body) = into.split_at_mut(if skip == 0 { 0 } else { into.len().min(8 - skip) });
    if !head.is_empty() {
        let word = words[0].load(Ordering::Relaxed).to_le_bytes();
        head.copy_from_slice(&word[skip..skip + head.len()]);
    }
    let words = &words[usize::from(skip != 0)..];
    let (whole, rest) = body.as_chunks_mut::<8>();
    let last = words.get(whole.len());
    // Two slices: the compiler makes a better loop of them than of iterators.
    for (bytes, word) in whole.iter_mut().zip(words) {
        *bytes = word.load(Ordering::Relaxed).to_le_bytes();
    }
    if let Some(word) = last.filter(|_| !rest.is_empty()) {
        rest.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes()[..rest.len()]);
    }
}

/// Copies bytes into words, which nobody else changes. Relaxed as in [`load`].
pub(crate) fn store(words: &[AtomicU64], at: usize, from: &[u8]) {
    let words = &words[at / 8..];
    let skip = at % 8;
    let part = |word: &AtomicU64, skip: usize, bytes: &[u8]| {
        let mut whole = word.load(Ordering::Relaxed).to_le_bytes();
        whole[skip..skip + bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
    };
    let (head, body) = from.split_at(if skip == 0 { 0 } else { from.len().min(8 - skip) });
    if !head.is_empty() {
        part(&words[0], skip, head);
    }
    let words = &words[usize::from(skip != 0)..];
    let (whole, rest) = body.as_chunks::<8>();
    let last = words.get(whole.len());
    for (bytes, word) in whole.iter().zip(words) {
        word.store(u64::from_le_bytes(*bytes), Ordering::Relaxed);
    }
    if let Some(word) = last.filter(|_| !rest.is_empty()) {
        part(word, 0, rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bytes_go_where_they_belong(
            at in 0usize..40,
            bytes in prop::collection::vec(1u8.., 0..60),
        ) {
            let words: Vec<AtomicU64> = (0..13).map(|_| AtomicU64::new(0)).collect();
            store(&words, at, &bytes);
            let all: Vec<u8> =
                words.iter().flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes()).collect();
            prop_assert_eq!(&all[at..at + bytes.len()], &bytes[..]);
            let elsewhere = all[..at].iter().chain(&all[at + bytes.len()..]);
            prop_assert!(elsewhere.into_iter().all(|&byte| byte == 0));
            let mut back = vec![0; bytes.len()];
            load(&words, at, &mut back);
            prop_assert_eq!(back, bytes);
        }
    }
}
