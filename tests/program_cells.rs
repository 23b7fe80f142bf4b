//! Promise: a script can do with cells whatever a program can, and sees by the
//! exit code how it went.
#![cfg(feature = "cli")]

mod program_common;
use program_common::{Home, Running, Site, finish};
use serde_json::{Value, json};
use std::process::Stdio;

#[test]
fn events() {
    let site = Site::start(&["e:event:3x4"]);
    let home = &site.home;
    let clear = home.run(&["get", "e", "0", "1"]);
    assert_eq!((clear.code, clear.stdout.as_str()), (Some(1), "clear\n"));
    assert_eq!(clear.stderr, "", "no is no failure");
    assert_eq!(home.ok(&["set", "e", "0", "1"]), "");
    assert_eq!(home.ok(&["set", "e", "0", "1"]), "", "set already is no failure");
    assert_eq!(home.ok(&["get", "e", "0", "1"]), "set\n");
    home.ok(&["set", "e", "2"]);
    assert_eq!(home.ok(&["get", "e"]), "0 1 0 0\n0 0 0 0\n1 1 1 1\n");
    assert_eq!(home.ok(&["get", "e", ":", "1"]), "1\n0\n1\n");
    assert_eq!(home.ok(&["get", "e", "2", ":"]), "1 1 1 1\n");
    assert_eq!(home.ok(&["get", "e", ":", ":"]), home.ok(&["get", "e"]));
    assert_eq!(home.ok(&["take", "e", "0", "1"]), "taken\n");
    let nothing = home.run(&["take", "e", "0", "1"]);
    assert_eq!((nothing.code, nothing.stdout.as_str()), (Some(1), "clear\n"));
    home.ok(&["clear", "e", ":", "3"]);
    assert_eq!(home.ok(&["get", "e", "2"]), "1 1 1 0\n");
    assert_eq!(home.ok(&["get", "e", "0", "1", "--transitions"]), "2\n");
    assert_eq!(home.ok(&["get", "e", "--transitions"]), "0 2 0 0\n0 0 0 0\n1 1 1 2\n");
}

#[test]
fn counters() {
    let site = Site::start(&["n:counter:2x3"]);
    let home = &site.home;
    assert_eq!(home.ok(&["add", "n", "1", "2", "-7"]), "-7\n");
    assert_eq!(home.ok(&["add", "n", "1", "2", "3"]), "-4\n");
    assert_eq!(home.ok(&["cas", "n", "1", "2", "-4", "9"]), "-4\n");
    let other = home.run(&["cas", "n", "1", "2", "-4", "10"]);
    assert_eq!((other.code, other.stdout.as_str()), (Some(1), "9\n"));
    assert_eq!(home.ok(&["get", "n", "1", "2"]), "9\n");
    assert_eq!(home.ok(&["set", "n", "0", ":", "-1"]), "");
    assert_eq!(home.ok(&["get", "n"]), "-1 -1 -1\n 0  0  9\n");
    home.ok(&["set", "n", ":", ":", "5"]);
    assert_eq!(home.ok(&["get", "n"]), "5 5 5\n5 5 5\n");
    let least = (-(1_i64 << 62)).to_string();
    home.ok(&["set", "n", "0", "0", &least]);
    assert_eq!(home.ok(&["add", "n", "0", "0", "-1"]), format!("{}\n", (1_i64 << 62) - 1));
}

