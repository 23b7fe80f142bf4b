"""Locks, semaphores and barriers, in threads and in processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest

import farcell

KEY = b"a key for the tests"


def add_under(lock, counters, times: int) -> None:
    for _ in range(times):
        with lock:
            # Two steps, which only the lock makes one.
            counters[0] += 1


def test_a_lock_guards_what_is_not_atomic(client, name):
    lock, counters = client.lock(name), client.counters(name + "c", 1)
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=add_under, args=(lock, counters, 50)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert counters[0] == 150


def test_lock_as_threading_has_it(client, name):
    lock = client.lock(name)
    other = farcell.Client.lock(client, name)
    assert lock.acquire() is True and lock.locked() and other.locked()
    assert other.acquire(False) is False
    assert other.acquire(blocking=False) is False
    begun = time.monotonic()
    assert other.acquire(True, 0.2) is False
    assert other.acquire(timeout=0.1) is False
    assert 0.3 <= time.monotonic() - begun < 10
    with pytest.raises(RuntimeError):
        other.release()
    with pytest.raises(ValueError):
        other.acquire(False, 1.0)
    lock.release()
    with pytest.raises(RuntimeError):
        lock.release()
    with other:
        first = other.token
        assert other.was_abandoned is False
    with lock:
        assert lock.token > first
    # Any thread of the process may release.
    lock.acquire()
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()
    assert not lock.locked()


def test_rlock_belongs_to_a_thread(client, name):
    lock = client.rlock(name)
    with lock, lock:
        lock.acquire()
        failed = []

        def try_it() -> None:
            failed.append(lock.acquire(timeout=0.1))
            try:
                lock.release()
            except RuntimeError:
                failed.append("not mine")

        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
        assert failed == [False, "not mine"]
        lock.release()
        assert lock.locked()
    assert not lock.locked()


def hold_and_die(lock) -> None:
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lock_is_freed_when_its_holder_dies(name):
    with farcell.serve("127.0.0.1:0", authkey=KEY, lease=0.8) as server:
        client = farcell.connect(server.address, authkey=KEY)
        lock = client.lock(name)
        child = multiprocessing.get_context("spawn").Process(target=hold_and_die, args=(lock,))
        child.start()
        child.join()
        assert lock.acquire(timeout=20)
        assert lock.was_abandoned
        lock.release()
        client.close()


def test_a_forked_child_does_not_hold_its_parents_lock(client, name):
    lock = client.lock(name)
    with lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if lock.acquire(timeout=0.1) is False else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert lock.locked()


def test_an_array_of_locks(client, name):
    locks = client.locks(name, 3)
    with locks[1]:
        assert [lock.locked() for lock in locks] == [False, True, False]
    table = client.locks(name + "t", 2, 3)
    with table[1][2]:
        assert table[1][2].locked() and not table[0][2].locked()


def test_ctrl_c_ends_acquire(client, name):
    lock = client.lock(name)
    other = client.lock(name)
    with lock:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            other.acquire()
        assert time.monotonic() - begun < 2
    assert other.acquire(timeout=5)
    other.release()


def test_semaphore(client, name):
    semaphore = client.semaphore(name, 2)
    assert semaphore.acquire() and semaphore.acquire()
    assert semaphore.acquire(False) is False
    assert semaphore.acquire(timeout=0.1) is False
    assert semaphore.get_value() == 0
    semaphore.release(2)
    with semaphore:
        assert semaphore.get_value() == 1
    semaphore.release()
    assert semaphore.get_value() == 3
    bounded = client.semaphore(name + "b", 1, 1)
    with pytest.raises(ValueError):
        bounded.release()
    with pytest.raises(ValueError):
        bounded.release(0)


def test_barrier_in_threads(server, name):
    clients = [farcell.connect(server.address, authkey=KEY) for _ in range(3)]
    places = []

    def work(client) -> None:
        barrier = client.barrier(name, 3)
        for _ in range(5):
            places.append(barrier.wait(20))

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(places) == sorted([0, 1, 2] * 5)
    barrier = clients[0].barrier(name, 3)
    assert (barrier.parties, barrier.n_waiting, barrier.broken) == (3, 0, False)
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait(0.1)
    assert barrier.broken
    with pytest.raises(farcell.BrokenBarrierError):
        clients[1].barrier(name, 3).wait(5)
    barrier.reset()
    assert not barrier.broken
    barrier.abort()
    assert barrier.broken
    for client in clients:
        client.close()


def meet(barrier, counters) -> None:
    for round in range(1, 6):
        counters.add(0, 1)
        barrier.wait(60)
        assert counters[0] == 3 * round
        barrier.wait(60)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_barrier_in_processes(client, name, method):
    barrier, counters = client.barrier(name, 3), client.counters(name + "c", 1)
    context = multiprocessing.get_context(method)
    children = [context.Process(target=meet, args=(barrier, counters)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
