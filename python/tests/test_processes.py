"""Handles in other processes: pickled, forked, sent through queues."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

import farcell

KEY = b"a key for the tests"
METHODS = ["spawn", "fork", "forkserver"]


def set_it(event: farcell.Event) -> None:
    event.set()


def set_what_comes(queue: object, done: farcell.Event) -> None:
    for event in iter(queue.get, None):
        event.set()
    done.set()


def grandparent(method: str, event: farcell.Event) -> None:
    child = multiprocessing.get_context(method).Process(target=set_it, args=(event,))
    child.start()
    child.join()


def set_and_return(event: farcell.Event) -> int:
    event.set()
    return os.getpid()


def use_everything(client, events, view, event, counters, counter) -> None:
    assert client.events("other." + events.name, 1)[0].is_set() is False
    assert view == events[1, 1:]
    assert counters.tolist() == [4, 0]
    counters.add(1, 5)
    counter.add(1)
    view.set()
    event.set()


def test_a_pickle_has_neither_address_nor_key(server, client, name):
    events = client.events(name, 2, 3)
    counters = client.counters(name + "c", 4)
    handles = [client, events, events[0], events.flat[1:], events[0, 1], events[[(0, 1)]]]
    handles += [counters, counters[1:], counters.counter_at(2)]
    port = server.address.rpartition(":")[2].encode()
    for handle in handles:
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            data = pickle.dumps(handle, protocol)
            assert KEY not in data and server.address.encode() not in data
            assert port not in data and int(port).to_bytes(2, "little") not in data
            again = pickle.loads(data)
            assert again == handle and type(again) is type(handle)


def test_pickles_that_make_no_sense_are_refused(client, name):
    events = client.events(name, 2, 3)
    make, (origin, array, rows, cols, view) = events.__reduce__()
    for bad in [(9, []), (0, [0, 1]), (1, [7, 0, 1, 3]), (0, [0, 1, 9, 0, 1, 3]), (4, [5, 5]),
                (2, [0, 0, -1, 2]), (3, [0, 1, 2, 0, 1, 3, 0, 1, 7]), (1, [0, 2**62, 2**62, 9])]:
        with pytest.raises(ValueError):
            make(origin, array, rows, cols, bad)


@pytest.mark.parametrize("method", METHODS)
def test_as_arguments_of_a_process(client, name, method):
    events = client.events(name, 2, 3)
    client.events("other." + name, 1)
    counters = client.counters(name + "c", 2)
    counters[0] = 4
    child = multiprocessing.get_context(method).Process(
        target=use_everything,
        args=(client, events, events[1, 1:], events[0][0], counters, counters.counter_at(1)),
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert events.snapshot().tolist() == [[True, False, False], [False, True, True]]
    assert counters.tolist() == [4, 6]


@pytest.mark.parametrize("method", METHODS)
def test_through_a_queue(client, name, method):
    events = client.events(name, 5)
    done = client.events(name + "done", 1)[0]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=set_what_comes, args=(queue, done))
    child.start()
    for event in events:
        queue.put(event)
    queue.put(None)
    assert done.wait(60)
    child.join(60)
    assert events.snapshot().all()


@pytest.mark.parametrize("method", METHODS)
def test_in_a_grandchild(client, name, method):
    event = client.events(name, 1)[0]
    child = multiprocessing.get_context(method).Process(target=grandparent, args=(method, event))
    child.start()
    child.join(60)
    assert event.is_set()


@pytest.mark.parametrize("method", METHODS)
def test_in_pools(client, name, method):
    events = client.events(name, 6)
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        pids = pool.map(set_and_return, list(events[:3]))
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        pids += pool.map(set_and_return, events[3:])
    assert events.snapshot().all()
    assert os.getpid() not in pids


def test_a_child_has_a_session_of_its_own(server, client, name):
    event = client.events(name, 1)[0]
    before = server.sessions()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            event.set()
            os.write(write, str(event.is_set()).encode())
            os.read(read, 1) if False else None
            time.sleep(0.5)
        finally:
            os._exit(0)
    assert os.read(read, 10) == b"True"
    assert server.sessions() == before + 1
    # Meanwhile the parent's connection is the parent's alone.
    for _ in range(50):
        assert event.is_set()
    os.waitpid(child, 0)
    assert event.is_set()


def test_a_child_that_uses_nothing_and_ends_leaves_its_parent_alone(client, name):
    events = client.events(name, 4, 4)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            # Whatever is dropped here was the parent's.
            global_names = list(globals())
            del global_names, events
            os._exit(0)
        os.waitpid(child, 0)
    assert client.is_connected()
    assert events[1][1].is_set() is False
    events[1][1].set()


def test_a_child_keeps_its_own_lease(name):
    with farcell.serve("127.0.0.1:0", authkey=KEY, lease=0.6) as server:
        client = farcell.connect(server.address, authkey=KEY)
        event = client.events(name, 1)[0]
        event.is_set()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            event.set()
            time.sleep(2.0)
            os.write(write, b"x")
            os._exit(0)
        assert event.wait(5)
        deadline = time.monotonic() + 1.5
        least = 2
        while time.monotonic() < deadline:
            least = min(least, server.sessions())
            time.sleep(0.05)
        assert least == 2, "the child's session ended while the child was idle"
        assert os.read(read, 1) == b"x"
        os.waitpid(child, 0)
        client.close()


def test_the_server_sees_its_client_go_though_a_child_lives(name):
    program = """
