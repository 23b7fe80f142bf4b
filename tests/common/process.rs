//! A server in a process of its own, to be killed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A `farcell serve`, and where it keeps its files.
pub struct Process {
    pub dir: tempfile::TempDir,
    pub addr: String,
    child: Child,
    first: Vec<String>,
    extra: Vec<String>,
}

impl Process {
    /// Starts a server on a free port with these further arguments.
    pub fn start(extra: &[&str]) -> Process {
        Process::start_at("127.0.0.1:0", &[], extra)
    }

    /// Starts one that listens there, at the end of this command line, which may be
    /// empty.
    pub fn start_at(bind: &str, first: &[&str], extra: &[&str]) -> Process {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("key");
        fs::write(&key, super::key().expose()).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        let [first, extra] =
            [first, extra].map(|words| words.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>());
        let child = spawn(&dir, bind, &first, &extra);
        let mut process = Process { dir, addr: String::new(), child, first, extra };
        process.addr = process.ready();
        process
    }

    /// Starts it again, on the port that it had.
    pub fn start_again(&mut self) {
        // One that has ended by itself has removed it.
        let _ = fs::remove_file(self.ready_file());
        self.child = spawn(&self.dir, &self.addr, &self.first, &self.extra);
        assert_eq!(self.ready(), self.addr);
    }

    /// Starts it again with other arguments, on the port that it had.
    pub fn again_with(mut self, extra: &[&str]) -> Process {
        self.extra = extra.iter().map(|s| (*s).to_owned()).collect();
        self.start_again();
        self
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends a signal by its name, such as `TERM` or `STOP`.
    pub fn signal(&self, name: &str) {
        super::another::signal(self.child.id(), name);
        if name == "STOP" {
            // It goes on for a moment until the signal has reached each thread.
            super::eventually("the server has stopped", || self.threads_are_stopped());
        }
    }

    fn threads_are_stopped(&self) -> bool {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        tasks.flatten().all(|task| {
            let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        })
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for its end; the exit code.
    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    fn ready_file(&self) -> PathBuf {
        self.dir.path().join("ready")
    }

    fn ready(&mut self) -> String {
        let file = self.ready_file();
        let mut addr = String::new();
        super::eventually("the server is ready", || {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("the server ended: {status}");
            }
            addr = fs::read_to_string(&file).unwrap_or_default().trim().to_owned();
            !addr.is_empty()
        });
        addr
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Without RDMA unless the arguments say otherwise.
fn spawn(dir: &tempfile::TempDir, bind: &str, first: &[String], extra: &[String]) -> Child {
    let off: &[&str] = if extra.iter().any(|a| a == "--rdma") { &[] } else { &["--rdma", "off"] };
    let program = env!("CARGO_BIN_EXE_farcell");
    let mut command = match first {
        [] => Command::new(program),
        [first, rest @ ..] => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
    };
    // What is meant for the tests means nothing to it.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("FARCELL_")) {
            command.env_remove(name);
        }
    }
    command
        .arg("serve")
        .args(off)
        .args(["--bind", bind, "--authkey-file"])
        .arg(dir.path().join("key"))
        .arg("--ready-file")
        .arg(dir.path().join("ready"))
        .args(extra)
        .env("HOME", dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}
