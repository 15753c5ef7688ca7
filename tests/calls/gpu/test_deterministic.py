"""init(deterministic="order"): sums of floats have the bits of rank order, wherever ranks are."""

from __future__ import annotations

import numpy as np
import pytest
from tests import oracle
from tests.calls.gpu.kits import Guarded
from tests.dtypes import assert_same
from tests.ranks import Reply

from gpucoll.errors import ArgumentError, RendezvousError

LARGE = 60_001
"""Elements: between hosts such an array is combined host by host, unless order is asked for."""


def inputs_of(world_size, count, dtype="float32"):
    """Return numbers whose sums are other bits in another order."""
    made = []
    for rank in range(world_size):
        values = np.random.default_rng([count, rank]).standard_normal(count) * 10.0 ** (rank % 3)
        made.append(values.astype(dtype))
    return made


# --- between hosts --------------------------------------------------------------------------------


def reduce_on_hosts(seat):
    with seat.init(deterministic="order") as comm:
        for dtype in ("float32", "float16"):
            inputs = inputs_of(comm.world_size, LARGE, dtype)
            x = inputs[comm.rank]
            right = oracle.all_reduce(inputs)[0]
            assert_same(comm.all_reduce(x), right, dtype)
            assert_same(comm.all_reduce(x, async_op=True).wait(), right, dtype)
            for got in comm.all_reduce([x, x[:5].copy()]):
                assert_same(got, right[: got.size], dtype)
            got = comm.reduce(x, root=1)
            assert got is None if comm.rank != 1 else got.tobytes() == right.tobytes()
            assert_same(comm.scan(x), oracle.scan(inputs)[comm.rank], dtype)
            rows = [each[: 3 * (LARGE // 3)] for each in inputs]
            block = np.split(oracle.all_reduce(rows)[0], 3)[comm.rank]
            assert_same(comm.reduce_scatter(rows[comm.rank]), block, dtype)
        half = comm.split(0)
        assert_same(half.all_reduce(x), right)
        half.close()
        return comm.describe().facts["same bits whatever size, chunks and placement"]


@pytest.mark.parametrize("placed", ["aab", "aba"])
def test_between_hosts(hosts, placed):
    for said in hosts.call(placed, reduce_on_hosts, gives="seat"):
        assert said.startswith("yes: in the order of the ranks")


def disagree(seat, given):
    seat.init(deterministic=given[seat.rank]).close()


def test_ranks_that_differ(hosts):
    for reply in hosts.replies("ab", disagree, ["order", None], gives="seat"):
        assert isinstance(reply, Reply)
        assert isinstance(reply.error, RendezvousError), reply
        assert "deterministic" in str(reply.error)


def test_what_there_is_not():
    import gpucoll

    with pytest.raises(ArgumentError, match="deterministic must be None or"):
        gpucoll.init(deterministic="fast")


# --- beside a vendor's library --------------------------------------------------------------------


def reduce_on_gpus(rank):
    kit = rank.kit
    start = rank.control.calls("ncclAllReduce")
    with rank.init(deterministic="order") as comm:
        for dtype in ("float32", "float16", "complex64"):
            inputs = inputs_of(comm.world_size, 6000, dtype)
            x = guarded(kit, inputs[comm.rank])
            for op in ("sum", "avg"):
                right = oracle.all_reduce(inputs, op)[0]
                assert_same(kit.read(comm.all_reduce(x.array, op)), right, f"{dtype} {op}")
            parts = [guarded(kit, inputs[comm.rank][:count]) for count in (3, 500, 6000)]
            for got in comm.all_reduce([part.array for part in parts]):
                values = kit.read(got)
                right = oracle.all_reduce(inputs)[0]
                assert_same(values, right[: values.size], dtype)
        assert rank.control.calls("ncclAllReduce") == start
        numbers = guarded(kit, np.arange(5, dtype=np.int32))
        comm.all_reduce(numbers.array)  # whose sum is the same in any order
        assert rank.control.calls("ncclAllReduce") == start + 1
        comm.check()
        return comm.describe().facts["GPU: same bits whatever size and placement"]


def guarded(kit, values):
    made = Guarded(kit, values.shape, values.dtype)
    kit.write(made.array, values)
    return made


@pytest.mark.parametrize("world_size", [1, 3])
def test_beside_the_library(gpus, world_size):
    assert gpus.call_ranks(world_size, reduce_on_gpus) == ["yes"] * world_size
