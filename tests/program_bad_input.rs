//! Promise: whatever is wrong gets a sentence of its own that says what, to
//! what, and what to do, and the exit code that belongs to it.
#![cfg(feature = "cli")]

mod program_common;
use program_common::{Home, Site};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;

/// Something that answers every connection in its own way, on a free port.
fn stranger(answer: impl Fn(TcpStream) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || listener.incoming().for_each(|client| answer(client.unwrap())));
    addr
}

/// Reads a request and answers it; what hangs up without one gets nothing.
fn reply(mut client: TcpStream, answer: &'static [u8]) {
    std::thread::spawn(move || {
        let mut request = [0; 512];
        if client.read(&mut request).is_ok_and(|n| n > 0) {
            let _ = client.write_all(answer);
        }
    });
}

fn home_with_key() -> Home {
    let home = Home::new();
    home.write_key("config/farcell/authkey", "some key or other", 0o600);
    home
}

#[test]
fn a_wrong_key() {
    let site = Site::start(&[]);
    let key = site.home.write_key("other", "not the server's key", 0o600);
    let key = key.to_str().unwrap();
    site.home.fails(
        &["--authkey-file", key, "ls"],
        4,
        &[site.addr(), "keys do not match", key, "copy of the server's key file"],
    );
}

#[test]
fn a_wrong_address() {
    let home = home_with_key();
    // A port that was free a moment ago.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    home.fails(&["--addr", &free, "ls"], 3, &[&free, "connection refused", "farcell serve"]);
    home.fails(&["--addr", "no.such.host.invalid", "ls"], 3, &["no.such.host.invalid", "host"]);
    home.fails(&["--addr", "host:70000", "ls"], 3, &["host:70000", "65535", "HOST:PORT"]);
    home.fails(&["--addr", "[::1", "ls"], 3, &["[::1", "HOST:PORT"]);
    home.fails(&["--addr", "", "ls"], 3, &["host is missing"]);
}

#[test]
fn an_http_server() {
    let home = home_with_key();
    let addr = stranger(|client| reply(client, b"HTTP/1.1 400 Bad Request\r\n\r\n"));
    home.fails(&["--addr", &addr, "ls"], 3, &[&addr, "an HTTP server answers", "host and port"]);
}

#[test]
fn a_redis() {
    let home = home_with_key();
    let addr = stranger(|client| reply(client, b"-ERR wrong number of arguments\r\n"));
    home.fails(&["--addr", &addr, "ls"], 3, &[&addr, "a Redis server answers", "host and port"]);
}

#[test]
fn one_that_speaks_first() {
    let home = home_with_key();
    let addr = stranger(|mut client| client.write_all(b"SSH-2.0-x\r\n").unwrap());
    home.fails(&["--addr", &addr, "ls"], 3, &[&addr, "an SSH server answers"]);
}

#[test]
fn one_that_says_nothing() {
    let home = home_with_key();
    let addr = stranger(std::mem::forget);
    let args = ["--connect-timeout", "0.3", "--addr", &addr, "ls"];
    home.fails(&args, 3, &[&addr, "no greeting within 0.3 s"]);
    let addr = stranger(drop);
    home.fails(&["--addr", &addr, "ls"], 3, &[&addr, "closed the connection"]);
}

#[test]
fn another_version_of_the_protocol() {
    let home = home_with_key();
    let mut greeting = [0; 48];
    greeting[..8].copy_from_slice(b"\xFAfarcell");
    greeting[8..10].copy_from_slice(&999_u16.to_le_bytes());
    let addr = stranger(move |mut client| {
        client.write_all(&greeting).unwrap();
        std::mem::forget(client);
    });
    home.fails(&["--addr", &addr, "ls"], 4, &[&addr, "version 999", "same release"]);
}

#[test]
fn a_server_that_does_not_know_the_key() {
    let home = home_with_key();
    let addr = stranger(move |mut client| {
        let version = real_version().to_le_bytes();
        let mut bytes = [0; 48];
        bytes[..8].copy_from_slice(b"\xFAfarcell");
        bytes[8..10].copy_from_slice(&version);
        client.write_all(&bytes).unwrap();
        let mut hello = [0; 104];
        client.read_exact(&mut hello).unwrap();
        // Welcome, says someone who cannot prove anything.
        let mut welcome = [0; 80];
        welcome[..8].copy_from_slice(b"\xFAfarcell");
        welcome[8..10].copy_from_slice(&version);
        welcome[11] = 1;
        welcome[12] = 1;
        client.write_all(&welcome).unwrap();
        std::mem::forget(client);
    });
    home.fails(&["--addr", &addr, "ls"], 4, &[&addr, "could not prove", "check the address"]);
}

/// The version that a real server greets with.
fn real_version() -> u16 {
    let key = farcell::Key::new(*b"any").unwrap();
    let server = farcell::Server::builder(key).bind("127.0.0.1:0").start().unwrap();
    let mut greeting = [0; 48];
    TcpStream::connect(server.address()).unwrap().read_exact(&mut greeting).unwrap();
    u16::from_le_bytes([greeting[8], greeting[9]])
}

