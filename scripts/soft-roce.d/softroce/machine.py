"""Virtual machines and their supervision.

A machine leaves no trace on the host: its serial ports and the wire between
two machines are socket pairs, its console is kept in memory, and qemu dies
with this process (PR_SET_PDEATHSIG), also when this process is killed.
"""

import collections
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

from . import host
from .host import Failure, STATUS_FAILED, STATUS_TIMEOUT, say

# Seconds until the machines must be ready, for each attempt. 5 to 10 are normal
# under emulation, 40 were seen on a host with four times more work than
# processors; a boot that takes longer than the first limit has stopped.
BOOT_LIMITS = (100.0, 200.0)
AFTER_FAILURE = 10.0  # seconds that one machine may go on after the other has failed
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


class Interrupted(BaseException):
    """A signal asks this program to end."""

    def __init__(self, number):
        super().__init__()
        self.number = number


def catch_signals():
    def interrupt(number, _frame):
        raise Interrupted(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, interrupt)


def die_with_parent(parent):
    def prepare():
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    return prepare


def same_file(first, second):
    try:
        one, two = os.fstat(first), os.fstat(second)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)


class Machine:
    """One qemu process and what it has said so far."""

    def __init__(self, job, boot, accel, memory=2048, cpus=2, verbose=False, wire=None, mac=1, merge=False):
        self.job = job
        self.boot = boot
        self.accel = accel
        self.memory = memory
        self.cpus = cpus
        self.verbose = verbose
        self.wire = wire
        self.mac = mac
        self.merge = merge
        self.process = None
        self.ports = {}
        self.console = collections.deque(maxlen=40)
        self.console_rest = b""
        self.control_rest = b""
        self.to_control = job.text(merge)
        self.ready = None  # the machine's own seconds from kernel start
        self.status = None  # of the command
        self.why = None  # it did not work
        self.takes_input = False

    def arguments(self, files):
        job = self.job
        kvm = self.accel == "kvm"
        words = ["console=ttyS0", "panic=-1", "mitigations=off", "random.trust_cpu=on",
                 "audit=0", "rcupdate.rcu_expedited=1", f"soft_roce.job={len(self.to_control)}"]
        words += [] if self.verbose else ["quiet"]
        words += [] if kvm else ["tsc=reliable", "nowatchdog"]
        arguments = [
            host.find("qemu-system-x86_64"), "-name", f"soft-roce-{job.name}",
            "-machine", "pc,usb=off,vmport=off,hpet=on", "-nodefaults", "-display", "none", "-no-reboot", "-no-user-config",
            *(["-accel", "kvm", "-cpu", "host"] if kvm else ["-accel", "tcg,thread=multi", "-cpu", "max"]),
            "-smp", str(self.cpus), "-m", str(self.memory),
            "-kernel", self.boot.kernel, "-initrd", self.boot.initrd, "-append", " ".join(words),
            "-device", "virtio-serial-pci,id=ports,max_ports=8",
        ]
        for name, descriptor in files.items():
            if name == "wire":
                continue
            arguments += ["-chardev", f"socket,id={name},fd={descriptor}"]
            if name == "console":
                arguments += ["-serial", "chardev:console"]
            elif name == "terminal":
                arguments += ["-device", "virtconsole,bus=ports.0,chardev=terminal"]
            else:
                arguments += ["-device", f"virtserialport,bus=ports.0,chardev={name},name=soft-roce.{name}"]
        arguments += ["-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
                      "-device", "virtio-9p-pci,fsdev=host,mount_tag=host"]
        if job.out:
            arguments += ["-fsdev", f"local,id=out,path={job.out.replace(',', ',,')},security_model=none,multidevs=remap",
                          "-device", "virtio-9p-pci,fsdev=out,mount_tag=out"]
        if self.wire:
            arguments += ["-netdev", f"socket,id=wire,fd={files['wire']}", "-device",
                          f"virtio-net-pci,netdev=wire,mac=52:54:00:00:00:{self.mac:02x},romfile="]
        return arguments

    def start(self):
        names = ["console"]
        if self.job.terminal:
            names.append("terminal")
        names += ["ctl", "out", "err"]
        if self.job.stdin:
            names.append("in")
        theirs = {}
        for name in names:
            ours, other = socket.socketpair()
            ours.setblocking(False)
            self.ports[name] = ours
            theirs[name] = other
        if self.wire:
            theirs["wire"] = self.wire
        files = {name: port.fileno() for name, port in theirs.items()}
        self.process = subprocess.Popen(
            self.arguments(files), stdin=subprocess.DEVNULL, stdout=theirs["console"], stderr=theirs["console"],
            pass_fds=list(files.values()), start_new_session=True, preexec_fn=die_with_parent(os.getpid()))
        for port in theirs.values():
            port.close()

    def stop(self):
        if self.process and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for port in self.ports.values():
            port.close()
        self.ports = {}

    @property
    def done(self):
        return self.status is not None or self.why is not None

    def hear_console(self, data):
        lines = (self.console_rest + data).split(b"\n")
        self.console_rest = lines.pop()
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                self.console.append(text)
                if self.verbose:
                    print(f"[{self.job.name}] {text}", file=sys.stderr, flush=True)

    def hear_control(self, data):
        lines = (self.control_rest + data).split(b"\n")
        self.control_rest = lines.pop()
        for line in lines:
            word, _, rest = line.decode("utf-8", "replace").strip().partition(" ")
            if self.done:
                continue
            if word == "ready":
                self.ready = float(rest)
            elif word == "exit" and rest.isdigit():
                self.status = int(rest)
            elif word == "fail":
                self.why = rest
            elif word == "input":
                self.takes_input = True

    def report(self):
        """What the console said, for a machine that did not work."""
        for text in list(self.console)[-15:] + ([self.console_rest.decode("utf-8", "replace")] if self.console_rest else []):
            print(f"[{self.job.name} console] {text}", file=sys.stderr, flush=True)


