//! The server: listeners, event loops, and the engine behind them.

mod admission;
mod alarm;
mod bulk;
mod connection;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod keep;
mod limits;
mod listen;
mod loopback;
mod maker;
mod meter;
#[cfg(feature = "metrics")]
mod metrics;
mod pace;
mod pipe;
mod rdma;
mod secure;
mod shm;
mod strangers;
mod traffic;
mod worker;

pub use listen::DEFAULT_BIND;
pub(crate) use rdma::NOTE_BYTES;
pub(crate) use secure::CLEAR;
pub(crate) use shm::{DESK_PLACES, WATCHED_IN_WORD, address_of, boot_id, named_socket, random};

use crate::auth::{Domain, Job, Key, Keys, Tls};
use crate::catalog::{CatalogError, Form, Kind};
use crate::engine::{Counts, Engine, Roster};
use crate::error::{Error, Result};
use crate::layout::{MAX_CELLS, Shape};
use crate::rdma::device_name;
use crate::segment::Segment;
use crate::state::{Beginning, Origin};
use crate::tls::Acceptor;
use crate::verbs;
use crossbeam::utils::CachePadded;
use farcell_sys::fork::{self, Generation};
use keep::{Keep, Keeper};
use limits::{half_of_memory, raise_file_limit};
use loopback::ServerActor;
use meter::{Meter, Tolls};
use pace::Pace;
use rdma::Rdma;
use shm::Shm;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use worker::{Mailbox, Worker};

/// Cells of a segment unless told otherwise: 2 MiB of them.
pub const DEFAULT_CAPACITY: u32 = 262_144;

/// How long a session lives without a sign from its client, unless told
/// otherwise.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(10);

/// What all workers of a server share.
#[derive(Debug)]
struct Shared {
    engine: Engine<ServerActor>,
    rdma: Option<Arc<Rdma>>,
    /// Why RDMA is not offered where it is not.
    no_rdma: String,
    /// What clients on this machine get; why not, otherwise.
    shm: Result<Arc<Shm>, String>,
    domain: Domain,
    mailboxes: Vec<Mailbox>,
    keys: Keys,
    job: Job,
    tls: Tls,
    /// What it takes to encrypt, unless that is off.
    acceptor: Option<Acceptor>,
    started: Instant,
    /// The same by the clock on the wall.
    #[cfg(feature = "metrics")]
    began: std::time::SystemTime,
    pace: Pace,
    incarnation: u64,
    capacity: u32,
    lease: Duration,
    spin: Duration,
    most_clients: usize,
    /// Connections of clients that have lapsed and not let go yet.
    lapsed: AtomicUsize,
    most_strangers: usize,
    /// What each worker has counted: by the engine, and by itself.
    counts: Vec<Arc<CachePadded<Counts>>>,
    meters: Vec<CachePadded<Meter>>,
    tolls: Tolls,
    /// Threads that bring up RDMA for clients right now.
    bringing_up: AtomicUsize,
}

impl Shared {
    /// The time that the engine is told, now and at a moment.
    fn now(&self) -> Duration {
        self.time(Instant::now())
    }

    fn time(&self, at: Instant) -> Duration {
        self.pace.time(at.saturating_duration_since(self.started))
    }
}

/// How a server is set up. Made by [`Server::builder`].
#[derive(Clone, Debug)]
pub struct ServerBuilder {
    binds: Vec<String>,
    keys: Keys,
    job: Job,
    tls: Tls,
    clear_rdma: bool,
    capacity: Option<u32>,
    keep: Keep,
    workers: Option<usize>,
    lease: Duration,
    spin: Duration,
    max_clients: Option<usize>,
    rdma: RdmaChoice,
    cpu_domain: bool,
    shared_memory: bool,
    break_domain_rule: bool,
    arrays: Vec<(String, Kind, usize, usize, u64)>,
    slot_bytes: Option<u64>,
    #[cfg(feature = "metrics")]
    metrics: Option<String>,
    max_waits: Option<usize>,
}

