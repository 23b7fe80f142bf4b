"""The exceptions. Each says what happened, to what, and what to do next.

An operation that failed did not happen, unless the exception is
`OutcomeUnknown`.
"""

from __future__ import annotations

import multiprocessing
import threading


class FarcellError(Exception):
    """Every exception of this package."""


class Unreachable(FarcellError, ConnectionError):
    """No connection to the server, and the time to get one is over."""


class BadAddress(FarcellError, ValueError, ConnectionError):
    """The address is no `HOST:PORT`, or its host has none."""


class ServerGoingAway(Unreachable):
    """The server was asked to stop."""


class OutcomeUnknown(FarcellError, ConnectionError):
    """The connection was lost under the operation: it happened or it did not."""


class ProtocolError(FarcellError, ConnectionError):
    """The two ends are not of one release."""


class PeerLost(FarcellError, ConnectionError):
    """A peer that a wait named has gone."""


class LeaseLost(FarcellError, ConnectionError):
    """The session that held this is over, and with it the hold."""


class BrokenBarrierError(FarcellError, threading.BrokenBarrierError):
    """The barrier is broken: nobody passes it until it is reset."""


class AuthenticationError(FarcellError, multiprocessing.AuthenticationError):
    """The keys do not match, or someone stands between the two ends."""


class NotEncrypted(FarcellError, ConnectionRefusedError):
    """One side wants to encrypt and the other does not."""


class OtherJob(FarcellError, ConnectionRefusedError):
    """The server serves another job."""


class Closed(FarcellError, ConnectionError):
    """This client was closed."""


class ArrayMismatch(FarcellError, ValueError):
    """The array exists with another kind or shape."""


class Diverged(ArrayMismatch):
    """Two processes asked a manager for different things at one position."""


class NoSuchArray(FarcellError, LookupError):
    """No array has this name."""


class ArrayRemoved(FarcellError, LookupError):
    """The array was removed while a handle to it was in use."""


class OutOfRange(FarcellError, IndexError):
    """Row or column lie outside of the array."""


class ValueTooLarge(FarcellError, OverflowError):
    """A number that a counter cannot hold."""


class BadArgument(FarcellError, ValueError):
    """A name, a shape or a setting that cannot be."""


class LimitReached(FarcellError, MemoryError):
    """The server has no room for this."""


class SlotBusy(FarcellError, TimeoutError):
    """Someone else writes the message, and has not finished in time."""


class Torn(FarcellError):
    """The message was left half written by a writer that has gone."""


class ReadOnly(FarcellError, PermissionError):
    """The session may read and wait only."""


class NoKey(FarcellError):
    """No usable key."""


class NoRdma(FarcellError, ConnectionError):
    """RDMA was asked for and cannot be had."""


class NoSharedMemory(FarcellError, ConnectionError):
    """Shared memory was asked for and cannot be had."""


class SystemRefused(FarcellError, OSError):
    """The system refused something: an address, memory, a thread."""
