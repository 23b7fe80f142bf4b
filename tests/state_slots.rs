//! Promise: messages outlive a server with `--state` that is killed at random
//! moments: each row has its last whole message with its version, and only one
//! that was being written is torn; what is damaged is refused.
//!
//! FARCELL_KILLS says how often the server is killed.
#![cfg(feature = "cli")]

mod common;

use common::messages::{self, LARGEST, message};
use common::process::Process;
use common::{key, random};
use farcell::{Client, Error, Slot, TransportChoice};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

fn start() -> (TempDir, PathBuf, Process) {
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = memory.path().join("state");
    let server = Process::start(&["--state", state.to_str().unwrap()]);
    (memory, state, server)
}

fn over(server: &Process, choice: TransportChoice) -> Client {
    Client::builder().addr(&server.addr).key(key()).transport(choice).connect().unwrap()
}

fn files(state: &Path) -> Vec<String> {
    let all = fs::read_dir(state).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut slots: Vec<String> = all.filter(|name| name.starts_with("slots")).collect();
    slots.sort();
    slots
}

#[test]
fn messages_are_as_they_were_and_half_written_ones_are_torn() {
    let (_memory, state, mut server) = start();
    let clients = [TransportChoice::Tcp, TransportChoice::Shm].map(|way| over(&server, way));
    for (client, name) in clients.iter().zip(["tcp", "shm"]) {
        assert_eq!(client.transport().name, name);
        let slots = client.slots(name, 4, 10_000).unwrap();
        slots.at(0).unwrap().write(&[1; 9000]).unwrap();
        assert_eq!(slots.at(0).unwrap().write(b"two").unwrap(), 2);
        slots.at(2).unwrap().write(b"before").unwrap();
        let mut half = slots.at(2).unwrap().writer().unwrap();
        half.write_at(0, b"half").unwrap();
        // Of this one nothing is changed, but who can know that?
        let claimed = slots.at(3).unwrap().writer().unwrap();
        server.kill();
        server.start_again();
        assert!(half.write_at(4, b"more").and_then(|()| half.commit(8)).is_err());
        drop(claimed);
    }
    for round in 0..2 {
        for reader in &clients {
            for name in ["tcp", "shm"] {
                let slots = reader.slots(name, 4, 10_000).unwrap();
                let mut buffer = [0; 10_000];
                let first = slots.at(0).unwrap().read(&mut buffer).unwrap();
                assert_eq!((first.version, first.len), (2, 3));
                assert_eq!(&buffer[..3], b"two");
                assert_eq!(slots.at(1).unwrap().read(&mut buffer).unwrap().version, 0);
                let torn = slots.at(2).unwrap().read(&mut buffer);
                assert!(matches!(torn, Err(Error::Torn { version: 1, .. })), "{torn:?}");
                let torn = slots.at(3).unwrap().read(&mut buffer);
                assert!(matches!(torn, Err(Error::Torn { version: 0, .. })), "{torn:?}");
            }
        }
        if round == 0 {
            server.kill();
            server.start_again();
        }
    }
    // A part of a whole message, and a message in place of a torn one.
    let slots = clients[1].slots("shm", 4, 10_000).unwrap();
    assert_eq!(slots.at(0).unwrap().write_at(3, b" three").unwrap(), 3);
    assert_eq!(slots.at(2).unwrap().write(b"after").unwrap(), 2);
    server.kill();
    server.start_again();
    let slots = clients[0].slots("shm", 4, 10_000).unwrap();
    let mut buffer = [0; 10_000];
    assert_eq!(slots.at(0).unwrap().read(&mut buffer).unwrap().len, 9);
    assert_eq!(&buffer[..9], b"two three");
    assert_eq!(slots.at(2).unwrap().read(&mut buffer).unwrap().version, 2);
    // What is removed leaves nothing behind.
    assert_eq!(files(&state).len(), 2);
    clients[0].remove("shm").unwrap();
    clients[0].remove("tcp").unwrap();
    assert_eq!(files(&state), [""; 0]);
    fs::write(state.join("slots-7"), "of one that was killed in the middle").unwrap();
    fs::write(state.join("slots.new-3"), "likewise").unwrap();
    server.kill();
    server.start_again();
    assert_eq!(files(&state), [""; 0]);
}

