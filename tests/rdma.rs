//! Promise: over RDMA the cells are the same cells. Clients of all transports
//! see each other's changes, every total is exact, and no waiter is forgotten.
//!
//! Needs a device: run it with `scripts/soft-roce run` where there is none.
//! Without one each test says so and passes, unless `FARCELL_TEST_RDMA` is
//! `required`.

mod common;
use common::rdma::{LONG, adds, device, eventually, over, rdma_server};
use common::{client, server};
use farcell::{Domain, Error, RdmaChoice, ServerBuilder, TransportChoice};
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

#[test]
fn more_cells_than_fit_into_one_read() {
    if !device() {
        return;
    }
    let server = rdma_server().start().unwrap();
    let rdma = over(&server, TransportChoice::Rdma);
    let tcp = over(&server, TransportChoice::Tcp);
    let events = rdma.events("big", 200, 300).unwrap();
    let others = tcp.events("big", 200, 300).unwrap();
    for i in (0..60_000).step_by(977) {
        others.flat(i).unwrap().set().unwrap();
    }
    let all = events.snapshot().unwrap();
    assert!(all.iter().enumerate().all(|(i, &set)| set == (i % 977 == 0)));
    for col in [0, 7, 299] {
        assert_eq!(
            events.column(col).unwrap().snapshot().unwrap(),
            others.column(col).unwrap().snapshot().unwrap()
        );
    }
}

#[test]
fn long_batches_and_whole_arrays() {
    if !device() {
        return;
    }
    let server = rdma_server().start().unwrap();
    let rdma = over(&server, TransportChoice::Rdma);
    let tcp = over(&server, TransportChoice::Tcp);
    let c = rdma.counters("c", 1, 2).unwrap();
    let (a, b) = (c.at(0, 0).unwrap(), c.at(0, 1).unwrap());
    let mut batch = rdma.batch();
    for _ in 0..300 {
        batch.fetch_add(&a, 1).load(&a).fetch_add(&b, 2);
    }
    batch.store(&b, 7).load(&b);
    let found = batch.run().unwrap();
    for i in 0..300 {
        let values = [0, 1, 2].map(|j| found[3 * i + j].value());
        assert_eq!(values, [i as i64, i as i64 + 1, 2 * i as i64]);
    }
    assert_eq!(found.last().unwrap().value(), 7);
    let mine = rdma.events("e", 20, 30).unwrap();
    let theirs = tcp.events("e", 20, 30).unwrap();
    assert_eq!(mine.set_all().unwrap(), 600);
    assert_eq!(theirs.column(3).unwrap().clear_all().unwrap(), 20);
    assert_eq!(mine.set_all().unwrap(), 20);
    let twice = mine.cells(&[(5, 5), (5, 5), (0, 0)]).unwrap();
    assert_eq!(twice.clear_all().unwrap(), 2);
    assert_eq!(theirs.snapshot().unwrap().iter().filter(|&&set| !set).count(), 2);
    assert_eq!(rdma.transport().name, "rdma");
}

/// The total of two RDMA and two TCP clients on one counter, and what it must
/// be. Each does `adds` fetch_adds, the TCP clients many on each trip; if they
/// `hammer`, they go on until the RDMA clients are done.
fn totals(server: ServerBuilder, adds: i64, hammer: bool) -> (i64, i64) {
    let server = server.start().unwrap();
    let (working, want) = (AtomicUsize::new(2), AtomicI64::new(0));
    std::thread::scope(|s| {
        for choice in [TransportChoice::Rdma, TransportChoice::Tcp].repeat(2) {
            let (server, working, want) = (&server, &working, &want);
            s.spawn(move || {
                let client = over(server, choice);
                let name = client.transport().name;
                let rdma = choice == TransportChoice::Rdma;
                let c = client.counters("sum", 1, 1).unwrap().at(0, 0).unwrap();
                let e = client.events("e", 1, 1).unwrap().at(0, 0).unwrap();
                let mut done = 0;
                for trip in 0.. {
                    if done >= adds && (rdma || !hammer || working.load(Relaxed) == 0) {
                        break;
                    }
                    if rdma {
                        c.fetch_add(1).unwrap();
                        done += 1;
                    } else {
                        let mut batch = client.batch();
                        for _ in 0..if hammer { 200 } else { 32 } {
                            batch.fetch_add(&c, 1);
                        }
                        done += batch.run().unwrap().len() as i64;
                    }
                    match trip % 64 {
                        0 => drop(e.set().unwrap()),
                        32 => drop(e.clear().unwrap()),
                        48 => drop(e.take().unwrap()),
                        _ => {}
                    }
                }
                if rdma {
                    working.fetch_sub(1, Relaxed);
                }
                want.fetch_add(done, Relaxed);
                assert_eq!(client.transport().name, name);
            });
        }
    });
    let client = over(&server, TransportChoice::Tcp);
    let sum = client.open_counters("sum").unwrap().at(0, 0).unwrap().load().unwrap();
    (sum, want.into_inner())
}

