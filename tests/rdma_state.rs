//! Promise: a server with `--state` offers RDMA as any other does, and what was
//! changed by RDMA is there after it was killed.
//!
//! Needs a device: run it with `scripts/soft-roce run` where there is none.
//! Without one each test says so and passes, unless `FARCELL_TEST_RDMA` is
//! `required`.
#![cfg(feature = "cli")]

mod common;
use common::messages::{self, LARGEST, message};
use common::process::Process;
use common::rdma::{device, eventually, over_at};
use farcell::{Client, Domain, Error, TransportChoice};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

#[test]
fn messages_that_came_by_rdma_outlive_their_server() {
    if !device() {
        return;
    }
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = memory.path().join("state");
    let mut server = Process::start(&["--rdma", "auto", "--state", state.to_str().unwrap()]);
    let mut buffer = vec![0; LARGEST as usize];
    for life in 1..4 {
        let rdma = over_at(&server.addr, TransportChoice::Rdma);
        let slots = rdma.slots("params", 2, LARGEST).unwrap();
        let writer = slots.at(0).unwrap();
        // By RDMA, from one that is new in this life, and the last one was whole.
        assert_eq!(writer.version().unwrap(), life - 1);
        if life > 1 {
            assert_eq!(messages::read(&writer, &mut buffer).unwrap().0, life + 10);
        }
        assert_eq!(writer.write(&message(life + 11)).unwrap(), life);
        assert_eq!(rdma.transport().name, "rdma");
        let mut half = slots.at(1).unwrap().writer().unwrap();
        half.write_at(0, &message(1)).unwrap();
        server.kill();
        server.start_again();
        for choice in [TransportChoice::Tcp, TransportChoice::Shm, TransportChoice::Rdma] {
            let slots = over_at(&server.addr, choice).open_slots("params").unwrap();
            let (number, received) = messages::read(&slots.at(0).unwrap(), &mut buffer).unwrap();
            assert_eq!((number, received.version), (life + 11, life));
            let torn = slots.at(1).unwrap().read(&mut buffer);
            assert!(matches!(torn, Err(Error::Torn { .. })), "{torn:?}");
        }
        drop(half);
    }
}

#[test]
fn a_state_is_registered_and_outlives_its_server() {
    if !device() {
        return;
    }
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = memory.path().join("state");
    let mut server = Process::start(&["--rdma", "auto", "--state", state.to_str().unwrap()]);
    let rdma = over_at(&server.addr, TransportChoice::Rdma);
    assert_eq!(rdma.info().unwrap().domain, Domain::Hca);
    let event = rdma.events("e", 2, 9).unwrap().at(1, 8).unwrap();
    assert!(event.set().unwrap());
    let (mut done, mut unknown) = (0, 0);
    for _ in 0..4 {
        let over = AtomicBool::new(false);
        let counter = rdma.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
        let add = || {
            let (mut done, mut unknown) = (0, 0);
            while !over.load(Relaxed) {
                match counter.fetch_add(1) {
                    Ok(_) => done += 1,
                    Err(Error::OutcomeUnknown { .. }) => unknown += 1,
                    Err(error) => panic!("{error}"),
                }
            }
            (done, unknown)
        };
        std::thread::scope(|s| {
            let adding = s.spawn(add);
            std::thread::sleep(Duration::from_millis(300));
            server.kill();
            server.start_again();
            // A new client gets RDMA from the new life.
            let fresh = over_at(&server.addr, TransportChoice::Rdma);
            assert!(fresh.events("e", 2, 9).unwrap().at(1, 8).unwrap().is_set().unwrap());
            over.store(true, Relaxed);
            let (d, u) = adding.join().unwrap();
            (done, unknown) = (done + d, unknown + u);
        });
        eventually("the client is back", || rdma.is_connected());
        let total = counter.load().unwrap();
        assert!((done..=done + unknown).contains(&total), "{done} + {unknown}, {total}");
        println!("{done} acknowledged, {unknown} unknown, {total} in the cell");
    }
    // The same cells for a server without RDMA, and a removal in one life that
    // a client by RDMA could still reach does not harm the next.
    rdma.remove("e").unwrap();
    server.kill();
    let mut server = server.again_with(&["--state", state.to_str().unwrap()]);
    let tcp = Client::builder().addr(&server.addr).key(common::key()).connect().unwrap();
    assert_eq!(tcp.info().unwrap().domain, Domain::Cpu);
    let total = tcp.counters("c", 1, 1).unwrap().at(0, 0).unwrap().load().unwrap();
    assert!((done..=done + unknown).contains(&total), "{done} + {unknown}, {total}");
    let names: Vec<String> = tcp.list().unwrap().into_iter().map(|a| a.name).collect();
    assert_eq!(names, ["c"]);
    server.kill();
}
