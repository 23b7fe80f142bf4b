"""Shared events, counters, locks and messages for programs on many machines.

    import farcell

    client = farcell.connect("node0:7117")
    events = client.events("read_events", 4, 4)
    events[0][1].set()
    events[0, 1].wait()
"""

from . import _interpreter  # isort: skip  (before the native module)
from . import _native
from ._client import ArrayInfo, Client, Server, TransportReport
from ._connect import connect, serve
from ._errors import (
    ArrayMismatch,
    ArrayRemoved,
    AuthenticationError,
    BadAddress,
    BadArgument,
    BrokenBarrierError,
    Closed,
    Diverged,
    FarcellError,
    LeaseLost,
    LimitReached,
    NoKey,
    NoRdma,
    NoSharedMemory,
    NoSuchArray,
    NotEncrypted,
    OtherJob,
    OutcomeUnknown,
    OutOfRange,
    PeerLost,
    ProtocolError,
    ReadOnly,
    ServerGoingAway,
    SlotBusy,
    SystemRefused,
    Torn,
    Unreachable,
    ValueTooLarge,
)
from ._native import (
    Barrier,
    Counter,
    Counters,
    Event,
    Events,
    Launch,
    Lock,
    Semaphore,
    Slot,
    Slots,
    explain,
)

from .gossip import GossipBuffer
from .manager import Manager

__version__: str = _native.__version__

__all__ = [
    "ArrayInfo",
    "ArrayMismatch",
    "ArrayRemoved",
    "AuthenticationError",
    "BadAddress",
    "BadArgument",
    "Barrier",
    "BrokenBarrierError",
    "Client",
    "Closed",
    "Counter",
    "Counters",
    "Diverged",
    "Event",
    "Events",
    "FarcellError",
    "GossipBuffer",
    "Launch",
    "LeaseLost",
    "LimitReached",
    "Lock",
    "Manager",
    "NoKey",
    "NoRdma",
    "NoSharedMemory",
    "NoSuchArray",
    "NotEncrypted",
    "OtherJob",
    "OutOfRange",
    "OutcomeUnknown",
    "PeerLost",
    "ProtocolError",
    "ReadOnly",
    "Semaphore",
    "Server",
    "ServerGoingAway",
    "Slot",
    "SlotBusy",
    "Slots",
    "SystemRefused",
    "Torn",
    "TransportReport",
    "Unreachable",
    "ValueTooLarge",
    "connect",
    "explain",
    "serve",
]
