//! RDMA adapters as the library sees them, and a test of each address.

use crate::error::{Error, Result};
use crate::rdma::random_psn;
use crate::verbs::{
    Access, Atomicity, Completion, CompletionQueue, Connect, Context, DeviceList, Gid, GidEntry,
    GidKind, LinkLayer, ProtectionDomain, QueuePair, QueuePairConfig, Receive, Region, Remote,
    Request, Transport, UnconnectedQueuePair, ack_timeout, library,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// An address of a port that answers nobody is given up after this time.
const DEAD_AFTER: Duration = Duration::from_secs(1);
/// The longest that one request may take.
const PATIENCE: Duration = Duration::from_secs(10);
const RETRIES: u8 = 6;
/// A word whose bytes are all different: read the wrong way round it is another.
const WORD: u64 = 0x0102_0304_0506_0708;

/// An adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// Its name in the kernel, such as `mlx5_0`.
    pub name: String,
    /// Its firmware's version; empty where it has none.
    pub firmware: String,
    /// `InfiniBand` (RoCE too), `iWARP` or `other`.
    pub transport: &'static str,
    /// Whom its atomics are atomic to: `hca` (each other), `global` (the CPU's
    /// too) or `none` (it has none).
    pub atomics: &'static str,
    /// Its ports.
    pub ports: Vec<AdapterPort>,
    /// Why it cannot be opened, or one of its ports not be asked.
    pub trouble: Option<String>,
}

/// A port of an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterPort {
    /// Its number, from 1 on.
    pub number: u8,
    /// Whether it carries traffic.
    pub is_active: bool,
    /// `ACTIVE`, `DOWN` and so on.
    pub state: String,
    /// `InfiniBand`, `Ethernet` or `unspecified`.
    pub link_layer: &'static str,
    /// Its LID; 0 on Ethernet.
    pub lid: u16,
    /// The largest packet, in bytes.
    pub mtu: u32,
    /// Its addresses.
    pub addresses: Vec<AdapterAddress>,
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterAddress {
    /// Its place in the table.
    pub index: u32,
    /// The GID, written as an IPv6 address.
    pub gid: String,
    /// `RoCE v2`, `RoCE v1`, `InfiniBand` or `unknown`.
    pub kind: &'static str,
    /// The network device that it belongs to, where the system tells.
    pub netdev: Option<String>,
    /// Whether that is in this network namespace, where the system tells.
    pub is_here: Option<bool>,
}

/// What a [`self_test`] has found to work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelfTest {
    /// Bytes that were registered and moved.
    pub bytes: usize,
    /// The atomics did what they should, byte order included; `false`: the
    /// adapter has none.
    pub atomics: bool,
    /// How long a READ of 8 bytes took, the least of several.
    pub read: Duration,
}

/// The adapters of this machine. Opens each for a moment.
///
/// # Errors
/// [`Error::Rdma`]: no libibverbs, or no adapter, with the likely reason.
pub fn adapters() -> Result<Vec<Adapter>> {
    let list = library().and_then(DeviceList::new).map_err(rdma)?;
    Ok(list
        .iter()
        .map(|device| {
            let mut adapter = Adapter {
                name: device.name().to_owned(),
                firmware: String::new(),
                transport: match device.transport() {
                    Transport::InfiniBand => "InfiniBand",
                    Transport::Iwarp => "iWARP",
                    Transport::Other => "other",
                },
                atomics: "none",
                ports: Vec::new(),
                trouble: None,
            };
            match device.open() {
                Ok(context) => look(&context, &mut adapter),
                Err(error) => adapter.trouble = Some(error.to_string()),
            }
            adapter
        })
        .collect())
}

fn rdma(error: crate::verbs::Error) -> Error {
    Error::Rdma { what: error.to_string() }
}

fn look(context: &Context, adapter: &mut Adapter) {
    let attributes = context.attributes();
    adapter.firmware.clone_from(&attributes.firmware);
    adapter.atomics = match attributes.atomicity {
        Atomicity::Hca => "hca",
        Atomicity::Global => "global",
        Atomicity::None => "none",
    };
    for number in 1..=attributes.ports.max(1) {
        let (port, gids) = match (context.port(number), context.gids(number)) {
            (Ok(port), Ok(gids)) => (port, gids),
            (Err(error), _) | (_, Err(error)) => {
                adapter.trouble = Some(error.to_string());
                continue;
            }
        };
        adapter.ports.push(AdapterPort {
            number,
            is_active: context.active_port(number).is_ok(),
            state: port.state.to_string(),
            link_layer: match port.link_layer {
                LinkLayer::InfiniBand => "InfiniBand",
                LinkLayer::Ethernet => "Ethernet",
                LinkLayer::Unspecified => "unspecified",
            },
            lid: port.lid,
            mtu: port.mtu.bytes(),
            addresses: gids.into_iter().map(address).collect(),
        });
    }
}

