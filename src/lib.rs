//! farcell
