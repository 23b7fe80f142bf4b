"""Locks, permits and barriers to be awaited: what is not wanted goes back."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import farcell

KEY = b"a key for the tests"


def threads() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads"))


def eventually(so) -> bool:
    deadline = time.monotonic() + 5
    while not so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return so()


def test_hundreds_queue_for_a_lock_on_one_thread(client, name):
    lock, counters = client.lock(name), client.counters(name + "c", 1)

    async def work() -> None:
        async with lock:
            value = counters[0]
            # The others come in here, unless the lock keeps them out.
            await asyncio.sleep(0)
            counters[0] = value + 1

    async def main() -> None:
        at_first = threads()
        async with lock:
            tasks = [asyncio.create_task(work()) for _ in range(300)]
            await asyncio.sleep(0.2)
            assert threads() <= at_first + 1
            assert not any(task.done() for task in tasks)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)

    asyncio.run(main())
    assert counters[0] == 300
    assert not lock.locked()


def test_acquire_with_a_time(server, client, name):
    lock, other = client.lock(name), client.lock(name)

    async def main() -> None:
        assert await lock.acquire_async() is True
        assert lock.locked() and lock.token >= 1
        begun = time.monotonic()
        assert await other.acquire_async(0.1) is False
        assert await other.acquire_async(0) is False
        assert 0.1 <= time.monotonic() - begun < 10
        lock.release()
        assert await other.acquire_async(5) is True
        other.release()
        with pytest.raises(RuntimeError):
            await client.rlock(name + "r").acquire_async()

    asyncio.run(main())
    assert server.parked_waits() == 0


def test_a_cancelled_acquire_holds_nothing(client, name):
    lock, other = client.lock(name), client.lock(name)

    async def main() -> None:
        # While it queues, and around the moment in which it gets the lock.
        for pause in [0.05, 0.0, 0.001, 0.002, 0.003, 0.005]:
            async with lock:
                task = asyncio.create_task(other.acquire_async())
                await asyncio.sleep(0.05)
            await asyncio.sleep(pause)
            task.cancel()
            try:
                if await task:
                    other.release()
            except asyncio.CancelledError:
                pass
            assert await lock.acquire_async(5) is True, pause
            lock.release()

    asyncio.run(main())
    assert eventually(lambda: not lock.locked())


def test_what_was_had_when_the_loop_has_gone_goes_back(server, client, name):
    lock = client.lock(name)
    held = farcell.connect(server.address, authkey=KEY).lock(name)
    held.acquire()

    async def main() -> None:
        asyncio.create_task(lock.acquire_async())
        await asyncio.sleep(0.05)
        held.release()

    asyncio.run(main())
    assert eventually(lambda: not held.locked())
    assert held.acquire(timeout=5)
    held.release()


def test_semaphores(client, name):
    semaphore = client.semaphore(name, 3)
    most = now = 0

    async def work() -> None:
        nonlocal most, now
        async with semaphore:
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.001)
            now -= 1

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(*(work() for _ in range(200))), 60)
        assert semaphore.get_value() == 3
        for _ in range(3):
            assert await semaphore.acquire_async()
        assert await semaphore.acquire_async(0.05) is False
        tasks = [asyncio.create_task(semaphore.acquire_async()) for _ in range(50)]
        await asyncio.sleep(0.1)
        semaphore.release(2)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        semaphore.release(1 + sum(one is True for one in ended))

    asyncio.run(main())
    assert most == 3
    # Those that were given to cancelled tasks have come back.
    assert eventually(lambda: semaphore.get_value() == 3)


def test_barriers(server, client, name):
    others = [farcell.connect(server.address, authkey=KEY) for _ in range(2)]
    barriers = [one.barrier(name, 3) for one in (client, *others)]

    async def main() -> None:
        for _ in range(3):
            places = await asyncio.gather(*(barrier.wait_async(20) for barrier in barriers))
            assert sorted(places) == [0, 1, 2]
        begun = time.monotonic()
        with pytest.raises(threading.BrokenBarrierError):
            await barriers[0].wait_async(0.1)
        assert time.monotonic() - begun < 3
        assert barriers[1].broken
        barriers[1].reset()
        task = asyncio.create_task(barriers[0].wait_async())
        other = asyncio.create_task(barriers[1].wait_async())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The others do not wait for one that has gone.
        with pytest.raises(farcell.BrokenBarrierError):
            await asyncio.wait_for(other, 10)

    asyncio.run(main())


def test_a_hundred_parties_on_one_thread(client, name):
    barrier = client.barrier(name, 100, action=lambda: ran.append(None))
    ran: list[None] = []

    async def party() -> int:
        place = await barrier.wait_async(60)
        assert ran == [None]
        return place

    async def main() -> None:
        at_first = threads()
        tasks = [asyncio.create_task(party()) for _ in range(99)]
        await asyncio.sleep(0.1)
        assert threads() <= at_first + 1 and ran == []
        places = await asyncio.gather(party(), *tasks)
        assert sorted(places) == list(range(100))

    asyncio.run(main())


def test_an_action_that_raises(client, name):
    def bad() -> None:
        raise ZeroDivisionError

    barrier = client.barrier(name, 2, bad)

    async def main() -> None:
        ended = await asyncio.gather(
            barrier.wait_async(), barrier.wait_async(), return_exceptions=True
        )
        assert sorted(type(one).__name__ for one in ended) == [
            "BrokenBarrierError", "ZeroDivisionError"
        ]

    asyncio.run(main())
    assert barrier.broken


def test_counters_messages_and_transitions(client, name):
    counters, slots = client.counters(name, 2, 3), client.slots(name + "s", 1, 8)
    event = client.events(name + "e", 1)[0]

    async def main() -> None:
        one = asyncio.create_task(counters.at(0, 1).wait_until_async(">=", 3))
        some = asyncio.create_task(counters[1].wait_some_async(2, "!=", 0))
        newer = asyncio.create_task(slots[0].wait_newer_async(0))
        seen = asyncio.create_task(event.wait_after_async(0))
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in (one, some, newer, seen))
        counters.add((0, 1), 3)
        assert await asyncio.wait_for(one, 5) == 3
        counters[1, 0] = 1
        counters[1, 2] = -1
        assert sorted(await asyncio.wait_for(some, 5)) == [(1, 0), (1, 2)]
        slots[0].write(b"new")
        assert await asyncio.wait_for(newer, 5) is True
        event.set()
        event.clear()
        assert await asyncio.wait_for(seen, 5) >= 1
        assert await counters.at(0, 0).wait_until_async("==", 0) == 0
        assert await counters.at(0, 0).wait_until_async("==", 1, 0.05) is None
        assert await counters[0].wait_some_async(3, ">", 5, 0.05) == []
        assert await slots[0].wait_newer_async(1, 0.05) is False
        assert await event.wait_after_async(2, 0.05) is None
        with pytest.raises(ValueError):
            await counters.at(0, 0).wait_until_async("=~", 1)

    asyncio.run(main())


def test_a_lost_server_ends_what_queues(name):
    server = farcell.serve("127.0.0.1:0", authkey=KEY)
    client = farcell.connect(server.address, authkey=KEY, reconnect_for=0.3)
    lock, barrier = client.lock(name), client.barrier(name + "b", 2)
    lock.acquire()
    again = client.lock(name)

    async def main() -> None:
        tasks = [again.acquire_async(), barrier.wait_async()]
        tasks = [asyncio.create_task(task) for task in tasks]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(server.stop)
        for task in tasks:
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(task, 10)

    asyncio.run(main())
