"""The action of a barrier: run by one party before any goes on."""

from __future__ import annotations

import functools
import multiprocessing
import threading
import time

import pytest

import farcell

KEY = b"a key for the tests"


def test_one_runs_it_before_any_goes_on(server, name):
    clients = [farcell.connect(server.address, authkey=KEY) for _ in range(3)]
    ran, seen = [], []

    def action() -> None:
        before = len(ran)
        time.sleep(0.05)
        assert len(seen) == 3 * before
        ran.append(threading.current_thread())

    def work(client) -> None:
        barrier = client.barrier(name, 3, action)
        for round in range(4):
            place = barrier.wait(20)
            assert len(ran) == round + 1
            seen.append((place, ran[round] is threading.current_thread()))
            client.barrier(name + "again", 3).wait(20)

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ran) == 4
    # As with threading, who comes last runs it.
    assert sorted(seen) == sorted([(0, False), (1, False), (2, True)] * 4)


def test_one_that_raises_breaks_it(client, name):
    calls = []

    def action() -> None:
        calls.append(None)
        if len(calls) == 1:
            raise ZeroDivisionError("the action")

    barrier = client.barrier(name, 2, action)
    ended = []

    def party() -> None:
        try:
            ended.append(barrier.wait(20))
        except Exception as error:
            ended.append(type(error).__name__)

    def both() -> list:
        ended.clear()
        threads = [threading.Thread(target=party) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return sorted(ended, key=str)

    assert both() == ["BrokenBarrierError", "ZeroDivisionError"]
    assert barrier.broken
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait(5)
    barrier.reset()
    assert not barrier.broken and barrier.n_waiting == 0
    assert both() == [0, 1] and len(calls) == 2


def test_abort_and_reset_while_others_wait(client, name):
    barrier = client.barrier(name, 3, action=list)
    for end in (barrier.abort, barrier.reset):
        ended = []

        def party() -> None:
            with pytest.raises(threading.BrokenBarrierError):
                barrier.wait()
            ended.append(None)

        threads = [threading.Thread(target=party) for _ in range(2)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 10
        while barrier.n_waiting < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (barrier.parties, barrier.n_waiting, barrier.broken) == (3, 2, False)
        end()
        for thread in threads:
            thread.join(10)
        assert len(ended) == 2
        assert barrier.broken is (end == barrier.abort)
        barrier.reset()


def test_the_time_of_the_barrier_and_of_a_wait(client, name):
    barrier = client.barrier(name, 2, timeout=0.1)
    begun = time.monotonic()
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait()
    assert 0.1 <= time.monotonic() - begun < 10
    with pytest.raises(TypeError):
        client.barrier(name + "2", 2, action="none")
    with pytest.raises(ValueError):
        client.barrier(name + "3", 2, timeout=float("nan"))


def test_all_parties_give_an_action_or_none(client, name):
    client.barrier(name, 2, list)
    with pytest.raises(farcell.ArrayMismatch):
        client.barrier(name, 2)


def test_a_time_is_not_for_the_action(client, name):
    barrier = client.barrier(name, 2, functools.partial(time.sleep, 0.5))
    places = []
    threads = [threading.Thread(target=lambda: places.append(barrier.wait(0.2))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(places) == [0, 1]


def meet(barrier, counters) -> None:
    for round in range(1, 4):
        barrier.wait(60)
        assert counters[0] == round
        barrier.wait(60)
        assert counters[0] == round
        if barrier.wait(60) == 0:
            counters.add(1, 1)


class Add:
    """An action that travels with its barrier: every third time it counts."""

    def __init__(self, counters) -> None:
        self.counters = counters

    def __call__(self) -> None:
        if self.counters.add(2, 1) % 3 == 0:
            self.counters.add(0, 1)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_it_goes_to_other_processes(client, name, method):
    counters = client.counters(name + "c", 3)
    barrier = client.barrier(name, 3, Add(counters))
    context = multiprocessing.get_context(method)
    children = [context.Process(target=meet, args=(barrier, counters)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert counters.tolist() == [3, 3, 9]


def test_of_a_manager(server, name):
    one = farcell.Manager(server.address, KEY, name=name)
    two = farcell.Manager(server.address, KEY, name=name)
    ran = []
    barriers = [manager.Barrier(2, lambda: ran.append(None)) for manager in (one, two)]
    threads = [threading.Thread(target=barrier.wait, args=(20,)) for barrier in barriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ran == [None]
    one.Barrier(2, list)
    with pytest.raises(farcell.Diverged, match="with an action"):
        two.Barrier(2)
