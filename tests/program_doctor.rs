//! Promise: `farcell doctor` names what is wrong between here and a server, and
//! the command that mends it. Every fault here is a real one.
#![cfg(feature = "cli")]

mod program_common;
use farcell::Client;
use program_common::{Ended, Home, Running, Site, eventually, finish, ready};
use rustix::process::Signal;
use serde_json::Value;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;

/// What the doctor said, as JSON, and its exit code.
struct Said {
    json: Value,
    code: Option<i32>,
}

impl Said {
    fn of(ended: Ended) -> Said {
        assert_eq!(ended.stderr, "", "{ended:?}");
        let json: Value = serde_json::from_str(&ended.stdout).unwrap();
        let failed = json["checks"].as_array().unwrap().iter().any(|c| c["verdict"] == "fail");
        assert_eq!(json["fine"], !failed);
        assert_eq!(ended.code, Some(i32::from(failed)), "{json:#}");
        Said { json, code: ended.code }
    }

    fn checks(&self, name: &str) -> Vec<&Value> {
        let all = self.json["checks"].as_array().unwrap();
        let found: Vec<&Value> = all.iter().filter(|check| check["check"] == name).collect();
        assert!(!found.is_empty(), "no {name} in {:#}", self.json);
        found
    }

    /// Some check of this name has this verdict and these words, its fix counted
    /// in.
    fn has(&self, name: &str, verdict: &str, words: &[&str]) {
        let checks = self.checks(name);
        let fits = |check: &&Value| {
            let text = format!("{} {} -> {}", check["subject"], check["what"], check["fix"]);
            check["verdict"] == verdict && words.iter().all(|word| text.contains(word))
        };
        assert!(checks.iter().any(fits), "no {name} {verdict} with {words:?} in {checks:#?}");
    }

    /// The way of this name.
    fn path(&self, way: &str) -> &Value {
        self.json["paths"].as_array().unwrap().iter().find(|path| path["way"] == way).unwrap()
    }
}

fn doctor<S: AsRef<OsStr>>(home: &Home, args: &[S]) -> Said {
    let mut command = home.command(&["doctor", "--json"]);
    Said::of(finish(command.args(args)))
}

#[test]
fn all_is_well() {
    let site = Site::start(&["e:event:1x1"]);
    let said = doctor(&site.home, &[] as &[&str]);
    assert_eq!((said.code, &said.json["found_by"]), (Some(0), &"environment".into()));
    assert_eq!(said.json["server"], site.addr());
    said.has("found.step", "ok", &["environment", "FARCELL_ADDR names the server"]);
    said.has("server.port", "ok", &[site.addr(), "open"]);
    said.has("server.answer", "ok", &["a farcell server, protocol version"]);
    for check in ["env.variables", "server.address", "key.file", "key.mode", "key.right"] {
        said.has(check, "ok", &[]);
    }
    said.has("key.access", "ok", &["full key"]);
    said.has("server.domain", "ok", &["cpu: "]);
    said.has("lease.clock", "ok", &["lease 10.0 s", "a sign every 3.3 s"]);
    said.has("lease.heartbeat", "skipped", &["farcell doctor --hold"]);
    said.has("path.chosen", "ok", &["shm: "]);
    for (way, works, chosen) in [("shm", true, true), ("rdma", false, false), ("tcp", true, false)]
    {
        let path = said.path(way);
        assert_eq!((&path["works"], &path["chosen"]), (&works.into(), &chosen.into()), "{path}");
        assert_eq!(path["round_trip_us"].as_f64().is_some_and(|us| us > 0.0), works);
        assert!(!path["why"].as_str().unwrap().is_empty());
    }

    // As text: a line a check, and one that counts them.
    let text = site.home.ok(&["doctor"]);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), said.json["checks"].as_array().unwrap().len() + 1);
    let words = ["ok ", "warn ", "FAIL ", "skipped "];
    let (last, checks) = lines.split_last().unwrap();
    assert!(checks.iter().all(|line| words.iter().any(|word| line.starts_with(word))), "{text}");
    assert!(last.contains(" 0 wrong, "), "{text}");

    // What it has tried has left nothing.
    let listed = site.home.json(&["ls", "--json"]);
    assert_eq!(listed["arrays"].as_array().unwrap().len(), 1);
}

