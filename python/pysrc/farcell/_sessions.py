"""Which sessions there are, in this process and for its children.

A pickled handle carries the random id of its origin, and neither address nor
key. Children of `multiprocessing` get what belongs to the ids in the way in
which they get its own `authkey`: inside of the `Process` object, over the pipe
through which a process starts its child, and only then. A process that was
started in another way uses its own session, or connects as `farcell.connect()`
without arguments does.
"""

from __future__ import annotations

import atexit
import multiprocessing.process
import os
import socket
import weakref
from typing import TYPE_CHECKING, Any

from . import _native

if TYPE_CHECKING:
    from ._client import Client

Settings = dict[str, Any]

# How to connect, by the id of the origin.
_settings: dict[str, Settings] = {}
# The session that connect() made last in this process.
_last: str | None = None
_clients: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()
# Ports of the servers that run in this process.
_ports: set[int] = set()

_CONFIG = "farcell"

# The random key that multiprocessing starts with, unless someone was faster.
_first_authkey = bytes(multiprocessing.process.current_process().authkey)
_authkey_is_users = len(_first_authkey) != 32


def user_authkey() -> bytes | None:
    """The key of this process, if the user has set it (and not the system)."""
    authkey = bytes(multiprocessing.process.current_process().authkey)
    if _authkey_is_users or authkey != _first_authkey:
        return authkey
    return None


def remember(client: Client, settings: Settings) -> None:
    """A session that was made here."""
    global _last
    _settings[client._id] = settings
    _clients[client._id] = client
    _last = client._id
    _carry()


def last() -> Client | None:
    """The session that was made here last, if it is still there."""
    return None if _last is None else _clients.get(_last)


def _find(origin: str) -> Any:
    """What belongs to an id: settings, or a session of this process."""
    known = _settings.get(origin)
    if known is not None:
        return known
    client = last()
    if client is not None:
        return client
    if _last is not None:
        return _settings[_last]
    from ._connect import connect

    return connect()


class _Carried:
    """What goes with a `Process` object to its child."""

    def __reduce__(self) -> Any:
        from multiprocessing.context import get_spawning_popen

        if get_spawning_popen() is None:
            raise TypeError("keys travel to a new process only, as it starts")
        return _arrive, (dict(_settings), _last, user_authkey() is not None)


def _arrive(settings: dict[str, Settings], last: str | None, users: bool) -> _Carried:
    """In the child: what came with its `Process` object."""
    global _last, _authkey_is_users
    for origin, how in settings.items():
        _settings.setdefault(origin, how)
    _last = _last or last
    _authkey_is_users = _authkey_is_users or users
    return _Carried()


def _carry() -> None:
    """New `Process` objects get a copy of this process's configuration."""
    config = getattr(multiprocessing.process.current_process(), "_config", None)
    if isinstance(config, dict):
        config.setdefault(_CONFIG, _Carried())


_opened_in = 0


def _opened() -> None:
    """This process has a connection: it is closed in order as it ends."""
    global _opened_in
    _carry()
    if _opened_in == os.getpid():
        return
    _opened_in = os.getpid()
    if multiprocessing.process.parent_process() is None:
        atexit.register(_close)
        return
    # A child of multiprocessing leaves without running what atexit has.
    from multiprocessing.util import Finalize

    Finalize(None, _close, exitpriority=-100)


def _close() -> None:
    if _opened_in == os.getpid():
        _native.close_all()


# A child must let go of its parent's connections, or the server would not see
# that the parent has ended as long as the child lives. The descriptors stay
# taken, so that nothing else gets their numbers.
_fds: list[int] = []


def _before_fork() -> None:
    global _fds
    _fds = _native.open_fds()


def _in_child() -> None:
    _native.forget_untold()
    fds = _fds + _served_fds()
    _ports.clear()
    if not fds:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in fds:
        os.dup2(null, fd, inheritable=False)
    os.close(null)


def _served_fds() -> list[int]:
    """The sockets of the servers that run in the parent."""
    found: list[int] = []
    if not _ports:
        return found
    for name in os.listdir("/proc/self/fd"):
        try:
            its = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with its:
            if its.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            try:
                if its.getsockname()[1] in _ports:
                    found.append(int(name))
            except OSError:
                continue
    return found


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
_carry()
