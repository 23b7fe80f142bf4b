//! Promise: where there is an adapter `farcell doctor` tries it: each address with
//! real data, the atomics with their byte order, the way to the server's memory;
//! and names a port that is down, a limit that is too small, and device files that
//! are not there.
//!
//! Needs a machine of `scripts/soft-roce run --hcas 2`, whose links it takes down.
//! Elsewhere each test says so and passes, unless `FARCELL_TEST_RDMA` is
//! `required`.
#![cfg(feature = "cli")]

mod common;
mod program_common;
use common::rdma::{device, eventually, machine_has, run};
use program_common::{Home, Running, finish, ready};
use serde_json::Value;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Links are taken down for all: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn doctor(command: &mut Command) -> Value {
    let ended = finish(command);
    serde_json::from_str(&ended.stdout).unwrap_or_else(|e| panic!("{e}: {ended:?}"))
}

/// Whether some check has this name, subject, verdict and words.
fn has(said: &Value, name: &str, subject: &str, verdict: &str, words: &[&str]) {
    let checks: Vec<&Value> =
        said["checks"].as_array().unwrap().iter().filter(|c| c["check"] == name).collect();
    let fits = |check: &&Value| {
        let text = format!("{} -> {}", check["what"], check["fix"]);
        check["verdict"] == verdict
            && check["subject"].as_str().unwrap_or_default().contains(subject)
            && words.iter().all(|word| text.contains(word))
    };
    assert!(checks.iter().any(fits), "{name} {subject}: {verdict} {words:?} in {checks:#?}");
}

/// A server with RDMA, and the home in which clients find it.
fn site() -> (Home, Running) {
    let mut home = Home::new();
    let mut server =
        Running::start(&mut home.command(&["serve", "--json", "--bind", "127.0.0.1:0"]));
    let said = ready(&mut server);
    assert_eq!(said["domain"], "hca", "{said}");
    home.addr = Some(said["address"].as_str().unwrap().to_owned());
    (home, server)
}

#[test]
fn the_adapter_works() {
    let _alone = alone();
    let Some(name) = machine_has("SOFT_ROCE_DEVICE").filter(|_| device()) else {
        return;
    };
    let (home, _server) = site();
    let said = doctor(&mut home.command(&["doctor", "--json"]));
    println!("{}", finish(&mut home.command(&["doctor"])).stdout);
    let port = format!("{name}:1");
    has(&said, "host.devices", "", "ok", &[&name]);
    has(&said, "rdma.library", "", "ok", &[]);
    has(&said, "rdma.provider", &name, "ok", &[]);
    has(&said, "rdma.node", &name, "ok", &["/dev/infiniband/uverbs", "can be opened"]);
    has(&said, "rdma.device", &name, "ok", &["InfiniBand"]);
    has(&said, "rdma.port", &port, "ok", &["ACTIVE", "Ethernet", "MTU 1024"]);
    has(&said, "rdma.fork", "", "ok", &[]);
    // One address moves as much as a segment.
    has(&said, "rdma.gid", &port, "ok", &["2.0 MiB written and read back"]);
    has(&said, "rdma.gid", "::ffff:10.0.0.1, RoCE v2", "ok", &["through the adapter"]);
    has(&said, "rdma.atomics", &name, "ok", &["byte order", "domain hca"]);
    has(&said, "rdma.gid-server", "::ffff:10.0.0.1", "ok", &["reaches the server's memory"]);
    has(&said, "server.domain", "", "ok", &["hca: "]);
    has(&said, "path.rdma", "", "ok", &["READ and atomics one-sided"]);
    has(&said, "path.chosen", "", "ok", &["shm: "]);
    let said = doctor(&mut home.command(&["doctor", "--json", "--transport", "rdma"]));
    has(&said, "path.chosen", "", "ok", &["rdma: "]);
    // One that is not there.
    let said = doctor(&mut home.command(&["doctor", "--json", "--device", "mlx5_9"]));
    has(&said, "rdma.device", "mlx5_9", "fail", &["not here", &name]);

    // Without device files, as in a container that was not given them.
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", "mount -t tmpfs none /dev/infiniband && exec \"$0\" \"$@\""]);
    command.args([env!("CARGO_BIN_EXE_farcell"), "doctor", "--json"]);
    home.settle(&mut command);
    let said = doctor(&mut command);
    has(&said, "host.devices", "", "fail", &["no uverbs file", "--device=/dev/infiniband"]);
    has(&said, "rdma.node", &name, "fail", &["there is no /dev/infiniband/uverbs"]);

    // With a limit under what a client needs.
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit"]);
    command.args(["--memlock=65536:65536", env!("CARGO_BIN_EXE_farcell"), "doctor", "--json"]);
    home.settle(&mut command);
    let said = doctor(&mut command);
    has(&said, "memlock.client", "", "fail", &["limit 64 KiB", "ulimit -l unlimited"]);
    has(&said, "rdma.gid-server", "", "warn", &["memlock limit is 64 KiB"]);
}

#[test]
fn the_ports_are_down() {
    let _alone = alone();
    let Some(first) = machine_has("SOFT_ROCE_NETDEV").filter(|_| device()) else {
        return;
    };
    let Some(name) = machine_has("SOFT_ROCE_DEVICE") else {
        return;
    };
    let (home, _server) = site();
    let (port, up) = (format!("{name}:1"), format!("ip link set {first} up"));
    // The machine's two adapters are at the ends of one cable.
    run(&format!("ip link set {first} down"));
    let said = doctor(&mut home.command(&["doctor", "--json"]));
    has(&said, "rdma.port", &port, "fail", &["DOWN", &up]);
    has(&said, "rdma.gid", &port, "skipped", &["the port is DOWN"]);
    has(&said, "rdma.atomics", &name, "skipped", &["not tried"]);
    has(&said, "path.rdma", "", "skipped", &["DOWN"]);
    has(&said, "path.tcp", "", "ok", &[]);
    assert_eq!(said["fine"], false);
    // What it says mends it.
    run(&up);
    eventually("the port is up", || {
        let said = doctor(&mut home.command(&["doctor", "--json"]));
        let ports = said["checks"].as_array().unwrap().iter();
        ports.filter(|check| check["check"] == "rdma.port").all(|port| port["verdict"] == "ok")
    });
}
