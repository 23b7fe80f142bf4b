//! Whether what a server says is encrypted.

use super::{RdmaChoice, ServerBuilder};
use crate::auth::Tls;
use crate::error::{Error, Result};
use crate::tls::Acceptor;

/// Why TLS and RDMA do not go together.
pub(crate) const CLEAR: &str =
    "RDMA cannot be encrypted; allow it in clear (--clear-rdma, `clear_rdma` in the library)";

impl ServerBuilder {
    /// Whether to encrypt what goes over TCP; [`Tls::Off`] unless told otherwise.
    /// With [`Tls::Require`] clients that do not are refused, and RDMA, which
    /// nobody can encrypt, is not offered unless
    /// [`clear_rdma`](Self::clear_rdma) is called too.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> ServerBuilder {
        self.tls = tls;
        self
    }

    /// Offers RDMA also where [`Tls::Require`] holds: cells and messages that go by
    /// it can be read and changed by whoever is on the fabric.
    #[must_use]
    pub fn clear_rdma(mut self) -> ServerBuilder {
        self.clear_rdma = true;
        self
    }

    /// Whether there is to be no RDMA for the sake of secrecy.
    pub(super) fn keeps_rdma_off(&self) -> bool {
        self.tls == Tls::Require && !self.clear_rdma
    }

    /// Whether the settings go together.
    pub(super) fn check_secrecy(&self) -> Result<()> {
        match &self.rdma {
            RdmaChoice::Device(name) if self.keeps_rdma_off() => {
                let what =
                    format!("the RDMA device {name} was named, but TLS is required, and {CLEAR}");
                Err(Error::BadSetting { what })
            }
            _ => Ok(()),
        }
    }

    /// What it takes to encrypt, unless that is off.
    pub(super) fn acceptor(&self) -> Result<Option<Acceptor>> {
        if self.tls == Tls::Off {
            return Ok(None);
        }
        let made = Acceptor::new();
        made.map(Some).map_err(|why| Error::BadSetting { what: format!("tls: {why}") })
    }
}
