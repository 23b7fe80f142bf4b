//! Promise: a server says where it is, keeps its key to its user, and ends in
//! good order.
#![cfg(feature = "cli")]

mod program_common;
use farcell::Client;
use program_common::{Home, Running, Site, eventually, finish, ready};
use rustix::process::Signal;
use std::io::{BufRead, Read};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

#[test]
fn the_key_is_made_once_and_for_its_owner_alone() {
    let site = Site::start(&[]);
    let path = site.home.key_file();
    assert_eq!(site.ready["authkey_is_new"], true);
    assert_eq!(site.ready["authkey_file"], path.to_str().unwrap());
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    site.home.ok(&["ls"]);
    let site = site.restart();
    assert_eq!(site.ready["authkey_is_new"], false);
    site.home.ok(&["ls"]);
}

#[test]
fn it_tells_a_person_what_there_is_to_know() {
    let home = Home::new();
    let mut server =
        Running::start(&mut home.command(&["serve", "--rdma", "off", "--bind", "127.0.0.1:0"]));
    let mut lines = server.stdout().lines().map(Result::unwrap);
    let first = lines.next().unwrap();
    let addr = first.strip_prefix("listening on ").unwrap();
    assert!(!addr.ends_with(":0"), "the real port: {addr}");
    let key = lines.next().unwrap();
    assert_eq!(key, format!("key file {} (new, made just now)", home.key_file().display()));
    assert_eq!(lines.next().unwrap(), format!("clients use --addr {addr} or FARCELL_ADDR={addr}"));
    home.ok(&["--addr", addr, "ls"]);
    assert_eq!(server.end(Some(Signal::INT)).code, Some(0));
}

#[test]
fn clients_are_told_that_the_server_goes_away() {
    for with in [Signal::TERM, Signal::INT] {
        let site = Site::start(&["e:event:1x1"]);
        let wait = Running::start(&mut site.home.command(&["wait", "e", "0", "0"]));
        site.parked(1);
        let ended = site.server.end(Some(with));
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
        wait.end(None).failed(3, &["server going away", site.home.addr.as_deref().unwrap()]);
    }
}

#[test]
fn several_addresses() {
    let home = Home::new();
    let args = ["serve", "--json", "--bind", "127.0.0.1:0", "--bind", "127.0.0.2:0"];
    let mut server = Running::start(&mut home.command(&args));
    let ready = ready(&mut server);
    let listening = ready["listening"].as_array().unwrap();
    assert_eq!(listening.len(), 2);
    for addr in listening {
        home.ok(&["--addr", addr.as_str().unwrap(), "ls"]);
    }
}

#[test]
fn an_address_in_use_is_named() {
    let site = Site::start(&[]);
    let addr = site.addr();
    site.home.fails(&["serve", "--bind", addr], 5, &["address in use", addr]);
}

#[test]
fn the_ready_file_is_there_when_the_server_is_and_no_longer() {
    let home = Home::new();
    let path = home.path("addr");
    // Of an earlier server, say.
    std::fs::write(&path, "nowhere:1\n").unwrap();
    let args = ["serve", "--json", "--bind", "127.0.0.1:0", "--ready-file", "addr"];
    let mut server = Running::start(&mut home.command(&args));
    let ready = ready(&mut server);
    let content = std::fs::read_to_string(&path).unwrap();
    assert_eq!(content, format!("{}\n", ready["address"].as_str().unwrap()));
    home.ok(&["--addr", content.trim(), "ls"]);
    assert_eq!(server.end(Some(Signal::TERM)).code, Some(0));
    assert!(!path.exists());
    assert_eq!(std::fs::read_dir(home.dir.path()).unwrap().count(), 1, "the key's folder alone");
}

#[test]
fn the_ready_file_of_another_server_is_left_alone() {
    let home = Home::new();
    let args = ["serve", "--json", "--bind", "127.0.0.1:0", "--ready-file", "addr"];
    let mut server = Running::start(&mut home.command(&args));
    ready(&mut server);
    std::fs::write(home.path("addr"), "elsewhere:1\n").unwrap();
    server.end(Some(Signal::TERM));
    assert_eq!(std::fs::read_to_string(home.path("addr")).unwrap(), "elsewhere:1\n");
}

