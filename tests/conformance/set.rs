//! The transports that the clients of one test use.

use crate::common;
use crate::common::rdma::device;
use farcell::{Client, ClientBuilder, Key, RdmaChoice, Server, ServerBuilder, TransportChoice};
use std::time::Duration;

pub use farcell::TransportChoice as Way;

/// Longer than anything takes that is not stuck.
pub const LONG: Duration = Duration::from_secs(60);

/// Which transports: client `i` uses the one at `i`, and they go round.
#[derive(Clone, Copy, Debug)]
pub struct Set(&'static [Way]);

impl Set {
    pub const fn of(ways: &'static [Way]) -> Set {
        Set(ways)
    }

    /// Holds the promise to this set, where that is possible.
    pub fn keeps(self, promise: fn(&Set)) {
        if self.has_rdma() {
            if device() {
                promise(&self);
            }
        } else if in_machine() {
            println!("NOT TESTED: without RDMA it is tested where there is no RDMA");
        } else {
            promise(&self);
        }
    }

    fn has_rdma(self) -> bool {
        self.0.contains(&Way::Rdma)
    }

    fn way(self, i: usize) -> Way {
        self.0[i % self.0.len()]
    }

    /// Whether the transport is the same for all.
    pub fn is_pure(self) -> bool {
        self.0.iter().all(|way| *way == self.0[0])
    }

    /// How often to do what is worth doing so often over one transport: less where
    /// others do the same, and little in an emulated machine.
    pub fn times(self, usual: u64) -> u64 {
        let share = if self.has_rdma() {
            100
        } else if self.is_pure() {
            1
        } else {
            5
        };
        usual.div_ceil(share).max(2)
    }

    /// Settings of a server that offers these transports.
    pub fn server(self) -> ServerBuilder {
        let rdma = if self.has_rdma() { RdmaChoice::default() } else { RdmaChoice::Off };
        common::server().rdma(rdma)
    }

    /// A server that offers these transports.
    pub fn start(self) -> Server {
        self.server().start().unwrap()
    }

    /// Client number `i`.
    pub fn client(self, server: &Server, i: usize) -> Client {
        self.client_at(&server.address(), i)
    }

    /// As [`client`](Self::client), by the server's address.
    pub fn client_at(self, addr: &str, i: usize) -> Client {
        self.connect(Client::builder().addr(addr).key(common::key()), i)
    }

    /// Client number `i`, which may only read.
    pub fn reader(self, server: &Server, key: Key, i: usize) -> Client {
        self.connect(Client::builder().addr(server.address()).key(key), i)
    }

    /// Client number `i` with further settings.
    pub fn connect(self, builder: ClientBuilder, i: usize) -> Client {
        let way = self.way(i);
        // A server in an emulated machine may be slower than a handshake may be.
        let client = builder.transport(way).wait_for_server(LONG).connect().unwrap();
        let report = client.transport();
        assert_eq!(report.name, name(way), "{report:?}");
        client
    }

    /// The first two clients.
    pub fn two(self, server: &Server) -> (Client, Client) {
        (self.client(server, 0), self.client(server, 1))
    }

    /// At least three clients, and one for each of the transports.
    pub fn some(self, server: &Server) -> Vec<Client> {
        (0..self.0.len().max(3)).map(|i| self.client(server, i)).collect()
    }

    /// The arguments with which `farcell serve` offers these transports.
    #[cfg(feature = "cli")]
    pub fn arguments(self) -> &'static [&'static str] {
        if self.has_rdma() { &["--rdma", "auto"] } else { &[] }
    }
}

/// What a client that was told to use it says that it uses.
fn name(way: TransportChoice) -> String {
    format!("{way:?}").to_lowercase()
}

/// In a machine that was made for RDMA.
fn in_machine() -> bool {
    std::env::var("FARCELL_TEST_RDMA").is_ok_and(|v| v == "required")
}

/// Waits until something is so.
pub fn eventually(what: &str, so: impl FnMut() -> bool) {
    common::eventually_within(LONG, what, so);
}

/// Waits until so many waits are parked.
pub fn parked(server: &Server, waits: usize) {
    eventually("they are parked", || server.parked_waits() == waits);
}
