//! The client: a session with a server, and handles to its arrays.

mod array;
mod barrier;
mod batch;
mod borrow;
mod counter;
mod event;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
/// Finding the server when a program names none: the steps of
/// [`Client::from_env`], for programs that take some of them themselves.
pub mod launch;
mod lock;
mod options;
mod overview;
mod peers;
mod registered;
mod secure;
mod select;
mod semaphore;
mod slots;
mod sync;
mod way;

pub use barrier::{Barrier, BarrierArray, BarrierWait};
pub use batch::{Batch, Outcome};
pub use borrow::SlotBorrow;
pub use counter::{Counter, CounterArray, Counters};
pub use event::{Event, EventArray, Events};
pub use lock::{Lock, LockArray, LockGuard};
pub use options::WaitOptions;
pub use overview::{Fallback, Held, HeldState, Tally, WaitedCell, Waiting, WaitingHow};
pub use peers::{Holding, HoldingKind, Member};
pub use registered::Registered;
pub use select::{Cell, Woken};
pub use semaphore::{Semaphore, SemaphoreArray};
pub use slots::{Received, Slot, SlotArray, SlotWrite};

use crate::addr::DEFAULT_PORT;
use crate::auth::{Access, Domain, Key, Resume, Tls};
use crate::catalog::{CatalogError, Form, Kind, check_name};
use crate::error::{Error, Result};
use crate::keyfile;
use crate::layout::Shape;
use crate::rdma::device_name;
use crate::server::{catalog_error, shape};
use crate::transport::connect::{Target, connect, soon_enough};
use crate::transport::rdma::RdmaSettings;
use crate::transport::shm::Slot as Ways;
use crate::transport::tcp::{Link, Settings};
use crate::transport::{Failure, keeper};
use crate::wire::{self, InfoRecord, ListRecord, Refusal, Tag};
use array::Array;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use way::Core;

/// Names the server, as `HOST:PORT`.
pub const ENV_ADDR: &str = "FARCELL_ADDR";
/// Chooses the transport: `auto`, `shm`, `rdma` or `tcp`.
pub const ENV_TRANSPORT: &str = "FARCELL_TRANSPORT";
/// Names the RDMA device, as `NAME` or `NAME:PORT`.
pub const ENV_DEVICE: &str = "FARCELL_DEVICE";
/// Names the place of the GID in the port's table.
pub const ENV_GID_INDEX: &str = "FARCELL_GID_INDEX";

/// By which way a client's operations go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TransportChoice {
    /// Shared memory on the server's machine, otherwise RDMA where it works,
    /// otherwise TCP.
    #[default]
    Auto,
    /// Shared memory, or no connection at all.
    Shm,
    /// TCP.
    Tcp,
    /// RDMA, or no connection at all.
    Rdma,
}

impl std::str::FromStr for TransportChoice {
    type Err = String;
    fn from_str(s: &str) -> Result<TransportChoice, String> {
        match s {
            "auto" => Ok(TransportChoice::Auto),
            "shm" => Ok(TransportChoice::Shm),
            "tcp" => Ok(TransportChoice::Tcp),
            "rdma" => Ok(TransportChoice::Rdma),
            other => Err(format!("{other:?} is no transport; use auto, shm, rdma or tcp")),
        }
    }
}

/// By which way a client's operations go right now, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransportReport {
    /// `shm`, `rdma` or `tcp`; `none` in a child that was forked since, which
    /// has to connect for itself.
    pub name: &'static str,
    /// What was found, a sentence each: what the transport in use is like, and
    /// why each better one is not in use.
    pub reasons: Vec<String>,
}

/// How a client is set up. Made by [`Client::builder`].
#[derive(Clone, Debug)]
pub struct ClientBuilder {
    addr: Option<String>,
    key: Option<(Key, String)>,
    key_file: Option<PathBuf>,
    connect_timeout: Duration,
    wait_for_server: Duration,
    reconnect_for: Duration,
    spin: Duration,
    transport: Option<TransportChoice>,
    device: Option<String>,
    gid_index: Option<u32>,
    dead_after: Duration,
    lanes: usize,
    job: String,
    tls: Option<Tls>,
    clear_rdma: bool,
}

