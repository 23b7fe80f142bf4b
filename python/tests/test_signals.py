"""Ctrl-C ends a wait, and other signals do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from conftest import stop

# What is waited for, and whether it is parked in the server as a wait.
WAITS = {
    "an event": ("client.events('e', 1)[0].wait()", True),
    "an event with a time": ("client.events('e', 1)[0].wait(60)", True),
    "transitions": ("client.events('e', 1)[0].wait_after(0)", True),
    "many events": ("client.events('many', 8).wait_all()", True),
    "a counter": ("client.counters('c', 1).counter_at(0).wait_until('>', 5)", True),
    "many counters": ("client.counters('cs', 8).wait_some(3, '>', 5)", True),
    "a message": ("client.slots('s', 1, 8)[0].wait_newer(0)", True),
    "a barrier": ("client.barrier('b', 2).wait()", True),
    "a barrier with an action": ("client.barrier('ba', 2, print).wait()", True),
    "a lock": ("client.lock('held').acquire()", False),
    "a lock in a with": ("client.lock('held').__enter__()", False),
    "a semaphore": ("client.semaphore('none', 0).acquire()", False),
    "a server": ("farcell.connect('127.0.0.1:1', authkey=KEY, wait_for_server=60)", False),
}


@pytest.mark.parametrize("what", WAITS)
def test_ctrl_c_ends_a_wait_promptly(server, client, what):
    call, parked = WAITS[what]
    program = f"""
import sys, farcell
KEY = b"a key for the tests"
client = farcell.connect(sys.argv[1], authkey=KEY)
print("ready", flush=True)
try:
    {call}
except KeyboardInterrupt:
    print("interrupted", flush=True)
    # The session is as good as before.
    event = client.events("after", 1)[0]
    event.set()
    assert event.wait(1)
"""
    held = client.lock("held")
    held.acquire()
    child = subprocess.Popen(
        [sys.executable, "-c", program, server.address], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 10
    while parked and server.parked_waits() == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not parked or server.parked_waits() >= 1
    if not parked:
        time.sleep(0.3)
    begun = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "interrupted\n"
    assert time.monotonic() - begun < 3
    assert child.wait(10) == 0
    deadline = time.monotonic() + 5
    while server.parked_waits() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.parked_waits() == 0
    held.release()
    # What it queued for it has not got.
    assert held.acquire(timeout=5)


def test_a_handler_that_returns_does_not_end_a_wait(client, name):
    event = client.events(name, 1)[0]
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(time.monotonic()))
    try:

        def disturb() -> None:
            for _ in range(3):
                time.sleep(0.15)
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.15)
            event.set()

        thread = threading.Thread(target=disturb)
        thread.start()
        assert event.wait(10) is True
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(seen) == 3


# Operations that wait for nobody, on a server that does not answer.
OPERATIONS = {
    "an event": "event.is_set()",
    "an event that is set": "event.set()",
    "a view": "events.snapshot()",
    "a lock": "client.lock('another').locked()",
    "a list": "client.list()",
    "a new array": "client.counters('new', 4)",
    "a message": "slot.write(b'1')",
    "a message that is read": "slot.read()",
}


@pytest.mark.parametrize("state", ["stopped", "killed"])
@pytest.mark.parametrize("what", OPERATIONS)
def test_ctrl_c_ends_an_operation_without_an_answer(what, state, tmp_path):
    serve = (
        "import farcell, signal\n"
        "server = farcell.serve('127.0.0.1:0', authkey=b'a key for the tests')\n"
        "print(server.address, flush=True)\n"
        "signal.pause()\n"
    )
    program = f"""
import sys, farcell
client = farcell.connect(
    sys.argv[1], authkey=b"a key for the tests", transport="tcp", reconnect_for=60
)
events = client.events("e", 4)
event, slot = events[0], client.slots("s", 1, 8)[0]
slot.write(b"0")
print("ready", flush=True)
sys.stdin.readline()
try:
    print("begins", flush=True)
    {OPERATIONS[what]}
    print("done", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", serve], **pipes)
    child = None
    try:
        address = server.stdout.readline().strip()
        child = subprocess.Popen([sys.executable, "-c", program, address], **pipes)
        assert child.stdout.readline() == "ready\n"
        if state == "stopped":
            stop(server)
        else:
            server.kill()
            server.wait(10)
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "begins\n"
        time.sleep(0.4)
        begun = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
        assert time.monotonic() - begun < 3
    finally:
        server.kill()
        server.wait(10)
        if child is not None:
            child.kill()
            child.wait(10)


def test_an_answer_that_nobody_waits_for_harms_nothing(name):
    """The session goes on where an operation was interrupted before its answer."""
    program = f"""
import sys, farcell
client = farcell.connect(sys.argv[1], authkey=b"a key for the tests", transport="tcp")
counter = client.counters({name!r}, 1).counter_at(0)
counter.add(1)
print("ready", flush=True)
sys.stdin.readline()
try:
    print("begins", flush=True)
    counter.add(1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
print(counter.value, counter.add(1), counter.value, client.is_connected(), flush=True)
"""
    serve = (
        "import farcell, signal\n"
        "server = farcell.serve('127.0.0.1:0', authkey=b'a key for the tests')\n"
        "print(server.address, flush=True)\n"
        "signal.pause()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", serve], **pipes)
    child = None
    try:
        address = server.stdout.readline().strip()
        child = subprocess.Popen([sys.executable, "-c", program, address], **pipes)
        assert child.stdout.readline() == "ready\n"
        stop(server)
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "begins\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "interrupted\n"
        server.send_signal(signal.SIGCONT)
        child.stdin.write("go\n")
        child.stdin.flush()
        # It was sent, and has happened once.
        assert child.stdout.readline() == "2 2 3 True\n"
    finally:
        server.kill()
        server.wait(10)
        if child is not None:
            child.kill()
            child.wait(10)
