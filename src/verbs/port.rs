//! The ports of an open device.

use std::fmt;

use farcell_sys as sys;

use super::connect::Mtu;
use super::device::Context;
use super::error::Error;
use super::hint;

impl Context {
    /// The state of a port, counted from 1. A system call. See
    /// `ibv_query_port(3)`.
    ///
    /// # Errors
    /// [`Error::Call`]: EINVAL for a port that is not there, ENODEV for a
    /// device that is gone. [`Error::Forked`].
    pub fn port(&self, port: u8) -> Result<Port, Error> {
        self.check()?;
        // SAFETY: open until drop.
        let attr = unsafe { self.library().query_port(self.raw(), port) }
            .map_err(|error| hint::explain(error, self, Some(port)))?;
        Ok(Port {
            state: PortState::new(attr.state),
            link_layer: match attr.link_layer {
                sys::IBV_LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                sys::IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                // Before RoCE the field did not exist and was zero.
                _ => LinkLayer::Unspecified,
            },
            lid: attr.lid,
            mtu: Mtu::from_raw(attr.active_mtu),
            gids: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
            max_message: attr.max_msg_sz,
        })
    }

    /// The state of a port that must carry traffic. A system call.
    ///
    /// # Errors
    /// [`Error::PortNotActive`], and those of [`Context::port`].
    pub fn active_port(&self, port: u8) -> Result<Port, Error> {
        let attr = self.port(port)?;
        match attr.state {
            PortState::Active | PortState::ActiveDefer => Ok(attr),
            state => Err(Error::PortNotActive { place: self.place(Some(port)), state }),
        }
    }
}

/// What a port is connected by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand: peers are addressed by LID.
    InfiniBand,
    /// Ethernet (RoCE): peers are addressed by GID.
    Ethernet,
    /// Not told; InfiniBand on old kernels.
    Unspecified,
}

/// What a port is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// No state.
    Nop,
    /// No link.
    Down,
    /// Link, but no subnet manager has set it up.
    Init,
    /// About to be active.
    Armed,
    /// Carries traffic.
    Active,
    /// Carries traffic, and has lost its link for a moment.
    ActiveDefer,
    /// A state this code does not know.
    Other(u32),
}

impl PortState {
    fn new(raw: sys::ibv_port_state) -> Self {
        match raw {
            sys::IBV_PORT_NOP => Self::Nop,
            sys::IBV_PORT_DOWN => Self::Down,
            sys::IBV_PORT_INIT => Self::Init,
            sys::IBV_PORT_ARMED => Self::Armed,
            sys::IBV_PORT_ACTIVE => Self::Active,
            sys::IBV_PORT_ACTIVE_DEFER => Self::ActiveDefer,
            other => Self::Other(other),
        }
    }

    pub(super) fn advice(self) -> &'static str {
        match self {
            Self::Init | Self::Armed => {
                "the fabric's subnet manager has not set it up: is one running?"
            }
            _ => "check the cable and 'ip link set DEVICE up'",
        }
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nop => f.write_str("NOP"),
            Self::Down => f.write_str("DOWN"),
            Self::Init => f.write_str("INIT"),
            Self::Armed => f.write_str("ARMED"),
            Self::Active => f.write_str("ACTIVE"),
            Self::ActiveDefer => f.write_str("ACTIVE_DEFER"),
            Self::Other(state) => write!(f, "in state {state}"),
        }
    }
}

/// A port of an open device, as it was when asked.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    /// What it is doing.
    pub state: PortState,
    /// What it is connected by.
    pub link_layer: LinkLayer,
    /// Its LID; 0 on Ethernet.
    pub lid: u16,
    /// The largest packet it may send.
    pub mtu: Mtu,
    /// The size of its GID table.
    pub gids: u32,
    /// The largest message, in bytes.
    pub max_message: u32,
}
