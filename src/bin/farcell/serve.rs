//! `farcell serve`

use crate::args::{Spec, seconds};
use crate::connection::Connection;
use crate::failure::{Answer, Failure};
use crate::manager;
use crate::output::Output;
use crate::ready::{ReadyFd, ReadyFile};
use crate::signals;
use farcell::{Error, Key, Origin, RdmaChoice, Server};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

/// Run a server.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  farcell serve
  farcell serve --bind 10.0.0.1:7117 --array read_events:event:4x4
  farcell serve --bind 127.0.0.1:0 --ready-file addr    a free port, in a script
  farcell serve --state /dev/shm/farcell --snapshot ~/farcell --snapshot-every 60

Prints the addresses that it listens on. SIGTERM or SIGINT stops it: clients are
told that it is going away. A second signal kills it.

With --state everything is there again after the server was killed, unless the
machine went down. --snapshot is for that: if there is no state, the server
begins with the newest snapshot.

Without --authkey-file and FARCELL_AUTHKEY_FILE the key is the user's own,
~/.config/farcell/authkey, which is made if it does not exist. Clients of the
same user find it there. A key never goes on a command line.

JSON, one line when it is ready: {\"address\", \"listening\": [...], \"authkey_file\",
\"authkey_is_new\", \"pid\", \"rdma\", \"no_rdma\", \"domain\", \"origin\", \"life\",
\"restored_from\", \"metrics\": [...]}; address is the one to give to clients, rdma the device and port or
null, no_rdma then why, domain who changes the cells: cpu or hca, origin what it
began with: nothing, state or snapshot, life which one of that state it is or null,
restored_from the snapshot or null,
metrics where those are served.

With --metrics a line `metrics HOST:PORT` stands behind the address in the file of
--ready-file and in what --ready-fd gets.

Under systemd (Type=notify) the service manager is told when the server is ready,
by NOTIFY_SOCKET, and when it begins to stop.

Exit codes: 0 stopped by a signal, 2 usage, 4 refused (key file, array, state,
snapshot, also the last one), 5 any other failure, such as an address in use")]
pub struct Serve {
    /// Where to listen; port 0 takes a free one. Repeat for several [default:
    /// port 7117 of every address of this machine]
    #[arg(long, value_name = "HOST:PORT")]
    bind: Vec<String>,
    /// Listen on this port of every address of this machine
    #[arg(long, conflicts_with = "bind")]
    port: Option<u16>,
    /// A second key, whose clients can read and wait only
    #[arg(long, value_name = "PATH")]
    read_only_authkey_file: Option<PathBuf>,
    /// An array to create: event, counter, lock, barrier or semaphore. Repeat for
    /// several
    #[arg(long = "array", value_name = "NAME:KIND:ROWSxCOLS")]
    arrays: Vec<Spec>,
    /// Room for this many cells of 8 bytes [default: 262144, or that of the state
    /// or snapshot]
    #[arg(long, value_name = "CELLS")]
    capacity: Option<u32>,
    /// Room for the messages of slots, in bytes [default: half of this
    /// machine's memory]
    #[arg(long, value_name = "BYTES")]
    slot_bytes: Option<u64>,
    /// Event loops, a thread each [default: one for two cores]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// How long a session lives without a sign from its client [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    lease: Option<Duration>,
    /// How long a worker looks for further work before it sleeps; burns a core
    /// [default: 0]
    #[arg(long, value_name = "MICROSECONDS")]
    spin_us: Option<u32>,
    /// Most clients at a time [default: as many as the file limit allows]
    #[arg(long, value_name = "N")]
    max_clients: Option<usize>,
    /// Most waits that one session may have at a time, on four times as many cells
    /// [default: 65536]
    #[arg(long, value_name = "N")]
    max_waits: Option<usize>,
    /// Offer RDMA: auto (where a device works), off, or a device, which must
    /// work then [default: auto]
    #[arg(long, value_name = "auto|off|NAME[:PORT]", value_parser = rdma_choice)]
    rdma: Option<RdmaChoice>,
    /// With --tls require: offer RDMA all the same, which cannot be encrypted
    #[arg(long)]
    clear_rdma: bool,
    /// Let the CPU change the cells although the adapter could: one hot counter
    /// is faster there. RDMA clients still read by themselves
    #[arg(long)]
    cpu_domain: bool,
    /// Keep cells and messages in this folder on tmpfs (such as /dev/shm/farcell), made if
    /// it does not exist, and begin with what is in it
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Write a snapshot to this folder, on any file system, at the end, and
    /// begin with the newest one in it if there is no state. The last two stay
    #[arg(long, value_name = "DIR")]
    snapshot: Option<PathBuf>,
    /// Write a snapshot this often too
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "snapshot")]
    snapshot_every: Option<Duration>,
    /// Begin with this snapshot; DIR of --state must have no state yet
    #[arg(long, value_name = "FILE")]
    restore: Option<PathBuf>,
    /// Do not let clients on this machine work in the server's memory; they use
    /// the network as others do
    #[arg(long)]
    no_shm: bool,
    /// Serve metrics for Prometheus at http://HOST:PORT/metrics, and /healthz;
    /// port 0 takes a free one. Nobody is asked for a key there [default: none]
    #[arg(long, value_name = "HOST:PORT")]
    metrics: Option<String>,
    /// Write the address to this file, whole, when the server is ready; the
    /// file is removed at the end
    #[arg(long, value_name = "PATH")]
    ready_file: Option<PathBuf>,
    /// Write the address to this open file descriptor when the server is ready,
    /// and close it
    #[arg(long, value_name = "N")]
    ready_fd: Option<i32>,
}

