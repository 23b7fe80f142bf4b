//! What the verbs layer does with a real HCA. soft-RoCE will do. Without a
//! device each test says so and passes, unless `FARCELL_TEST_RDMA=required`.

mod verbs_support;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use farcell::verbs::{
    Access, AsyncEvent, Atomicity, Completion, CompletionChannel, CompletionQueue, Connect, Error,
    LinkLayer, Memory, Notify, Pages, QueuePairState, Receive, Region, Request, SharedReceiveQueue,
    Work, WorkStatus,
};
use verbs_support::{
    ALL, Half, PORT, Side, address, connect, device, next, pair, remote, unconnected,
};

fn status(result: Result<(), Error>) -> WorkStatus {
    match result {
        Err(Error::Work { status, .. }) => status,
        other => panic!("no failed request: {other:?}"),
    }
}

fn scratch(side: &Side) -> Arc<Region> {
    Region::pages(&side.domain, 4096, Access::LOCAL).unwrap()
}

#[test]
fn a_device_tells_what_it_is() {
    let Some(context) = device() else { return };
    let attributes = context.attributes();
    println!("{}: {attributes:?}", context.name());
    assert!(attributes.ports >= 1 && attributes.max_queue_depth > 0);
    let port = context.port(PORT).unwrap();
    println!("port {PORT}: {port:?}");
    assert_ne!(port.link_layer, LinkLayer::Unspecified);
    if context.name().starts_with("rxe") {
        assert_eq!(port.link_layer, LinkLayer::Ethernet);
    }
    assert!(port.mtu.bytes() >= 256 && port.max_message > 0 && port.gids > 0);
    let gids = context.gids(PORT).unwrap();
    assert!(!gids.is_empty());
    for entry in &gids {
        println!("GID {}: {} {:?} on {:?}", entry.index, entry.gid, entry.kind, entry.netdev);
        assert_ne!(entry.netdev_here, Some(false));
    }
    let error = context.port(attributes.ports + 1).unwrap_err();
    assert!(error.to_string().contains(&format!("port {}", attributes.ports + 1)), "{error}");
}

#[test]
fn read_write_and_atomics_between_two_queue_pairs() {
    let Some(context) = device() else { return };
    let (client, server) = pair(&context, Half::new(&context), Half::new(&context));
    let cells = Region::pages(&server.domain, 4096, ALL()).unwrap();
    let local = scratch(&client);
    let word = || local.slice(0..8).unwrap();
    let answer = || local.words()[0].load(Relaxed);

    cells.words()[3].store(0x0123_4567_89ab_cdef, Relaxed);
    client.run(Request::read(word(), remote(&cells, 3))).unwrap();
    assert_eq!(answer(), 0x0123_4567_89ab_cdef);

    let pattern: Vec<u8> = (0..=255).cycle().take(2048).collect();
    local.write(1024, &pattern).unwrap();
    let from = local.slice(1024..3072).unwrap();
    client.run(Work::Write { from, to: remote(&cells, 64) }.into()).unwrap();
    let mut seen = vec![0; 2048];
    cells.read(512, &mut seen).unwrap();
    assert_eq!(seen, pattern);

    let bytes = 77u64.to_le_bytes();
    client.run(Work::WriteInline { bytes: &bytes, to: remote(&cells, 4) }.into()).unwrap();
    assert_eq!(cells.words()[4].load(Relaxed), 77);

    let cell = remote(&cells, 5);
    cells.words()[5].store(10, Relaxed);
    client.run(Request::compare_swap(word(), cell, 10, 20)).unwrap();
    assert_eq!((answer(), cells.words()[5].load(Relaxed)), (10, 20));
    client.run(Request::compare_swap(word(), cell, 10, 30)).unwrap();
    assert_eq!((answer(), cells.words()[5].load(Relaxed)), (20, 20));
    client.run(Request::fetch_add(word(), cell, u64::MAX)).unwrap();
    assert_eq!((answer(), cells.words()[5].load(Relaxed)), (20, 19));
    assert_eq!(client.queue.outstanding(), 0);
}

