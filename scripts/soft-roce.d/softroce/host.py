"""What the host offers: programs, packages, the cache directory."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys

STATUS_TIMEOUT = 124  # as timeout(1)
STATUS_FAILED = 125  # soft-roce itself failed, not the command
BIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"])

# program -> the Debian and Ubuntu package that has it
PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "depmod": "kmod",
    "modprobe": "kmod",
    "ip": "iproute2",
    "rdma": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "ibv_rc_pingpong": "ibverbs-utils",
    "ib_read_lat": "perftest",
    "ib_atomic_lat": "perftest",
    "zstd": "zstd",
    "unshare": "util-linux",
}
# An HCA without its user-space driver shows up nowhere, so this one is
# installed with the tools; no program of its own tells that it is there.
DRIVERS = "ibverbs-providers"
VM_PROGRAMS = ["qemu-system-x86_64", "depmod", "modprobe", "ip", "rdma", "ibv_devinfo"]


class Failure(Exception):
    """soft-roce cannot do its work; the message says why and what to do."""


def say(message):
    print(f"soft-roce: {message}", file=sys.stderr, flush=True)


def find(program):
    return shutil.which(program, path=BIN)


def run(*command, check=True, **options):
    """Runs a program quietly; returns its standard output."""
    environment = dict(os.environ, LC_ALL="C", PATH=BIN)
    result = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, universal_newlines=True, **options)
    if check and result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()[-3:]
        raise Failure(f"{' '.join(command[:4])}: status {result.returncode}: {' / '.join(lines)}")
    return result.stdout if check else result


def as_root():
    """The prefix that makes a command run as root, or None."""
    if os.geteuid() == 0:
        return []
    if find("sudo") and run("sudo", "-n", "true", check=False).returncode == 0:
        return ["sudo", "-n"]
    return None


def has_apt():
    return all(find(program) for program in ("apt-get", "apt-cache", "dpkg-deb"))


def apt_update():
    prefix = as_root()
    if prefix is None:
        raise Failure("the package lists are missing or old; run: sudo apt-get update")
    say("updating the package lists (apt-get update)")
    run(*prefix, "apt-get", "-q", "update")


def missing_programs(programs):
    return [program for program in programs if not find(program)]


def ensure(programs, install=True):
    """Installs what is missing, or says what to install."""
    missing = missing_programs(programs)
    if not missing:
        return
    packages = sorted({PACKAGES[program] for program in missing} | {DRIVERS})
    what = f"not found: {', '.join(missing)}"
    if not has_apt():
        raise Failure(
            f"{what}. Install the programs with this distribution's package manager; on "
            f"Debian and Ubuntu the packages are: {' '.join(packages)}. An HCA also needs the "
            "libibverbs driver for rxe (part of rdma-core)")
    by_hand = f"sudo apt-get install --no-install-recommends {' '.join(packages)}"
    prefix = as_root()
    if not install or prefix is None:
        raise Failure(f"{what}. Install with: {by_hand}")
    say(f"installing {' '.join(packages)}")
    command = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y",
               "install", "--no-install-recommends", *packages]
    if run(*command, check=False).returncode != 0:
        apt_update()
        run(*command)
    still = missing_programs(programs)
    if still:
        raise Failure(f"still not found after the installation: {', '.join(still)}")


def cache_directory():
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.join(base, "soft-roce")
    os.makedirs(path, exist_ok=True)
    return path


@contextlib.contextmanager
def cache_lock():
    """One process at a time fills the cache; it ends with its holder."""
    with open(os.path.join(cache_directory(), "lock"), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another soft-roce that prepares the cache")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def replace_file(path, text):
    """Writes a small file in one step."""
    scratch = f"{path}.{os.getpid()}"
    with open(scratch, "w") as handle:
        handle.write(text)
    os.replace(scratch, path)


def boot_id():
    with open("/proc/sys/kernel/random/boot_id") as handle:
        return handle.read().strip()
