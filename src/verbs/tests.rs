//! The owners' promises, on a library without a device.

use std::ptr::NonNull;
use std::sync::Arc;

use farcell_sys as sys;
use sys::libc;

use super::fake::{self, complete, count, state};
use super::*;

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
    Rig {
        domain,
        completions,
        queue,
    }
}

fn poll(completions: &CompletionQueue) -> Vec<Completion> {
    let mut out = [Completion::default(); 32];
    let count = completions.poll(&mut out).unwrap();
    out[..count].to_vec()
}

const PEER: Remote = Remote {
    address: 0x1000,
    key: 1,
};

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
    queue
        .post(Request::read(region.slice(0..8).unwrap(), PEER))
        .unwrap();
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
    let Rig {
        domain,
        completions,
        queue,
    } = rig(4);
    let unsupported = |error: Error, call: &str| {
        assert!(
            matches!(&error, Error::Unsupported { call: seen, .. } if *seen == call),
            "{error}"
        );
    };
    unsupported(
        completions.poll(&mut [Completion::default()]).unwrap_err(),
        "ibv_poll_cq",
    );
    unsupported(
        completions.arm(Notify::Any).unwrap_err(),
        "ibv_req_notify_cq",
    );
    unsupported(
        queue.post(Request::doorbell(1)).unwrap_err(),
        "ibv_post_send",
    );
    assert_eq!(queue.outstanding(), 0, "nothing was posted");
    let shared = SharedReceiveQueue::new(&domain, &completions, 4, 0).unwrap_err();
    unsupported(shared, "ibv_post_srq_recv");
    assert_eq!(count("ibv_destroy_srq"), 1);
    let own = Receive::Own {
        completions: &completions,
        slots: 2,
        bytes: 8,
    };
    let error = UnconnectedQueuePair::new(&domain, &config(&completions, 4, own)).unwrap_err();
    unsupported(error, "ibv_post_recv");
}

#[test]
fn a_request_under_way_keeps_its_region() {
    let rig = rig(8);
    let region = Region::pages(&rig.domain, 1, Access::LOCAL).unwrap();
    let id = rig
        .queue
        .post(Request::read(region.slice(0..8).unwrap(), PEER))
        .unwrap();
    drop(region);
    rig.queue.release_idle();
    assert_eq!(count("ibv_dereg_mr"), 0);
    let done = poll(&rig.completions);
    assert_eq!(done.len(), 1);
    assert_eq!(done[0].work(), Some(id));
    rig.queue.retire(&done[0]).unwrap();
    assert_eq!(rig.queue.outstanding(), 0);
    rig.queue.release_idle();
    assert_eq!(count("ibv_dereg_mr"), 1);
}

#[test]
fn idle_regions_are_let_go_as_new_ones_come() {
    let rig = rig(8);
    for _ in 0..40 {
        let region = Region::pages(&rig.domain, 1, Access::LOCAL).unwrap();
        rig.queue
            .post(Request::read(region.slice(0..8).unwrap(), PEER))
            .unwrap();
        for done in poll(&rig.completions) {
            rig.queue.retire(&done).unwrap();
        }
    }
    assert!(count("ibv_dereg_mr") >= 30, "{}", count("ibv_dereg_mr"));
}

#[test]
fn a_full_queue_says_so_before_the_device_does() {
    let rig = rig(4);
    state(|state| state.silent = true);
    for _ in 0..4 {
        rig.queue.post(Request::doorbell(1)).unwrap();
    }
    let calls = count("ibv_post_send");
    assert!(matches!(
        rig.queue.post(Request::doorbell(1)),
        Err(Error::QueueFull { depth: 4, .. })
    ));
    assert_eq!(count("ibv_post_send"), calls);
}

#[test]
fn unsignalled_requests_drain() {
    let rig = rig(8);
    for _ in 0..100 {
        while rig.queue.outstanding() == 8 {
            let done = poll(&rig.completions);
            assert!(!done.is_empty(), "nothing will ever complete");
            for done in done {
                rig.queue.retire(&done).unwrap();
            }
        }
        rig.queue.post(Request::doorbell(1).unsignalled()).unwrap();
    }
    let signalled = state(|state| {
        let signalled = |&&(_, _, flags): &&(u64, u32, u32)| flags & sys::IBV_SEND_SIGNALED != 0;
        state.sent.iter().filter(signalled).count()
    });
    assert_eq!(signalled, 25, "one in half the depth");
}