/// Without a server there is still this machine.
#[test]
fn no_server_at_all() {
    let home = Home::new();
    let mut command = home.command(&["doctor", "--json"]);
    for (name, value) in [
        ("SLURM_PROCID", "0"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_JOB_ID", "7"),
        ("SLURM_STEP_ID", "0"),
    ] {
        command.env(name, value);
    }
    let said = Said::of(finish(&mut command));
    assert_eq!((said.code, &said.json["server"]), (Some(0), &Value::Null));
    said.has("found.step", "skipped", &["environment", "FARCELL_ADDR is not set"]);
    said.has("found.step", "skipped", &["address file", "no address in"]);
    said.has("found.step", "ok", &["launcher", "rank 0 serves on a free port"]);
    for check in ["server.port", "server.answer", "key.right", "lease.clock", "path.chosen"] {
        said.has(check, "skipped", &[]);
    }
    said.has("host.boot", "ok", &["boot id"]);
    for check in ["host.container", "host.seccomp", "memlock.client", "memlock.server"] {
        assert_ne!(said.checks(check)[0]["verdict"], "skipped");
    }
    for check in ["rdma.library", "rdma.provider", "rdma.device", "rdma.gid", "rdma.atomics"] {
        said.checks(check);
    }
}

#[test]
fn where_the_server_is_looked_for() {
    let site = Site::start(&[]);
    let (home, addr) = (&site.home, site.addr());
    // An argument beats the environment.
    let said = doctor(home, &["127.0.0.1:1"]);
    said.has("found.argument", "ok", &["127.0.0.1:1 was given"]);
    said.has("server.port", "fail", &["refused", "nothing listens", "farcell serve --bind [::]:1"]);
    said.has("path.tcp", "skipped", &[]);
    assert_eq!(said.code, Some(1));
    home.run(&["doctor", addr, "--addr", "x:1"]).failed(2, &["two servers", addr, "x:1"]);

    // A loopback address that is told to everyone.
    let file = home.path("config/farcell/address");
    std::fs::write(&file, format!("{addr}\n")).unwrap();
    let mut command = home.command(&["doctor", "--json"]);
    let said = Said::of(finish(command.env_remove("FARCELL_ADDR")));
    assert_eq!(said.json["found_by"], "address file");
    said.has(
        "server.told",
        "warn",
        &["handles carry no address", addr, "that node itself", "export FARCELL_ADDR="],
    );
    said.has("path.tcp", "ok", &[]);

    // Where it listens is no place to dial.
    let port = addr.rsplit(':').next().unwrap();
    let all = format!("0.0.0.0:{port}");
    let said = doctor(home, &[&all]);
    said.has("server.told", "warn", &[&all, "no place to dial", &format!(":{port}")]);

    // A name that nobody knows.
    let said = doctor(home, &["no-such-host.invalid:7117"]);
    said.has(
        "server.address",
        "fail",
        &["no-such-host.invalid", "cannot be found", "getent hosts"],
    );
    said.has("server.port", "skipped", &[]);
    let said = doctor(home, &["node0:port"]);
    said.has("server.address", "fail", &["no number", "HOST:PORT"]);
}

/// An address that a file has is as good as the file.
#[test]
fn what_the_address_file_is_worth() {
    let home = Home::new();
    let with = |file: &str| {
        let mut command = home.command(&["doctor", "--json"]);
        Said::of(finish(command.env_remove("FARCELL_ADDR").env("FARCELL_ADDR_FILE", file)))
    };
    let write = |file: &str, text: &str| std::fs::write(home.path(file), text).unwrap();

    write("old", "127.0.0.1:1\n");
    let said = with("old");
    assert_eq!((said.code, &said.json["found_by"]), (Some(1), &Value::from("address file")));
    let fix = "farcell serve --bind [::]:1 --ready-file old";
    said.has("server.port", "fail", &["nothing listens", "old has this address", fix]);

    write("words", "gar bage\n");
    let fix = "farcell serve --ready-file words";
    with("words").has("server.address", "fail", &["words has this address", fix]);

    // Those behind it are looked at, and that is said.
    write("empty", "\n");
    let pipe = home.path("pipe");
    let kind = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, rustix::fs::Mode::RUSR, 0).unwrap();
    for file in ["empty", "pipe", "none", "/dev/zero"] {
        let fix = format!("farcell serve --ready-file {file}");
        let words = ["address file", "no address in", "look elsewhere", &fix];
        let said = with(file);
        let step = said.checks("found.step");
        let step = step.iter().find(|step| step["subject"] == "address file").unwrap();
        assert_eq!(step["verdict"], "warn", "{file}: {step}");
        let told = step.to_string();
        assert!(words.iter().all(|word| told.contains(word)), "{file}: {told}");
        assert_eq!(said.json["found_by"], "this machine");
    }
}

