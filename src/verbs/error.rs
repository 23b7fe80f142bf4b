//! What can go wrong with a device, in words that name it.

use std::fmt;
use std::io;

use farcell_sys as sys;

use super::completion::WorkStatus;
use super::port::PortState;

/// A failure of an RDMA device or of its use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libibverbs is absent or unusable.
    #[error(transparent)]
    Library(#[from] sys::LoadError),

    /// libibverbs is there and reports no device.
    #[error("no RDMA device: {reason}")]
    NoDevice {
        /// What the machine looks like: no kernel device, no /dev/infiniband, ...
        reason: String,
    },

    /// No device has the name asked for.
    #[error("no RDMA device {wanted}: this machine has {}", present.join(", "))]
    NoSuchDevice {
        /// The name asked for.
        wanted: String,
        /// The names there are.
        present: Vec<String>,
    },

    /// What was given names no device.
    #[error("{what}")]
    BadName {
        /// What is wrong with it.
        what: String,
    },

    /// The port has no address that can be used.
    #[error("{what}")]
    NoAddress {
        /// Which it lacks, and what there is.
        what: String,
    },

    /// The device has no port of this number.
    #[error("device {device} has no port {wanted}: it has {}", Ports(*ports))]
    NoSuchPort {
        /// The device's name.
        device: String,
        /// The port asked for.
        wanted: u8,
        /// How many it has, counted from 1.
        ports: u8,
    },

    /// The handle was inherited through a fork.
    #[error("device {device} was opened before this process was forked: reopen before use")]
    Forked {
        /// The device's name.
        device: String,
    },

    /// A call failed.
    #[error("{call} on {place}: {}{}", io::Error::from_raw_os_error(*errno), Hint(hint.as_deref()))]
    Call {
        /// The C name of the call.
        call: &'static str,
        /// Where.
        place: Place,
        /// Its errno.
        errno: i32,
        /// The likely fix, where one is known.
        hint: Option<String>,
    },

    /// A post failed after its requests were in the device's queue: whether they
    /// are carried out is not known. The queue pair should be given up.
    #[error("ibv_post_send on {place}: {}: the requests may be carried out or not", io::Error::from_raw_os_error(*errno))]
    Unclear {
        /// Where.
        place: Place,
        /// The errno of the call.
        errno: i32,
    },

    /// The device's provider, or this version of libibverbs, has no such call.
    #[error("{call} on {place}: the device's provider does not support this call")]
    Unsupported {
        /// The C name of the call.
        call: &'static str,
        /// Where.
        place: Place,
    },

    /// Memory could not be pinned, most likely for the limit on locked memory.
    #[error(
        "ibv_reg_mr on {place}: memlock limit is {}, {} needed{}: ulimit -l unlimited \
         (or LimitMEMLOCK=infinity, or --ulimit memlock=-1)",
        Bytes(*limit), Bytes(*needed), Pinned(*pinned)
    )]
    Memlock {
        /// Where.
        place: Place,
        /// `RLIMIT_MEMLOCK`, in bytes.
        limit: u64,
        /// The size of the registration, in whole pages, in bytes.
        needed: u64,
        /// What the process has pinned already, in bytes, where the kernel says.
        pinned: Option<u64>,
        /// The errno of the registration.
        errno: i32,
    },

    /// The port carries no traffic.
    #[error("{place} is {state}: {}", state.advice())]
    PortNotActive {
        /// Where.
        place: Place,
        /// The state it is in.
        state: PortState,
    },

    /// More was asked for than the device or the object has.
    #[error("{what} on {place}: {wanted} wanted, {limit} possible")]
    Limit {
        /// Of what.
        what: &'static str,
        /// Where.
        place: Place,
        /// How much was asked for.
        wanted: u64,
        /// How much there is.
        limit: u64,
    },

    /// All places of the send queue are taken. Retire completions, then repeat.
    #[error("send queue on {place} is full: all {depth} requests are outstanding")]
    QueueFull {
        /// Where.
        place: Place,
        /// The depth of the queue.
        depth: u32,
    },

    /// A piece that is not inside its region, or not where the operation needs it.
    #[error("bytes {start}..{end} of a region of {len} bytes: {reason}")]
    Range {
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// The size of the region.
        len: usize,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// Memory that does not begin at a page. A forked child would lose what
    /// else is in its first page.
    #[error("memory at {address:#x} does not begin at a page and cannot be registered")]
    Unaligned {
        /// Where it begins.
        address: usize,
    },

    /// Two objects that do not belong together.
    #[error("{what} on {place}")]
    Mismatch {
        /// Which.
        what: &'static str,
        /// Where.
        place: Place,
    },

    /// A request was carried out and failed.
    #[error("request on {place}, queue pair {queue_pair}: {status} (vendor error {vendor:#x}): {}", status.advice())]
    Work {
        /// Where.
        place: Place,
        /// The local queue pair's number.
        queue_pair: u32,
        /// How it failed.
        status: WorkStatus,
        /// The provider's own code.
        vendor: u32,
    },
}