#[test]
fn what_was_posted_before_a_failure_is_told() {
    let rig = rig(64);
    state(|state| state.room = Some(20));
    let requests = vec![Request::doorbell(1); 40];
    let mut posted = Vec::new();
    let error = rig.queue.post_all(&requests, &mut posted).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOMEM));
    assert_eq!(posted.len(), 20);
    let sent: Vec<_> = state(|state| state.sent.iter().map(|&(id, ..)| WorkId(id)).collect());
    assert_eq!(sent, posted);
    assert_eq!(rig.queue.outstanding(), 20);
    for done in poll(&rig.completions) {
        rig.queue.retire(&done).unwrap();
    }
    state(|state| state.room = None);
    rig.queue.post(Request::doorbell(1)).unwrap();
    assert_eq!(rig.queue.outstanding(), 1);
}

#[test]
fn a_flawed_request_stops_the_batch_before_it() {
    let rig = rig(8);
    let region = Region::pages(&rig.domain, 64, Access::NONE).unwrap();
    let word = region.slice(0..8).unwrap();
    let mut posted = Vec::new();
    let error = rig
        .queue
        .post_all(
            &[Request::doorbell(1), Request::read(word, PEER)],
            &mut posted,
        )
        .unwrap_err();
    assert!(error.to_string().contains("local writing"), "{error}");
    assert_eq!(posted.len(), 1);

    let region = Region::pages(&rig.domain, 64, Access::LOCAL).unwrap();
    let odd = Remote {
        address: 0x1001,
        key: 1,
    };
    for flawed in [
        Request::fetch_add(region.slice(0..16).unwrap(), PEER, 1),
        Request::fetch_add(region.slice(4..12).unwrap(), PEER, 1),
        Request::compare_swap(region.slice(0..8).unwrap(), odd, 0, 1),
    ] {
        let error = rig.queue.post(flawed).unwrap_err();
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
    let other = ProtectionDomain::new(rig.domain.context()).unwrap();
    let foreign = Region::pages(&other, 64, Access::LOCAL).unwrap();
    let error = rig
        .queue
        .post(Request::read(foreign.slice(0..8).unwrap(), PEER))
        .unwrap_err();
    assert!(
        error.to_string().contains("another protection domain"),
        "{error}"
    );
    let long = Work::SendInline {
        bytes: &[0; 33],
        immediate: None,
    };
    let error = rig.queue.post(long.into()).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Limit {
                wanted: 33,
                limit: 32,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_completion_counts_once_and_for_its_own_queue_pair() {
    let first = rig(8);
    let second = rig(8);
    first.queue.post(Request::doorbell(1)).unwrap();
    let done = poll(&first.completions).pop().unwrap();
    second.queue.post(Request::doorbell(1)).unwrap();
    assert!(matches!(
        second.queue.retire(&done),
        Err(Error::Mismatch { .. })
    ));
    first.queue.retire(&done).unwrap();
    assert!(matches!(
        first.queue.retire(&done),
        Err(Error::Mismatch { .. })
    ));
    assert_eq!(second.queue.outstanding(), 1);
}

#[test]
fn a_failed_request_names_status_and_queue_pair() {
    let rig = rig(8);
    state(|state| state.silent = true);
    let id = rig.queue.post(Request::doorbell(1).unsignalled()).unwrap();
    complete(id.0, sys::IBV_WC_REM_ACCESS_ERR, None);
    let done = poll(&rig.completions).pop().unwrap();
    let error = rig.queue.retire(&done).unwrap_err();
    let Error::Work { status, .. } = &error else {
        panic!("{error}");
    };
    assert!(status.was_refused());
    assert!(!WorkStatus::Flushed.was_refused() && !WorkStatus::RetryExceeded.was_refused());
    assert!(
        error
            .to_string()
            .starts_with("request on device fake0 port 1, queue pair 7: remote access error"),
        "{error}"
    );
}

#[test]
fn receives_go_round() {
    let context = open();
    let domain = ProtectionDomain::new(&context).unwrap();
    let completions = CompletionQueue::new(&context, 128, None).unwrap();
    let shared = SharedReceiveQueue::new(&domain, &completions, 2, 0).unwrap();
    assert!(matches!(shared.repost(0), Err(Error::Mismatch { .. })));
    assert!(matches!(shared.repost(2), Err(Error::Limit { .. })));
    let id = state(|state| state.receives.pop_front().unwrap());
    complete(id, sys::IBV_WC_SUCCESS, Some(0x0102_0304));
    let done = poll(&completions).pop().unwrap();
    assert!(done.is_receive() && done.work().is_none());
    let received = shared.received(&done).unwrap();
    assert_eq!((received.slot, received.bytes), (0, 0));
    assert_eq!(received.immediate, Some(0x0102_0304));
    let other = SharedReceiveQueue::new(&domain, &completions, 2, 0).unwrap();
    assert!(matches!(other.received(&done), Err(Error::Mismatch { .. })));
    shared.repost(received.slot).unwrap();
    assert!(matches!(
        shared.repost(received.slot),
        Err(Error::Mismatch { .. })
    ));
}

#[test]
fn a_completion_queue_cannot_be_overbooked() {
    let context = open();
    let domain = ProtectionDomain::new(&context).unwrap();
    let completions = CompletionQueue::new(&context, 10, None).unwrap();
    let make = || UnconnectedQueuePair::new(&domain, &config(&completions, 8, Receive::Nothing));
    let first = make().unwrap();
    let error = make().unwrap_err();
    assert!(
        matches!(
            error,
            Error::Limit {
                wanted: 8,
                limit: 2,
                ..
            }
        ),
        "{error}"
    );
    drop(first);
    let refused = state(|state| state.fail.insert("ibv_create_qp", libc::ENOMEM));
    assert!(refused.is_none() && make().is_err());
    state(|state| state.fail.clear());
    make().unwrap();
    assert!(CompletionQueue::new(&context, 257, None).is_err());
}

#[test]
fn inline_data_is_a_wish() {
    let context = open();
    let domain = ProtectionDomain::new(&context).unwrap();
    let completions = CompletionQueue::new(&context, 128, None).unwrap();
    let mut wish = config(&completions, 8, Receive::Nothing);
    wish.inline_bytes = 4096;
    let queue = UnconnectedQueuePair::new(&domain, &wish).unwrap();
    let queue = queue.connect(&Connect::to(Endpoint::default(), 0)).unwrap();
    assert_eq!(queue.max_inline(), 0);
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
            for call in [
                "ibv_dereg_mr",
                "ibv_destroy_qp",
                "ibv_destroy_cq",
                "ibv_close_device",
            ] {
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
    assert!(matches!(
        region.read(4090, &mut [0; 7]),
        Err(Error::Range { .. })
    ));
    assert!(matches!(
        region.write(usize::MAX, &[0]),
        Err(Error::Range { .. })
    ));
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
    assert_eq!(
        error.to_string(),
        "no RDMA device mlx5_0: this machine has fake0"
    );
    drop(list);
    assert_eq!(count("ibv_free_device_list"), 1);

    let context = open();
    state(|state| state.port_state = Some(sys::IBV_PORT_DOWN));
    assert_eq!(context.port(1).unwrap().state, PortState::Down);
    let error = context.active_port(1).unwrap_err();
    assert!(
        error.to_string().contains("fake0 port 1 is DOWN"),
        "{error}"
    );

    state(|state| state.no_device = true);
    assert!(matches!(
        DeviceList::new(fake::library(true)),
        Err(Error::NoDevice { .. })
    ));
    assert_eq!(count("ibv_free_device_list"), 3, "the empty list too");
    state(|state| state.fail.insert("ibv_get_device_list", libc::ENOSYS));
    assert!(matches!(
        DeviceList::new(fake::library(true)),
        Err(Error::NoDevice { .. })
    ));
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
