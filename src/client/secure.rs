//! Whether what a client says is encrypted.

use super::{Client, ClientBuilder};
use crate::auth::Tls;
use crate::error::{Error, Result};
use crate::server::CLEAR;

/// Says whether to encrypt: `off`, `auto` or `require`.
pub const ENV_TLS: &str = "FARCELL_TLS";
/// `1` allows RDMA also where TLS is required.
pub const ENV_CLEAR_RDMA: &str = "FARCELL_CLEAR_RDMA";

impl ClientBuilder {
    /// Whether to encrypt what goes over TCP. Without it `FARCELL_TLS` counts, and
    /// without that it is [`Tls::Auto`]: as the server offers. With
    /// [`Tls::Require`] there is no connection to a server that does not encrypt,
    /// and no RDMA, which nobody can encrypt, unless
    /// [`clear_rdma`](Self::clear_rdma) is called too. Shared memory does not leave
    /// the machine.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> ClientBuilder {
        self.tls = Some(tls);
        self
    }

    /// Uses RDMA also where [`Tls::Require`] holds: cells and messages that go by it
    /// can be read and changed by whoever is on the fabric. Without it
    /// `FARCELL_CLEAR_RDMA=1` does the same.
    #[must_use]
    pub fn clear_rdma(mut self) -> ClientBuilder {
        self.clear_rdma = true;
        self
    }

    /// What the environment says where the program says nothing, and why there is
    /// to be no RDMA.
    pub(super) fn secrecy(&self) -> Result<(Tls, Option<String>)> {
        let set = |name| std::env::var(name).ok().filter(|v| !v.is_empty());
        let tls = match (self.tls, set(ENV_TLS)) {
            (Some(tls), _) => tls,
            (None, Some(text)) => text
                .parse()
                .map_err(|why| Error::BadSetting { what: format!("{ENV_TLS}: {why}") })?,
            (None, None) => Tls::Auto,
        };
        let clear = match set(ENV_CLEAR_RDMA).as_deref() {
            None | Some("0") => self.clear_rdma,
            Some("1") => true,
            Some(text) => {
                let what = format!("{ENV_CLEAR_RDMA}: {text:?} is no answer; use 1 or 0");
                return Err(Error::BadSetting { what });
            }
        };
        let off = tls == Tls::Require && !clear;
        Ok((tls, off.then(|| format!("no RDMA: TLS is required, and {CLEAR}"))))
    }
}

impl Client {
    /// Whether the connection to the server is encrypted; `false` while there is
    /// none. Each one that comes back later is as required, or there is none.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.core.link.is_encrypted()
    }
}
