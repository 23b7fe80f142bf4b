"""Finding the server when the program names none.

In this order: `FARCELL_ADDR`; the address file; the launcher that started this
process, whose rank 0 serves; the server of this user on this machine; a private
server inside of this process. Each step is logged to the logger `farcell`, and
`explain()` says in words what they would find.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from . import _native, _sessions
from ._errors import FarcellError, Unreachable
from ._native import Launch, explain

if TYPE_CHECKING:
    from ._client import Client, Server

__all__ = ["Launch", "explain"]

_log = logging.getLogger("farcell")

# How long the other ranks wait for rank 0's server.
_PATIENCE = 120.0
# How long rank 0's server stays for the others as the process ends.
_LINGER = 10.0
_DEFAULT = "localhost:7117"

Settings = dict[str, Any]

# The servers of this process that nobody named. They run until it ends.
_served: list[Server] = []


class _Store(Protocol):
    """What is used of torchrun's store."""

    def add(self, key: str, amount: int) -> int: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


def find(how: Settings, connect: Callable[[Settings], Client]) -> Client:
    """Connects to the server that the steps lead to."""
    address = os.environ.get("FARCELL_ADDR")
    if address:
        _log.info("FARCELL_ADDR names the server %s", address)
        return connect({**how, "address": address})
    _log.info("FARCELL_ADDR is not set")
    path = _native.named_address_file()
    address = None if path is None else _native.read_address(path)
    if address:
        _log.info("the address file %s names the server %s", path, address)
        return connect({**how, "address": address})
    _log.info("no address in %s", path)
    launch = Launch.from_env()
    if launch is not None:
        _log.info("%r", launch)
        return _among_others(launch, how, connect)
    _log.info("no launcher: neither torchrun, Open MPI, Hydra nor srun")
    # This process has one already, or that which started it has.
    for known in reversed(list(_sessions._settings.values())):
        if known.get("private"):
            try:
                return connect({**how, **known})
            except Unreachable as error:
                _log.info("the private server is gone: %s", error)
    try:
        return connect({**how, "address": _DEFAULT, "wait_for_server": 0.0})
    except FarcellError as error:
        _log.info("no server of this user on this machine: %s", error)
    key = secrets.token_bytes(32)
    private = _serve("", "127.0.0.1:0", key, lambda server: server.address)
    private["private"] = True
    _log.info("a private server inside of this process, at %s", private["address"])
    return connect({**how, **private})


def _serve(job: str, bind: str, key: bytes | None, reachable: Callable[[Server], str]) -> Settings:
    """A server in this process, until it ends."""
    from ._connect import serve

    # An adapter has nothing to do for clients of this machine.
    rdma = "off" if bind.startswith("127.") else "auto"
    server = serve(bind, authkey=key, job=job, rdma=rdma)
    settings: Settings = {"address": reachable(server), "authkey": key, "job": job}
    if key is None:
        del settings["authkey"]
    _served.append(server)
    if job:
        atexit.register(_linger, server, os.getpid())
    return settings


def _linger(server: Server, pid: int) -> None:
    """The others may need rank 0's server for a moment longer than rank 0."""
    if os.getpid() != pid:
        return
    _native.close_all()
    end = time.monotonic() + _LINGER
    while server.sessions() and time.monotonic() < end:
        time.sleep(0.02)
    server.stop()


def _among_others(launch: Launch, how: Settings, connect: Callable[[Settings], Client]) -> Client:
    how = {**how, "job": how.get("job") or launch.job}
    path = launch.address_file()
    stores = list(_torchrun_stores(launch))

    def published() -> Iterator[str]:
        for store, key in stores:
            # Reading a key that is not there would block.
            if store.add(f"{key}/there", 0):
                yield store.get(key).decode()
        address = _native.read_address(path)
        if address:
            yield address

    def try_it() -> Client | FarcellError | None:
        error: FarcellError | None = None
        for address in published():
            try:
                return connect({**how, "address": address})
            except FarcellError as what:
                error = what
        return error

    if launch.rank == 0:
        # A child of rank 0 has its environment, and must not serve again.
        found = try_it()
        if found is not None and not isinstance(found, FarcellError):
            return found
        settings = _serve(
            how["job"], launch.bind(), how.get("authkey"), lambda server: _reachable(launch, server)
        )
        for store, key in stores:
            store.set(key, settings["address"])
            store.add(f"{key}/there", 1)
        _native.publish_address(path, settings["address"])
        _log.info("rank 0 serves at %s, published in %s", settings["address"], path)
        return connect({**how, **settings})
    end = time.monotonic() + _PATIENCE
    while True:
        found = try_it()
        if found is not None and not isinstance(found, FarcellError):
            return found
        if time.monotonic() >= end:
            raise found or Unreachable(
                f"rank 0 has published no address, neither in {path} nor elsewhere; does it "
                "connect as well, and is that folder shared between the nodes?"
            )
        time.sleep(0.05)


def _reachable(launch: Launch, server: Server) -> str:
    port = server.listening[0].rpartition(":")[2]
    if launch.one_machine:
        return f"127.0.0.1:{port}"
    host = launch.first_host
    if host is None:
        return server.address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _torchrun_stores(launch: Launch) -> Iterator[tuple[_Store, str]]:
    """The stores that all ranks of a torchrun reach.

    torchrun's agent keeps one at MASTER_PORT in some of its modes. In the
    others there is none before `init_process_group` has made it.
    """
    if launch.launcher != "torchrun":
        return
    run = os.environ["TORCHELASTIC_RUN_ID"]
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"farcell/{run}/{restart}"
    try:
        import torch.distributed as dist
    except ImportError as error:
        _log.info("torchrun's store is out of reach: %s", error)
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        _log.info("publishing through torchrun's store at %s:%d, key %s", host, port, key)
        yield dist.TCPStore(host, port, is_master=False), key
    elif dist.is_initialized():
        _log.info("publishing through the store of the process group, key %s", key)
        yield dist.distributed_c10d._get_default_store(), key
