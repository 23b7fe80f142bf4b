"""Waits to be awaited: hundreds of them, and one thread for all."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import farcell

KEY = b"a key for the tests"


def test_hundreds_of_waits_need_one_thread(client, name):
    events = client.events(name, 500)
    before = threading.active_count()

    def threads() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads"))

    async def main() -> None:
        at_first = threads()
        waits = [asyncio.create_task(event.wait_async()) for event in events]
        await asyncio.sleep(0.2)
        assert threads() <= at_first + 1
        assert not any(wait.done() for wait in waits)
        for event in events[::2]:
            event.set()
        for wait in waits[::2]:
            assert await asyncio.wait_for(wait, 10) is True
        assert not any(wait.done() for wait in waits[1::2])
        events.set()
        assert await asyncio.wait_for(asyncio.gather(*waits), 10) == [True] * 500

    asyncio.run(main())
    assert threading.active_count() == before


def test_timeouts_and_what_is_set_already(client, name):
    event = client.events(name, 1)[0]

    async def main() -> None:
        begun = time.monotonic()
        assert await event.wait_async(0.1) is False
        assert 0.1 <= time.monotonic() - begun < 10
        assert await event.wait_async(0) is False
        event.set()
        assert await event.wait_async() is True
        assert await event.wait_async(5) is True

    asyncio.run(main())


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_no_time_at_all_finds_what_is_there(server, name, transport):
    """As `wait(0)` and `acquire(False)` do."""

    async def main(client: farcell.Client) -> None:
        event, lock = client.events(name, 1)[0], client.lock(name + "l")
        event.set()
        for _ in range(100):
            assert await event.wait_async(0) is True
            assert await event.wait_async(-1) is True
            assert await lock.acquire_async(0) is True
            lock.release()

    with farcell.connect(server.address, authkey=KEY, transport=transport) as client:
        asyncio.run(main(client))


def test_a_cancelled_task_leaves_nothing_behind(server, client, name):
    event = client.events(name, 1)[0]

    async def main() -> None:
        waits = [asyncio.create_task(event.wait_async()) for _ in range(20)]
        deadline = time.monotonic() + 10
        while server.parked_waits() < 20 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert server.parked_waits() == 20
        for wait in waits:
            wait.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError)
            for end in await asyncio.gather(*waits, return_exceptions=True)
        )

    asyncio.run(main())
    deadline = time.monotonic() + 5
    while server.parked_waits() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.parked_waits() == 0


def test_many_cells_to_be_awaited(client, name):
    events = client.events(name, 3, 3)

    async def main() -> None:
        some = asyncio.create_task(events[:, 1].wait_any_async())
        every = asyncio.create_task(events[2].wait_all_async())
        assert await events[0].wait_any_async(0.05) == []
        events[2, 1].set()
        assert await asyncio.wait_for(some, 5) == [(2, 1)]
        assert not every.done()
        events[2].set()
        assert await asyncio.wait_for(every, 5) is True
        assert await events[0].wait_all_async(0.05) is False

    asyncio.run(main())


def test_blocking_calls_go_on_meanwhile(client, name):
    events = client.events(name, 2)

    async def main() -> None:
        wait = asyncio.create_task(events[0].wait_async())
        await asyncio.sleep(0.05)
        for _ in range(100):
            events[1].set()
            events[1].clear()
        assert events[1].transitions() == 200
        events[0].set()
        assert await asyncio.wait_for(wait, 5)

    asyncio.run(main())


def test_a_lost_server_is_an_exception(name):
    server = farcell.serve("127.0.0.1:0", authkey=KEY)
    client = farcell.connect(server.address, authkey=KEY, reconnect_for=0.3)
    event = client.events(name, 1)[0]

    async def main() -> None:
        wait = asyncio.create_task(event.wait_async())
        await asyncio.sleep(0.1)
        await asyncio.to_thread(server.stop)
        with pytest.raises(farcell.Unreachable):
            await asyncio.wait_for(wait, 10)
        with pytest.raises(farcell.Unreachable):
            await asyncio.wait_for(event.wait_async(), 10)

    asyncio.run(main())


def test_a_closed_client_ends_its_waits(client, name):
    event = client.events(name, 1)[0]

    async def main() -> None:
        wait = asyncio.create_task(event.wait_async())
        await asyncio.sleep(0.1)
        client.close()
        with pytest.raises(farcell.Closed):
            await asyncio.wait_for(wait, 5)

    asyncio.run(main())