#[test]
fn odd_names() {
    let site = Site::start(&[]);
    let long = "x".repeat(129);
    for (name, why) in [
        ("a b", "' ' at byte 1"),
        ("é", "'é' at byte 0"),
        ("a\nb", "'\\n' at byte 1"),
        ("../x", "starts with '.'"),
        ("", "at least one character"),
        (long.as_str(), "129 bytes"),
    ] {
        for command in ["get", "rm", "clear", "watch"] {
            site.home.fails(&[command, name], 4, &["cannot name an array", why]);
        }
    }
    site.home.fails(&["create", "a b:event:1x1"], 4, &["\"a b\" cannot name an array"]);
    let args = ["serve", "--bind", "127.0.0.1:0", "--array", "a b:event:1x1"];
    site.home.fails(&args, 4, &["\"a b\" cannot name an array"]);
}

#[test]
fn cells_that_are_not_there() {
    let site = Site::start(&["e:event:2x3", "n:counter:1x1"]);
    let home = &site.home;
    let outside = "outside of array \"e\" with 2 rows and 3 columns";
    home.fails(&["get", "e", "2", "0"], 4, &["cell (2, 0)", outside]);
    home.fails(&["set", "e", ":", "3"], 4, &["(0, 3)", outside]);
    home.fails(&["take", "e", "0", "99999999999"], 4, &["(0, 99999999999)", outside]);
    home.fails(&["wait", "e", "7"], 4, &["(7, 0)", outside]);
    home.fails(&["add", "n", "1", "0", "1"], 4, &["(1, 0)", "\"n\""]);
    home.fails(&["get", "e", "-1", "0"], 2, &["'-1'", "from 0 on"]);
    for bytes in ["0", "17179869185", "x"] {
        home.fails(&["slot", "create", "z", "1", bytes], 2, &[bytes, "<BYTES>"]);
    }
    home.fails(&["slot", "create", "z", "0", "1"], 4, &["\"z\"", "0 x 1"]);
    home.fails(&["get", "e", "x"], 2, &["'x'", "from 0 on"]);
    home.fails(&["get", "e", "0", "0", "0"], 2, &["'0'"]);
    home.fails(&["get", "none"], 4, &["no array \"none\"", "farcell ls"]);
}

#[test]
fn what_a_kind_does_not_have() {
    let others = ["l:lock:1x1", "b:barrier:1x1:3", "s:semaphore:1x1:2/5"];
    let site = Site::start(&[&["e:event:1x1", "n:counter:1x1"], &others[..]].concat());
    let home = &site.home;
    home.ok(&["slot", "create", "m", "1", "8"]);
    for (name, kind, hint) in [
        ("l", "lock", "farcell members"),
        ("b", "barrier", "farcell members"),
        ("s", "semaphore", "farcell members"),
        ("m", "slots", "farcell slot get"),
    ] {
        for command in ["get", "wait", "watch", "set", "clear"] {
            let cells = format!("{name:?} holds {kind} cells, which have no {command}");
            home.fails(&[command, name], 4, &[&cells, hint]);
        }
        let cells = format!("{name:?} holds {kind} cells, which have no take");
        home.fails(&["take", name, "0", "0"], 4, &[&cells, hint]);
    }
    home.fails(&["add", "e", "0", "0", "1"], 4, &["\"e\" holds event cells", "add"]);
    home.fails(&["cas", "e", "0", "0", "1", "2"], 4, &["\"e\" holds event cells"]);
    home.fails(&["take", "n", "0", "0"], 4, &["\"n\" holds counter cells", "take"]);
    home.fails(&["clear", "n"], 4, &["\"n\" holds counter cells", "clear"]);
    home.fails(&["set", "e", "0", "0", "1"], 2, &["\"e\" holds events", "no value"]);
    home.fails(&["set", "n", "0", "0"], 2, &["\"n\" holds counters", "VALUE"]);
    home.fails(&["wait", "n"], 2, &["\"n\" holds counters", "--until ge:5"]);
    home.fails(&["wait", "e", "--until", "ge:5"], 2, &["\"e\" holds events", "--until"]);
    home.fails(&["get", "n", "--transitions"], 2, &["\"n\" holds counters", "--transitions"]);
    let large = i64::MAX.to_string();
    home.fails(&["add", "n", "0", "0", &large], 4, &[&large, "does not fit"]);
    home.fails(&["set", "n", "0", "0", "9e9"], 2, &["9e9"]);
    home.fails(&["wait", "e", "--count", "2"], 4, &["2 of 1 cells"]);
}

#[test]
fn shapes_that_cannot_be() {
    let site = Site::start(&[]);
    let home = &site.home;
    let serve = ["serve", "--bind", "127.0.0.1:0", "--array"];
    for (spec, words) in [
        ("a:event:0x3", &["\"a\"", "0 x 3", "from 1"][..]),
        ("a:event:3x0", &["\"a\"", "3 x 0", "from 1"]),
        ("a:event:1099511627776x1", &["\"a\"", "1099511627776 x 1", "4294967295"]),
        ("a:counter:1048576x1048576", &["\"a\"", "262144 free", "--capacity"]),
    ] {
        home.fails(&["create", spec], 4, words);
        home.fails(&[&serve[..], &[spec]].concat(), 4, words);
    }
    let small = ["--capacity", "40"];
    let args = [&serve[..], &["a:event:9x9"], &small].concat();
    home.fails(&args, 4, &["no room for array \"a\"", "216 cells", "40 free", "--capacity"]);
}

