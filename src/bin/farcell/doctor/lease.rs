//! Time, against the lease: a session ends when its server hears nothing for so
//! long.

use super::Patient;
use super::check::{Check, Report, time};
use farcell::{Access, Client};
use std::time::{Duration, Instant};

const TRIPS: usize = 8;

/// Looks at the clock on both ends.
pub fn look(patient: &Patient<'_>, hold: bool, report: &mut Report) {
    let Some(client) = &patient.client else {
        for check in ["lease.clock", "lease.heartbeat", "lease.members"] {
            report.add(Check::skipped(check, "there is no session"));
        }
        return;
    };
    match clock(client) {
        Ok((check, lease)) => {
            report.add(check);
            report.add(if hold {
                heartbeat(client, lease)
            } else {
                Check::skipped("lease.heartbeat", format!("takes more than {}", time(lease)))
                    .mended_by("farcell doctor --hold")
            });
            report.add(members(client, lease));
        }
        Err(error) => {
            report.add(Check::fail("lease.clock", error.to_string(), "farcell doctor -vv"));
        }
    }
}

fn clock(client: &Client) -> Result<(Check, Duration), farcell::Error> {
    let lease = client.info()?.lease;
    let (mut slowest, mut late) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..TRIPS {
        slowest = slowest.max(client.round_trip()?);
        // A machine that is stopped or overloaded gives no sign in time.
        let (nap, begun) = (Duration::from_millis(5), Instant::now());
        std::thread::sleep(nap);
        late = late.max(begun.elapsed().saturating_sub(nap));
    }
    let what = format!(
        "lease {}, a sign every {}; the slowest of {TRIPS} round trips took {}, and this machine woke up {} late at most",
        time(lease),
        time(lease / 3),
        time(slowest),
        time(late)
    );
    // Two signs may be lost or late before a session is.
    let check = if slowest.max(late) > lease / 6 {
        let enough = (slowest.max(late) * 20).as_secs() + 1;
        Check::warn("lease.clock", what, format!("farcell serve --lease {enough}"))
    } else {
        Check::ok("lease.clock", what)
    };
    Ok((check, lease))
}

/// Stays for longer than the lease without a request, then asks the server how
/// long it has known this session.
fn heartbeat(client: &Client, lease: Duration) -> Check {
    let name = format!("farcell doctor {}", std::process::id());
    match client.info() {
        Ok(info) if info.access == Access::ReadOnly => {
            return Check::skipped("lease.heartbeat", "a read-only session cannot be named");
        }
        Err(error) => return Check::fail("lease.heartbeat", error.to_string(), "farcell ls"),
        Ok(_) => {}
    }
    if let Err(error) = client.join(&name) {
        return Check::fail("lease.heartbeat", error.to_string(), "farcell members");
    }
    let silent = lease + lease / 4;
    std::thread::sleep(silent);
    let known = client
        .members()
        .map(|members| members.into_iter().find(|member| member.name.as_deref() == Some(&name)));
    match known {
        Ok(Some(member)) if member.age >= silent => Check::ok(
            "lease.heartbeat",
            format!("the session has outlived its lease of {} by heartbeats alone", time(lease)),
        ),
        Ok(_) => Check::fail(
            "lease.heartbeat",
            format!("the session was lost within {}: heartbeats do not arrive", time(silent)),
            "farcell serve --lease 60",
        ),
        Err(error) => Check::fail("lease.heartbeat", error.to_string(), "farcell members"),
    }
}

/// Whether others are about to lose theirs.
fn members(client: &Client, lease: Duration) -> Check {
    let members = match client.members() {
        Ok(members) => members,
        Err(error) => {
            return Check::fail("lease.members", error.to_string(), "farcell members");
        }
    };
    let silent: Vec<String> = members
        .iter()
        .filter(|member| member.last_heard > lease / 3 * 2)
        .map(|member| {
            let name = member.name.clone().unwrap_or_else(|| format!("session {}", member.seat));
            format!("{name} for {}", time(member.last_heard))
        })
        .collect();
    if silent.is_empty() {
        let what = match members.len() {
            1 => "the one session that there is has given a sign in time".to_owned(),
            all => format!("all {all} sessions have given a sign in time"),
        };
        return Check::ok("lease.members", what);
    }
    let what = format!("silent, and soon lost: {}", silent.join(", "));
    Check::warn("lease.members", what, "farcell members")
}
