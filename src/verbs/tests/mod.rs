//! The owners' promises, on a library without a device.

use std::ptr::NonNull;
use std::sync::Arc;

use farcell_sys as sys;
use sys::libc;

use super::fake::{self, count, state};
use super::*;

mod queue;

fn open() -> Arc<Context> {
    let list = DeviceList::new(fake::library(true)).unwrap();
    list.find("fake0").unwrap().open().unwrap()
}

/// A queue pair of `depth` with its parts.
struct Rig {
    domain: Arc<ProtectionDomain>,
    completions: Arc<CompletionQueue>,
    queue: QueuePair,
}

fn config<'a>(
    completions: &'a Arc<CompletionQueue>,
    depth: u32,
    receive: Receive<'a>,
) -> QueuePairConfig<'a> {
    QueuePairConfig {
        port: 1,
        depth,
        inline_bytes: 32,
        access: Access::REMOTE_READ,
        psn: 1,
        completions,
        receive,
    }
}

fn rig(depth: u32) -> Rig {
    let context = open();
    let domain = ProtectionDomain::new(&context).unwrap();
    let completions = CompletionQueue::new(&context, 128, None).unwrap();
    let config = config(&completions, depth, Receive::Nothing);
    let queue = UnconnectedQueuePair::new(&domain, &config).unwrap();
    let queue = queue.connect(&Connect::to(Endpoint::default(), 0)).unwrap();
    Rig { domain, completions, queue }
}

fn poll(completions: &CompletionQueue) -> Vec<Completion> {
    let mut out = [Completion::default(); 32];
    let count = completions.poll(&mut out).unwrap();
    out[..count].to_vec()
}

const PEER: Remote = Remote { address: 0x1000, key: 1 };

#[test]
fn whatever_is_dropped_first_the_device_is_closed_last() {
    let context = open();
    let domain = ProtectionDomain::new(&context).unwrap();
    let channel = CompletionChannel::new(&context).unwrap();
    let completions = CompletionQueue::new(&context, 128, Some((&channel, 3))).unwrap();
    let shared = SharedReceiveQueue::new(&domain, &completions, 4, 64).unwrap();
    let region = Region::pages(&domain, 1, Access::LOCAL).unwrap();
    let config = config(&completions, 8, Receive::Shared(&shared));
    let queue = UnconnectedQueuePair::new(&domain, &config).unwrap();
    let queue = queue.connect(&Connect::to(Endpoint::default(), 0)).unwrap();
    queue.post(Request::read(region.slice(0..8).unwrap(), PEER)).unwrap();
    // From the outside in: the order that is wrong for C.
    drop(context);
    drop(domain);
    drop(channel);
    drop(region);
    drop(completions);
    drop(shared);
    assert_eq!(count("ibv_dereg_mr"), 0);
    drop(queue);
    let ends: Vec<_> = state(|state| {
        let ends = ["destroy", "dereg", "dealloc", "close"];
        let end = |call: &&&str| ends.iter().any(|end| call.contains(end));
        state.log.iter().filter(end).copied().collect()
    });
    let at = |call: &str| ends.iter().position(|&end| end == call).unwrap();
    assert_eq!(at("ibv_destroy_qp"), 0, "{ends:?}");
    assert!(at("ibv_destroy_srq") < at("ibv_destroy_cq"));
    assert!(at("ibv_destroy_cq") < at("ibv_destroy_comp_channel"));
    assert!(ends.iter().rposition(|&end| end == "ibv_dereg_mr") < Some(at("ibv_dealloc_pd")));
    assert_eq!(ends.last(), Some(&"ibv_close_device"), "{ends:?}");
    assert_eq!(ends.len(), 8, "{ends:?}");
}

#[test]
fn null_slots_are_errors() {
    state(|state| state.null_slots = true);
    let Rig { domain, completions, queue } = rig(4);
    let unsupported = |error: Error, call: &str| {
        assert!(
            matches!(&error, Error::Unsupported { call: seen, .. } if *seen == call),
            "{error}"
        );
    };
    unsupported(completions.poll(&mut [Completion::default()]).unwrap_err(), "ibv_poll_cq");
    unsupported(completions.arm(Notify::Any).unwrap_err(), "ibv_req_notify_cq");
    unsupported(queue.post(Request::doorbell(1)).unwrap_err(), "ibv_post_send");
    assert_eq!(queue.outstanding(), 0, "nothing was posted");
    let shared = SharedReceiveQueue::new(&domain, &completions, 4, 0).unwrap_err();
    unsupported(shared, "ibv_post_srq_recv");
    assert_eq!(count("ibv_destroy_srq"), 1);
    let own = Receive::Own { completions: &completions, slots: 2, bytes: 8 };
    let error = UnconnectedQueuePair::new(&domain, &config(&completions, 4, own)).unwrap_err();
    unsupported(error, "ibv_post_recv");
}

