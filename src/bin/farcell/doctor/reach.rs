//! The name, the port, and what speaks there.

use super::Patient;
use super::check::{Check, Report, Verdict};
use super::found::Target;
use farcell::diagnose::{Answer, WIRE_VERSION, probe, resolve};
use std::fmt::Write;
use std::net::SocketAddr;
use std::time::Duration;

/// How long one address may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// Addresses of one name that are looked at.
const MOST: usize = 8;

/// Whether a farcell server of our version answers.
pub fn look(patient: &Patient<'_>, report: &mut Report) -> bool {
    let Some(target) = &patient.target else {
        for check in ["server.address", "server.port", "server.answer"] {
            report.add(Check::skipped(check, "there is no server to look at"));
        }
        return false;
    };
    let addrs = match resolve(&target.addr) {
        Ok(addrs) => addrs,
        Err(error) => {
            let why = error.to_string();
            // It is well formed, and the name is not known; or else nothing to look up.
            let fix = match (bare_host(&target.addr), &target.file) {
                (Some(host), _) if why.contains("cannot be found") => {
                    format!("getent hosts {host}")
                }
                (_, Some(file)) => format!("farcell serve --ready-file {}", file.display()),
                _ => "farcell doctor HOST:PORT".to_owned(),
            };
            report.add(from_file(target, Check::fail("server.address", why, fix)));
            for check in ["server.port", "server.answer"] {
                report.add(Check::skipped(check, "the name has no address"));
            }
            return false;
        }
    };
    let list: Vec<String> = addrs.iter().map(ToString::to_string).collect();
    report.add(Check::ok("server.address", format!("{} is {}", target.addr, list.join(", "))));
    let patience = patient.connection.connect_timeout().map_or(PATIENCE, |t| t.min(PATIENCE));
    let answers: Vec<(SocketAddr, Answer)> =
        addrs.iter().take(MOST).map(|&addr| (addr, probe(addr, patience))).collect();
    let taken = |answer: &Answer| {
        matches!(answer, Answer::Farcell { .. } | Answer::Other(_) | Answer::Silent(_))
    };
    let any = answers.iter().any(|(_, answer)| taken(answer));
    for (addr, answer) in &answers {
        report.add(port(target, *addr, answer, any));
    }
    let mut ours = false;
    // A client takes the first that takes it.
    match answers.iter().find(|(_, answer)| taken(answer)) {
        Some((addr, answer)) => {
            ours = matches!(answer, Answer::Farcell { version } if *version == WIRE_VERSION);
            report.add(from_file(target, speaker(*addr, answer)));
        }
        None => report.add(Check::skipped("server.answer", "no port was reached")),
    }
    ours
}

/// The host's name, if it is one that can be typed after a command as it is.
fn bare_host(addr: &str) -> Option<&str> {
    let host = addr.split_once(':').map_or(addr, |(host, _)| host);
    let plain = |c: char| c.is_alphanumeric() || "-_.".contains(c);
    (host.starts_with(char::is_alphanumeric) && host.chars().all(plain)).then_some(host)
}

/// Says of what has failed where its address stands: the file may be an old one.
fn from_file(target: &Target, mut check: Check) -> Check {
    if let Some(file) = target.file.as_ref().filter(|_| check.verdict == Verdict::Fail) {
        let file = file.display();
        let _ = write!(check.what, "; {file} has this address, perhaps of a server that has ended");
    }
    check
}

fn port(target: &Target, addr: SocketAddr, answer: &Answer, any: bool) -> Check {
    let port = addr.port();
    let mut serve = format!("farcell serve --bind [::]:{port}");
    if let Some(file) = &target.file {
        let _ = write!(serve, " --ready-file {}", file.display());
    }
    let check = match answer {
        Answer::Farcell { .. } | Answer::Other(_) | Answer::Silent(_) => {
            Check::ok("server.port", "open")
        }
        // Another address of the same name is taken in its place.
        Answer::Refused if any => Check::skipped(
            "server.port",
            "refused: nothing listens at this address; another one of this name is open",
        ),
        Answer::Refused if target.optional => Check::warn(
            "server.port",
            "refused: no server runs here, and nobody has named one; a program runs a private one, and commands find none",
            "farcell serve",
        ),
        Answer::Refused if addr.ip().is_loopback() => Check::fail(
            "server.port",
            "refused: the machine is there, and nothing listens on this port",
            serve,
        ),
        Answer::Refused => Check::fail(
            "server.port",
            format!(
                "refused: the machine is there, and nothing listens on this port of this address; is the server bound to 127.0.0.1 alone? See there: ss -ltn 'sport = :{port}'"
            ),
            serve,
        ),
        Answer::Filtered(why) => Check::fail(
            "server.port",
            format!("filtered: {why}: there is no way there, or a firewall rejects"),
            format!("ip route get {}", addr.ip()),
        ),
        Answer::TimedOut => Check::fail(
            "server.port",
            "timeout: no answer at all: a firewall drops packets, or no machine has this address",
            format!("nc -vz {} {port}; on the server: nft list ruleset", addr.ip()),
        ),
        Answer::Failed(why) => {
            Check::fail("server.port", why.clone(), format!("ip route get {}", addr.ip()))
        }
        _ => Check::fail("server.port", "unknown", serve),
    };
    from_file(target, check).of(addr.to_string())
}

fn speaker(addr: SocketAddr, answer: &Answer) -> Check {
    let who = format!("ss -ltnp 'sport = :{}'", addr.port());
    let check = match answer {
        Answer::Farcell { version } if *version == WIRE_VERSION => {
            Check::ok("server.answer", format!("a farcell server, protocol version {version}"))
        }
        Answer::Farcell { version } => Check::fail(
            "server.answer",
            format!(
                "a farcell server of protocol version {version}, and this program speaks {WIRE_VERSION}: both ends need one release"
            ),
            "farcell --version",
        ),
        Answer::Other(what) => Check::fail(
            "server.answer",
            format!("{what}, no farcell server: this port belongs to something else"),
            who,
        ),
        Answer::Silent(why) => Check::fail(
            "server.answer",
            format!("something that is no farcell server, or a server that is stopped: {why}"),
            who,
        ),
        _ => Check::skipped("server.answer", "no port was reached"),
    };
    check.of(addr.to_string())
}
