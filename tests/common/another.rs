//! A test executable once more, as a process of its own that can be killed.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

/// The command that runs the test `role` of this executable, and no other, and says by
/// a variable what it is to do.
pub fn role(role: &str, variable: &str, what: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", role, "--include-ignored", "--nocapture"]).env(variable, what);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// Sends a signal by its name.
pub fn signal(pid: u32, name: &str) {
    super::rdma::run(&format!("kill -{name} {pid}"));
}

/// A process that ends with us.
pub struct Another(pub Child);

impl Another {
    pub fn start(command: &mut Command) -> Another {
        Another(command.spawn().unwrap())
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        signal(self.0.id(), name);
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Closes its standard input, whereupon it is to end, and well.
    pub fn end(&mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success(), "a client has failed; see above");
    }
}

impl Drop for Another {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One that tells how far it has come.
pub struct Speaker {
    pub process: Another,
    lines: BufReader<ChildStdout>,
}

impl Speaker {
    pub fn start(command: &mut Command) -> Speaker {
        let mut process = Another::start(command.stdout(Stdio::piped()));
        let lines = BufReader::new(process.0.stdout.take().unwrap());
        Speaker { process, lines }
    }

    /// Waits until it says this.
    pub fn says(&mut self, what: &str) {
        let mut seen = Vec::new();
        loop {
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "not {what:?} but {seen:?}");
            if line.trim_end().ends_with(what) {
                return;
            }
            seen.push(line);
        }
    }
}
