//! Finding the server when a program names none.
//!
//! In this order: `FARCELL_ADDR`; the address file; the launcher that started
//! this process, whose rank 0 serves; the server of this user on this machine;
//! a private server inside of this process. Each step is logged, and
//! `explain` says in words what it found.

mod steps;

pub use steps::{Step, explain, steps};

use super::secure::ENV_TLS;
use super::{Client, ClientBuilder, ENV_ADDR};
use crate::addr::DEFAULT_PORT;
use crate::auth::{Key, Tls};
use crate::engine::lock;
use crate::error::{Error, Result};
use crate::keyfile;
use crate::server::{RdmaChoice, Server};
use crate::tls;
use farcell_sys::fork::{self, Generation};
use sha2::{Digest, Sha256};
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Names a file that holds the server's address.
pub const ENV_ADDR_FILE: &str = "FARCELL_ADDR_FILE";
/// Names the job, in place of what the launcher calls it.
pub const ENV_JOB: &str = "FARCELL_JOB";
/// Names the folder in which rank 0 leaves its server's address.
pub const ENV_JOB_DIR: &str = "FARCELL_JOB_DIR";

/// How long the other ranks wait for rank 0's server.
const PATIENCE: Duration = Duration::from_secs(120);

/// A process that a launcher started together with others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// `torchrun`, `Open MPI`, `Hydra` or `srun`.
    pub launcher: &'static str,
    /// Which of them this is.
    pub rank: usize,
    /// How many they are.
    pub size: usize,
    /// Whether all of them run on this machine.
    pub one_machine: bool,
    /// What tells this launch from every other one.
    pub job: String,
    /// The host on which rank 0 runs, if the launcher says.
    pub first_host: Option<String>,
}

type Get<'a> = &'a dyn Fn(&str) -> Option<String>;

fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Launch {
    /// The launch that the environment tells of, if any does.
    #[must_use]
    pub fn from_env() -> Option<Launch> {
        Launch::detect(&environment)
    }

    fn detect(get: Get<'_>) -> Option<Launch> {
        let number = |name: &str| get(name).and_then(|text| text.parse::<usize>().ok());
        let mut launch = if let (Some(run), Some(rank), Some(size)) =
            (get("TORCHELASTIC_RUN_ID"), number("RANK"), number("WORLD_SIZE"))
        {
            // The port is that of torchrun's own store: good for telling runs
            // apart, and never ours to listen on.
            let restart = get("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
            let host = get("MASTER_ADDR");
            let port = get("MASTER_PORT").unwrap_or_default();
            let at = host.clone().unwrap_or_default();
            Launch {
                launcher: "torchrun",
                rank,
                size,
                one_machine: number("LOCAL_WORLD_SIZE") == Some(size),
                job: format!("torchrun {run} restart {restart} at {at}:{port}"),
                first_host: host,
            }
        } else if let (Some(rank), Some(size)) =
            (number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE"))
        {
            let names = ["OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"];
            let name = names.iter().find_map(|name| get(name)).unwrap_or_default();
            Launch {
                launcher: "Open MPI",
                rank,
                size,
                one_machine: number("OMPI_COMM_WORLD_LOCAL_SIZE") == Some(size),
                job: format!("Open MPI {name}"),
                first_host: None,
            }
        } else if let (Some(rank), Some(size)) = (number("PMI_RANK"), number("PMI_SIZE")) {
            let one_machine = number("MPI_LOCALNRANKS") == Some(size);
            let names = ["SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "PMI_JOBID"];
            let name = names.iter().find_map(|name| get(name)).or_else(|| {
                // All ranks of one machine have the same proxy for a parent.
                one_machine
                    .then(|| format!("below process {}", std::os::unix::process::parent_id()))
            });
            let step = get("SLURM_STEP_ID").unwrap_or_default();
            Launch {
                launcher: "Hydra",
                rank,
                size,
                one_machine,
                job: name.map(|name| format!("Hydra {name}.{step}")).unwrap_or_default(),
                first_host: None,
            }
        } else if let (Some(rank), Some(size), Some(job), Some(step)) = (
            number("SLURM_PROCID"),
            number("SLURM_STEP_NUM_TASKS").or_else(|| number("SLURM_NTASKS")),
            get("SLURM_JOB_ID"),
            get("SLURM_STEP_ID"),
        ) {
            let nodes = number("SLURM_STEP_NUM_NODES").or_else(|| number("SLURM_NNODES"));
            let restart = get("SLURM_RESTART_COUNT").unwrap_or_default();
            let cluster = get("SLURM_CLUSTER_NAME").unwrap_or_default();
            Launch {
                launcher: "srun",
                rank,
                size,
                one_machine: nodes == Some(1),
                job: format!("Slurm {cluster} {job}.{step} restart {restart}"),
                first_host: None,
            }
        } else {
            return None;
        };
        if let Some(job) = get(ENV_JOB) {
            launch.job = job;
        }
        Some(launch)
    }

    /// Where rank 0 leaves its address: in the folder that `FARCELL_JOB_DIR`
    /// names, or `farcell/jobs` in `$XDG_STATE_HOME` or `~/.local/state`. On a
    /// cluster with a shared home every node finds it there.
    ///
    /// # Errors
    /// No folder is known, or the job has no name.
    pub fn address_file(&self) -> Result<PathBuf> {
        if self.job.is_empty() {
            return Err(Error::BadSetting {
                what: format!(
                    "{} gives this job no name that every node knows; set {ENV_JOB} to one",
                    self.launcher
                ),
            });
        }
        let named = environment(ENV_JOB_DIR).map(PathBuf::from);
        let state = || {
            let state = environment("XDG_STATE_HOME").map(PathBuf::from);
            let home = || Some(PathBuf::from(environment("HOME")?).join(".local/state"));
            state.or_else(home).map(|dir| dir.join("farcell").join("jobs"))
        };
        let dir = named.or_else(state).ok_or_else(|| Error::BadSetting {
            what: format!("no folder for the address of rank 0: set HOME or {ENV_JOB_DIR}"),
        })?;
        let hash = Sha256::digest(self.job.as_bytes());
        let name: String = hash.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
        Ok(dir.join(format!("{name}.addr")))
    }

    /// Where rank 0's server listens: on this machine alone if all ranks are
    /// here. Port 0 takes a free one.
    #[must_use]
    pub fn bind(&self) -> &'static str {
        if self.one_machine { "127.0.0.1:0" } else { "[::]:0" }
    }

    /// The address of rank 0's server as the other ranks reach it.
    #[must_use]
    pub fn reachable(&self, server: &Server) -> String {
        let port = server.local_addrs().first().map_or(0, std::net::SocketAddr::port);
        match &self.first_host {
            _ if self.one_machine => format!("127.0.0.1:{port}"),
            Some(host) if host.contains(':') => format!("[{host}]:{port}"),
            Some(host) => format!("{host}:{port}"),
            None => server.address(),
        }
    }
}

/// Leaves an address where the other ranks look, whole or not at all.
///
/// # Errors
/// [`Error::Os`] when it cannot be written.
pub fn publish(path: &Path, address: &str) -> Result<()> {
    let failed = |e| Error::os(format!("writing {}", path.display()), e);
    if let Some(dir) = path.parent() {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
        made.map_err(failed)?;
    }
    let draft = path.with_extension(format!("{}.draft", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&draft)
        .and_then(|mut file| writeln!(file, "{address}"))
        .and_then(|()| std::fs::rename(&draft, path));
    written.map_err(failed)
}

/// What is no shorter is no address.
const LONGEST_ADDRESS: u64 = 512;

/// The address in a file, if there is one. Looks no further than an address can be
/// long, and at nothing that is no file: a pipe would have us wait, and a device
/// need not end.
#[must_use]
pub fn read_address(path: &Path) -> Option<String> {
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path).ok()?.take(LONGEST_ADDRESS).read_to_end(&mut bytes).ok()?;
    let line = std::str::from_utf8(bytes.split(|&byte| byte == b'\n').next()?).ok()?.trim();
    (!line.is_empty() && (line.len() as u64) < LONGEST_ADDRESS).then(|| line.to_owned())
}

/// The address file that the environment names, or the user's own,
/// `farcell/address` beside the key.
#[must_use]
pub fn named_address_file() -> Option<PathBuf> {
    environment(ENV_ADDR_FILE)
        .map(PathBuf::from)
        .or_else(|| Some(keyfile::default_path().ok()?.with_file_name("address")))
}

/// A server that this process runs because nobody named one.
struct Served {
    born: Generation,
    job: String,
    address: String,
    key: Key,
    /// Runs until the process ends.
    _server: Server,
}

static SERVED: Mutex<Vec<&'static Served>> = Mutex::new(Vec::new());

/// Whether the server that nobody named encrypts: as the environment says, so that
/// who requires it is not refused by a server of its own.
fn served_tls() -> Result<Tls> {
    let said = environment(ENV_TLS).map(|text| text.parse()).transpose();
    let tls = said.map_err(|why| Error::BadSetting { what: format!("{ENV_TLS}: {why}") })?;
    Ok(match tls.unwrap_or(Tls::Off) {
        Tls::Auto if !tls::IS_BUILT => Tls::Off,
        tls => tls,
    })
}

/// The server of this process for a job, started if there is none.
fn serve(
    job: &str,
    bind: &str,
    key: Key,
    reachable: impl Fn(&Server) -> String,
) -> Result<&'static Served> {
    let mut all = lock(&SERVED);
    let now = fork::generation();
    if let Some(known) = all.iter().find(|s| s.job == job && s.born == now) {
        return Ok(known);
    }
    let builder = Server::builder(key.clone()).bind(bind).job(job);
    // An adapter has nothing to do for clients of this machine.
    let rdma = if bind.starts_with("127.") { RdmaChoice::Off } else { RdmaChoice::Auto };
    let server = builder.rdma(rdma).tls(served_tls()?).start()?;
    let address = reachable(&server);
    // It is never dropped, as a static is not: a child that was forked must
    // not wait for threads that it does not have.
    let served = Box::leak(Box::new(Served {
        born: now,
        job: job.to_owned(),
        address,
        key,
        _server: server,
    }));
    all.push(served);
    Ok(served)
}

impl Client {
    /// Connects to the server that is found in the first of these places:
    /// `FARCELL_ADDR`; the file that `FARCELL_ADDR_FILE` names, or
    /// `~/.config/farcell/address`; the launcher that started this process
    /// (torchrun, Open MPI, Hydra, srun), where rank 0 serves on a free port and
    /// the others find it by a file in a shared folder (see
    /// [`Launch::address_file`]); this user's server at
    /// `localhost:7117`; and otherwise a private server inside of this process.
    /// In a launch it blocks until rank 0 serves, for 2 minutes at most.
    ///
    /// # Errors
    /// As [`ClientBuilder::connect`] and
    /// [`ServerBuilder::start`](crate::ServerBuilder::start);
    /// [`Error::OtherJob`].
    pub fn from_env() -> Result<Client> {
        Client::builder().connect_from_env()
    }
}

impl ClientBuilder {
    /// As [`Client::from_env`], with these settings. An address among them is
    /// used as it is.
    ///
    /// # Errors
    /// As [`Client::from_env`].
    pub fn connect_from_env(self) -> Result<Client> {
        connect(self)
    }

    /// The key with which this process serves: that of the settings or of the
    /// file, which is made if it is the user's own.
    fn key_to_serve(&self) -> Result<Key> {
        match (&self.key, &self.key_file) {
            (Some((key, _)), _) => Ok(key.clone()),
            (None, Some(path)) => keyfile::load(path),
            (None, None) => keyfile::load_or_create(&keyfile::path_from_env()?).map(|(key, _)| key),
        }
    }
}

/// Connects to the server that these steps find.
fn connect(builder: ClientBuilder) -> Result<Client> {
    if let Some(address) = &builder.addr {
        tracing::info!(target: "farcell::launch", address, "the server that the program named");
        return builder.connect();
    }
    if environment(ENV_ADDR).is_some() {
        tracing::info!(target: "farcell::launch", "the server that {ENV_ADDR} names");
        return builder.connect();
    }
    if let Some(path) = named_address_file()
        && let Some(address) = read_address(&path)
    {
        tracing::info!(target: "farcell::launch", path = %path.display(), address, "the server that the address file names");
        return builder.addr(address).connect();
    }
    if let Some(launch) = Launch::from_env() {
        tracing::info!(target: "farcell::launch", ?launch, "started by a launcher");
        return among_others(builder, &launch);
    }
    match builder.clone().addr(format!("localhost:{DEFAULT_PORT}")).connect() {
        Ok(client) => return Ok(client),
        Err(error) => {
            tracing::info!(target: "farcell::launch", %error, "no server of this user on this machine")
        }
    }
    let mut random = [0; 32];
    getrandom::fill(&mut random).map_err(|e| Error::os("asking for random numbers", e.into()))?;
    let served = serve("", "127.0.0.1:0", Key::new(random)?, Server::address)?;
    tracing::info!(target: "farcell::launch", address = served.address, "a private server inside of this process");
    builder.addr(served.address.clone()).key(served.key.clone()).connect()
}

/// Connects as one of the processes of a launch.
fn among_others(builder: ClientBuilder, launch: &Launch) -> Result<Client> {
    let path = launch.address_file()?;
    let builder = builder.job(launch.job.clone());
    let try_it = || Some(builder.clone().addr(read_address(&path)?).connect());
    if launch.rank == 0 {
        // A child of rank 0 has its environment, and must not serve again.
        if let Some(Ok(client)) = try_it() {
            return Ok(client);
        }
        let key = builder.key_to_serve()?;
        let served = serve(&launch.job, launch.bind(), key.clone(), |s| launch.reachable(s))?;
        publish(&path, &served.address)?;
        tracing::info!(target: "farcell::launch", address = served.address, path = %path.display(), "rank 0 serves");
        return builder.addr(served.address.clone()).key(key).connect();
    }
    let end = Instant::now() + PATIENCE;
    loop {
        // What is there can be left over from an earlier job: as long as it
        // does not lead to this one's server, it may be written anew.
        let error = match try_it() {
            Some(Ok(client)) => return Ok(client),
            Some(Err(error)) => error,
            None => Error::Unreachable {
                addr: path.display().to_string(),
                why: "rank 0 has not left its address there; does it connect as well, and is the folder shared between the nodes?".to_owned(),
            },
        };
        if Instant::now() >= end {
            return Err(error);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn detect(set: &[(&str, &str)]) -> Option<Launch> {
        let set: HashMap<&str, &str> = set.iter().copied().collect();
        Launch::detect(&|name| set.get(name).map(|v| (*v).to_owned()))
    }

    #[test]
    fn launchers_are_told_apart() {
        assert_eq!(detect(&[]), None);
        // A shell of a Slurm job that srun did not start is one process.
        assert_eq!(
            detect(&[("SLURM_PROCID", "0"), ("SLURM_JOB_ID", "7"), ("SLURM_NTASKS", "4")]),
            None
        );
        let torchrun = [
            ("TORCHELASTIC_RUN_ID", "run"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
            ("SLURM_PROCID", "0"),
        ];
        let launch = detect(&torchrun).unwrap();
        assert_eq!((launch.launcher, launch.rank, launch.size), ("torchrun", 2, 4));
        assert_eq!((launch.one_machine, launch.bind()), (false, "[::]:0"));
        assert_eq!(launch.first_host.as_deref(), Some("node0"));
        let mut restarted = torchrun;
        restarted[1].1 = "2";
        assert_ne!(detect(&restarted).unwrap().job, launch.job);

        let mpi = detect(&[
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("OMPI_MCA_ess_base_jobid", "99"),
        ])
        .unwrap();
        assert_eq!((mpi.launcher, mpi.rank, mpi.bind()), ("Open MPI", 3, "127.0.0.1:0"));
        let hydra = detect(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]).unwrap();
        assert_eq!((hydra.launcher, hydra.rank), ("Hydra", 1));
        assert!(hydra.address_file().unwrap_err().to_string().contains(ENV_JOB));
        let srun = detect(&[
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_JOB_ID", "7"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_STEP_NUM_NODES", "2"),
        ])
        .unwrap();
        assert_eq!((srun.launcher, srun.rank, srun.one_machine), ("srun", 1, false));
        let named = detect(&[("PMI_RANK", "1"), ("PMI_SIZE", "2"), (ENV_JOB, "mine")]).unwrap();
        assert_eq!(named.job, "mine");
    }

    #[test]
    fn an_address_is_published_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b.addr");
        assert_eq!(read_address(&path), None);
        publish(&path, "node0:1").unwrap();
        publish(&path, "node0:2").unwrap();
        assert_eq!(read_address(&path).as_deref(), Some("node0:2"));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        std::fs::write(&path, "\n").unwrap();
        assert_eq!(read_address(&path), None);
    }
}
