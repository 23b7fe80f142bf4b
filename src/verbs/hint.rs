//! From a failure to its likely cause: what the machine looks like.

use std::fs;
use std::io;
use std::path::Path;

use farcell_sys as sys;
use sys::libc;

use super::device::Context;
use super::error::{Error, Place};

/// `RLIMIT_MEMLOCK` of this process in bytes; `None` means unlimited. Never
/// blocks. See `getrlimit(2)`.
#[must_use]
pub fn memlock_limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// Whether this process is not held to the limit of locked memory, as far as
/// `/proc/self/status` tells it: it has CAP_IPC_LOCK, see `capabilities(7)`. In a
/// user namespace of its own it has that and is held to the limit all the same.
#[must_use]
pub fn may_lock_freely() -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask & CAP_IPC_LOCK != 0)
}

/// What this process has pinned for devices so far, in bytes, as
/// `/proc/self/status` tells it (`VmPin`). `None` where the kernel does not.
#[must_use]
pub fn pinned_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Whether a network device of this name is in this network namespace. (sysfs
/// shows the namespace that it was mounted in; this file shows ours.)
pub(super) fn netdev_is_here(name: &str) -> Option<bool> {
    let table = fs::read_to_string("/proc/self/net/dev").ok()?;
    Some(
        table
            .lines()
            .any(|line| line.split_once(':').is_some_and(|(device, _)| device.trim() == name)),
    )
}

/// Why libibverbs finds no device, as far as files tell.
pub(super) fn no_device(root: &Path) -> String {
    let names = |path: &str| -> Vec<String> {
        fs::read_dir(root.join(path))
            .map(|entries| {
                entries
                    .flatten()
                    .map(|entry| entry.file_name().to_string_lossy().into_owned())
                    .collect()
            })
            .unwrap_or_default()
    };
    // libibverbs has a few open together while it looks, and says nothing if it
    // cannot.
    let few: io::Result<Vec<fs::File>> = (0..4).map(|_| fs::File::open(root)).collect();
    if few.is_err_and(|error| error.raw_os_error() == Some(libc::EMFILE)) {
        return "this process has all the files open that it may: raise its limit (ulimit -n)"
            .to_owned();
    }
    let kernel = names("sys/class/infiniband");
    let verbs = names("sys/class/infiniband_verbs");
    let files = names("dev/infiniband");
    if kernel.is_empty() {
        return "the kernel has none: no adapter, no driver, or (for soft-RoCE) no \
                'rdma link add NAME type rxe netdev DEVICE'"
            .to_owned();
    }
    let kernel = kernel.join(", ");
    if !verbs.iter().any(|name| name.starts_with("uverbs")) {
        return format!("the kernel has {kernel} but no uverbs: modprobe ib_uverbs");
    }
    if !root.join("dev/infiniband").exists() {
        return format!(
            "the kernel has {kernel}, but there is no /dev/infiniband in this container: \
             start it with --device=/dev/infiniband"
        );
    }
    if !files.iter().any(|name| name.starts_with("uverbs")) {
        return format!(
            "the kernel has {kernel}, but /dev/infiniband has no uverbs file: \
             pass the device's uverbs file into this container"
        );
    }
    format!(
        "the kernel has {kernel}, but libibverbs has no provider for it: \
         install ibverbs-providers (rdma-core)"
    )
}

/// Turns a call's failure into an error with place and hint.
pub(super) fn explain(error: sys::CallError, context: &Context, port: Option<u8>) -> Error {
    explain_at(error, Place::new(context.name(), port))
}

pub(super) fn explain_at(error: sys::CallError, place: Place) -> Error {
    let call = error.call;
    match error.failure {
        sys::Failure::NullSlot | sys::Failure::NoSymbol => Error::Unsupported { call, place },
        sys::Failure::Errno(errno) => {
            Error::Call { call, hint: hint(call, errno).map(str::to_owned), place, errno }
        }
    }
}

/// Why a device does not open. libibverbs says ENOENT also where the file is
/// there and this user may not open it, so the file itself is asked.
pub(super) fn open_failed(error: sys::CallError, device: &str, file: &Path) -> Error {
    let named = file.display();
    let hint = match fs::OpenOptions::new().read(true).write(true).open(file) {
        Ok(_) => None,
        Err(reason) => Some(match reason.kind() {
            io::ErrorKind::NotFound => format!(
                "there is no {named}: in a container, start it with --device=/dev/infiniband"
            ),
            io::ErrorKind::PermissionDenied => format!(
                "no right to {named}: join the group that owns it (often rdma), or let the \
                 container have the device"
            ),
            _ => format!("{named}: {reason}"),
        }),
    };
    match explain_at(error, Place::new(device, None)) {
        Error::Call { call, place, errno, hint: known } => {
            Error::Call { call, place, errno, hint: hint.or(known) }
        }
        other => other,
    }
}

fn hint(call: &str, errno: i32) -> Option<&'static str> {
    Some(match (call, errno) {
        ("ibv_reg_mr", libc::EFAULT) => {
            "the memory is not mapped as the access needs it, or it is a shared map of an \
             ordinary file, which the kernel does not pin: use tmpfs, a memfd or anonymous memory"
        }
        ("ibv_reg_mr", libc::EINVAL) => {
            "the device refuses this access or size: remote writing and atomics need local \
             writing, and the size may be past max_mr_size"
        }
        ("ibv_create_qp" | "ibv_create_srq" | "ibv_create_cq", libc::EINVAL) => {
            "the device has not that many entries, or not that much inline data"
        }
        ("ibv_create_qp" | "ibv_create_srq" | "ibv_create_cq", libc::ENOMEM) => {
            "the device is out of objects, or the memlock limit is too small for its queues: \
             ulimit -l unlimited"
        }
        ("ibv_create_qp", libc::EPERM) => "the cgroup's rdma limit may be reached",
        (
            "ibv_modify_qp",
            libc::ENETUNREACH
            | libc::EHOSTUNREACH
            | libc::ENODEV
            | libc::ENXIO
            | libc::EADDRNOTAVAIL,
        ) => {
            "the peer's GID has no route from this GID's network device, or that device is in \
             another network namespace: choose another GID"
        }
        ("ibv_modify_qp", libc::ENODATA) => {
            "this GID index is empty: the addresses of its network device have changed"
        }
        ("ibv_modify_qp", libc::ETIMEDOUT) => {
            "the peer's hardware address was not found (ARP or neighbour discovery): is the \
             peer up, and in this GID's network?"
        }
        ("ibv_modify_qp", libc::EINVAL) => {
            "one of GID index, MTU, depths or peer address does not fit this port; a GID whose \
             network device is in another network namespace fails like this too"
        }
        (_, libc::EMFILE) => {
            "this process has all the files open that it may: raise its limit (ulimit -n)"
        }
        (_, libc::ENFILE) => "this machine has all the files open that it can",
        (_, libc::ENODEV | libc::EIO) => "the device may have been removed or reset",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(paths: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for path in paths {
            fs::create_dir_all(root.path().join(path)).unwrap();
        }
        root
    }

    #[test]
    fn each_missing_piece_is_named() {
        let nothing = root(&[]);
        assert!(no_device(nothing.path()).contains("the kernel has none"));
        let no_uverbs = root(&["sys/class/infiniband/rxe0"]);
        assert!(no_device(no_uverbs.path()).contains("modprobe ib_uverbs"));
        let container =
            root(&["sys/class/infiniband/mlx5_0", "sys/class/infiniband_verbs/uverbs0"]);
        let text = no_device(container.path());
        assert!(text.contains("mlx5_0") && text.contains("no /dev/infiniband"), "{text}");
        let half = root(&[
            "sys/class/infiniband/mlx5_0",
            "sys/class/infiniband_verbs/uverbs0",
            "dev/infiniband",
        ]);
        assert!(no_device(half.path()).contains("no uverbs file"));
        let provider = root(&[
            "sys/class/infiniband/mlx5_0",
            "sys/class/infiniband_verbs/uverbs0",
            "dev/infiniband/uverbs0",
        ]);
        assert!(no_device(provider.path()).contains("no provider"));
    }

    #[test]
    fn a_device_file_that_does_not_open_is_named() {
        let error =
            sys::CallError { call: "ibv_open_device", failure: sys::Failure::Errno(libc::ENOENT) };
        let dev = root(&["uverbs0"]);
        let missing = open_failed(error, "mlx5_0", &dev.path().join("uverbs1")).to_string();
        assert!(missing.contains("there is no /") && missing.contains("uverbs1"), "{missing}");
        // A directory cannot be opened for writing, whoever asks.
        let other = open_failed(error, "mlx5_0", &dev.path().join("uverbs0")).to_string();
        assert!(other.contains("uverbs0: ") && other.contains("directory"), "{other}");
    }

    #[test]
    fn the_loopback_device_is_here() {
        assert_eq!(netdev_is_here("lo"), Some(true));
        assert_eq!(netdev_is_here("no-such-dev0"), Some(false));
    }
}
