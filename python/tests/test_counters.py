"""Counters: the syntax of lists, and what is atomic."""

from __future__ import annotations

import threading

import pytest

import farcell


def test_they_have_the_syntax_of_lists(client, name):
    counters = client.counters(name, 4)
    counters[1] = 5
    counters[1] += 2
    counters[-1] -= 1
    assert list(counters) == [0, 7, 0, -1]
    assert counters.tolist() == [0, 7, 0, -1]
    assert counters.snapshot().tolist() == [0, 7, 0, -1]
    counters[:] = [1, 2, 3, 4]
    assert counters[1:3].tolist() == [2, 3]
    counters[::2] = 9
    assert counters.tolist() == [9, 2, 9, 4]
    with pytest.raises(IndexError):
        counters[4]
    with pytest.raises(ValueError):
        counters[:] = [1]
    assert 9 in counters and 5 not in counters


def test_a_table_is_indexed_by_row_and_column(client, name):
    counters = client.counters(name, 2, 3)
    counters[1, 2] = 4
    assert counters[1][2] == counters.flat[5] == counters.at(1, 2).load() == 4
    counters[0] = [1, 2, 3]
    assert counters.snapshot().tolist() == [[1, 2, 3], [0, 0, 4]]
    assert counters.column(2).tolist() == [3, 4]


def test_add_loses_nothing(client, name):
    counters = client.counters(name, 2)

    def work() -> None:
        for _ in range(200):
            counters.add(1, 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters[1] == 800
    assert counters.add(1, -800) == 800


def test_one_counter_alone(client, name):
    counter = client.counters(name, 3).counter_at(2)
    counter.value = 3
    assert counter.value == counter.get() == counter.load() == 3
    assert counter.compare_exchange(3, 4) and not counter.compare_exchange(3, 5)
    assert counter.swap(10) == 4
    assert counter.wait_until(">=", 10) == 10
    assert counter.wait_until(">", 10, 0.05) is None
    waiting = threading.Thread(target=lambda: counter.wait_until(">", 10))
    waiting.start()
    counter.add(1)
    waiting.join(5)
    assert not waiting.is_alive()
    with pytest.raises(ValueError):
        counter.wait_until("~", 1)


def test_numbers_that_do_not_fit_are_refused(client, name):
    counters = client.counters(name, 1)
    with pytest.raises(farcell.ValueTooLarge):
        counters[0] = 2**62
    with pytest.raises(OverflowError):
        counters[0] = 2**80
    counters[0] = 2**62 - 1
    assert counters[0] == 2**62 - 1


def test_waiting_for_some(client, name):
    counters = client.counters(name, 4)
    counters[1] = counters[3] = 5
    assert sorted(counters.wait_some(2, ">=", 5)) == [(0, 1), (0, 3)]
    assert counters.wait_some(3, ">=", 5, 0.05) == []
