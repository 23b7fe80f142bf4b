//! The key: its file, and whether it is the server's.

use super::Patient;
use super::check::{Check, Report};
use crate::failure::Failure;
use farcell::{Access, Client, Domain, Error, TransportChoice};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Looks at the key file. `false`: it cannot be used.
pub fn file(patient: &Patient<'_>, report: &mut Report) -> Result<bool, Failure> {
    let path = match &patient.connection.authkey_file {
        Some(path) => path.clone(),
        None => match farcell::key_path_from_env() {
            Ok(path) => path,
            Err(error) => {
                report.add(Check::fail("key.file", error.to_string(), "export HOME=~"));
                report.add(Check::skipped("key.mode", "there is no key file"));
                return Ok(false);
            }
        },
    };
    let shown = path.display();
    let Ok(meta) = std::fs::metadata(&path) else {
        report.add(missing(patient, &path));
        report.add(Check::skipped("key.mode", "there is no key file"));
        return Ok(false);
    };
    let mode = meta.mode() & 0o777;
    let loaded = farcell::load_key(&path);
    let private = mode & 0o077 == 0 || !meta.is_file();
    report.add(match &loaded {
        Err(error) if private => Check::fail("key.file", error.to_string(), copy(patient, &path)),
        _ => Check::ok("key.file", format!("{shown} is there")),
    });
    report.add(match private {
        true => Check::ok("key.mode", format!("mode {mode:04o}")),
        false => Check::fail(
            "key.mode",
            format!("others than its owner can use {shown} (mode {mode:04o}), so it is refused"),
            format!("chmod 600 {shown}"),
        ),
    });
    Ok(loaded.is_ok())
}

/// The command that copies the server's key here.
fn copy(patient: &Patient<'_>, path: &Path) -> String {
    let path = match path.is_dir() {
        true => path.join("authkey"),
        false => path.to_owned(),
    };
    let host = match &patient.target {
        // Nothing to copy over the network; the server's log says which file it uses.
        Some(target) if target.is_here() => {
            return match farcell::key_path_from_env() {
                Ok(own) if own != path && own.exists() => {
                    format!("cp -p {} {}", own.display(), path.display())
                }
                _ => format!("cp -p KEY_FILE_OF_THE_SERVER {}", path.display()),
            };
        }
        Some(target) => target.addr.rsplit_once(':').map_or(&*target.addr, |(host, _)| host),
        None => "SERVER",
    };
    format!("scp -p {host}:.config/farcell/authkey {}", path.display())
}

/// The command that shows, on the machine of that address, who answers there.
fn where_it_ends(addr: &str) -> String {
    let port = addr.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    format!("ss -ltnp 'sport = :{}'", port.unwrap_or(farcell::DEFAULT_PORT))
}

fn missing(patient: &Patient<'_>, path: &Path) -> Check {
    let what = format!("{} does not exist", path.display());
    match &patient.target {
        Some(target) if !target.optional => Check::fail("key.file", what, copy(patient, path)),
        _ => Check::skipped("key.file", format!("{what}: the first `farcell serve` makes it"))
            .mended_by("farcell serve"),
    }
}

/// Shakes hands. The session, if there is one.
pub fn right(
    patient: &Patient<'_>,
    answers: bool,
    has_key: bool,
    report: &mut Report,
) -> Result<Option<Client>, Failure> {
    let builder = patient.builder()?.filter(|_| answers && has_key);
    let Some(builder) = builder else {
        let why = if has_key { "no farcell server was reached" } else { "there is no usable key" };
        report.add(Check::skipped("key.right", why));
        report.add(Check::skipped("key.access", why));
        report.add(Check::skipped("server.domain", why));
        return Ok(None);
    };
    let client = match builder.transport(TransportChoice::Tcp).connect() {
        Ok(client) => client,
        Err(error) => {
            report.add(refused(patient, &error)?);
            report.add(Check::skipped("key.access", "there is no session"));
            report.add(Check::skipped("server.domain", "there is no session"));
            return Ok(None);
        }
    };
    report.add(Check::ok("key.right", "both sides have proven to know the same key"));
    let info = client.info();
    let domain = info.as_ref().ok().map(|info| info.domain);
    report.add(match info {
        Ok(info) if info.access == Access::ReadOnly => Check::warn(
            "key.access",
            "this is the server's read-only key: it reads and waits, and changes nothing",
            "farcell doctor --authkey-file FULL_KEY",
        ),
        Ok(_) => Check::ok("key.access", "this is the full key: it reads and changes"),
        Err(error) => Check::fail("key.access", error.to_string(), "farcell ls"),
    });
    report.add(match domain {
        Some(Domain::Hca) => Check::ok(
            "server.domain",
            "hca: the server's adapter makes all changes, also those of clients without RDMA",
        ),
        Some(Domain::Cpu) => Check::ok(
            "server.domain",
            "cpu: CPUs make all changes; clients over RDMA read by themselves and ask for changes",
        ),
        None => Check::skipped("server.domain", "the server did not say"),
    });
    Ok(Some(client))
}

fn refused(patient: &Patient<'_>, error: &Error) -> Result<Check, Failure> {
    let path = match &patient.connection.authkey_file {
        Some(path) => path.clone(),
        None => farcell::key_path_from_env()?,
    };
    let fix = match error {
        Error::AuthenticationFailed { .. } => copy(patient, &path),
        // Another key would not help: the place is wrong, or the way there.
        Error::Impostor { addr, .. } | Error::Intercepted { addr } => where_it_ends(addr),
        Error::Tls { what, .. } if what.contains("told not to encrypt") => {
            "export FARCELL_TLS=auto".to_owned()
        }
        Error::Tls { what, .. } if what.contains("start the server with") => {
            "farcell serve --tls auto".to_owned()
        }
        Error::Tls { addr, .. } => where_it_ends(addr),
        Error::OtherJob { .. } => "export FARCELL_JOB=NAME".to_owned(),
        Error::ServerFull { .. } => "farcell serve --max-clients N".to_owned(),
        _ => "farcell doctor -vv".to_owned(),
    };
    Ok(Check::fail("key.right", error.to_string(), fix))
}
