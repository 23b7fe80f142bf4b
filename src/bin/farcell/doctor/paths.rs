//! Each way between here and the server, tried, and which one a client takes.

use super::Patient;
use super::check::{Check, Path, Report, time};
use super::rdma::Adapters;
use crate::failure::Failure;
use farcell::{ClientBuilder, Error, TransportChoice};
use std::time::Duration;

const WAYS: [(&str, &str, TransportChoice); 3] = [
    ("shm", "path.shm", TransportChoice::Shm),
    ("rdma", "path.rdma", TransportChoice::Rdma),
    ("tcp", "path.tcp", TransportChoice::Tcp),
];
const TRIPS: usize = 20;

/// Tries them.
pub fn look(
    patient: &Patient<'_>,
    adapters: &Adapters,
    report: &mut Report,
) -> Result<(), Failure> {
    let builder = patient.builder()?.filter(|_| patient.client.is_some());
    let Some(builder) = builder else {
        for check in WAYS.map(|way| way.1).into_iter().chain(["path.chosen"]) {
            report.add(Check::skipped(check, "there is no session with a server"));
        }
        return Ok(());
    };
    for (way, check, choice) in WAYS {
        let (path, check) = attempt(&builder, way, check, choice, adapters);
        report.paths.push(path);
        report.add(check);
    }
    // As any client chooses here, whatever was asked for.
    match builder.connect() {
        Ok(client) => {
            let chosen = client.transport();
            let why = chosen.reasons.join("; ");
            for path in &mut report.paths {
                path.chosen = path.way == chosen.name;
            }
            let what = format!("{}: {why}", chosen.name);
            report.add(match chosen.name {
                "tcp" if adapters.active && !patient.wants_tcp()? => {
                    Check::warn("path.chosen", what, "farcell serve -v --rdma auto")
                }
                _ => Check::ok("path.chosen", what),
            });
        }
        Err(error) => {
            let fix = "farcell doctor --transport auto";
            report.add(Check::fail("path.chosen", error.to_string(), fix));
        }
    }
    Ok(())
}

impl Patient<'_> {
    fn wants_tcp(&self) -> Result<bool, Failure> {
        Ok(self.connection.transport()? == Some(TransportChoice::Tcp))
    }
}

fn attempt(
    builder: &ClientBuilder,
    way: &'static str,
    check: &'static str,
    choice: TransportChoice,
    adapters: &Adapters,
) -> (Path, Check) {
    let tried = builder.clone().transport(choice).connect().and_then(|client| {
        // The first trips are slower: they bring the way into the caches.
        let trips = (0..TRIPS).map(|_| client.round_trip()).collect::<Result<Vec<_>, _>>()?;
        let least = trips.into_iter().min().unwrap_or(Duration::ZERO);
        let why = match way {
            // Its own reason is that we asked for it.
            "tcp" => "requests to the server".to_owned(),
            _ => client.transport().reasons.join("; "),
        };
        Ok((least, why))
    });
    match tried {
        Ok((least, why)) => {
            let what = match way {
                "tcp" => format!("works, {} there and back", time(least)),
                "rdma" => format!("works, {} for a READ and two atomics: {why}", time(least)),
                _ => format!("works, {} for a look into the memory: {why}", time(least)),
            };
            let round_trip_us = Some(least.as_secs_f64() * 1e6);
            let path = Path { way, works: true, why, round_trip_us, chosen: false };
            (path, Check::ok(check, what))
        }
        Err(error) => {
            let why = reason(&error);
            let path =
                Path { way, works: false, why: why.clone(), round_trip_us: None, chosen: false };
            (path, missing(way, check, why, adapters))
        }
    }
}

/// The reason alone: that the way was asked for is our doing.
fn reason(error: &Error) -> String {
    match error {
        Error::Shm { why } => why.clone(),
        Error::Rdma { what } => what.clone(),
        error => error.to_string(),
    }
}

fn missing(way: &str, check: &'static str, why: String, adapters: &Adapters) -> Check {
    let unoffered = why.contains("does not offer it");
    let elsewhere = why.contains("another machine") || why.contains("another network namespace");
    match way {
        "shm" if elsewhere => Check::skipped(check, why),
        "shm" if unoffered => {
            Check::skipped(check, why).mended_by("farcell serve -v, without --no-shm")
        }
        "shm" => Check::warn(check, why, "farcell doctor -vv --transport shm"),
        "rdma" if unoffered && adapters.active => {
            Check::warn(check, why, "farcell serve -v --rdma auto")
        }
        "rdma" if !adapters.active => Check::skipped(check, why),
        "rdma" => Check::warn(check, why, "farcell doctor -vv --transport rdma"),
        _ => Check::fail(check, why, "farcell doctor -vv --transport tcp"),
    }
}
