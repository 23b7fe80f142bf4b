//! What the tests of the program share: they run the real one, in a home of
//! its own, against a server on a free port.
#![allow(dead_code)] // Each test uses a part of it.

use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use tempfile::TempDir;

/// Longer than anything here takes, also on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A user's home, with nothing in it.
pub struct Home {
    pub dir: TempDir,
    pub addr: Option<String>,
}

/// How the program ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Home {
    pub fn new() -> Home {
        Home { dir: tempfile::tempdir().unwrap(), addr: None }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Where the user's key is.
    pub fn key_file(&self) -> PathBuf {
        self.path("config/farcell/authkey")
    }

    /// A file with a key that its owner alone can read, or others too.
    pub fn write_key(&self, name: &str, content: &str, mode: u32) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    /// The environment of the program, for any program.
    pub fn settle(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FARCELL_") {
                command.env_remove(name);
            }
        }
        command
            .env("HOME", self.dir.path())
            .env("XDG_CONFIG_HOME", self.path("config"))
            .current_dir(self.dir.path())
            .stdin(Stdio::null());
        if let Some(addr) = &self.addr {
            command.env("FARCELL_ADDR", addr);
        }
    }

    /// The program with these arguments.
    pub fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farcell"));
        command.args(args);
        self.settle(&mut command);
        command
    }

    /// Runs the program to its end.
    pub fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Ended {
        finish(&mut self.command(args))
    }

    /// Runs the program, which must succeed, and returns what it printed.
    pub fn ok<S: AsRef<OsStr>>(&self, args: &[S]) -> String {
        let ended = self.run(args);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert_eq!(ended.stderr, "");
        ended.stdout
    }

    /// Runs the program, which must succeed and print one line of JSON.
    pub fn json<S: AsRef<OsStr>>(&self, args: &[S]) -> serde_json::Value {
        serde_json::from_str(&self.ok(args)).unwrap()
    }

    /// Runs the program, which must fail with this code and one line that has
    /// all of these words.
    pub fn fails<S: AsRef<OsStr>>(&self, args: &[S], code: i32, words: &[&str]) {
        self.run(args).failed(code, words);
    }
}

impl Ended {
    pub fn failed(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "one line: {self:?}");
        assert!(self.stderr.starts_with("farcell: "), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in {self:?}");
        }
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Ended {
        Ended {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// Runs a command to its end.
pub fn finish(command: &mut Command) -> Ended {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    end_of(child)
}

/// Waits for the end of a process; kills it if that does not come.
pub fn end_of(child: Child) -> Ended {
    let pid = child.id();
    let (done, end) = mpsc::channel();
    std::thread::spawn(move || done.send(child.wait_with_output()));
    match end.recv_timeout(PATIENCE) {
        Ok(output) => output.unwrap().into(),
        Err(_) => {
            signal(pid, Signal::KILL);
            panic!("the program did not end; killed, it left {:?}", end.recv());
        }
    }
}

/// Sends a signal to a process that we started.
pub fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.cast_signed()).unwrap();
    // It may have ended by itself.
    let _ = kill_process(pid, signal);
}

/// Waits until something is so.
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("not within 60 s: {what}");
}

/// A process that is killed when its test is over.
pub struct Running(pub Option<Child>);

impl Running {
    pub fn start(command: &mut Command) -> Running {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Running(Some(child))
    }

    pub fn pid(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    pub fn is_running(&mut self) -> bool {
        self.0.as_mut().unwrap().try_wait().unwrap().is_none()
    }

    pub fn stdout(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.0.as_mut().unwrap().stdout.take().unwrap())
    }

    /// Its end, by itself or by this signal.
    pub fn end(mut self, with: Option<Signal>) -> Ended {
        let child = self.0.take().unwrap();
        if let Some(with) = with {
            signal(child.id(), with);
        }
        end_of(child)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A home with a server that its clients find.
pub struct Site {
    pub home: Home,
    pub server: Running,
    /// What the server said when it was ready.
    pub ready: serde_json::Value,
    pub arrays: Vec<&'static str>,
}

impl Site {
    /// A server with these arrays.
    pub fn start(arrays: &[&'static str]) -> Site {
        Site::start_in(Home::new(), "127.0.0.1:0", arrays)
    }

    pub fn start_in(mut home: Home, bind: &str, arrays: &[&'static str]) -> Site {
        let mut args = vec!["serve", "--json", "--rdma", "off", "--bind", bind];
        args.extend(arrays.iter().flat_map(|array| ["--array", array]));
        let mut server = Running::start(&mut home.command(&args));
        let ready = ready(&mut server);
        home.addr = Some(ready["address"].as_str().unwrap().to_owned());
        Site { home, server, ready, arrays: arrays.to_vec() }
    }

    /// Stops the server and starts another one at the same address.
    pub fn restart(self) -> Site {
        let Site { home, server, arrays, .. } = self;
        let ended = server.end(Some(Signal::TERM));
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let addr = home.addr.clone().unwrap();
        Site::start_in(home, &addr, &arrays)
    }

    pub fn addr(&self) -> &str {
        self.home.addr.as_deref().unwrap()
    }

    /// Waits until this many waits are parked.
    pub fn parked(&self, waits: u64) {
        eventually("the waits are parked", || {
            self.home.json(&["ls", "--json"])["server"]["parked_waits"] == waits
        });
    }
}

/// What a server with --json says when it is ready.
pub fn ready(server: &mut Running) -> serde_json::Value {
    let mut line = String::new();
    server.stdout().read_line(&mut line).unwrap();
    if line.is_empty() {
        let mut stderr = String::new();
        server.0.as_mut().unwrap().stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        panic!("the server did not start: {stderr}");
    }
    serde_json::from_str(&line).unwrap()
}
