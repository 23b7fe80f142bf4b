"""Figures of farcell in Python, next to those of `multiprocessing.Manager`.

    python python/benches/manager.py              everything, two minutes
    python python/benches/manager.py --quick      a tenth of it
    python python/benches/manager.py --help       what else there is

Prints a table in Markdown: the median of three turns of each, in the same run and on the same
machine. One GALA round of a learner: for each of its peers look at the read event,
take the lock, add to the round's counter, give the lock back, clear the read
event, and set the write event. With messages it also writes its parameters once,
and reads those of each peer: in a Manager bytes in a list, in farcell slots.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.managers import SyncManager
from typing import Any

import farcell

KEY = b"a key for the benches"
MESSAGE = 256 * 1024


def median(work: Callable[[], Any], times: int, inner: int = 1) -> float:
    """Seconds of one call."""
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        for _ in range(inner):
            work()
        took.append((time.perf_counter() - begun) / inner)
    return statistics.median(took)


def shown(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


class OfManager:
    """Messages as a Manager has them."""

    def __init__(self, manager: Any, n: int) -> None:
        self._list = manager.list([bytes(MESSAGE)] * n)

    def write(self, rank: int, message: bytes) -> None:
        self._list[rank] = message

    def read(self, rank: int, into: bytearray) -> None:
        into[:] = self._list[rank]


class OfSlots:
    """Messages as farcell has them."""

    def __init__(self, client: farcell.Client, name: str, n: int) -> None:
        self._slots = client.slots(name, n, MESSAGE)
        for slot in self._slots:
            slot.write(bytes(MESSAGE))

    def write(self, rank: int, message: bytes) -> None:
        self._slots[rank].write(message)

    def read(self, rank: int, into: bytearray) -> None:
        self._slots[rank].read_into(into)


def gala_round(
    read: Any, write: Any, locks: Any, sync: Any, messages: Any, rank: int, peers: int
) -> None:
    if messages is not None:
        messages.write(rank, OWN)
    for peer in range(1, peers + 1):
        if messages is not None:
            messages.read(peer, THEIRS)
        assert read[rank][peer].is_set()
        with locks[peer]:
            sync[rank] = sync[rank] + 1
        read[rank][peer].clear()
        write[rank][peer].set()
        # As the peer would, so that the next round finds it so.
        read[rank][peer].set()
        write[rank][peer].clear()


OWN = bytes(range(256)) * (MESSAGE // 256)
THEIRS = bytearray(MESSAGE)


def built(events: Any, n: int) -> float:
    begun = time.perf_counter()
    events(n, "large")
    return time.perf_counter() - begun


def measure(make: Any, events: Any, messages: Any, scale: float) -> dict[str, float]:
    """`make` is a manager of either kind; `events` makes a table of events."""
    figures = {}
    read, write = events(4, "read"), events(4, "write")
    for peer in range(1, 4):
        read[0][peer].set()
    cached = read[0][1]
    times = max(3, int(20 * scale))
    few = cached.is_set() and median(cached.is_set, 3) > 20e-6
    inner = 20 if few else 2000
    figures["`event.is_set()`, handle kept"] = median(cached.is_set, times, inner)
    inner = 3 if few else 2000
    figures["`events[r][c].is_set()`"] = median(lambda: read[0][1].is_set(), times, inner)
    locks = make.list([make.Lock() for _ in range(4)])
    sync = make.list([0] * 4)
    for peers in (1, 3):
        what = f"a GALA round, {peers} peer{'s' * (peers > 1)}"

        def alone(peers: int = peers) -> None:
            gala_round(read, write, locks, sync, None, 0, peers)

        def with_messages(peers: int = peers) -> None:
            gala_round(read, write, locks, sync, messages, 0, peers)

        figures[what] = median(alone, times, 1 if few else 100)
        what = f"{what}, with messages of {MESSAGE // 1024} KiB"
        figures[what] = median(with_messages, times, 1 if few else 20)
    return figures


@contextlib.contextmanager
def server(spin: float) -> Iterator[str]:
    """The address of a server in a process of its own, as the Manager has one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        serving = farcell.serve("127.0.0.1:0", authkey=KEY, rdma="off", spin=spin)
        os.write(write, serving.address.encode())
        while os.getppid() != 1:
            time.sleep(0.5)
        os._exit(0)
    try:
        yield os.read(read, 100).decode()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--size", type=int, default=64, help="rows and columns that are built")
    parser.add_argument("--spin", type=float, default=0.0, metavar="SECONDS",
                        help="farcell's client and server look so long before they sleep")
    parser.add_argument("--manager-tcp", action="store_true",
                        help="the Manager on a TCP socket, as on many nodes")
    chosen = parser.parse_args()
    scale = 0.2 if chosen.quick else 1.0
    size = 8 if chosen.quick else chosen.size

    with contextlib.ExitStack() as stack:
        # Its usual Unix socket: over TCP each new proxy would wait for delayed
        # acknowledgements as well.
        where = ("127.0.0.1", 0) if chosen.manager_tcp else None
        theirs = stack.enter_context(SyncManager(where, authkey=KEY))
        # Nested proxies take the key of the process.
        multiprocessing.current_process().authkey = KEY

        def nested(n: int, _name: str) -> Any:
            return theirs.list([theirs.list([theirs.Event() for _ in range(n)]) for _ in range(n)])

        systems: dict[str, tuple[Any, Any, Any]] = {
            "Manager": (theirs, nested, OfManager(theirs, 4))
        }
        address = stack.enter_context(server(chosen.spin))
        for transport in ("tcp", "shm"):
            client = stack.enter_context(
                farcell.connect(address, authkey=KEY, transport=transport, spin=chosen.spin)
            )
            ours = farcell.Manager(client=client, name=f"of.{transport}")

            def table(n: int, name: str, client: Any = client, transport: str = transport) -> Any:
                return client.events(f"{name}.{transport}", n, n)

            messages = OfSlots(client, f"messages.{transport}", 4)
            systems[f"farcell, {transport}"] = (ours, table, messages)
        columns = {
            name: {f"{size} x {size} events built": built(events, size)}
            for name, (_, events, _) in systems.items()
        }
        # In turn, so that what else goes on meets all of them.
        took = [
            {name: measure(*system, scale) for name, system in systems.items()} for _ in range(3)
        ]
        for name in systems:
            for what in took[0][name]:
                columns[name][what] = statistics.median(turn[name][what] for turn in took)

    names = list(columns)
    print("| | " + " | ".join(names) + " | " + " | ".join(f"{n[9:]}: times" for n in names[1:]) + " |")
    print("| --- " * (2 * len(names)) + "|")
    for what, before in columns["Manager"].items():
        after = [columns[name][what] for name in names[1:]]
        cells = [shown(before), *map(shown, after), *(f"{before / one:,.0f}" for one in after)]
        print(f"| {what} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
