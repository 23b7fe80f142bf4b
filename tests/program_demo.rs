//! Promise: the demo shows the main job in one command, its check can fail,
//! and it leaves nothing behind however it ends.
#![cfg(feature = "cli")]

mod program_common;
use program_common::{Ended, Home, Running, eventually, signal};
use rustix::process::Signal;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::Path;

fn json(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"))
}

/// The demo at work, and the processes of its learners.
fn start(home: &Home) -> (Running, Vec<u32>) {
    let mut demo = Running::start(&mut home.command(&["demo", "--seconds", "600"]));
    let mut line = String::new();
    let mut stderr = BufReader::new(demo.0.as_mut().unwrap().stderr.take().unwrap());
    stderr.read_line(&mut line).unwrap();
    let (_, pids) = line.split_once("processes ").unwrap();
    let pids = pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    // What comes behind it is read, too, or the demo could not go on.
    let pipe = stderr.into_inner();
    demo.0.as_mut().unwrap().stderr = Some(pipe);
    (demo, pids)
}

fn all_gone(pids: &[u32]) {
    eventually("the learners have ended", || pids.iter().all(|pid| !is_learner(*pid)));
}

/// Whether the process is one of ours still, and no zombie.
fn is_learner(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline"))
        .is_ok_and(|line| line.ends_with(b"__demo-learner\0"))
}

#[test]
fn everything_is_checked_and_right() {
    let home = Home::new();
    let ended = home.run(&["demo", "--learners", "3", "--rounds", "60", "--json"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let result = json(&ended);
    assert_eq!(result["ok"], true);
    assert_eq!(result["rounds"], 60);
    assert_eq!(result["checks"], 180);
    assert_eq!(result["each"].as_array().unwrap().len(), 3);
    for name in ["rounds_per_second", "p50_us", "p99_us", "max_us", "seconds"] {
        assert!(result[name].as_f64().unwrap() > 0.0, "{name}: {ended:?}");
    }
    for name in ["torn", "repeated", "skipped", "astray"] {
        assert_eq!(result[name], 0);
    }
    // Half of the way and more in each round: 60 are enough for what is left to
    // be rounding.
    let [distance, tolerance] = ["distance", "tolerance"].map(|n| result[n].as_f64().unwrap());
    assert!(distance <= tolerance && tolerance < 1e-9, "{distance} {tolerance}");
    for one in result["each"].as_array().unwrap() {
        assert!(one["distance"].as_f64().unwrap() <= distance);
    }
    assert_eq!(std::fs::read_dir(home.dir.path()).unwrap().count(), 0, "no file is left");
}

#[test]
fn every_shape_of_ring() {
    let home = Home::new();
    for args in [
        &["--learners", "2", "--rounds", "1", "--cells", "1"][..],
        &["--learners", "4", "--peers", "3", "--rounds", "40", "--cells", "500"],
        &["--learners", "5", "--peers", "2", "--seconds", "0.3"],
        &["--learners", "3", "--rounds", "20", "--cells", "200000"],
    ] {
        let ended = home.run(&[&["demo"], args].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stdout.contains("right: no learner saw a torn"), "{ended:?}");
        assert!(ended.stdout.contains("of the mean of all starts"), "{ended:?}");
    }
    home.fails(&["demo", "--peers", "4"], 2, &["--peers 4", "at most 3"]);
    home.fails(&["demo", "--learners", "1"], 2, &["--learners"]);
    home.fails(&["demo", "--addr", "x:1"], 2, &["--addr", "demo"]);
}

#[test]
fn the_check_can_fail() {
    let home = Home::new();
    let ended = home.run(&["demo", "--break-protocol", "--rounds", "100000", "--json"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let result = json(&ended);
    assert_eq!(result["ok"], false);
    let counted =
        ["torn", "repeated", "skipped", "astray"].map(|name| result[name].as_u64().unwrap());
    let faults = result["faults"].as_array().unwrap();
    assert_eq!(counted.iter().sum::<u64>(), faults.len() as u64);
    assert!(!faults.is_empty());
    let ended = home.run(&["demo", "--break-protocol", "--rounds", "100000"]);
    assert!(ended.stdout.contains("WRONG: learner"), "{ended:?}");
}

#[test]
fn a_learner_that_is_killed_ends_the_demo() {
    let home = Home::new();
    let (demo, pids) = start(&home);
    signal(pids[1], Signal::KILL);
    let ended = demo.end(None);
    assert_eq!(ended.code, Some(5), "{ended:?}");
    let last = ended.stderr.lines().last().unwrap();
    let victim = format!("farcell: learner 1 (process {}) was killed by signal 9", pids[1]);
    assert!(last.starts_with(&victim), "{ended:?}");
    all_gone(&pids);
}

#[test]
fn ctrl_c_ends_everything() {
    let home = Home::new();
    let (demo, pids) = start(&home);
    let ended = demo.end(Some(Signal::INT));
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert!(!pids.iter().any(|pid| is_learner(*pid)), "they end before the demo does");
    assert_eq!(std::fs::read_dir(home.dir.path()).unwrap().count(), 0);
}

#[test]
fn learners_do_not_outlive_a_demo_that_was_killed() {
    let home = Home::new();
    let (demo, pids) = start(&home);
    demo.end(Some(Signal::KILL));
    all_gone(&pids);
}

#[test]
fn no_secret_can_be_seen_from_outside() {
    let home = Home::new();
    let (demo, pids) = start(&home);
    for pid in &pids {
        // It is empty until the process has become our program.
        eventually("the learner is there", || is_learner(*pid));
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        let words: Vec<&[u8]> = line.split(|&b| b == 0).collect();
        assert_eq!(words.len(), 3, "the program, that it is a learner, and the end");
        assert!(Path::new(std::str::from_utf8(words[0]).unwrap()).ends_with("farcell"));
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        let hex = |word: &[u8]| word.len() >= 64 && word.iter().all(u8::is_ascii_hexdigit);
        assert!(!environ.split(|b| b"=\0".contains(b)).any(hex));
    }
    drop(demo);
    all_gone(&pids);
}
