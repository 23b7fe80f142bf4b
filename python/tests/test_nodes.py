"""Two nodes: network namespaces with addresses of their own.

The question from which farcell comes was asked of a Manager whose nested lists
of events work on one node and fail from another. Here it fails, and what
replaces it works, between the same two nodes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def can_make_nodes() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    name = f"fc{os.getpid()}probe"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return True


pytestmark = pytest.mark.skipif(not can_make_nodes(), reason="no right to make network namespaces")

SERVER, OTHER = "10.77.0.1", "10.77.0.2"


class Node:
    """A network namespace, in which programs run."""

    def __init__(self, name: str) -> None:
        self.name = name
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")

    def start(
        self, program: Path, *words: str, cwd: Path, hidden: Path | None = None
    ) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.name]
        if hidden is not None:
            # What `ip netns exec` starts has a mount namespace of its own.
            command += ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hidden)]
        command += [sys.executable, str(program), *words]
        environment = dict(os.environ, PYTHONUNBUFFERED="1", TMPDIR=str(cwd))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    tag = f"fc{os.getpid()}"
    first, second = Node(f"{tag}a"), Node(f"{tag}b")
    try:
        ip("-n", first.name, "link", "add", "wire", "type", "veth", "peer", "name", "wire",
           "netns", second.name)
        for node, address in ((first, SERVER), (second, OTHER)):
            ip("-n", node.name, "address", "add", f"{address}/24", "dev", "wire")
            ip("-n", node.name, "link", "set", "wire", "up")
        yield first, second
    finally:
        for node in (first, second):
            subprocess.run(["ip", "netns", "delete", node.name], capture_output=True)


# The node of the question that has the Manager. The lists of events are in a
# manager whose address is the first word; another one hands the outer list out.
MANAGER_NODE = """
import multiprocessing, sys
from multiprocessing.managers import ListProxy, SyncManager

class Manager(SyncManager):
    pass

events = None
multiprocessing.current_process().authkey = b"the shared key"

if __name__ == "__main__":
    inner = {"a unix socket": None, "0.0.0.0": ("0.0.0.0", 5001)}
    inner["its own address"] = (sys.argv[1], 5001)
    local = SyncManager(address=inner[sys.argv[2]], authkey=b"the shared key")
    local.start()
    events = local.list([local.list([local.Event() for _ in range(2)]) for _ in range(2)])
    events[0][1].set()
    Manager.register("get_events", callable=lambda: events, proxytype=ListProxy)
    server = Manager(address=(sys.argv[1], 5000), authkey=b"the shared key").get_server()
    print("ready", flush=True)
    server.serve_forever()
"""

# A learner: it reaches the outer list, and the nested proxies lead it astray.
LEARNER_NODE = """
import multiprocessing, sys
from multiprocessing.managers import ListProxy, SyncManager

class Manager(SyncManager):
    pass

Manager.register("get_events", proxytype=ListProxy)
if sys.argv[2] == "with the key":
    multiprocessing.current_process().authkey = b"the shared key"
manager = Manager(address=(sys.argv[1], 5000), authkey=b"the shared key")
manager.connect()
events = manager.get_events()
print("connected", len(events), flush=True)
try:
    print("worked", events[0][1].is_set())
except Exception as error:
    print(type(error).__name__, error)
"""

FARCELL_FIRST = """
import sys, farcell
manager = farcell.Manager((sys.argv[1], 5000), authkey=b"the shared key of the two")
manager.start()
events = manager.list([manager.list([manager.Event() for _ in range(2)]) for _ in range(2)])
sync = manager.list([0, 0])
print("ready", flush=True)
assert events[0][1].wait(60)
sync.add(0, 1)
events[1][0].set()
sys.stdin.readline()
print("seen", events[0][1].is_set(), list(sync))
"""

FARCELL_SECOND = """
import sys, farcell
manager = farcell.Manager((sys.argv[1], 5000), authkey=b"the shared key of the two")
events = manager.list([manager.list([manager.Event() for _ in range(2)]) for _ in range(2)])
sync = manager.list([0, 0])
events[0][1].set()
assert events[1][0].wait(60)
sync.add(1, 5)
print("worked", list(sync))
"""


def write(tmp_path: Path, name: str, program: str) -> Path:
    path = tmp_path / name
    path.write_text(program)
    return path


@pytest.mark.parametrize(
    ("inner", "key", "failure"),
    [
        ("a unix socket", "with the key", "FileNotFoundError"),
        ("0.0.0.0", "with the key", "ConnectionRefusedError"),
        ("its own address", "without the key", "AuthenticationError"),
    ],
)
def test_nested_proxies_of_a_manager_fail_from_another_node(nodes, tmp_path, inner, key, failure):
    first, second = nodes
    here = tmp_path / "first"
    here.mkdir()
    serving = first.start(write(here, "serve.py", MANAGER_NODE), SERVER, inner, cwd=here)
    try:
        ready = serving.stdout.readline()
        assert ready == "ready\n", ready + serving.stdout.read()
        # The other node does not have the first one's files.
        there = tmp_path / "second"
        there.mkdir()
        program = write(there, "learn.py", LEARNER_NODE)
        learner = second.start(program, SERVER, key, cwd=there, hidden=here)
        output, _ = learner.communicate(timeout=60)
    finally:
        # Its children are in its process group.
        os.killpg(serving.pid, signal.SIGKILL)
        serving.wait()
    lines = output.splitlines()
    assert lines[0] == "connected 2", output
    assert lines[-1].startswith(failure), output


def test_farcells_manager_works_from_another_node(nodes, tmp_path):
    first, second = nodes
    serving = first.start(write(tmp_path, "one.py", FARCELL_FIRST), SERVER, cwd=tmp_path)
    try:
        assert serving.stdout.readline() == "ready\n"
        learner = second.start(write(tmp_path, "two.py", FARCELL_SECOND), SERVER, cwd=tmp_path)
        output, _ = learner.communicate(timeout=60)
        assert learner.returncode == 0 and output == "worked [1, 5]\n", output
        output, _ = serving.communicate("go\n", timeout=60)
        assert output == "seen True [1, 5]\n", output
    finally:
        serving.kill()
        serving.wait()


def test_a_pickled_event_works_on_another_node(nodes, tmp_path):
    """A handle has no address: where it arrives, the session there counts."""
    first, second = nodes
    path = tmp_path / "event"
    one = write(
        tmp_path,
        "one.py",
        "import farcell, pickle, sys\n"
        "server = farcell.serve((sys.argv[1], 5001), authkey=b'the shared key of the two')\n"
        "client = farcell.connect(sys.argv[1] + ':5001',\n"
        "                         authkey=b'the shared key of the two')\n"
        "event = client.events('e', 2, 2)[1][0]\n"
        f"open({str(path)!r}, 'wb').write(pickle.dumps(event))\n"
        "print('ready', flush=True)\n"
        "print(event.wait(60), flush=True)\n",
    )
    two = write(
        tmp_path,
        "two.py",
        "import farcell, pickle, sys\n"
        "client = farcell.connect(sys.argv[1] + ':5001', authkey=b'the shared key of the two')\n"
        f"pickle.load(open({str(path)!r}, 'rb')).set()\n",
    )
    serving = first.start(one, SERVER, cwd=tmp_path)
    try:
        assert serving.stdout.readline() == "ready\n"
        learner = second.start(two, SERVER, cwd=tmp_path)
        output, _ = learner.communicate(timeout=60)
        assert learner.returncode == 0, output
        assert serving.stdout.readline() == "True\n"
    finally:
        serving.kill()
        serving.wait()
