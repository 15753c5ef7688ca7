"""Kernels beside calls: on the same stream, in their order, on arrays of the library."""

from __future__ import annotations

import numpy as np
import pytest
from tests.calls.gpu.conftest import REAL
from tests.doubles import Double

from gpucoll.kernels.block_message import message_bytes
from gpucoll.kernels.gpu.pack import prepare_pack, prepare_unpack
from gpucoll.kernels.gpu.quantise import dequantise, quantise
from gpucoll.kernels.gpu.reduce import reduce_arrays

EVERYWHERE = pytest.mark.parametrize("gpus", ["nccl", "rccl", *REAL], indirect=True)
COUNTS = (1000, 3, 20_000)


@pytest.fixture(autouse=True)
def compiles(gpus):
    if isinstance(gpus.double, Double) and gpus.double.rtc is None:
        pytest.skip("no C++ compiler (g++, clang++) for the double of the kernels' compiler")


def floats(kit, values):
    return kit.seen_as(kit.bytes_of(values.view(np.uint8)), values.shape, np.float32)


def between_kernels(comm, kit):
    """Pack, all_reduce and unpack; then halve: one stream, one wait at the end."""
    inputs = [np.full(n, comm.rank + 1 + i, np.float32) for i, n in enumerate(COUNTS)]
    offsets = [0, 4000, 4016, 84_016]
    with kit.stream():
        arrays = [floats(kit, x) for x in inputs]
        packed = floats(kit, np.zeros(offsets[-1] // 4, np.float32))
        pack = prepare_pack(arrays, packed, offsets)
        unpack = prepare_unpack(arrays, packed, offsets)
        pack()
        comm.all_reduce(packed, out=packed)
        unpack()
        reduce_arrays("avg", [arrays[2]], [arrays[2]], divisor=2)
        return [set(kit.read(x).tolist()) for x in arrays]


@EVERYWHERE
def test_pack_reduce_unpack(gpus):
    for results in gpus.call(2, between_kernels):
        n = gpus.world(2)
        first = n * (n + 1) / 2
        assert results == [{first}, {first + n}, {(first + 2 * n) / 2}]


def quantised_exchange(comm, kit):
    blocks = 8
    mine = np.full(2000, 2.0**-comm.rank, np.float32)
    with kit.stream():
        x, out = floats(kit, mine), floats(kit, np.zeros(2000, np.float32))
        message = kit.bytes_of(np.zeros(message_bytes(blocks), np.uint8))
        quantise(x, message, "int8", blocks=blocks)
        everyones = comm.all_gather(message)
        flat = kit.seen_as(everyones, (comm.world_size * message_bytes(blocks),), np.uint8)
        dequantise(flat, out, "int8", blocks=blocks, sources=comm.world_size)
        return kit.read(out)


@EVERYWHERE
def test_messages_of_blocks(gpus):
    expected = sum(2.0**-rank for rank in range(gpus.world(3)))
    for result in gpus.call(3, quantised_exchange):
        np.testing.assert_allclose(result, expected, rtol=1e-6)
