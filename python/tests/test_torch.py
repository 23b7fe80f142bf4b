"""Handles with torch.multiprocessing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch for this interpreter")
import torch.multiprocessing  # noqa: E402


def set_what_comes(queue, done) -> None:
    while (item := queue.get()) is not None:
        event, tensor = item
        assert tensor.sum().item() == 6.0
        event.set()
    done.set()


def spawned(rank: int, events, counters) -> None:
    events[rank].set()
    counters.add(rank, rank + 1)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_through_a_queue(client, name, method):
    events = client.events(name, 3)
    done = client.events(name + "done", 1)[0]
    context = torch.multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=set_what_comes, args=(queue, done))
    child.start()
    tensors = [torch.tensor([1.0, 2.0, 3.0]) for _ in range(3)]
    for event, tensor in zip(events, tensors):
        queue.put((event, tensor))
    queue.put(None)
    assert done.wait(120)
    child.join(60)
    assert events.snapshot().all()


def test_spawn(client, name):
    events, counters = client.events(name, 2), client.counters(name + "c", 2)
    torch.multiprocessing.spawn(spawned, args=(events, counters), nprocs=2)
    assert events.snapshot().all()
    assert counters.tolist() == [1, 2]
