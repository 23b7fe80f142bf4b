//! Promise: what a server with `--state` has acknowledged is there after it was
//! killed; what is damaged is refused and left as it is; a snapshot begins a
//! new server with all that was in it.
#![cfg(feature = "cli")]

mod common;
mod program_common;

use common::process::Process;
use common::{eventually, key};
use farcell::{Client, Error, Kind};
use program_common::{Home, Running, ready};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// A folder on tmpfs that does not exist yet, and the one around it.
fn memory() -> (TempDir, String) {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("state").to_str().unwrap().to_owned();
    (dir, path)
}

fn client(server: &Process) -> Client {
    Client::builder().addr(&server.addr).key(key()).connect().unwrap()
}

fn serve<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["serve", "--json", "--bind", "127.0.0.1:0"], more].concat()
}

/// Starts a server, and stops it again after `meanwhile`.
fn during(home: &mut Home, more: &[&str], meanwhile: impl FnOnce(&Home)) -> serde_json::Value {
    let mut server = Running::start(&mut home.command(&serve(more)));
    let said = ready(&mut server);
    home.addr = Some(said["address"].as_str().unwrap().to_owned());
    meanwhile(home);
    let ended = server.end(Some(Signal::TERM));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    home.addr = None;
    said
}

#[test]
fn everything_is_as_it_was_for_clients_that_stay() {
    let (_dir, state) = memory();
    let mut server = Process::start(&["--state", &state]);
    let client = client(&server);
    let events = client.events("e", 4, 4).unwrap();
    let counter = client.counters("c", 1, 3).unwrap().at(0, 2).unwrap();
    events.at(1, 2).unwrap().set().unwrap();
    events.at(1, 3).unwrap().set().unwrap();
    events.at(1, 3).unwrap().clear().unwrap();
    counter.store(-5).unwrap();
    let waited = client.events("go", 1, 1).unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        let wait = s.spawn(|| waited.wait_timeout(Duration::from_secs(20)).unwrap());
        let at_count =
            s.spawn(|| counter.wait_until(farcell::Comparison::Ge, 3, None, None).unwrap());
        eventually("they are parked", || client.info().unwrap().parked_waits == 2);
        for _ in 0..3 {
            server.kill();
            server.start_again();
            eventually("they are parked again", || client.info().unwrap().parked_waits == 2);
        }
        assert_eq!(counter.fetch_add(8).unwrap(), -5);
        assert_eq!(at_count.join().unwrap(), Some(3));
        waited.set().unwrap();
        assert!(wait.join().unwrap());
    });
    assert!(events.at(1, 2).unwrap().is_set().unwrap());
    let transitions = events.all().transitions().unwrap();
    assert_eq!((transitions[6], transitions[7]), (1, 2));
    assert_eq!(transitions.iter().sum::<u64>(), 3);
}

#[test]
fn nobody_brings_back_what_was_removed() {
    let (_dir, state) = memory();
    let mut server = Process::start(&["--state", &state]);
    let (remover, holder) = (client(&server), client(&server));
    let gone = holder.events("gone", 2, 2).unwrap().at(1, 1).unwrap();
    let other = holder.events("other", 2, 2).unwrap().at(1, 1).unwrap();
    let counters = holder.counters("stays", 1, 1).unwrap();
    for name in ["gone", "other"] {
        remover.remove(name).unwrap();
    }
    remover.counters("other", 3, 3).unwrap();
    server.kill();
    server.start_again();
    counters.all().snapshot().unwrap();
    for event in [&gone, &other] {
        let error = event.set().unwrap_err();
        assert!(matches!(error, Error::ArrayRemoved { .. }), "{error}");
    }
    let mut names: Vec<String> = remover.list().unwrap().into_iter().map(|a| a.name).collect();
    names.sort();
    assert_eq!(names, ["other", "stays"]);
    holder.events("gone", 2, 2).unwrap().at(1, 1).unwrap().set().unwrap();
}

