//! Promise: clients that use RDMA, TCP and the server's memory count on one
//! counter, and none is lost: whoever may look at the memory by itself changes it
//! by the one who makes all changes.

mod common;
use common::rdma::{LONG, device, over, rdma_server};
use common::{client, key};
use farcell::{Client, Domain, TransportChoice};

const EACH: i64 = 300;

#[test]
fn nothing_is_lost_between_memory_adapter_and_server() {
    if !device() {
        return;
    }
    let server = rdma_server().start().unwrap();
    assert_eq!(server.domain(), Domain::Hca);
    let builder = || Client::builder().addr(server.address()).key(key());
    let shm = builder().transport(TransportChoice::Shm).connect().unwrap();
    let auto = client(&server).connect().unwrap();
    for client in [&shm, &auto] {
        assert_eq!(client.transport().name, "shm", "{:?}", client.transport());
    }
    let others = [TransportChoice::Rdma, TransportChoice::Tcp].map(|choice| over(&server, choice));
    let clients = [&shm, &auto, &others[0], &others[1]];
    std::thread::scope(|s| {
        for client in clients {
            s.spawn(move || {
                let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
                for _ in 0..EACH {
                    let before = counter.fetch_add(1).unwrap();
                    assert!(counter.load().unwrap() > before);
                }
            });
        }
    });
    let counter = shm.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
    assert_eq!(counter.load().unwrap(), EACH * clients.len() as i64);
    println!("{:?}", shm.transport());
    // Waits go by the server, whoever sets.
    for setter in clients {
        for waiter in clients {
            let set = setter.events("e", 1, 1).unwrap().at(0, 0).unwrap();
            let wait = waiter.events("e", 1, 1).unwrap().at(0, 0).unwrap();
            std::thread::scope(|s| {
                let waits = s.spawn(|| wait.wait_timeout(LONG).unwrap());
                common::eventually("it waits", || server.parked_waits() == 1);
                assert!(set.set().unwrap());
                assert!(waits.join().unwrap());
            });
            assert!(set.clear().unwrap());
        }
    }
    // Nobody has the memory to write: the kernel would refuse a change.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours: Vec<&str> = maps.lines().filter(|line| line.contains("memfd:farcell")).collect();
    let shown = ours.iter().filter(|line| line.contains(" r--s ")).count();
    assert_eq!(shown, 4, "two files of two clients: {ours:?}");
}