fn address(entry: GidEntry) -> AdapterAddress {
    AdapterAddress {
        index: entry.index,
        gid: entry.gid.to_string(),
        kind: match entry.kind {
            GidKind::RoceV2 => "RoCE v2",
            GidKind::RoceV1 => "RoCE v1",
            GidKind::InfiniBand => "InfiniBand",
            GidKind::Unknown => "unknown",
        },
        netdev: entry.netdev,
        is_here: entry.netdev_here,
    }
}

/// How registered memory fares when this process forks, in words: libibverbs was
/// asked to keep it out of children, or the kernel needs no such care.
///
/// # Errors
/// What is not safe, and why; [`Error::Rdma`] without libibverbs.
pub fn fork_safety() -> Result<&'static str> {
    let library = library().map_err(rdma)?;
    // Once more: it answers the same as at the first time.
    let asked = library.fork_init();
    // ibv_is_fork_initialized(3): disabled, enabled, unneeded.
    match (library.fork_status(), asked) {
        (Some(1), _) => Ok("registered memory is kept out of children (ibv_fork_init)"),
        (Some(2), _) => Ok("the kernel copies registered memory for children, no care is needed"),
        (None, Ok(())) => Ok("ibv_fork_init has worked"),
        (Some(_), Ok(())) => Err(Error::Rdma {
            what: "libibverbs says that fork support is off although it was asked for".to_owned(),
        }),
        (_, Err(error)) => Err(Error::Rdma { what: error.to_string() }),
    }
}

/// Tests one address of a port: two queue pairs of this process are connected to
/// each other by it, and move data through the adapter and back. `bytes` are
/// registered, as a server would register its segment, and written and read as a
/// whole; then compare-and-swap and fetch-and-add are tried, and that the words
/// are in the byte order that the CPU sees. `index` is the place in the GID table;
/// `None` is for InfiniBand, by LID. Blocks for seconds where nothing answers.
///
/// # Errors
/// [`Error::Rdma`]: how far it came.
pub fn self_test(device: &str, port: u8, index: Option<u32>, bytes: usize) -> Result<SelfTest> {
    let list = library().and_then(DeviceList::new).map_err(rdma)?;
    let context = list.find(device).and_then(|device| device.open()).map_err(rdma)?;
    context.active_port(port).map_err(rdma)?;
    let gid = match index {
        None => None,
        Some(index) => Some(context.gid(port, index).map_err(rdma)?.ok_or_else(|| {
            Error::Rdma { what: format!("{device} port {port} has no GID {index}") }
        })?),
    };
    let pair = Pair::new(&context, port, gid.as_ref(), bytes).map_err(rdma)?;
    pair.test(context.attributes().atomicity != Atomicity::None)
}

/// Two ends in this process.
struct Pair {
    near: QueuePair,
    _far: QueuePair,
    completions: Arc<CompletionQueue>,
    local: Arc<Region>,
    remote: Arc<Region>,
}

impl Pair {
    fn new(
        context: &Arc<Context>,
        port: u8,
        gid: Option<&GidEntry>,
        bytes: usize,
    ) -> std::result::Result<Pair, crate::verbs::Error> {
        let domain = ProtectionDomain::new(context)?;
        let completions = CompletionQueue::new(context, 16, None)?;
        let bytes = bytes.max(4096);
        let open =
            Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let open = match context.attributes().atomicity {
            Atomicity::None => Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_WRITE,
            _ => open,
        };
        let remote = Region::pages(&domain, bytes, open)?;
        let local = Region::pages(&domain, bytes, Access::LOCAL)?;
        let end = |access| {
            UnconnectedQueuePair::new(
                &domain,
                &QueuePairConfig {
                    port,
                    depth: 4,
                    inline_bytes: 0,
                    access,
                    psn: random_psn(),
                    completions: &completions,
                    receive: Receive::Nothing,
                },
            )
        };
        let (near, far) = (end(Access::NONE)?, end(open)?);
        let address = gid.map_or(Gid::default(), |entry| entry.gid);
        let index = gid.map_or(0, |entry| entry.index) as u8;
        let (to_near, to_far) = (near.endpoint(address)?, far.endpoint(address)?);
        let attributes = context.attributes();
        let depth = attributes.max_initiator_depth.min(attributes.max_responder_depth).min(4);
        let mtu = context.port(port)?.mtu;
        let connect = |queue: UnconnectedQueuePair, to| {
            let mut connect = Connect::to(to, index);
            connect.mtu = mtu;
            connect.initiator_depth = depth;
            connect.responder_depth = depth;
            connect.retries = RETRIES;
            connect.ack_timeout = ack_timeout(DEAD_AFTER, RETRIES);
            queue.connect(&connect)
        };
        let (near, far) = (connect(near, to_far)?, connect(far, to_near)?);
        Ok(Pair { near, _far: far, completions, local, remote })
    }

