//! GIDs: a port's addresses, and where they come from.

use std::fmt;
use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};

use farcell_sys as sys;

use super::device::Context;
use super::error::Error;
use super::hint;

/// A 128-bit address of a port. On RoCE v2 it is the network device's IP
/// address, version 4 ones mapped into version 6.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Whether it is all zero, which means that there is none.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// As an IPv6 address.
    #[must_use]
    pub fn ipv6(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.0)
    }

    /// As an IPv4 address, where it is a mapped one.
    #[must_use]
    pub fn ipv4(&self) -> Option<Ipv4Addr> {
        self.ipv6().to_ipv4_mapped()
    }

    /// Whether it works inside one link only (fe80::/10; the default GID of
    /// every RoCE port).
    #[must_use]
    pub fn is_link_local(&self) -> bool {
        self.ipv6().is_unicast_link_local()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ipv6().fmt(f)
    }
}

/// The protocol that a GID stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v1: Ethernet frames, one link only.
    RoceV1,
    /// RoCE v2: UDP, routable.
    RoceV2,
    /// Neither the library nor sysfs tells.
    Unknown,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Its place in the table.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// The protocol.
    pub kind: GidKind,
    /// The network device that it belongs to, where sysfs tells.
    pub netdev: Option<String>,
    /// Whether that device is in this process's network namespace; `None`
    /// where it is not known. A GID of another namespace cannot be used.
    pub netdev_here: Option<bool>,
}

impl Context {
    /// One entry of a port's GID table; `None` where the entry is empty. A few
    /// system calls. See `ibv_query_gid_ex(3)`; before version 1.11 of the
    /// library `ibv_query_gid(3)` and sysfs are read.
    ///
    /// # Errors
    /// [`Error::Call`]: EINVAL for an index or port that is not there, ENODEV.
    /// [`Error::Forked`].
    pub fn gid(&self, port: u8, index: u32) -> Result<Option<GidEntry>, Error> {
        self.check()?;
        let fail = |error| hint::explain(error, self, Some(port));
        // SAFETY: open until drop.
        let queried = unsafe { self.library().query_gid_ex(self.raw(), u32::from(port), index) };
        let (gid, kind) = match queried {
            Ok(entry) => (
                Gid(entry.gid.raw),
                match entry.gid_type {
                    sys::IBV_GID_TYPE_IB => GidKind::InfiniBand,
                    sys::IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
                    sys::IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
                    _ => GidKind::Unknown,
                },
            ),
            Err(error) if error.errno() == sys::libc::ENODATA => return Ok(None),
            // Not in this library, or not in this kernel: the old way.
            Err(error) if error.errno() == sys::libc::EOPNOTSUPP => {
                // SAFETY: open until drop.
                let gid =
                    unsafe { self.library().query_gid(self.raw(), port, index.cast_signed()) }
                        .map_err(fail)?;
                (Gid(gid.raw), self.gid_kind_from_sysfs(port, index))
            }
            Err(error) => return Err(fail(error)),
        };
        if gid.is_zero() {
            return Ok(None);
        }
        let netdev = self.gid_attribute(port, "ndevs", index);
        Ok(Some(GidEntry {
            index,
            gid,
            kind,
            netdev_here: netdev.as_deref().and_then(hint::netdev_is_here),
            netdev,
        }))
    }

    /// All entries of a port's GID table that are filled. A few system calls
    /// an entry.
    ///
    /// # Errors
    /// Those of [`Context::port`]; an entry that fails is left out.
    pub fn gids(&self, port: u8) -> Result<Vec<GidEntry>, Error> {
        let count = self.port(port)?.gids;
        Ok((0..count).filter_map(|index| self.gid(port, index).ok().flatten()).collect())
    }

    fn gid_attribute(&self, port: u8, attribute: &str, index: u32) -> Option<String> {
        let path = format!(
            "/sys/class/infiniband/{}/ports/{port}/gid_attrs/{attribute}/{index}",
            self.name()
        );
        // Reading an empty entry fails with EINVAL.
        let text = fs::read_to_string(path).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    fn gid_kind_from_sysfs(&self, port: u8, index: u32) -> GidKind {
        match self.gid_attribute(port, "types", index).as_deref() {
            // The kernel has one word for both.
            Some("IB/RoCE v1") => match self.port(port).map(|port| port.link_layer) {
                Ok(super::LinkLayer::Ethernet) => GidKind::RoceV1,
                _ => GidKind::InfiniBand,
            },
            Some("RoCE v2") => GidKind::RoceV2,
            _ => GidKind::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_reads_as_an_address() {
        let mut raw = [0; 16];
        raw[10] = 0xff;
        raw[11] = 0xff;
        raw[12..].copy_from_slice(&[10, 0, 0, 7]);
        let gid = Gid(raw);
        assert_eq!(gid.to_string(), "::ffff:10.0.0.7");
        assert_eq!(gid.ipv4(), Some(Ipv4Addr::new(10, 0, 0, 7)));
        assert!(!gid.is_link_local() && !gid.is_zero());
        let local = Gid("fe80::1".parse::<Ipv6Addr>().unwrap().octets());
        assert!(local.is_link_local() && local.ipv4().is_none());
        assert!(Gid::default().is_zero());
    }
}
