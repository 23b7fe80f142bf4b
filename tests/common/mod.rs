//! What the integration tests share.
#![allow(dead_code)] // Each test uses a part of it.

pub mod messages;
#[cfg(feature = "cli")]
pub mod process;
pub mod proxy;
pub mod rdma;

use farcell::{Client, ClientBuilder, Key, RdmaChoice, Server, ServerBuilder};
use std::time::Duration;

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
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("not within 10 s: {what}");
}