impl ClientBuilder {
    /// By which way operations go. Without it `FARCELL_TRANSPORT` counts, and
    /// without that it is [`TransportChoice::Auto`].
    #[must_use]
    pub fn transport(mut self, choice: TransportChoice) -> ClientBuilder {
        self.transport = Some(choice);
        self
    }

    /// The RDMA device, as `NAME` or `NAME:PORT`. Without it `FARCELL_DEVICE`
    /// counts, and without that the first one with a port that works.
    #[must_use]
    pub fn device(mut self, name: impl Into<String>) -> ClientBuilder {
        self.device = Some(name.into());
        self
    }

    /// Place of the GID in the port's table. Without it `FARCELL_GID_INDEX`
    /// counts, and without that all are tried, the likeliest first.
    #[must_use]
    pub fn gid_index(mut self, index: u32) -> ClientBuilder {
        self.gid_index = Some(index);
        self
    }

    /// How long the other end of an RDMA connection may not answer before
    /// operations go over TCP; 1 s unless told otherwise.
    #[must_use]
    pub fn dead_after(mut self, time: Duration) -> ClientBuilder {
        self.dead_after = time;
        self
    }

    /// How many queue pairs the client has, so that its threads need not wait
    /// for each other; 2 unless told otherwise, at most 16. There is one more
    /// that only rings the server's CPU.
    #[must_use]
    pub fn queue_pairs(mut self, count: usize) -> ClientBuilder {
        self.lanes = count.clamp(1, wire::MAX_LANES - 1);
        self
    }

    /// The server, as `HOST:PORT`. Without it `FARCELL_ADDR` counts, and
    /// without that `localhost:7117`.
    #[must_use]
    pub fn addr(mut self, addr: impl Into<String>) -> ClientBuilder {
        self.addr = Some(addr.into());
        self
    }

    /// The key. Without it, and without [`key_file`](Self::key_file), the file
    /// that `FARCELL_AUTHKEY_FILE` names counts, and without that the user's
    /// own, `~/.config/farcell/authkey`.
    #[must_use]
    pub fn key(mut self, key: Key) -> ClientBuilder {
        self.key = Some((key, "the program".to_owned()));
        self
    }

    /// A file that holds the key.
    #[must_use]
    pub fn key_file(mut self, path: impl Into<PathBuf>) -> ClientBuilder {
        self.key_file = Some(path.into());
        self
    }

    /// The job that this program belongs to: a server that is for another one
    /// refuses it. None unless told otherwise.
    #[must_use]
    pub fn job(mut self, name: impl Into<String>) -> ClientBuilder {
        self.job = name.into();
        self
    }

    /// How long one attempt to connect may take; 5 s unless told otherwise.
    #[must_use]
    pub fn connect_timeout(mut self, time: Duration) -> ClientBuilder {
        self.connect_timeout = time;
        self
    }

    /// Goes on trying for this long when nothing listens there yet, for
    /// programs that start together with their server; not at all unless told
    /// otherwise.
    #[must_use]
    pub fn wait_for_server(mut self, time: Duration) -> ClientBuilder {
        self.wait_for_server = time;
        self
    }

    /// How long an operation waits for a lost connection to come back; 30 s
    /// unless told otherwise.
    #[must_use]
    pub fn reconnect_for(mut self, time: Duration) -> ClientBuilder {
        self.reconnect_for = time;
        self
    }

    /// How long an operation looks for its answer, burning a core, before it
    /// sleeps; not at all unless told otherwise.
    #[must_use]
    pub fn spin(mut self, time: Duration) -> ClientBuilder {
        self.spin = time;
        self
    }