#[test]
fn the_total_is_exact_over_all_transports() {
    if !device() {
        return;
    }
    let (sum, want) = totals(rdma_server(), adds(20_000), false);
    assert_eq!(sum, want);
}

/// The test above can fail: where the server's CPU changes the cells that the
/// adapter changes too, updates are lost.
#[test]
fn without_the_domain_rule_updates_are_lost() {
    if !device() {
        return;
    }
    for _ in 0..20 {
        let (sum, want) = totals(rdma_server().break_domain_rule_for_tests(), 1000, true);
        println!("{want} fetch_adds, {sum} in the cell");
        if sum != want {
            return;
        }
    }
    panic!("CPU and adapter changed the same cell, and nothing was lost");
}

#[test]
fn in_the_cpu_domain_only_reads_are_one_sided() {
    if !device() {
        return;
    }
    let server = rdma_server().cpu_domain().start().unwrap();
    let rdma = over(&server, TransportChoice::Rdma);
    assert_eq!(rdma.info().unwrap().domain, Domain::Cpu);
    let event = rdma.events("e", 1, 1).unwrap().at(0, 0).unwrap();
    assert!(event.set().unwrap());
    assert!(event.is_set().unwrap());
    assert!(event.take().unwrap());
    assert_eq!(rdma.transport().name, "rdma");
}

#[test]
fn no_rdma_is_a_reason_in_words() {
    let server = server().shared_memory(false).start().unwrap();
    let auto = client(&server).connect().unwrap();
    let report = auto.transport();
    assert_eq!(report.name, "tcp");
    // In the server's words, for each of the two.
    let why = report.reasons.join("; ");
    assert!(why.contains("no shared memory: the server does not offer it: it was told"), "{why}");
    assert!(why.contains("no RDMA: the server does not offer it: it was told not to"), "{why}");
    let error = client(&server).transport(TransportChoice::Rdma).connect().unwrap_err();
    assert!(matches!(error, Error::Rdma { .. }), "{error}");
    let error =
        common::server().rdma(RdmaChoice::Device("no_such_device".to_owned())).start().unwrap_err();
    assert!(matches!(error, Error::Rdma { .. }), "{error}");
    if device() {
        assert!(error.to_string().contains("no_such_device"), "{error}");
        let server = rdma_server().start().unwrap();
        let error = client(&server)
            .transport(TransportChoice::Rdma)
            .device("mlx5_9")
            .connect()
            .unwrap_err();
        assert!(error.to_string().contains("mlx5_9"), "{error}");
    }
}

#[test]
fn a_client_that_leaves_takes_its_connections_along() {
    if !device() {
        return;
    }
    let server = rdma_server().lease(Duration::from_millis(500)).start().unwrap();
    for _ in 0..10 {
        let client = over(&server, TransportChoice::Rdma);
        client.events("e", 1, 1).unwrap().at(0, 0).unwrap().set().unwrap();
    }
    eventually("all have gone", || server.sessions() == 0);
    let begun = Instant::now();
    let client = over(&server, TransportChoice::Rdma);
    client.events("e", 1, 1).unwrap().at(0, 0).unwrap().take().unwrap();
    assert!(begun.elapsed() < LONG);
}

/// Every client looks at the header before it trusts RDMA: one that could change
/// it would keep the others from it.
#[test]
fn no_client_can_change_the_header() {
    if !device() {
        return;
    }
    let server = rdma_server().start().unwrap();
    for own_key in [true, false] {
        let client = over(&server, TransportChoice::Rdma);
        assert_eq!(client.header_refuses_for_tests(own_key), Some(true));
        // Its queue pair is broken by that, and nothing else.
        let counter = client.counters("c", 1, 1).unwrap().at(0, 0).unwrap();
        counter.fetch_add(1).unwrap();
    }
    let client = over(&server, TransportChoice::Rdma);
    assert_eq!(client.open_counters("c").unwrap().at(0, 0).unwrap().load().unwrap(), 2);
}

/// Whatever the limit of open files is: an error in words, or all is well.
#[cfg(feature = "cli")]
#[test]
fn few_files_are_a_reason_in_words() {
    use std::os::unix::fs::PermissionsExt;
    if !device() {
        return;
    }
    let server = rdma_server().start().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    std::fs::write(&key, common::key().expose()).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    for files in 4..16 {
        let out = std::process::Command::new("sh")
            .args(["-c", &format!("ulimit -n {files} && exec \"$0\" --transport rdma ls")])
            .arg(env!("CARGO_BIN_EXE_farcell"))
            .env("FARCELL_ADDR", server.address())
            .env("FARCELL_AUTHKEY_FILE", &key)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        println!("{files} files: {:?} {text}", out.status.code());
        assert!(matches!(out.status.code(), Some(0 | 5)), "{files} files: {text}");
        assert!(!text.contains("panicked"), "{files} files: {text}");
        assert!(!text.contains("no libibverbs.so.1"), "{files} files: {text}");
    }
}
