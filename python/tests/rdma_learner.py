"""A learner on each of two machines that have RDMA devices; see scripts/rdma-tests.

`first` runs the server as well. Each learner writes its vector into its slot, sets
the event of its peer, waits for the peer's event, reads its message and mixes it
into its own, with the standard library alone. In the end both must have the mean of
where they began, to the last bit, and have come to it by RDMA.
"""

from __future__ import annotations

import subprocess
import sys
import time
from array import array

import farcell

KEY = b"a key for the two machines"
FIRST, PORT = "10.0.0.1", 7117
LENGTH = 10_000
ROUNDS = 10
LEARNERS = 2


def start(rank: int) -> array[float]:
    return array("d", (1000.0 * rank + i % 17 * (rank + 0.5) for i in range(LENGTH)))


def step(rank: int, round: int) -> float:
    """What a learner learns by itself in a round."""
    return (rank + 1) * 0.25 * round


def expected() -> array[float]:
    """The mean of where they began, and of all that they have learned."""
    learned = sum(step(rank, round) for rank in range(LEARNERS) for round in range(ROUNDS))
    every = [start(rank) for rank in range(LEARNERS)]
    return array("d", ((sum(at) + learned) / LEARNERS for at in zip(*every)))


def learn(rank: int) -> None:
    client = farcell.connect(
        (FIRST, PORT), authkey=KEY, transport="rdma", wait_for_server=120.0, timeout=60.0
    )
    report = client.transport()
    assert report.name == "rdma", report
    read, written = client.events("read", LEARNERS, LEARNERS), client.events("written", LEARNERS, LEARNERS)
    slots = client.slots("messages", LEARNERS, 8 * LENGTH)
    barrier, rounds = client.barrier("barrier", LEARNERS), client.counters("rounds", LEARNERS)
    peer = 1 - rank
    mine, theirs = start(rank), array("d", bytes(8 * LENGTH))
    # At first every message counts as read.
    read[rank, peer].set()
    barrier.wait(120)
    began = time.monotonic()
    for round in range(ROUNDS):
        more = step(rank, round)
        for i in range(LENGTH):
            mine[i] += more
        assert read[rank, peer].wait(60)
        read[rank, peer].clear()
        slots[rank].write(mine)
        written[rank, peer].set()
        assert written[peer, rank].wait(60)
        written[peer, rank].clear()
        version = slots[peer].read_into(theirs)
        assert version == round + 1, (version, round)
        read[peer, rank].set()
        mine = array("d", ((a + b) / 2 for a, b in zip(mine, theirs)))
        rounds.add(rank, 1)
    took = time.monotonic() - began
    assert mine == expected(), (mine[:3], expected()[:3])
    # Over the whole time: a connection that broke would be TCP by now.
    assert client.transport().name == "rdma", client.transport()
    barrier.wait(120)
    assert rounds.tolist() == [ROUNDS] * LEARNERS
    with client.lock("last"):
        rounds[rank] = -1
    barrier.wait(120)
    assert rounds.tolist() == [-1] * LEARNERS
    print(f"learner {rank} of {LEARNERS}: the mean after {ROUNDS} rounds, {took:.1f} s, by RDMA")
    print("test result: ok. 1 passed; 0 failed", flush=True)
    client.close()


def main() -> int:
    role = sys.argv[1]
    if role == "first":
        with farcell.serve((FIRST, PORT), authkey=KEY) as server:
            # A process of its own, as the learner on the other machine.
            learner = subprocess.run([sys.executable, __file__, "0"], timeout=240)
            end = time.monotonic() + 60
            while server.sessions() and time.monotonic() < end:
                time.sleep(0.05)
        return learner.returncode
    try:
        learn(0 if role == "0" else 1)
    except BaseException:
        print("test result: FAILED. 0 passed; 1 failed", flush=True)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
