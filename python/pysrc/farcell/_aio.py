"""Waits for asyncio: no thread each, one for all of a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._native import Event, Events, Pending


async def _wait(start: Callable[[Callable[[bool, Any], None]], Pending], timeout: float | None) -> Any:
    """What the wait found, or `None` when the time was over."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(satisfied: bool, value: Any) -> None:
        if future.done():
            return
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value if satisfied else None)

    def ended(satisfied: bool, value: Any) -> None:
        # On a thread of the session's.
        try:
            loop.call_soon_threadsafe(settle, satisfied, value)
        except RuntimeError:
            # The loop was closed, and nobody waits any more.
            pass

    pending = start(ended)
    timer = None if timeout is None else loop.call_later(max(timeout, 0.0), pending.cancel)
    try:
        return await future
    except asyncio.CancelledError:
        pending.cancel()
        raise
    finally:
        if timer is not None:
            timer.cancel()


async def wait_event(event: Event, timeout: float | None) -> bool:
    return await _wait(event._start_wait, timeout) is not None


async def wait_cells(events: Events, need: int, timeout: float | None, every: bool) -> Any:
    if need == 0 or events.size == 0:
        return every or []
    found = await _wait(lambda then: events._start_wait(need, then), timeout)
    if every:
        return found is not None
    return found or []
