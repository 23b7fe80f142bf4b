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


def built_by_append(manager: farcell.Manager, n: int) -> tuple:
    read = manager.list()
    for _ in range(n):
        row = manager.list()
        for _ in range(n):
            row.append(manager.Event())
        read.append(row)
    sync = manager.list()
    for rank in range(n):
        sync.append(10 * rank)
    return read, sync


def test_lists_that_grow(server, name):
    one = farcell.Manager(server.address, KEY, name=name)
    two = farcell.Manager(server.address, KEY, name=name)
    (read, sync), (their_read, their_sync) = built_by_append(one, 3), built_by_append(two, 3)
    read[1][2].set()
    assert their_read[1][2].is_set() and not their_read[2][1].is_set()
    sync[2] += 1
    assert sync.add(2, 1) == 21
    assert list(their_sync) == their_sync[:] == [0, 10, 22] and their_sync[-1] == 22
    assert (len(read), len(read[0]), len(sync)) == (3, 3, 3)
    sync += [7]
    assert sync.tolist() == [0, 10, 22, 7] and len(their_sync) == 3
    # The others go on with the same call.
    their_sync.extend([7])
    sync[3] = 8
    assert their_sync[3] == 8


def test_lists_that_grow_apart_are_reported(server, name):
    one = farcell.Manager(server.address, KEY, name=name)
    two = farcell.Manager(server.address, KEY, name=name)
    mine, theirs = one.list(), two.list()
    mine.append(one.Event())
    with pytest.raises(farcell.Diverged, match=r"Lock\(\).*Event\(\)"):
        theirs.append(two.Lock())
    event = two.Event()
    with pytest.raises(farcell.Diverged, match=r"append\(Counters\).*append\(Event\)"):
        theirs.append(two.client.counters(name + "c", 1))
    theirs.append(event)
    for bad in (1, 1.5, "text", None):
        with pytest.raises(TypeError):
            theirs.append(bad)
    for call in (theirs.pop, theirs.clear, theirs.sort, lambda: theirs.insert(0, event)):
        with pytest.raises(TypeError, match="only grows"):
            call()
    with pytest.raises(TypeError, match="cannot be replaced"):
        theirs[0] = 1
    with pytest.raises(TypeError, match=r"begin with an empty list"):
        two.list([1, 2]).append(3)


def test_dicts(server, name):
    one = farcell.Manager(server.address, KEY, name=name)
    two = farcell.Manager(server.address, KEY, name=name)
    mine = one.dict({"step": 5}, epoch=1, lock=one.Lock())
    mine["step"] += 1
    theirs = two.dict({"step": 5}, epoch=1, lock=two.Lock())
    assert theirs["step"] == 6 and theirs.add("epoch", 2) == 1 and mine["epoch"] == 3
    with mine["lock"]:
        assert theirs["lock"].acquire(False) is False
    for key in ("a b/\u00e4%+~", 7, -1, ""):
        mine[key] = 9
        assert theirs[key] == 9 and key in theirs
    assert set(theirs) == {"step", "epoch", "lock", "a b/\u00e4%+~", 7, -1, ""}
    assert len(theirs) == 7
    del theirs[7]
    assert 7 not in mine and mine.get(7) is None
    with pytest.raises(KeyError):
        mine[7]
    with pytest.raises(KeyError):
        mine["never"]
    with pytest.raises(KeyError):
        del mine["never"]
    assert mine.setdefault("new", 4) == theirs.pop("new") == 4 and "new" not in mine
    for bad in (1.5, "text", [1]):
        with pytest.raises(TypeError):
            mine["bad"] = bad
    with pytest.raises(TypeError):
        mine[1.5] = 1
    two.Event()
    with pytest.raises(farcell.Diverged, match=r"dict\(\).*Event\(\)"):
        one.dict()


def use(numbers, table, row) -> None:
    numbers[1] += 1
    table["step"] += 1
    table["event"].set()
    row[0].set()


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_lists_and_dicts_go_to_children(server, name, method):
    manager = farcell.Manager(server.address, KEY, name=name)
    numbers, row = manager.list(), manager.list()
    numbers.extend([1, 2])
    row.append(manager.Event())
    table = manager.dict(step=1, event=manager.Event())
    context = multiprocessing.get_context(method)
    child = context.Process(target=use, args=(numbers, table, row))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert numbers.tolist() == [1, 3] and table["step"] == 2
    assert table["event"].is_set() and row[0].is_set()


def test_an_array(server, name):
    manager = farcell.Manager(server.address, KEY, name=name)
    assert list(manager.Array("i", 3)) == [0, 0, 0]
    assert list(manager.Array("i", [4, 5])) == [4, 5]


def test_what_a_manager_does_not_have(server, name):
    manager = farcell.Manager(server.address, KEY, name=name)
    for call in [lambda: manager.dict(a=1.5), lambda: manager.list([1.5]),
                 lambda: manager.Value("d", 1.5), lambda: manager.list([manager.Event(), 1])]:
        with pytest.raises(TypeError):
            call()
    for what in ("Queue", "Condition", "Namespace", "Pool", "no_such_thing"):
        with pytest.raises(AttributeError, match=what):
            getattr(manager, what)
