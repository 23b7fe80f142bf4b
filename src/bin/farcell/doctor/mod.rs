//! `farcell doctor`: one file a group of checks.

mod addresses;
mod check;
mod found;
mod host;
mod key;
mod lease;
mod paths;
mod rdma;
mod reach;

use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::output::Output;
use check::{Check, Report};
use farcell::{Client, ClientBuilder, diagnose};
use found::Target;

/// Say what works between here and a server, what does not, and what mends it.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farcell doctor                    the server that a program without an address finds
  farcell doctor node0:7117 --json

One line a check: its verdict (ok, warn, FAIL, skipped), its name, what was found,
and behind `->` what mends it. Nothing is changed that belongs to anyone: the
server sees a few sessions come and go, and RDMA is tried on a word that is no cell.
Without a server it checks this machine.

Checks:
  env.variables                  variables that mean nothing
  found.argument, found.step     where the server is looked for, and what is there
  server.told                    whether other nodes can dial this address
  server.address, server.port, server.answer
                                 the name, the port, and what speaks there
  key.file, key.mode, key.right, key.access
                                 the key: is it there, private, the server's, the
                                 read-only one
  server.domain                  who changes the cells there
  lease.clock, lease.heartbeat, lease.members
                                 time, against the lease
  host.boot, host.container, host.devices, host.cgroup, host.seccomp
  memlock.client, memlock.server locked memory against what is needed
  rdma.library, rdma.provider, rdma.node, rdma.device, rdma.port, rdma.fork
  rdma.gid                       an address, by data moved through the adapter
  rdma.atomics                   its atomics, byte order, and their domain
  rdma.gid-server                the same address, tried with the server
  path.shm, path.rdma, path.tcp  each way, tried
  path.chosen                    which one a client takes, and why

JSON, one line: {\"server\", \"found_by\", \"checks\": [{\"check\", \"subject\", \"verdict\",
\"what\", \"fix\"}], \"paths\": [{\"way\", \"works\", \"why\", \"round_trip_us\", \"chosen\"}],
\"fine\"}; verdict is ok, warn, fail or skipped; server, found_by, subject, fix and
round_trip_us can be null. These names stay; others may be added.

Exit codes: 0 nothing is wrong (warnings count as nothing), 1 something is wrong,
2 usage, 5 any other failure")]
pub struct Doctor {
    /// The server; without it, the one that a program without an address finds
    #[arg(value_name = "HOST:PORT")]
    server: Option<String>,
    /// Also stay connected for longer than the lease, to see that heartbeats keep it
    #[arg(long)]
    hold: bool,
}

/// What the checks work on.
struct Patient<'a> {
    connection: &'a Connection,
    target: Option<Target>,
    /// A session over TCP, if there is one.
    client: Option<Client>,
}

impl Patient<'_> {
    /// Settings of a client of the server. `None`: there is none.
    fn builder(&self) -> Result<Option<ClientBuilder>, Failure> {
        let Some(target) = &self.target else {
            return Ok(None);
        };
        let builder = self.connection.builder()?.addr(&target.addr);
        Ok(Some(match &target.job {
            Some(job) => builder.job(job),
            None => builder,
        }))
    }
}

impl Doctor {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let given = match (&self.server, &connection.addr) {
            (Some(server), Some(addr)) if server != addr => {
                return Err(Failure::Usage(format!(
                    "two servers were given, {server} and --addr {addr}; leave one out"
                )));
            }
            (Some(server), _) => Some(server.clone()),
            (None, addr) => addr.clone(),
        };
        // What is wrong with these is the command line's, not the machine's.
        connection.transport()?;
        let mut report = Report::default();
        variables(&mut report);
        let target = found::find(given, &mut report);
        report.server = target.as_ref().map(|target| target.addr.clone());
        report.found_by = target.as_ref().map(|target| target.by);
        let mut patient = Patient { connection, target, client: None };
        let answers = reach::look(&patient, &mut report);
        let key = key::file(&patient, &mut report)?;
        patient.client = key::right(&patient, answers, key, &mut report)?;
        lease::look(&patient, self.hold, &mut report);
        host::look(&patient, &mut report);
        let adapters = rdma::look(&patient, &mut report)?;
        paths::look(&patient, &adapters, &mut report)?;
        report.fine = report.is_fine();
        out.print(report.text(), &report)?;
        Ok(Answer::from(report.fine))
    }
}

fn variables(report: &mut Report) {
    let unknown = diagnose::unknown_variables();
    if unknown.is_empty() {
        report.add(Check::ok("env.variables", "every FARCELL_ variable has a meaning"));
    }
    for what in unknown {
        let name = what.split_whitespace().find(|word| word.starts_with("FARCELL_"));
        let fix = format!("unset {}", name.unwrap_or_default());
        report.add(Check::warn("env.variables", what, fix));
    }
}