class Output:
    """Passes on what the machines write; with prefixes, only whole lines."""

    def __init__(self, prefixes):
        self.prefixes = prefixes
        self.rest = collections.defaultdict(bytes)
        self.broken = False

    def write(self, machine, name, data):
        prefix = self.prefixes and f"{machine.job.name}| ".encode()
        if prefix:
            lines = (self.rest[machine.job.name, name] + data).split(b"\n")
            self.rest[machine.job.name, name] = lines.pop()
            data = b"".join(prefix + line + b"\n" for line in lines)
        self.raw(2 if name == "err" else 1, data)

    def raw(self, descriptor, data):
        while data and not self.broken:
            try:
                data = data[os.write(descriptor, data):]
            except BlockingIOError:
                time.sleep(0.01)
            except BrokenPipeError:
                self.broken = True

    def finish(self):
        for (machine, name), data in self.rest.items():
            if data:
                self.raw(2 if name == "err" else 1, f"{machine}| ".encode() + data + b"\n")


class Supervisor:
    """Runs machines to their end and tells the status of the whole."""

    def __init__(self, machines, timeout=None, until=None, boot_limit=BOOT_LIMITS[-1], quiet=False, prefixes=False,
                 on_go=None):
        self.machines = machines
        self.timeout = timeout
        self.until = until  # the name of the machine whose end ends everything
        self.boot_limit = boot_limit
        self.quiet = quiet
        self.on_go = on_go  # called when the commands start
        self.output = Output(prefixes)
        self.selector = selectors.PollSelector()  # epoll would refuse a file as input
        self.input = None  # the machine and the port that take standard input
        self.input_ended = False
        self.pending = b""
        self.started = None
        self.went = None
        self.first_failure = None
        self.boot_stopped = False
        self.stop_at = None

    def run(self):
        self.started = time.monotonic()
        try:
            for machine in self.machines:
                machine.start()
                for name, port in machine.ports.items():
                    if name != "in":
                        self.selector.register(port, selectors.EVENT_READ, (machine, name))
                self.want_to_write(machine)
            self.connect_input()
            while not self.finished():
                self.step()
            for machine in self.machines:
                self.drain(machine)
            return self.result()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)
            for machine in self.machines:
                machine.stop()
            self.output.finish()
            self.selector.close()

    # -- input ---------------------------------------------------------------

    def connect_input(self):
        for machine in self.machines:
            if machine.job.stdin or machine.job.terminal:
                self.input = (machine, machine.ports["terminal" if machine.job.terminal else "in"])

    # Standard input is read only when the port has taken what came before.

    def watch_input(self):
        """Waits for the caller's input, or for the port to take what is pending."""
        machine, port = self.input
        reads = selectors.EVENT_READ if machine.job.terminal else 0
        name = "terminal" if machine.job.terminal else "in"
        self.watch(port, reads | (selectors.EVENT_WRITE if self.pending else 0), (machine, name))
        waiting = not self.pending and not self.input_ended
        self.watch(0, selectors.EVENT_READ if waiting else 0, (machine, "stdin"))

    def watch(self, file, events, data):
        known = file in self.selector.get_map()
        if known and not events:
            self.selector.unregister(file)
        elif known:
            self.selector.modify(file, events, data)
        elif events:
            self.selector.register(file, events, data)

    def read_input(self):
        try:
            self.pending = os.read(0, 16384)
        except OSError:
            self.pending = b""
        if not self.pending:
            self.input_ended = True
            machine, port = self.input
            if not machine.job.terminal:
                # Not close: qemu would drop what it has not read yet.
                port.shutdown(socket.SHUT_WR)
        self.watch_input()

    def write_input(self):
        try:
            self.pending = self.pending[self.input[1].send(self.pending):]
        except BlockingIOError:
            pass
        except OSError:
            self.pending = b""
            self.input_ended = True
        self.watch_input()

    # -- the loop ------------------------------------------------------------

    def want_to_write(self, machine):
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if machine.to_control else 0)
        self.selector.modify(machine.ports["ctl"], events, (machine, "ctl"))

    def deadlines(self):
        if self.timeout:
            yield self.started + self.timeout
        if self.went is None:
            yield self.started + self.boot_limit
        if self.stop_at:
            yield self.stop_at

    def step(self):
        wait = max(0.0, min(self.deadlines(), default=time.monotonic() + 3600) - time.monotonic())
        for key, events in self.selector.select(wait):
            machine, name = key.data
            if name == "stdin":
                self.read_input()
                continue
            if events & selectors.EVENT_WRITE and name != "ctl":
                self.write_input()
            elif events & selectors.EVENT_WRITE:
                try:
                    machine.to_control = machine.to_control[machine.ports["ctl"].send(machine.to_control):]
                except BlockingIOError:
                    pass
                except OSError:
                    machine.to_control = b""
                self.want_to_write(machine)
            if events & selectors.EVENT_READ and not self.receive(machine, name):
                self.selector.unregister(key.fileobj)
                if name == "ctl":
                    self.ended(machine)
        self.check_time()
        if self.went is None and all(machine.ready is not None for machine in self.machines):
            self.go()

    def receive(self, machine, name):
        """Takes what one port has; False at its end."""
        try:
            data = machine.ports[name].recv(65536)
        except BlockingIOError:
            return True
        except (OSError, KeyError):
            return False
        if name == "console":
            machine.hear_console(data)
        elif name == "ctl":
            before = machine.done
            waited_for_input = not machine.takes_input
            machine.hear_control(data)
            if machine.takes_input and waited_for_input:
                self.watch_input()
            if machine.done and not before:
                self.note_end(machine)
        else:
            self.output.write(machine, name, data)
        return bool(data)

    def drain(self, machine):
        """What the command wrote before its end is in the sockets already."""
        for name in ("out", "err", "terminal", "console"):
            port = machine.ports.get(name)
            while port:
                try:
                    data = port.recv(65536)
                except OSError:
                    break
                if not data:
                    break
                if name == "console":
                    machine.hear_console(data)
                else:
                    self.output.write(machine, name, data)

    def ended(self, machine):
        if not machine.done:
            machine.process.wait()
            self.drain(machine)
            machine.why = f"the machine ended by itself (qemu: status {machine.process.returncode})"
            self.note_end(machine)

    def note_end(self, machine):
        failed = machine.why is not None or machine.status != 0
        if failed and self.first_failure is None:
            self.first_failure = machine
            self.stop_at = time.monotonic() + AFTER_FAILURE

    def go(self):
        self.went = time.monotonic()
        if not self.quiet:
            accel = self.machines[0].accel
            say(f"ready after {self.went - self.started:.1f} s ({accel}, Linux {self.machines[0].boot.version.split('_')[0]})")
        for machine in self.machines:
            machine.to_control = b"go\n"
            self.want_to_write(machine)
        if self.on_go:
            self.on_go()
        if self.machines[0].job.terminal:
            self.watch_input()

    def check_time(self):
        now = time.monotonic()
        if self.timeout and now >= self.started + self.timeout:
            raise TimeoutError
        if self.went is None and now >= self.started + self.boot_limit:
            for machine in self.machines:
                if machine.ready is None and not machine.why:
                    machine.why = f"not ready within {self.boot_limit:.0f} s"
                    self.boot_stopped = True
                    self.note_end(machine)

    def finished(self):
        if self.output.broken:
            return True
        if self.until and any(machine.done for machine in self.machines if machine.job.name == self.until):
            return True
        if any(machine.why for machine in self.machines) and self.went is None:
            return True
        if self.stop_at and time.monotonic() >= self.stop_at:
            return True
        return all(machine.done for machine in self.machines)

    def result(self):
        if self.output.broken:
            return 128 + signal.SIGPIPE
        for machine in self.machines:
            if machine.why:
                say(f"machine {machine.job.name}: {machine.why}")
                machine.report()
            elif not machine.done:
                if not self.until:
                    say(f"{machine.job.name}: stopped, since the other machine's command had failed")
            elif len(self.machines) > 1 and machine.status:
                say(f"{machine.job.name}: the command ended with status {machine.status}")
        if self.first_failure is None:
            return 0
        return STATUS_FAILED if self.first_failure.why else self.first_failure.status


