//! What befalls the machine: limits that are too small, and no room left.

use super::common::process::Process;
use super::common::rdma::{device, machine_has, run};
use super::common::{eventually, key};
use super::net::tried;
use super::world::{World, row};
use super::{NOTHING_LOST, alone, strike};
use farcell::{Client, Error, TransportChoice};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

/// The limit is for those without CAP_IPC_LOCK, which root has.
const LITTLE_MEMLOCK: [&str; 4] =
    ["setpriv", "--bounding-set=-ipc_lock", "prlimit", "--memlock=65536:65536"];
const REASONS: &str = "TCP instead, and the reason in words; nothing lost";

fn little_memlock(who: &str, server: &[&str], learners: &[&str], says: &str) {
    let _alone = alone();
    if machine_has("SOFT_ROCE_DEVICE").filter(|_| device()).is_none() {
        return;
    }
    let server = Process::start_at("127.0.0.1:0", server, &["--no-shm", "--rdma", "auto"]);
    let world = World::with("auto", server, learners);
    let said = world.transport_of(0);
    assert!(said.starts_with("tcp") && said.contains(says), "{said}");
    strike(&format!("memlock limit of 64 KiB for {who}"), REASONS, world, |world| {
        world.note(format!("learners say: {said}"));
    });
}

#[test]
fn the_memlock_limit_of_the_server_is_too_small() {
    // And why it does not, in its own words.
    little_memlock("the server", &LITTLE_MEMLOCK, &[], "the server does not offer it: ");
}

#[test]
fn the_memlock_limit_of_learners_is_too_small() {
    little_memlock("the learners", &[], &LITTLE_MEMLOCK, "memlock limit is 64 KiB");
}

#[test]
fn the_file_limit_is_too_small() {
    let _alone = alone();
    let server = Process::start_at("127.0.0.1:0", &["prlimit", "--nofile=80:80"], &["--no-shm"]);
    let world = World::with("tcp", server, &[]);
    let promised = "more clients are refused with the reason, those that are there go on";
    strike("file limit of 80 for the server, 100 clients more", promised, world, |world| {
        let connect = || {
            Client::builder()
                .addr(&world.server.addr)
                .key(key())
                .transport(TransportChoice::Tcp)
                .connect()
        };
        let (mut there, mut refused) = (Vec::new(), 0);
        for _ in 0..100 {
            match connect() {
                Ok(client) => there.push(client),
                Err(Error::ServerFull { .. }) => refused += 1,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(refused > 0 && !there.is_empty(), "{refused} refused");
        world.at_work();
        let taken = there.len();
        drop(there);
        eventually("a client finds room again", || connect().is_ok());
        world.note(format!("{taken} taken, {refused} refused"));
    });
}

/// A tmpfs of its own, with little room.
struct Small(tempfile::TempDir);

impl Small {
    fn new(mib: u32) -> Option<Small> {
        let dir = tempfile::tempdir().unwrap();
        let mounted =
            tried(&format!("mount -t tmpfs -o size={mib}m tmpfs {}", dir.path().display()));
        mounted.then_some(Small(dir))
    }

    /// Takes all the room that is left; gives it back again.
    fn fill(&self, yes: bool) {
        let file = self.0.path().join("filler");
        if yes {
            // It ends for want of room.
            let _ = Command::new("dd")
                .args(["if=/dev/zero", "bs=4096", &format!("of={}", file.display())])
                .output();
        } else {
            std::fs::remove_file(file).unwrap();
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        tried(&format!("umount -l {}", self.0.path().display()));
    }
}

#[test]
fn the_tmpfs_is_full() {
    let _alone = alone();
    let Some(small) = Small::new(16) else {
        println!("NOT TESTED: no tmpfs can be mounted here; root can");
        return;
    };
    let folder = |name: &str| small.0.path().join(name).to_str().unwrap().to_owned();
    let (state, snapshots) = (folder("state"), folder("snapshots"));
    let server = ["--capacity", "4096", "--state", &state, "--snapshot", &snapshots];
    let server: Vec<&str> = server.into_iter().chain(["--snapshot-every", "0.5"]).collect();
    for transport in ["tcp", "shm"] {
        let world = World::here(transport, &server);
        strike("the tmpfs of --state and --snapshot is full", NOTHING_LOST, world, |world| {
            let client = world.client();
            let another_copy = || {
                let before = newest(&snapshots);
                eventually("a snapshot is written", || newest(&snapshots) > before);
            };
            another_copy();
            small.fill(true);
            world.at_work();
            let refused = client.slots("too.large", 64, 1 << 20).unwrap_err();
            std::thread::sleep(Duration::from_secs(1));
            is_whole(Path::new(&snapshots));
            world.at_work();
            small.fill(false);
            another_copy();
            let fits = client.slots("fits", 1, 1 << 16).expect("there is room again");
            fits.at(0).unwrap().write(b"message").unwrap();
            client.remove("fits").unwrap();
            is_whole(Path::new(&snapshots));
            world.note(format!(
                "while it was, a new array: \"{refused}\"; the last snapshot stayed whole"
            ));
        });
        for folder in [&state, &snapshots] {
            run(&format!("rm -r {folder}"));
        }
    }
    cannot_start(&small, Path::new(&state));
}

/// When the last snapshot was written.
fn newest(folder: &str) -> Option<SystemTime> {
    let files = std::fs::read_dir(folder).ok()?;
    files.flatten().filter_map(|file| file.metadata().ok()?.modified().ok()).max()
}

/// Each snapshot in the folder is one.
fn is_whole(folder: &Path) {
    let mut snapshots = 0;
    for file in std::fs::read_dir(folder).unwrap().flatten() {
        let name = file.file_name().into_string().unwrap();
        if !name.starts_with("snapshot-") {
            continue;
        }
        let out = Command::new(env!("CARGO_BIN_EXE_farcell"))
            .args(["snapshot", "inspect"])
            .arg(file.path())
            .output()
            .unwrap();
        assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
        snapshots += 1;
    }
    assert!(snapshots > 0, "no snapshot is there");
}

/// A server that finds no room says so and leaves nothing behind that keeps a later
/// one from starting.
fn cannot_start(small: &Small, state: &Path) {
    small.fill(true);
    let home = tempfile::tempdir().unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_farcell"))
        .args(["serve", "--bind", "127.0.0.1:0", "--rdma", "off", "--state"])
        .arg(state)
        .env("HOME", home.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && said.contains("space"), "{:?}: {said}", out.status);
    small.fill(false);
    let server = Process::start(&["--state", state.to_str().unwrap(), "--capacity", "4096"]);
    drop(server);
    let said = said.trim().replace(small.0.path().to_str().unwrap(), "DIR");
    row(
        "a server is started on a full tmpfs",
        "",
        "refused with the reason; once there is room it starts",
        said.lines().last().unwrap_or_default(),
    );
}
