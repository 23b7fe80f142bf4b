//! Another node: a network namespace, joined to this one by a wire of its own.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Runs a command of the system; whether it went well.
pub fn tried(command: &str) -> bool {
    let status = Command::new("sh").args(["-c", command]).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// A namespace with one end of a wire in it. It goes when this does.
pub struct Net {
    name: String,
    here: String,
    there: String,
    /// The address of this end.
    pub address: String,
}

impl Net {
    /// One, if we may make it.
    pub fn new() -> Option<Net> {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        // The number of the process keeps those of two programs apart.
        let (pid, n) = (std::process::id(), NEXT.fetch_add(1, Relaxed));
        let subnet = format!("10.{}.{}", 64 + pid % 128, pid / 128 % 256);
        let net = Net {
            name: format!("faults-{pid}-{n}"),
            here: format!("fa{pid}-{n}"),
            there: format!("fb{pid}-{n}"),
            address: format!("{subnet}.{}", 4 * n + 1),
        };
        let Net { name, here, there, address } = &net;
        let other = format!("{subnet}.{}", 4 * n + 2);
        tried(&format!(
            "ip netns add {name} && ip link add {here} type veth peer name {there} netns {name} &&
             ip addr add {address}/30 dev {here} && ip link set {here} up &&
             ip -n {name} addr add {other}/30 dev {there} && ip -n {name} link set {there} up &&
             ip -n {name} link set lo up"
        ))
        .then_some(net)
    }

    /// A command in there, as the beginning of a command line.
    pub fn inside(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.name].map(str::to_owned).to_vec()
    }

    /// Takes the wire away, or brings it back.
    pub fn link(&self, state: &str) {
        assert!(tried(&format!("ip link set {} {state}", self.here)), "the link does not obey");
    }

    /// What the wire does to packets, in both directions; false if this kernel
    /// has no netem.
    pub fn wire(&self, how: &str) -> bool {
        let Net { name, here, there, .. } = self;
        tried(&format!(
            "tc qdisc replace dev {here} root netem {how} &&
             tc -n {name} qdisc replace dev {there} root netem {how}"
        ))
    }

    /// The wire is a good one again.
    pub fn mend(&self) {
        let Net { name, here, there, .. } = self;
        tried(&format!("tc qdisc del dev {here} root; tc -n {name} qdisc del dev {there} root"));
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // Both ends go with the one that is here.
        tried(&format!("ip link del {}; ip netns del {}", self.here, self.name));
    }
}
