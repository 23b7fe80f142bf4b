"""A Manager's objects, found by position in every process."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading

import pytest

import farcell

KEY = b"a key for the tests"


def gala(manager: farcell.Manager, n: int) -> dict:
    """What GALA keeps in its Manager."""
    return {
        "read": manager.list([manager.list([manager.Event() for _ in range(n)]) for _ in range(n)]),
        "write": manager.list([manager.list([manager.Event() for _ in range(n)]) for _ in range(n)]),
        "locks": manager.list([manager.Lock() for _ in range(n)]),
        "sync": manager.list([0] * n),
        "barrier": manager.Barrier(n),
    }


def test_the_same_calls_give_the_same_objects(server, name):
    one = farcell.Manager(server.address, KEY, name=name)
    two = farcell.Manager(server.address, KEY, name=name)
    mine, theirs = gala(one, 3), gala(two, 3)
    mine["read"][1][2].set()
    assert theirs["read"][1][2].wait(5)
    assert not theirs["write"][1][2].is_set() and not theirs["read"][2][1].is_set()
    theirs["sync"][2] += 5
    assert list(mine["sync"]) == [0, 0, 5]
    with mine["locks"][0]:
        assert theirs["locks"][0].acquire(False) is False
        assert theirs["locks"][1].acquire(False) is True
    assert mine["barrier"].parties == 3


def test_what_is_made_first_is_filled_in_once(server, name):
    one = farcell.Manager(server.address, KEY, name=name)
    two = farcell.Manager(server.address, KEY, name=name)
    values = one.list([5, 6, 7])
    values[0] = 100
    assert list(two.list([5, 6, 7])) == [100, 6, 7]
    assert one.Value("i", 9).value == 9
    assert two.Value("i", 9).add(1) == 9
    assert two.Semaphore(3).get_value() == 3
    assert one.Semaphore(3).acquire()
    assert one.BoundedSemaphore(1).get_value() == 1
    assert isinstance(one.RLock(), farcell.Lock)


def test_an_order_that_diverges_is_reported_with_both_sides(server, name):
    one = farcell.Manager(server.address, KEY, name=name)
    two = farcell.Manager(server.address, KEY, name=name)
    one.Event()
    one.Lock()
    one.Barrier(4)
    two.Event()
    with pytest.raises(farcell.Diverged) as caught:
        two.Event()
    text = str(caught.value)
    assert "position 1" in text and "Event()" in text and "Lock()" in text
    # Nothing was taken: the right call goes on from there.
    two.Lock()
    with pytest.raises(farcell.Diverged, match=r"Barrier\(5\).*Barrier\(4\)"):
        two.Barrier(5)
    with pytest.raises(farcell.ArrayMismatch):
        two.list([1, 2])
    assert two.Barrier(4).parties == 4


def test_names_need_no_order(server, name):
    one = farcell.Manager(server.address, KEY, name=name)
    two = farcell.Manager(server.address, KEY, name=name)
    a, b = one.Event(name="a"), one.Event(name="b")
    other_b, other_a = two.Event(name="b"), two.Event(name="a")
    a.set()
    assert other_a.is_set() and not other_b.is_set() and not b.is_set()
    with pytest.raises(farcell.ArrayMismatch):
        two.Lock(name="a")
    assert one.Value("i", 3, name="v").value == two.Value("i", 3, name="v").value == 3
    assert list(two.list([1, 2], name="l")) == list(one.list([1, 2], name="l")) == [1, 2]


def test_several_managers_are_apart(server, name):
    one = farcell.Manager(server.address, KEY, name=name + "1")
    two = farcell.Manager(server.address, KEY, name=name + "2")
    event = one.Event()
    event.set()
    two.Lock()
    assert not two.Event().is_set()


def work(shared: dict, rank: int) -> None:
    for column in range(3):
        shared["read"][rank][column].set()
    with shared["locks"][0]:
        shared["sync"][rank] += 1
    shared["barrier"].wait(60)
    assert list(shared["sync"]) == [1, 1, 1]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_objects_go_to_children(server, name, method):
    manager = farcell.Manager(server.address, KEY, name=name)
    shared = gala(manager, 3)
    context = multiprocessing.get_context(method)
    children = [context.Process(target=work, args=(shared, rank)) for rank in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert all(event.is_set() for row in shared["read"] for event in row)


def test_start_serves_as_multiprocessings_does():
    manager = farcell.Manager(("127.0.0.1", 0), authkey=KEY)
    manager.start()
    event = manager.Event()
    program = (
        "import sys, farcell\n"
        "manager = farcell.Manager(sys.argv[1], authkey=b'a key for the tests')\n"
        "manager.connect()\n"
        "manager.Event().set()\n"
    )
    subprocess.run([sys.executable, "-c", program, manager.address], check=True, timeout=60)
    assert event.wait(5)
    manager.shutdown()
    with pytest.raises(farcell.Closed):
        event.is_set()


def test_many_positions(server, name):
    one = farcell.Manager(server.address, KEY, name=name)
    two = farcell.Manager(server.address, KEY, name=name)
    made = [one.Event() for _ in range(1100)]
    again = [two.Event() for _ in range(1100)]
    made[1024].set()
    assert [at for at, event in enumerate(again) if event.is_set()] == [1024]
    assert len(set(made)) == 1100


def test_threads_take_positions_of_their_own(server, name):
    manager = farcell.Manager(server.address, KEY, name=name)
    made = []
    threads = [
        threading.Thread(target=lambda: made.extend(manager.Event() for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 80


def test_what_a_manager_does_not_have(server, name):
    manager = farcell.Manager(server.address, KEY, name=name)
    for call in [manager.dict, manager.list, lambda: manager.list([1.5]),
                 lambda: manager.Value("d", 1.5), lambda: manager.list([manager.Event(), 1])]:
        with pytest.raises(TypeError):
            call()
