//! This machine, or container.

use super::Patient;
use super::check::{Check, Report};
use std::path::{Path, PathBuf};

const RUN: &str = "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1";

/// Looks at files of the kernel.
pub fn look(_patient: &Patient<'_>, report: &mut Report) {
    report.add(boot());
    report.add(container());
    report.add(devices());
    report.add(cgroup());
    report.add(seccomp());
}

/// The names in a folder, sorted; none if it cannot be read.
pub fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// Shared memory is offered to clients of the same boot.
fn boot() -> Check {
    match read("/proc/sys/kernel/random/boot_id") {
        Some(id) if id.len() >= 32 => Check::ok(
            "host.boot",
            format!("boot id {id}: a server with the same one shares its memory with us"),
        ),
        _ => Check::warn(
            "host.boot",
            "no boot id: without /proc there is no shared memory",
            "mount -t proc proc /proc",
        ),
    }
}

fn container() -> Check {
    let kind = if Path::new("/.dockerenv").exists() {
        Some("Docker".to_owned())
    } else if Path::new("/run/.containerenv").exists() {
        Some("Podman".to_owned())
    } else if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
        Some("Kubernetes".to_owned())
    } else if let Some(name) =
        std::env::var_os("SINGULARITY_NAME").or_else(|| std::env::var_os("APPTAINER_NAME"))
    {
        Some(format!("Apptainer ({})", name.to_string_lossy()))
    } else {
        // systemd, LXC and others tell the first process.
        std::env::var("container").ok().filter(|name| !name.is_empty())
    };
    Check::ok(
        "host.container",
        match kind {
            Some(kind) => format!(
                "a container ({kind}): its network, devices and limits are its own; shared memory needs the server's network namespace"
            ),
            None => "no container that shows itself".to_owned(),
        },
    )
}

/// Adapters that the kernel has and this process cannot see.
fn devices() -> Check {
    let kernel = names("/sys/class/infiniband");
    if kernel.is_empty() {
        return Check::skipped("host.devices", "the kernel has no RDMA adapter");
    }
    let kernel = kernel.join(", ");
    let files = names("/dev/infiniband");
    if files.iter().any(|name| name.starts_with("uverbs")) {
        return Check::ok("host.devices", format!("{kernel}, and /dev/infiniband is here"));
    }
    let what = match Path::new("/dev/infiniband").exists() {
        false => format!("the kernel has {kernel}, but there is no /dev/infiniband here"),
        true => format!("the kernel has {kernel}, but /dev/infiniband has no uverbs file"),
    };
    match names("/sys/class/infiniband_verbs").iter().any(|name| name.starts_with("uverbs")) {
        true => Check::fail("host.devices", what, RUN),
        false => Check::fail("host.devices", what, "modprobe ib_uverbs"),
    }
}

/// The controller that can keep a cgroup from opening adapters.
fn cgroup() -> Check {
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let file = groups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let root = match controllers {
            "" => "/sys/fs/cgroup".to_owned(),
            names if names.split(',').any(|name| name == "rdma") => {
                format!("/sys/fs/cgroup/{names}")
            }
            _ => return None,
        };
        let file = PathBuf::from(root + path).join("rdma.max");
        file.exists().then_some(file)
    });
    let Some(file) = file else {
        return Check::ok("host.cgroup", "no limit of RDMA objects");
    };
    let limits = read(&file).unwrap_or_default();
    let shown = file.display();
    let is_small = |word: &str| {
        let limit = word.split_once('=').and_then(|(_, n)| n.parse::<u64>().ok());
        // A client needs a handle, and some 20 objects.
        limit.is_some_and(|n| n < if word.starts_with("hca_handle") { 2 } else { 64 })
    };
    match limits.lines().find(|line| line.split_whitespace().any(is_small)) {
        Some(line) => {
            let device = line.split_whitespace().next().unwrap_or_default();
            Check::warn(
                "host.cgroup",
                format!("{shown} allows few RDMA objects: {line}"),
                format!("echo '{device} hca_handle=max hca_object=max' > {shown}"),
            )
        }
        None if limits.is_empty() => Check::ok("host.cgroup", format!("{shown} sets no limit")),
        None => Check::ok("host.cgroup", format!("{shown}: {}", limits.replace('\n', "; "))),
    }
}

fn seccomp() -> Check {
    let status = read("/proc/self/status").unwrap_or_default();
    let mode = status.lines().find_map(|line| line.strip_prefix("Seccomp:")).map(str::trim);
    Check::ok(
        "host.seccomp",
        match mode {
            Some("0") => "no filter of system calls",
            Some("2") => {
                "a filter of system calls is active, and what is tried below goes through it; where something says \"operation not permitted\", try --security-opt seccomp=unconfined"
            }
            Some(_) => "only the strictest system calls are allowed",
            None => "this kernel does not tell",
        },
    )
}
