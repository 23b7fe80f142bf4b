"""Tests of soft-roce on this very host, with real machines.

Each test is a function; its first docstring line says what it promises.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

from . import host, machine
from .host import Failure
from .job import Job

PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))), "soft-roce")
TESTS = []


def test(function):
    TESTS.append(function)
    return function


def expect(condition, what, detail=""):
    if not condition:
        raise AssertionError(f"{what}\n{detail}".rstrip())


class Result:
    def __init__(self, status, out, err, took):
        self.status, self.out, self.err, self.took = status, out, err, took

    def __str__(self):
        return f"status {self.status} after {self.took:.1f} s\n--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-3000:]}"


def call(*arguments, given=None, environment=None, **options):
    """Runs soft-roce as a CI does: no terminal, and no input unless given."""
    began = time.monotonic()
    result = subprocess.run(
        [PROGRAM, *arguments], input=given, stdin=subprocess.DEVNULL if given is None else None,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=580,
        env=dict(os.environ, **(environment or {})), **options)
    return Result(result.returncode, result.stdout, result.stderr, time.monotonic() - began)


def vm(*command, options=(), **more):
    return call("run", "--via", "vm", *options, "--", *command, **more)


def script(text, options=(), **more):
    return vm("bash", "-c", text, options=options, **more)


def want(result, status, *patterns):
    expect(result.status == status, f"status {status} expected", str(result))
    for pattern in patterns:
        expect(re.search(pattern, result.out), f"'{pattern}' expected in the output", str(result))
    return result


def descendants(parent):
    """The processes below one, by their parents' numbers."""
    children = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            with open(f"/proc/{entry}/stat") as handle:
                fields = handle.read().rsplit(")", 1)[1].split()
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [parent]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def alive(process):
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{process}/stat") as handle:
            return handle.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


# --- one machine --------------------------------------------------------------------

@test
def hca():
    """a machine has rxe0, active, with NIC atomics and its IPv4 and IPv6 GIDs"""
    result = want(script("ibv_devinfo -v -d rxe0; ulimit -l"), 0, "PORT_ACTIVE", r"ATOMIC_HCA \(1\)",
                  "::ffff:10.0.0.1", "fd00::1", "(?m)^unlimited$")
    return re.search(r"ready after .*", result.err).group(0)


@test
def perftest():
    """ibv_rc_pingpong, ib_read_lat and ib_atomic_lat work inside one machine"""
    result = want(script("""set -e
        ibv_rc_pingpong -d rxe0 -g 1 -n 200 >/dev/null &
        soft-roce-wait 18515; ibv_rc_pingpong -d rxe0 -g 1 -n 200 10.0.0.1; wait $!
        for test in ib_read_lat ib_atomic_lat; do
            $test -d rxe0 -x 1 -n 500 >/dev/null 2>&1 &
            soft-roce-wait 18515; $test -d rxe0 -x 1 -n 500 10.0.0.1; wait $!
        done"""), 0, "200 iters in", r"(?m)^ 2 +500 ", r"(?m)^ 8 +500 ")
    figures = re.findall(r"(?m)^ [28] +500 +\S+ +\S+ +(\S+)", result.out)
    return f"typical: read {figures[0]} us, atomic {figures[1]} us"


@test
def statuses():
    """the exit status is the command's: 0, 3, not found, not executable, killed"""
    for command, status in ((["true"], 0), (["sh", "-c", "exit 3"], 3), (["no-such-command"], 127),
                            (["/etc/hosts"], 126), (["sh", "-c", "kill -9 $$"], 137)):
        want(vm(*command), status)


@test
def surroundings():
    """directory, environment, arguments, separate outputs, and writes that are thrown away"""
    with tempfile.TemporaryDirectory() as directory:
        directory = os.path.realpath(directory)
        result = call("run", "--via", "vm", "-q", "--env", "SECOND=two words", "--", "sh", "-c",
                      'pwd; echo "$FIRST/$SECOND/$1"; echo wrong >/dev/stderr; echo made >file; cat file', "sh", "a 'b' $c",
                      environment={"FIRST": "x\ny"}, cwd=directory)
        expect(result.out == f"{directory}\nx\ny/two words/a 'b' $c\nmade\n", "the output", str(result))
        expect(result.err == "wrong\n", "standard error apart from it", str(result))
        expect(not os.listdir(directory), "nothing on the host", str(os.listdir(directory)))


