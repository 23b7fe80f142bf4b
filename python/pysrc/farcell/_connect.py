"""Finding the server and the key, and connecting."""

from __future__ import annotations

import logging
import os
import secrets
import warnings
from typing import Any

from . import _native, _sessions
from ._client import Client, Server

Address = str | tuple[str, int]

_log = logging.getLogger("farcell")


def _address(address: Address) -> str:
    """`HOST:PORT` of an address as multiprocessing or farcell writes it."""
    if isinstance(address, str):
        return address
    if not isinstance(address, tuple) or len(address) < 2:
        raise TypeError(f"{address!r} is no address: give 'HOST:PORT', or (host, port)")
    # Of IPv6 there are four; the last two say nothing here.
    host, port = address[:2]
    if not isinstance(host, str) or not isinstance(port, int):
        raise TypeError(f"{address!r} is no address: the host is a string, the port an integer")
    host = host or "0.0.0.0"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bytes(what: str, key: Any) -> bytes:
    """A key. `bytes(5)` would be five zeros, which anyone can guess."""
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise TypeError(f"{what} is a {type(key).__name__}: give bytes, as in b'...'")
    return bytes(key)


def _key(
    authkey: bytes | None, authkey_file: str | os.PathLike[str] | None, *, create: bool = False
) -> tuple[bytes | None, str | None]:
    """The key, or the file that has it; neither: where the environment says."""
    if authkey is not None:
        return _bytes("authkey", authkey), None
    if authkey_file is not None:
        path = os.fsdecode(authkey_file)
        if create:
            _native.load_key(path, True)
        return None, path
    users = _sessions.user_authkey()
    if users is not None:
        return users, None
    if create:
        _native.load_key(None, True)
    return None, None


_told = False


def _warn_of_variables() -> None:
    """Variables that look as if they meant something, once a process."""
    global _told
    if not _told:
        _told = True
        for what in _native.unknown_variables():
            warnings.warn(what, RuntimeWarning, stacklevel=3)


def connect(
    address: Address | None = None,
    *,
    authkey: bytes | None = None,
    authkey_file: str | os.PathLike[str] | None = None,
    transport: str | None = None,
    device: str | None = None,
    tls: str | None = None,
    clear_rdma: bool = False,
    job: str | None = None,
    timeout: float = 5.0,
    wait_for_server: float = 0.0,
    reconnect_for: float = 30.0,
    spin: float = 0.0,
) -> Client:
    """Connects to a server.

    `address` is `"HOST:PORT"` or `(host, port)`. The key is `authkey`, or what
    `authkey_file` holds, or the `authkey` of `multiprocessing.current_process()`
    if the program has set it, or what the file named by `FARCELL_AUTHKEY_FILE`
    holds, or the user's own, `~/.config/farcell/authkey`.

    Without an address it is found as `farcell.launch` says: `FARCELL_ADDR`, the
    address file, the launcher (torchrun, mpirun, srun: rank 0 serves, the others
    find it), this user's server on this machine, a private one in this process.

    `tls` is "off", "auto" or "require"; without it `FARCELL_TLS` counts, and without
    that it is as the server offers. Where it is "require" there is no RDMA, unless
    `clear_rdma` allows it in clear.
    """
    from . import launch

    _warn_of_variables()
    key, key_file = _key(authkey, authkey_file)
    how: dict[str, Any] = {
        "authkey": key,
        "authkey_file": key_file,
        "transport": transport,
        "device": device,
        "tls": tls,
        "clear_rdma": clear_rdma,
        "job": job,
        "timeout": timeout,
        "wait_for_server": wait_for_server,
        "reconnect_for": reconnect_for,
        "spin": spin,
    }
    if address is not None:
        _log.info("the program names the server %s", _address(address))
        return _open({**how, "address": _address(address)})
    return launch.find(how, _open)


def _open(how: dict[str, Any]) -> Client:
    client = Client(secrets.token_hex(8), how)
    client._open()
    _sessions.remember(client, how)
    return client


def serve(
    *bind: Address,
    authkey: bytes | None = None,
    authkey_file: str | os.PathLike[str] | None = None,
    read_only_authkey: bytes | None = None,
    capacity: int | None = None,
    workers: int | None = None,
    lease: float | None = None,
    spin: float | None = None,
    max_clients: int | None = None,
    rdma: str = "auto",
    cpu_domain: bool = False,
    job: str = "",
    tls: str | None = None,
    clear_rdma: bool = False,
    metrics: Address | None = None,
) -> Server:
    """Runs a server in this process, on threads of its own, until `stop()`.

    Without an address it listens on port 7117 of every address of the machine;
    port 0 takes a free one, and `address` says which. The key is found as by
    `connect`; the user's own is made if there is none. RDMA is offered where a
    device works; `rdma` can also be "off", or name the device.

    `tls` is "off", "auto" or "require"; without it `FARCELL_TLS` counts, and without
    that it is "off". `metrics` is where a page for Prometheus is served.
    """
    key, key_file = _key(authkey, authkey_file, create=True)
    if key is None:
        key = _native.load_key(key_file, False)
    server = Server(
        key,
        [_address(one) for one in bind],
        capacity,
        workers,
        lease,
        spin,
        max_clients,
        None if read_only_authkey is None else _bytes("read_only_authkey", read_only_authkey),
        rdma,
        cpu_domain,
        job,
        tls if tls is not None else os.environ.get("FARCELL_TLS") or "off",
        clear_rdma,
        None if metrics is None else _address(metrics),
    )
    _sessions._ports.update(int(one.rpartition(":")[2]) for one in server.listening)
    return server
