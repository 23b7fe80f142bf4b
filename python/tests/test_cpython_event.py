"""CPython's own test of multiprocessing's events, against ours.

It comes from the test package of the interpreter that runs this.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import unittest

import pytest

import farcell

theirs = pytest.importorskip(
    "test._test_multiprocessing", reason="this interpreter came without its test package"
)

_numbers = itertools.count()


class Events:
    """What their test wants, from a server that runs as long as the class."""

    TYPE = "processes"
    METHOD: str

    @classmethod
    def setUpClass(cls) -> None:
        cls.server = farcell.serve("127.0.0.1:0", authkey=b"a key for the tests")
        cls.client = farcell.connect(cls.server.address, authkey=b"a key for the tests")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.client.close()
        cls.server.stop()

    def Event(self) -> farcell.Event:
        name = f"cpython.{os.getpid()}.{next(_numbers)}"
        return self.client.events(name, 1)[0]

    def Process(self, *args: object, **kwargs: object) -> multiprocessing.Process:
        return multiprocessing.get_context(self.METHOD).Process(*args, **kwargs)


class TestSpawn(Events, theirs._TestEvent, unittest.TestCase):
    METHOD = "spawn"


class TestFork(Events, theirs._TestEvent, unittest.TestCase):
    METHOD = "fork"


class TestForkserver(Events, theirs._TestEvent, unittest.TestCase):
    METHOD = "forkserver"


def test_their_tests_are_there():
    mine = unittest.defaultTestLoader.getTestCaseNames(TestSpawn)
    assert "test_event" in mine