@test
def results_come_back():
    """what is written to $OUT is in the directory of --out, also after the time limit"""
    with tempfile.TemporaryDirectory() as directory:
        out = os.path.join(directory, "made/if missing")
        want(script('seq 200000 >"$OUT/numbers"; mkdir "$OUT/below"; echo x >"$OUT/below/file"; sleep 100',
                    options=["--timeout", "25", "--out", out]), 124)
        with open(os.path.join(out, "numbers")) as handle:
            expect(handle.read() == "".join(f"{n}\n" for n in range(1, 200001)), "all of the file")
        expect(os.path.exists(os.path.join(out, "below/file")), "the file below")


@test
def standard_input():
    """standard input: empty by default, passed on with its end by --stdin, may be closed"""
    want(vm("cat"), 0)
    numbers = "".join(f"{n}\n" for n in range(100000))
    result = want(vm("md5sum", options=["--stdin"], given=numbers), 0)
    import hashlib
    expect(hashlib.md5(numbers.encode()).hexdigest() in result.out, "all of the input", str(result))
    closed = subprocess.run(["sh", "-c", 'exec "$0" run -q --via vm -- sh -c "cat; echo end" <&-', PROGRAM],
                            stdout=subprocess.PIPE, timeout=300)
    expect((closed.returncode, closed.stdout) == (0, b"end\n"), "a run with closed input", str(closed))


@test
def long_output():
    """20 MB of output arrive, and what the command left running does not hold the end up"""
    result = subprocess.run([PROGRAM, "run", "-q", "--via", "vm", "--", "sh", "-c", "sleep 1000 & head -c 20000000 /dev/zero"],
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=300)
    expect((result.returncode, len(result.stdout)) == (0, 20000000), "20000000 bytes", f"{result.returncode} {len(result.stdout)}")


@test
def time_limit():
    """--timeout ends a run within 3 s of its time, with status 124"""
    result = want(script("echo begun; sleep 1000", options=["--timeout", "20"]), 124, "begun")
    expect(20 <= result.took < 23, "20 to 23 s", str(result))