/// Whether a server offers RDMA.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RdmaChoice {
    /// Not at all.
    Off,
    /// If there is a device with a port that works.
    #[default]
    Auto,
    /// On this device, `NAME` or `NAME:PORT`, or the server does not start.
    Device(String),
}

impl ServerBuilder {
    /// Whether to offer RDMA; where a device works unless told otherwise.
    #[must_use]
    pub fn rdma(mut self, choice: RdmaChoice) -> ServerBuilder {
        self.rdma = choice;
        self
    }

    /// Lets the server's CPU change the cells also where the adapter could: one
    /// hot counter is faster there. RDMA clients still read by themselves.
    #[must_use]
    pub fn cpu_domain(mut self) -> ServerBuilder {
        self.cpu_domain = true;
        self
    }

    /// Whether clients on this machine may have the segment's memory, and work
    /// in it without asking; they may unless told otherwise.
    #[must_use]
    pub fn shared_memory(mut self, yes: bool) -> ServerBuilder {
        self.shared_memory = yes;
        self
    }

    /// For tests: lets the server's CPU change the cells that the adapter
    /// changes too, whereby updates are lost.
    #[doc(hidden)]
    #[must_use]
    pub fn break_domain_rule_for_tests(mut self) -> ServerBuilder {
        self.break_domain_rule = true;
        self
    }

    /// Listens on `HOST:PORT` too; port 0 takes a free one. Without any, the
    /// server listens on port 7117 of every address of the machine.
    #[must_use]
    pub fn bind(mut self, addr: impl Into<String>) -> ServerBuilder {
        self.binds.push(addr.into());
        self
    }

    /// A second key, which gives sessions that can read and wait only.
    #[must_use]
    pub fn read_only_key(mut self, key: Key) -> ServerBuilder {
        self.keys.read_only = Some(key);
        self
    }

    /// The job that this server is for. A client that says it belongs to
    /// another one is refused, key or no key; one that belongs to none is let
    /// in. Without it, or with an empty name, clients of any job are.
    #[must_use]
    pub fn job(mut self, name: &str) -> ServerBuilder {
        self.job = Job::new(name);
        self
    }

    /// Cells of the segment, 8 bytes each; 262,144 unless told otherwise, or as
    /// many as the state or the snapshot has that the server begins with.
    /// Fixed while the server, or its state, lives.
    #[must_use]
    pub fn capacity(mut self, cells: u32) -> ServerBuilder {
        self.capacity = Some(cells);
        self
    }

    /// Most bytes that the messages of all arrays of slots may take up; half of
    /// the machine's memory unless told otherwise. They are taken when first
    /// written.
    #[must_use]
    pub fn slot_bytes(mut self, most: u64) -> ServerBuilder {
        self.slot_bytes = Some(most);
        self
    }