#[test]
fn a_queue_pair_connected_to_itself() {
    let Some(context) = device() else { return };
    let half = Half::new(&context);
    let queue = unconnected(&half, 0x33);
    let myself = queue.endpoint(address(&context).0).unwrap();
    let side = Side {
        queue: connect(&context, queue, myself),
        domain: half.domain,
        completions: half.completions,
    };
    let cells = Region::pages(&side.domain, 4096, ALL()).unwrap();
    let local = scratch(&side);
    for turn in 0..100 {
        let request = Request::fetch_add(local.slice(8..16).unwrap(), remote(&cells, 1), 2);
        side.run(request).unwrap();
        assert_eq!(local.words()[1].load(Relaxed), 2 * turn);
    }
    assert_eq!(cells.words()[1].load(Relaxed), 200);
}

#[test]
fn another_domains_key_is_refused() {
    let Some(context) = device() else { return };
    let (client, server) = pair(&context, Half::new(&context), Half::new(&context));
    let (_, stranger) = pair(&context, Half::new(&context), Half::new(&context));
    // The same memory in both domains, as sessions have it.
    let memory: Arc<dyn Memory> = Arc::new(Pages::new(4096).unwrap());
    let own = Region::register(&server.domain, Arc::clone(&memory), ALL()).unwrap();
    let foreign = Region::register(&stranger.domain, memory, ALL()).unwrap();
    own.words()[0].store(1, Relaxed);
    assert_eq!(foreign.words()[0].load(Relaxed), 1);
    let local = scratch(&client);
    let word = local.slice(0..8).unwrap();
    client.run(Request::fetch_add(word, remote(&own, 0), 1)).unwrap();
    let refused = status(client.run(Request::fetch_add(word, remote(&foreign, 0), 1)));
    assert_eq!(refused, WorkStatus::RemoteAccess);
    assert!(refused.was_refused());
    assert_eq!(own.words()[0].load(Relaxed), 2);
    assert_eq!(client.queue.state().unwrap(), QueuePairState::Error);
    let flushed = status(client.run(Request::read(word, remote(&own, 0))));
    assert_eq!(flushed, WorkStatus::Flushed);
}

#[test]
fn a_read_only_key_reads_and_nothing_more() {
    let Some(context) = device() else { return };
    for write in [false, true] {
        let (client, server) = pair(&context, Half::new(&context), Half::new(&context));
        let cells = Region::pages(&server.domain, 4096, Access::REMOTE_READ).unwrap();
        cells.words()[0].store(9, Relaxed);
        let local = scratch(&client);
        let word = local.slice(0..8).unwrap();
        client.run(Request::read(word, remote(&cells, 0))).unwrap();
        assert_eq!(local.words()[0].load(Relaxed), 9);
        let change = if write {
            Work::Write { from: word, to: remote(&cells, 0) }.into()
        } else {
            Request::compare_swap(word, remote(&cells, 0), 9, 10)
        };
        assert_eq!(status(client.run(change)), WorkStatus::RemoteAccess);
        assert_eq!(cells.words()[0].load(Relaxed), 9);
    }
}

#[test]
fn a_region_that_is_gone_is_refused() {
    let Some(context) = device() else { return };
    let (client, server) = pair(&context, Half::new(&context), Half::new(&context));
    let cells = Region::pages(&server.domain, 4096, ALL()).unwrap();
    let place = remote(&cells, 0);
    let local = scratch(&client);
    let word = local.slice(0..8).unwrap();
    client.run(Request::read(word, place)).unwrap();
    drop(cells);
    assert_eq!(status(client.run(Request::read(word, place))), WorkStatus::RemoteAccess);
}

