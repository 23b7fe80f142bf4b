"""The command line."""

import argparse
import os
import shutil
import signal
import sys

from . import boot as booting
from . import host, machine, native
from .host import Failure, STATUS_FAILED, say
from .job import Job

DESCRIPTION = """\
Runs a command where there is a soft-RoCE HCA: in a virtual machine with a real
kernel and this host's own file tree (read-only, with a writable overlay that
is thrown away), or with the host's own rdma_rxe where it has one.
"""
EPILOG = """\
The exit status is the command's own; 124: the time limit was reached; 125:
soft-roce itself failed; 126 and 127: the command cannot be run, is not found;
128 + N: ended by signal N. See docs/soft-roce.md.
"""


def seconds(text):
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def megabytes(text):
    value = int(text)
    if value < 256:  # with less the kernel stops without a word
        raise argparse.ArgumentTypeError("must be at least 256")
    return value


def processors(text):
    value = int(text)
    if not 1 <= value <= 255:  # as many as the emulated machine can have
        raise argparse.ArgumentTypeError("must be from 1 to 255")
    return value


def assignment(text):
    if "=" not in text or text.startswith("="):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    return text


def parser():
    top = argparse.ArgumentParser(prog="soft-roce", description=DESCRIPTION, epilog=EPILOG,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    raw = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": EPILOG}

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--mem", type=megabytes, default=None, metavar="MB", help="memory of a machine (2048; pair: 1536 each)")
    common.add_argument("--smp", type=processors, default=None, metavar="N", help="processors of a machine (2; pair: 1 each)")
    common.add_argument("--accel", choices=["auto", "kvm", "tcg"], default=os.environ.get("SOFT_ROCE_ACCEL", "auto"),
                        help="how to run the machine (auto: KVM where a trial boot answers)")
    common.add_argument("--kernel", metavar="DIR", default=os.environ.get("SOFT_ROCE_KERNEL") or None,
                        help="a kernel unpacked below DIR instead of the distribution's")
    common.add_argument("--no-install", action="store_true", help="install nothing, only say what is missing")
    common.add_argument("-v", "--verbose", action="store_true", help="show the machine's console")
    common.add_argument("-q", "--quiet", action="store_true", help="no line when the machine is ready")

    task = argparse.ArgumentParser(add_help=False)
    task.add_argument("--timeout", type=seconds, default=None, metavar="S",
                      help="hard limit for the whole run, boot included (600; shell: none)")
    task.add_argument("--env", action="append", default=[], type=assignment, metavar="NAME=VALUE",
                      help="set a variable for the command (may be repeated)")
    task.add_argument("--clean-env", action="store_true",
                      help="pass on only PATH, HOME, LANG and TERM of the caller's environment")
    task.add_argument("--out", metavar="DIR", help="the command finds DIR, made if missing, as $OUT: what it writes there stays")

    single = argparse.ArgumentParser(add_help=False)
    single.add_argument("--via", choices=["auto", "vm", "host"], default=os.environ.get("SOFT_ROCE_VIA", "auto"),
                        help="a virtual machine, or the host's own rdma_rxe (auto: the host's where it works)")
    single.add_argument("--hcas", type=int, choices=[0, 1, 2], default=1,
                        help="rxe0 on d0; 2: also rxe1 on d1, with a wire between them; 0: none")

    run = verbs.add_parser("run", parents=[common, task, single], help="run one command", **raw)
    run.add_argument("--stdin", action="store_true", help="pass standard input on (else it is empty)")
    run.add_argument("command", nargs="+", metavar="CMD", help="the command and its arguments, after --")

    pair = verbs.add_parser("pair", parents=[common, task], help="two machines with a wire between them",
                            description="Runs one shell command on each of two machines, a and b, with a wire between them.", **raw)
    pair.add_argument("--no-hca", choices=["a", "b"], help="this machine gets no HCA, only the network")
    pair.add_argument("--until", choices=["a", "b"], help="when this machine's command ends, the other is stopped")
    pair.add_argument("--no-prefix", action="store_true", help="do not begin each line of output with 'a| ' or 'b| '")
    pair.add_argument("command_a", metavar="CMD_A")
    pair.add_argument("command_b", metavar="CMD_B")

    verbs.add_parser("shell", parents=[common, task, single], help="an interactive shell on a machine", **raw)
    verbs.add_parser("prepare", parents=[common], help="install, download and build what a machine needs, boot nothing")
    verbs.add_parser("doctor", parents=[common], help="say what this host can do and what is missing")
    selftest = verbs.add_parser("selftest", parents=[common], help="test soft-roce itself on this host")
    selftest.add_argument("--only", metavar="WORD", help="only the tests with WORD in their name")
    verbs.add_parser("clean", help="delete the cache")
    return top


def make_out(path):
    if path:
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise Failure(f"--out {path}: {error.strerror}") from error
        if os.path.realpath(path) == "/":
            raise Failure("--out /: choose another directory")
    return path


def job_options(options):
    return {"environment": options.env, "clean": options.clean_env, "out": make_out(options.out)}


def prepare(options):
    install = not options.no_install
    host.ensure(host.VM_PROGRAMS, install)
    return booting.prepare(options.kernel, install)


def shares_output():
    return machine.same_file(1, 2)


def choose_host(options, job):
    """True: with the host's own rdma_rxe; False: in a virtual machine."""
    if options.via == "vm" or (options.via == "auto" and (options.kernel or job.hcas != 1)):
        return False
    host.ensure(["ip", "rdma", "ibv_devinfo", "unshare"], not options.no_install)
    trial = Job(["true"], hcas=job.hcas)
    reason = native.usable(trial)
    if reason and options.via == "host":
        raise Failure(f"the host's own rdma_rxe cannot be used: {reason}")
    return not reason


def run_single(options, job, timeout):
    # Most hosts have no rdma_rxe, which is quick to see.
    if choose_host(options, job):
        return native.run(job, timeout)
    boot = prepare(options)
    accel, _ = machine.choose_accel(options.accel, boot, lambda: Job(["true"]))

    def make():
        return [machine.Machine(job, boot, accel, options.mem or 2048, options.smp or 2, options.verbose, merge=shares_output())]
    return machine.supervise(make, timeout, quiet=options.quiet)


def run(options):
    job = Job(options.command, hcas=options.hcas, stdin=options.stdin, **job_options(options))
    return run_single(options, job, options.timeout or 600.0)


def shell(options):
    if not (os.isatty(0) and os.isatty(1)):
        raise Failure("shell needs a terminal; use: soft-roce run --stdin -- sh")
    import termios
    import tty
    size = shutil.get_terminal_size()
    job = Job([os.environ.get("SHELL", "/bin/sh")], hcas=options.hcas, terminal=(size.lines, size.columns), **job_options(options))
    if choose_host(options, job):
        return native.run(job, options.timeout)
    before = termios.tcgetattr(0)
    boot = prepare(options)
    accel, _ = machine.choose_accel(options.accel, boot, lambda: Job(["true"]))


    def make():
        return [machine.Machine(job, boot, accel, options.mem or 2048, options.smp or 2, options.verbose)]
    try:
        return machine.supervise(make, options.timeout, quiet=options.quiet, on_go=lambda: tty.setraw(0))
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def pair(options):
    boot = prepare(options)
    accel, _ = machine.choose_accel(options.accel, boot, lambda: Job(["true"]))
    return machine.supervise(lambda: pair_machines(options, boot, accel), options.timeout or 600.0, until=options.until,
                             quiet=options.quiet, prefixes=not options.no_prefix)


def pair_machines(options, boot, accel):
    import socket
    ends = socket.socketpair()
    ends_of = {"a": ("10.0.0.1", "fd00::1"), "b": ("10.0.0.2", "fd00::2")}
    shell_path = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
    machines = []
    for number, (name, command) in enumerate((("a", options.command_a), ("b", options.command_b))):
        other = "b" if name == "a" else "a"
        job = Job([shell_path, "-c", command], name=name, hcas=0 if options.no_hca == name else 1,
                  peer=(other, *ends_of[other]), address=ends_of[name][0], address6=ends_of[name][1], **job_options(options))
        machines.append(machine.Machine(job, boot, accel, options.mem or 1536, options.smp or 1, options.verbose,
                                        wire=ends[number], mac=number + 1, merge=shares_output()))
    return machines


def doctor(options):
    problems = 0

    def line(good, what, detail=""):
        nonlocal problems
        problems += good is False
        print(f"{'ok  ' if good else 'no  ' if good is False else '    '} {what}{': ' + detail if detail else ''}")

    missing = host.missing_programs(host.VM_PROGRAMS)
    line(not missing, "programs", "all found" if not missing else f"missing {', '.join(missing)}; packages: " +
         " ".join(sorted({host.PACKAGES[name] for name in missing} | {host.DRIVERS})))
    line(host.has_apt() or None, "apt", "kernel, busybox and missing programs come from it" if host.has_apt()
         else "not here: install programs by hand, pass --kernel DIR")
    line(host.as_root() is not None or None, "root", "may install" if host.as_root() is not None else "cannot install anything")
    reason = native.unusable() or native.usable(Job(["true"]))
    line(None if reason else True, "the host's own rdma_rxe", reason or "works, and is used")
    reason = machine.kvm_claim()
    line(None if reason else True, "KVM", reason or "shown; a trial boot decides")
    try:
        if missing:
            raise Failure("not tried, programs are missing")
        boot = booting.prepare(options.kernel, not options.no_install)
        line(True, "kernel", boot.version)
        accel, why = machine.choose_accel(options.accel, boot, lambda: Job(["true"]), fresh=True)
        line(True, "machines run with", f"{accel} ({why})")
        sys.stdout.flush()
        status = machine.supervise(lambda: [machine.Machine(
            Job(["ibv_devinfo", "-d", "rxe0"]), boot, accel, options.mem or 2048, options.smp or 2, options.verbose)], 300.0)
        line(status == 0, "a machine boots and shows its HCA", f"status {status}")
    except Failure as failure:
        line(False, "a machine", str(failure))
    line(None, "cache", host.cache_directory())
    return 1 if problems else 0


def selftest(options):
    from . import selftest as tests
    return tests.main(options, prepare)


def open_standard_files():
    """A caller may have closed some; a socket must not take their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def main(arguments):
    open_standard_files()
    options = parser().parse_args(arguments)
    machine.catch_signals()
    verbs = {"run": run, "pair": pair, "shell": shell, "doctor": doctor, "selftest": selftest,
             "prepare": lambda options: print(prepare(options).version) or 0,
             "clean": lambda options: shutil.rmtree(host.cache_directory()) or 0}
    try:
        return verbs[options.verb](options)
    except Failure as failure:
        say(str(failure))
        return STATUS_FAILED
    except machine.Interrupted as interrupted:
        say(f"ended by {signal.Signals(interrupted.number).name}")
        return 128 + interrupted.number
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
