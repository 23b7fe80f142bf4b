"""`Manager`: what existing programs have in a `multiprocessing.Manager`.

A manager's objects live in a farcell server and are told apart by position:
every process, on any node, that makes the same calls in the same order gets the
same objects. A call may also name its object, and then has no position.

Each position remembers what was made there. A process that asks for something
else at a position gets `Diverged`, which tells both sides, and nothing is ever
shared by mistake.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, cast

from . import _native
from ._client import Client, Server
from ._collections import SharedDict, SharedList, is_handle, is_integer
from ._connect import Address, _address, connect, serve
from ._errors import BadArgument, Diverged, FarcellError, ValueTooLarge
from ._native import Barrier, Counter, Counters, Event, Lock, Semaphore

# What can be made, by the number that says so in the record of a position.
_KINDS = {
    1: "Event()",
    2: "Lock()",
    3: "RLock()",
    4: "Semaphore({})",
    5: "BoundedSemaphore({})",
    6: "Barrier({})",
    7: "Value('i')",
    8: "list of {} integers",
    9: "list of {} objects",
    10: "Barrier({}) with an action",
    11: "dict()",
    12: "append({})",
}
_EVENT, _LOCK, _RLOCK, _SEMAPHORE, _BOUNDED, _BARRIER, _VALUE, _INTEGERS, _OBJECTS = range(1, 10)
_BARRIER_ACTION, _DICT, _APPEND = range(10, 13)
# What can be appended, by the number in its record.
_APPENDED = (Event, Lock, Semaphore, Barrier, Counter, Counters, SharedList, SharedDict)

# Positions of one array of records, and events of one array.
_BLOCK = 1024
# What a counter holds.
_LEAST, _MOST = -(2**62), 2**62 - 1
# The typecodes of integers; as ctypes has them, their types say so.
_INTEGER_CODES = "bBhHiIlLqQ"
# What other managers have, and what there is in its place.
_INSTEAD = {
    "Queue": "a multiprocessing queue carries handles; messages go through client.slots()",
    "JoinableQueue": "count what is done in mng.Value('i') and use its wait_until()",
    "Condition": "wait for an event, or for a counter with wait_until()",
    "Namespace": "use mng.dict(), or name objects: mng.Value('i', name='step')",
    "Pool": "use multiprocessing.Pool; handles go to its workers",
}


def _check(items: Iterable[int]) -> None:
    """Before a position is taken for them, which then nobody would fill in."""
    for item in items:
        if not _LEAST <= item <= _MOST:
            raise ValueTooLarge(f"{item} does not fit a counter; it holds {_LEAST} to {_MOST}")


def _check_type(typecode: Any) -> None:
    """Whether multiprocessing would make an integer of it."""
    code = typecode if isinstance(typecode, str) else getattr(typecode, "_type_", None)
    if typecode is int:
        return
    if not (isinstance(code, str) and len(code) == 1 and code in _INTEGER_CODES):
        raise TypeError(
            f"{typecode!r} is no type of integers, and shared values are integers: one of "
            f"{_INTEGER_CODES!r}, int, or a type of ctypes; keep others in slots"
        )


def _said(record: int) -> str:
    """What a record says was made."""
    kind, number = record >> 32, record & 0xFFFF_FFFF
    what: object = number
    if kind == _APPEND and number < len(_APPENDED):
        what = _APPENDED[number].__name__
    return _KINDS.get(kind, f"something of a kind {kind} that this release does not know").format(
        what
    )


class Manager:
    """Shared objects by position, in place of a `multiprocessing.Manager`.

    `address` and `authkey` are as for `farcell.connect`. Call `start()` in the
    process that is to serve at `address`; the others need no call, or
    `connect()`. `name` keeps the objects of several managers, or of several
    runs against one server, apart.
    """

    def __init__(
        self,
        address: Address | None = None,
        authkey: bytes | None = None,
        *,
        name: str = "manager",
        client: Client | None = None,
        **how: Any,
    ) -> None:
        self._address, self._authkey, self._how = address, authkey, how
        self._name = name
        self._client = client
        self._server: Server | None = None
        self._next = 0
        self._lock = threading.Lock()
        self._records: dict[int, Counters] = {}
        self._events: dict[int, Any] = {}

    # The life of a manager, as multiprocessing's.

    def start(self) -> None:
        """Serves at the manager's address, in this process."""
        if self._server is not None or self._client is not None:
            raise FarcellError("this manager was started, or is connected, already")
        bind = ("127.0.0.1", 0) if self._address is None else self._address
        self._server = serve(bind, authkey=self._authkey)
        self._address = self._server.address
        self.connect()

    def connect(self) -> None:
        """Connects to the server at the manager's address."""
        self._open()

    def _open(self) -> Client:
        if self._client is None:
            self._client = connect(self._address, authkey=self._authkey, **self._how)
        return self._client

    @property
    def address(self) -> str | None:
        """Where the server is."""
        return None if self._address is None else _address(self._address)

    @property
    def client(self) -> Client:
        """The session, for what a manager does not have."""
        return self._open()

    def shutdown(self) -> None:
        """Ends the session, and the server if this manager started it."""
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.stop()

    def __enter__(self) -> Manager:
        if self._server is None and self._client is None:
            self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise TypeError("a manager stays in its process; pass on the objects that it made")

    # Positions.

    def _array(self, what: str, name: str | None, position: int) -> str:
        if name is not None:
            return f"{self._name}/{name}"
        return f"{self._name}/{what}.{position}"

    def _take(self, kind: int, number: int, name: str | None) -> tuple[int, bool]:
        """The position of the next object, and whether it is new there."""
        if not is_integer(number):
            raise TypeError(f"{number!r}: this takes a whole number")
        if not 0 <= number <= 0xFFFF_FFFF:
            raise BadArgument(f"{number} is too much, or too little")
        if name is not None:
            # The array itself says of what kind and shape it is.
            return -1, False
        with self._lock:
            position = self._next
            block, at = divmod(position, _BLOCK)
            records = self._records.get(block)
            if records is None:
                records = self._open().counters(f"{self._name}/positions.{block}", 2, _BLOCK)
                self._records[block] = records
            record = kind << 32 | number
            cell = records.at(0, at)
            new = cell.compare_exchange(0, record)
            if not new:
                found = cell.load()
                if found != record:
                    raise Diverged(
                        f"position {position} of manager {self._name!r}: this process (pid "
                        f"{os.getpid()} on {socket.gethostname()}) asked for {_said(record)}, and "
                        f"another one has made {_said(found)} there; all processes must make the "
                        "same calls in the same order, or name what they make"
                    )
            self._next = position + 1
            return position, new

    def _ready(self, position: int, new: bool, prepare: Any) -> None:
        """Has the one who made an object fill it in, and the others wait."""
        block, at = divmod(position, _BLOCK)
        done = self._records[block].at(1, at)
        if new:
            prepare()
            done.store(1)
        elif done.wait_until("!=", 0, 60.0) is None:
            raise FarcellError(
                f"position {position} of manager {self._name!r} was made by a process that has "
                "not filled it in for a minute; has it died? Use another name for the manager"
            )

    # Objects.

    def Event(self, *, name: str | None = None) -> _native.Event:
        """An event, clear at first."""
        position, _ = self._take(_EVENT, 0, name)
        if name is not None:
            event = self._open().events(self._array("event", name, -1), 1)[0]
            return cast(_native.Event, event)
        block, at = divmod(position, _BLOCK)
        events = self._events.get(block)
        if events is None:
            events = self._open().events(f"{self._name}/events.{block}", _BLOCK)
            self._events[block] = events
        return cast(_native.Event, events[at])

    def Lock(self, *, name: str | None = None) -> _native.Lock:
        """A lock."""
        position, _ = self._take(_LOCK, 0, name)
        return self._open().lock(self._array("lock", name, position))

    def RLock(self, *, name: str | None = None) -> _native.Lock:
        """A lock that its holder can take again."""
        position, _ = self._take(_RLOCK, 0, name)
        return self._open().rlock(self._array("rlock", name, position))

    def Semaphore(self, value: int = 1, *, name: str | None = None) -> _native.Semaphore:
        """A semaphore."""
        position, _ = self._take(_SEMAPHORE, value, name)
        return self._open().semaphore(self._array("semaphore", name, position), value)

    def BoundedSemaphore(self, value: int = 1, *, name: str | None = None) -> _native.Semaphore:
        """A semaphore that cannot be released beyond its first value."""
        position, _ = self._take(_BOUNDED, value, name)
        return self._open().semaphore(self._array("bounded", name, position), value, value)

    def Barrier(
        self,
        parties: int,
        action: Callable[[], object] | None = None,
        timeout: float | None = None,
        *,
        name: str | None = None,
    ) -> _native.Barrier:
        """A barrier; the last of the parties runs `action` before any goes on."""
        kind = _BARRIER if action is None else _BARRIER_ACTION
        position, _ = self._take(kind, parties, name)
        array = self._array("barrier", name, position)
        return self._open().barrier(array, parties, action, timeout)

    def Value(self, typecode: Any = "i", value: int = 0, *, name: str | None = None) -> Counter:
        """An integer, with `.value`, `.add()` and the like."""
        _check_type(typecode)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{value!r}: a shared value is an integer; keep others in slots")
        _check([value])
        position, new = self._take(_VALUE, 0, name)
        counter = self._open().counters(self._array("value", name, position), 1).counter_at(0)
        if name is None:
            self._ready(position, new, lambda: counter.store(value))
        elif value:
            counter.compare_exchange(0, value)
        return counter

    def list(self, items: Iterable[Any] = (), *, name: str | None = None) -> Any:
        """A list of integers, which is shared, or of shared objects.

        A list of shared objects, or of lists of them, is a list of this
        process, since each process makes it alike; its items are shared. It can
        be appended to, and so can an empty one; a list that begins with integers
        is an array of that size.
        """
        filled = list(items)
        if filled and all(is_integer(item) for item in filled):
            size = len(filled)
            _check(filled)
            position, new = self._take(_INTEGERS, size, name)
            counters = self._open().counters(self._array("integers", name, position), size)

            def fill() -> None:
                counters[:] = filled

            if name is None:
                self._ready(position, new, fill)
            elif not any(counters.tolist()):
                fill()
            return counters
        if all(is_handle(item) for item in filled):
            self._take(_OBJECTS, len(filled), name)
            return SharedList(filled, False, self)
        raise TypeError(
            "a shared list holds integers, or shared objects and lists of these; keep tensors and "
            "other data in slots"
        )

    def _appended(self, item: Any) -> Any:
        """What goes into a list for an item that is appended to it."""
        if is_integer(item):
            return self.Value("i", item)
        if not is_handle(item):
            raise TypeError(
                f"{item!r}: a shared list holds integers, or shared objects and lists of these; "
                "keep tensors and other data in slots"
            )
        which = next(n for n, kind in enumerate(_APPENDED) if isinstance(item, kind))
        self._take(_APPEND, which, None)
        return item

    def Array(self, typecode: Any, sequence: Any, *, name: str | None = None) -> Any:
        """As `list`, of integers: these, or as many zeros."""
        _check_type(typecode)
        if is_integer(sequence):
            if sequence < 1:
                raise BadArgument(f"an array of {sequence} integers: it has 1 at least")
            return self.list([0] * sequence, name=name)
        return self.list(sequence, name=name)

    def dict(self, *args: Any, **kwargs: Any) -> SharedDict:
        """A dict of integers and shared objects, with strings or integers as keys.

        Integers are put by the process that makes it first.
        """
        filled: dict[Any, Any] = dict(*args, **kwargs)
        _check(item for item in filled.values() if is_integer(item))
        position, new = self._take(_DICT, 0, None)
        made = SharedDict(self._open(), self._array("dict", None, position))
        made.update((key, item) for key, item in filled.items() if not is_integer(item))

        def fill() -> None:
            made.update((key, item) for key, item in filled.items() if is_integer(item))

        self._ready(position, new, fill)
        return made

    def __getattr__(self, what: str) -> Any:
        instead = _INSTEAD.get(what)
        if instead is None:
            raise AttributeError(f"a farcell.Manager has no {what!r}")
        raise AttributeError(f"a farcell.Manager has no {what}: {instead}")

    def __repr__(self) -> str:
        return f"<farcell.Manager {self._name!r} at {self.address}, {self._next} positions>"
