"""The host's own rdma_rxe, in namespaces of its own.

Nothing needs to be undone: the namespaces, and with them the network device
and its HCA, go away with the first process in them, and that one is killed
when this program ends.
"""

import glob
import os
import signal
import subprocess
import time

from . import host
from .boot import GUEST
from .host import STATUS_TIMEOUT, say
from .machine import die_with_parent

# Mount namespace: the host's file systems with a writable overlay on each, as
# in a virtual machine; $OUT alone is the real directory.
SCRIPT = r"""
fail() { echo "soft-roce: $*" >&2; exit 125; }
host() { "$@"; }
mount --make-rprivate / || fail "no private mounts"
work=/run
mount -t tmpfs -o mode=755 tmpfs "$work" || fail "no tmpfs"
mkdir "$work/new" "$work/real"
[ -n "$OUT" ] && { mkdir "$work/out"; mount --bind "$OUT" "$work/out" || fail "no bind of $OUT"; }
number=0
while read -r _ _ _ _ point _; do
    # What the kernel makes up has its own mounts below.
    case $point in /proc|/proc/*|/sys|/sys/*|/dev|/dev/*|/run|/run/*) continue ;; esac
    [ -d "$point" ] || continue
    number=$((number + 1))
    mkdir -p "$work/rw$number/upper" "$work/rw$number/work"
    mount -t overlay -o "lowerdir=$point,upperdir=$work/rw$number/upper,workdir=$work/rw$number/work" overlay "$work/new$point" 2>/dev/null ||
        { [ "$point" = / ] && fail "no overlay on the root file system"; }
done </proc/self/mountinfo
new=$work/new
mount -t proc proc "$new/proc" && mount -t sysfs sysfs "$new/sys" || fail "no proc or sysfs"
mount --rbind /dev "$new/dev"
mount -t tmpfs -o mode=1777 tmpfs "$new/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$new/run"
mkdir -p "$new/run/soft-roce/bin" "$new/run/lock"
cp "$GUEST"/bin/* "$new/run/soft-roce/bin/"
[ -n "$OUT" ] && { mkdir -p "$new$OUT"; mount --bind "$work/out" "$new$OUT"; }
cp "$new/etc/hosts" "$work/hosts" 2>/dev/null
{ cat "$work/hosts"; echo "$HOSTS"; } >"$new/etc/hosts"
hostname "$NAME"
. "$GUEST/network.sh"
WIRE=no
set_up_network
ulimit -l unlimited
[ -z "$TRIAL" ] && echo "soft-roce: ready (the host's own rdma_rxe, $RXE)" >&2
exec env -i "$(command -v chroot)" "$new" /bin/sh -c "$COMMAND"
"""


def unusable():
    """Why the host's own rdma_rxe cannot be used, or None."""
    if host.as_root() != []:
        return "needs root"
    if not os.path.isdir("/sys/module/rdma_rxe"):
        if not host.find("modprobe") or host.run("modprobe", "rdma_rxe", check=False).returncode != 0:
            return "this kernel has no rdma_rxe"
    for module in ("dummy", "veth", "ib_uverbs", "rdma_ucm"):
        options = ["numdummies=0"] if module == "dummy" else []
        host.run("modprobe", module, *options, check=False)
    missing = host.missing_programs(["ip", "rdma", "unshare"])
    return f"not found: {', '.join(missing)}" if missing else None


def free_name():
    taken = {os.path.basename(path) for path in glob.glob("/sys/class/infiniband/*")}
    return next(name for name in (f"rxe{number}" for number in range(1000)) if name not in taken)


def start(job, trial=False, **options):
    job.native = True
    job.rxe = free_name()
    environment = {
        "PATH": host.BIN, "GUEST": GUEST, "COMMAND": job.script(), "NAME": job.name, "HCAS": str(job.hcas),
        "ADDR": job.address, "ADDR6": job.address6, "RXE": job.rxe, "OUT": job.out or "",
        "HOSTS": f"{job.address} {job.name}", "TRIAL": "1" if trial else "",
    }
    command = [host.find("unshare"), "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child",
               "/bin/sh", "-c", SCRIPT]
    return subprocess.Popen(command, env=environment, preexec_fn=die_with_parent(os.getpid()), **options)


def usable(job):
    """Tries it: a network namespace is no place for rdma_rxe on some kernels."""
    reason = unusable()
    if reason:
        return reason
    if job.hcas == 2:
        return "two HCAs share one name space on the host"
    process = start(job, trial=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return "a trial did not end"
    if process.returncode != 0:
        lines = output.decode("utf-8", "replace").strip().splitlines()
        return f"a trial failed: {lines[-1] if lines else process.returncode}"
    for _ in range(50):  # the kernel takes its HCA away a little later
        if not os.path.exists(f"/sys/class/infiniband/{job.rxe}"):
            break
        time.sleep(0.1)
    return None


def run(job, timeout):
    """Runs the command; returns its status."""
    options = {} if job.stdin or job.terminal else {"stdin": subprocess.DEVNULL}
    process = start(job, **options)
    try:
        status = process.wait(timeout=timeout)
        return status if status >= 0 else 128 - status
    except subprocess.TimeoutExpired:
        say(f"time limit of {timeout:g} s reached: stopped")
        return STATUS_TIMEOUT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        process.kill()  # the rest dies with it (--kill-child)
        process.wait()