    /// Connects and proves to know the key. Blocks for the connect timeout at
    /// most, or as long as it waits for the server.
    ///
    /// # Errors
    /// [`Error::Unreachable`], [`Error::NotFarcell`],
    /// [`Error::VersionMismatch`], [`Error::AuthenticationFailed`],
    /// [`Error::Impostor`], [`Error::Tls`], [`Error::Intercepted`],
    /// [`Error::ServerFull`], [`Error::BadAddress`], and
    /// [`Error::NoKey`], [`Error::KeyFile`] or [`Error::BadSetting`] before
    /// anything is sent.
    pub fn connect(self) -> Result<Client> {
        crate::diagnose::warn_once();
        let (key, key_source) = self.find_key()?;
        let (choice, mut rdma) = self.rdma_settings()?;
        let (tls, no_rdma) = self.secrecy()?;
        rdma.kept_off = no_rdma;
        let addr = match self.addr {
            Some(addr) => addr,
            None => match std::env::var(ENV_ADDR) {
                Ok(addr) if !addr.is_empty() => addr,
                Err(std::env::VarError::NotUnicode(addr)) => {
                    let why = format!("{ENV_ADDR} is no text");
                    return Err(Error::BadAddress {
                        addr: addr.to_string_lossy().into_owned(),
                        why,
                    });
                }
                _ => format!("localhost:{DEFAULT_PORT}"),
            },
        };
        let (job, timeout) = (self.job, self.connect_timeout);
        let target = Target { addr, key, key_source, job, tls, timeout };
        let patience = soon_enough(self.wait_for_server);
        let (socket, welcome) = loop {
            match connect(&target, Resume::default()) {
                Err(Error::Unreachable { .. } | Error::ServerGoingAway { .. })
                    if Instant::now() < patience =>
                {
                    std::thread::sleep(Duration::from_millis(50));
                }
                other => break other?,
            }
        };
        // A day is as good as for ever, and can be added to any time.
        let spin = self.spin.min(Duration::from_secs(86_400));
        let settings = Settings { target, reconnect_for: self.reconnect_for, spin };
        let link = Link::new(settings, socket, welcome);
        let first = Instant::now() + Duration::from_millis(welcome.lease_ms) / 3;
        keeper::keep(Arc::downgrade(&link), first)
            .map_err(|e| Error::os("starting the thread that keeps leases", e))?;
        let client = Client { core: Arc::new(Core::open(link, choice, &rdma)?) };
        // Not otherwise: the report may have to look for a library.
        if tracing::enabled!(tracing::Level::INFO) {
            let TransportReport { name, reasons } = client.transport();
            tracing::info!(transport = name, why = reasons.join("; "), "connected");
        }
        Ok(client)
    }

    /// What the environment says where the program says nothing.
    fn rdma_settings(&self) -> Result<(TransportChoice, RdmaSettings)> {
        let set = |name| std::env::var(name).ok().filter(|v| !v.is_empty());
        let choice = match (self.transport, set(ENV_TRANSPORT)) {
            (Some(choice), _) => choice,
            (None, Some(text)) => text
                .parse()
                .map_err(|why| Error::BadSetting { what: format!("{ENV_TRANSPORT}: {why}") })?,
            (None, None) => TransportChoice::Auto,
        };
        let gid_index = match (self.gid_index, set(ENV_GID_INDEX)) {
            (Some(index), _) => Some(index),
            (None, Some(text)) => Some(text.parse().map_err(|_| Error::BadSetting {
                what: format!("{ENV_GID_INDEX}: {text:?} is no place in a table; use a number"),
            })?),
            (None, None) => None,
        };
        let (device, source) = match &self.device {
            Some(device) => (Some(device.clone()), "the RDMA device"),
            None => (set(ENV_DEVICE), ENV_DEVICE),
        };
        if let Some(device) = &device {
            device_name(device)
                .map_err(|why| Error::BadSetting { what: format!("{source}: {why}") })?;
        }
        let (dead_after, lanes) = (self.dead_after, self.lanes);
        let settings = RdmaSettings { device, gid_index, dead_after, lanes, kept_off: None };
        Ok((choice, settings))
    }

    fn find_key(&self) -> Result<(Key, String)> {
        if let Some((key, source)) = &self.key {
            return Ok((key.clone(), source.clone()));
        }
        let named = self.key_file.clone();
        let path = match &named {
            Some(path) => path.clone(),
            None => keyfile::path_from_env()?,
        };
        let is_default =
            named.is_none() && std::env::var_os(keyfile::ENV_KEY_FILE).is_none_or(|v| v.is_empty());
        if is_default && !path.exists() {
            return Err(Error::NoKey { path });
        }
        Ok((keyfile::load(&path)?, path.display().to_string()))
    }
}