def supervise(make_machines, timeout=None, **options):
    """Runs machines; every way out leaves no process behind.

    A boot that stops is tried once more: it says nothing about the command,
    which has not begun.
    """
    began = time.monotonic()
    for boot_limit in BOOT_LIMITS:
        machines = make_machines()
        left = timeout and max(0.1, timeout - (time.monotonic() - began))
        supervisor = Supervisor(machines, left, boot_limit=boot_limit, **options)
        try:
            status = supervisor.run()
        except TimeoutError:
            say(f"time limit of {timeout:g} s reached: stopped")
            for machine in machines:
                machine.report()
            return STATUS_TIMEOUT
        if not supervisor.boot_stopped or boot_limit == BOOT_LIMITS[-1]:
            return status
        say("the boot stopped; trying once more")
        catch_signals()
    return STATUS_FAILED


# --- KVM ----------------------------------------------------------------------------

def kvm_claim():
    """Why KVM cannot be used, from what can be read; None if it may work."""
    with open("/proc/cpuinfo") as handle:
        flags = handle.read()
    if " vmx" not in flags and " svm" not in flags:
        return "this processor shows neither vmx nor svm"
    if not os.path.exists("/dev/kvm"):
        return "no /dev/kvm"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "no permission for /dev/kvm (join the group kvm)"
    return None