    /// Event loops, each a thread; one for every two cores unless told
    /// otherwise.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> ServerBuilder {
        self.workers = Some(workers);
        self
    }

    /// How long a session lives without a sign from its client; 10 s unless
    /// told otherwise. Clients send one three times as often.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> ServerBuilder {
        self.lease = lease;
        self
    }

    /// How long a worker looks for further work, burning a core, before it
    /// sleeps; not at all unless told otherwise.
    #[must_use]
    pub fn spin(mut self, spin: Duration) -> ServerBuilder {
        self.spin = spin;
        self
    }

    /// Most sessions; as many as the file limit allows unless told otherwise.
    #[must_use]
    pub fn max_clients(mut self, most: usize) -> ServerBuilder {
        self.max_clients = Some(most);
        self
    }

    /// Creates an array before any client is let in, so that none that comes
    /// early misses it.
    #[must_use]
    pub fn array(self, name: &str, kind: Kind, rows: usize, cols: usize) -> ServerBuilder {
        self.array_with(name, kind, rows, cols, 0)
    }

    /// As [`array`](Self::array), with what else belongs to the kind, see
    /// [`Form::param`]: barriers and semaphores need it.
    #[must_use]
    pub fn array_with(
        mut self,
        name: &str,
        kind: Kind,
        rows: usize,
        cols: usize,
        param: u64,
    ) -> ServerBuilder {
        self.arrays.push((name.to_owned(), kind, rows, cols, param));
        self
    }

    /// Starts the server: listens and returns. It raises the process's soft
    /// file limit to the hard one.
    ///
    /// # Errors
    /// [`Error::Bind`] names the address that cannot be had;
    /// [`Error::BadSetting`], [`Error::BadAddress`]; [`Error::State`] for a state
    /// or a snapshot that cannot be used; [`Error::Os`] for memory,
    /// threads or file descriptors that the system refuses; as
    /// [`Server::create`] for arrays.
    pub fn start(mut self) -> Result<Server> {
        self.check()?;
        if self.binds.is_empty() {
            self.binds.push(DEFAULT_BIND.to_owned());
        }
        let acceptor = self.acceptor()?;
        let files = raise_file_limit();
        let every = self.keep.every();
        let (beginning, snapshots) =
            std::mem::take(&mut self.keep).begin(self.capacity, DEFAULT_CAPACITY)?;
        let Beginning { segment, catalog, incarnation, journal, formers, roster, .. } = beginning;
        let (kept, shelf, origin) = (beginning.kept, beginning.shelf, beginning.origin);
        let capacity = catalog.capacity();
        let listeners = listen::listen(&self.binds)?;
        let addrs = listeners
            .iter()
            .map(std::net::TcpListener::local_addr)
            .collect::<std::io::Result<Vec<SocketAddr>>>()
            .map_err(|e| Error::os("asking for the port", e))?;
        #[cfg(feature = "metrics")]
        let page = self.metrics.as_deref().map(metrics::Page::prepare).transpose()?;
        let count = self.workers.unwrap_or_else(|| {
            std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2))
        });
        let segment = Arc::new(segment);
        let (actor, rdma, no_rdma) = self.open_rdma(&segment, count)?;
        let domain = rdma.as_ref().map_or(Domain::Cpu, |r| r.domain());
        let shm = self.open_shm(&segment, capacity, domain, incarnation);
        let in_memory = shm.as_ref().is_ok_and(|shm| shm.changes());
        let actor = actor.with_shm(shm.as_ref().ok().cloned());
        let one_sided = rdma.is_some() || shm.is_ok();
        let prepared = (0..count)
            .map(|_| Worker::prepare())
            .collect::<std::io::Result<Vec<_>>>()
            .map_err(|e| Error::os("making an event loop", e))?;
        let (polls, mailboxes): (Vec<_>, Vec<_>) = prepared.into_iter().unzip();
        let engine = Engine::with_catalog(actor, catalog, self.lease).one_sided(one_sided);
        let mut engine = engine.claims_in_memory(in_memory);
        engine = engine.slot_bytes(self.slot_bytes.unwrap_or_else(half_of_memory));
        if let Some(shelf) = shelf {
            engine = engine.shelf(Box::new(shelf));
        }
        if let Some(most) = self.max_waits {
            engine = engine.most_waits(most);
        }
        engine
            .restore_slots(kept)
            .map_err(|(form, e)| catalog_error(form.0.as_str(), form.1, e))?;
        if let Some(journal) = journal {
            engine = engine.journal(Box::new(journal));
        }
        let most_clients = self.max_clients.unwrap_or_else(|| clients_of(files));
        let shared = Arc::new(Shared {
            engine,
            rdma,
            no_rdma,
            shm,
            domain,
            mailboxes,
            keys: self.keys,
            job: self.job,
            tls: self.tls,
            acceptor,
            started: Instant::now(),
            #[cfg(feature = "metrics")]
            began: std::time::SystemTime::now(),
            pace: Pace::new(count),
            incarnation,
            capacity,
            lease: self.lease,
            spin: self.spin,
            most_clients,
            lapsed: AtomicUsize::new(0),
            most_strangers: (files / 4).clamp(16, 4096),
            counts: (0..count).map(|_| Arc::default()).collect(),
            meters: (0..count).map(|_| CachePadded::default()).collect(),
            tolls: Tolls::default(),
            bringing_up: AtomicUsize::new(0),
        });
        let roster = roster.map(|file| Box::new(file) as Box<dyn Roster>);
        shared.engine.take_over(formers, roster);
        // From here on dropping the server ends what has been started.
        let mut server = Server {
            shared: shared.clone(),
            addrs,
            origin,
            threads: Vec::new(),
            keeper: None,
            #[cfg(feature = "metrics")]
            page: None,
            generation: fork::generation(),
        };
        for (name, kind, rows, cols, param) in self.arrays {
            server.create_with(&name, kind, rows, cols, param)?;
        }
        let mut listeners = Some(listeners);
        let jobs = match shared.engine.has_shelf() {
            true => {
                let (jobs, thread) = maker::start(&shared)?;
                server.threads.push(thread);
                Some(jobs)
            }
            false => None,
        };
        for (index, poll) in polls.into_iter().enumerate() {
            let listeners = listeners.take().unwrap_or_default();
            let worker = Worker::new(shared.clone(), index, poll, listeners, jobs.clone())
                .map_err(|e| Error::os("watching a listening socket", e))?;
            let thread = std::thread::Builder::new()
                .name(format!("farcell-worker-{index}"))
                .spawn(move || worker.run())
                .map_err(|e| Error::os("starting a worker thread", e))?;
            server.threads.push(thread);
        }
        #[cfg(feature = "metrics")]
        if let Some(page) = page {
            server.page = Some(metrics::Page::start(page, shared.clone())?);
        }
        server.keeper =
            snapshots.map(|folder| Keeper::start(&shared, folder, every)).transpose()?;
        tracing::info!(addrs = ?server.addrs, origin = ?server.origin, capacity = shared.capacity, "serving");
        Ok(server)
    }

    /// Who changes the cells, and the adapter if there is one to offer; why
    /// not, otherwise.
    fn open_rdma(
        &self,
        segment: &Arc<Segment>,
        lanes: usize,
    ) -> Result<(ServerActor, Option<Arc<Rdma>>, String)> {
        let alone = |why| (ServerActor::alone(segment.clone()), None, why);
        let named = match &self.rdma {
            RdmaChoice::Off => return Ok(alone("it was told not to offer it".to_owned())),
            RdmaChoice::Auto if self.keeps_rdma_off() => {
                return Ok(alone(format!("TLS is required, and {CLEAR}")));
            }
            RdmaChoice::Auto => None,
            RdmaChoice::Device(name) => Some(name.as_str()),
        };
        let opened = Rdma::open(named, segment, self.cpu_domain).and_then(|rdma| {
            let rdma = Arc::new(rdma);
            let actor = ServerActor::new(&rdma, lanes, self.break_domain_rule)?;
            // Behind the server's own registrations.
            rdma.check_memlock()?;
            Ok((actor, rdma))
        });
        match opened {
            Ok((actor, rdma)) => {
                tracing::info!(device = rdma.place(), domain = %rdma.domain(), "offering RDMA");
                Ok((actor, Some(rdma), String::new()))
            }
            Err(e) if named.is_some() => Err(Error::Rdma { what: e.to_string() }),
            Err(e) => {
                // There is an adapter, and its owner will want to know.
                if matches!(e, verbs::Error::Memlock { .. }) {
                    tracing::warn!(target: "farcell::rdma", why = %e, "no RDMA, although there is an adapter");
                } else {
                    tracing::info!(target: "farcell::rdma", why = %e, "no RDMA here");
                }
                Ok(alone(e.to_string()))
            }
        }
    }

    fn open_shm(
        &self,
        segment: &Arc<Segment>,
        capacity: u32,
        domain: Domain,
        incarnation: u64,
    ) -> Result<Arc<Shm>, String> {
        if !self.shared_memory {
            return Err("the server has none: it was told not to offer it".to_owned());
        }
        match Shm::open(segment.clone(), capacity, domain, incarnation) {
            Ok(shm) => Ok(Arc::new(shm)),
            Err(why) => {
                tracing::info!(why, "no shared memory here");
                Err(format!("the server has none: {why}"))
            }
        }
    }

    fn check(&self) -> Result<()> {
        let bad = |what: String| Err(Error::BadSetting { what });
        self.check_secrecy()?;
        if let Some(cells) = self.capacity.filter(|cells| !(8..=MAX_CELLS).contains(cells)) {
            return bad(format!("a capacity of {cells} cells: from 8 to {MAX_CELLS} are possible"));
        }
        if self.workers.is_some_and(|n| n == 0 || n > 128) {
            return bad("workers: from 1 to 128 are possible".to_owned());
        }
        if self.lease < Duration::from_millis(50) || self.lease > Duration::from_secs(86_400) {
            return bad("a lease lasts from 0.05 to 86400 seconds".to_owned());
        }
        if let RdmaChoice::Device(name) = &self.rdma {
            device_name(name)
                .map_err(|why| Error::BadSetting { what: format!("the RDMA device: {why}") })?;
        }
        if self.max_waits == Some(0) {
            return bad("max-waits: at least 1 is needed".to_owned());
        }
        if self.max_clients == Some(0) {
            return bad("max-clients: at least 1 is needed".to_owned());
        }
        self.keep.check()
    }
}