/// A session with a server. Clones are the same session, usable from many
/// threads at once; it ends when the last of them and of its handles is
/// dropped.
///
/// If the connection is lost it comes back by itself, operations under way
/// included: one that returns `Ok` has happened exactly once, and one that
/// fails has not happened, unless the error is [`Error::OutcomeUnknown`].
///
/// A child that is forked from this process connects for itself: what it has
/// inherited answers [`Error::Forked`], and dropping it there leaves the session
/// alone.
#[derive(Clone, Debug)]
pub struct Client {
    core: Arc<Core>,
}

/// An array, as the server lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayInfo {
    /// Its name.
    pub name: String,
    /// What its cells are.
    pub kind: Kind,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// What else belongs to the kind, see [`Form`].
    pub param: u64,
}

impl ArrayInfo {
    /// Kind, shape, and what else belongs to the kind; to be shown.
    #[must_use]
    pub fn form(&self) -> Form {
        let shape = Shape { rows: self.rows as u32, cols: self.cols as u32 };
        Form { kind: self.kind, shape, param: self.param }
    }
}

/// What the server tells of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerInfo {
    /// Cells of its segment.
    pub capacity: u64,
    /// Cells that no array has.
    pub free: u64,
    /// Cells of the largest free piece.
    pub largest_free: u64,
    /// Sessions that live.
    pub sessions: usize,
    /// Arrays that exist.
    pub arrays: usize,
    /// Waits that are parked.
    pub parked_waits: usize,
    /// Who changes the cells.
    pub domain: Domain,
    /// What this session may do.
    pub access: Access,
    /// How long a session lives without a sign from its client.
    pub lease: Duration,
}

impl Client {
    /// Connects to `HOST:PORT` with the key that the environment names or the
    /// user has.
    ///
    /// # Errors
    /// As [`ClientBuilder::connect`].
    pub fn connect(addr: impl Into<String>) -> Result<Client> {
        Client::builder().addr(addr).connect()
    }

    /// Settings, to be changed before connecting.
    #[must_use]
    pub fn builder() -> ClientBuilder {
        ClientBuilder {
            addr: None,
            key: None,
            key_file: None,
            connect_timeout: Duration::from_secs(5),
            wait_for_server: Duration::ZERO,
            reconnect_for: Duration::from_secs(30),
            spin: Duration::ZERO,
            transport: None,
            device: None,
            gid_index: None,
            dead_after: Duration::from_secs(1),
            lanes: 2,
            job: String::new(),
            tls: None,
            clear_rdma: false,
        }
    }

    /// Opens an array of events, or creates it with all of them clear. One
    /// round trip; the handle's own indexing takes none.
    ///
    /// # Errors
    /// [`Error::ArrayMismatch`] if the name has another kind or shape,
    /// [`Error::BadName`], [`Error::BadShape`], [`Error::SegmentFull`],
    /// [`Error::ReadOnly`] if it would have to be created and may not.
    pub fn events(&self, name: &str, rows: usize, cols: usize) -> Result<EventArray> {
        self.open_or_create(name, Kind::Event, rows, cols, 0).map(EventArray::new)
    }

    /// Opens an array of counters, or creates it with all of them 0.
    ///
    /// # Errors
    /// As [`events`](Self::events).
    pub fn counters(&self, name: &str, rows: usize, cols: usize) -> Result<CounterArray> {
        self.open_or_create(name, Kind::Counter, rows, cols, 0).map(CounterArray::new)
    }

    /// Opens an array of events of whatever shape it has.
    ///
    /// # Errors
    /// [`Error::NoSuchArray`], [`Error::WrongKind`], [`Error::BadName`].
    pub fn open_events(&self, name: &str) -> Result<EventArray> {
        self.open_existing(name, Kind::Event).map(EventArray::new)
    }

    /// Opens an array of counters of whatever shape it has.
    ///
    /// # Errors
    /// As [`open_events`](Self::open_events).
    pub fn open_counters(&self, name: &str) -> Result<CounterArray> {
        self.open_existing(name, Kind::Counter).map(CounterArray::new)
    }

