//! Bytes that nobody may learn by how long a comparison takes.

use bytemuck::{Pod, Zeroable};
use std::fmt;
use subtle::ConstantTimeEq;

/// A proof, a token, or anything else that whoever knows it gets in by. It has
/// no `==`, so that nothing that holds one can derive it either: [`is`](Self::is)
/// is the only comparison, and takes the same time wherever the first difference
/// is. Its bytes never show in `Debug` output.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
pub struct Secret<const N: usize>([u8; N]);

impl<const N: usize> Secret<N> {
    /// Takes the bytes.
    #[must_use]
    pub const fn new(bytes: [u8; N]) -> Secret<N> {
        Secret(bytes)
    }

    /// The bytes, to be sent to whom they are for.
    #[must_use]
    pub const fn expose(&self) -> &[u8; N] {
        &self.0
    }

    /// Whether the two are the same.
    #[must_use]
    pub fn is(&self, other: &Secret<N>) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl<const N: usize> Default for Secret<N> {
    fn default() -> Secret<N> {
        Secret([0; N])
    }
}

impl<const N: usize> fmt::Debug for Secret<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Key;
    use crate::wire::ShmRecord;
    use crate::wire::slots::ShmSlotsAnswer;
    use std::marker::PhantomData;

    /// Whether a type has an `==`: what a type has itself goes before what a trait
    /// gives to all.
    struct Probe<T>(PhantomData<T>);

    trait Otherwise {
        const COMPARES: bool = false;
    }

    impl<T> Otherwise for Probe<T> {}

    impl<T: PartialEq> Probe<T> {
        const COMPARES: bool = true;
    }

    #[test]
    fn what_is_secret_has_no_ordinary_comparison() {
        // Nor has what carries one.
        let found = [
            ("secret of 16", Probe::<Secret<16>>::COMPARES),
            ("secret of 32", Probe::<Secret<32>>::COMPARES),
            ("key", Probe::<Key>::COMPARES),
            ("keys", Probe::<crate::auth::Keys>::COMPARES),
            ("binding", Probe::<crate::auth::Binding>::COMPARES),
            ("hello", Probe::<crate::auth::Hello>::COMPARES),
            ("welcome", Probe::<crate::auth::WelcomeBytes>::COMPARES),
            ("token", Probe::<ShmRecord>::COMPARES),
            ("token for messages", Probe::<ShmSlotsAnswer>::COMPARES),
            ("bytes, which do", Probe::<[u8; 16]>::COMPARES),
        ];
        let compared: Vec<_> = found.iter().filter(|(_, compares)| *compares).collect();
        // The last one shows that it would be noticed.
        assert_eq!(compared, [&("bytes, which do", true)]);
    }

    #[test]
    fn every_bit_counts() {
        let secret = Secret::new([0x5a; 16]);
        assert!(secret.is(&Secret::new([0x5a; 16])));
        for bit in 0..128 {
            let mut other = [0x5a; 16];
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(!secret.is(&Secret::new(other)));
        }
        assert_eq!(format!("{secret:?}"), "Secret");
    }
}
