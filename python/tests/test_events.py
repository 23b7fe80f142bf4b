"""Events: every way to name them, alone and many at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy
import pytest

import farcell


def test_all_three_shapes_of_the_question_name_the_same_event(client, name):
    events = client.events(name, 3, 5)
    one = events[1][4]
    assert one == events[1, 4] == events.get_event(1, 4) == events.flat[9] == events[-2][-1]
    assert hash(one) == hash(events[1, 4])
    assert (one.row, one.col, one.name) == (1, 4, name)
    events.trigger_event(1, 4)
    assert one.is_set() and one.isSet()
    events.clear_event(1, 4)
    assert not one.is_set()
    assert one != events[1, 3]
    assert len(events) == 3 and len(events[0]) == 5 and len(events.flat) == 15
    assert events.shape == (3, 5) and events[0].shape == (5,) and events.flat.size == 15


def test_a_list_of_events_is_indexed_once(client, name):
    events = client.events(name, 4)
    events[3].set()
    assert [event.is_set() for event in events] == [False, False, False, True]
    assert events.shape == (4,)


def test_indexing_does_no_io(server, name):
    client = farcell.connect(server.address, authkey=b"a key for the tests")
    events = client.events(name, 64, 64)
    client.close()
    for row in range(64):
        for col in range(64):
            assert events[row][col] == events[row, col]
    with pytest.raises(farcell.Closed):
        client.info()


def test_what_lies_outside_is_an_index_error(client, name):
    events = client.events(name, 2, 3)
    for index in [2, -3, (2, 0), (0, 3), (0, -4), (0, 0, 0)]:
        with pytest.raises(IndexError):
            events[index]
    for row, col in [(2, 0), (0, 3), (-1, 0)]:
        with pytest.raises(IndexError):
            events.get_event(row, col)
    with pytest.raises(TypeError):
        events["a"]
    assert list(events.flat[3:]) == [events[1, 0], events[1, 1], events[1, 2]]


def test_views_agree_with_numpy_about_what_they_select(client, name):
    events = client.events(name, 6, 7)
    for row in range(6):
        for col in range(7):
            if (row * 7 + col) % 3 == 0:
                events[row, col].set()
    truth = events.snapshot()
    assert truth.dtype == bool and truth.shape == (6, 7)
    assert truth.sum() == 14
    for index in [
        numpy.s_[2],
        numpy.s_[:, 3],
        numpy.s_[1:5],
        numpy.s_[1:5, ::2],
        numpy.s_[::-1, 1:],
        numpy.s_[4, ::-3],
        numpy.s_[5:2:-1, -1],
        numpy.s_[3:3],
    ]:
        view = events[index]
        assert (view.snapshot() == truth[index]).all(), index
        assert view.shape == truth[index].shape, index
    assert (events[1:5, ::2][1:, ::-1].snapshot() == truth[1:5, ::2][1:, ::-1]).all()
    assert (events.flat[3:30:4].snapshot() == truth.reshape(-1)[3:30:4]).all()
    assert (events[1:5].flat[::5].snapshot() == truth[1:5].reshape(-1)[::5]).all()
    assert events[[(0, 0), (0, 1), (5, 6)]].snapshot().tolist() == [True, False, bool(truth[5, 6])]


def test_many_are_set_cleared_and_waited_for_at_once(client, name):
    events = client.events(name, 4, 4)
    assert events[:, 2].set() == 4
    assert events[1].set() == 3
    assert events[1].is_set().all()
    assert sorted(events[1:3].wait_any()) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 2)]
    assert events[:, 2].wait_all(1.0) is True
    assert events[0].wait_all(0.05) is False
    assert events[0, :2].wait_any(0.05) == []
    assert len(events[:, 2].wait_some(3)) >= 3
    assert events.clear() == 7
    assert not events.snapshot().any()
    assert events[2:2].wait_all(0.0) is True


def test_waiting_for_many_is_one_request(server, client, name):
    events = client.events(name, 32, 32)
    waiting = threading.Thread(target=events.wait_all)
    waiting.start()
    deadline = time.monotonic() + 5
    while server.parked_waits() < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.parked_waits() == 1
    events.set()
    waiting.join(5)
    assert not waiting.is_alive()


def test_a_pulse_ends_a_wait(server, client, name):
    event = client.events(name, 1)[0]
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(event.wait(5)))
    waiting.start()
    deadline = time.monotonic() + 5
    while server.parked_waits() < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    event.set()
    event.clear()
    waiting.join(5)
    assert seen == [True]
    assert event.transitions() == 2
    assert event.wait_after(0) == 2
    assert event.wait_after(2, 0.05) is None


def test_take_succeeds_once(client, name):
    event = client.events(name, 1)[0]
    event.set()
    took = []
    threads = [threading.Thread(target=lambda: took.append(event.take())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert took.count(True) == 1


def test_timeouts_are_those_of_threading(client, name):
    event = client.events(name, 1)[0]
    begun = time.monotonic()
    assert event.wait(0) is False
    assert event.wait(-1) is False
    assert event.wait(0.2) is False
    assert 0.2 <= time.monotonic() - begun < 10
    with pytest.raises(ValueError):
        event.wait(float("nan"))
    with pytest.raises(TypeError):
        event.wait("soon")
    event.set()
    assert event.wait(float("inf")) is True
    assert event.wait(1e300) is True


def test_waits_let_other_threads_run(client, name):
    event = client.events(name, 1)[0]
    waiting = [threading.Thread(target=event.wait) for _ in range(20)]
    for thread in waiting:
        thread.start()
    begun = time.monotonic()
    assert sum(range(100_000)) > 0
    assert time.monotonic() - begun < 2
    event.set()
    for thread in waiting:
        thread.join(5)
        assert not thread.is_alive()


def test_shape_and_kind_must_be_the_same(client, name):
    client.events(name, 2, 2)
    with pytest.raises(farcell.ArrayMismatch, match="event 2 x 2"):
        client.events(name, 2, 3)
    with pytest.raises(ValueError):
        client.counters(name, 2, 2)
    with pytest.raises(farcell.BadArgument):
        client.events("no spaces", 1)
    with pytest.raises(farcell.BadArgument):
        client.events(name + "x", 0)


def test_without_numpy_a_snapshot_is_a_memoryview(server, name):
    program = f"""
import sys
sys.modules["numpy"] = None
import farcell
client = farcell.connect({server.address!r}, authkey=b"a key for the tests")
events = client.events({name!r}, 2, 3)
events[1, 2].set()
seen = events.snapshot()
assert isinstance(seen, memoryview) and seen.shape == (2, 3) and seen.format == "?"
assert seen.tolist() == [[False, False, False], [False, False, True]]
counters = client.counters({name + "c"!r}, 3)
counters[1] = 7
assert counters.snapshot().tolist() == [0, 7, 0]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
