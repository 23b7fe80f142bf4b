//! Promise: arrays are opened or created by name, and what cannot be is
//! refused in words that name both sides.

mod common;
use common::{client, key, server};
use farcell::{Access, Client, Domain, Error, Kind, Server, TransportChoice};
use std::time::Duration;

#[test]
fn opened_by_all_created_by_one() {
    let server = server().start().unwrap();
    assert!(server.create("made_by_server", Kind::Counter, 2, 3).unwrap());
    assert!(!server.create("made_by_server", Kind::Counter, 2, 3).unwrap());
    let (a, b) = (client(&server).connect().unwrap(), client(&server).connect().unwrap());
    a.events("x/y.z-1", 2, 2).unwrap().at(0, 0).unwrap().set().unwrap();
    assert!(b.events("x/y.z-1", 2, 2).unwrap().at(0, 0).unwrap().is_set().unwrap());
    assert!(b.open_events("x/y.z-1").unwrap().at(0, 0).unwrap().is_set().unwrap());
    let list = a.list().unwrap();
    let names: Vec<&str> = list.iter().map(|a| a.name.as_str()).collect();
    assert_eq!(names, ["made_by_server", "x/y.z-1"]);
    assert_eq!((list[0].kind, list[0].rows, list[0].cols), (Kind::Counter, 2, 3));
    assert_eq!(a.lookup("x/y.z-1").unwrap().unwrap().kind, Kind::Event);
    assert_eq!(a.lookup("none").unwrap(), None);
    let info = a.info().unwrap();
    assert_eq!((info.capacity, info.arrays, info.sessions), (262_144, 2, 2));
    assert_eq!((info.domain, info.access), (Domain::Cpu, Access::ReadWrite));
}

#[test]
fn a_list_of_thousands() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    let long = "n".repeat(120);
    for i in 0..3000 {
        server.create(&format!("{long}{i:04}"), Kind::Event, 1, 1).unwrap();
    }
    let list = client.list().unwrap();
    assert_eq!(list.len(), 3000);
    assert!(list.iter().enumerate().all(|(i, a)| a.name == format!("{long}{i:04}")));
}

#[test]
fn a_full_segment_says_what_is_free() {
    let server = server().capacity(1000).start().unwrap();
    // Who could reach the cells by itself would keep them from others as long as
    // it has a handle.
    let client = client(&server).transport(TransportChoice::Tcp).connect().unwrap();
    client.events("a", 1, 800).unwrap();
    let text = client.events("b", 1, 300).unwrap_err().to_string();
    assert!(text.contains("304 cells asked for") && text.contains("200 free"), "{text}");
    let a = client.open_events("a").unwrap();
    a.set_all().unwrap();
    client.remove("a").unwrap();
    let b = client.events("b", 1, 900).unwrap();
    assert_eq!(b.snapshot().unwrap(), vec![false; 900], "new cells are clear");
    let error = a.at(0, 0).unwrap().set().unwrap_err();
    assert!(matches!(error, Error::ArrayRemoved { .. }), "{error}");
    assert_eq!(b.snapshot().unwrap(), vec![false; 900], "an old handle reaches nothing");
    assert!(matches!(client.remove("a"), Err(Error::NoSuchArray { .. })));
}

#[test]
fn thousands_of_arrays_one_after_another() {
    let server = server().start().unwrap();
    let client = client(&server).connect().unwrap();
    for i in 0..6000 {
        let name = format!("a{i}");
        client.events(&name, 1, 1).unwrap().at(0, 0).unwrap().set().unwrap();
        client.remove(&name).unwrap();
    }
    assert_eq!(client.info().unwrap().arrays, 0);
}

#[test]
fn settings_that_make_no_sense() {
    let why = |b: farcell::ServerBuilder| b.start().unwrap_err().to_string();
    assert!(why(server().capacity(0)).contains("capacity"));
    assert!(why(server().capacity(u32::MAX)).contains("capacity"));
    assert!(why(server().workers(0)).contains("workers"));
    assert!(why(server().lease(Duration::ZERO)).contains("lease"));
    assert!(why(Server::builder(key()).bind("nonsense:port")).contains("port"));
    let first = server().start().unwrap();
    let taken = first.local_addrs()[0].to_string();
    let text = why(Server::builder(key()).bind(&taken));
    assert!(text.contains("address in use") && text.contains(&taken), "{text}");
}

#[test]
fn several_addresses_and_ipv6() {
    let server = Server::builder(key()).bind("127.0.0.1:0").bind("[::1]:0").start().unwrap();
    assert_eq!(server.local_addrs().len(), 2);
    for addr in server.local_addrs() {
        let client = Client::builder().addr(addr.to_string()).key(key()).connect().unwrap();
        client.events("e", 1, 1).unwrap().at(0, 0).unwrap().set().unwrap();
    }
    let everywhere = Server::builder(key()).bind("[::]:0").start().unwrap();
    let port = everywhere.local_addrs()[0].port();
    for host in ["127.0.0.1", "[::1]", "localhost"] {
        Client::builder().addr(format!("{host}:{port}")).key(key()).connect().unwrap();
    }
    Client::builder().addr(everywhere.address()).key(key()).connect().unwrap();
}