#[derive(Serialize)]
struct Ready {
    address: String,
    listening: Vec<String>,
    authkey_file: PathBuf,
    authkey_is_new: bool,
    pid: u32,
    rdma: Option<String>,
    no_rdma: Option<String>,
    domain: String,
    origin: &'static str,
    life: Option<u32>,
    restored_from: Option<PathBuf>,
    metrics: Vec<String>,
}

impl Ready {
    /// What the ready file holds: the address, and where metrics are, if they are,
    /// in lines behind it.
    fn told(&self) -> String {
        let metrics = self.metrics.iter().map(|addr| format!("\nmetrics {addr}"));
        std::iter::once(self.address.clone()).chain(metrics).collect()
    }
}

fn rdma_choice(text: &str) -> Result<RdmaChoice, String> {
    match text {
        "" => Err("give auto, off or the name of a device".to_owned()),
        "off" => Ok(RdmaChoice::Off),
        "auto" => Ok(RdmaChoice::Auto),
        name => Ok(RdmaChoice::Device(name.to_owned())),
    }
}

impl Serve {
    /// Runs the command.
    pub fn run(self, connection: &Connection, out: &Output) -> Result<Answer, Failure> {
        let ready_fd = self.ready_fd.map(ReadyFd::claim).transpose()?;
        let (ended, end) = mpsc::channel();
        signals::on_end(move |signal| {
            // Nobody listens any more when the server could not start.
            let _ = ended.send(signal);
        })?;

        let asked = self.asks_for_rdma();
        let (key, authkey_file, authkey_is_new) = find_key(connection.authkey_file.clone())?;
        let server = self.start(key, connection)?;
        let (origin, life, restored_from) = match server.origin() {
            Origin::Nothing => ("nothing", self.state.as_ref().map(|_| 1), None),
            Origin::State { life } => ("state", Some(*life), None),
            Origin::Snapshot(path) => {
                ("snapshot", self.state.as_ref().map(|_| 1), Some(path.clone()))
            }
        };
        let ready = Ready {
            address: server.address(),
            listening: server.local_addrs().iter().map(ToString::to_string).collect(),
            authkey_file,
            authkey_is_new,
            pid: std::process::id(),
            rdma: server.rdma_device(),
            no_rdma: server.no_rdma().map(str::to_owned),
            domain: server.domain().to_string(),
            origin,
            life,
            restored_from,
            metrics: server.metrics_addrs().iter().map(ToString::to_string).collect(),
        };
        let told = ready.told();
        let ready_file = self.ready_file.map(|path| ReadyFile::write(&path, &told)).transpose()?;
        ready_fd.map_or(Ok(()), |fd| fd.write(&told))?;
        manager::is_ready(&ready.address);
        out.print(describe(&ready, asked), &ready)?;

        // Fails only if the thread that sends is gone, and then we stop too.
        let signal = end.recv().unwrap_or_default();
        tracing::info!(signal, clients = server.sessions(), "stopping");
        manager::is_stopping(server.sessions());
        drop(ready_file);
        server.stop()?;
        Ok(Answer::Yes)
    }

    /// Whether someone will want to know why there is no RDMA: it was asked for,
    /// or there is an adapter.
    fn asks_for_rdma(&self) -> bool {
        match self.rdma {
            Some(RdmaChoice::Off) => false,
            Some(_) => true,
            None => std::fs::read_dir("/sys/class/infiniband")
                .is_ok_and(|mut devices| devices.next().is_some()),
        }
    }