#[test]
fn a_completion_queue_cannot_be_overbooked() {
    let context = open();
    let domain = ProtectionDomain::new(&context).unwrap();
    let completions = CompletionQueue::new(&context, 10, None).unwrap();
    let make = || UnconnectedQueuePair::new(&domain, &config(&completions, 8, Receive::Nothing));
    let first = make().unwrap();
    let error = make().unwrap_err();
    assert!(matches!(error, Error::Limit { wanted: 8, limit: 2, .. }), "{error}");
    drop(first);
    let refused = state(|state| state.fail.insert("ibv_create_qp", libc::ENOMEM));
    assert!(refused.is_none() && make().is_err());
    state(|state| state.fail.clear());
    make().unwrap();
    assert!(CompletionQueue::new(&context, 257, None).is_err());
}

#[test]
fn a_failing_destructor_neither_panics_nor_frees_what_the_device_may_use() {
    struct Watched(Pages, Arc<std::sync::atomic::AtomicBool>);
    // SAFETY: those of `Pages`.
    unsafe impl Memory for Watched {
        fn address(&self) -> NonNull<u8> {
            self.0.address()
        }
        fn len(&self) -> usize {
            self.0.len()
        }
    }
    impl Drop for Watched {
        fn drop(&mut self) {
            self.1.store(true, std::sync::atomic::Ordering::SeqCst);
        }
    }
    for (errno, freed) in [(libc::EBUSY, false), (0, true)] {
        let rig = rig(8);
        let flag = Arc::default();
        let memory = Arc::new(Watched(Pages::new(1).unwrap(), Arc::clone(&flag)));
        let region = Region::register(&rig.domain, memory, Access::LOCAL).unwrap();
        state(|state| {
            for call in ["ibv_dereg_mr", "ibv_destroy_qp", "ibv_destroy_cq", "ibv_close_device"] {
                state.fail.insert(call, errno);
            }
        });
        drop(region);
        drop(rig);
        assert_eq!(flag.load(std::sync::atomic::Ordering::SeqCst), freed);
        state(|state| state.fail.clear());
    }
}

#[test]
fn memory_must_begin_at_a_page() {
    struct Shifted(Pages);
    // SAFETY: a part of `Pages`; only its alignment is wrong, which the test
    // is about.
    unsafe impl Memory for Shifted {
        fn address(&self) -> NonNull<u8> {
            // SAFETY: a page is longer than 8 bytes.
            unsafe { self.0.address().add(8) }
        }
        fn len(&self) -> usize {
            8
        }
    }
    let rig = rig(8);
    let memory = Arc::new(Shifted(Pages::new(1).unwrap()));
    let error = Region::register(&rig.domain, memory, Access::LOCAL).unwrap_err();
    assert!(matches!(error, Error::Unaligned { .. }), "{error}");
    assert_eq!(count("ibv_reg_mr"), 0);
}

#[test]
fn the_bytes_of_a_region() {
    let rig = rig(8);
    let region = Region::pages(&rig.domain, 4096, Access::LOCAL).unwrap();
    let bytes: Vec<u8> = (0..100).collect();
    for offset in [0, 1, 7, 8, 13] {
        region.write(offset, &bytes).unwrap();
        let mut back = vec![0; 100];
        region.read(offset, &mut back).unwrap();
        assert_eq!(back, bytes, "at {offset}");
    }
    let word = region.words()[0].load(std::sync::atomic::Ordering::Relaxed);
    let mut first = [0; 8];
    region.read(0, &mut first).unwrap();
    assert_eq!(word, u64::from_le_bytes(first));
    assert!(matches!(region.read(4090, &mut [0; 7]), Err(Error::Range { .. })));
    assert!(matches!(region.write(usize::MAX, &[0]), Err(Error::Range { .. })));
    assert!(matches!(region.slice(8..8), Err(Error::Range { .. })));
    #[allow(clippy::reversed_empty_ranges, reason = "what is tested")]
    let reversed = region.slice(16..8);
    assert!(matches!(reversed, Err(Error::Range { .. })));
    assert_eq!(region.words().len(), 512);
}

