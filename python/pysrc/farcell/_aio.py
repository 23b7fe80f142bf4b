"""Waits for asyncio: no thread each, one for all of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._errors import BrokenBarrierError

if TYPE_CHECKING:
    from ._native import Barrier, Counter, Counters, Event, Events, Lock, Pending, Semaphore
    from ._native import Slot, Taken

Then = Callable[[bool, Any], None]


async def _wait(
    start: Callable[[Then], Pending],
    timeout: float | None,
    unwanted: Callable[[Any], None] | None = None,
) -> Any:
    """What the wait found, or `None` when the time was over.

    `unwanted` is given what came when nobody waited for it any more.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(satisfied: bool, value: Any) -> None:
        if future.done():
            if satisfied and unwanted is not None:
                unwanted(value)
        elif isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value if satisfied else None)

    def ended(satisfied: bool, value: Any) -> None:
        # On a thread of the session's.
        try:
            loop.call_soon_threadsafe(settle, satisfied, value)
        except RuntimeError:
            # The loop was closed, and nobody waits any more.
            if satisfied and unwanted is not None:
                unwanted(value)

    pending = start(ended)
    timer = None if timeout is None else loop.call_later(max(timeout, 0.0), pending.cancel)
    try:
        return await future
    except asyncio.CancelledError:
        pending.cancel()
        # It may have come in the moment in which the task was cancelled.
        if future.done() and not future.cancelled() and future.exception() is None:
            if future.result() is not None and unwanted is not None:
                unwanted(future.result())
        raise
    finally:
        if timer is not None:
            timer.cancel()


async def wait_event(event: Event, timeout: float | None) -> bool:
    return await _wait(event._start_wait, timeout) is not None


async def wait_after(event: Event, seen: int, timeout: float | None) -> Any:
    return await _wait(lambda then: event._start_wait_after(seen, then), timeout)


async def wait_cells(events: Events, need: int, timeout: float | None, every: bool) -> Any:
    if every and events.size == 0:
        return True
    found = await _wait(lambda then: events._start_wait(need, then), timeout)
    if every:
        return found is not None
    return found or []


async def wait_counter(counter: Counter, how: str, value: int, timeout: float | None) -> Any:
    return await _wait(lambda then: counter._start_wait(how, value, then), timeout)


async def wait_counters(
    counters: Counters, need: int, how: str, value: int, timeout: float | None
) -> Any:
    start = counters._start_wait
    return await _wait(lambda then: start(need, how, value, then), timeout) or []


async def wait_newer(slot: Slot, than: int, timeout: float | None) -> bool:
    return await _wait(lambda then: slot._start_wait(than, then), timeout) is not None


def _give_back(taken: Taken) -> None:
    taken.give_back()


async def acquire(handle: Lock | Semaphore, timeout: float | None) -> bool:
    taken = await _wait(handle._start_acquire, timeout, _give_back)
    if taken is None:
        return False
    handle._adopt(taken)
    return True


async def release(handle: Lock | Semaphore) -> None:
    # One trip, as every operation that does not wait.
    handle.release()


async def wait_barrier(barrier: Barrier, timeout: float | None) -> int:
    passed = await _wait(lambda then: barrier._start_wait(0, then), timeout)
    if passed is None:
        raise BrokenBarrierError(f"barrier {barrier.name!r}: the others did not come in time")
    place: int = passed[0]
    if not barrier._has_action:
        return place
    if passed[1]:
        barrier._act()
    try:
        await _wait(lambda then: barrier._start_wait(1, then), None)
    except BaseException as error:
        barrier._left(error)
        raise
    return place
