//! Promise: what starts, documents and looks after the program finds what it
//! expects: a service manager is told when the server is ready and when it stops,
//! and every command has a manual page.
#![cfg(feature = "cli")]

mod program_common;
use program_common::{Home, Running, eventually, ready};
use rustix::process::Signal;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The service manager's end, and what `NOTIFY_SOCKET` is for it.
fn manager(home: &Home, hidden: bool) -> (UnixDatagram, String) {
    let (socket, name) = if hidden {
        let name = format!("farcell-test-{}", std::process::id());
        let addr = SocketAddr::from_abstract_name(&name).unwrap();
        (UnixDatagram::bind_addr(&addr).unwrap(), format!("@{name}"))
    } else {
        let path = home.path("notify");
        (UnixDatagram::bind(&path).unwrap(), path.to_str().unwrap().to_owned())
    };
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    (socket, name)
}

fn told(socket: &UnixDatagram) -> Vec<String> {
    let mut bytes = [0; 4096];
    let n = socket.recv(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes[..n]).lines().map(str::to_owned).collect()
}

#[test]
fn a_service_manager_is_told() {
    for hidden in [false, true] {
        let mut home = Home::new();
        let (socket, name) = manager(&home, hidden);
        let mut command = home.command(&["serve", "--bind", "127.0.0.1:0", "--ready-file", "addr"]);
        let server = Running::start(command.env("NOTIFY_SOCKET", &name));
        let said = told(&socket);
        assert_eq!(said[0], "READY=1", "{said:?}");
        // By then it takes clients.
        let addr = std::fs::read_to_string(home.path("addr")).unwrap().trim().to_owned();
        assert_eq!(said[1], format!("STATUS=serving at {addr}"));
        home.addr = Some(addr);
        home.ok(&["ls"]);
        program_common::signal(server.pid(), Signal::TERM);
        let said = told(&socket);
        assert_eq!(said[0], "STOPPING=1", "{said:?}");
        assert!(said[1].starts_with("STATUS=stopping"), "{said:?}");
        assert_eq!(server.end(None).code, Some(0));
    }
}

#[test]
fn a_manager_that_has_gone_keeps_nobody_from_serving() {
    let mut home = Home::new();
    let mut command = home.command(&["serve", "--json", "--bind", "127.0.0.1:0"]);
    let mut server = Running::start(command.env("NOTIFY_SOCKET", home.path("none")));
    let said = ready(&mut server);
    home.addr = Some(said["address"].as_str().unwrap().to_owned());
    home.ok(&["ls"]);
    let ended = server.end(Some(Signal::TERM));
    assert_eq!(ended.code, Some(0));
    assert!(ended.stderr.contains("NOTIFY_SOCKET"), "{ended:?}");
}

#[test]
fn every_command_has_a_manual_page() {
    let home = Home::new();
    let said = home.json(&["man", "pages", "--json"]);
    let pages: Vec<&str> =
        said["pages"].as_array().unwrap().iter().map(|page| page.as_str().unwrap()).collect();
    let help = home.ok(&["--help"]);
    let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let mut count = 0;
    for command in commands.take_while(|line| !line.is_empty()) {
        let name = command.split_whitespace().next().unwrap();
        if name == "help" {
            continue;
        }
        count += 1;
        assert!(pages.contains(&&*format!("pages/farcell-{name}.1")), "{name}: {pages:?}");
    }
    assert!(count > 15, "{help}");
    assert!(pages.contains(&"pages/farcell.1") && pages.contains(&"pages/farcell-slot-put.1"));
    for page in pages {
        let text = std::fs::read_to_string(home.path(page)).unwrap();
        let title = page.rsplit('/').next().unwrap().trim_end_matches(".1").to_uppercase();
        assert!(text.contains(&format!(".TH {title} 1")), "{page}: {text}");
        assert!(text.contains(".SH SYNOPSIS"), "{page}");
        // A command with others below it tells in one place.
        let parted = text.contains(".SH SUBCOMMANDS") || title.matches('-').count() > 1;
        assert!(text.contains("Exit codes:") || parted, "{page}");
    }
    // The same program writes the same pages.
    let first = std::fs::read(home.path("pages/farcell-serve.1")).unwrap();
    home.ok(&["man", "pages"]);
    assert_eq!(std::fs::read(home.path("pages/farcell-serve.1")).unwrap(), first);
    home.fails(&["man", "/dev/null/x"], 5, &["manual pages", "/dev/null/x"]);
    home.fails(&["man", "x", "--addr", "y"], 2, &["--addr is for clients", "man"]);
}

/// What is logged is chosen by target, and the targets are the areas that
/// docs/operations.md lists.
#[test]
fn logs_are_chosen_by_target() {
    let mut home = Home::new();
    let mut server =
        Running::start(&mut home.command(&["serve", "--json", "--bind", "127.0.0.1:0"]));
    home.addr = Some(ready(&mut server)["address"].as_str().unwrap().to_owned());
    let log = |filter: &str| {
        let ended = program_common::finish(home.command(&["ls"]).env("FARCELL_LOG", filter));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        ended.stderr
    };
    // A server's own, by the area that it belongs to.
    let mut command = home.command(&["serve", "--bind", "127.0.0.1:0", "--ready-file", "ready"]);
    let second = Running::start(command.env("FARCELL_LOG", "farcell::rdma=info"));
    eventually("it serves", || home.path("ready").exists());
    let log_of_server = second.end(Some(Signal::TERM)).stderr;
    let has_adapter = std::fs::read_dir("/sys/class/infiniband").is_ok_and(|d| d.count() > 0);
    assert!(has_adapter || log_of_server.contains("INFO farcell::rdma: no RDMA here"));
    assert!(!log_of_server.contains("farcell::server"), "{log_of_server}");
    let connected = log("farcell::client=info");
    assert!(connected.contains("farcell::client: connected"), "{connected}");
    assert_eq!(log("farcell::rdma=debug,error"), "");
    assert!(log("farcell::shm=trace,info").contains("connected"));
    assert_eq!(log("off"), "");
    home.run(&["ls"]);
    let mut command = home.command(&["ls"]);
    let ended = program_common::finish(command.env("FARCELL_LOG", "farcell=loud"));
    ended.failed(2, &["FARCELL_LOG", "loud", "is no filter"]);
    eventually("the server is alone", || home.json(&["ls", "--json"])["server"]["sessions"] == 1);
}