impl Error {
    /// The errno behind this failure, where a system or library call gave one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Error::Call { errno, .. }
            | Error::Memlock { errno, .. }
            | Error::Unclear { errno, .. } => Some(*errno),
            Error::Unsupported { .. } => Some(sys::libc::EOPNOTSUPP),
            _ => None,
        }
    }

    /// A failure of a system call beside the verbs.
    pub(super) fn system(call: &'static str, place: Place, error: &io::Error) -> Self {
        Error::Call {
            call,
            place,
            errno: error.raw_os_error().unwrap_or(sys::libc::EIO),
            hint: None,
        }
    }
}

/// A device, and a port of it where one is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The device's name.
    pub device: String,
    /// The port, counted from 1.
    pub port: Option<u8>,
}

impl Place {
    pub(super) fn new(device: &str, port: Option<u8>) -> Self {
        Self { device: device.to_owned(), port }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.device)?;
        match self.port {
            Some(port) => write!(f, " port {port}"),
            None => Ok(()),
        }
    }
}

struct Hint<'a>(Option<&'a str>);

impl fmt::Display for Hint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(hint) => write!(f, ": {hint}"),
            None => Ok(()),
        }
    }
}

struct Ports(u8);

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 | 1 => f.write_str("port 1"),
            most => write!(f, "ports 1 to {most}"),
        }
    }
}

struct Pinned(Option<u64>);

impl fmt::Display for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(pinned) if pinned > 0 => write!(f, " besides {} pinned already", Bytes(pinned)),
            _ => Ok(()),
        }
    }
}

/// A size as a person writes it.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[allow(clippy::cast_precision_loss, reason = "three digits are shown, 53 bits are kept")]
        let size = self.0 as f64;
        for (unit, scale) in
            [("GiB", 1024.0 * 1024.0 * 1024.0), ("MiB", 1024.0 * 1024.0), ("KiB", 1024.0)]
        {
            if size >= scale {
                let tenths = (size / scale * 10.0).round() / 10.0;
                return write!(f, "{tenths} {unit}");
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memlock_failure_reads_like_advice() {
        let error = Error::Memlock {
            place: Place::new("mlx5_0", None),
            limit: 64 * 1024,
            needed: 8_808_038,
            pinned: Some(0),
            errno: sys::libc::ENOMEM,
        };
        assert_eq!(
            error.to_string(),
            "ibv_reg_mr on device mlx5_0: memlock limit is 64 KiB, 8.4 MiB needed: \
             ulimit -l unlimited (or LimitMEMLOCK=infinity, or --ulimit memlock=-1)"
        );
    }

    #[test]
    fn a_port_that_is_down_is_named() {
        let error =
            Error::PortNotActive { place: Place::new("mlx5_0", Some(1)), state: PortState::Down };
        assert!(error.to_string().starts_with("device mlx5_0 port 1 is DOWN"), "{error}");
    }

    #[test]
    fn a_call_names_errno_and_hint() {
        let error = Error::Call {
            call: "ibv_modify_qp",
            place: Place::new("rxe0", Some(1)),
            errno: sys::libc::EINVAL,
            hint: Some("try another GID".to_owned()),
        };
        assert_eq!(
            error.to_string(),
            "ibv_modify_qp on device rxe0 port 1: Invalid argument (os error 22): try another GID"
        );
        assert_eq!(error.errno(), Some(22));
    }
}