/// Takes connections, and does this with each.
fn listener(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let serve = serve.clone();
            std::thread::spawn(move || serve(socket));
        }
    });
    addr
}

#[test]
fn something_else_has_the_port() {
    let home = Home::new();
    home.write_key("config/farcell/authkey", "secret", 0o600);
    // A real web server.
    let script = "import http.server, sys
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), http.server.SimpleHTTPRequestHandler)
print(server.server_port, flush=True)
server.serve_forever()";
    let mut web = Running::start(Command::new("python3").args(["-c", script]));
    let mut port = String::new();
    std::io::BufRead::read_line(&mut web.stdout(), &mut port).unwrap();
    let said = doctor(&home, &[format!("127.0.0.1:{}", port.trim())]);
    said.has("server.port", "ok", &[]);
    said.has("server.answer", "fail", &["an HTTP server", "ss -ltnp"]);
    said.has("key.right", "skipped", &[]);

    let ssh = listener(|mut socket| {
        let _ = socket.write_all(b"SSH-2.0-OpenSSH_9.2p1\r\n");
        let _ = socket.read(&mut [0; 64]);
    });
    doctor(&home, &[ssh]).has("server.answer", "fail", &["an SSH server"]);
    let redis = listener(|mut socket| {
        let _ = socket.read(&mut [0; 64]);
        let _ = socket.write_all(b"-ERR unknown command\r\n");
    });
    doctor(&home, &[redis]).has("server.answer", "fail", &["a Redis server"]);
    let mute = listener(drop);
    doctor(&home, &[mute]).has("server.answer", "fail", &["no farcell server", "closed"]);
}

#[test]
fn a_server_of_another_version() {
    let site = Site::start(&[]);
    let server = site.addr().to_owned();
    let other = listener(move |mut near| {
        let mut greeting = [0; 48];
        let mut far = TcpStream::connect(&server).unwrap();
        far.read_exact(&mut greeting).unwrap();
        greeting[8..10].copy_from_slice(&77u16.to_le_bytes());
        let _ = near.write_all(&greeting);
    });
    let said = doctor(&site.home, &[other]);
    said.has("server.answer", "fail", &["version 77", "both ends need one release", "--version"]);
    said.has("key.right", "skipped", &[]);
}

#[test]
fn a_server_that_is_stopped() {
    let site = Site::start(&[]);
    program_common::signal(site.server.pid(), Signal::STOP);
    let said = doctor(&site.home, &["--connect-timeout", "1.5"]);
    program_common::signal(site.server.pid(), Signal::CONT);
    said.has("server.port", "ok", &[]);
    said.has("server.answer", "fail", &["is stopped", "no greeting"]);
    doctor(&site.home, &[] as &[&str]).has("server.answer", "ok", &[]);
}

