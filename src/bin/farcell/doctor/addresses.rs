//! Each address of an adapter, tried: with itself, and with the server.

use super::Patient;
use super::check::{Check, Report, bytes, time};
use super::rdma::{CELLS, UNLIMITED};
use crate::failure::Failure;
use farcell::TransportChoice;
use farcell::diagnose::{Adapter, AdapterAddress, AdapterPort, memlock, segment_bytes, self_test};

/// What is moved by an address where a whole segment need not be.
const LITTLE: usize = 16 << 10;

fn shown(adapter: &Adapter, port: &AdapterPort, address: Option<&AdapterAddress>) -> String {
    let place = format!("{}:{}", adapter.name, port.number);
    match address {
        Some(AdapterAddress { index, gid, kind, .. }) => {
            format!("{place} GID {index} ({gid}, {kind})")
        }
        None => format!("{place} LID {}", port.lid),
    }
}

/// What a port is reached by: its addresses, or on InfiniBand its LID.
fn reached_by(port: &AdapterPort) -> Vec<Option<&AdapterAddress>> {
    match port.link_layer {
        "InfiniBand" => vec![None],
        _ => port.addresses.iter().map(Some).collect(),
    }
}

/// Moves data by each address, from the adapter to itself.
pub fn addresses(adapter: &Adapter, report: &mut Report) {
    let segment = segment_bytes(CELLS) as usize;
    let room = memlock().left().is_none_or(|left| left > 3 * segment as u64);
    let mut whole = room;
    let mut done = None;
    let mut checks = Vec::new();
    for port in &adapter.ports {
        for address in reached_by(port) {
            let subject = shown(adapter, port, address);
            let away = address.filter(|address| address.is_here == Some(false));
            if !port.is_active || away.is_some() {
                let why = match away {
                    Some(address) => format!(
                        "its network device {} is in another network namespace",
                        address.netdev.as_deref().unwrap_or_default()
                    ),
                    None => format!("the port is {}", port.state),
                };
                checks.push(Check::skipped("rdma.gid", why).of(subject));
                continue;
            }
            let index = address.map(|address| address.index);
            let size = if std::mem::take(&mut whole) { segment } else { LITTLE };
            match self_test(&adapter.name, port.number, index, size) {
                Ok(test) => {
                    let what = format!(
                        "{} written and read back through the adapter, a READ takes {}",
                        bytes(test.bytes as u64),
                        time(test.read)
                    );
                    checks.push(Check::ok("rdma.gid", what).of(subject));
                    done.get_or_insert((index, test.atomics));
                }
                Err(error) => {
                    checks.push(Check::fail("rdma.gid", error.to_string(), UNLIMITED).of(subject));
                }
            }
        }
    }
    for mut check in checks {
        if check.fix.is_some() && !check.what.contains("memlock limit") {
            // One that works makes another one's failure bearable.
            match done {
                Some((Some(index), _)) => {
                    check = Check::warn(
                        "rdma.gid",
                        check.what,
                        format!("export FARCELL_GID_INDEX={index}"),
                    )
                    .of(check.subject.unwrap_or_default());
                }
                _ => {
                    check.fix = Some(format!(
                        "ip addr; rdma link show; farcell doctor --device {}",
                        adapter.name
                    ))
                }
            }
        }
        report.add(check);
    }
    report.add(atomics(adapter, done.map(|(_, atomics)| atomics)).of(&adapter.name));
}

fn atomics(adapter: &Adapter, tried: Option<bool>) -> Check {
    let domain = match adapter.atomics {
        "hca" => {
            "atomic to each other and not to the CPU, so a server here lets the adapter make all changes (domain hca)"
        }
        "global" => "atomic to the CPU's too, so a server here has domain cpu",
        _ => {
            "none, so RDMA clients read by themselves and the server makes their changes (domain cpu)"
        }
    };
    match tried {
        None => Check::skipped("rdma.atomics", format!("not tried; the adapter says: {domain}")),
        Some(false) => Check::ok("rdma.atomics", domain),
        Some(true) => Check::ok(
            "rdma.atomics",
            format!(
                "compare-and-swap and fetch-and-add find and leave what they should, in the CPU's byte order; {domain}"
            ),
        ),
    }
}

/// Connects to the server by each address.
pub fn with_server(
    patient: &Patient<'_>,
    found: &[Adapter],
    report: &mut Report,
) -> Result<(), Failure> {
    let builder = patient.builder()?.filter(|_| patient.client.is_some());
    let Some(builder) = builder else {
        report.add(Check::skipped("rdma.gid-server", "there is no session with a server"));
        return Ok(());
    };
    for adapter in found {
        for port in adapter.ports.iter().filter(|port| port.is_active) {
            for address in reached_by(port) {
                if address.is_some_and(|address| address.is_here == Some(false)) {
                    continue;
                }
                let mut builder = builder
                    .clone()
                    .transport(TransportChoice::Rdma)
                    .device(format!("{}:{}", adapter.name, port.number));
                if let Some(address) = address {
                    builder = builder.gid_index(address.index);
                }
                let tried = builder.connect().and_then(|client| client.round_trip());
                let check = match tried {
                    Ok(took) => Check::ok(
                        "rdma.gid-server",
                        format!(
                            "reaches the server's memory, {} for a READ and two atomics",
                            time(took)
                        ),
                    ),
                    Err(error) if error.to_string().contains("does not offer it") => {
                        report.add(Check::skipped("rdma.gid-server", error.to_string()));
                        return Ok(());
                    }
                    Err(error) => {
                        let gid = address.map(|a| a.gid.replace("::ffff:", "")).unwrap_or_default();
                        Check::warn(
                            "rdma.gid-server",
                            error.to_string(),
                            format!(
                                "ping -I {gid} SERVER; another one: export FARCELL_GID_INDEX=N"
                            ),
                        )
                    }
                };
                report.add(check.of(shown(adapter, port, address)));
            }
        }
    }
    Ok(())
}