/// What the writer of a row has begun and what was acknowledged.
#[derive(Default)]
struct Journal {
    begun: AtomicU64,
    done: AtomicU64,
    over: AtomicBool,
}

/// Writes one message after the other. The server is killed meanwhile.
fn write(slot: &Slot, journal: &Journal, pause: Duration) {
    let mut version = 0;
    for number in 1.. {
        if journal.over.load(Ordering::Relaxed) {
            return;
        }
        journal.begun.store(number, Ordering::SeqCst);
        loop {
            match slot.write(&message(number)) {
                Ok(new) => {
                    assert!(new > version, "it went back from {version} to {new}");
                    version = new;
                    break;
                }
                Err(Error::WriteLost { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        journal.done.store(number, Ordering::SeqCst);
        std::thread::sleep(pause);
    }
}

#[test]
fn no_message_that_was_acknowledged_is_lost() {
    let kills: u32 =
        std::env::var("FARCELL_KILLS").ok().map_or(40, |n| n.parse().expect("FARCELL_KILLS"));
    let (_memory, _state, mut server) = start();
    let ways = [TransportChoice::Tcp, TransportChoice::Shm];
    let clients = ways.map(|way| over(&server, way));
    let readers = ways.map(|way| over(&server, way));
    // The last two rest between two messages.
    let pauses = [0, 0, 200, 200].map(Duration::from_millis);
    let journals: [Journal; 4] = Default::default();
    let rows: Vec<Slot> = (0..4)
        .map(|row| clients[row % 2].slots("params", 4, LARGEST).unwrap().at(row).unwrap())
        .collect();
    let mut seed = u64::from(std::process::id());
    println!("seed {seed}, {kills} kills");
    let (mut torn, mut whole, mut idle) = (0, 0, 0);
    std::thread::scope(|s| {
        for ((slot, journal), pause) in rows.iter().zip(&journals).zip(pauses) {
            s.spawn(move || write(slot, journal, pause));
        }
        let mut buffer = vec![0; LARGEST as usize];
        for kill in 0..kills {
            std::thread::sleep(Duration::from_micros(20_000 + random(&mut seed, 60_000)));
            server.kill();
            // Answers that had been sent arrive, and nothing else can.
            std::thread::sleep(Duration::from_millis(5));
            let known: Vec<(u64, u64)> = journals
                .iter()
                .map(|j| (j.done.load(Ordering::SeqCst), j.begun.load(Ordering::SeqCst)))
                .collect();
            server.start_again();
            let reader = readers[kill as usize % 2].slots("params", 4, LARGEST).unwrap();
            for (row, &(done, begun)) in known.iter().enumerate() {
                match messages::read(&reader.at(row).unwrap(), &mut buffer) {
                    Ok((number, _)) => {
                        let now = journals[row].begun.load(Ordering::SeqCst);
                        assert!((done..=now).contains(&number), "{row}: {number}, {done}, {now}");
                        whole += 1;
                        idle += u32::from(begun == done);
                    }
                    Err(Error::Torn { .. }) => {
                        assert!(begun > done, "row {row} was whole, {done}, and nobody wrote it");
                        torn += 1;
                    }
                    // It is being written anew.
                    Err(Error::SlotBusy { .. }) => assert!(begun > done, "row {row}"),
                    Err(error) => panic!("row {row}: {error}"),
                }
            }
        }
        journals.iter().for_each(|j| j.over.store(true, Ordering::Relaxed));
    });
    println!("{whole} whole, {idle} of them with nobody writing, {torn} torn");
    assert!(idle > kills / 4 && whole > kills, "{idle} {whole} {torn}");
    let slots = readers[1].slots("params", 4, LARGEST).unwrap();
    let mut buffer = vec![0; LARGEST as usize];
    for (row, journal) in journals.iter().enumerate() {
        let (number, _) = messages::read(&slots.at(row).unwrap(), &mut buffer).unwrap();
        assert_eq!(number, journal.done.load(Ordering::SeqCst));
    }
}

#[test]
fn damaged_files_of_messages_are_refused_and_stay() {
    let (_memory, state, mut server) = start();
    let client = over(&server, TransportChoice::Tcp);
    let slots = client.slots("params", 3, 100).unwrap();
    slots.at(1).unwrap().write(&[7; 50]).unwrap();
    server.kill();
    let path = state.join(&files(&state)[0]);
    let good = fs::read(&path).unwrap();
    let label = good.len() - 4096;
    let flips = (label..label + 64).chain([good.len() - 1]).map(|at| (at, good[at] ^ 4));
    // Lengths that no row has, and places where no row is.
    let heads = [(192 + 1, 1), (192 + 7, 0x80), (8, 1), (192 + 8, 2)];
    let mut cases: Vec<Vec<u8>> = flips
        .chain(heads)
        .map(|(at, byte)| {
            let mut bad = good.clone();
            bad[at] = byte;
            bad
        })
        .collect();
    cases.push(good[..good.len() - 4096].to_vec());
    cases.push(vec![0; good.len()]);
    for bad in cases {
        fs::write(&path, &bad).unwrap();
        let ended = std::process::Command::new(env!("CARGO_BIN_EXE_farcell"))
            .args(["serve", "--rdma", "off", "--bind", "127.0.0.1:0", "--authkey-file"])
            .arg(server.dir.path().join("key"))
            .arg("--state")
            .arg(&state)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(4), "{said}");
        assert!(said.contains(path.to_str().unwrap()) && said.contains("\"params\""), "{said}");
        assert_eq!(fs::read(&path).unwrap(), bad);
    }
    // As the message says: without the file its rows are torn, and all else is there.
    fs::remove_file(&path).unwrap();
    server.start_again();
    let mut buffer = [0; 100];
    let torn = slots.at(1).unwrap().read(&mut buffer);
    assert!(matches!(torn, Err(Error::Torn { version: 1, .. })), "{torn:?}");
    assert_eq!(slots.at(1).unwrap().write(b"new").unwrap(), 2);
    server.kill();
    server.start_again();
    assert_eq!(slots.at(1).unwrap().read(&mut buffer).unwrap().version, 2);
}

#[test]
fn others_are_served_while_much_memory_is_made() {
    const ROWS: usize = 8;
    const BYTES: u64 = 64 << 20;
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let state = memory.path().join("state");
    let server = Process::start(&["--state", state.to_str().unwrap(), "--workers", "1"]);
    let learner = over(&server, TransportChoice::Tcp);
    let steps = learner.counters("steps", 1, 1).unwrap().at(0, 0).unwrap();
    let others: Vec<Client> = (0..4).map(|_| over(&server, TransportChoice::Tcp)).collect();
    let made = AtomicBool::new(false);
    let counted = std::thread::scope(|s| {
        let openers: Vec<_> =
            others.iter().map(|c| s.spawn(|| c.slots("large", ROWS, BYTES).unwrap())).collect();
        let learner = s.spawn(|| {
            // Those at whose beginning and end the memory was being made.
            let drafted = || files(&state).iter().any(|name| name.starts_with("slots.new-"));
            let mut counted = 0;
            while !made.load(Ordering::SeqCst) {
                let before = drafted();
                steps.fetch_add(1).unwrap();
                counted += u32::from(before && drafted());
            }
            counted
        });
        let all: Vec<_> = openers.into_iter().map(|opener| opener.join().unwrap()).collect();
        made.store(true, Ordering::SeqCst);
        for (row, slots) in all.iter().enumerate() {
            slots.at(row).unwrap().write(&[7; 1 << 20]).unwrap();
        }
        learner.join().unwrap()
    });
    // None, if the one worker had made the memory itself.
    println!("{counted} steps meanwhile");
    assert!(counted > 20, "{counted} steps");
    assert_eq!(files(&state).len(), 1, "all opened the same");
    let refused = others[0].slots("too-large", ROWS, 1 << 34).unwrap_err();
    assert!(matches!(refused, Error::SlotsFull { .. }), "{refused}");
}