#[test]
fn a_first_start_may_be_killed_at_any_moment() {
    let (_dir, state) = memory();
    let home = Home::new();
    home.write_key("config/farcell/authkey", "a key for all", 0o600);
    for round in 0..40u64 {
        let mut child = home
            .command(&serve(&["--state", &state]))
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_micros(round * 700));
        child.kill().unwrap();
        child.wait().unwrap();
        if round % 8 == 7 {
            let mut home = Home { dir: tempfile::tempdir().unwrap(), addr: None };
            home.write_key("config/farcell/authkey", "a key for all", 0o600);
            during(&mut home, &["--state", &state], |home| {
                home.ok(&["ls"]);
            });
            fs::remove_dir_all(&state).unwrap();
        }
    }
}

#[test]
fn one_server_a_folder() {
    let (_dir, state) = memory();
    let snapshots = tempfile::tempdir().unwrap();
    let kept = snapshots.path().join("kept").to_str().unwrap().to_owned();
    let home = Home::new();
    let mut first =
        Running::start(&mut home.command(&serve(&["--state", &state, "--snapshot", &kept])));
    let said = ready(&mut first);
    assert_eq!((&said["origin"], &said["life"]), (&"nothing".into(), &1.into()));
    let pid = format!("is in use by pid {}", said["pid"]);
    home.fails(&serve(&["--state", &state]), 4, &[&state, &pid]);
    home.fails(&serve(&["--snapshot", &kept]), 4, &[&kept, &pid]);
    assert_eq!(first.end(Some(Signal::KILL)).code, None);
    let mut second = Running::start(&mut home.command(&serve(&["--state", &state])));
    let said = ready(&mut second);
    assert_eq!((&said["origin"], &said["life"]), (&"state".into(), &2.into()));
    assert_eq!(second.end(Some(Signal::TERM)).code, Some(0));
}