#[test]
fn the_ready_descriptor_is_written_and_closed() {
    let home = Home::new();
    // The shell makes 3 of its stdout, which we read to the end while the
    // server lives.
    let script = "exec \"$0\" serve --bind 127.0.0.1:0 --ready-fd 3 3>&1 >/dev/null";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_farcell")]);
    home.settle(&mut shell);
    let mut server = Running::start(&mut shell);
    let mut content = String::new();
    server.stdout().read_to_string(&mut content).unwrap();
    assert!(server.is_running());
    home.ok(&["--addr", content.trim(), "ls"]);
    assert!(content.ends_with('\n'));
    assert_eq!(server.end(Some(Signal::TERM)).code, Some(0));
}

#[test]
fn a_bad_ready_descriptor_is_an_error() {
    let home = Home::new();
    let args = |fd| ["serve", "--bind", "127.0.0.1:0", "--ready-fd", fd];
    home.fails(&args("9"), 5, &["--ready-fd 9", "not open"]);
    home.fails(&args("1"), 2, &["--ready-fd 1", "3 or more"]);
    home.fails(&args("x"), 2, &["--ready-fd", "x"]);
    let unread = "exec 4<&-; exec \"$0\" serve --bind 127.0.0.1:0 --ready-fd 3 3>/dev/full";
    let mut shell = Command::new("sh");
    shell.args(["-c", unread, env!("CARGO_BIN_EXE_farcell")]);
    home.settle(&mut shell);
    finish(&mut shell).failed(5, &["file descriptor 3", "no space left"]);
}

#[test]
fn a_read_only_key_reads_and_waits_only() {
    let home = Home::new();
    let key = home.write_key("reader", "the key of the readers", 0o600);
    let args = ["serve", "--json", "--bind", "127.0.0.1:0", "--array", "e:event:1x1"];
    let args = [&args[..], &["--read-only-authkey-file", "reader"]].concat();
    let mut server = Running::start(&mut home.command(&args));
    let mut home = home;
    home.addr = Some(ready(&mut server)["address"].as_str().unwrap().to_owned());
    let reader = |args: &[&'static str]| {
        home.run(&[&["--authkey-file", key.to_str().unwrap()], args].concat())
    };
    home.ok(&["set", "e", "0", "0"]);
    assert_eq!(reader(&["get", "e", "0", "0"]).code, Some(0));
    assert_eq!(reader(&["wait", "e", "0", "0"]).code, Some(0));
    for change in [
        &["set", "e", "0", "0"][..],
        &["clear", "e"],
        &["take", "e", "0", "0"],
        &["create", "new:event:1x1"],
        &["rm", "e"],
    ] {
        reader(change).failed(4, &["read-only", "full key"]);
    }
    let same = ["serve", "--bind", "127.0.0.1:0", "--authkey-file", "reader"];
    let same = [&same[..], &["--read-only-authkey-file", "reader"]].concat();
    home.fails(&same, 2, &["reader", "is the full key"]);
}

#[test]
fn a_client_waits_for_a_server_that_is_not_there_yet() {
    let site = Site::start(&["e:event:1x1"]);
    let addr = site.addr().to_owned();
    let Site { home, server, .. } = site;
    server.end(Some(Signal::TERM));
    let mut get = Running::start(&mut home.command(&["--wait-server", "60", "get", "e"]));
    assert!(get.is_running());
    let _site = Site::start_in(home, &addr, &["e:event:1x1"]);
    assert_eq!(get.end(None).stdout, "0\n");
}

#[test]
fn a_misspelt_variable_is_noticed() {
    let site = Site::start(&[]);
    let mut command = site.home.command(&["ls"]);
    let ended = finish(command.env("FARCELL_ADRR", "node0"));
    assert_eq!(ended.code, Some(0));
    assert!(ended.stderr.contains("FARCELL_ADRR") && ended.stderr.contains("FARCELL_ADDR meant"));
    let mut command = site.home.command(&["ls"]);
    let ended = finish(command.env("FARCELL_LOG", "far=cell=x"));
    ended.failed(2, &["FARCELL_LOG", "far=cell=x"]);
}

#[test]
fn a_limit_of_clients_is_told() {
    let mut home = Home::new();
    let args = ["serve", "--json", "--bind", "127.0.0.1:0", "--max-clients", "1"];
    let mut server = Running::start(&mut home.command(&args));
    home.addr = Some(ready(&mut server)["address"].as_str().unwrap().to_owned());
    let builder = Client::builder().addr(home.addr.clone().unwrap()).key_file(home.key_file());
    let client = builder.connect().unwrap();
    home.fails(&["ls"], 4, &["as many clients", "--max-clients"]);
    drop(client);
    eventually("there is room again", || home.run(&["ls"]).code == Some(0));
}