#[test]
fn the_key() {
    let mut home = Home::new();
    let reader = home.write_key("reader", "a key to read", 0o600);
    let site = {
        let args = ["serve", "--json", "--bind", "127.0.0.1:0", "--read-only-authkey-file"];
        let mut server = Running::start(home.command(&args).arg(&reader));
        home.addr = Some(ready(&mut server)["address"].as_str().unwrap().to_owned());
        server
    };
    let with = |file: &str| doctor(&home, &["--authkey-file", file]);

    let said = with("reader");
    said.has("key.right", "ok", &[]);
    said.has("key.access", "warn", &["read-only key", "changes nothing"]);
    assert_eq!(said.code, Some(0));
    assert_eq!(said.path("shm")["works"], true);

    home.write_key("wrong", "another key", 0o600);
    let said = with("wrong");
    said.has("key.file", "ok", &[]);
    said.has("key.right", "fail", &["cp -p ", "/farcell/authkey wrong"]);
    said.has("path.tcp", "skipped", &[]);

    home.write_key("open", "another key", 0o644);
    let said = with("open");
    said.has("key.mode", "fail", &["mode 0644", "chmod 600 open"]);
    said.has("key.right", "skipped", &["no usable key"]);

    home.write_key("empty", "\n", 0o600);
    with("empty").has("key.file", "fail", &["is empty", "/farcell/authkey empty"]);
    with("none").has("key.file", "fail", &["none does not exist", "/farcell/authkey none"]);
    // A folder is no place for the copy itself.
    with("/").has("key.file", "fail", &["no regular file", "/farcell/authkey /authkey"]);
    // Not what would copy a file onto itself.
    let own = home.path("config/farcell/authkey");
    let own = own.to_str().unwrap();
    home.write_key("config/farcell/authkey", "another key", 0o600);
    with(own).has("key.right", "fail", &[&format!("cp -p KEY_FILE_OF_THE_SERVER {own}")]);
    let far = doctor(&home, &["nosuch.invalid:1", "--authkey-file", "none"]);
    far.has("key.file", "fail", &["scp -p nosuch.invalid:.config/farcell/authkey none"]);
    drop(site);
}

#[test]
fn addresses_that_are_none() {
    let home = Home::new();
    for addr in ["a\nb:1", "127.0.0.1:99999", "[fe80::zz]:1", ":1"] {
        let said = home.run(&["doctor", addr]);
        assert_eq!(said.code, Some(1), "{said:?}");
        // A line a check, and what to type is a command.
        let found: Vec<&str> =
            said.stdout.lines().filter(|line| line.contains("server.address")).collect();
        assert_eq!(found.len(), 1, "{said:?}");
        assert!(found[0].starts_with("FAIL"), "{said:?}");
        assert!(found[0].ends_with(" -> farcell doctor HOST:PORT"), "{said:?}");
    }
    let said = home.run(&["doctor", "nosuch.invalid:1"]);
    assert!(said.stdout.contains(" -> getent hosts nosuch.invalid\n"), "{said:?}");
}

#[test]
#[cfg(feature = "tls")]
fn encryption() {
    let mut home = Home::new();
    let args = ["serve", "--json", "--bind", "127.0.0.1:0", "--tls", "require"];
    let mut server = Running::start(&mut home.command(&args));
    home.addr = Some(ready(&mut server)["address"].as_str().unwrap().to_owned());
    let said = doctor(&home, &["--tls", "off"]);
    said.has("key.right", "fail", &["told not to encrypt", "export FARCELL_TLS=auto"]);
    // RDMA is not offered, and the server says why.
    let said = doctor(&home, &[] as &[&str]);
    said.has("key.right", "ok", &[]);
    let why = said.path("rdma")["why"].to_string();
    assert!(why.contains("does not offer it: TLS is required"), "{why}");
    drop(server);
    let args = ["serve", "--json", "--bind", "127.0.0.1:0"];
    let mut server = Running::start(&mut home.command(&args));
    home.addr = Some(ready(&mut server)["address"].as_str().unwrap().to_owned());
    let said = doctor(&home, &["--tls", "require"]);
    said.has("key.right", "fail", &["offers none", "farcell serve --tls auto"]);
}

#[test]
fn a_full_server() {
    let mut home = Home::new();
    let args = ["serve", "--json", "--bind", "127.0.0.1:0", "--max-clients", "1"];
    let mut server = Running::start(&mut home.command(&args));
    home.addr = Some(ready(&mut server)["address"].as_str().unwrap().to_owned());
    let addr = home.addr.as_deref().unwrap();
    let _taken = Client::builder().addr(addr).key_file(home.key_file()).connect().unwrap();
    let said = doctor(&home, &[] as &[&str]);
    said.has("key.right", "fail", &["as many clients", "farcell serve --max-clients"]);
}