#[test]
fn folders_that_will_not_do() {
    let (dir, state) = memory();
    let home = Home::new();
    let on_disk = home.path("state");
    let found = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let disk = on_disk.to_str().unwrap();
    // Where temporary files are in memory too, there is no such folder here.
    let tmp_is_memory = found.lines().any(|l| l.contains(" /tmp ") && l.contains(" - tmpfs "));
    if !tmp_is_memory {
        home.fails(&serve(&["--state", disk]), 4, &[disk, "is on ", "/dev/shm/farcell-"]);
        assert!(!on_disk.exists(), "nothing was made");
    }
    home.fails(&serve(&["--state", "/proc/self/x/y"]), 4, &["must be a folder on tmpfs"]);
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    home.fails(&serve(&["--state", file.to_str().unwrap()]), 4, &["is no folder"]);
    fs::create_dir(&state).unwrap();
    let link = dir.path().join("link");
    symlink(&state, &link).unwrap();
    home.fails(&serve(&["--state", link.to_str().unwrap()]), 4, &["symbolic link"]);
    fs::set_permissions(&state, fs::Permissions::from_mode(0o775)).unwrap();
    home.fails(&serve(&["--state", &state]), 4, &["chmod 700", &state]);
    if rustix::process::geteuid().is_root() {
        fs::set_permissions(&state, fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(&state, Some(12345), None).unwrap();
        home.fails(&serve(&["--state", &state]), 4, &["belongs to user 12345"]);
    }
    home.fails(&serve(&["--snapshot-every", "5"]), 2, &["--snapshot"]);
    home.fails(
        &serve(&["--snapshot-every", "0", "--snapshot", disk]),
        2,
        &["snapshot-every: from 0.01"],
    );
    home.fails(&serve(&["--restore", "/nowhere"]), 4, &["/nowhere: does not exist"]);
}

#[test]
fn a_damaged_state_is_refused_and_left_alone() {
    let (_dir, state) = memory();
    let mut home = Home::new();
    let more = ["--state", &state, "--array", "a:counter:2x2"];
    during(&mut home, &more, |home| drop(home.ok(&["add", "a", "1", "1", "41"])));
    let catalog = Path::new(&state).join("catalog");
    let good = fs::read(&catalog).unwrap();
    let mut bad = good.clone();
    bad[good.len() - 1] ^= 1;
    fs::write(&catalog, &bad).unwrap();
    let words = [catalog.to_str().unwrap(), "damaged", "checksum", "nothing was changed"];
    home.fails(&serve(&["--state", &state]), 4, &words);
    assert_eq!(fs::read(&catalog).unwrap(), bad);
    fs::write(&catalog, &good).unwrap();
    home.fails(&serve(&["--state", &state, "--capacity", "4096"]), 4, &["4096", "262144"]);
    // Of this one alone can one do without.
    let sessions = Path::new(&state).join("sessions");
    let good = fs::read(&sessions).unwrap();
    fs::OpenOptions::new().write(true).open(&sessions).unwrap().set_len(257 << 20).unwrap();
    let words = [sessions.to_str().unwrap(), "too long", "move this file away"];
    home.fails(&serve(&["--state", &state]), 4, &words);
    fs::write(&sessions, &good).unwrap();
    let said = during(&mut home, &["--state", &state], |home| {
        assert_eq!(home.ok(&["get", "a", "1", "1"]), "41\n");
    });
    assert_eq!(said["origin"], "state");
}

#[test]
fn snapshots_come_in_time_and_at_the_end() {
    let snapshots = tempfile::tempdir().unwrap();
    let kept = snapshots.path().join("kept").to_str().unwrap().to_owned();
    let more = ["--snapshot", &kept, "--snapshot-every", "0.05"];
    let mut home = Home::new();
    let arrays = [&more[..], &["--array", "c:counter:3x5", "--array", "e:event:2x2"]].concat();
    let count = || fs::read_dir(&kept).unwrap().count();
    let newest = || {
        let all = fs::read_dir(&kept).unwrap().map(|e| e.unwrap().path());
        all.filter(|p| p.to_str().unwrap().contains("snapshot-")).max()
    };
    during(&mut home, &arrays, |home| {
        home.ok(&["set", "e", "1", "0"]);
        eventually("there is one", || newest().is_some());
        let first = newest();
        eventually("there are more", || newest() > first);
        assert!(count() <= 4, "the lock, two, and one that is being written");
        home.ok(&["add", "c", "2", "4", "77"]);
    });
    // The last change came after all but the last one.
    let (_dir, state) = memory();
    let from = newest().unwrap();
    let check = |home: &Home| {
        assert_eq!(home.ok(&["get", "c", "2", "4"]), "77\n");
        assert_eq!(home.ok(&["get", "e", "1", "0"]), "set\n");
        assert_eq!(home.json(&["--json", "ls"])["arrays"].as_array().map_or(0, Vec::len), 2);
    };
    let said = during(&mut home, &more[..2], check);
    assert_eq!(said["origin"], "snapshot");
    assert_eq!(said["restored_from"], from.to_str().unwrap());
    // A fresh machine, with the file alone.
    let copy = home.path("copy");
    fs::copy(newest().unwrap(), &copy).unwrap();
    let copy = copy.to_str().unwrap();
    let said = during(&mut home, &["--state", &state, "--restore", copy], check);
    assert_eq!((&said["origin"], &said["life"]), (&"snapshot".into(), &1.into()));
    home.fails(&serve(&["--state", &state, "--restore", copy]), 4, &["has a state already"]);
    // The state counts for more than snapshots.
    let said = during(&mut home, &["--state", &state, "--snapshot", &kept], check);
    assert_eq!(said["origin"], "state");
}

#[test]
fn a_damaged_snapshot_is_refused() {
    let snapshots = tempfile::tempdir().unwrap();
    let kept = snapshots.path().join("kept").to_str().unwrap().to_owned();
    let mut home = Home::new();
    for _ in 0..2 {
        during(&mut home, &["--snapshot", &kept, "--array", "a:event:1x1"], |_| {});
    }
    let newest = Path::new(&kept).join("snapshot-0000000002");
    let mut bytes = fs::read(&newest).unwrap();
    bytes.pop();
    fs::write(&newest, &bytes).unwrap();
    let words = [newest.to_str().unwrap(), "cut short", "move it away"];
    home.fails(&serve(&["--snapshot", &kept]), 4, &words);
    assert_eq!(fs::read(&newest).unwrap(), bytes);
    home.fails(&["snapshot", "inspect", newest.to_str().unwrap()], 4, &["cut short"]);
    let before = Path::new(&kept).join("snapshot-0000000001");
    let inspect = ["snapshot", "inspect", before.to_str().unwrap()];
    assert!(home.ok(&inspect).contains("whole, "));
    let said = home.json(&[&inspect[..], &["--json"]].concat());
    assert_eq!((&said["arrays"][0]["name"], &said["capacity"]), (&"a".into(), &262_144.into()));
    home.fails(&[&inspect[..], &["--addr", "x"]].concat(), 2, &["--addr is for clients"]);
    fs::remove_file(&newest).unwrap();
    let said = during(&mut home, &["--snapshot", &kept], |home| drop(home.ok(&["get", "a"])));
    assert!(said["restored_from"].as_str().unwrap().ends_with("snapshot-0000000001"));
}

/// Runs a shell script as root of a new mount namespace, in a folder where `m`
/// is a tmpfs of that size; `None` where the system does not allow that.
fn with_small_memory(size: &str, script: &str) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    let run = |script: &str| {
        std::process::Command::new("unshare")
            // Whatever is left of it in the end is killed.
            .args(["-rmpf", "--kill-child", "sh", "-ec", script, "sh"])
            .arg(env!("CARGO_BIN_EXE_farcell"))
            .env("HOME", dir.path())
            .current_dir(dir.path())
            .output()
    };
    fs::create_dir(dir.path().join("m")).unwrap();
    let mount = format!("mount -t tmpfs -o size={size},mode=700 tmpfs m\n");
    if !run(&mount).is_ok_and(|done| done.status.success()) {
        // CAP_SYS_ADMIN is bit 21. Who has it has no excuse.
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let able = status.lines().find_map(|l| l.strip_prefix("CapEff:")).unwrap().trim();
        let able = u64::from_str_radix(able, 16).unwrap() >> 21 & 1 == 1;
        assert!(!able, "an administrator cannot mount a tmpfs");
        println!("NOT TESTED: this process may make no mount namespace");
        return None;
    }
    let done = run(&(mount + script)).unwrap();
    let err = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{err}");
    Some(String::from_utf8(done.stdout).unwrap() + &err)
}

