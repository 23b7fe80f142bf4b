//! What the tests that need an RDMA device share.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::env;
use std::sync::Arc;
use std::time::{Duration, Instant};

use farcell::verbs::{
    self, Access, Completion, CompletionQueue, Connect, Context, DeviceList, Endpoint, Error,
    GidKind, ProtectionDomain, QueuePair, QueuePairConfig, Receive, Region, Remote, Request,
    UnconnectedQueuePair,
};

/// The variable that turns "no device" from a remark into a failure.
const REQUIRE: &str = "FARCELL_TEST_RDMA";

pub const PORT: u8 = 1;

/// The device to test on: `FARCELL_DEVICE`, else the first one whose port is
/// active. `None`, said aloud, where there is none.
pub fn device() -> Option<Arc<Context>> {
    match find() {
        Ok(context) => Some(context),
        Err(error) => {
            let required = env::var(REQUIRE).is_ok_and(|value| value == "required");
            assert!(!required, "{REQUIRE}=required, but: {error}");
            println!("NOT TESTED, for want of an RDMA device: {error}");
            None
        }
    }
}

fn find() -> Result<Arc<Context>, Error> {
    let list = DeviceList::new(verbs::library()?)?;
    if let Ok(name) = env::var("FARCELL_DEVICE") {
        let name = name.split(':').next().unwrap_or_default();
        let context = list.find(name)?.open()?;
        context.active_port(PORT)?;
        return Ok(context);
    }
    let mut last = None;
    for device in list.iter() {
        match device.open().and_then(|context| context.active_port(PORT).map(|_| context)) {
            Ok(context) => return Ok(context),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| unreachable!("an empty list is an error of its own")))
}

/// One side of a connection, all in this process.
pub struct Side {
    pub domain: Arc<ProtectionDomain>,
    pub completions: Arc<CompletionQueue>,
    pub queue: QueuePair,
}

pub const ALL: fn() -> Access =
    || Access::LOCAL | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;

/// What one side is made with.
pub struct Half<'a> {
    pub domain: Arc<ProtectionDomain>,
    pub completions: Arc<CompletionQueue>,
    pub receive: Receive<'a>,
    pub access: Access,
}

impl Half<'_> {
    pub fn new(context: &Arc<Context>) -> Self {
        Self {
            domain: ProtectionDomain::new(context).unwrap(),
            completions: CompletionQueue::new(context, 512, None).unwrap(),
            receive: Receive::Nothing,
            access: ALL(),
        }
    }
}

/// The GID to connect by, and its index: RoCE v2 with an address, else the
/// first. `None` on InfiniBand, where the LID is enough.
pub fn address(context: &Context) -> (verbs::Gid, u8) {
    let gids = context.gids(PORT).unwrap();
    let best = gids
        .iter()
        .filter(|entry| entry.netdev_here != Some(false))
        .max_by_key(|entry| (entry.kind == GidKind::RoceV2, entry.gid.ipv4().is_some()))
        .expect("an active port has a GID");
    (best.gid, u8::try_from(best.index).unwrap())
}

pub fn unconnected(half: &Half<'_>, psn: u32) -> UnconnectedQueuePair {
    let config = QueuePairConfig {
        port: PORT,
        depth: 128,
        inline_bytes: 64,
        access: half.access,
        psn,
        completions: &half.completions,
        receive: half.receive,
    };
    UnconnectedQueuePair::new(&half.domain, &config).unwrap()
}

pub fn connect(context: &Context, queue: UnconnectedQueuePair, peer: Endpoint) -> QueuePair {
    let mut to = Connect::to(peer, address(context).1);
    to.mtu = context.port(PORT).unwrap().mtu;
    queue.connect(&to).unwrap()
}

/// Two queue pairs of this process, connected to each other.
pub fn pair(context: &Arc<Context>, left: Half<'_>, right: Half<'_>) -> (Side, Side) {
    let gid = address(context).0;
    let (a, b) = (unconnected(&left, 0x11), unconnected(&right, 0x2222));
    let (to_a, to_b) = (a.endpoint(gid).unwrap(), b.endpoint(gid).unwrap());
    let side =
        |half: Half<'_>, queue| Side { domain: half.domain, completions: half.completions, queue };
    (side(left, connect(context, a, to_b)), side(right, connect(context, b, to_a)))
}

/// Polls until a completion comes; panics after ten seconds.
pub fn next(completions: &CompletionQueue) -> Completion {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut out = [Completion::default()];
    while completions.poll(&mut out).unwrap() == 0 {
        assert!(Instant::now() < deadline, "no completion came");
        std::thread::yield_now();
    }
    out[0]
}

impl Side {
    /// Posts a request, waits for it and retires it.
    pub fn run(&self, request: Request<'_>) -> Result<(), Error> {
        let id = self.queue.post(request)?;
        let done = next(&self.completions);
        assert_eq!(done.work(), Some(id));
        self.queue.retire(&done)
    }
}

/// The word at `index`, as a peer names it.
pub fn remote(region: &Region, index: u64) -> Remote {
    Remote { address: region.remote_address() + 8 * index, key: region.remote_key() }
}