#[test]
fn a_registration_past_the_memlock_limit_says_so() {
    let rig = rig(8);
    state(|state| state.fail.insert("ibv_reg_mr", libc::ENOMEM));
    let error = Region::pages(&rig.domain, 8192, Access::LOCAL).unwrap_err();
    match memlock_limit() {
        Some(limit) => assert!(
            matches!(error, Error::Memlock { needed: 8192, limit: seen, .. } if seen == limit),
            "{error}"
        ),
        None => assert_eq!(error.errno(), Some(libc::ENOMEM)),
    }
    state(|state| state.fail.insert("ibv_reg_mr", libc::EFAULT));
    let error = Region::pages(&rig.domain, 8192, Access::LOCAL).unwrap_err();
    assert!(error.to_string().contains("tmpfs"), "{error}");
}

#[test]
fn devices_and_ports_that_are_not_there() {
    let list = DeviceList::new(fake::library(true)).unwrap();
    let error = list.find("mlx5_0").unwrap_err();
    assert_eq!(error.to_string(), "no RDMA device mlx5_0: this machine has fake0");
    drop(list);
    assert_eq!(count("ibv_free_device_list"), 1);

    let context = open();
    state(|state| state.port_state = Some(sys::IBV_PORT_DOWN));
    assert_eq!(context.port(1).unwrap().state, PortState::Down);
    let error = context.active_port(1).unwrap_err();
    assert!(error.to_string().contains("fake0 port 1 is DOWN"), "{error}");

    state(|state| state.no_device = true);
    assert!(matches!(DeviceList::new(fake::library(true)), Err(Error::NoDevice { .. })));
    assert_eq!(count("ibv_free_device_list"), 3, "the empty list too");
    state(|state| state.fail.insert("ibv_get_device_list", libc::ENOSYS));
    assert!(matches!(DeviceList::new(fake::library(true)), Err(Error::NoDevice { .. })));
    let absent = sys::Library::open("libibverbs-that-is-not-there.so.1").unwrap_err();
    assert!(matches!(Error::from(absent), Error::Library(_)));
}

#[test]
fn gids_come_from_the_new_call_or_the_old() {
    let gids = open().gids(1).unwrap();
    assert_eq!(gids.len(), 2, "the entry without data is left out");
    assert_eq!((gids[1].index, gids[1].kind), (2, GidKind::RoceV2));
    let list = DeviceList::new(fake::library(false)).unwrap();
    let old = list.find("fake0").unwrap().open().unwrap();
    let gids = old.gids(1).unwrap();
    assert_eq!(count("ibv_query_gid"), 3);
    assert_eq!(gids.len(), 2, "the zero GID is left out");
    assert_eq!((gids[0].index, gids[0].kind), (1, GidKind::Unknown));
}

#[test]
fn an_event_that_does_not_come_does_not_block() {
    let context = open();
    let channel = CompletionChannel::new(&context).unwrap();
    assert_eq!(channel.next().unwrap(), None);
    let patience = std::time::Duration::from_millis(20);
    let start = std::time::Instant::now();
    assert_eq!(channel.wait(Some(patience)).unwrap(), None);
    assert!(start.elapsed() >= patience);
    assert_eq!(context.next_async_event().unwrap(), None);
}

#[test]
fn a_child_must_reopen() {
    let rig = rig(8);
    let region = Region::pages(&rig.domain, 4096, Access::LOCAL).unwrap();
    let word = region.slice(0..8).unwrap();
    let before = state(|state| state.log.len());
    // SAFETY: the child allocates a little, which glibc allows after a fork,
    // and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = |result: Result<(), Error>| matches!(result, Err(Error::Forked { .. }));
        let checks = [
            forked(rig.queue.post(Request::read(word, PEER)).map(drop)),
            forked(rig.completions.poll(&mut [Completion::default()]).map(drop)),
            forked(rig.completions.arm(Notify::Any)),
            forked(rig.queue.state().map(drop)),
            forked(rig.queue.shut()),
            forked(region.read(0, &mut [0])),
            forked(Region::pages(&rig.domain, 1, Access::LOCAL).map(drop)),
            forked(ProtectionDomain::new(rig.domain.context()).map(drop)),
            forked(rig.domain.context().port(1).map(drop)),
            region.words().is_empty(),
        ];
        drop(region);
        drop(rig);
        let untouched = state(|state| state.log.len()) == before;
        // A context of the child's own works.
        let own = open().port(1).is_ok();
        let all = checks.iter().all(|&check| check) && untouched && own;
        // SAFETY: ends the child without running what the parent set up.
        unsafe { libc::_exit(i32::from(!all)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0);
    rig.queue.post(Request::read(word, PEER)).unwrap();
}
