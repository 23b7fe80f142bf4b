//! Promise: one program for nodes with and without InfiniBand. It is not linked
//! with libibverbs, and in a root that has none its server and its clients work,
//! over TCP, and say why.
//!
//! The root has the program, what `ldd` says that it needs, and nothing else. To
//! enter it the test must be root or have user namespaces (`unshare`, `bwrap`);
//! where it can have neither it fails and says so.
#![cfg(feature = "cli")]

mod program_common;
use program_common::{Ended, Running, eventually, finish, ready};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_farcell");

/// What a command prints, which must succeed.
fn output(command: &mut Command) -> String {
    let done = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(done.status.success(), "{command:?}: {done:?}");
    String::from_utf8(done.stdout).unwrap()
}

/// The files that the program is linked with, the dynamic loader too.
fn linked() -> Vec<PathBuf> {
    let text = output(Command::new("ldd").arg(PROGRAM));
    let files: Vec<PathBuf> = text
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(|word| PathBuf::from(word.trim_end_matches(':')))
        .collect();
    assert!(files.iter().any(|file| file.to_string_lossy().contains("libc.so")), "{text}");
    files
}

/// A root directory with a program in it, and a way in.
struct Root {
    dir: TempDir,
    enter: Vec<String>,
}

impl Root {
    fn new() -> Root {
        let dir = tempfile::tempdir().unwrap();
        let put = |from: &Path, to: &Path| {
            let to = dir.path().join(to.strip_prefix("/").unwrap_or(to));
            std::fs::create_dir_all(to.parent().unwrap()).unwrap();
            std::fs::copy(from, to).unwrap();
        };
        put(Path::new(PROGRAM), Path::new("farcell"));
        for file in linked() {
            put(&file, &file);
        }
        std::fs::create_dir_all(dir.path().join("home")).unwrap();
        let enter = way_in(dir.path());
        Root { dir, enter }
    }

    /// The program in it, with nothing of our environment.
    fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(&self.enter[0]);
        command.args(&self.enter[1..]).arg("/farcell").args(args);
        command.env_clear().env("HOME", "/home").stdin(Stdio::null());
        command
    }

    fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Ended {
        finish(&mut self.command(args))
    }
}

/// The first way into a root that works here.
fn way_in(root: &Path) -> Vec<String> {
    let root = root.to_str().unwrap();
    let ways: [&[&str]; 3] = [
        &["unshare", "--map-root-user", "chroot", root],
        &["bwrap", "--bind", root, "/"],
        &["chroot", root],
    ];
    let mut failures = Vec::new();
    for way in ways {
        // With our path, since the way in is outside.
        match Command::new(way[0]).args(&way[1..]).args(["/farcell", "--version"]).output() {
            Ok(done) if done.status.success() => {
                let found = output(Command::new("sh").args(["-c", "command -v \"$0\"", way[0]]));
                let mut way: Vec<String> = way.iter().map(|&word| word.to_owned()).collect();
                way[0] = found.trim().to_owned();
                if let Some(word) = way.iter_mut().skip(1).find(|word| *word == "chroot") {
                    let found = output(Command::new("sh").args(["-c", "command -v chroot"]));
                    *word = found.trim().to_owned();
                }
                return way;
            }
            Ok(done) => {
                failures.push(format!("{way:?}: {}", String::from_utf8_lossy(&done.stderr).trim()));
            }
            Err(error) => failures.push(format!("{way:?}: {error}")),
        }
    }
    panic!(
        "no way into a root without libibverbs. Run the test as root, or allow user namespaces \
         (sysctl kernel.unprivileged_userns_clone=1), or install bubblewrap. Tried were:\n{}",
        failures.join("\n")
    );
}