import os, sys, time
import farcell
client = farcell.connect(sys.argv[1], authkey=b"a key for the tests")
client.events("e", 1)
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""
    with farcell.serve("127.0.0.1:0", authkey=KEY, lease=1.0) as server:
        parent = subprocess.Popen(
            [sys.executable, "-c", program, server.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        child = int(parent.stdout.readline())
        try:
            assert server.sessions() == 1
            parent.kill()
            parent.wait()
            deadline = time.monotonic() + 5
            while server.sessions() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert server.sessions() == 0
        finally:
            os.kill(child, signal.SIGKILL)


def test_clients_see_the_server_go_though_its_child_lives(name):
    program = """
import os, sys, time
import farcell
server = farcell.serve("127.0.0.1:0", authkey=b"a key for the tests")
print(server.address, flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    time.sleep(30)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    address = parent.stdout.readline().strip()
    client = farcell.connect(address, authkey=KEY, reconnect_for=0.5)
    event = client.events(name, 1)[0]
    parent.stdin.write("go\n")
    parent.stdin.flush()
    child = int(parent.stdout.readline())
    try:
        event.set()
        parent.kill()
        parent.wait()
        begun = time.monotonic()
        # In shared memory it takes a moment until the client has noticed.
        with pytest.raises(farcell.Unreachable):
            while time.monotonic() - begun < 5:
                event.is_set()
        with pytest.raises(farcell.Unreachable):
            farcell.connect(address, authkey=KEY)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_key_set_for_multiprocessing_is_used(name):
    program = """
import multiprocessing, sys
import farcell

def child(event):
    assert multiprocessing.current_process().authkey == b"set by the user"
    farcell.connect(sys.argv[1]).events("other", 1)[0].set()
    event.set()

if __name__ == "__main__":
    multiprocessing.current_process().authkey = b"set by the user"
    server = farcell.serve("127.0.0.1:0")
    sys.argv.append(server.address)
    client = farcell.connect(server.address)
    event = client.events("e", 1)[0]
    for method in ["spawn", "fork", "forkserver"]:
        event.clear()
        p = multiprocessing.get_context(method).Process(target=child, args=(event,))
        p.start()
        p.join()
        assert p.exitcode == 0 and event.is_set()
    assert client.events("other", 1)[0].is_set()
    try:
        farcell.connect(server.address, authkey=b"another")
    except multiprocessing.AuthenticationError as error:
        assert isinstance(error, farcell.AuthenticationError)
        print("refused")
"""
    path = f"/tmp/{name}.py"
    with open(path, "w") as file:
        file.write(program)
    try:
        done = subprocess.run(
            [sys.executable, path], timeout=120, stdout=subprocess.PIPE, text=True
        )
    finally:
        os.unlink(path)
    assert done.returncode == 0 and done.stdout == "refused\n"


def test_secrets_travel_only_as_a_process_starts(client):
    config = multiprocessing.current_process()._config
    assert "farcell" in config
    with pytest.raises(TypeError):
        pickle.dumps(config["farcell"])
