//! Promise: the page for Prometheus tells sessions over RDMA, what the server sees of
//! their work, and, for each client that came to TCP instead, the reason.
#![cfg(feature = "cli")]

mod common;
use common::client;
use common::page::{Page, scrape};
use common::rdma::{LONG, device, eventually, machine_has, over, rdma_server, run, stays_over};
use farcell::{RdmaChoice, Server, ServerBuilder, TransportChoice};
use std::thread;

fn watched() -> ServerBuilder {
    rdma_server().metrics("127.0.0.1:0")
}

/// Sessions that live over this transport.
fn sessions(page: &Page, transport: &str) -> f64 {
    page.value(&format!("farcell_sessions{{transport=\"{transport}\",access=\"read_write\"}}"))
}

fn operations(page: &Page, kind: &str, op: &str, transport: &str) -> f64 {
    let labels = format!("kind=\"{kind}\",op=\"{op}\",transport=\"{transport}\"");
    page.value(&format!("farcell_operations_total{{{labels}}}"))
}

/// Every reason for which clients do without RDMA, with how many do.
fn fallbacks(server: &Server) -> Vec<(String, f64)> {
    let begin = "farcell_transport_fallbacks_total{wanted=\"rdma\",reason=\"";
    let mut told = Vec::new();
    for (series, count) in scrape(server).values {
        if let Some(reason) = series.strip_prefix(begin)
            && count > 0.0
        {
            told.push((reason.trim_end_matches("\"}").to_owned(), count));
        }
    }
    told
}

/// What a client tells of itself is not answered, so it comes when it comes.
fn fell(server: &Server, want: &[(&str, f64)]) {
    let want: Vec<_> = want.iter().map(|(why, count)| ((*why).to_owned(), *count)).collect();
    let mut told = Vec::new();
    eventually(&format!("{want:?} is told"), || {
        told = fallbacks(server);
        told.len() >= want.len()
    });
    assert_eq!(told, want);
}

#[test]
fn sessions_over_rdma_are_told_and_what_the_server_sees_of_them() {
    if !device() {
        return;
    }
    for cpu in [false, true] {
        let server = if cpu { watched().cpu_domain() } else { watched() }.start().unwrap();
        let rdma = [(); 2].map(|()| over(&server, TransportChoice::Rdma));
        let tcp = over(&server, TransportChoice::Tcp);
        let event = rdma[0].events("e", 1, 1).unwrap().at(0, 0).unwrap();
        let sum = rdma[1].counters("n", 1, 1).unwrap().at(0, 0).unwrap();
        let theirs = tcp.open_counters("n").unwrap().at(0, 0).unwrap();
        for _ in 0..5 {
            sum.fetch_add(1).unwrap();
            theirs.fetch_add(1).unwrap();
        }
        assert_eq!(sum.load().unwrap(), 10);
        let page = scrape(&server);
        assert_eq!((sessions(&page, "rdma"), sessions(&page, "tcp")), (2.0, 1.0));
        assert_eq!(page.value("farcell_transport_offered{transport=\"rdma\"}"), 1.0);
        let domain = if cpu { "cpu" } else { "hca" };
        let domain = format!("farcell_atomicity_domain{{domain=\"{domain}\"}}");
        assert_eq!(page.value(&domain), 1.0);
        // The adapter's atomics are not seen; where the server's CPU makes all
        // changes they are requests. Cells are read by READs in both.
        let asked = if cpu { 5.0 } else { 0.0 };
        assert_eq!(operations(&page, "counter", "fetch_add", "rdma"), asked);
        assert_eq!(operations(&page, "counter", "fetch_add", "tcp"), 5.0);
        assert_eq!(operations(&page, "counter", "load", "rdma"), 0.0);
        // The one of them that waits is woken by the other.
        let setter = rdma[1].open_events("e").unwrap().at(0, 0).unwrap();
        let waits = thread::spawn(move || event.wait_timeout(LONG));
        eventually("it waits", || server.parked_waits() == 1);
        setter.set().unwrap();
        assert!(waits.join().unwrap().unwrap());
        let page = scrape(&server);
        let rings = if cpu { 0.0 } else { 1.0 };
        assert_eq!(page.value("farcell_rings_total{transport=\"rdma\"}"), rings);
        assert_eq!(page.value("farcell_wakeup_seconds_count"), 1.0);
        // Nobody did without it but the one who was told to.
        fell(&server, &[("asked", 1.0)]);
        for client in &rdma {
            client.close();
        }
        eventually("they have gone", || sessions(&scrape(&server), "rdma") == 0.0);
        assert_eq!(sessions(&scrape(&server), "tcp"), 1.0);
    }
}

#[test]
fn clients_that_come_to_tcp_are_told_by_reason() {
    let Some(first) = machine_has("SOFT_ROCE_DEVICE").filter(|_| device()) else { return };
    let Some(second) = machine_has("SOFT_ROCE_DEVICE_2") else { return };
    let Some(netdev) = machine_has("SOFT_ROCE_NETDEV_2") else { return };
    let server = watched().rdma(RdmaChoice::Device(first)).shared_memory(false).start().unwrap();
    let any = || client(&server).device(second.clone());
    let lasting = any().connect().unwrap();
    stays_over(&lasting, TransportChoice::Rdma);
    assert_eq!(fallbacks(&server), []);

    let absent = client(&server).device("rxe77").connect().unwrap();
    stays_over(&absent, TransportChoice::Tcp);
    fell(&server, &[("no_device", 1.0)]);

    // Its adapter has lost the link.
    run(&format!("ip link set {netdev} down"));
    let down = any().connect().unwrap();
    run(&format!("ip link set {netdev} up"));
    stays_over(&down, TransportChoice::Tcp);
    println!("{:?}", down.transport().reasons);
    fell(&server, &[("no_device", 1.0), ("port_down", 1.0)]);

    // One that had it. The count is of the one that has noticed.
    eventually("RDMA works again", || any().connect().unwrap().transport().name == "rdma");
    let breaks = any().transport(TransportChoice::Rdma).connect().unwrap();
    server.break_queue_pairs_for_tests();
    let sum = breaks.counters("n", 1, 1).unwrap().at(0, 0).unwrap();
    eventually("it has noticed", || {
        let _ = sum.fetch_add(1);
        breaks.transport().name == "tcp"
    });
    eventually("it is told", || fallbacks(&server).iter().any(|(why, _)| why == "lost"));
    let page = scrape(&server);
    assert_eq!(sessions(&page, "tcp"), 3.0, "{}", page.text);
}