#[test]
fn a_doorbell_raises_the_channel() {
    let Some(context) = device() else { return };
    if context.attributes().max_shared_receive_queues == 0 {
        println!("NOT TESTED: {} has no shared receive queues", context.name());
        return;
    }
    let channel = CompletionChannel::new(&context).unwrap();
    let rings = CompletionQueue::new(&context, 64, Some((&channel, 42))).unwrap();
    let right = Half::new(&context);
    let shared = SharedReceiveQueue::new(&right.domain, &rings, 16, 0).unwrap();
    let right = Half { receive: Receive::Shared(&shared), ..right };
    let (client, server) = pair(&context, Half::new(&context), right);

    rings.arm(Notify::Solicited).unwrap();
    assert_eq!(channel.next().unwrap(), None);
    let short = Duration::from_millis(50);
    let start = Instant::now();
    assert_eq!(channel.wait(Some(short)).unwrap(), None);
    assert!(start.elapsed() >= short);

    // More rings than slots, so that slots go round.
    for ring in 0..40u32 {
        thread::scope(|scope| {
            scope.spawn(|| client.run(Request::doorbell(ring << 8)).unwrap());
            let token = channel.wait(Some(Duration::from_secs(10))).unwrap();
            assert_eq!(token, Some(42));
        });
        let done = next(&rings);
        let received = shared.received(&done).unwrap();
        assert_eq!(received.immediate, Some(ring << 8));
        assert_eq!(received.bytes, 0);
        assert_eq!(received.queue_pair, server.queue.number());
        shared.repost(received.slot).unwrap();
        rings.arm(Notify::Solicited).unwrap();
        assert_eq!(rings.poll(&mut [Completion::default()]).unwrap(), 0);
    }
    // Dropped with an event that nobody took: must not hang.
    client.run(Request::doorbell(1)).unwrap();
    drop((server, shared, rings, channel));
}

#[test]
fn messages_come_into_slots() {
    let Some(context) = device() else { return };
    let receives = CompletionQueue::new(&context, 64, None).unwrap();
    let right = Half::new(&context);
    let own = Receive::Own { completions: &receives, slots: 4, bytes: 256 };
    let (client, server) = pair(&context, Half::new(&context), Half { receive: own, ..right });
    let local = scratch(&client);
    let mut bytes = Vec::new();
    for turn in 0..20u8 {
        let text = vec![turn; 200];
        local.write(0, &text).unwrap();
        let immediate = (turn % 2 == 0).then_some(u32::from(turn));
        let work = if turn % 3 == 0 {
            Work::SendInline { bytes: &text[..32], immediate }
        } else {
            Work::Send { from: local.slice(0..200).unwrap(), immediate }
        };
        client.run(work.into()).unwrap();
        let received = server.queue.received(&next(&receives)).unwrap();
        assert_eq!(received.immediate, immediate);
        server.queue.read(&received, &mut bytes).unwrap();
        let sent = if turn % 3 == 0 { 32 } else { 200 };
        assert_eq!(bytes, text[..sent]);
        server.queue.repost(received.slot).unwrap();
    }
}

#[test]
fn a_full_batch_and_unsignalled_requests() {
    let Some(context) = device() else { return };
    let (client, server) = pair(&context, Half::new(&context), Half::new(&context));
    let cells = Region::pages(&server.domain, 4096, ALL()).unwrap();
    for (index, cell) in (0..).zip(cells.words()) {
        cell.store(1000 + index, Relaxed);
    }
    let local = scratch(&client);
    for round in 0..5 {
        let depth = usize::try_from(client.queue.depth()).unwrap();
        let requests: Vec<_> = (0..depth)
            .map(|index| {
                let into = local.slice(8 * index..8 * index + 8).unwrap();
                let request = Request::read(into, remote(&cells, ((index + round) % 512) as u64));
                if index + 1 < depth { request.unsignalled() } else { request }
            })
            .collect();
        let mut posted = Vec::new();
        client.queue.post_all(&requests, &mut posted).unwrap();
        assert_eq!(posted.len(), depth);
        assert!(matches!(client.queue.post(requests[0]), Err(Error::QueueFull { .. })));
        while client.queue.outstanding() > 0 {
            client.queue.retire(&next(&client.completions)).unwrap();
        }
        for index in 0..depth {
            let expected = 1000 + ((index + round) % 512) as u64;
            assert_eq!(local.words()[index].load(Relaxed), expected);
        }
    }
}