#[test]
fn arguments_of_the_server() {
    let home = Home::new();
    let with = |args: &[&'static str]| [&["serve", "--bind", "127.0.0.1:0"], args].concat();
    for (args, words) in [
        (&["--array", "a"][..], &["'a'", "kind and the shape are missing"][..]),
        (&["--array", "a:event"], &["'a:event'", "missing"]),
        (&["--array", "a:evnt:1x1"], &["\"evnt\" is no kind", "use event, counter"]),
        (&["--array", "a:event:4"], &["shape \"4\"", "ROWSxCOLS"]),
        (&["--array", "a:event:4xb"], &["columns \"b\""]),
        (&["--capacity", "4"], &["4 cells", "from 8"]),
        (&["--capacity", "x"], &["--capacity", "x"]),
        (&["--workers", "0"], &["workers", "from 1"]),
        (&["--lease", "0.01"], &["lease", "0.05"]),
        (&["--lease", "-1"], &["-1"]),
        (&["--max-clients", "0"], &["max-clients"]),
        (&["--bind", "nowhere:x"], &["nowhere:x", "HOST:PORT"]),
        (&["--port", "1"], &["--port", "--bind"]),
        (&["--addr", "x:1"], &["--addr is for clients", "serve"]),
        (&["--transport", "tcp"], &["--transport is for clients", "serve"]),
        (&["--device", "mlx5_0"], &["--device is for clients", "serve"]),
        (&["--rdma", "rxe0:abc"], &["\"rxe0:abc\"", "NAME:PORT"]),
        (&["--rdma", "rxe0:300"], &["\"rxe0:300\"", "1 to 255"]),
        (&["--rdma", "rxe0:"], &["\"rxe0:\"", "1 to 255"]),
        (&["--rdma", "rxe0:1:1"], &["\"rxe0:1:1\"", "1 to 255"]),
        (&["--bogus"], &["--bogus"]),
    ] {
        home.fails(&with(args), 2, words);
    }
    let client = home_with_key();
    client.fails(&["--addr", "127.0.0.1:1", "--device", "rxe0:x", "ls"], 5, &["\"rxe0:x\""]);
    home.fails(&["bogus"], 2, &["'bogus'"]);
    home.fails(&["wait", "e", "--timeout", "nan"], 2, &["nan", "seconds"]);
    home.fails(&["wait", "e", "--any", "--all"], 2, &["--any", "--all"]);
    home.fails(&["wait", "e", "--until", "xx:1"], 2, &["\"xx\" is no comparison"]);
    home.fails(&["serve", "--bind", "203.0.113.1:0"], 5, &["203.0.113.1", "ip addr"]);
}

#[test]
fn bad_key_files() {
    let home = Home::new();
    home.write_key("empty", "\n", 0o600);
    home.write_key("open", "secret", 0o640);
    home.write_key("large", &"x".repeat(5000), 0o600);
    for (file, words) in [
        ("none", &["does not exist", "copy the server's key file"][..]),
        ("empty", &["is empty"]),
        ("open", &["mode 0640", "chmod 600"]),
        ("large", &["more than 4096 bytes"]),
        ("/", &["no regular file"]),
    ] {
        let words = [&["key file", file], words].concat();
        home.fails(&["ls", "--authkey-file", file], 4, &words);
        home.fails(&["serve", "--bind", "127.0.0.1:0", "--authkey-file", file], 4, &words);
        let mut command = home.command(&["serve", "--bind", "127.0.0.1:0"]);
        program_common::finish(command.env("FARCELL_AUTHKEY_FILE", file)).failed(4, &words);
    }
    assert!(!home.path("none").exists(), "a file that was named is not made");
    let default = home.key_file();
    home.fails(&["ls"], 4, &["no key", default.to_str().unwrap(), "FARCELL_AUTHKEY_FILE"]);
    home.write_key("config/farcell/authkey", "secret", 0o644);
    home.fails(&["ls"], 4, &["mode 0644", "chmod 600"]);
    home.fails(&["serve", "--bind", "127.0.0.1:0"], 4, &["mode 0644", "chmod 600"]);
}

#[test]
fn a_ready_file_that_cannot_be_written() {
    let home = Home::new();
    let with = |path| ["serve", "--bind", "127.0.0.1:0", "--ready-file", path];
    home.fails(&with("/dev/full"), 5, &["ready file /dev/full", "no space left", "make room"]);
    assert!(Path::new("/dev/full").exists());
    home.fails(&with("none/addr"), 5, &["ready file none/addr", "folder does not exist"]);
    home.fails(&with("."), 5, &["ready file .", "name a file"]);
}
