"""Handles of every kind go wherever objects go, without address or key."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import pytest

import farcell

METHODS = ["spawn", "fork", "forkserver"]


def every(client: farcell.Client, name: str) -> dict[str, Any]:
    events, counters = client.events(f"{name}.e", 3, 3), client.counters(f"{name}.c", 3, 3)
    slots = client.slots(f"{name}.s", 2, 64)
    return {
        "client": client,
        "events": events,
        "column": events[:, 1],
        "flat": events.flat,
        "event": events[2][0],
        "counters": counters,
        "row": counters[1],
        "counter": counters.at(2, 2),
        "lock": client.lock(f"{name}.l"),
        "rlock": client.rlock(f"{name}.r"),
        "semaphore": client.semaphore(f"{name}.p", 2),
        "barrier": client.barrier(f"{name}.b", 2),
        "slots": slots,
        "slot": slots[1],
    }


def use(all: dict[str, Any]) -> None:
    """Changes something through each."""
    all["client"].counters(all["counters"].name + "2", 1).add(0, 5)
    all["events"][0, 0].set()
    all["column"].set()
    all["flat"][8].set()
    all["event"].set()
    all["counters"][0, 0] = 7
    all["row"][2] = 8
    all["counter"].add(9)
    with all["lock"], all["rlock"], all["rlock"], all["semaphore"]:
        all["slots"][0].write(b"first")
        all["slot"].write(b"second")
    all["barrier"].wait(60)


def check(all: dict[str, Any]) -> None:
    all["barrier"].wait(60)
    assert all["client"].counters(all["counters"].name + "2", 1)[0] == 5
    assert all["events"].transitions() == [1, 1, 0, 0, 1, 0, 1, 1, 1]
    assert all["counters"].tolist() == [7, 0, 0, 0, 0, 8, 0, 0, 9]
    assert all["slots"][0].read() == (1, b"first") and all["slot"].read() == (1, b"second")
    assert all["semaphore"].get_value() == 2


@pytest.mark.parametrize("method", METHODS)
def test_as_arguments(client, name, method):
    all = every(client, name)
    child = multiprocessing.get_context(method).Process(target=use, args=(all,))
    child.start()
    check(all)
    child.join(60)
    assert child.exitcode == 0


def use_what_comes(queue: Any) -> None:
    while (all := queue.get()) is not None:
        use(all)


# With PyTorch a process takes its time to begin: test_torch.py has the other methods.
@pytest.mark.parametrize(
    ("method", "kind"),
    [*((method, "multiprocessing") for method in METHODS), ("spawn", "torch.multiprocessing")],
)
def test_through_queues(client, name, method, kind):
    module = pytest.importorskip(kind, reason="no PyTorch for this interpreter")
    context = module.get_context(method)
    queue = context.Queue()
    child = context.Process(target=use_what_comes, args=(queue,))
    child.start()
    # Handles that the child has not got as arguments.
    for at in range(2):
        all = every(client, f"{name}.{at}")
        queue.put(all)
        check(all)
    queue.put(None)
    child.join(60)
    assert child.exitcode == 0


def test_pickles_have_neither_address_nor_key(server, client, name):
    port = server.address.rpartition(":")[2].encode()
    for what, handle in every(client, name).items():
        data = pickle.dumps(handle)
        assert b"a key for the tests" not in data and port not in data, what
        assert type(pickle.loads(data)) is type(handle), what
