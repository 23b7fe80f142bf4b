//! Promise: what farcell does over RDMA is plain verbs. A peer that is written
//! with another crate, and whose CPU does nothing meanwhile, serves its READs
//! and atomics.
//!
//! Needs a device. Without one the test says so and passes, unless
//! `FARCELL_TEST_RDMA` is `required`.

#![allow(unsafe_code, reason = "the test looks at memory that a device has written to")]

use farcell::verbs::{
    Access, Completion, CompletionQueue, Connect, Context, DeviceList, Endpoint, Error,
    ProtectionDomain, QueuePair, QueuePairConfig, Receive, Region, Remote, Request,
    UnconnectedQueuePair, WorkStatus, library,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const PORT: u8 = 1;
const PSN: u32 = 0x00ab_cdef;
const CELLS: usize = 512;
/// READs and atomics under way.
const DEPTH: u8 = 8;

/// farcell's end.
struct Ours {
    queue: QueuePair,
    completions: Arc<CompletionQueue>,
    buffer: Arc<Region>,
}

impl Ours {
    /// Carries out requests, all under way together, and waits for the last.
    fn run(&self, requests: &[Request<'_>]) -> Result<(), Error> {
        let mut posted = Vec::new();
        self.queue.post_all(requests, &mut posted)?;
        let begun = Instant::now();
        let mut batch = [Completion::default(); 16];
        loop {
            let n = self.completions.poll(&mut batch)?;
            for completion in &batch[..n] {
                self.queue.retire(completion)?;
                if completion.work() == posted.last().copied() {
                    return Ok(());
                }
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "no completion");
            std::thread::yield_now();
        }
    }

    fn word(&self, index: usize) -> u64 {
        // Relaxed: taking the completion orders it.
        self.buffer.words()[index].load(Ordering::Relaxed)
    }
}

fn device() -> Option<Arc<Context>> {
    let find = || -> Result<Arc<Context>, Error> {
        let list = DeviceList::new(library()?)?;
        let name = std::env::var("FARCELL_DEVICE").ok();
        let name = name.as_deref().and_then(|name| name.split(':').next());
        let device = list.iter().find(|device| name.is_none_or(|name| name == device.name()));
        device.ok_or(Error::NoDevice { reason: "none of this name".to_owned() })?.open()
    };
    match find() {
        Ok(context) => Some(context),
        Err(error) => {
            let required = std::env::var("FARCELL_TEST_RDMA").is_ok_and(|v| v == "required");
            assert!(!required, "FARCELL_TEST_RDMA=required, but: {error}");
            println!("NOT TESTED, for want of an RDMA device: {error}");
            None
        }
    }
}

#[test]
fn a_foreign_peer_serves_reads_and_atomics() {
    let Some(context) = device() else { return };

    // The foreign peer, up to the point where it needs to know ours.
    let devices = ibverbs::devices().unwrap();
    let foreign = devices
        .iter()
        .find(|d| d.name().is_some_and(|name| name.to_bytes() == context.name().as_bytes()))
        .unwrap()
        .open()
        .unwrap();
    let foreign_completions = foreign.create_cq(16, 0).unwrap();
    let foreign_domain = foreign.alloc_pd().unwrap();
    let mut cells = foreign_domain.allocate::<u64>(CELLS).unwrap();
    for (i, cell) in cells.iter_mut().enumerate() {
        *cell = (i as u64) << 32 | 7;
    }
    let gid = context
        .gids(PORT)
        .unwrap()
        .into_iter()
        .find(|entry| !entry.gid.is_link_local() && !entry.gid.is_zero());
    let mut builder = foreign_domain.create_qp(
        &foreign_completions,
        &foreign_completions,
        ibverbs::ibv_qp_type::IBV_QPT_RC,
    );
    builder
        .set_access(
            ibverbs::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
                | ibverbs::ibv_access_flags::IBV_ACCESS_REMOTE_READ
                | ibverbs::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC,
        )
        .set_max_dest_rd_atomic(DEPTH)
        .set_rq_psn(PSN);
    if let Some(entry) = &gid {
        builder.set_gid_index(entry.index);
    }
    let prepared = builder.build().unwrap();
    let theirs = prepared.endpoint();

    // Ours.
    let domain = ProtectionDomain::new(&context).unwrap();
    let completions = CompletionQueue::new(&context, 64, None).unwrap();
    let buffer = Region::pages(&domain, 8 * CELLS, Access::LOCAL).unwrap();
    let config = QueuePairConfig {
        port: PORT,
        depth: 64,
        inline_bytes: 0,
        access: Access::NONE,
        psn: PSN,
        completions: &completions,
        receive: Receive::Nothing,
    };
    let queue = UnconnectedQueuePair::new(&domain, &config).unwrap();
    let our_gid = gid.as_ref().map(|entry| entry.gid).unwrap_or_default();
    let end = queue.endpoint(our_gid).unwrap();
    let mut connect = Connect::to(
        // It starts with packet 0, and is on our own port.
        Endpoint { queue_pair: theirs.num, psn: 0, lid: theirs.lid, gid: our_gid },
        gid.as_ref().map_or(0, |entry| u8::try_from(entry.index).unwrap()),
    );
    connect.mtu = context.port(PORT).unwrap().mtu;
    connect.initiator_depth = DEPTH;
    let queue = queue.connect(&connect).unwrap();
    let _peer = prepared
        .handshake(ibverbs::QueuePairEndpoint {
            num: end.queue_pair,
            lid: end.lid,
            gid: theirs.gid,
        })
        .unwrap();
    let ours = Ours { queue, completions, buffer };

    let base = cells.as_ptr().expose_provenance() as u64;
    let key = cells.rkey().key;
    let at = |i: usize| Remote { address: base + 8 * i as u64, key };
    let word = |i: usize| ours.buffer.slice(8 * i..8 * i + 8).unwrap();

    // One READ of everything: several packets.
    let all = ours.buffer.slice(0..8 * CELLS).unwrap();
    ours.run(&[Request::read(all, at(0))]).unwrap();
    assert!((0..CELLS).all(|i| ours.word(i) == (i as u64) << 32 | 7));

    // A swap that fits, and one that does not.
    ours.run(&[Request::compare_swap(word(0), at(3), 3 << 32 | 7, 0x0102_0304_0506_0708)]).unwrap();
    assert_eq!(ours.word(0), 3 << 32 | 7);
    ours.run(&[Request::compare_swap(word(0), at(3), 3 << 32 | 7, 1)]).unwrap();
    assert_eq!(ours.word(0), 0x0102_0304_0506_0708);

    // Adds, more of them under way than the peer answers at a time. They wrap.
    let adds: Vec<_> = (0..40).map(|i| Request::fetch_add(word(i), at(5), 3)).collect();
    ours.run(&adds).unwrap();
    assert!((0..40).all(|i| ours.word(i) == (5 << 32 | 7) + 3 * i as u64));
    ours.run(&[Request::fetch_add(word(0), at(6), u64::MAX - (6 << 32 | 7))]).unwrap();
    ours.run(&[Request::fetch_add(word(0), at(6), 2)]).unwrap();
    assert_eq!(ours.word(0), u64::MAX);

    // The foreign CPU sees the same, in the same byte order.
    let see = |i: usize| {
        // SAFETY: inside of the region, aligned; volatile, since the device
        // has written to it behind the compiler's back.
        unsafe { cells.as_ptr().add(i).read_volatile() }
    };
    assert_eq!(see(3), 0x0102_0304_0506_0708);
    assert_eq!(see(5), (5 << 32 | 7) + 120);
    assert_eq!(see(6), 1);
    assert_eq!(see(4), 4 << 32 | 7);

    // Behind the end of its memory the peer's device refuses, and says so.
    let error = ours.run(&[Request::read(word(0), at(CELLS))]).unwrap_err();
    assert!(matches!(error, Error::Work { status: WorkStatus::RemoteAccess, .. }), "{error}");
}
