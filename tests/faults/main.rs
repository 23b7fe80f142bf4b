//! Promise: whatever befalls the network, the processes or their machine, no
//! operation that was acknowledged is lost, none is doubled, a lock has one holder,
//! nobody hangs beyond the lease, and work goes on by itself.
//!
//! Real processes, real kernels. Each fault strikes a server and four learners at
//! work. What needs netem, an adapter, or a clock that may be set says so and passes
//! where there is none; `scripts/faults` runs all of it, in machines that have them,
//! and makes the table in docs/reliability.md of what was seen. FARCELL_FAULTS=full
//! lets faults last longer.
#![cfg(feature = "cli")]

#[path = "../common/mod.rs"]
mod common;
mod learner;
mod limits;
mod net;
mod resets;
mod world;

use common::process::Process;
use common::rdma::{device, machine_has, run};
use learner::{Count, now};
use resets::Resetter;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;
use world::{World, row};

const NOTHING_LOST: &str = "nothing lost, nothing doubled, no hang, goes on by itself";
const TOLD: &str =
    "the others are told within the lease and 0.25 s, its lock comes free, they go on";

/// One fault at a time: learners of another one would be slow.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn full() -> bool {
    std::env::var("FARCELL_FAULTS").is_ok_and(|v| v == "full")
}

/// How long something lasts, in seconds.
fn lasting(usual: u64, in_full: u64) -> Duration {
    Duration::from_secs(if full() { in_full } else { usual })
}

/// Lets something befall a world at work, and notes what came of it.
fn strike(fault: &str, promised: &str, mut world: World, it: impl FnOnce(&mut World)) {
    println!("{fault} ...");
    let usual = world.at_work();
    it(&mut world);
    let went_on = world.at_work();
    let over = world.transport();
    let seen = world.settle(went_on, usual);
    row(fault, over, promised, &seen);
}

#[test]
#[ignore = "the role of a process of the tests below"]
fn role_of_a_learner() {
    learner::learn_if_asked();
}

// ---- the network ---------------------------------------------------------------

/// A wire that does this for a while.
fn bad_wire(fault: &str, how: &str, time: Duration) {
    let _alone = alone();
    let Some(world) = World::apart(&[]) else { return };
    if !world.net().wire(how) {
        println!("NOT TESTED: this kernel has no netem; scripts/faults has one that does");
        return;
    }
    world.net().mend();
    strike(fault, NOTHING_LOST, world, |world| {
        assert!(world.net().wire(how));
        sleep(time);
        world.net().mend();
    });
}

#[test]
fn packets_are_lost() {
    for percent in [1, 5, 20] {
        let time = lasting(2, 10);
        bad_wire(
            &format!("{percent} % of packets lost for {} s", time.as_secs()),
            &format!("loss {percent}%"),
            time,
        );
    }
}

#[test]
fn packets_are_late() {
    let time = lasting(3, 10);
    // Half of it in each direction.
    bad_wire(&format!("200 ms of delay for {} s", time.as_secs()), "delay 100ms", time);
}

#[test]
fn the_network_is_parted() {
    for time in [lasting(1, 1), lasting(3, 10), lasting(0, 60)] {
        if !time.is_zero() {
            bad_wire(&format!("partition of {} s", time.as_secs()), "loss 100%", time);
        }
    }
}

#[test]
fn the_link_goes_down() {
    let _alone = alone();
    for time in [lasting(2, 5), lasting(0, 30)] {
        let Some(world) = World::apart(&[]).filter(|_| !time.is_zero()) else { continue };
        let fault = format!("link down for {} s", time.as_secs());
        strike(&fault, NOTHING_LOST, world, |world| {
            world.net().link("down");
            sleep(time);
            world.net().link("up");
        });
    }
}

#[test]
fn connections_are_reset() {
    let _alone = alone();
    let time = lasting(3, 10);
    let server = Process::start(&[]);
    let way = Resetter::new(&server.addr);
    let world = World::behind(server, &way.addr);
    let fault = format!("all connections reset 20 times a second for {} s", time.as_secs());
    strike(&fault, NOTHING_LOST, world, |world| {
        let rounds = time.as_millis() / 50;
        let mut resets = 0;
        for _ in 0..rounds {
            resets += way.reset();
            sleep(Duration::from_millis(50));
        }
        assert!(resets > 0, "nothing was reset");
        world.note(format!("{resets} connections reset"));
    });
}

/// What the wire between two adapters does, for a while.
fn bad_fabric(fault: &str, how: &str, time: Duration) {
    let _alone = alone();
    let Some(first) = machine_has("SOFT_ROCE_DEVICE").filter(|_| device()) else { return };
    let ends = ["SOFT_ROCE_NETDEV", "SOFT_ROCE_NETDEV_2"].map(machine_has);
    let [Some(a), Some(b)] = ends else { return };
    let world = World::here("rdma", &["--rdma", &first, "--no-shm"]);
    strike(fault, NOTHING_LOST, world, |world| {
        for end in [&a, &b] {
            run(&format!("tc qdisc add dev {end} root netem {how}"));
        }
        sleep(time);
        for end in [&a, &b] {
            run(&format!("tc qdisc del dev {end} root"));
        }
        world.note_transports();
    });
}