/// How many clients there may be with this limit of open files: a few are needed for
/// other things.
fn clients_of(files: usize) -> usize {
    let clients = files.saturating_sub(64).max(1);
    if clients < 64 {
        tracing::warn!(
            files,
            clients,
            "the file limit leaves room for few clients: raise it (ulimit -n)"
        );
    }
    clients
}

/// A running server. It stops when dropped.
///
/// It can live in a program of its own (`farcell serve`) or in a process that
/// does other things too, such as rank 0 of a job.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    addrs: Vec<SocketAddr>,
    origin: Origin,
    threads: Vec<JoinHandle<()>>,
    /// Once it serves, if it writes snapshots.
    keeper: Option<Keeper>,
    #[cfg(feature = "metrics")]
    page: Option<metrics::Page>,
    generation: Generation,
}

impl Server {
    /// Settings for a server whose clients must know `key`.
    #[must_use]
    pub fn builder(key: Key) -> ServerBuilder {
        ServerBuilder {
            binds: Vec::new(),
            keys: Keys { full: key, read_only: None },
            job: Job::default(),
            tls: Tls::Off,
            clear_rdma: false,
            capacity: None,
            keep: Keep::default(),
            workers: None,
            lease: DEFAULT_LEASE,
            spin: Duration::ZERO,
            max_clients: None,
            rdma: RdmaChoice::default(),
            cpu_domain: false,
            shared_memory: true,
            break_domain_rule: false,
            arrays: Vec::new(),
            slot_bytes: None,
            #[cfg(feature = "metrics")]
            metrics: None,
            max_waits: None,
        }
    }