    fn start(&self, key: Key, connection: &Connection) -> Result<Server, Failure> {
        let mut builder = Server::builder(key.clone());
        for bind in &self.bind {
            builder = builder.bind(bind);
        }
        for Spec { name, kind, rows, cols, param } in &self.arrays {
            builder = builder.array_with(name, *kind, *rows, *cols, *param);
        }
        if let Some(port) = self.port {
            builder = builder.bind(format!("[::]:{port}"));
        }
        if let Some(path) = &self.read_only_authkey_file {
            let read_only = farcell::load_key(path)?;
            if read_only.is(&key) {
                return Err(Failure::Usage(format!(
                    "the read-only key in {} is the full key; make another one: (umask 077; head -c 32 /dev/urandom > FILE)",
                    path.display()
                )));
            }
            builder = builder.read_only_key(read_only);
        }
        if let Some(cells) = self.capacity {
            builder = builder.capacity(cells);
        }
        if let Some(folder) = &self.state {
            builder = builder.state(folder);
        }
        if let Some(folder) = &self.snapshot {
            builder = builder.snapshots(folder);
        }
        if let Some(pause) = self.snapshot_every {
            builder = builder.snapshot_every(pause);
        }
        if let Some(snapshot) = &self.restore {
            builder = builder.restore(snapshot);
        }
        if let Some(bytes) = self.slot_bytes {
            builder = builder.slot_bytes(bytes);
        }
        if let Some(choice) = &self.rdma {
            builder = builder.rdma(choice.clone());
        }
        if let Some(addr) = &self.metrics {
            builder = builder.metrics(addr);
        }
        if self.no_shm {
            builder = builder.shared_memory(false);
        }
        if let Some(tls) = connection.tls()? {
            builder = builder.tls(tls);
        }
        if self.clear_rdma {
            builder = builder.clear_rdma();
        }
        if self.cpu_domain {
            builder = builder.cpu_domain();
        }
        if let Some(workers) = self.workers {
            builder = builder.workers(workers);
        }
        if let Some(lease) = self.lease {
            builder = builder.lease(lease);
        }
        if let Some(spin) = self.spin_us {
            builder = builder.spin(Duration::from_micros(spin.into()));
        }
        if let Some(most) = self.max_waits {
            builder = builder.max_waits(most);
        }
        if let Some(most) = self.max_clients {
            builder = builder.max_clients(most);
        }
        builder.start().map_err(|error| match error {
            // It names an argument.
            Error::BadSetting { what } => Failure::Usage(what),
            Error::BadAddress { .. } => Failure::Usage(error.to_string()),
            error => error.into(),
        })
    }
}

/// The key, its file, and whether it was made just now. A file that someone
/// named must exist; the user's own is made.
fn find_key(given: Option<PathBuf>) -> Result<(Key, PathBuf, bool), Failure> {
    let from_env = || std::env::var_os("FARCELL_AUTHKEY_FILE").filter(|v| !v.is_empty());
    match given.or_else(|| from_env().map(PathBuf::from)) {
        Some(path) => Ok((farcell::load_key(&path)?, path, false)),
        None => {
            let path = farcell::default_key_path()?;
            let (key, is_new) = farcell::load_or_create_key(&path)?;
            Ok((key, path, is_new))
        }
    }
}

fn describe(ready: &Ready, asked: bool) -> String {
    let mut text = String::new();
    for addr in &ready.listening {
        text.push_str(&format!("listening on {addr}\n"));
    }
    if let Some(place) = &ready.rdma {
        text.push_str(&format!("offering RDMA on {place}, domain {}\n", ready.domain));
    }
    if let Some(why) = ready.no_rdma.as_ref().filter(|_| asked) {
        text.push_str(&format!("no RDMA: {why}\n"));
    }
    for addr in &ready.metrics {
        text.push_str(&format!("metrics at http://{addr}/metrics\n"));
    }
    match (ready.origin, ready.life, &ready.restored_from) {
        ("state", Some(life), _) => {
            text.push_str(&format!("begun from its state, of which this is life {life}\n"));
        }
        (_, _, Some(path)) => text.push_str(&format!("begun from {}\n", path.display())),
        _ => {}
    }
    let made = if ready.authkey_is_new { " (new, made just now)" } else { "" };
    text.push_str(&format!("key file {}{made}\n", ready.authkey_file.display()));
    text.push_str(&format!("clients use --addr {0} or FARCELL_ADDR={0}\n", ready.address));
    text
}
