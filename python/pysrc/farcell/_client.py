"""Client and Server, as a program sees them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, overload

from . import _native, _sessions
from ._errors import BadArgument
from ._native import Barrier, Counters, Events, Lock, Semaphore, Slots


# In Client `list` is a method.
List = list


class ArrayInfo(NamedTuple):
    """An array, as the server lists it."""

    name: str
    kind: str
    rows: int
    cols: int


class TransportReport(NamedTuple):
    """By which way operations go, and why no better one does."""

    name: str
    reasons: list[str]


def _number(what: str, value: int, least: int, most: int) -> int:
    """A number of something, which the native module then need not refuse in its words."""
    number = operator.index(value)
    if not least <= number <= most:
        raise BadArgument(f"{what}: {number} is not possible; from {least} to {most} are")
    return number


def _side(what: str, value: int) -> int:
    return _number(what, value, 1, 2**32 - 1)


def _shape(rows: int, cols: int | None) -> tuple[int, int, bool]:
    if cols is None:
        return 1, _side("size", rows), True
    return _side("rows", rows), _side("columns", cols), False


class Client(_native.Session):
    """A session with a server. Made by `farcell.connect`.

    It may be used from many threads at once. Handles keep it alive; a forked
    child, and a process that unpickles a handle, has a session of its own.
    """

    def events(self, name: str, rows: int, cols: int | None = None) -> Events:
        """Opens an array of events, or creates it with all of them clear.

        With one number it is a list, and otherwise a table: `events[row][col]`,
        `events[row, col]`, `events.get_event(row, col)`, `events.flat[i]`.
        """
        return Events(self, name, *_shape(rows, cols))

    def counters(self, name: str, rows: int, cols: int | None = None) -> Counters:
        """Opens an array of integers, or creates it with all of them 0.

        They have the syntax of lists. `counters[i] += 1` reads and then writes,
        and another process can come in between; `counters.add(i, 1)` is atomic.
        """
        return Counters(self, name, *_shape(rows, cols))

    def lock(self, name: str) -> Lock:
        """Opens a lock, or creates it. It is freed when its holder's session ends."""
        return Lock._all(self, name, 1, 1, False)[0]

    def rlock(self, name: str) -> Lock:
        """As `lock`, but the thread that holds it can take it again."""
        return Lock._all(self, name, 1, 1, True)[0]

    @overload
    def locks(self, name: str, rows: int, cols: None = None) -> List[Lock]: ...
    @overload
    def locks(self, name: str, rows: int, cols: int) -> List[List[Lock]]: ...
    def locks(self, name: str, rows: int, cols: int | None = None) -> List[Lock] | List[List[Lock]]:
        """Opens an array of locks, or creates it: a list, or a list of lists."""
        if cols is None:
            return Lock._all(self, name, 1, _side("size", rows), False)
        rows, cols = _side("rows", rows), _side("columns", cols)
        every = Lock._all(self, name, rows, cols, False)
        return [every[row * cols : (row + 1) * cols] for row in range(rows)]

    def semaphore(self, name: str, value: int = 1, bound: int = 2**31 - 1) -> Semaphore:
        """Opens a semaphore of `value` permits, or creates it.

        As `threading.Semaphore` it can be released beyond that, up to `bound`.
        """
        most = 2**32 - 1
        bound = _number("bound", bound, 0, most)
        return Semaphore(self, name, _number("value", value, 0, most), bound)

    def barrier(
        self,
        name: str,
        parties: int,
        action: Callable[[], object] | None = None,
        timeout: float | None = None,
    ) -> Barrier:
        """Opens a barrier for this many parties, or creates it.

        As with `threading.Barrier` the last of the parties runs `action` before
        any of them goes on, and if that raises the barrier is broken; `timeout`
        is that of waits which name none. All parties give an action, or none.
        """
        return Barrier(self, name, _side("parties", parties), action, timeout)

    def slots(self, name: str, rows: int, nbytes: int) -> Slots:
        """Opens an array of messages of up to `nbytes` bytes each, or creates it."""
        return Slots(self, name, _side("rows", rows), _number("nbytes", nbytes, 1, 2**63 - 1))

    def list(self) -> list[ArrayInfo]:
        """Every array of the server, by name."""
        return [ArrayInfo(*entry) for entry in self._list()]

    def transport(self) -> TransportReport:
        """By which way operations go right now, and why."""
        return TransportReport(*self._transport())

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _client_of, (self._id,)

    def __repr__(self) -> str:
        state = "connected" if self.is_connected() else "not connected"
        return f"<farcell.Client {state}>"


def _client_of(origin: str) -> Client:
    """The session of this process for a client that was pickled."""
    known = _sessions._clients.get(origin)
    if known is not None:
        return known
    found = _sessions._find(origin)
    if isinstance(found, Client):
        return found
    client = Client(origin, found)
    _sessions._clients[origin] = client
    return client


class Server(_native.Server):
    """A server that runs in this process. Made by `farcell.serve`."""

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "stopped"
        return f"<farcell.Server {self.address} {state}>"
