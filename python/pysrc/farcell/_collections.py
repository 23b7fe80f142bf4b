"""Lists that grow and dicts, as a `Manager` has them.

Every process makes the same calls in the same order, so that each has the same
items. Integers are in the server, and shared; shared objects are shared by
themselves, and the list or dict that holds them is each process's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn, cast
from urllib.parse import quote, unquote

from ._errors import FarcellError
from ._native import Barrier, Counter, Counters, Event, Lock, Semaphore

if TYPE_CHECKING:
    from ._client import Client
    from .manager import Manager

_HANDLES = (Event, Lock, Semaphore, Barrier, Counter, Counters)


def is_integer(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def is_handle(item: object) -> bool:
    return isinstance(item, (*_HANDLES, SharedList, SharedDict))


class SharedList:
    """A list of shared objects, or of integers, that can be appended to.

    `append` is a call as all others of a manager: every process makes it, in the
    same order.
    """

    def __init__(self, items: list[Any], integers: bool, manager: Manager | None) -> None:
        # Of integers: their counters.
        self._items, self._integers, self._manager = items, integers, manager

    def append(self, item: Any) -> None:
        """Adds a shared object, or an integer that is shared."""
        if self._manager is None:
            raise FarcellError("append where the list was made: it came from another process")
        if self._items and self._integers != is_integer(item):
            raise TypeError("a shared list holds integers or shared objects, not both")
        self._items.append(self._manager._appended(item))
        self._integers = is_integer(item)

    def extend(self, items: Iterable[Any]) -> None:
        """Appends each of them."""
        for item in items:
            self.append(item)

    def __iadd__(self, items: Iterable[Any]) -> SharedList:
        self.extend(items)
        return self

    def add(self, index: int, delta: int) -> int:
        """Adds to an integer, atomically, and returns the value before."""
        return self._counter(index).add(delta)

    def counter_at(self, index: int) -> Counter:
        """A handle to one of the integers."""
        return self._counter(index)

    def _counter(self, index: int) -> Counter:
        if not self._integers:
            raise TypeError("this list holds shared objects, and they cannot be replaced")
        return cast(Counter, self._items[index])

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        found = self._items[index]
        if not self._integers:
            return found
        return [one.load() for one in found] if isinstance(index, slice) else found.load()

    def __setitem__(self, index: int, value: int) -> None:
        self._counter(index).store(value)

    def __iter__(self) -> Iterator[Any]:
        return iter([one.load() for one in self._items] if self._integers else self._items)

    def tolist(self) -> list[Any]:
        """Its items, integers as they are now."""
        return list(self)

    def _fixed(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise TypeError(
            "a shared list only grows: take nothing out and keep the order; for work that is "
            "handed out use events with take(), or a counter that each adds 1 to"
        )

    insert = pop = remove = clear = reverse = sort = __delitem__ = _fixed

    def __reduce__(self) -> tuple[object, tuple[list[Any], bool, None]]:
        return SharedList, (self._items, self._integers, None)

    def __repr__(self) -> str:
        return f"<SharedList of {len(self._items)}: {list(self)!r}>"


class SharedDict(MutableMapping[Any, Any]):
    """A dict of integers, which are shared, and of shared objects.

    Integers are there for all processes once one has put them. `d[key] += 1` reads
    and then writes; `d.add(key, 1)` is atomic. Shared objects are in the dicts of
    those processes that have put them there.
    """

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name
        self._handles: dict[Any, Any] = {}
        self._cells: dict[Any, Counters] = {}

    def _array(self, key: Any) -> str:
        if isinstance(key, str):
            # Names have no % and no ~ in them; the + of a key is quoted itself.
            quoted = quote(key, safe="").replace("~", "%7E").replace("%", "+")
            return f"{self._name}/s{quoted}"
        if is_integer(key):
            return f"{self._name}/i{key}"
        raise TypeError(f"{key!r}: the keys of a shared dict are strings or integers")

    def _cell(self, key: Any, make: bool) -> Counters | None:
        """The value, and whether it is there."""
        found = self._cells.get(key)
        if found is None:
            name = self._array(key)
            if not make and not self._client._has(name):
                return None
            found = self._cells[key] = self._client.counters(name, 2)
        return found

    def __getitem__(self, key: Any) -> Any:
        if key in self._handles:
            return self._handles[key]
        cell = self._cell(key, False)
        value, there = cell.tolist() if cell is not None else (0, 0)
        if not there:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Any, value: Any) -> None:
        if is_handle(value):
            self._array(key)
            self._handles[key] = value
            return
        if not is_integer(value):
            raise TypeError(
                f"{value!r}: a shared dict holds integers and shared objects; keep tensors and "
                "other data in slots"
            )
        cell = self._cell(key, True)
        assert cell is not None
        # In this order: who finds it there finds the value.
        cell[:] = (value, 1)
        self._handles.pop(key, None)

    def __delitem__(self, key: Any) -> None:
        if self._handles.pop(key, None) is not None:
            return
        cell = self._cell(key, False)
        if cell is None or not cell.counter_at(1).swap(0):
            raise KeyError(key)

    def add(self, key: Any, delta: int) -> int:
        """Adds to an integer, atomically, and returns the value before."""
        cell = self._cell(key, False)
        if cell is None or not cell[1]:
            raise KeyError(key)
        return cell.add(0, delta)

    def __iter__(self) -> Iterator[Any]:
        keys = list(self._handles)
        start = f"{self._name}/"
        for entry in self._client.list():
            if entry.name.startswith(start):
                key = entry.name[len(start) :]
                found = unquote(key[1:].replace("+", "%")) if key[0] == "s" else int(key[1:])
                if found not in self._handles and found in self:
                    keys.append(found)
        return iter(keys)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> Any:
        return _dict_of, (self._client, self._name, self._handles)

    def __repr__(self) -> str:
        return f"<SharedDict {dict(self)!r}>"


def _dict_of(client: Client, name: str, handles: dict[Any, Any]) -> SharedDict:
    made = SharedDict(client, name)
    made._handles = handles
    return made