def choose_accel(wanted, boot, make_job, fresh=False):
    """kvm or tcg, and why. A trial boot decides, and is remembered until the next boot of the host."""
    if wanted != "auto":
        return wanted, "asked for"
    reason = kvm_claim()
    if reason:
        return "tcg", reason
    memory = os.path.join(host.cache_directory(), f"kvm-{host.boot_id()}")
    if not fresh and os.path.exists(memory):
        with open(memory) as handle:
            answer = handle.read().strip()
    else:
        with host.cache_lock():
            for name in os.listdir(host.cache_directory()):
                if name.startswith("kvm-"):
                    os.unlink(os.path.join(host.cache_directory(), name))
            answer = "ok" if trial(boot, make_job()) else "a trial boot did not answer"
            host.replace_file(memory, answer + "\n")
    return ("kvm", "a trial boot answered") if answer == "ok" else ("tcg", answer)


def trial(boot, job, limit=30.0):
    machine = Machine(job, boot, "kvm", memory=512, cpus=1)
    supervisor = Supervisor([machine], boot_limit=limit, timeout=limit, quiet=True)
    supervisor.result = lambda: 0 if machine.status == 0 else STATUS_FAILED
    try:
        return supervisor.run() == 0
    except (TimeoutError, OSError, Failure):
        return False
    finally:
        catch_signals()
