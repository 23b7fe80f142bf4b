//! Promise: a variable whose name is misspelt is told to the one who set it, by
//! the library too, once a process, with the likely meant one.
#![cfg(feature = "cli")] // The log is written as the program writes it.

mod common;
use common::another::role;
use common::{client, server};

/// Set in the process that connects.
const ROLE: &str = "FARCELL_TEST_ADDRESS";

#[test]
fn the_library_logs_them_once() {
    let server = server().start().unwrap();
    let mut command = role("connects_twice", ROLE, server.address());
    command.env("FARCELL_ADR", "node0:7117").env("FARCELL_GIDINDEX", "1");
    let done = command.stderr(std::process::Stdio::piped()).output().unwrap();
    let log = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success(), "{log}");
    for (name, meant) in
        [("FARCELL_ADR", "FARCELL_ADDR"), ("FARCELL_GIDINDEX", "FARCELL_GID_INDEX")]
    {
        let told = format!("{name} means nothing here; is {meant} meant?");
        assert_eq!(log.matches(&told).count(), 1, "{told}: {log}");
        assert!(log.contains("WARN farcell::launch"), "{log}");
    }
    assert!(!log.contains("FARCELL_ADDR means"), "{log}");
}

#[test]
fn connects_twice() {
    let Ok(addr) = std::env::var(ROLE) else {
        return;
    };
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
    for _ in 0..2 {
        let builder = farcell::Client::builder().addr(&addr).key(common::key());
        builder.connect_from_env().unwrap();
    }
}

#[test]
fn whoever_asks_tells_them() {
    // This process has been told of its own by now, if it has any: asking again
    // answers the same.
    let told = farcell::diagnose::unknown_variables();
    assert_eq!(told, farcell::diagnose::unknown_variables());
    let server = server().start().unwrap();
    client(&server).connect().unwrap();
}