    /// The addresses that it listens on, with their real ports.
    #[must_use]
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// An address to give to clients: the first one that it listens on, with
    /// this machine's name in place of a wildcard.
    #[must_use]
    pub fn address(&self) -> String {
        self.addrs.first().map(|&addr| listen::reachable(addr)).unwrap_or_default()
    }

    /// Opens an array or creates it, all cells 0. `true`: it is new.
    ///
    /// # Errors
    /// As [`Client::events`](crate::Client::events); [`Error::Forked`].
    pub fn create(&self, name: &str, kind: Kind, rows: usize, cols: usize) -> Result<bool> {
        self.create_with(name, kind, rows, cols, 0)
    }

    /// As [`create`](Self::create), with what else belongs to the kind, see
    /// [`Form::param`]: barriers and semaphores need it.
    ///
    /// # Errors
    /// As [`create`](Self::create); [`Error::BadSetting`] for a parameter that no
    /// array of this kind can have.
    pub fn create_with(
        &self,
        name: &str,
        kind: Kind,
        rows: usize,
        cols: usize,
        param: u64,
    ) -> Result<bool> {
        if fork::generation() != self.generation {
            return Err(Error::Forked { what: "the server".to_owned() });
        }
        let form = Form { kind, shape: shape(name, rows, cols)?, param };
        self.shared
            .engine
            .open(name, form)
            .map(|(_, created)| created)
            .map_err(|e| catalog_error(name, form, e))
    }

