"""Calls through shared memory that were prepared before: which are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from gpucoll import devices
from gpucoll.arrays.buffer import Buffer
from gpucoll.backends.direct.peer import MOST_KEPT, PeerPath
from gpucoll.backends.direct.peer_memory import PeerMemory
from gpucoll.backends.direct.rounds import Exchange
from gpucoll.backends.protocol import Request
from gpucoll.types import Collective, ReduceOp


@pytest.fixture
def path():
    device = devices.open_device("host", 0)
    memory = device.allocate(4096)
    exchange = Exchange(0, 2, (memory, memory + 2048), 1024)
    shared = SimpleNamespace(device=device, exchange=exchange, trial=memory, word=lambda *_: memory)
    made = PeerPath(cast(PeerMemory, shared))
    yield made
    with device:
        if made._stream:
            device.synchronize_stream(made._stream)
            device.destroy_stream(made._stream)
    device.free(memory)


def request(address=4096, count=64, dtype="float32", op="sum", out=8192, **more):
    def buffer(at):
        return Buffer(at, (count,), dtype, 4, None, "host:0")

    kind = more.pop("collective", Collective.ALL_REDUCE)
    operation = ReduceOp.parse(op) if isinstance(op, str) else op
    return Request(kind, buffer(address), buffer(out), operation, **more)


def test_the_same_call_is_prepared_once(path):
    assert path.prepare(request()) is path.prepare(request())


@pytest.mark.parametrize(
    "other",
    [
        {"address": 4112},
        {"out": 4096},
        {"count": 63},
        {"dtype": "int32"},
        {"op": "max"},
        {"op": ReduceOp.scaled_sum(0.0)},
        {"collective": Collective.REDUCE, "root": 0},
    ],
)
def test_another_call_is_prepared_anew(path, other):
    assert path.prepare(request()) is not path.prepare(request(**other))


def test_what_looks_alike_and_is_not(path):
    factors = [path.prepare(request(op=ReduceOp.scaled_sum(factor))) for factor in (0.5, 0.25)]
    assert factors[0] is not factors[1]
    roots = [path.prepare(request(collective=Collective.REDUCE, root=root)) for root in (0, 1)]
    assert roots[0] is not roots[1]
    assert path.prepare(request(op=ReduceOp.custom(lambda a, b: a + b))) is None


def test_the_oldest_go(path):
    first = path.prepare(request())
    for place in range(MOST_KEPT):
        path.prepare(request(address=16 * place))
    assert len(path._launches) == MOST_KEPT
    assert path.prepare(request()) is not first
