//! farcell

// Not part of the public face: open to this workspace's own tests and benches.
#[doc(hidden)]
pub mod verbs;
