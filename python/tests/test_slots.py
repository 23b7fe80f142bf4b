"""Slots: messages from buffers, arrays and tensors, and gossip of learners."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tracemalloc

import numpy
import pytest

import farcell
from conftest import KEY

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="no PyTorch for this interpreter")


def test_buffers_of_every_kind(client, name):
    slots = client.slots(name, 3, 64)
    assert (len(slots), slots.nbytes, slots.versions()) == (3, 64, [0, 0, 0])
    slot = slots[1]
    assert slot.read_into(bytearray(64)) == 0 and slot.read() == (0, b"")
    assert slot.write(b"first") == 1
    assert slot.write(bytearray(b"second")) == 2
    assert slot.write(memoryview(b"a third one")[2:7]) == 3
    assert slot.read() == (3, b"third")
    out = bytearray(b"." * 8)
    assert slot.read_into(out) == 3 and out == b"third..."
    numbers = numpy.arange(8, dtype="float64")
    assert slot.write(numbers) == 4
    into = numpy.zeros((2, 4))
    assert slot.read_into(into) == 4
    assert into.reshape(-1).tolist() == list(range(8))
    assert slots.versions() == [0, 4, 0] and slots[-2].version() == 4
    assert pickle.loads(pickle.dumps(slot)).read()[0] == 4
    assert len(pickle.loads(pickle.dumps(slots))) == 3


def test_what_cannot_be_a_message(client, name):
    slot = client.slots(name, 1, 16)[0]
    with pytest.raises(farcell.BadArgument):
        slot.write(b"x" * 17)
    with pytest.raises((ValueError, BufferError)):
        slot.write(numpy.zeros((4, 4), dtype="uint8")[:, ::2])
    with pytest.raises((ValueError, BufferError, TypeError)):
        slot.read_into(b"read only")
    for bad in ["text", 5, None, [1, 2]]:
        with pytest.raises(TypeError):
            slot.write(bad)
    slot.write(b"sixteen bytes ok")
    with pytest.raises(farcell.BadArgument):
        slot.read_into(bytearray(8))
    with pytest.raises(IndexError):
        client.slots(name, 1, 16)[1]


def test_no_copy_is_made_of_what_is_written_and_read(client, name):
    size = 8 << 20
    slot = client.slots(name, 1, size)[0]
    message, into = numpy.ones(size, dtype="uint8"), numpy.zeros(size, dtype="uint8")
    slot.write(message)
    tracemalloc.start()
    slot.write(message)
    slot.read_into(into)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000
    assert into.all()


@needs_torch
def test_tensors(client, name):
    slot = client.slots(name, 1, 4096)[0]
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).requires_grad_()
    assert slot.write(tensor) == 1
    into = torch.zeros(3, 4)
    assert slot.read_into(into) == 1
    assert torch.equal(into, tensor.detach())
    half = torch.arange(4, dtype=torch.bfloat16)
    slot.write(half)
    back = torch.zeros(4, dtype=torch.bfloat16)
    slot.read_into(back)
    assert torch.equal(back, half)
    with pytest.raises(TypeError, match="contiguous"):
        slot.write(tensor.t())


def test_waiting_for_a_message(client, name):
    slot = client.slots(name, 1, 16)[0]
    assert slot.wait_newer(0, 0.05) is False
    child = multiprocessing.get_context("spawn").Process(target=slot.write, args=(b"hello",))
    child.start()
    assert slot.wait_newer(0, 60) is True
    child.join()
    assert slot.read() == (1, b"hello")


class Ring:
    """Each learner sends to the next, as GALA's graphs say it."""

    peers_per_itr = 1

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def get_peers(self, rotate: bool = False):
        return [(self.rank + 1) % self.size], [(self.rank - 1) % self.size]


def learn(rank: int, gossip, barrier, results) -> None:
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(rank))
    for _ in range(40):
        gossip.write_message(rank, model)
        barrier.wait(60)
        gossip.aggregate_message(rank, model)
        barrier.wait(60)
    values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    results[rank].write(values)


@needs_torch
@pytest.mark.parametrize("how", ["manager", "arrays"])
def test_gossip_of_learners_finds_their_mean(server, client, name, how):
    size = 3
    if how == "manager":
        manager = farcell.Manager(client=client, name=name)
        read = manager.list([manager.list([manager.Event() for _ in range(size)]) for _ in range(size)])
        written = manager.list(
            [manager.list([manager.Event() for _ in range(size)]) for _ in range(size)]
        )
        locks = manager.list([manager.Lock() for _ in range(size)])
        sync, barrier = manager.list([0] * size), manager.Barrier(size)
    else:
        read, written = client.events(name + "r", size, size), client.events(name + "w", size, size)
        locks, sync = None, client.counters(name + "s", size)
        barrier = client.barrier(name + "b", size)
    topology = [Ring(rank, size) for rank in range(size)]
    gossip = farcell.GossipBuffer(
        topology, torch.nn.Linear(3, 2), locks, read, written, sync, sync_freq=0
    )
    results = client.slots(name + "results", size, 32)
    context = torch.multiprocessing.get_context("spawn") if how == "manager" else (
        multiprocessing.get_context("fork")
    )
    torch.set_num_threads(1)
    learners = [
        context.Process(target=learn, args=(rank, gossip, barrier, results)) for rank in range(size)
    ]
    for learner in learners:
        learner.start()
    for learner in learners:
        learner.join(180)
    assert [learner.exitcode for learner in learners] == [0] * size
    for rank in range(size):
        values = torch.zeros(8)
        assert results[rank].read_into(values) == 1
        assert torch.allclose(values, torch.ones(8), atol=1e-4), (rank, values)


