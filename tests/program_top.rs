//! Promise: `farcell top` draws who waits for whom, names a deadlock of real
//! processes, gives the terminal back, and outlives its server.
#![cfg(feature = "cli")]

mod common;
mod program_common;
use common::another::{Another, Speaker, role};
use farcell::{Client, TransportChoice};
use program_common::{Running, Site, eventually};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, Read, Write};
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

/// A process that takes one lock, and is told to take another one.
#[test]
fn takes_two_locks() {
    let Ok(what) = std::env::var("FARCELL_TEST_LOCKS") else {
        return;
    };
    let [addr, key, own, other] = what.split('|').collect::<Vec<_>>()[..] else { panic!("{what}") };
    let builder = Client::builder().addr(addr).key_file(key).transport(TransportChoice::Tcp);
    let client = builder.connect().unwrap();
    client.join(&format!("rank {own}")).unwrap();
    let gates = client.locks("gate", 1, 2).unwrap();
    let gate = |at: &str| gates.at(0, at.parse().unwrap()).unwrap();
    let mine = gate(own);
    let _guard = mine.lock().unwrap();
    println!("has");
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    let theirs = gate(other);
    let _both = theirs.lock();
    println!("has both");
}

/// Two processes, each of which has the lock that the other wants.
fn deadlock(site: &Site) -> [Speaker; 2] {
    let key = site.home.key_file();
    let mut both = [("0", "1"), ("1", "0")].map(|(own, other)| {
        let what = format!("{}|{}|{own}|{other}", site.addr(), key.display());
        let mut command = role("takes_two_locks", "FARCELL_TEST_LOCKS", what);
        let mut speaker = Speaker::start(command.stdin(Stdio::piped()));
        speaker.says("has");
        speaker
    });
    for speaker in &mut both {
        let Another(child) = &mut speaker.process;
        child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }
    both
}

const NAMED: &str = "rank 0 waits for lock gate 0 1, held by rank 1; \
                     rank 1 waits for lock gate 0 0, held by rank 0";

fn some(n: u16) -> NonZero<u16> {
    NonZero::new(n).unwrap()
}

/// A terminal, and what is on it.
struct Tty {
    master: OwnedFd,
    screen: Arc<Mutex<vt100::Parser>>,
    raw: Arc<Mutex<Vec<u8>>>,
    slave: File,
}

impl Tty {
    fn open(rows: u16, cols: u16) -> Tty {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let screen = Arc::new(Mutex::new(vt100::Parser::new(some(rows), some(cols), 0)));
        let raw = Arc::new(Mutex::new(Vec::new()));
        let mut reader = File::from(master.try_clone().unwrap());
        let shared = (screen.clone(), raw.clone());
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // The other end gone is an error here.
            while let Ok(n @ 1..) = reader.read(&mut bytes) {
                shared.0.lock().unwrap().process(&bytes[..n]);
                shared.1.lock().unwrap().extend_from_slice(&bytes[..n]);
            }
        });
        let tty = Tty { master, screen, raw, slave };
        tty.resize(rows, cols);
        tty
    }

    fn resize(&self, rows: u16, cols: u16) {
        let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.slave, size).unwrap();
        self.screen.lock().unwrap().screen_mut().set_size(some(rows), some(cols));
    }

    fn press(&self, keys: &[u8]) {
        rustix::io::write(&self.master, keys).unwrap();
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    fn shows(&self, what: &str) {
        eventually(&format!("{what:?} is on the screen"), || self.text().contains(what));
    }

    fn top(&self, site: &Site, args: &[&str]) -> Running {
        let args = [&["top", "--interval", "0.05"], args].concat();
        let end = || Stdio::from(self.slave.try_clone().unwrap());
        let mut command = site.home.command(&args);
        command.stdin(end()).stdout(end()).stderr(Stdio::piped()).env("TERM", "xterm");
        Running(Some(command.spawn().unwrap()))
    }

    /// Whether it is as it was before the program had it.
    fn is_back(&self, before: &rustix::termios::Termios) {
        let after = tcgetattr(&self.slave).unwrap();
        assert_eq!(after.local_modes, before.local_modes);
        assert_eq!(after.input_modes, before.input_modes);
        let raw = || String::from_utf8_lossy(&self.raw.lock().unwrap()).into_owned();
        eventually("the screen is left", || raw().contains("\x1b[?1049l"));
        eventually("the cursor is back", || {
            let raw = raw();
            raw.rfind("\x1b[?25h") > raw.rfind("\x1b[?25l")
        });
    }
}

