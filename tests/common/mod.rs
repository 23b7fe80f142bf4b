//! What the integration tests share.
#![allow(dead_code)] // Each test uses a part of it.

pub mod another;
pub mod messages;
#[cfg(feature = "cli")]
pub mod page;
#[cfg(feature = "cli")]
pub mod process;
pub mod proxy;
pub mod rdma;
pub mod sync;

use farcell::{Client, ClientBuilder, Key, RdmaChoice, Server, ServerBuilder};
use std::time::{Duration, Instant};

/// The key of the test servers.
pub fn key() -> Key {
    Key::new(*b"the key of the tests").unwrap()
}

/// Settings of a server on a free port of loopback, without RDMA also where
/// there is an adapter.
pub fn server() -> ServerBuilder {
    Server::builder(key()).bind("127.0.0.1:0").rdma(RdmaChoice::Off)
}

/// Settings of a client of that server.
pub fn client(server: &Server) -> ClientBuilder {
    Client::builder().addr(server.address()).key(key())
}

/// Waits until something is so; fails after ten seconds.
pub fn eventually(what: &str, so: impl FnMut() -> bool) {
    eventually_within(Duration::from_secs(10), what, so);
}

/// As [`eventually`], with another time.
pub fn eventually_within(limit: Duration, what: &str, mut so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !so() {
        assert!(begun.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// From 0 on, below `most`, the same each time.
pub fn random(seed: &mut u64, most: u64) -> u64 {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) % most
}
