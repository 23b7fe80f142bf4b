//! Shared events, counters, locks, barriers and semaphores for programs on many
//! machines.
//!
//! A [`Server`] holds one flat array of atomic 64-bit cells. Programs anywhere
//! connect to it as a [`Client`] and share named arrays of events and counters
//! in it: set, clear, test, take, wait; load, add, compare-and-swap. A waiting
//! program sleeps, and a set that was cleared at once is never lost.
//!
//! ```
//! use farcell::{Client, Key, Server};
//!
//! # fn main() -> Result<(), farcell::Error> {
//! // In a program of its own, or inside of rank 0.
//! let key = Key::new(*b"at least 16 bytes")?;
//! let server = Server::builder(key.clone()).bind("127.0.0.1:0").start()?;
//!
//! // Anywhere.
//! let client = Client::builder().addr(server.address()).key(key).connect()?;
//! let events = client.events("write_events", 4, 4)?;
//! let event = events.at(0, 1)?;
//! event.set()?;
//! assert!(event.is_set()?);
//! event.wait()?;
//! assert_eq!(events.column(1)?.snapshot()?, [true, false, false, false]);
//!
//! let rounds = client.counters("rounds", 1, 4)?;
//! assert_eq!(rounds.at(0, 2)?.fetch_add(1)?, 0);
//!
//! // A message a row: one writer, many readers, never a mix of two.
//! let params = client.slots("params", 4, 16 << 20)?;
//! let version = params.at(0)?.write(b"weights")?;
//! let mut buffer = vec![0; 16 << 20];
//! assert_eq!(params.at(0)?.read(&mut buffer)?.version, version);
//! # Ok(())
//! # }
//! ```
//!
//! # Locks, barriers, peers
//!
//! ```
//! use farcell::{Client, Error, Key, Server, WaitOptions};
//!
//! # fn main() -> Result<(), farcell::Error> {
//! # let key = Key::new(*b"at least 16 bytes")?;
//! # let server = Server::builder(key.clone()).bind("127.0.0.1:0").start()?;
//! # let client = Client::builder().addr(server.address()).key(key.clone()).connect()?;
//! # let other = Client::builder().addr(server.address()).key(key).connect()?;
//! client.join("rank 3")?;
//! let lock = client.locks("params", 1, 4)?.at(0, 2)?;
//! let guard = lock.lock()?;
//! assert_eq!((guard.token(), guard.was_abandoned()), (1, false));
//! guard.unlock()?;
//!
//! let barrier = client.barriers("epoch", 1, 1, 1)?.at(0, 0)?;
//! assert!(barrier.wait()?.is_last());
//!
//! # other.join("rank 0")?;
//! # other.close();
//! let go = client.events("go", 1, 1)?.at(0, 0)?;
//! let options = WaitOptions::new().peers(["rank 0"]);
//! assert!(matches!(go.wait_with_options(&options), Err(Error::PeerLost { .. })));
//! client.release()
//! # }
//! ```
//!
//! # The way of one `set`
//!
//! [`Event::set`] → `client::array` (row and column become a place) →
//! `transport::Transport::execute` → `transport::tcp::link` (a frame of
//! `wire`, written to the socket) → `server::worker` (read from the socket) →
//! `engine::request` (checked) → `engine::actor::execute` (compare-and-swap on
//! the cell of the `segment`) → back as the word before the change. If that
//! word has its waiting bit set, `engine::parking` wakes who waits.

#[cfg(not(all(target_os = "linux", target_endian = "little", target_pointer_width = "64")))]
compile_error!("farcell runs on 64-bit little-endian Linux");

mod addr;
mod auth;
mod catalog;
mod cell;
mod client;
pub mod diagnose;
mod engine;
mod error;
// Not part of the public face: what `fuzz/` calls.
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzz;
pub mod gossip;
mod keyfile;
mod layout;
mod rdma;
// As `verbs` below: for bare operations on the same kind of memory.
#[doc(hidden)]
pub mod segment;
mod server;
mod slot;
mod state;
mod tls;
mod transport;
// Not part of the public face: open to this workspace's own tests and benches.
#[doc(hidden)]
pub mod verbs;
mod wire;

pub use addr::DEFAULT_PORT;
pub use auth::{Access, Domain, Key, KeyError, Tls};
pub use catalog::{Form, Kind, NameError};
pub use cell::Comparison;
pub use client::{
    ArrayInfo, Barrier, BarrierArray, BarrierWait, Batch, Cell, Client, ClientBuilder, Counter,
    CounterArray, Counters, Event, EventArray, Events, Fallback, Held, HeldState, Holding,
    HoldingKind, Lock, LockArray, LockGuard, Member, Outcome, Received, Registered, Semaphore,
    SemaphoreArray, ServerInfo, Slot, SlotArray, SlotBorrow, SlotWrite, Tally, TransportChoice,
    TransportReport, WaitOptions, WaitedCell, Waiting, WaitingHow, Woken, launch,
};
pub use error::{Error, Parted, Result};
pub use keyfile::{
    default_path as default_key_path, load as load_key, load_or_create as load_or_create_key,
    path_from_env as key_path_from_env,
};
pub use layout::Shape;
pub use server::{RdmaChoice, Server, ServerBuilder};
pub use state::{Origin, SnapshotInfo, inspect as inspect_snapshot};
pub use transport::interrupt::ask_while_blocked;
pub use transport::tcp::{Canceller, Pending};
