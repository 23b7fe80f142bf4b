"""A real server for each test module, and a session of the test's own."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

import farcell

KEY = b"a key for the tests"

# A shell that runs something in the background has it ignore Ctrl-C, and so would all
# that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A server or a key that the caller uses must not get into the tests.
for name in [name for name in os.environ if name.startswith("FARCELL_")]:
    del os.environ[name]


@pytest.fixture(scope="module")
def server() -> Iterator[farcell.Server]:
    with farcell.serve("127.0.0.1:0", authkey=KEY) as server:
        yield server


@pytest.fixture
def client(server: farcell.Server) -> Iterator[farcell.Client]:
    with farcell.connect(server.address, authkey=KEY) as client:
        yield client


_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t{os.getpid()}.{next(_numbers)}"


@pytest.fixture
def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def stop(process: subprocess.Popen[str]) -> None:
    """Stops a process, and returns when all of its threads have stopped.

    The signal alone says only that they will: on a busy machine one of them can still
    answer a request or two.
    """
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
