"""Encryption and metrics, by argument and by environment."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request

import pytest

import farcell

KEY = b"a key for the tests"


def test_both_ends_by_argument(name):
    with farcell.serve("127.0.0.1:0", authkey=KEY, tls="require") as server:
        for tls in [None, "auto", "require"]:
            with farcell.connect(server.address, authkey=KEY, transport="tcp", tls=tls) as client:
                assert client.is_encrypted()
                client.events(name, 1)[0].set()
                slot = client.slots(f"{name}.s", 1, 1 << 20)[0]
                version = slot.write(bytes(1 << 20))
                assert slot.read() == (version, bytes(1 << 20))
        assert not client.is_encrypted()
        with pytest.raises(farcell.NotEncrypted, match="tls") as caught:
            farcell.connect(server.address, authkey=KEY, tls="off")
        assert isinstance(caught.value, ConnectionError)


def test_a_server_in_clear(server):
    with farcell.connect(server.address, authkey=KEY) as client:
        assert not client.is_encrypted()
    with pytest.raises(farcell.NotEncrypted):
        farcell.connect(server.address, authkey=KEY, tls="require")


def test_words_that_say_nothing(server):
    with pytest.raises(farcell.BadArgument, match="use off, auto or require"):
        farcell.connect(server.address, authkey=KEY, tls="yes")
    with pytest.raises(farcell.BadArgument, match="use off, auto or require"):
        farcell.serve("127.0.0.1:0", authkey=KEY, tls="yes")


def test_rdma_in_clear_is_asked_for():
    with pytest.raises(farcell.BadArgument, match="clear_rdma"):
        farcell.serve("127.0.0.1:0", authkey=KEY, tls="require", rdma="rxe0")


SCRIPT = """
import farcell, sys
if sys.argv[1] == "named":
    server = farcell.serve("127.0.0.1:0", authkey=b"a key for the tests")
    client = farcell.connect(server.address, authkey=b"a key for the tests")
else:
    client = farcell.connect(authkey=b"a key for the tests")
client.events("e", 1)[0].set()
print(client.is_encrypted())
"""


@pytest.mark.parametrize("how", ["named", "private"])
@pytest.mark.parametrize("tls", ["require", "auto", "off"])
def test_both_ends_by_environment(how, tls, tmp_path):
    environment = {n: v for n, v in os.environ.items() if not n.startswith("FARCELL_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        env={**environment, "FARCELL_TLS": tls, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tls != "off")]


def test_metrics():
    with farcell.serve("127.0.0.1:0", authkey=KEY, metrics=("127.0.0.1", 0)) as server:
        assert len(server.metrics_listening) == 1
        url = f"http://{server.metrics_listening[0]}/metrics"
        with urllib.request.urlopen(url, timeout=10) as page:
            assert b"farcell_sessions" in page.read()
    with farcell.serve("127.0.0.1:0", authkey=KEY) as server:
        assert server.metrics_listening == []
