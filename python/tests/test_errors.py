"""Exceptions are what Python programs expect, and say what to do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time

import pytest

import farcell

KEY = b"a key for the tests"


def test_wrong_key(server):
    with pytest.raises(multiprocessing.AuthenticationError, match="keys do not match") as caught:
        farcell.connect(server.address, authkey=b"another")
    assert isinstance(caught.value, farcell.AuthenticationError)
    assert isinstance(caught.value, farcell.FarcellError)


def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match="farcell serve") as caught:
        farcell.connect(("127.0.0.1", port), authkey=KEY)
    assert isinstance(caught.value, farcell.Unreachable)
    begun = time.monotonic()
    with pytest.raises(farcell.Unreachable):
        farcell.connect(("127.0.0.1", port), authkey=KEY, wait_for_server=0.4)
    assert 0.4 <= time.monotonic() - begun < 10


def test_no_farcell_server_there():
    with socket.create_server(("127.0.0.1", 0)) as other:
        import threading

        def speak() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-other\r\n")
                time.sleep(0.5)

        threading.Thread(target=speak, daemon=True).start()
        with pytest.raises(farcell.Unreachable, match="SSH"):
            farcell.connect(other.getsockname(), authkey=KEY)


def test_bad_addresses():
    for bad in ["", "host:port", ":1", "no such host:1"]:
        with pytest.raises(farcell.BadAddress):
            farcell.connect(bad, authkey=KEY)


def test_read_only():
    with farcell.serve("127.0.0.1:0", authkey=KEY, read_only_authkey=b"only to look") as server:
        full = farcell.connect(server.address, authkey=KEY)
        full.events("e", 1)[0].set()
        client = farcell.connect(server.address, authkey=b"only to look")
        event = client.events("e", 1)[0]
        assert event.is_set() and event.wait(1)
        with pytest.raises(PermissionError) as caught:
            event.clear()
        assert isinstance(caught.value, farcell.ReadOnly)
        assert client.info()["access"] == "read-only"


def test_a_removed_array(client, name):
    events = client.events(name, 2)
    client.remove(name)
    with pytest.raises(LookupError) as caught:
        events[0].set()
    assert isinstance(caught.value, farcell.ArrayRemoved)
    with pytest.raises(farcell.NoSuchArray):
        client.remove(name)


def test_no_room():
    with farcell.serve("127.0.0.1:0", authkey=KEY, capacity=4096) as server:
        client = farcell.connect(server.address, authkey=KEY)
        with pytest.raises(farcell.LimitReached, match="--capacity"):
            client.events("large", 1000, 1000)


def test_after_close(server, name):
    client = farcell.connect(server.address, authkey=KEY)
    event = client.events(name, 1)[0]
    with client:
        event.set()
    for call in [event.is_set, event.set, event.wait, client.info, client.list]:
        with pytest.raises(farcell.Closed):
            call()


def test_another_jobs_server():
    with farcell.serve("127.0.0.1:0", authkey=KEY, job="run 1") as server:
        farcell.connect(server.address, authkey=KEY, job="run 1").close()
        farcell.connect(server.address, authkey=KEY).close()
        with pytest.raises(farcell.OtherJob, match="run 2"):
            farcell.connect(server.address, authkey=KEY, job="run 2")


def test_addresses_in_use(server):
    with pytest.raises(farcell.SystemRefused):
        farcell.serve(server.address, authkey=KEY)


def join_and_die(client, event) -> None:
    client.join("the one who dies")
    event.set()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lost_peer_ends_a_wait():
    with farcell.serve("127.0.0.1:0", authkey=KEY, lease=0.8) as server:
        client = farcell.connect(server.address, authkey=KEY)
        client.join("me")
        joined, never = client.events("joined", 1)[0], client.events("never", 2)
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=join_and_die, args=(client, joined))
        child.start()
        assert joined.wait(60)
        assert "me" in client.members()
        for wait in [never[0].wait, never.wait_any, never.wait_all]:
            with pytest.raises(farcell.PeerLost, match="the one who dies") as caught:
                wait(30, peers=["the one who dies", "me"])
            assert isinstance(caught.value, ConnectionError)
        child.join()
        client.close()


@pytest.mark.parametrize("what", ["timeout", "wait_for_server", "reconnect_for", "spin"])
def test_times_that_are_none(server, what):
    for bad in [float("nan"), float("inf"), 1e300]:
        with pytest.raises(ValueError, match=f"^{bad!r} seconds|^NaN seconds|^1e300 seconds"):
            farcell.connect(server.address, authkey=KEY, **{what: bad})