#[test]
fn waits() {
    let site = Site::start(&["e:event:2x2", "n:counter:1x2"]);
    let home = &site.home;
    let over = home.run(&["wait", "e", "0", "1", "--timeout", "0.05"]);
    assert_eq!((over.code, over.stdout.as_str(), over.stderr.as_str()), (Some(1), "", ""));
    let looked = home.run(&["wait", "e", "0", "1", "--timeout", "0"]);
    assert_eq!(looked.code, Some(1));

    let waits = [
        &["wait", "e", "0", "1"][..],
        &["wait", "e", ":", "1", "--any"],
        &["wait", "e", "0", ":", "--count", "1", "--timeout", "60"],
        &["wait", "e", "0", "1", "--after", "0"],
        &["wait", "e", "0", "--all"],
    ];
    let waits = waits.map(|args| Running::start(&mut home.command(args)));
    site.parked(5);
    home.ok(&["set", "e", "0", "1"]);
    home.ok(&["clear", "e", "0", "1"]);
    let [one, any, count, after, mut all] = waits;
    for (wait, printed) in [(one, "1\n"), (any, "0 1 1\n"), (count, "0 1 1\n"), (after, "1\n")] {
        let ended = wait.end(None);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(0), printed), "{ended:?}");
    }
    assert!(all.is_running());
    home.ok(&["set", "e", "0", "0"]);
    let mut lines: Vec<String> = all.end(None).stdout.lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["0 0 1", "0 1 1"], "they need not be set at one instant");

    // What was so when the time was over is told.
    home.ok(&["set", "e", "1", "1"]);
    let some = home.run(&["wait", "e", "1", "--timeout", "0"]);
    assert_eq!((some.code, some.stdout.as_str()), (Some(1), "1 1 1\n"));
    let seen = home.ok(&["get", "e", "1", "1", "--transitions"]);
    let next = home.run(&["wait", "e", "1", "1", "--after", seen.trim(), "--timeout", "0"]);
    assert_eq!(next.code, Some(1));

    let until = Running::start(&mut home.command(&["wait", "n", "0", "1", "--until", "le:-5"]));
    site.parked(1);
    home.ok(&["add", "n", "0", "1", "-4"]);
    home.ok(&["add", "n", "0", "1", "-4"]);
    assert_eq!(until.end(None).stdout, "-8\n");
    for (op, code) in [("ne", 1), ("eq", 0), ("gt", 1), ("ge", 0), ("lt", 1), ("le", 0)] {
        let ended =
            home.run(&["wait", "n", "0", "1", "--timeout=0", "--until", &format!("{op}:-8")]);
        assert_eq!(ended.code, Some(code), "{op}");
    }
    site.parked(0);
}

#[test]
fn arrays() {
    let site = Site::start(&[]);
    let home = &site.home;
    assert_eq!(home.ok(&["ls"]), "no arrays\n");
    home.ok(&["create", "a/b@1:event:2x3", "n:counter:1x10"]);
    home.ok(&["create", "a/b@1:event:2x3"]);
    assert_eq!(
        home.ok(&["ls"]),
        "NAME   KIND     ROWS  COLS\na/b@1  event       2     3\nn      counter     1    10\n"
    );
    home.fails(&["create", "n:event:1x10"], 4, &["n", "counter 1 x 10", "event 1 x 10"]);
    let long = home.ok(&["ls", "--long"]);
    assert!(long.contains("of 262144 free") && long.contains(site.addr()), "{long}");
    home.ok(&["rm", "n"]);
    home.fails(&["rm", "n"], 4, &["no array \"n\""]);
    home.fails(&["get", "n", "0", "0"], 4, &["no array \"n\""]);
}