#[test]
fn the_fabric_loses_packets() {
    for percent in [1, 5, 20, 100] {
        let time = lasting(3, 10);
        bad_fabric(
            &format!("{percent} % of the fabric's packets lost for {} s", time.as_secs()),
            &format!("loss {percent}%"),
            time,
        );
    }
}

#[test]
fn the_fabrics_link_goes_down() {
    let _alone = alone();
    let Some(first) = machine_has("SOFT_ROCE_DEVICE").filter(|_| device()) else { return };
    let Some(netdev) = machine_has("SOFT_ROCE_NETDEV") else { return };
    let world = World::here("rdma", &["--rdma", &first, "--no-shm"]);
    strike("the fabric's link down for 3 s", NOTHING_LOST, world, |world| {
        run(&format!("ip link set {netdev} down"));
        sleep(Duration::from_secs(3));
        run(&format!("ip link set {netdev} up"));
        world.note_transports();
    });
}

// ---- processes -----------------------------------------------------------------

/// Worlds over each transport that this machine has.
fn each(serve: &[&str], mut with: impl FnMut(World)) {
    let _alone = alone();
    let mut tcp = serve.to_vec();
    tcp.push("--no-shm");
    // A machine is slow, and is asked for what there is nowhere else.
    if std::env::var("FARCELL_FAULT_OVER").is_ok_and(|over| over == "rdma") {
        let device = machine_has("SOFT_ROCE_DEVICE").filter(|_| device()).expect("a device");
        tcp.extend(["--rdma", &device]);
        return with(World::here("rdma", &tcp));
    }
    with(World::here("tcp", &tcp));
    with(World::here("shm", serve));
}

#[test]
fn a_learner_is_killed() {
    each(&["--lease", "2"], |world| {
        strike("SIGKILL for a learner, lease 2 s", TOLD, world, |world| world.kill_learner(3));
    });
}

#[test]
fn a_learner_is_stopped_for_less_than_its_lease() {
    each(&["--lease", "5"], |world| {
        strike("SIGSTOP for a learner for 2 s, lease 5 s", NOTHING_LOST, world, |world| {
            world.signal_learner(3, "STOP");
            sleep(Duration::from_secs(2));
            assert_eq!(world.sum(Count::PeersLost), 0, "its lease is not over");
            world.signal_learner(3, "CONT");
        });
    });
}

#[test]
fn a_learner_is_stopped_for_longer_than_its_lease() {
    each(&["--lease", "2"], |world| {
        strike("SIGSTOP for a learner for 4 s, lease 2 s", TOLD, world, |world| {
            let at = now();
            world.signal_learner(3, "STOP");
            world.told_of(3, at);
            world.others_at_work(3);
            sleep(Duration::from_secs(1));
            world.signal_learner(3, "CONT");
        });
    });
}

#[test]
fn the_server_is_killed() {
    let state = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut n = 0;
    let folder = state.path().join("state");
    let folder = folder.to_str().unwrap();
    each(&["--state", folder], |world| {
        // In an emulated machine each takes long.
        let times = if full() && world.transport() != "rdma" { 20 } else { 4 };
        strike(
            &format!("SIGKILL for the server {times} times, with --state"),
            NOTHING_LOST,
            world,
            |world| {
                for _ in 0..times {
                    n += 1;
                    sleep(Duration::from_millis(100 + n * 37 % 200));
                    world.server.kill();
                    world.server.start_again();
                    world.at_work();
                }
            },
        );
        std::fs::remove_dir_all(folder).unwrap();
    });
}

#[test]
fn the_server_is_stopped_for_a_while() {
    each(&["--lease", "2"], |world| {
        strike("SIGSTOP for the server for 4 s, lease 2 s", NOTHING_LOST, world, |world| {
            world.server.signal("STOP");
            sleep(Duration::from_secs(4));
            world.server.signal("CONT");
        });
    });
}

// ---- the machine ---------------------------------------------------------------

#[test]
fn the_clock_jumps() {
    // Nobody's clock but that of a machine that was made for this.
    if machine_has("SOFT_ROCE_NETDEV").is_none() {
        return;
    }
    each(&["--lease", "5"], |world| {
        strike("the clock jumps by an hour, forth and back", NOTHING_LOST, world, |world| {
            for jump in [3600, -7200, 3600] {
                run(&format!("date -s @$(($(date +%s) + {jump})) >/dev/null"));
                sleep(Duration::from_secs(1));
                world.at_work();
            }
            assert_eq!(world.sum(Count::PeersLost), 0, "nobody's lease was over");
        });
    });
}
