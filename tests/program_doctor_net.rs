//! Promise: `farcell doctor` tells apart why a server on another node is not
//! reached: nothing listens at that address, something on the way says no, or
//! nothing answers at all.
//!
//! The other node is a network namespace with a cable (veth) to the server's. To
//! make it the test must be root or have user namespaces; where it can have
//! neither it fails and says so.
#![cfg(feature = "cli")]

mod program_common;
use program_common::{Home, finish};
use serde_json::Value;
use std::process::Command;

/// Runs in the server's network, and prints what the doctor says on the other
/// node, a line for each state of the network.
const SCRIPT: &str = r#"
set -eu
farcell=$1
unshare --net sleep 120 &
other=$!
trap 'kill $other ${server-}' EXIT
until [ -e /proc/$other/ns/net ] && [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do
    sleep 0.05
done
there() { nsenter --net=/proc/$other/ns/net "$@"; }
ip link set lo up
ip link add v0 type veth peer name v1 netns $other
ip addr add 10.9.0.1/24 dev v0
ip link set v0 up
there ip link set lo up
there ip addr add 10.9.0.2/24 dev v1
there ip link set v1 up
serve() {
    rm -f ready
    "$farcell" serve --bind "$1" --ready-file ready >/dev/null 2>&1 &
    server=$!
    until [ -s ready ]; do sleep 0.05; done
}
doctor() {
    printf '%s ' "$1"
    shift
    there "$farcell" doctor --json --connect-timeout 2 "$@" || [ $? -eq 1 ]
}
doctor nobody
serve 127.0.0.1:7117
doctor loopback 10.9.0.1:7117
kill $server; wait $server || true
serve 10.9.0.1:7117
doctor well 10.9.0.1:7117
there ip route add unreachable 10.8.0.1
doctor filtered 10.8.0.1:7117
ip route add blackhole 10.9.0.2/32
doctor dropped 10.9.0.1:7117
"#;

/// Whether a network of our own can be made, and how.
fn enter() -> Command {
    let ways: [&[&str]; 2] = [&["unshare", "--net"], &["unshare", "--map-root-user", "--net"]];
    for way in ways {
        let tried = Command::new(way[0]).args(&way[1..]).arg("true").output();
        if tried.is_ok_and(|done| done.status.success()) {
            let mut command = Command::new(way[0]);
            command.args(&way[1..]);
            return command;
        }
    }
    panic!("no network of our own: run the test as root, or allow user namespaces");
}

#[test]
fn a_server_on_another_node() {
    let home = Home::new();
    let mut command = enter();
    command.args(["sh", "-c", SCRIPT, "sh", env!("CARGO_BIN_EXE_farcell")]);
    home.settle(&mut command);
    let ended = finish(&mut command);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let said = |state: &str| -> Value {
        let line = ended.stdout.lines().find_map(|line| line.strip_prefix(state));
        serde_json::from_str(line.unwrap_or_else(|| panic!("no {state} in {ended:?}"))).unwrap()
    };
    let has = |state: &str, name: &str, verdict: &str, words: &[&str]| {
        let said = said(state);
        let checks = said["checks"].as_array().unwrap();
        let check = checks.iter().find(|check| check["check"] == name).unwrap();
        let text = check.to_string();
        let fits = check["verdict"] == verdict && words.iter().all(|word| text.contains(word));
        assert!(fits, "{state} {name}: {verdict} {words:?} in {check:#}");
        assert_eq!(said["fine"], verdict != "fail");
    };
    // Nobody has named a server, and the one of this user does not run.
    has("nobody", "server.port", "warn", &["no server runs here", "\"fix\":\"farcell serve\""]);
    has(
        "loopback",
        "server.port",
        "fail",
        &["refused", "bound to 127.0.0.1 alone", "serve --bind [::]:7117"],
    );
    has("well", "server.port", "ok", &["10.9.0.1:7117"]);
    has("well", "server.told", "ok", &["handles carry no address"]);
    has("well", "path.shm", "skipped", &["another network namespace"]);
    has("well", "path.tcp", "ok", &["works"]);
    has(
        "filtered",
        "server.port",
        "fail",
        &["filtered", "firewall rejects", "ip route get 10.8.0.1"],
    );
    has("dropped", "server.port", "fail", &["timeout", "drops packets", "nft list ruleset"]);
}