#[test]
fn a_full_tmpfs_is_found_at_the_start() {
    let said = with_small_memory(
        "1m",
        "$1 serve --state m/state --bind 127.0.0.1:0 2>&1 && exit 1\nls -A m/state",
    );
    if let Some(said) = said {
        for words in ["has no room: 262144 cells need 2105344 bytes", "--capacity", "lock\n"] {
            assert!(said.contains(words), "{words}: {said}");
        }
        assert!(!said.contains("segment\n"), "{said}");
    }
}

#[test]
fn a_catalog_without_room_refuses_and_goes_on() {
    // Full to the last page, the server keeps what it has and says why not.
    let said = with_small_memory(
        "3m",
        "$1 serve --state m/state --bind 127.0.0.1:0 --ready-file ready --array a:counter:1x1 &
         until [ -s ready ]; do sleep 0.01; done
         export FARCELL_ADDR=$(cat ready)
         cat /dev/zero >m/fill 2>/dev/null || true
         i=0
         while $1 create x$i:event:1x1 >/dev/null 2>said; do i=$((i+1)); [ $i -lt 100 ]; done
         cat said; rm said
         $1 add a 0 0 5
         rm m/fill
         $1 create later:event:1x1
         kill -9 $!; wait $! 2>/dev/null || true
         rm ready
         $1 serve --state m/state --bind 127.0.0.1:0 --ready-file ready &
         until [ -s ready ]; do sleep 0.01; done
         export FARCELL_ADDR=$(cat ready)
         $1 get a; $1 ls
         kill $!; wait $!",
    );
    if let Some(said) = said {
        for words in ["the server cannot note it in its state: No space left", "later"] {
            assert!(said.contains(words), "{words}: {said}");
        }
    }
}