#[test]
fn a_deadlock_of_two_processes_is_named() {
    let site = Site::start(&["gate:lock:1x2", "go:event:2x3"]);
    assert_eq!(site.home.run(&["top", "--once"]).code, Some(0), "nobody waits yet");
    let mut both = deadlock(&site);
    site.parked(2);

    let tty = Tty::open(40, 160);
    let before = tcgetattr(&tty.slave).unwrap();
    let top = tty.top(&site, &[]);
    tty.shows(&format!("DEADLOCK: {NAMED}"));
    tty.shows("gate  lock 1 x 2");
    tty.shows("go  event 2 x 3");
    tty.shows("lock gate 0 0");

    // Another array, seen as it changes.
    tty.press(b"\x1b[B");
    tty.shows("0 . . .");
    site.home.ok(&["set", "go", "1", "2"]);
    tty.shows("1 . . #");
    // Smaller, and larger again.
    tty.resize(20, 90);
    program_common::signal(top.pid(), Signal::WINCH);
    tty.shows("DEADLOCK: rank 0 waits for lock gate 0 1");
    tty.resize(40, 160);
    program_common::signal(top.pid(), Signal::WINCH);
    tty.shows("who waits for whom (1)");

    // Scripts are told, too.
    let told = site.home.run(&["top", "--json"]);
    assert_eq!(told.code, Some(1), "{told:?}");
    let told: serde_json::Value = serde_json::from_str(&told.stdout).unwrap();
    assert_eq!(told["deadlocks"][0]["text"], NAMED);
    assert_eq!(told["deadlocks"][0]["sure"], true);
    let once = site.home.run(&["top", "--once"]);
    assert_eq!(once.code, Some(1), "{once:?}");
    assert!(once.stdout.contains(&format!("DEADLOCK: {NAMED}\n")), "{once:?}");

    // One of them goes: so does the deadlock.
    both[0].process.kill();
    both[1].says("has both");
    eventually("it is gone", || !tty.text().contains("DEADLOCK"));

    tty.press(b"q");
    let ended = top.end(None);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    tty.is_back(&before);
}

#[test]
fn a_server_that_goes_is_waited_for_and_ctrl_c_ends_it() {
    let site = Site::start(&["e:event:1x2"]);
    let tty = Tty::open(30, 120);
    let before = tcgetattr(&tty.slave).unwrap();
    let top = tty.top(&site, &["--transport", "tcp"]);
    tty.shows("0 . .");
    let home = site.home;
    site.server.end(Some(Signal::TERM));
    tty.shows("reconnecting");
    let addr = home.addr.clone().unwrap();
    let site = Site::start_in(home, &addr, &["e:event:1x2"]);
    site.home.ok(&["set", "e", "0", "1"]);
    tty.shows("0 . #");
    eventually("all is well", || !tty.text().contains("reconnecting"));
    tty.press(b"\x03");
    let ended = top.end(None);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    tty.is_back(&before);
}

#[test]
fn sigterm_gives_the_terminal_back_and_no_terminal_is_an_error() {
    let site = Site::start(&["e:event:1x2"]);
    let tty = Tty::open(30, 120);
    let before = tcgetattr(&tty.slave).unwrap();
    let top = tty.top(&site, &[]);
    tty.shows("0 . .");
    assert_eq!(top.end(Some(Signal::TERM)).code, Some(0));
    tty.is_back(&before);
    site.home.fails(&["top"], 2, &["--once or --json"]);
    let addr = site.addr().to_owned();
    assert_eq!(site.home.run(&["top", &addr, "--once"]).code, Some(0));
    site.home.fails(&["top", "127.0.0.1:1", "--once"], 3, &["cannot reach the server"]);
}
