//! What a wait may be told.

use crate::error::{Error, Result};
use crate::transport::tcp::Canceller;
use crate::wire::MAX_PEER_BYTES;
use std::time::Duration;

/// How long a wait lasts at most, and what else ends it.
///
/// ```
/// # use farcell::WaitOptions;
/// # use std::time::Duration;
/// let options = WaitOptions::new().timeout(Duration::from_secs(5)).peers(["rank 1", "rank 2"]);
/// ```
#[derive(Clone, Debug, Default)]
pub struct WaitOptions {
    pub(super) timeout: Option<Duration>,
    pub(super) cancel: Option<Canceller>,
    pub(super) peers: Vec<String>,
    /// The session to which alone it means something.
    pub(super) bound: Option<u64>,
}

impl WaitOptions {
    /// A wait that lasts until it is satisfied.
    #[must_use]
    pub fn new() -> WaitOptions {
        WaitOptions::default()
    }

    /// It lasts for this long at most.
    #[must_use]
    pub fn timeout(mut self, time: Duration) -> WaitOptions {
        self.timeout = Some(time);
        self
    }

    /// It ends when this is cancelled.
    #[must_use]
    pub fn cancel(mut self, canceller: &Canceller) -> WaitOptions {
        self.cancel = Some(canceller.clone());
        self
    }

    /// It ends with [`Error::PeerLost`] when the session of one of these peers
    /// ends without being released, or did so before and has not come back. A
    /// peer is what called itself so with [`Client::join`](crate::Client::join);
    /// one that has never come is not lost.
    #[must_use]
    pub fn peers<S: Into<String>>(mut self, peers: impl IntoIterator<Item = S>) -> WaitOptions {
        self.peers.extend(peers.into_iter().map(Into::into));
        self
    }

    pub(super) fn of(timeout: Option<Duration>, cancel: Option<&Canceller>) -> WaitOptions {
        WaitOptions { timeout, cancel: cancel.cloned(), ..WaitOptions::default() }
    }

    /// The transport can do it by itself.
    pub(super) fn is_plain(&self) -> bool {
        self.peers.is_empty() && self.bound.is_none()
    }

    /// The peers, if they can be named.
    pub(super) fn named(&self) -> Result<&[String]> {
        if let Some(bad) = self.peers.iter().find(|name| !is_peer(name)) {
            return Err(Error::BadPeerName { peer: bad.clone() });
        }
        if self.peers.iter().map(|name| name.len() + 1).sum::<usize>() > MAX_PEER_BYTES {
            let what = format!(
                "a wait names {} peers: their names may have {MAX_PEER_BYTES} bytes in all",
                self.peers.len()
            );
            return Err(Error::BadSelection { what });
        }
        Ok(&self.peers)
    }
}

/// Whether a peer can be called so.
pub(super) fn is_peer(name: &str) -> bool {
    !name.is_empty() && name.len() <= 128 && !name.chars().any(char::is_control)
}
