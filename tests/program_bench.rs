//! Promise: `farcell bench` measures every transport that is there, says why
//! another one is not, and leaves nothing behind however it ends.
#![cfg(feature = "cli")]

mod program_common;
use program_common::{Home, Running, Site, eventually};
use rustix::process::Signal;
use serde_json::Value;

fn arrays(site: &Site) -> Vec<Value> {
    site.home.json(&["ls", "--json"])["arrays"].as_array().unwrap().clone()
}

#[test]
fn everything_is_measured() {
    let site = Site::start(&["mine:event:1x1"]);
    let addr = site.addr().to_owned();
    let report = site.home.json(&["bench", &addr, "--iterations", "40", "--json"]);
    assert_eq!(report["addr"], addr);
    let names = |key: &str| -> Vec<String> {
        let list = report[key].as_array().unwrap().iter();
        list.map(|t| t["name"].as_str().unwrap().to_owned()).collect()
    };
    let (there, missing) = (names("transports"), names("missing"));
    assert!(there.contains(&"tcp".to_owned()), "{report}");
    assert_eq!(there.len() + missing.len(), 3, "a way is there, or the report says why not");
    for why in report["missing"].as_array().unwrap() {
        assert!(!why["why"].as_str().unwrap().is_empty(), "{report}");
    }
    let latency = report["latency"].as_array().unwrap();
    assert_eq!(latency.len(), 5 * there.len());
    for l in latency {
        let wakes = l["operation"] == "wake-up";
        assert!(l["iterations"].as_u64().unwrap() >= if wakes { 4 } else { 40 }, "{l}");
        assert_eq!(l["bytes"], 8);
        let times = ["min_us", "typical_us", "p99_us", "p99_9_us"].map(|k| l[k].as_f64().unwrap());
        assert!(times[0] > 0.0 && times.is_sorted(), "{l}");
        assert!(l["average_us"].as_f64().unwrap() >= times[0], "{l}");
    }
    let rate = report["rate"].as_array().unwrap();
    assert_eq!(rate.len(), 16 * there.len());
    assert!(rate.iter().all(|r| r["per_second"].as_f64().unwrap() > 0.0), "{report}");
    let depths: Vec<u64> = rate
        .iter()
        .filter(|r| r["operation"] == "load" && r["transport"] == "tcp")
        .map(|r| r["depth"].as_u64().unwrap())
        .collect();
    assert_eq!(depths, [1, 2, 4, 8, 16, 32, 64, 128]);
    assert_eq!(arrays(&site).len(), 1, "only what was there before");
}

#[test]
fn one_transport_as_a_table() {
    let site = Site::start(&[]);
    // The address from the environment, and one transport by argument.
    let text = site.home.ok(&["bench", "-n", "20", "--transport", "tcp"]);
    for words in ["operation", "wake-up", "fetch_add", "99.9 % us", "depth", "load/s tcp"] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    assert!(!text.contains("rdma") && !text.contains("shm"), "{text}");
    assert!(arrays(&site).is_empty());
}

#[test]
fn what_cannot_be_measured_is_an_error() {
    let site = Site::start(&[]);
    site.home.fails(&["bench", "--iterations", "3"], 2, &["--iterations"]);
    site.home.fails(
        &["bench", "--transport", "rdma", "--device", "no_such_device"],
        5,
        &["no RDMA"],
    );
    assert!(arrays(&site).is_empty());
    let addr = site.addr().to_owned();
    site.server.end(Some(Signal::KILL));
    site.home.fails(&["bench", &addr], 3, &["cannot reach the server", &addr]);
    // Nobody listens, and --addr says so too.
    let home = Home::new();
    home.write_key("config/farcell/authkey", "at least 16 bytes", 0o600);
    home.fails(&["bench", "--addr", &addr], 3, &["cannot reach the server"]);
}

#[test]
fn ctrl_c_leaves_nothing() {
    let site = Site::start(&["mine:counter:1x1"]);
    let bench = Running::start(&mut site.home.command(&["bench", "--iterations", "100000000"]));
    eventually("it has its arrays", || arrays(&site).len() == 3);
    let ended = bench.end(Some(Signal::INT));
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert!(ended.stdout.is_empty(), "{ended:?}");
    eventually("they are gone", || arrays(&site).len() == 1);
}
