//! What the fuzzer feeds its bytes to; no part of the interface. Each function
//! takes any bytes and panics if something that farcell promises is not so.
//!
//! `fuzz/` builds these with libFuzzer, under the feature `fuzzing`; the unit
//! tests run every input of `fuzz/corpus` through them.

mod handshake;
mod names;
#[cfg(test)]
mod tests;

pub use crate::engine::fuzz::frames;
pub use crate::state::fuzz::{sealed, snapshot};
pub use crate::transport::shm::fuzz::memory;
pub use crate::transport::tcp::fuzz::replies;
pub use handshake::handshake;
pub use names::names;

/// Bytes of the fuzzer's, taken off the front. When there are none left it is
/// all zeros.
pub(crate) struct Input<'d>(pub &'d [u8]);

impl<'d> Input<'d> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn bytes(&mut self, most: usize) -> &'d [u8] {
        let (front, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        front
    }

    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        let bytes = self.bytes(N);
        array[..bytes.len()].copy_from_slice(bytes);
        array
    }

    pub fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// As many bytes as the next one says.
    pub fn piece(&mut self) -> &'d [u8] {
        let len = self.byte().into();
        self.bytes(len)
    }
}