    /// Every array of the server, by name.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    pub fn list(&self) -> Result<Vec<ArrayInfo>> {
        let mut all: Vec<ArrayInfo> = Vec::new();
        loop {
            let after = all.last().map_or("", |a| a.name.as_str());
            let bytes = self.ask(Tag::List, after)?;
            if bytes.is_empty() {
                return Ok(all);
            }
            let more = read_list(&bytes).ok_or_else(|| self.senseless("a list"))?;
            all.extend(more);
        }
    }

    /// The array of this name, if there is one.
    ///
    /// # Errors
    /// [`Error::BadName`], [`Error::Unreachable`].
    pub fn lookup(&self, name: &str) -> Result<Option<ArrayInfo>> {
        check_name(name).map_err(|why| Error::BadName { name: name.to_owned(), why })?;
        Ok(self.list()?.into_iter().find(|a| a.name == name))
    }

    /// Removes an array and gives its cells back. Waits on them end with
    /// [`Error::ArrayRemoved`], as do later operations through old handles.
    ///
    /// # Errors
    /// [`Error::NoSuchArray`], [`Error::ReadOnly`], [`Error::BadName`].
    pub fn remove(&self, name: &str) -> Result<()> {
        check_name(name).map_err(|why| Error::BadName { name: name.to_owned(), why })?;
        self.core.link.ask(Tag::Remove, name).map(drop).map_err(|f| match f {
            Failure::Error(e) => e,
            Failure::Refused(Refusal::ReadOnly, _) => Error::ReadOnly { op: "remove" },
            Failure::Refused(Refusal::Catalog(why @ CatalogError::Unkept(_)), _) => {
                Error::Limit { addr: self.core.link.addr(), what: why.to_string() }
            }
            Failure::Refused(..) => Error::NoSuchArray { name: name.to_owned() },
        })
    }

    /// What the server tells of itself and of this session.
    ///
    /// # Errors
    /// [`Error::Unreachable`].
    pub fn info(&self) -> Result<ServerInfo> {
        let bytes = self.ask(Tag::GetInfo, "")?;
        let (record, _) = wire::take::<InfoRecord>(Tag::Info, &bytes)
            .map_err(|_| self.senseless("its description"))?;
        let welcome = self.core.link.welcome();
        Ok(ServerInfo {
            capacity: record.capacity,
            free: record.free,
            largest_free: record.largest,
            sessions: record.sessions as usize,
            arrays: record.arrays as usize,
            parked_waits: record.parked as usize,
            domain: welcome.domain,
            access: welcome.access,
            lease: Duration::from_millis(welcome.lease_ms),
        })
    }

    /// Many operations on one trip.
    #[must_use]
    pub fn batch(&self) -> Batch {
        Batch::new(self.clone())
    }

    /// By which way operations go right now, and why.
    #[must_use]
    pub fn transport(&self) -> TransportReport {
        if let Err(forked) = self.core.link.check() {
            return TransportReport { name: "none", reasons: vec![forked.to_string()] };
        }
        self.core.transport_report()
    }

    /// Whether there is a connection at this moment. If not, it is being
    /// brought back.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.core.link.is_connected()
    }

    /// For tests: tries to change the segment's header, which breaks the
    /// queue pairs. `None` where there are none.
    #[doc(hidden)]
    #[must_use]
    pub fn header_refuses_for_tests(&self, own_key: bool) -> Option<bool> {
        self.core.rdma()?.header_refuses(own_key)
    }

    /// The descriptor of the connection's socket, if there is one at this
    /// moment. For a program that forks, and wants its child to let go of it;
    /// nothing else may be done with it.
    #[doc(hidden)]
    #[must_use]
    pub fn connection_fd(&self) -> Option<i32> {
        self.core.link.fd()
    }

    /// Ends the session for this client and all its clones and handles.
    /// Whoever still waits gets [`Error::Closed`].
    pub fn close(&self) {
        self.core.link.close();
    }

    fn ask(&self, tag: Tag, name: &str) -> Result<Vec<u8>> {
        self.core.link.ask(tag, name).map_err(|f| match f {
            Failure::Error(e) => e,
            Failure::Refused(refusal, _) => self.senseless(&format!("a refusal ({refusal:?})")),
        })
    }

    fn senseless(&self, what: &str) -> Error {
        let addr = self.core.link.addr();
        Error::Protocol { addr, what: format!("{what} that makes no sense") }
    }

    fn open_or_create(
        &self,
        name: &str,
        kind: Kind,
        rows: usize,
        cols: usize,
        param: u64,
    ) -> Result<Arc<Array>> {
        check_name(name).map_err(|why| Error::BadName { name: name.to_owned(), why })?;
        let shape = shape(name, rows, cols)?;
        self.open(name, Some(Form { kind, shape, param }))
    }

    fn open_existing(&self, name: &str, kind: Kind) -> Result<Arc<Array>> {
        check_name(name).map_err(|why| Error::BadName { name: name.to_owned(), why })?;
        let found = self.open(name, None)?;
        if found.form.kind != kind {
            let op = match kind {
                Kind::Event => "set or clear",
                Kind::Counter => "load or add",
                Kind::Lock => "lock",
                Kind::Barrier => "wait at a barrier",
                Kind::Semaphore => "acquire",
                Kind::Slots => "read or write of messages",
            };
            return Err(Error::WrongKind { name: name.to_owned(), kind: found.form.kind, op });
        }
        // Once more, now that the form is known: so a server that comes back
        // without the array gets it again, as by any other handle.
        self.open(name, Some(found.form))
    }

    fn open(&self, name: &str, form: Option<Form>) -> Result<Arc<Array>> {
        let mut tenure = self.core.link.welcome().tenure();
        let mut opened = self.core.link.open(name, form);
        // The place of the first cell is good in the session, and the life of the
        // server, that it was told in: asked again if that may have been another one.
        while let Ok((number, _)) = opened
            && self.core.link.welcome().tenure() != tenure
        {
            tenure = self.core.link.welcome().tenure();
            let again = self.core.link.open(name, form);
            self.core.link.drop_binding(number);
            opened = again;
        }
        let (number, record) = opened.map_err(|failure| match failure {
            Failure::Error(e) => e,
            Failure::Refused(Refusal::ReadOnly, _) => Error::ReadOnly { op: "create" },
            Failure::Refused(Refusal::Catalog(e), _) => match form {
                Some(form) => catalog_error(name, form, e),
                None => Error::NoSuchArray { name: name.to_owned() },
            },
            Failure::Refused(other, _) => self.senseless(&format!("a refusal ({other:?})")),
        })?;
        let kind = Kind::from_code(record.kind).ok_or_else(|| self.senseless("a kind"))?;
        let shape = Shape { rows: record.rows, cols: record.cols };
        if shape.cells() == 0
            || shape.extent() > crate::layout::MAX_CELLS.into()
            || kind.first_word(record.param).is_none()
        {
            return Err(self.senseless("a shape"));
        }
        if let Some(rdma) = self.core.rdma() {
            rdma.bind(number, record.base, shape.extent());
        }
        let slot = match &self.core.shm {
            Some(shm) => shm.bind(number, tenure, record.base, shape.extent()),
            None => Ways::none(),
        };
        Ok(Arc::new(Array {
            client: self.clone(),
            name: name.to_owned(),
            form: Form { kind, shape, param: record.param },
            number,
            parties: Mutex::default(),
            slot,
        }))
    }
}

fn read_list(mut bytes: &[u8]) -> Option<Vec<ArrayInfo>> {
    let mut arrays = Vec::new();
    while !bytes.is_empty() {
        let (record, rest) = wire::take::<ListRecord>(Tag::Listed, bytes).ok()?;
        let (name, rest) = rest.split_at_checked(record.name_len.into())?;
        bytes = rest;
        arrays.push(ArrayInfo {
            name: std::str::from_utf8(name).ok()?.to_owned(),
            kind: Kind::from_code(record.kind)?,
            rows: record.rows as usize,
            cols: record.cols as usize,
            param: record.param,
        });
    }
    Some(arrays)
}