    /// Posts a request and waits for it.
    fn run(&self, what: &str, request: Request<'_>) -> Result<Duration> {
        let failed = |error: crate::verbs::Error| Error::Rdma { what: format!("{what}: {error}") };
        let begun = Instant::now();
        let id = self.near.post(request).map_err(failed)?;
        let mut one = [Completion::default()];
        while self.completions.poll(&mut one).map_err(failed)? == 0 {
            if begun.elapsed() > PATIENCE {
                let _ = self.near.shut();
                return Err(Error::Rdma { what: format!("{what}: nothing completes") });
            }
            std::thread::yield_now();
        }
        let took = begun.elapsed();
        self.near.retire(&one[0]).map_err(failed)?;
        match one[0].work() == Some(id) {
            true => Ok(took),
            false => Err(Error::Rdma { what: format!("{what}: another request completed") }),
        }
    }

    fn test(&self, atomics: bool) -> Result<SelfTest> {
        let wrong = |what: &str| Err(Error::Rdma { what: what.to_owned() });
        let bytes = self.local.len();
        let all = || self.local.slice(0..bytes).map_err(rdma);
        let word = || self.local.slice(0..8).map_err(rdma);
        let (local, remote) = (self.local.words(), self.remote.words());
        let at = Remote { address: self.remote.remote_address(), key: self.remote.remote_key() };
        // Relaxed, wherever words are used here: taking a completion orders them,
        // see `CompletionQueue::poll`.
        for (i, word) in local.iter().enumerate() {
            word.store(WORD ^ i as u64, Ordering::Relaxed);
        }
        let write = crate::verbs::Work::Write { from: all()?, to: at };
        self.run("WRITE", Request::new(write))?;
        let arrived = |words: &[std::sync::atomic::AtomicU64]| {
            words.iter().enumerate().all(|(i, w)| w.load(Ordering::Relaxed) == WORD ^ i as u64)
        };
        // The answer to a READ comes behind the WRITE before it.
        local.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.run("READ", Request::read(all()?, at))?;
        if !arrived(local) {
            return wrong("a READ brought other bytes than were written");
        }
        if !arrived(remote) {
            return wrong("a WRITE left other bytes than were sent");
        }
        let mut read = Duration::MAX;
        for _ in 0..8 {
            read = read.min(self.run("READ", Request::read(word()?, at))?);
        }
        if atomics {
            self.atomics(at)?;
        }
        Ok(SelfTest { bytes, atomics, read })
    }

    /// What the adapter found before each change, and what the CPU sees behind.
    fn atomics(&self, at: Remote) -> Result<()> {
        let word = || self.local.slice(0..8).map_err(rdma);
        let (old, cell) = (&self.local.words()[0], &self.remote.words()[0]);
        let check = |what: &str, found: u64, left: u64| {
            let (was, is) = (old.load(Ordering::Relaxed), cell.load(Ordering::Relaxed));
            if (was, is) == (found, left) {
                return Ok(());
            }
            let swapped = was == found.swap_bytes() || is == left.swap_bytes();
            let more = if swapped { ": the bytes are in the wrong order" } else { "" };
            let what = format!(
                "{what} found {was:#x} and left {is:#x}, right were {found:#x} and {left:#x}{more}"
            );
            Err(Error::Rdma { what })
        };
        let mut now = WORD;
        let swap = WORD.rotate_left(24);
        self.run("compare-and-swap", Request::compare_swap(word()?, at, now, swap))?;
        check("a compare-and-swap", now, swap)?;
        now = swap;
        self.run("compare-and-swap", Request::compare_swap(word()?, at, 1, 2))?;
        check("a compare-and-swap that must fail", now, now)?;
        // A carry through all bytes shows their order.
        let add = 0x00ff_00ff_00ff_00ff;
        self.run("fetch-and-add", Request::fetch_add(word()?, at, add))?;
        check("a fetch-and-add", now, now.wrapping_add(add))
    }
}
