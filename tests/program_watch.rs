//! Promise: `farcell watch` follows an array, in a terminal and in a file, and
//! a server that is restarted does not end it.
#![cfg(feature = "cli")]

mod program_common;
use program_common::{Running, Site, eventually};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, Read};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

#[test]
fn each_change_is_a_line() {
    let site = Site::start(&["e:event:2x2", "n:counter:1x3"]);
    site.home.ok(&["set", "e", "1", "0"]);
    let args = ["watch", "e", "--interval", "0.02"];
    let mut watch = Running::start(&mut site.home.command(&args));
    let mut lines = watch.stdout().lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap(), "1 0 set 1");
    site.home.ok(&["set", "e", "0", "1"]);
    assert_eq!(lines.next().unwrap(), "0 1 set 1");
    site.home.ok(&["clear", "e", "1", "0"]);
    assert_eq!(lines.next().unwrap(), "1 0 clear 2");

    let args = ["watch", "n", "--json", "--interval", "0.02"];
    let mut numbers = Running::start(&mut site.home.command(&args));
    site.home.ok(&["add", "n", "0", "2", "-5"]);
    let line = numbers.stdout().lines().next().unwrap().unwrap();
    let seen: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert_eq!(
        seen,
        json!({"name": "n", "kind": "counter", "row": 0, "col": 2, "value": -5, "waiters": 0})
    );
    assert_eq!(
        site.home.json(&["watch", "e", "--once", "--json"]),
        json!({"name": "e", "kind": "event", "row": 0, "col": 1, "set": true, "transitions": 1,
            "waiters": 0}),
    );
    for watch in [watch, numbers] {
        assert_eq!(watch.end(Some(Signal::INT)).code, Some(0));
    }
    assert_eq!(site.home.ok(&["watch", "e", "--count", "3", "--interval", "0"]), "0 1 set 1\n");
}

#[test]
fn a_restarted_server_is_found_again() {
    let site = Site::start(&["e:event:1x2"]);
    // In memory it may miss a short absence.
    let args = ["watch", "e", "--interval", "0.02", "--transport", "tcp"];
    let mut watch = Running::start(&mut site.home.command(&args));
    let mut lines = watch.stdout().lines().map(Result::unwrap);
    site.home.ok(&["set", "e", "0", "0"]);
    assert_eq!(lines.next().unwrap(), "0 0 set 1");
    let site = site.restart();
    assert_eq!(lines.next().unwrap(), "0 0 clear 0", "the new server knows nothing");
    site.home.ok(&["set", "e", "0", "1"]);
    assert_eq!(lines.next().unwrap(), "0 1 set 1");
    let ended = watch.end(Some(Signal::TERM));
    assert_eq!(ended.code, Some(0));
    assert!(ended.stderr.contains("watch e: reconnecting"), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "said once: {ended:?}");
}

#[test]
fn patience_can_end() {
    let site = Site::start(&["e:event:1x2"]);
    let args = ["watch", "e", "--interval", "0.02", "--reconnect", "0.1"];
    let mut watch = Running::start(&mut site.home.command(&args));
    site.home.ok(&["set", "e", "0", "0"]);
    assert_eq!(watch.stdout().lines().next().unwrap().unwrap(), "0 0 set 1");
    site.server.end(Some(Signal::KILL));
    let ended = watch.end(None);
    assert_eq!(ended.code, Some(3), "{ended:?}");
    assert!(ended.stderr.contains("cannot reach the server"), "{ended:?}");
    site.home.fails(&["watch", "e"], 3, &["cannot reach the server"]);
}

/// What the program writes to a terminal.
struct Terminal {
    seen: Arc<Mutex<String>>,
    reader: std::thread::JoinHandle<()>,
}

impl Terminal {
    /// A terminal, and the end of it for the program.
    fn open() -> (Terminal, File) {
        let master: OwnedFd = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let seen = Arc::new(Mutex::new(String::new()));
        let shared = seen.clone();
        let reader = std::thread::spawn(move || {
            let mut master = File::from(master);
            let mut bytes = [0; 4096];
            // The other end gone is an error here.
            while let Ok(n @ 1..) = master.read(&mut bytes) {
                shared.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..n]));
            }
        });
        (Terminal { seen, reader }, slave)
    }

    fn shows(&self, what: &str) {
        eventually(&format!("{what:?} is on the screen"), || self.text().contains(what));
    }

    /// What was written since the last frame began, without colours.
    fn text(&self) -> String {
        let seen = self.seen.lock().unwrap();
        plain(seen.rsplit("\x1b[1;1H").next().unwrap())
    }

    fn end(self) -> String {
        self.reader.join().unwrap();
        Arc::into_inner(self.seen).unwrap().into_inner().unwrap()
    }
}

/// Without escape sequences; each that moves the cursor begins a line.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("\x1b[") {
        plain.push_str(before);
        let end = after.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(after.len() - 1);
        if after[end..].starts_with('H') {
            plain.push('\n');
        }
        rest = &after[end + 1..];
    }
    plain + rest
}

#[test]
fn a_terminal_shows_a_grid_and_is_given_back() {
    let site = Site::start(&["e:event:2x2"]);
    let (terminal, slave) = Terminal::open();
    let child = site
        .home
        .command(&["watch", "e", "--interval", "0.02"])
        .stdout(slave)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let watch = Running(Some(child));
    terminal.shows("\n0 . .\n1 . .\n");
    site.home.ok(&["set", "e", "1", "0"]);
    terminal.shows("\n0 . .\n1 # .\n");
    let wait = Running::start(&mut site.home.command(&["wait", "e", "0", "1"]));
    terminal.shows("\n0 .   .*1\n1 #   .  \n");
    site.home.ok(&["set", "e", "0", "1"]);
    assert_eq!(wait.end(None).code, Some(0));
    terminal.shows("\n0 . #\n1 # .\n");
    terminal.shows(&format!("e  event 2 x 2  at {}", site.addr()));
    let home = site.home;
    site.server.end(Some(Signal::TERM));
    terminal.shows("reconnecting");
    terminal.shows("\n0 . #\n1 # .\n");
    let addr = home.addr.clone().unwrap();
    let _site = Site::start_in(home, &addr, &["e:event:2x2"]);
    terminal.shows("\n0 . .\n1 . .\n");

    let ended = watch.end(Some(Signal::INT));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    let all = terminal.end();
    let (entered, left) = (all.find("\x1b[?1049h").unwrap(), all.find("\x1b[?1049l").unwrap());
    let (hidden, shown) = (all.find("\x1b[?25l").unwrap(), all.rfind("\x1b[?25h").unwrap());
    assert!(entered < left && hidden < shown, "the screen and the cursor are back");
    let stays = plain(&all[left..]);
    assert!(stays.contains("0 . .\r\n1 . .\r\n"), "what was seen last stays: {stays:?}");
}

#[test]
fn one_look_needs_no_screen() {
    let site = Site::start(&["n:counter:1x2"]);
    site.home.ok(&["set", "n", "0", "1", "-12"]);
    let (terminal, slave) = Terminal::open();
    let mut command = site.home.command(&["watch", "n", "--once"]);
    let child = command.stdout(slave).stderr(Stdio::piped()).spawn().unwrap();
    drop(command);
    assert_eq!(Running(Some(child)).end(None).code, Some(0));
    let all = terminal.end();
    assert!(!all.contains("\x1b[?1049h"));
    assert!(plain(&all).contains("0   0 -12\r\n"), "{all:?}");
}
