"""GALA's gossip buffer, between nodes.

Learners offer their parameters to the peers that a topology names, and mix what
their own peers have offered into theirs. The constructor and the methods are
those of GALA's `GossipBuffer`, whose messages lie in one machine's memory; here
they lie in slots of the server, and each learner may be on any node.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from ._client import _client_of
from ._errors import BadArgument
from ._native import Event, Slots

_log = logging.getLogger("farcell")


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
        # At first every message counts as read. Who comes later must not say so
        # of one that was written meanwhile.
        opened = client.counters(f"{name}.opened", 1).counter_at(0)
        if opened.compare_exchange(0, 1):
            for writer in range(self.num_learners):
                for reader in range(self.num_learners):
                    read_events[writer][reader].set()
            opened.store(2)
        else:
            opened.wait_until("==", 2)

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
        in a row; then it waits for all of them.
        """
        torch = sys.modules["torch"]
        _, peers = self.topology[rank].get_peers()
        there = all(self.write_events[peer][rank].is_set() for peer in peers)
        if not there and self.sync_list[rank] < self.sync_freq:
            self.sync_list[rank] += 1
            _log.info("learner %s goes on without a message, %s", rank, self.sync_list[rank])
            return
        for peer in peers:
            self.write_events[peer][rank].wait()
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
