"""What makes no sense is refused in words, and never ends the process."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import farcell

KEY = b"a key for the tests"

ITSELF: list[Any] = []
ITSELF.append(ITSELF)

# What is passed where something else belongs.
ODD = [
    None, -1, 3, -(2**31), 2**32, -(2**63), 2**63 - 1, 2**63, 2**64, 10**40, 1.5, -1.0,
    float("nan"), float("inf"), "", "x", "\ud800", "a\0b", "x" * 5000, b"", (), (1,), (1, 2, 3), [],
    [1], [(9, 9)], [[0]], ITSELF, {}, object(), slice(None), slice(None, None, -(2**62)),
    slice(-(10**30), 10**30), Ellipsis, ValueError, itertools.count(),
]  # fmt: skip
REFUSALS = (TypeError, ValueError, LookupError, OverflowError, BufferError, farcell.FarcellError)

# Those would wait, end the session, or are Python's own.
NOT_CALLED = {"close", "wait", "wait_all", "wait_any", "wait_some", "wait_after", "wait_until"}
NOT_CALLED |= {"wait_newer", "acquire"}


def calls(handle: Any) -> list[tuple[str, Callable[..., Any]]]:
    names = [name for name in dir(handle) if not name.startswith("_") and name not in NOT_CALLED]
    names += [name for name in ("__getitem__", "__setitem__", "__delitem__") if hasattr(handle, name)]
    # By their classes: a property such as a lock's token can refuse.
    names = [name for name in names if callable(getattr(type(handle), name))]
    return [(name, getattr(handle, name)) for name in names]


def refused_or_done(what: str, call: Callable[..., Any], *args: Any, **named: Any) -> None:
    try:
        done = call(*args, **named)
    except REFUSALS as error:
        assert str(error), what
    except BaseException as error:
        raise AssertionError(f"{what}{args!r:.200}: {error!r}") from error
    else:
        if asyncio.iscoroutine(done):
            done.close()


KINDS = {
    "client": lambda client, name: client,
    "events": lambda client, name: client.events(name, 3, 3),
    "a row": lambda client, name: client.events(name, 3, 3)[1],
    "a column": lambda client, name: client.events(name, 3, 3)[:, 1],
    "flat": lambda client, name: client.events(name, 3, 3).flat,
    "event": lambda client, name: client.events(name, 3, 3)[0, 0],
    "counters": lambda client, name: client.counters(name, 3, 3),
    "a list": lambda client, name: client.counters(name, 3),
    "counter": lambda client, name: client.counters(name, 3).counter_at(0),
    "lock": lambda client, name: client.lock(name),
    "rlock": lambda client, name: client.rlock(name),
    "semaphore": lambda client, name: client.semaphore(name, 1),
    "barrier": lambda client, name: client.barrier(name, 2),
    "slots": lambda client, name: client.slots(name, 2, 64),
    "slot": lambda client, name: client.slots(name, 2, 64)[0],
}


@pytest.mark.parametrize("kind", KINDS)
def test_odd_arguments(client, name, kind):
    handle = KINDS[kind](client, name)
    for what, call in calls(handle):
        for odd in ODD:
            refused_or_done(what, call, odd)
            refused_or_done(what, call, odd, odd)
            refused_or_done(what, call, 0, odd)
            if kind == "client":
                refused_or_done(what, call, f"{name}.odd", odd)
                refused_or_done(what, call, f"{name}.odd", 1, odd)
    # It works as before.
    assert client.events(f"{name}.after", 1)[0].is_set() is False


WAITS = ["wait", "wait_any", "wait_all", "acquire", "wait_some", "wait_after", "wait_newer"]


@pytest.mark.parametrize("kind", KINDS)
def test_odd_times(client, name, kind):
    handle = KINDS[kind](client, name)
    for what in WAITS:
        wait, later = getattr(handle, what, None), getattr(handle, f"{what}_async", None)
        first = (1,) if what in ("wait_some", "wait_after", "wait_newer") else ()
        for odd in [float("nan"), "1", b"", [], object(), 1j]:
            for call in filter(None, (wait, later)):
                with pytest.raises((TypeError, ValueError)):
                    call(*first, timeout=odd)


def test_shapes_that_cannot_be(client, name):
    for bad in [0, -1, 2**32, 10**30]:
        for make in [client.events, client.counters, client.locks]:
            with pytest.raises(farcell.BadArgument, match=f"{bad} is not possible"):
                make(name, bad)
            with pytest.raises(farcell.BadArgument, match=f"columns: {bad} is not possible"):
                make(name, 1, bad)
        with pytest.raises(farcell.BadArgument, match="parties"):
            client.barrier(name, bad)
        with pytest.raises(farcell.BadArgument, match="rows"):
            client.slots(name, bad, 8)
    with pytest.raises(farcell.BadArgument, match="nbytes"):
        client.slots(name, 1, 0)
    with pytest.raises(farcell.BadArgument, match="value: -1"):
        client.semaphore(name, -1)
    assert all(entry.name != name for entry in client.list())


def test_indices_that_no_number_holds(client, name):
    events, counters = client.events(name, 3, 3), client.counters(name + "c", 3)
    for at in [10**30, -(10**30)]:
        for view in [events, events[0], events.flat, events[:, 1], counters]:
            with pytest.raises(IndexError, match="out of range"):
                view[at]
        with pytest.raises(IndexError):
            events[0, at]
    with pytest.raises(TypeError, match="must not hold lists"):
        events[ITSELF]
    # A step that leads out of all numbers, in a view that has a step.
    assert events[0][::2][:: 2**62] == events[0][:1]
    assert pickle.loads(pickle.dumps(events[0][::2][:: 2**62])) == events[0][:1]


def test_values_that_no_counter_holds(client, name):
    counters = client.counters(name, 3)
    counters[:] = 1
    with pytest.raises(OverflowError):
        counters[:] = 2**70
    with pytest.raises(TypeError, match="float"):
        counters[:] = 1.5
    with pytest.raises(ValueError, match="more values than the 3 counters"):
        counters[:] = itertools.count()
    with pytest.raises(ValueError, match="2 values for 3"):
        counters[:] = [1, 2]
    with pytest.raises(TypeError, match="fixed size"):
        del counters[0]
    assert counters.tolist() == [1, 1, 1]


def test_pickles_of_more_cells_than_there_are(client, name):
    events = client.events(name, 2, 3)
    make, (origin, array, rows, cols, _) = events.__reduce__()
    # Of step 0, and of less than no cells.
    for bad in [(1, [0, 1, 0, 2**40]), (1, [0, 0, 1, -(2**63)]), (0, [0, 0, 9, 0, 0, 9])]:
        with pytest.raises(ValueError, match="makes no sense"):
            make(origin, array, rows, cols, bad)


def test_keys_and_addresses_of_another_type(server):
    # bytes(5) are five zeros: a key that anyone has.
    for bad in [5, "a key", [1, 2], 1.5, object()]:
        with pytest.raises(TypeError, match="authkey is a .*: give bytes"):
            farcell.connect(server.address, authkey=bad)
        with pytest.raises(TypeError, match="authkey is a .*: give bytes"):
            farcell.serve("127.0.0.1:0", authkey=bad)
        with pytest.raises(TypeError, match="read_only_authkey is a .*: give bytes"):
            farcell.serve("127.0.0.1:0", authkey=KEY, read_only_authkey=bad)
    for same in [bytearray(KEY), memoryview(KEY)]:
        farcell.connect(server.address, authkey=same).close()
    for bad in [5, b"node0:1", ("node0",), ("node0", "1"), (b"node0", 1), [], 1.5]:
        with pytest.raises(TypeError, match="is no address"):
            farcell.connect(bad, authkey=KEY)
        with pytest.raises(TypeError, match="is no address"):
            farcell.serve(bad, authkey=KEY)


@pytest.mark.parametrize("what", ["transport", "device", "tls", "job", "timeout", "spin"])
def test_odd_settings(server, what):
    for odd in [odd for odd in ODD if odd is not None]:
        refused_or_done(what, lambda odd=odd: farcell.connect(
            server.address, authkey=KEY, **{what: odd}).close())  # fmt: skip


def test_an_empty_view_is_no_wait(client, name):
    nothing = client.events(name, 3)[0:0]

    async def later(wait: Any) -> Any:
        return await asyncio.wait_for(wait, 5)

    assert nothing.wait_all(0) is True and asyncio.run(later(nothing.wait_all_async())) is True
    with pytest.raises(farcell.BadArgument, match="empty"):
        nothing.wait_any(0)
    with pytest.raises(farcell.BadArgument, match="empty"):
        asyncio.run(later(nothing.wait_any_async(0)))


def test_values_of_a_manager_are_integers(client, name):
    one, two = (farcell.Manager(client=client, name=name) for _ in range(2))
    for bad in ["d", "f", "c", "u", "", "ii", float, bool, ctypes.c_double, ctypes.c_bool, None]:
        with pytest.raises(TypeError, match="no type of integers"):
            one.Value(bad, 0)
        with pytest.raises(TypeError, match="no type of integers"):
            one.Array(bad, 3)
    for bad in [2**62, -(2**62) - 1, 10**30]:
        for make in [
            lambda bad=bad: one.Value("i", bad),
            lambda bad=bad: one.list([1, bad]),
            lambda bad=bad: one.dict(a=bad),
        ]:
            with pytest.raises(farcell.ValueTooLarge, match=str(bad)):
                make()
    for bad in [0, -1]:
        with pytest.raises(farcell.BadArgument):
            one.Array("i", bad)
    with pytest.raises(TypeError, match="whole number"):
        one.Barrier("2")
    # None of these has taken a position, at which others would wait.
    assert one.Value("i", 7).value == two.Value(ctypes.c_long, 7).value == 7
    assert list(one.Array(int, [2**62 - 1])) == list(two.Array("q", 1)) == [2**62 - 1]