#[test]
fn json_has_the_names_that_the_help_promises() {
    let site = Site::start(&["e:event:1x2", "n:counter:1x1"]);
    let home = &site.home;
    let run = |args: &[&str]| -> Value {
        let ended = home.run(&[args, &["--json"]].concat());
        serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"))
    };
    assert_eq!(
        run(&["set", "e", "0", "1"]),
        json!({"name": "e", "kind": "event", "row": 0, "col": 1, "cells": 1, "changed": 1})
    );
    assert_eq!(
        run(&["get", "e", "0", "1"]),
        json!({"name": "e", "kind": "event", "row": 0, "col": 1, "set": true, "transitions": 1})
    );
    assert_eq!(
        run(&["get", "e"]),
        json!({"name": "e", "kind": "event", "row": null, "col": null, "cells": [[false, true]]})
    );
    assert_eq!(
        run(&["wait", "e", "--any"]),
        json!({"name": "e", "kind": "event", "satisfied": true, "need": 1,
            "cells": [{"row": 0, "col": 1, "transitions": 1}]})
    );
    assert_eq!(
        run(&["wait", "e", "0", "0", "--timeout", "0"]),
        json!({"name": "e", "kind": "event", "satisfied": false, "need": 1, "cells": []})
    );
    assert_eq!(
        run(&["take", "e", "0", "1"]),
        json!({"name": "e", "row": 0, "col": 1, "taken": true})
    );
    assert_eq!(run(&["take", "e", "0", "1"])["taken"], false);
    assert_eq!(
        run(&["clear", "e"]),
        json!({"name": "e", "kind": "event", "row": null, "col": null, "cells": 2, "changed": 0})
    );
    assert_eq!(
        run(&["add", "n", "0", "0", "4"]),
        json!({"name": "n", "row": 0, "col": 0, "old": 0, "new": 4})
    );
    assert_eq!(
        run(&["cas", "n", "0", "0", "5", "6"]),
        json!({"name": "n", "row": 0, "col": 0, "swapped": false, "found": 4})
    );
    assert_eq!(
        run(&["get", "n", "0", "0"]),
        json!({"name": "n", "kind": "counter", "row": 0, "col": 0, "value": 4})
    );
    assert_eq!(
        run(&["wait", "n", "0", "0", "--until", "eq:4"])["cells"],
        json!([{"row": 0, "col": 0, "value": 4}])
    );
    assert_eq!(
        run(&["set", "n", "0", "0", "1"]),
        json!({"name": "n", "kind": "counter", "row": 0, "col": 0, "cells": 1, "value": 1})
    );
    assert_eq!(
        run(&["create", "c:counter:1x1"]),
        json!({"name": "c", "kind": "counter", "rows": 1, "cols": 1})
    );
    assert_eq!(run(&["rm", "c"]), json!({"name": "c", "removed": true}));
    let ls = run(&["ls"]);
    assert_eq!(ls["arrays"][0], json!({"name": "e", "kind": "event", "rows": 1, "cols": 2}));
    let server = ls["server"].as_object().unwrap();
    let names: Vec<&str> = server.keys().map(String::as_str).collect();
    let mut promised = [
        "addr",
        "capacity",
        "free",
        "largest_free",
        "sessions",
        "parked_waits",
        "domain",
        "read_only",
        "lease_s",
    ];
    promised.sort_unstable();
    assert_eq!(names, promised);
}

#[test]
fn nobody_reads_the_output() {
    let site = Site::start(&["e:event:1x1"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    for args in [&["ls"][..], &["ls", "--json"], &["--help"], &["completions", "bash"]] {
        let mut command = site.home.command(args);
        let child = command.stdout(writer.try_clone().unwrap()).stderr(Stdio::piped()).spawn();
        let ended = child.unwrap().wait_with_output().unwrap();
        assert_eq!(ended.status.code(), Some(0), "{args:?}");
        assert_eq!(String::from_utf8_lossy(&ended.stderr), "", "{args:?}");
    }
    // The answer of a command does not depend on who reads it.
    let child = site.home.command(&["take", "e", "0", "0"]).stdout(writer).spawn();
    assert_eq!(child.unwrap().wait().unwrap().code(), Some(1));

    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = site.home.command(&["ls"]);
    let ended = command.stdout(full()).stderr(Stdio::piped()).spawn().unwrap();
    let ended = program_common::end_of(ended);
    ended.failed(5, &["stdout", "no space left"]);
    // Not even the failure can be told; the exit code still can.
    let child = site.home.command(&["get", "none"]).stderr(full()).spawn();
    assert_eq!(child.unwrap().wait().unwrap().code(), Some(4));
}

#[test]
fn help_and_completions() {
    let home = Home::new();
    for command in [
        "serve",
        "ls",
        "create",
        "rm",
        "get",
        "set",
        "clear",
        "take",
        "wait",
        "add",
        "cas",
        "watch",
        "demo",
        "completions",
    ] {
        let help = home.ok(&[command, "--help"]);
        assert!(help.contains("Example"), "{command} has an example");
        assert!(help.contains("Exit codes:"), "{command} has its exit codes");
        assert!(!help.contains("break-protocol"));
    }
    assert!(home.ok(&["--version"]).starts_with("farcell 0."));
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = home.ok(&["completions", shell]);
        assert!(script.contains("watch") && !script.contains("__demo-learner"), "{shell}");
    }
    let nothing = finish(&mut home.command::<&str>(&[]));
    assert_eq!(nothing.code, Some(2));
    assert!(nothing.stderr.contains("Usage: farcell"));
}