#[test]
fn messages_without_room_are_refused_and_leave_nothing() {
    let said = with_small_memory(
        "6m",
        "$1 serve --state m/state --bind 127.0.0.1:0 --ready-file ready &
         until [ -s ready ]; do sleep 0.01; done
         export FARCELL_ADDR=$(cat ready)
         head -c 900000 /dev/zero >message
         $1 slot create small 1 1000000
         $1 slot create large 4 2000000 2>&1 && exit 1
         $1 slot put small 0 message
         ls m/state
         kill $!; wait $!",
    );
    if let Some(said) = said {
        for words in ["No space left", "\"large\"", "version 1, 900000 bytes", "slots-0\n"] {
            assert!(said.contains(words), "{words}: {said}");
        }
        assert!(!said.contains("slots.new"), "{said}");
    }
}

#[test]
fn a_snapshot_without_room_leaves_the_one_before() {
    let said = with_small_memory(
        "6m",
        "$1 serve --snapshot m/kept --snapshot-every 0.05 --bind 127.0.0.1:0 --ready-file ready --array a:counter:1x100000 2>log &
         until [ -s ready ] && [ -e m/kept/snapshot-0000000002 ]; do sleep 0.01; done
         cat /dev/zero >m/fill 2>/dev/null || true
         until grep -q full log || [ $(wc -c <log) -gt 500 ]; do sleep 0.01; done
         kill $!; code=0; wait $! || code=$?; [ $code = 4 ]
         tail -n 1 log | grep '^farcell: .*cannot be written: the file system is full'
         rm m/fill
         head -n 1 log
         ls m/kept
         $1 serve --snapshot m/kept --bind 127.0.0.1:0 --ready-file ready --json &
         until [ -s ready ]; do sleep 0.01; done
         kill $!; wait $!",
    );
    if let Some(said) = said {
        for words in ["ERROR", "a snapshot failed", "the file system is full", "\"snapshot\""] {
            assert!(said.contains(words), "{words}: {said}");
        }
        assert_eq!(said.matches("\nsnapshot-").count(), 2, "{said}");
        assert!(!said.contains("snapshot.new"), "{said}");
    }
}

#[test]
fn a_library_server_has_it_too() {
    let (dir, state) = memory();
    let start = || common::server().state(PathBuf::from(&state)).capacity(1024);
    let server = start().array("c", Kind::Counter, 1, 2).start().unwrap();
    let client = common::client(&server).connect().unwrap();
    client.counters("c", 1, 2).unwrap().at(0, 1).unwrap().fetch_add(3).unwrap();
    let error = start().start().unwrap_err();
    assert!(matches!(error, Error::State { .. }), "{error}");
    server.stop().unwrap();
    let snapshots = dir.path().join("snapshots");
    let server = start().snapshots(&snapshots).start().unwrap();
    fs::remove_dir_all(&snapshots).unwrap();
    let error = server.stop().unwrap_err();
    assert!(error.to_string().contains(snapshots.to_str().unwrap()), "{error}");
    let server = start().start().unwrap();
    assert_eq!(server.origin(), &farcell::Origin::State { life: 3 });
    let client = common::client(&server).connect().unwrap();
    assert_eq!(client.counters("c", 1, 2).unwrap().at(0, 1).unwrap().load().unwrap(), 3);
}

#[test]
fn a_site_can_be_restarted_with_its_state() {
    // The whole of it as a person would: stop, start, and go on.
    let (_dir, state) = memory();
    let mut home = Home::new();
    during(&mut home, &["--state", &state], |home| {
        home.ok(&["create", "go:event:2x2"]);
        home.ok(&["set", "go", "0", "1"]);
    });
    during(&mut home, &["--state", &state], |home| {
        assert_eq!(home.ok(&["get", "go", "0", "1"]), "set\n");
        home.ok(&["rm", "go"]);
    });
    during(&mut home, &["--state", &state], |home| {
        home.fails(&["get", "go"], 4, &["there is no array"]);
    });
}