@needs_torch
def test_gossip_skips_what_was_not_read_and_counts_staleness(client, name):
    read, written = client.events(name + "r", 2, 2), client.events(name + "w", 2, 2)
    sync = client.counters(name + "s", 2)
    topology = [Ring(rank, 2) for rank in range(2)]
    model = torch.nn.Linear(1, 1)
    gossip = farcell.GossipBuffer(topology, model, None, read, written, sync, sync_freq=2)
    before = [parameter.clone() for parameter in model.parameters()]
    gossip.aggregate_message(0, model)
    gossip.aggregate_message(0, model)
    assert sync[0] == 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    gossip.write_message(1, model)
    gossip.write_message(1, model)
    assert client.slots(f"{name}r.0.0.messages", 2, 8).versions() == [0, 1]
    gossip.aggregate_message(0, model)
    assert sync[0] == 0
    with pytest.raises(farcell.BadArgument):
        farcell.GossipBuffer(topology, model, None, [[None]], written, sync)


def takes_part(gossip, go):
    gossip.write_message(1, torch.nn.Linear(1, 1))
    go.wait(60)


@needs_torch
@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_gossip_with_a_learner_that_has_gone_says_so(name, how):
    with farcell.serve("127.0.0.1:0", authkey=KEY, lease=1.0) as server, farcell.connect(
        server.address, authkey=KEY
    ) as client:
        read, written = client.events(name + "r", 2, 2), client.events(name + "w", 2, 2)
        topology = [Ring(rank, 2) for rank in range(2)]
        model = torch.nn.Linear(1, 1)
        gossip = farcell.GossipBuffer(
            topology, model, None, read, written, client.counters(name + "s", 2)
        )
        go = client.events(name + "go", 1)[0]
        other = multiprocessing.get_context("fork").Process(target=takes_part, args=(gossip, go))
        torch.set_num_threads(1)
        other.start()
        gossip.write_message(0, model)
        gossip.aggregate_message(0, model)
        if how == "ends":
            go.set()
        else:
            os.kill(other.pid, signal.SIGKILL)
        other.join(60)
        before = [parameter.clone() for parameter in model.parameters()]
        with pytest.raises(farcell.PeerLost, match="learner 1"):
            gossip.aggregate_message(0, model)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_arrays_of_python_objects_are_refused(client, name):
    """Their bytes are addresses: read into, they would crash the interpreter."""
    numpy = pytest.importorskip("numpy")
    slot = client.slots(name, 1, 64)[0]
    version = slot.write(bytes(64))
    fields = numpy.dtype([("number", "i8"), ("what", "O")])
    for objects in [numpy.array([None] * 8, dtype=object), numpy.zeros(2, dtype=fields)]:
        with pytest.raises(ValueError, match="Python objects"):
            slot.write(objects)
        with pytest.raises(ValueError, match="Python objects"):
            slot.read_into(objects)
    assert slot.version() == version
    # A field that is only named so, and dates, which numpy does not describe.
    for numbers in [numpy.zeros(4, dtype=[("O", "i8")]), numpy.zeros(4, dtype="M8[s]")]:
        assert slot.write(numbers) > version
        assert slot.read_into(numpy.zeros(8, numbers.dtype)) > version


@needs_torch
def test_tensors_whose_memory_is_not_what_they_show(client, name):
    """Each would write other numbers, or fail in words about something else."""
    slot = client.slots(name, 1, 256)[0]
    version = slot.write(bytes(8))
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    with pytest.raises(TypeError, match="resolve_conj"):
        slot.write(numbers.conj())
    with pytest.raises(TypeError, match="resolve_neg"):
        slot.write(torch._neg_view(torch.ones(3)))
    with pytest.raises(TypeError, match="to_dense"):
        slot.write(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="is on meta"):
        slot.write(torch.ones(3, device="meta"))
    assert slot.version() == version
    slot.write(numbers.conj().resolve_conj())
    into = torch.zeros(2, dtype=torch.complex64)
    slot.read_into(into)
    assert torch.equal(into, numbers.conj().resolve_conj())


@needs_torch
@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "int16", "int64", "float16", "bfloat16", "float64", "complex128"],
)
def test_tensors_of_every_dtype(client, name, dtype):
    slot = client.slots(name, 1, 256)[0]
    for shape in [(), (0,), (5,), (2, 3)]:
        tensor = torch.ones(shape, dtype=getattr(torch, dtype))
        version = slot.write(tensor)
        into = torch.zeros_like(tensor)
        assert slot.read_into(into) == version
        assert torch.equal(into, tensor)


@needs_torch
def test_tensors_where_pytorch_has_no_numpy(client, name, monkeypatch):
    def numpy_is_missing(*_args: object) -> None:
        raise RuntimeError("Numpy is not available")

    slot = client.slots(name, 1, 256)[0]
    monkeypatch.setattr(torch.Tensor, "numpy", numpy_is_missing)
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    slot.write(tensor)
    into = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert slot.read_into(into) == 1
    assert torch.equal(into, tensor)
    assert slot.write(torch.zeros(0)) == 2 and slot.read_into(torch.zeros(0)) == 2