    /// The RDMA device and port that it offers, if any.
    #[must_use]
    pub fn rdma_device(&self) -> Option<String> {
        self.shared.rdma.as_ref().map(|rdma| rdma.place())
    }

    /// Why it offers no RDMA, where it offers none.
    #[must_use]
    pub fn no_rdma(&self) -> Option<&str> {
        self.shared.rdma.is_none().then_some(&self.shared.no_rdma)
    }

    /// Who changes the cells.
    #[must_use]
    pub fn domain(&self) -> Domain {
        self.shared.domain
    }

    /// How many sessions live, those counted whose client is away.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.shared.engine.sessions()
    }

    /// How many waits are parked, those counted that sleep in shared memory.
    #[must_use]
    pub fn parked_waits(&self) -> usize {
        self.shared.engine.parked() + self.shared.engine.sleepers()
    }

    /// For tests: breaks every client's queue pairs, as a fault would.
    #[doc(hidden)]
    pub fn break_queue_pairs_for_tests(&self) {
        if let Some(rdma) = &self.shared.rdma {
            rdma.break_queue_pairs();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // What went wrong is in the log.
        let _ = self.end();
    }
}

/// Rows and columns as the catalog has them.
pub(crate) fn shape(name: &str, rows: usize, cols: usize) -> Result<Shape> {
    match (u32::try_from(rows), u32::try_from(cols)) {
        (Ok(r), Ok(c)) if r > 0 && c > 0 => Ok(Shape { rows: r, cols: c }),
        _ => Err(Error::BadShape { name: name.to_owned(), rows, cols }),
    }
}

/// The catalog's refusal in terms of the call that met it.
pub(crate) fn catalog_error(name: &str, asked: Form, error: CatalogError) -> Error {
    let name = name.to_owned();
    match error {
        CatalogError::Name(why) => Error::BadName { name, why },
        CatalogError::Empty(shape) => {
            Error::BadShape { name, rows: shape.rows as usize, cols: shape.cols as usize }
        }
        CatalogError::Mismatch(exists) => Error::ArrayMismatch { name, exists, asked },
        CatalogError::Missing => Error::NoSuchArray { name },
        CatalogError::Full { asked, free, largest } => {
            Error::SegmentFull { name, asked, free, largest }
        }
        CatalogError::Param(_) => Error::BadSetting { what: format!("array {name:?}: {error}") },
        CatalogError::SlotsFull { asked, free } => Error::SlotsFull { name, asked, free },
        CatalogError::NoMemory { asked, errno } => Error::os(
            format!("the server has no {asked} bytes for the messages of array {name:?}"),
            std::io::Error::from_raw_os_error(errno.cast_signed()),
        ),
        CatalogError::TooMany | CatalogError::Unkept(_) => {
            Error::Limit { addr: "the server".to_owned(), what: error.to_string() }
        }
    }
}