#[test]
fn no_increment_of_two_queue_pairs_is_lost() {
    let Some(context) = device() else { return };
    if context.attributes().atomicity == Atomicity::None {
        println!("NOT TESTED: {} has no atomics", context.name());
        return;
    }
    let (a, server_a) = pair(&context, Half::new(&context), Half::new(&context));
    let (b, server_b) = pair(&context, Half::new(&context), Half::new(&context));
    let memory: Arc<dyn Memory> = Arc::new(Pages::new(4096).unwrap());
    let for_a = Region::register(&server_a.domain, Arc::clone(&memory), ALL()).unwrap();
    let for_b = Region::register(&server_b.domain, memory, ALL()).unwrap();
    let each = 2000;
    thread::scope(|scope| {
        for (side, region) in [(&a, &for_a), (&b, &for_b)] {
            scope.spawn(move || {
                let local = scratch(side);
                for _ in 0..each {
                    let word = local.slice(0..8).unwrap();
                    side.run(Request::fetch_add(word, remote(region, 7), 1)).unwrap();
                }
            });
        }
    });
    assert_eq!(for_a.words()[7].load(Relaxed), 2 * each);
}

#[test]
fn a_peer_that_is_gone_is_given_up_in_time() {
    let Some(context) = device() else { return };
    for shut in [true, false] {
        let (client, server) = pair(&context, Half::new(&context), Half::new(&context));
        let cells = Region::pages(&server.domain, 4096, ALL()).unwrap();
        let from = remote(&cells, 0);
        let local = scratch(&client);
        let word = local.slice(0..8).unwrap();
        client.run(Request::read(word, from)).unwrap();
        let kept = if shut {
            server.queue.shut().unwrap();
            assert_eq!(server.queue.state().unwrap(), QueuePairState::Error);
            Some(server)
        } else {
            drop(server);
            None
        };
        let start = Instant::now();
        let given_up = status(client.run(Request::read(word, from)));
        println!("{given_up} after {:?}", start.elapsed());
        assert_eq!(given_up, WorkStatus::RetryExceeded);
        // Four times the second that `Connect::to` asks for is what a device
        // may take, and an emulated machine is slow besides.
        assert!(start.elapsed() < Duration::from_secs(6));
        drop(kept);
    }
    while let Some(event) = context.next_async_event().unwrap() {
        println!("event: {event:?}");
        assert!(!matches!(event, AsyncEvent::DeviceFatal));
    }
}

#[test]
fn a_message_that_nobody_receives_is_given_up() {
    let Some(context) = device() else { return };
    let (left, right) = (Half::new(&context), Half::new(&context));
    let (gid, index) = address(&context);
    let (a, b) = (unconnected(&left, 1), unconnected(&right, 2));
    let (to_a, to_b) = (a.endpoint(gid).unwrap(), b.endpoint(gid).unwrap());
    let mut few = Connect::to(to_b, index);
    few.receiver_retries = 2;
    let client = Side {
        queue: a.connect(&few).unwrap(),
        domain: left.domain,
        completions: left.completions,
    };
    let _server = b.connect(&Connect::to(to_a, index)).unwrap();
    let failed = status(client.run(Request::doorbell(1)));
    assert_eq!(failed, WorkStatus::ReceiverNotReady);
}

#[test]
fn dropping_everything_with_requests_under_way() {
    let Some(context) = device() else { return };
    for _ in 0..10 {
        let (client, server) = pair(&context, Half::new(&context), Half::new(&context));
        let cells = Region::pages(&server.domain, 1 << 20, ALL()).unwrap();
        let local = Region::pages(&client.domain, 1 << 20, Access::LOCAL).unwrap();
        let from = remote(&cells, 0);
        for _ in 0..8 {
            let into = local.slice(0..1 << 20).unwrap();
            client.queue.post(Request::read(into, from)).unwrap();
        }
        drop((local, cells, server, client));
    }
}
