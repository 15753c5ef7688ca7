"""Lists of GPU arrays: small ones go packed, one launch there and one back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import oracle
from tests.calls.gpu.conftest import EVERYWHERE
from tests.calls.gpu.kits import Guarded
from tests.dtypes import assert_same, op_of, small_values

from gpucoll.backends.gpu import fusion

COUNTS = (3, 1, 700, 0, 64, 5, 2000, 17, 900)
"""In elements; two are larger than what is packed in these tests."""
FUSED_BYTES = 3000
BUFFER_BYTES = 4096


@pytest.fixture(autouse=True)
def _as_made(gpus):
    """Ranks are used again: what a test sets there, it sets back."""
    yield
    gpus.call_ranks(2, set_sizes, 1 << 20, 64 << 20)


def set_sizes(_rank, fused_bytes, buffer_bytes):
    fusion.FUSED_BYTES, fusion.BUFFER_BYTES = fused_bytes, buffer_bytes


def arrays_of(kit, dtype, rank, counts=COUNTS):
    made = []
    for place, count in enumerate(counts):
        array = Guarded(kit, (count,), dtype, 16 * (place % 2))
        kit.write(array.array, small_values(dtype, count, 100 * rank + place))
        made.append(array)
    return made


def expected(name, dtype, op, world_size, root):
    results = []
    given: dict[str, Any] = {"op": op_of(op)} if name != "broadcast" else {}
    given |= {"root": root} if name != "all_reduce" else {}
    for place, count in enumerate(COUNTS):
        inputs = [small_values(dtype, count, 100 * rank + place) for rank in range(world_size)]
        results.append(getattr(oracle, name)(inputs, **given))
    return [[each[rank] for each in results] for rank in range(world_size)]


def run(comm, kit, name, dtype, op, way, in_place):
    set_sizes(None, FUSED_BYTES, BUFFER_BYTES)
    root = comm.world_size - 1
    xs = arrays_of(kit, dtype, comm.rank)
    outs = xs if in_place else arrays_of(kit, dtype, 50 + comm.rank)
    given: dict[str, Any] = {}
    if comm.rank == root or name != "reduce":
        given["out"] = [out.array for out in outs]
    given |= {"op": op_of(op)} if name != "broadcast" else {}
    given |= {"root": root} if name != "all_reduce" else {}
    x = [array.array for array in xs]
    if way == "plan":
        results = getattr(comm, f"plan_{name}")(x, **given)()
    elif way == "asynchronous":
        results = getattr(comm, name)(x, **given, async_op=True).wait()
    elif way == "group":
        with comm.group():
            results = getattr(comm, name)(x, **given)
    else:
        results = getattr(comm, name)(x, **given)
    right = expected(name, dtype, op, comm.world_size, root)[comm.rank]
    if name == "reduce" and comm.rank != root:
        assert results is None
    else:
        for got, values in zip(results, right, strict=True):
            assert_same(kit.read(got), values, f"{name}, {dtype}")
    for array in (*xs, *outs):
        array.check(name)
    comm.check()


@EVERYWHERE
@pytest.mark.parametrize("way", ["out", "asynchronous", "group"])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_lists_of_small_and_large_arrays(gpus, world_size, name, way):
    for dtype, op in (("float32", "sum"), ("int32", "scaled_sum"), ("int16", "bxor")):
        for in_place in (False, True):
            gpus.call(world_size, run, name, dtype, op, way, in_place)
            gpus.call_ranks(world_size, set_sizes, 1 << 20, 64 << 20)


def count_calls(rank):
    with rank.init() as comm:
        xs = [array.array for array in arrays_of(rank.kit, "float32", rank.rank, [10] * 50)]
        comm.all_reduce(xs, out=xs)
        comm.check()
        before = rank.control.calls("ncclAllReduce"), rank.control.count("launches")
        comm.all_reduce(xs, out=xs)
        comm.check()
        return (
            rank.control.calls("ncclAllReduce") - before[0],
            rank.control.count("launches") - before[1],
        )


def test_fifty_small_arrays_are_one_call_and_two_launches(gpus):
    assert gpus.call_ranks(2, count_calls) == [(1, 2)] * 2


def reduce_held(rank):
    """The tables of arrays live until the work is done, whoever has let go of the call."""
    with rank.init() as comm:
        arrays = [arrays_of(rank.kit, "float32", rank.rank, [10] * 20) for _ in range(8)]
        with rank.held():
            for each in arrays:
                xs = [array.array for array in each]
                comm.all_reduce(xs, out=xs)
        comm.check()
        for place in range(20):
            inputs = [small_values("float32", 10, 100 * r + place) for r in range(comm.world_size)]
            for each in arrays:
                assert_same(rank.kit.read(each[place].array), oracle.all_reduce(inputs)[0])


def test_tables_live_until_the_work_is_done(gpus):
    gpus.call_ranks(2, reduce_held)


def capture(rank):
    with rank.init() as comm:
        kit = rank.kit
        xs = [array.array for array in arrays_of(kit, "float32", rank.rank, [10] * 20)]
        outs = [array.array for array in arrays_of(kit, "float32", rank.rank, [10] * 20)]
        comm.all_reduce(xs, out=outs)
        comm.check()
        stream = kit.stream()
        with stream, rank.captured(stream) as graph:
            comm.all_reduce(xs, out=outs)
        assert graph.code == 0
        results = []
        for value in (1, 2):
            for x in xs:
                kit.write(x, np.full(10, value, np.float32))
            with stream:
                comm.all_reduce(xs[:5], out=outs[:5])  # uses tables, too
            graph.launch(stream)
            stream.synchronize()
            results.append({float(each) for out in outs for each in kit.read(out)})
        graph.close()
        comm.check()
        return results


def test_lists_can_be_captured(gpus):
    assert gpus.call_ranks(2, capture) == [[{2.0}, {4.0}]] * 2