#[test]
fn it_is_not_linked_with_libibverbs() {
    let text = output(Command::new("readelf").args(["--dynamic", "--wide", PROGRAM]));
    let needed: Vec<&str> = text.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(needed.iter().any(|line| line.contains("libc.so")), "{text}");
    for name in ["libibverbs", "librdmacm"] {
        assert!(!needed.iter().any(|line| line.contains(name)), "{needed:?}");
        assert!(!linked().iter().any(|file| file.to_string_lossy().contains(name)));
    }
}

#[test]
fn everything_works_over_tcp_where_there_is_none() {
    let root = Root::new();
    let absent = |dir: &str| !root.dir.path().join(dir).join("libibverbs.so.1").exists();
    assert!(["lib64", "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"].into_iter().all(absent));
    let serve = ["-v", "serve", "--json", "--bind", "127.0.0.1:0", "--array", "e:event:2x2"];
    let mut server = Running::start(&mut root.command(&serve));
    let said = ready(&mut server);
    assert_eq!((&said["rdma"], &said["domain"]), (&serde_json::Value::Null, &"cpu".into()));
    let addr = said["address"].as_str().unwrap();
    let at = |args: &[&str]| root.run(&[&["--addr", addr], args].concat());
    let ok = |args: &[&str]| {
        let ended = at(args);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{args:?}: {ended:?}");
        ended.stdout
    };

    // By default, and what the reason for TCP is.
    let told = at(&["-v", "set", "e", "0", "1"]);
    assert_eq!(told.code, Some(0), "{told:?}");
    for word in ["transport=\"tcp\"", "the server does not offer it", "no libibverbs.so.1"] {
        assert!(told.stderr.contains(word), "no {word:?} in {told:?}");
    }
    // Where it must be RDMA, there is an error with the reason in it.
    at(&["--transport", "rdma", "ls"]).failed(5, &["no RDMA", "no libibverbs.so.1"]);

    // All kinds of operations.
    ok(&["get", "e", "0", "1"]);
    ok(&["wait", "e", "0", "1", "--timeout", "30"]);
    ok(&["take", "e", "0", "1"]);
    assert_eq!(at(&["get", "e", "0", "1"]).code, Some(1));
    ok(&["create", "c:counter:1x2"]);
    assert_eq!(ok(&["add", "c", "0", "1", "5"]).trim(), "5");
    assert_eq!(ok(&["cas", "c", "0", "1", "5", "9"]).trim(), "5");
    let waiter = Running::start(&mut root.command(&["--addr", addr, "wait", "e", "1", "1"]));
    eventually("the wait is parked", || {
        let listed: serde_json::Value = serde_json::from_str(&ok(&["ls", "--json"])).unwrap();
        listed["server"]["parked_waits"] == 1
    });
    ok(&["set", "e", "1", "1"]);
    let ended = waiter.end(None);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    ok(&["rm", "c"]);

    // The doctor says what is missing, and that nothing here needs it.
    let told = at(&["doctor", "--json"]);
    assert_eq!(told.code, Some(0), "{told:?}");
    let told: serde_json::Value = serde_json::from_str(&told.stdout).unwrap();
    let check = |name: &str| {
        let checks = told["checks"].as_array().unwrap();
        checks.iter().find(|check| check["check"] == name).unwrap_or(&told["no"]).to_string()
    };
    for (name, words) in [
        ("rdma.library", &["skipped", "no libibverbs.so.1", "apt-get install libibverbs1"][..]),
        ("rdma.fork", &["skipped", "no libibverbs"]),
        // This root has no /proc.
        ("host.boot", &["warn", "no boot id", "mount -t proc"]),
        ("path.shm", &["skipped", "does not offer it"]),
        ("path.tcp", &["ok", "works"]),
    ] {
        assert!(words.iter().all(|word| check(name).contains(word)), "{name}: {}", check(name));
    }

    let ended = server.end(Some(Signal::TERM));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for word in ["no RDMA here", "no libibverbs.so.1"] {
        assert!(ended.stderr.contains(word), "no {word:?} in {ended:?}");
    }
}
