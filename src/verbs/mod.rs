//! Safe owners over [`farcell_sys`]: what a program holds of an RDMA device.
//!
//! ```text
//! Context <- ProtectionDomain <- Region
//!    ^              ^   ^------- SharedReceiveQueue
//!    |              |
//!    |<- CompletionChannel <- CompletionQueue
//!    |              |                |
//!    '------------- QueuePair -------'
//! ```
//!
//! Every arrow is an `Arc` that the right side holds, so an object is
//! destroyed before what it was made from, in whatever order a program lets
//! go of them. Beyond that order:
//!
//! - **Memory.** A [`Region`] owns its memory and takes it off the device
//!   before the memory goes. A posted request keeps its region alive until its
//!   completion is handed to [`QueuePair::retire`] or the queue pair is gone.
//!   Both sides of the wire may write to registered memory at any time, so
//!   Rust code reaches it through atomics only.
//! - **Fork.** A child's handles answer [`Error::Forked`] ("reopen before
//!   use"), and dropping them in the child touches neither the device nor the
//!   parent's memory map.
//! - **Errors** name the device, the port, the call and its errno, and where
//!   experience shows one, the likely fix.
//! - **Drop** never panics: what cannot be destroyed is logged and leaked.
//!
//! All objects are `Send` and `Sync`: the verbs are thread-safe, see
//! `verbs(7)`.
//!
//! # Borrow rules
//! A device belongs to its list:
//!
//! ```no_run
//! use farcell::verbs::{self, DeviceList};
//! let list = DeviceList::new(verbs::library()?)?;
//! let device = list.find("rxe0")?;
//! println!("{}", device.name());
//! # Ok::<(), verbs::Error>(())
//! ```
//! ```compile_fail,E0597
//! use farcell::verbs::{self, DeviceList};
//! let device = {
//!     let list = DeviceList::new(verbs::library()?)?;
//!     list.find("rxe0")?
//! };
//! println!("{}", device.name());
//! # Ok::<(), verbs::Error>(())
//! ```
//! A piece of a region borrows the region:
//!
//! ```no_run
//! use farcell::verbs::{Access, Error, ProtectionDomain, Region};
//! use std::sync::Arc;
//! fn piece(domain: &Arc<ProtectionDomain>) -> Result<(), Error> {
//!     let region = Region::pages(domain, 4096, Access::LOCAL)?;
//!     let local = region.slice(0..8)?;
//!     assert_eq!(local.len(), 8);
//!     Ok(())
//! }
//! ```
//! ```compile_fail,E0505
//! use farcell::verbs::{Access, Error, ProtectionDomain, Region};
//! use std::sync::Arc;
//! fn piece(domain: &Arc<ProtectionDomain>) -> Result<(), Error> {
//!     let region = Region::pages(domain, 4096, Access::LOCAL)?;
//!     let local = region.slice(0..8)?;
//!     drop(region);
//!     assert_eq!(local.len(), 8);
//!     Ok(())
//! }
//! ```
//! A queue pair that is not connected takes no requests:
//!
//! ```no_run
//! use farcell::verbs::{Error, QueuePair, Request, WorkId};
//! fn ring(queue: &QueuePair) -> Result<WorkId, Error> {
//!     queue.post(Request::doorbell(7))
//! }
//! ```
//! ```compile_fail,E0599
//! use farcell::verbs::{Error, Request, UnconnectedQueuePair, WorkId};
//! fn ring(queue: &UnconnectedQueuePair) -> Result<WorkId, Error> {
//!     queue.post(Request::doorbell(7))
//! }
//! ```
//! And connecting uses it up:
//!
//! ```compile_fail,E0382
//! use farcell::verbs::{Connect, Error, QueuePair, UnconnectedQueuePair};
//! fn twice(queue: UnconnectedQueuePair, to: &Connect) -> Result<(QueuePair, QueuePair), Error> {
//!     Ok((queue.connect(to)?, queue.connect(to)?))
//! }
//! ```

#![allow(
    unsafe_code,
    reason = "safe owners around foreign objects: each block says what keeps it sound"
)]

mod channel;
mod completion;
mod connect;
mod device;
mod domain;
mod error;
mod event;
#[cfg(test)]
mod fake;
mod gid;
mod hint;
mod memory;
mod port;
mod queue_pair;
mod receive;
mod region;
mod send_queue;
#[cfg(test)]
mod tests;
mod work;

pub use channel::CompletionChannel;
pub use completion::{Completion, CompletionQueue, Notify, WorkStatus};
pub use connect::{Connect, Endpoint, Mtu, ack_timeout};
pub use device::{Atomicity, Attributes, Context, Device, DeviceList, Transport, library};
pub use domain::ProtectionDomain;
pub use error::{Error, Place};
pub use event::AsyncEvent;
pub use gid::{Gid, GidEntry, GidKind};
pub use hint::{may_lock_freely, memlock_limit, pinned_bytes};
pub use memory::{Memory, Pages, page_size};
pub use port::{LinkLayer, Port, PortState};
pub use queue_pair::{QueuePair, QueuePairConfig, QueuePairState, Receive, UnconnectedQueuePair};
pub use receive::{Received, SharedReceiveQueue};
pub use region::{Access, Local, Region};
pub use work::{Remote, Request, Work, WorkId};