@test
def clock():
    """a second inside is a second outside, so that time-outs can be trusted"""
    process = subprocess.Popen([PROGRAM, "run", "-q", "--via", "vm", "--", "sh", "-c", "echo; sleep 15; echo; sleep 1"],
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    process.stdout.readline()
    began = time.monotonic()
    process.stdout.readline()
    took = time.monotonic() - began
    process.wait()
    process.stdout.close()
    expect(14.8 < took < 17, f"15 s inside took {took:.2f} s outside")
    return f"15 s inside took {took:.2f} s"


@test
def signals_leave_nothing():
    """Ctrl-C, SIGTERM and even SIGKILL leave no process and no file, while booting and while running"""
    before = set(os.listdir(tempfile.gettempdir()))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        for ready in (False, True):
            process = subprocess.Popen([PROGRAM, "run", "-q", "--via", "vm", "--", "sh", "-c", "echo up; sleep 1000"],
                                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            if ready:
                process.stdout.readline()
            else:
                time.sleep(3)
            below = descendants(process.pid)
            expect(below, "a machine is running")
            process.send_signal(number)
            status = process.wait(10)
            process.stdout.close()
            wanted = -9 if number == signal.SIGKILL else 128 + number
            expect(status == wanted, f"status {wanted} after {number.name}, not {status}")
            time.sleep(0.5)
            expect(not any(map(alive, below)), f"no process is left after {number.name}")
    left = {name for name in set(os.listdir(tempfile.gettempdir())) - before if "soft" in name or "qemu" in name}
    expect(not left, "no file is left", str(left))


@test
def failing_boot():
    """a machine that does not come up is reported at once with its console, status 125"""
    boot = machine_boot()._replace(initrd="/etc/hosts")  # no init, no root: the kernel panics
    broken = machine.Machine(Job(["true"]), boot, "tcg", memory=512)
    status = machine.supervise(lambda: [broken], 300.0, quiet=True)
    machine.catch_signals()
    expect(status == 125, f"status 125, not {status}")
    expect(any("panic" in line for line in broken.console), "the panic", "\n".join(broken.console))


@test
def two_at_once():
    """two runs at once do not disturb each other"""
    processes = [subprocess.Popen([PROGRAM, "run", "-q", "--via", "vm", "--", "bash", "-c",
                                   f"ibv_rc_pingpong -d rxe0 -g 1 -n 100 >/dev/null & soft-roce-wait 18515;"
                                   f"ibv_rc_pingpong -d rxe0 -g 1 -n 100 10.0.0.1 && exit {status}"],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) for status in (11, 12)]
    statuses_seen = [process.wait(300) for process in processes]
    expect(statuses_seen == [11, 12], "status 11 and 12", str(statuses_seen))


@test
def breakage():
    """with --hcas 2: traffic between the HCAs crosses a wire that tc netem and link down can break"""
    want(script("""set -e
        busybox=/run/soft-roce/bin/busybox
        measure() {
            ibv_rc_pingpong -d rxe0 -g 1 -n "$1" >/dev/null & soft-roce-wait 18515
            ibv_rc_pingpong -d rxe1 -g 1 -n "$1" 10.0.0.1 | sed -n "s,.* = ,,p" | tail -n 1; wait $!
        }
        echo "plain $(measure 100)"
        tc qdisc add dev d1 root netem delay 20ms
        echo "slow $(measure 20)"
        tc qdisc replace dev d1 root netem loss 100%
        (sleep 2; tc qdisc del dev d1 root) &
        began=$(date +%s%N)
        timeout 30 bash -c "$(declare -f measure); measure 20" >/dev/null
        echo "outage $(( ($(date +%s%N) - began) / 1000000 ))"
        tc qdisc add dev d0 clsact
        tc filter add dev d0 ingress matchall action drop
        tc qdisc del dev d0 clsact
        ip link set d0 down; sleep 0.5
        ibv_devinfo -d rxe0 | grep state
        ip link set d0 up; sleep 1
        ibv_devinfo -d rxe0 | grep state""", options=["--hcas", "2"]), 0,
         r"(?m)^slow (2|3|4)\d{4}(\.\d+)? usec", r"(?m)^outage [1-9]\d{3}$", r"(?s)PORT_DOWN.*PORT_ACTIVE")


# --- two machines -----------------------------------------------------------------------

@test
def pair():
    """two machines: pingpong, read and atomic across the wire"""
    server = "set -e; ibv_rc_pingpong -d rxe0 -g 1 -n 100; for t in ib_read_lat ib_atomic_lat; do $t -d rxe0 -x 1 -n 300; done"
    client = """set -e
        soft-roce-wait 18515; ibv_rc_pingpong -d rxe0 -g 1 -n 100 $SOFT_ROCE_PEER
        for t in ib_read_lat ib_atomic_lat; do sleep 1; soft-roce-wait 18515; $t -d rxe0 -x 1 -n 300 $SOFT_ROCE_PEER; done"""
    result = want(call("pair", "--", server, client), 0, r"(?m)^b\| 100 iters in", r"(?m)^b\|  2 +300 ", r"(?m)^b\|  8 +300 ")
    figures = re.findall(r"(?m)^b\|  [28] +300 +\S+ +\S+ +(\S+)", result.out)
    return f"typical: read {figures[0]} us, atomic {figures[1]} us"


@test
def pair_statuses():
    """two machines: own names and addresses, the first failure is the status"""
    result = want(call("pair", "--", "hostname; echo $SOFT_ROCE_ADDR $SOFT_ROCE_PEER; sleep 3; exit 5",
                       "hostname; echo $SOFT_ROCE_ADDR $SOFT_ROCE_PEER; getent hosts a; exit 4"), 4,
                  r"(?m)^a\| a\na\| 10.0.0.1 10.0.0.2$", r"(?m)^b\| 10.0.0.2 10.0.0.1$")
    expect("a: the command ended with status 5" in result.err, "the other status in words", str(result))


@test
def pair_without_hca():
    """two machines: --no-hca b leaves b its network and no HCA; --until b ends a"""
    want(call("pair", "--no-hca", "b", "--until", "b", "--", "ibv_devices; sleep 1000",
              "ibv_devices; ls /sys/class/infiniband; soft-roce-wait 4790 && echo network"), 0,
         r"(?m)^a\| +rxe0", r"(?m)^b\| network")


@test
def pair_power_cut():
    """two machines: soft-roce-off cuts one off in the midst of its work"""
    want(call("pair", "--", "soft-roce-off 0; sleep 1000", """
        sleep 3; /run/soft-roce/bin/busybox ping -c 1 -W 2 10.0.0.1 && exit 1; echo gone"""), 0, r"(?m)^b\| gone")


# --- the host's own -----------------------------------------------------------------------

@test
def own_rdma_rxe():
    """a host that has rdma_rxe uses it in namespaces; here the host is itself a machine"""
    want(script("""
        "$0" run -q --no-install --via host --out /tmp/o -- sh -c '
            ibv_rc_pingpong -d $SOFT_ROCE_DEVICE -g 1 -n 50 >/dev/null & soft-roce-wait 18515
            ibv_rc_pingpong -d $SOFT_ROCE_DEVICE -g 1 -n 50 10.0.0.1 >"$OUT/file"; echo x >/etc/written; exit 6'
        echo "status $?"; cat /tmp/o/file; [ -e /etc/written ] || echo clean
        "$0" run -q --no-install --via host --timeout 10 -- sleep 1000; echo "status $?"
        sleep 3; ls /sys/class/infiniband""".replace('"$0"', f'"{PROGRAM}"')), 0,
         "status 6", "50 iters in", "(?m)^clean$", "status 124\nrxe0\n$")


@test
def hanging_kvm():
    """a KVM that does not answer counts as none, and is remembered"""
    boot = machine_boot()
    with tempfile.TemporaryDirectory() as directory:
        # The trial's qemu is one that hangs; the limit is short.
        fake = os.path.join(directory, "qemu-system-x86_64")
        with open(fake, "w") as handle:
            handle.write("#!/bin/sh\nexec sleep 1000\n")
        os.chmod(fake, 0o755)
        path = host.BIN
        host.BIN = directory + os.pathsep + path
        try:
            began = time.monotonic()
            answer = machine.trial(boot, Job(["true"]), limit=3.0)
            took = time.monotonic() - began
        finally:
            host.BIN = path
        expect(answer is False and took < 6, "no after 3 s", f"{answer} {took:.1f}")


machine_boot = None


def main(options, prepare):
    global machine_boot
    try:
        host.ensure([*host.VM_PROGRAMS, "ibv_rc_pingpong", "ib_read_lat", "ib_atomic_lat"], not options.no_install)
        boot = prepare(options)
    except Failure as failure:
        print(f"selftest: {failure}\n0 passed, 1 failed")
        return 1
    machine_boot = lambda: boot  # noqa: E731
    passed = failed = 0
    for function in TESTS:
        if options.only and options.only not in function.__name__:
            continue
        name = f"{function.__name__}: {function.__doc__}"
        began = time.monotonic()
        try:
            note = function()
            passed += 1
            print(f"ok   {name} ({time.monotonic() - began:.1f} s{'; ' + note if note else ''})", flush=True)
        except (AssertionError, subprocess.TimeoutExpired, OSError, Failure) as error:
            failed += 1
            print(f"FAIL {name} ({time.monotonic() - began:.1f} s)", flush=True)
            print("\n".join(f"     {line}" for line in str(error).splitlines()), flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.stdout.flush()
    return 1 if failed or not passed else 0
