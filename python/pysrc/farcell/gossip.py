"""GALA's gossip buffer, between nodes.

Learners offer their parameters to the peers that a topology names, and mix what
their own peers have offered into theirs. The constructor and the methods are
those of GALA's `GossipBuffer`, whose messages lie in one machine's memory; here
they lie in slots of the server, and each learner may be on any node. One that dies
hangs nobody: who waits for its message gets `PeerLost`.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from ._client import _client_of
from ._errors import BadArgument, PeerLost
from ._native import Event, Slots

_log = logging.getLogger("farcell")

# Seconds between two looks whether a learner that is waited for still lives.
_LOOK = 0.5


class GossipBuffer:
    """The messages of all learners.

    `topology[rank].get_peers(rotate)` gives the peers to send to and those to
    receive from, and `topology[rank].peers_per_itr` says how many they are.
    `model` has the parameters' shapes. `read_events[writer][reader]` and
    `write_events[writer][reader]` are farcell's, of a `farcell.Manager` or of
    `client.events(name, n, n)`. `sync_list[rank]` counts how often in a row a
    learner went on without a message, and `sync_freq` is how often it may.
    `buffer_locks` are not needed, since a slot is read whole, and may be `None`.

    Every process makes one with the same arguments, or is sent one.
    """

    def __init__(
        self,
        topology: Any,
        model: Any,
        buffer_locks: Any,
        read_events: Any,
        write_events: Any,
        sync_list: Any,
        sync_freq: int = 0,
    ) -> None:
        first = read_events[0][0]
        if not isinstance(first, Event):
            raise BadArgument(
                "read_events must be farcell's: make them with a farcell.Manager, or with "
                "client.events(name, n, n)"
            )
        self.topology = topology
        self.num_learners = len(topology)
        self.buffer_locks = buffer_locks
        self.read_events, self.write_events = read_events, write_events
        self.sync_list, self.sync_freq = sync_list, sync_freq
        self._numbers = sum(parameter.numel() for parameter in model.parameters())
        client = _client_of(first._origin)
        # All processes find the same slots by the first of the events.
        name = f"{first.name}.{first.row}.{first.col}.messages"
        self._slots = Slots(client, name, self.num_learners, max(4 * self._numbers, 1))
        # A learner holds its lock from its first message on, as long as its session
        # lives; the event says that it was there at all.
        self._alive = client.locks(f"{name}.alive", self.num_learners)
        self._seen = client.events(f"{name}.seen", self.num_learners)
        # At first every message counts as read. Who comes later must not say so
        # of one that was written meanwhile.
        opened = client.counters(f"{name}.opened", 1)
        with client.lock(f"{name}.opening"):
            if opened[0] == 0:
                for writer in range(self.num_learners):
                    for reader in range(self.num_learners):
                        read_events[writer][reader].set()
                opened[0] = 1

    def _is_here(self, rank: int) -> None:
        """Learner `rank` is this process, and will be missed with it."""
        # False if it has it already. It is never given back but by the session's end.
        self._alive[rank].acquire(False)
        self._seen[rank].set()

    def _wait_for(self, peer: int, rank: int) -> None:
        """Waits for the message of a peer, as long as that lives."""
        event = self.write_events[peer][rank]
        while not event.wait(_LOOK):
            lost = self._seen[peer].is_set() and not self._alive[peer].locked()
            # It may have written before it went.
            if lost and not event.is_set():
                raise PeerLost(
                    f"learner {peer} has gone without a message for learner {rank}: its session "
                    "has ended; start it again, or leave it out of the topology"
                )

    def _flat(self, model: Any) -> Any:
        """The parameters one behind another, as 32-bit floats on the CPU."""
        torch = sys.modules["torch"]
        every = [parameter.detach().reshape(-1) for parameter in model.parameters()]
        flat = torch.cat(every).to(device="cpu", dtype=torch.float32)
        if flat.numel() != self._numbers:
            raise BadArgument(
                f"the model has {flat.numel()} parameters, and the buffer was made for "
                f"{self._numbers}"
            )
        return flat

    def write_message(self, rank: int, model: Any, rotate: bool = False) -> None:
        """Offers the parameters of learner `rank` to its peers.

        Does nothing while one of them has yet to read the message before.
        """
        self._is_here(rank)
        read, written = self.read_events[rank], self.write_events[rank]
        peers, _ = self.topology[rank].get_peers()
        if not all(read[peer].is_set() for peer in peers):
            return
        for peer in peers:
            read[peer].clear()
        share = self._flat(model).div_(self.topology[rank].peers_per_itr + 1)
        self._slots[rank].write(share)
        peers, _ = self.topology[rank].get_peers(rotate)
        # Behind the message: who sees the event finds the message.
        for peer in peers:
            written[peer].set()

    def aggregate_message(self, rank: int, model: Any) -> None:
        """Mixes the messages of the peers of learner `rank` into its parameters.

        While one is missing the parameters stay as they are, `sync_freq` times
        in a row; then it waits for all of them. `PeerLost` if one of those is gone
        and has left no message; then nothing has changed.
        """
        self._is_here(rank)
        torch = sys.modules["torch"]
        _, peers = self.topology[rank].get_peers()
        there = all(self.write_events[peer][rank].is_set() for peer in peers)
        if not there and self.sync_list[rank] < self.sync_freq:
            self.sync_list[rank] += 1
            _log.info("learner %s goes on without a message, %s", rank, self.sync_list[rank])
            return
        for peer in peers:
            self._wait_for(peer, rank)
        for peer in peers:
            self.write_events[peer][rank].clear()
        self.sync_list[rank] = 0
        with torch.no_grad():
            mixed = self._flat(model).div_(self.topology[rank].peers_per_itr + 1)
            message = torch.empty(self._numbers, dtype=torch.float32)
            for peer in peers:
                self._slots[peer].read_into(message)
                mixed.add_(message)
                self.read_events[peer][rank].set()
            at = 0
            for parameter in model.parameters():
                part = mixed[at : at + parameter.numel()]
                parameter.copy_(part.view_as(parameter))
                at += parameter.numel()
