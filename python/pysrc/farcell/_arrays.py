"""Snapshots as arrays: numpy's where it is installed, memoryviews elsewhere."""

from __future__ import annotations

from typing import Any

_numpy: Any = None
_looked = False


def _find_numpy() -> Any:
    global _numpy, _looked
    if not _looked:
        try:
            import numpy
        except ImportError:
            pass
        else:
            _numpy = numpy
        _looked = True
    return _numpy


def _make(data: bytearray, shape: tuple[int, ...], dtype: str, code: str) -> Any:
    numpy = _find_numpy()
    if numpy is not None:
        return numpy.frombuffer(data, dtype=dtype).reshape(shape)
    # The codes are variables here, which the stubs of memoryview do not know.
    view: Any = memoryview(data)
    # A memoryview can have no dimension of length 0.
    return view.cast(code) if 0 in shape else view.cast(code, list(shape))


def bools(data: bytearray, shape: tuple[int, ...]) -> Any:
    return _make(data, shape, "bool", "?")


def ints(data: bytearray, shape: tuple[int, ...]) -> Any:
    return _make(data, shape, "int64", "q")
