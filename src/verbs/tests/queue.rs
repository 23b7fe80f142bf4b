//! What goes through a queue pair, and what of it is held until when.

use farcell_sys as sys;
use sys::libc;

use super::super::fake::{complete, count, state};
use super::super::*;
use super::{PEER, config, open, poll, rig};

#[test]
fn a_request_under_way_keeps_its_region() {
    let rig = rig(8);
    let region = Region::pages(&rig.domain, 1, Access::LOCAL).unwrap();
    let id = rig.queue.post(Request::read(region.slice(0..8).unwrap(), PEER)).unwrap();
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
        rig.queue.post(Request::read(region.slice(0..8).unwrap(), PEER)).unwrap();
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
    assert!(matches!(rig.queue.post(Request::doorbell(1)), Err(Error::QueueFull { depth: 4, .. })));
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
fn a_doorbell_that_fails_leaves_the_outcome_open() {
    let rig = rig(8);
    let region = Region::pages(&rig.domain, 1, Access::LOCAL).unwrap();
    state(|state| state.fail.insert("ibv_post_send", libc::EIO));
    let request = Request::read(region.slice(0..8).unwrap(), PEER);
    let error = rig.queue.post(request).unwrap_err();
    assert!(matches!(error, Error::Unclear { errno: libc::EIO, .. }), "{error}");
    assert_eq!(rig.queue.outstanding(), 1, "the device may still carry it out");
    drop(region);
    rig.queue.release_idle();
    assert_eq!(count("ibv_dereg_mr"), 0);
}

#[test]
fn a_flawed_request_stops_the_batch_before_it() {
    let rig = rig(8);
    let region = Region::pages(&rig.domain, 64, Access::NONE).unwrap();
    let word = region.slice(0..8).unwrap();
    let mut posted = Vec::new();
    let error = rig
        .queue
        .post_all(&[Request::doorbell(1), Request::read(word, PEER)], &mut posted)
        .unwrap_err();
    assert!(error.to_string().contains("local writing"), "{error}");
    assert_eq!(posted.len(), 1);

    let region = Region::pages(&rig.domain, 64, Access::LOCAL).unwrap();
    let odd = Remote { address: 0x1001, key: 1 };
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
    let error = rig.queue.post(Request::read(foreign.slice(0..8).unwrap(), PEER)).unwrap_err();
    assert!(error.to_string().contains("another protection domain"), "{error}");
    let long = Work::SendInline { bytes: &[0; 33], immediate: None };
    let error = rig.queue.post(long.into()).unwrap_err();
    assert!(matches!(error, Error::Limit { wanted: 33, limit: 32, .. }), "{error}");
}

#[test]
fn a_completion_counts_once_and_for_its_own_queue_pair() {
    let first = rig(8);
    let second = rig(8);
    first.queue.post(Request::doorbell(1)).unwrap();
    first.queue.post(Request::doorbell(1)).unwrap();
    let done = poll(&first.completions);
    second.queue.post(Request::doorbell(1)).unwrap();
    let foreign = second.queue.retire(&done[0]);
    assert!(matches!(foreign, Err(Error::Mismatch { .. })));
    assert_eq!(second.queue.outstanding(), 1);
    // The later one stands for the earlier one; two threads that poll may come
    // in this order.
    first.queue.retire(&done[1]).unwrap();
    assert_eq!(first.queue.outstanding(), 0);
    first.queue.post(Request::doorbell(1)).unwrap();
    first.queue.retire(&done[0]).unwrap();
    first.queue.retire(&done[1]).unwrap();
    assert_eq!(first.queue.outstanding(), 1);
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
    assert!(matches!(shared.repost(received.slot), Err(Error::Mismatch { .. })));
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