#[test]
fn the_lease() {
    let mut home = Home::new();
    let args =
        ["serve", "--json", "--bind", "127.0.0.1:0", "--lease", "3", "--array", "e:event:1x1"];
    let mut server = Running::start(&mut home.command(&args));
    home.addr = Some(ready(&mut server)["address"].as_str().unwrap().to_owned());
    let said = doctor(&home, &["--hold"]);
    said.has("lease.heartbeat", "ok", &["outlived its lease of 3.0 s"]);
    said.has("lease.members", "ok", &["the one session"]);

    let waiter = Running::start(&mut home.command(&["wait", "e"]));
    eventually("it waits", || home.json(&["ls", "--json"])["server"]["parked_waits"] == 1);
    program_common::signal(waiter.pid(), Signal::STOP);
    // Shown in the last third of its lease, and gone behind it.
    eventually("it is missed", || {
        let said = doctor(&home, &[] as &[&str]);
        let check = said.checks("lease.members")[0];
        let missed = check["verdict"] == "warn";
        assert!(!missed || check["what"].as_str().unwrap().contains("silent"), "{check}");
        missed
    });
}

#[test]
fn no_shared_memory() {
    let mut home = Home::new();
    let args = ["serve", "--json", "--bind", "127.0.0.1:0", "--no-shm"];
    let mut server = Running::start(&mut home.command(&args));
    home.addr = Some(ready(&mut server)["address"].as_str().unwrap().to_owned());
    let said = doctor(&home, &[] as &[&str]);
    said.has("path.shm", "skipped", &["does not offer it: it was told not to", "--no-shm"]);
    said.has("path.chosen", "ok", &["tcp: "]);
    assert_eq!(said.path("tcp")["chosen"], true);
    // Asked for, it must be there.
    let said = doctor(&home, &["--transport", "shm"]);
    said.has("path.chosen", "fail", &["no shared memory", "--transport auto"]);
    assert_eq!(said.code, Some(1));
}

#[test]
fn little_locked_memory() {
    let home = Home::new();
    let mut command = Command::new("setpriv");
    // Root is not held to the limit unless it has lost the capability.
    command.args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit"]);
    command.args(["--memlock=65536:65536", env!("CARGO_BIN_EXE_farcell"), "doctor", "--json"]);
    home.settle(&mut command);
    let said = Said::of(finish(command.env("FARCELL_ADDR", "127.0.0.1:1")));
    let adapters = said.checks("rdma.device")[0]["verdict"] != "skipped";
    let verdict = if adapters { "fail" } else { "warn" };
    let words = ["limit 64 KiB", "needs 144 KiB", "ulimit -l unlimited", "LimitMEMLOCK"];
    said.has("memlock.client", verdict, &words);
    said.has("memlock.server", "warn", &["262144 cells", "2.0 MiB", "ulimit -l unlimited"]);
}

#[test]
fn variables_that_mean_nothing() {
    let home = Home::new();
    let mut command = home.command(&["doctor", "--json", "127.0.0.1:1"]);
    let said =
        Said::of(finish(command.env("FARCELL_GIDINDEX", "1").env("FARCELL_TRANSPROT", "tcp")));
    said.has(
        "env.variables",
        "warn",
        &["FARCELL_GIDINDEX", "FARCELL_GID_INDEX", "unset FARCELL_GIDINDEX"],
    );
    said.has("env.variables", "warn", &["FARCELL_TRANSPROT", "is FARCELL_TRANSPORT meant"]);

    // What no terminal should be given.
    let mut command = home.command(&["ls", "--addr", "127.0.0.1:1"]);
    let ended = finish(command.env("FARCELL_A\n\u{1b}[2J", "1"));
    let lines: Vec<&str> = ended.stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{ended:?}");
    assert!(lines[0].contains("FARCELL_A  [2J means nothing"), "{ended:?}");
}
