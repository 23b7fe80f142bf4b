//! What the tests of RDMA share.

use farcell::{Client, RdmaChoice, Server, ServerBuilder, TransportChoice};
use std::io::Read;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

/// The variable that makes a test executable a server.
const ROLE: &str = "FARCELL_TEST_SERVER";
/// The variable that says what kind of server.
const HOW: &str = "FARCELL_TEST_SERVER_KIND";
const PLAIN: &str = "without an adapter";

/// Longer than anything takes that is not stuck, also in an emulated machine.
pub const LONG: Duration = Duration::from_secs(60);

fn required() -> bool {
    std::env::var("FARCELL_TEST_RDMA").is_ok_and(|v| v == "required")
}

/// Whether there is a device; fails where one is required.
pub fn device() -> bool {
    let there = farcell::verbs::library()
        .and_then(farcell::verbs::DeviceList::new)
        .map(|list| list.iter().count() > 0)
        .unwrap_or(false);
    assert!(there || !required(), "FARCELL_TEST_RDMA=required, but there is no device");
    if !there {
        println!("NOT TESTED, for want of an RDMA device");
    }
    there
}

/// Whether we are in a machine of `scripts/soft-roce`, whose links may be
/// broken, with what this variable names. Fails where a device is required.
pub fn machine_has(variable: &str) -> Option<String> {
    let value = std::env::var(variable).ok().filter(|v| !v.is_empty());
    assert!(value.is_some() || !required(), "FARCELL_TEST_RDMA=required, but no {variable}");
    if value.is_none() {
        println!("NOT TESTED: outside of a machine of scripts/soft-roce with a {variable}");
    }
    value
}

/// Settings of a server that offers RDMA, as it does by default.
pub fn rdma_server() -> ServerBuilder {
    super::server().rdma(RdmaChoice::default())
}

/// A client of that server over this transport and no other.
pub fn over(server: &Server, choice: TransportChoice) -> Client {
    over_at(&server.address(), choice)
}

/// As [`over`], by the server's address.
pub fn over_at(addr: &str, choice: TransportChoice) -> Client {
    let client =
        Client::builder().addr(addr).key(super::key()).transport(choice).connect().unwrap();
    stays_over(&client, choice);
    client
}

/// Fails if a client goes another way than this one.
pub fn stays_over(client: &Client, choice: TransportChoice) {
    let want = match choice {
        TransportChoice::Tcp => "tcp",
        TransportChoice::Shm => "shm",
        _ => "rdma",
    };
    assert_eq!(client.transport().name, want, "{:?}", client.transport());
}

/// Runs a command that must succeed.
pub fn run(command: &str) {
    let status = Command::new("sh").args(["-c", command]).status().unwrap();
    assert!(status.success(), "{command}: {status}");
}

/// Waits until something is so, as long as an emulated machine may take that
/// shares its cores with others.
pub fn eventually(what: &str, so: impl FnMut() -> bool) {
    super::eventually_within(LONG, what, so);
}

/// How many fetch_adds a client does where many are wanted.
pub fn adds(usual: i64) -> i64 {
    std::env::var("FARCELL_TEST_ADDS").ok().and_then(|v| v.parse().ok()).unwrap_or(usual)
}

// ---- a server in a process of its own ----------------------------------------

/// This test executable once more, as a server with RDMA. It ends with us.
pub struct ServerProcess {
    pub addr: String,
    child: Child,
    _stdin: ChildStdin,
    _dir: tempfile::TempDir,
}

/// What the threads of a process have used so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Use {
    /// How often a thread slept and was woken.
    pub wakes: u64,
    /// Clock ticks in user mode, 10 ms each.
    pub user: u64,
    /// Clock ticks in the kernel, 10 ms each.
    pub system: u64,
}

impl ServerProcess {
    /// Starts it. The executable must have an ignored test `role_of_the_server`
    /// that calls [`serve_if_asked`].
    pub fn start() -> ServerProcess {
        ServerProcess::begin("with an adapter")
    }

    /// The same, without RDMA also where there is an adapter, so that clients on
    /// this machine change the cells.
    pub fn without_rdma() -> ServerProcess {
        ServerProcess::begin(PLAIN)
    }

    fn begin(how: &str) -> ServerProcess {
        let dir = tempfile::tempdir().unwrap();
        let ready = dir.path().join("ready");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "role_of_the_server", "--ignored", "--nocapture"])
            .env(ROLE, &ready)
            .env(HOW, how)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let mut addr = String::new();
        eventually("the server process is ready", || {
            assert!(child.try_wait().unwrap().is_none(), "the server process ended");
            addr = std::fs::read_to_string(&ready).unwrap_or_default();
            addr.ends_with('\n')
        });
        ServerProcess { addr: addr.trim().to_owned(), child, _stdin: stdin, _dir: dir }
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        super::another::signal(self.child.id(), name);
    }

    fn tasks(&self, file: &str) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        tasks
            .flatten()
            .filter_map(|task| std::fs::read_to_string(task.path().join(file)).ok())
            .collect()
    }

    /// Whether every thread is stopped.
    pub fn is_stopped(&self) -> bool {
        self.tasks("stat")
            .iter()
            .all(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
    }

    /// What its threads have used so far.
    pub fn used(&self) -> Use {
        let mut sum = Use::default();
        for stat in self.tasks("stat") {
            let rest = stat.rsplit(") ").next().unwrap();
            let ticks = |n: usize| -> u64 { rest.split(' ').nth(n).unwrap().parse().unwrap() };
            sum.user += ticks(11);
            sum.system += ticks(12);
        }
        for status in self.tasks("status") {
            let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            sum.wakes += line.unwrap().trim().parse::<u64>().unwrap();
        }
        sum
    }
}

impl std::ops::Sub for Use {
    type Output = Use;

    fn sub(self, other: Use) -> Use {
        Use {
            wakes: self.wakes - other.wakes,
            user: self.user - other.user,
            system: self.system - other.system,
        }
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the process that [`ServerProcess::start`] has started: serves until its
/// standard input ends. Anywhere else it does nothing.
pub fn serve_if_asked() {
    let Ok(ready) = std::env::var(ROLE) else {
        return;
    };
    let plain = std::env::var(HOW).is_ok_and(|how| how == PLAIN);
    let builder = if plain { super::server() } else { rdma_server() };
    let server = builder.lease(LONG).start().unwrap();
    let new = Path::new(&ready).with_extension("new");
    std::fs::write(&new, server.address() + "\n").unwrap();
    std::fs::rename(&new, &ready).unwrap();
    let _ = std::io::stdin().read(&mut [0]);
}
