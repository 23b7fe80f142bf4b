//! libibverbs, adapters, locked memory, and each address tried.

use super::Patient;
use super::addresses::{addresses, with_server};
use super::check::{Check, Report, bytes};
use super::host::names;
use crate::failure::Failure;
use farcell::Error;
use farcell::diagnose::{
    Adapter, AdapterPort, adapters, client_pins, fork_safety, memlock, segment_bytes,
};
use std::path::Path;

/// Cells of a server that was not told otherwise.
pub const CELLS: u32 = 262_144;
/// Queue pairs of a client that was not told otherwise.
const QUEUE_PAIRS: usize = 2;
const INSTALL: &str = "apt-get install libibverbs1 ibverbs-providers";
pub const UNLIMITED: &str =
    "ulimit -l unlimited (in a unit LimitMEMLOCK=infinity, in a container --ulimit memlock=-1)";

/// What the way to the server depends on.
#[derive(Debug, Default)]
pub struct Adapters {
    /// Some adapter has a port that carries traffic.
    pub active: bool,
}

/// Looks at them, and tries each address.
pub fn look(patient: &Patient<'_>, report: &mut Report) -> Result<Adapters, Failure> {
    let kernel = names("/sys/class/infiniband");
    let (library, loaded) = library(&kernel);
    report.add(library);
    report.add(match fork_safety() {
        Ok(how) => Check::ok("rdma.fork", how),
        Err(_) if !loaded => Check::skipped("rdma.fork", "no libibverbs"),
        Err(error) => Check::warn("rdma.fork", error.to_string(), "export RDMAV_FORK_SAFE=1"),
    });
    let found = if loaded { adapters() } else { Ok(Vec::new()) };
    let (found, why) = match found {
        Ok(found) => (found, None),
        Err(Error::Rdma { what }) => (Vec::new(), Some(what)),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    providers(&kernel, &found, loaded, report);
    nodes(report);
    if let Some(name) = patient.connection.device() {
        named(&name, &found, report);
    }
    let active = found.iter().flat_map(|a| &a.ports).any(|port| port.is_active);
    limits(patient, !found.is_empty(), report);
    if found.is_empty() {
        let why = why.unwrap_or_else(|| "no libibverbs".to_owned());
        for check in ["rdma.device", "rdma.port", "rdma.gid", "rdma.atomics", "rdma.gid-server"] {
            report.add(Check::skipped(check, why.clone()));
        }
        return Ok(Adapters { active });
    }
    for adapter in &found {
        report.add(device(adapter));
        for port in &adapter.ports {
            report.add(link(adapter, port, active));
        }
    }
    for adapter in &found {
        addresses(adapter, report);
    }
    with_server(patient, &found, report)?;
    Ok(Adapters { active })
}

/// Whether libibverbs can be loaded.
fn library(kernel: &[String]) -> (Check, bool) {
    match fork_safety() {
        Err(Error::Rdma { what }) if what.contains("libibverbs.so.1") => {
            let check = if kernel.is_empty() {
                let what = format!("{what}; the kernel has no adapter that it would be for");
                Check::skipped("rdma.library", what).mended_by(INSTALL)
            } else {
                Check::fail("rdma.library", what, INSTALL)
            };
            (check, false)
        }
        _ => (Check::ok("rdma.library", "libibverbs.so.1 is loaded"), true),
    }
}

/// Each adapter of the kernel needs a provider, which libibverbs loads.
fn providers(kernel: &[String], found: &[Adapter], loaded: bool, report: &mut Report) {
    if !loaded || kernel.is_empty() {
        let why = if loaded { "the kernel has no adapter" } else { "no libibverbs" };
        report.add(Check::skipped("rdma.provider", why));
        return;
    }
    for name in kernel {
        let check = match found.iter().any(|adapter| adapter.name == *name) {
            true => Check::ok("rdma.provider", "libibverbs has a provider for it"),
            false => Check::fail(
                "rdma.provider",
                format!(
                    "libibverbs does not show it; providers here: {}",
                    match names("/etc/libibverbs.d") {
                        none if none.is_empty() => "none".to_owned(),
                        some => some.join(", ").replace(".driver", ""),
                    }
                ),
                "apt-get install ibverbs-providers",
            ),
        };
        report.add(check.of(name));
    }
}

/// The files by which adapters are opened.
fn nodes(report: &mut Report) {
    let mut any = false;
    for node in names("/sys/class/infiniband_verbs") {
        if !node.starts_with("uverbs") {
            continue;
        }
        any = true;
        let class = Path::new("/sys/class/infiniband_verbs").join(&node).join("ibdev");
        let device = std::fs::read_to_string(class).unwrap_or_default();
        let path = Path::new("/dev/infiniband").join(&node);
        let shown = path.display();
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(&path);
        let check = match opened {
            Ok(_) => Check::ok("rdma.node", format!("{shown} can be opened")),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Check::fail(
                "rdma.node",
                format!("there is no {shown}"),
                "docker run --device=/dev/infiniband (outside of containers: udevadm trigger)",
            ),
            Err(e) => Check::fail(
                "rdma.node",
                format!("{shown}: {}", crate::output::plain(&e)),
                format!("usermod -aG $(stat -c %G {shown}) $USER"),
            ),
        };
        report.add(check.of(device.trim()));
    }
    if !any {
        report.add(Check::skipped("rdma.node", "the kernel has no adapter with a verbs file"));
    }
}

/// The adapter that was asked for.
fn named(name: &str, found: &[Adapter], report: &mut Report) {
    let (device, _) = name.split_once(':').unwrap_or((name, ""));
    if found.iter().any(|adapter| adapter.name == device) {
        return;
    }
    let there: Vec<&str> = found.iter().map(|adapter| adapter.name.as_str()).collect();
    let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    report.add(
        Check::fail(
            "rdma.device",
            format!("asked for, and not here; there is {there}"),
            "unset FARCELL_DEVICE, or leave out --device",
        )
        .of(device),
    );
}

/// Locked memory, against what is needed.
fn limits(patient: &Patient<'_>, has_adapter: bool, report: &mut Report) {
    let lock = memlock();
    let capacity = patient
        .client
        .as_ref()
        .and_then(|client| client.info().ok())
        .map_or(CELLS, |info| u32::try_from(info.capacity).unwrap_or(CELLS));
    let (client, segment) = (client_pins(QUEUE_PAIRS), segment_bytes(capacity));
    let limit = match (lock.limit, lock.is_free) {
        (None, _) => "unlimited".to_owned(),
        (Some(limit), true) => format!("{}, which CAP_IPC_LOCK lifts", bytes(limit)),
        (Some(limit), false) => bytes(limit),
    };
    let pinned = lock.pinned.map(|n| format!(", {} pinned", bytes(n))).unwrap_or_default();
    let needs = format!(
        "limit {limit}{pinned}; a client over RDMA needs {} and its registered buffers",
        bytes(client)
    );
    let enough = |n: u64| lock.left().is_none_or(|left| left >= n);
    report.add(match (enough(client), has_adapter) {
        (true, _) => Check::ok("memlock.client", needs),
        (false, true) => Check::fail("memlock.client", needs, UNLIMITED),
        // Nothing here would lock any.
        (false, false) => Check::warn("memlock.client", needs, UNLIMITED),
    });
    let server = format!(
        "limit {limit}; a server of {capacity} cells with RDMA needs {} for itself, and as much for each RDMA client",
        bytes(segment)
    );
    report.add(match enough(3 * segment) {
        true => Check::ok("memlock.server", server),
        false => Check::warn("memlock.server", server, UNLIMITED),
    });
}

fn device(adapter: &Adapter) -> Check {
    let Adapter { firmware, transport, .. } = adapter;
    let check = match &adapter.trouble {
        Some(why) => {
            Check::fail("rdma.device", why.clone(), "rdma link show; ls -l /dev/infiniband")
        }
        None => {
            let firmware = if firmware.is_empty() { "none" } else { firmware };
            Check::ok("rdma.device", format!("{transport}, firmware {firmware}"))
        }
    };
    check.of(&adapter.name)
}

fn link(adapter: &Adapter, port: &AdapterPort, any: bool) -> Check {
    let AdapterPort { number, state, link_layer, mtu, addresses, .. } = port;
    let what = format!("{state}, link layer {link_layer}, MTU {mtu}, {} GIDs", addresses.len());
    let netdev = netdev(&adapter.name, port);
    let up = match (*link_layer, &netdev) {
        ("InfiniBand", _) => format!("ibstat {} {number}", adapter.name),
        (_, Some(netdev)) => format!("ip link set {netdev} up"),
        (_, None) => "rdma link show".to_owned(),
    };
    let check = match (port.is_active, any) {
        (true, _) if addresses.is_empty() && *link_layer != "InfiniBand" => {
            let netdev = netdev.unwrap_or_else(|| "DEVICE".to_owned());
            Check::fail("rdma.port", what, format!("ip addr add ADDRESS/24 dev {netdev}"))
        }
        (true, _) if *mtu < 1024 => {
            let netdev = netdev.unwrap_or_else(|| "DEVICE".to_owned());
            Check::warn("rdma.port", what, format!("ip link set {netdev} mtu 4200"))
        }
        (true, _) => Check::ok("rdma.port", what),
        // Adapters with two ports are often used by one.
        (false, true) => Check::warn("rdma.port", what, up),
        (false, false) => Check::fail("rdma.port", what, up),
    };
    check.of(format!("{}:{number}", adapter.name))
}

/// The network device of a port: of its addresses, or as soft-RoCE names it.
fn netdev(adapter: &str, port: &AdapterPort) -> Option<String> {
    let of_addresses = port.addresses.iter().find_map(|address| address.netdev.clone());
    let parent = || {
        let path = format!("/sys/class/infiniband/{adapter}/parent");
        Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
    };
    of_addresses.or_else(parent).filter(|name| !name.is_empty())
}
