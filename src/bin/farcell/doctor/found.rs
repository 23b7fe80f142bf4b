//! How the server is found, and what its address is worth to others.

use super::check::{Check, Report};
use farcell::launch::{ENV_ADDR_FILE, Launch, named_address_file, steps};
use std::net::IpAddr;
use std::path::PathBuf;

/// The server to look at.
pub struct Target {
    pub addr: String,
    /// `argument`, or the place of a [`farcell::launch::Step`].
    pub by: &'static str,
    /// The job, if a launcher has led there.
    pub job: Option<String>,
    /// Nobody has named it: it need not be there.
    pub optional: bool,
    /// The file that the address stands in, if it does in one that was named.
    pub file: Option<PathBuf>,
}

impl Target {
    /// Whether the address is one of this machine alone.
    pub fn is_here(&self) -> bool {
        matches!(kind(&self.addr), Kind::Loopback)
    }
}

/// Where the steps of the search say that they have looked into such a file.
const IN_FILE: &str = "address file";

/// Looks where a program would.
pub fn find(given: Option<String>, report: &mut Report) -> Option<Target> {
    if let Some(addr) = given {
        report.add(Check::ok("found.argument", format!("{addr} was given, nothing else counts")));
        told(&addr, false, report);
        return Some(Target { addr, by: "argument", job: None, optional: false, file: None });
    }
    report.add(Check::skipped("found.argument", "no server was given"));
    let mut target = None;
    for step in steps() {
        let file = (step.place == IN_FILE).then(named_address_file).flatten();
        let check = match &file {
            _ if step.decides => Check::ok("found.step", step.what),
            // Named on purpose; a program goes on as if it had not been.
            Some(file) if std::env::var_os(ENV_ADDR_FILE).is_some_and(|name| !name.is_empty()) => {
                let fix = format!("farcell serve --ready-file {}", file.display());
                Check::warn("found.step", format!("{}; programs look elsewhere", step.what), fix)
            }
            _ => Check::skipped("found.step", step.what),
        };
        report.add(check.of(step.place));
        if !step.decides {
            continue;
        }
        let launch = (step.place == "launcher").then(Launch::from_env).flatten();
        match step.address {
            Some(addr) => {
                // One machine needs no more than loopback.
                let alone = launch.as_ref().is_some_and(|launch| launch.one_machine);
                let optional = step.place == "this machine";
                told(&addr, !alone && !optional, report);
                let job = launch.map(|launch| launch.job);
                target = Some(Target { addr, by: step.place, job, optional, file });
            }
            None => report.add(Check::skipped(
                "server.told",
                "there is no address yet: rank 0 leaves it when it connects",
            )),
        }
    }
    target
}

/// Handles carry no address: what clients dial is what they were told.
fn told(addr: &str, to_others: bool, report: &mut Report) {
    let bare = "handles carry no address";
    let port = addr.rsplit(':').next().filter(|port| port.parse::<u16>().is_ok());
    let port = port.map_or(farcell::DEFAULT_PORT, |port| port.parse().unwrap_or_default());
    let name = host_name();
    let fix = format!("export FARCELL_ADDR={name}:{port}");
    report.add(match kind(addr) {
        Kind::Unspecified => Check::warn(
            "server.told",
            format!(
                "{bare}; clients dial {addr}, which is where a server listens and no place to dial: each machine takes it for itself"
            ),
            fix,
        ),
        Kind::Loopback if to_others => Check::warn(
            "server.told",
            format!("{bare}; clients dial {addr}, which on every other node is that node itself"),
            fix,
        ),
        Kind::Loopback => Check::ok(
            "server.told",
            format!(
                "{bare}; clients dial {addr}, which is good on this machine alone: tell other nodes {name}:{port}"
            ),
        ),
        Kind::Any => Check::ok("server.told", format!("{bare}; clients dial {addr}")),
    });
}

enum Kind {
    Unspecified,
    Loopback,
    Any,
}

fn kind(addr: &str) -> Kind {
    let host = match addr.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, _)) => host,
        None if addr.matches(':').count() == 1 => addr.split(':').next().unwrap_or_default(),
        None => addr,
    };
    match host.parse::<IpAddr>() {
        Ok(ip) if ip.is_unspecified() => Kind::Unspecified,
        Ok(ip) if ip.is_loopback() => Kind::Loopback,
        Err(_) if host == "localhost" || host.ends_with(".localhost") => Kind::Loopback,
        _ => Kind::Any,
    }
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "HOST".to_owned(),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_address_is_worth() {
        for addr in ["0.0.0.0:7117", "[::]:1", "::"] {
            assert!(matches!(kind(addr), Kind::Unspecified), "{addr}");
        }
        for addr in ["localhost", "localhost:1", "127.0.0.1:7", "[::1]:7", "::1", "127.1.2.3"] {
            assert!(matches!(kind(addr), Kind::Loopback), "{addr}");
        }
        for addr in ["node0:7117", "10.0.0.1", "[fe80::1]:1", "localhost.example:1"] {
            assert!(matches!(kind(addr), Kind::Any), "{addr}");
        }
    }
}
