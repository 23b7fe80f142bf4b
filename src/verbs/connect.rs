//! What two queue pairs must know of each other, and the settings of the path
//! between them.

use std::fmt;
use std::time::Duration;

use farcell_sys as sys;

use super::gid::Gid;

/// The largest packet on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes; what an Ethernet of 1500 carries.
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes.
    B4096,
}

impl Mtu {
    /// Its size in bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        128 << self.raw()
    }

    /// The largest one of at most this size; the smallest for less.
    #[must_use]
    pub fn at_most(bytes: u32) -> Self {
        [Self::B4096, Self::B2048, Self::B1024, Self::B512]
            .into_iter()
            .find(|mtu| mtu.bytes() <= bytes)
            .unwrap_or(Self::B256)
    }

    pub(super) fn raw(self) -> sys::ibv_mtu {
        match self {
            Self::B256 => sys::IBV_MTU_256,
            Self::B512 => sys::IBV_MTU_512,
            Self::B1024 => sys::IBV_MTU_1024,
            Self::B2048 => sys::IBV_MTU_2048,
            Self::B4096 => sys::IBV_MTU_4096,
        }
    }

    /// A number that is none is taken for the smallest, which every path has.
    pub(super) fn from_raw(raw: sys::ibv_mtu) -> Self {
        match raw {
            sys::IBV_MTU_512 => Self::B512,
            sys::IBV_MTU_1024 => Self::B1024,
            sys::IBV_MTU_2048 => Self::B2048,
            sys::IBV_MTU_4096 => Self::B4096,
            _ => Self::B256,
        }
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// What a peer must know of a queue pair to connect to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Endpoint {
    /// Its number, 24 bits.
    pub queue_pair: u32,
    /// The number of its first packet, 24 bits.
    pub psn: u32,
    /// Its port's LID; 0 on Ethernet.
    pub lid: u16,
    /// The GID to reach it by; zero for LID alone (InfiniBand in one subnet).
    pub gid: Gid,
}

/// How a queue pair is connected. Both sides must agree on the MTU; each side's
/// initiator depth must not be above the other side's responder depth.
#[derive(Clone, Copy, Debug)]
pub struct Connect {
    /// The peer.
    pub peer: Endpoint,
    /// The place of the own GID in the port's table; unused where the peer's
    /// GID is zero.
    pub gid_index: u8,
    /// The largest packet.
    pub mtu: Mtu,
    /// How many own READs and atomics may be outstanding.
    pub initiator_depth: u8,
    /// How many of the peer's READs and atomics may be outstanding.
    pub responder_depth: u8,
    /// How long to wait for an acknowledgement, as an exponent: 4.096 us * 2^n,
    /// at most 31; 0 is for ever. See [`ack_timeout`].
    pub ack_timeout: u8,
    /// How often to ask again, at most 7. Better at most 6: soft-RoCE asks for
    /// ever with 7, and a request to a dead peer never completes.
    pub retries: u8,
    /// How often to ask again while the peer has no receive posted, at most 7;
    /// 7 is for ever.
    pub receiver_retries: u8,
    /// How long the peer has to wait before it asks again, as the code that the
    /// InfiniBand specification has for it (12 is 0.64 ms).
    pub receiver_delay: u8,
    /// How many routers a packet may pass.
    pub hop_limit: u8,
    /// The traffic class (DSCP and ECN on RoCE v2).
    pub traffic_class: u8,
    /// The service level (the priority on RoCE).
    pub service_level: u8,
}

impl Connect {
    /// The usual settings: MTU 1024, depth 16, 6 retries, a dead peer noticed
    /// after about a second.
    #[must_use]
    pub fn to(peer: Endpoint, gid_index: u8) -> Self {
        let retries = 6;
        Self {
            peer,
            gid_index,
            mtu: Mtu::B1024,
            initiator_depth: 16,
            responder_depth: 16,
            ack_timeout: ack_timeout(Duration::from_secs(1), retries),
            retries,
            receiver_retries: 7,
            receiver_delay: 12,
            hop_limit: 64,
            traffic_class: 0,
            service_level: 0,
        }
    }
}

/// The [`Connect::ack_timeout`] with which a peer that answers nothing is given
/// up after at most about `dead_after`, when asked `1 + retries` times. Devices
/// may take each try up to four times as long (InfiniBand specification,
/// "transport timer"), and some have a least timeout of their own.
#[must_use]
pub fn ack_timeout(dead_after: Duration, retries: u8) -> u8 {
    let each = dead_after.as_nanos() / (u128::from(retries) + 1);
    // 4.096 us * 2^n <= each
    let units = each / 4096;
    u8::try_from(units.max(2).ilog2()).unwrap_or(31).min(31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_stays_under_what_was_asked() {
        for (millis, retries) in [(1000, 7), (1000, 0), (250, 3), (10_000, 7)] {
            let exponent = ack_timeout(Duration::from_millis(millis), retries);
            let total = 4.096e-3 * f64::from(1u32 << exponent) * f64::from(retries + 1);
            let asked = f64::from(u32::try_from(millis).unwrap());
            assert!(total <= asked && total > asked / 2.01, "{total} {asked}");
        }
        assert_eq!(ack_timeout(Duration::ZERO, 7), 1);
        assert_eq!(ack_timeout(Duration::MAX, 0), 31);
    }

    #[test]
    fn mtus_are_their_sizes() {
        assert_eq!(Mtu::B256.bytes(), 256);
        assert_eq!(Mtu::B4096.bytes(), 4096);
        assert_eq!(Mtu::at_most(1500), Mtu::B1024);
        assert_eq!(Mtu::at_most(100), Mtu::B256);
        assert_eq!(Mtu::from_raw(Mtu::B2048.raw()), Mtu::B2048);
    }
}
