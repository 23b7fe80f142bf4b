//! Promise: locks, barriers and semaphores are made and listed like any array,
//! and `members` says who is here and what they hold.
#![cfg(feature = "cli")]

mod program_common;
use farcell::Client;
use program_common::Site;
use serde_json::json;
use std::time::Duration;

fn client(site: &Site) -> Client {
    let addr = site.home.addr.clone().unwrap();
    Client::builder().addr(addr).key_file(site.home.key_file()).connect().unwrap()
}

#[test]
fn arrays_of_every_kind_are_made_and_listed() {
    let site = Site::start(&["l:lock:2x3", "b:barrier:1x1:4", "s:semaphore:1x2:1/3"]);
    let home = &site.home;
    assert_eq!(
        home.ok(&["ls"]),
        "NAME  KIND                      ROWS  COLS\n\
         b     barrier of 4 parties         1     1\n\
         l     lock                         2     3\n\
         s     semaphore of 1/3 permits     1     2\n"
    );
    assert_eq!(
        home.json(&["ls", "--json"])["arrays"],
        json!([
            {"name": "b", "kind": "barrier", "rows": 1, "cols": 1, "parties": 4},
            {"name": "l", "kind": "lock", "rows": 2, "cols": 3},
            {"name": "s", "kind": "semaphore", "rows": 1, "cols": 2, "permits": 1, "bound": 3},
        ])
    );
    home.ok(&["create", "l:lock:2x3", "b:barrier:1x1:4", "s:semaphore:1x2:1/3"]);
    assert_eq!(
        home.json(&["create", "gpus:semaphore:1x1:8", "--json"]),
        json!({"name": "gpus", "kind": "semaphore", "rows": 1, "cols": 1})
    );
    let client = client(&site);
    assert_eq!(client.open_barriers("b").unwrap().at(0, 0).unwrap().parties(), 4);
    let semaphore = client.open_semaphores("s").unwrap().at(0, 1).unwrap();
    assert_eq!((semaphore.available().unwrap(), semaphore.bound()), (1, 3));
    let other = home.run(&["create", "b:barrier:1x1:5"]);
    assert_eq!(other.code, Some(4));
    assert!(other.stderr.contains("exists as barrier 1 x 1 for 4 parties"), "{}", other.stderr);
    for (bad, why) in [
        ("x:barrier:1x1", "the number of parties is missing"),
        ("x:barrier:1x1:0", "no number of parties"),
        ("x:semaphore:1x1", "the permits are missing"),
        ("x:semaphore:1x1:3/2", "are no permits"),
        ("x:lock:1x1:3", "means nothing for a lock"),
    ] {
        let ended = home.run(&["create", bad]);
        assert_eq!(ended.code, Some(2), "{bad}");
        assert!(ended.stderr.contains(why), "{bad}: {}", ended.stderr);
    }
    for command in [&["get", "l"][..], &["watch", "l", "--once"], &["set", "l", "0", "0"]] {
        let ended = home.run(command);
        assert_eq!(ended.code, Some(4), "{command:?}: {}", ended.stderr);
        assert!(ended.stderr.contains("lock"), "{}", ended.stderr);
    }
}

#[test]
fn members_are_listed_with_what_they_hold() {
    let site = Site::start(&["l:lock:2x3", "go:event:1x1"]);
    let client = client(&site);
    client.join("rank 3").unwrap();
    let guard = client.open_locks("l").unwrap().at(1, 2).unwrap().lock().unwrap();
    let go = client.open_events("go").unwrap().at(0, 0).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| assert!(go.wait_timeout(Duration::from_secs(60)).unwrap()));
        while client.info().unwrap().parked_waits == 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        let text = site.home.ok(&["members"]);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["NAME", "SEAT", "WAY", "AGE", "HEARD", "HOLDS"]);
        assert_eq!(lines[1][..4], ["rank", "3", "1", "shm"]);
        assert_eq!(lines[1][6..].join(" "), "lock l 1 2 #1, wait go 0 0");
        assert_eq!(lines[2][..3], ["-", "2", "shm"], "the command itself");
        let all = site.home.json(&["members", "--json"]);
        let first = &all["members"][0];
        assert_eq!((&first["name"], &first["seat"]), (&json!("rank 3"), &json!(1)));
        assert_eq!((&first["transport"], &first["read_only"]), (&json!("shm"), &json!(false)));
        let lock = json!({"what": "lock", "name": "l", "row": 1, "col": 2, "token": 1});
        let wait = json!({"what": "wait", "name": "go", "row": 0, "col": 0, "token": null});
        assert_eq!(first["holds"], json!([lock, wait]));
        assert_eq!(first["holds_in_all"], json!(2));
        go.set().unwrap();
    });
    guard.unlock().unwrap();
}
