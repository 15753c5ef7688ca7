"""Compressed all_reduce of GPU arrays: the bits that the host makes, on every road to them."""

from __future__ import annotations

import numpy as np
import pytest
from tests import compression_oracle as oracle
from tests.calls.gpu.conftest import REAL, vendors_in_turn
from tests.calls.gpu.failing import ones
from tests.calls.gpu.host_devices import gpus_of_host_devices
from tests.calls.gpu.kits import Guarded
from tests.compression.test_compression import BLOCKS, inputs_of
from tests.dtypes import assert_same
from tests.ranks import Reply

from gpucoll import Compression
from gpucoll.errors import ArgumentError, ArgumentTypeError, GpucollError, MismatchError
from gpucoll.types import COMPRESSIONS

COUNTS = (0, 1, 257, 5000)


def guarded(kit, values, offset=0):
    made = Guarded(kit, values.shape, values.dtype, offset)
    kit.write(made.array, values)
    return made


def reduce_one(comm, kit, name, op, count, seed):
    """Compare with the oracle's bits: a new array, in place, queued, in a group, with residuals."""
    inputs = inputs_of(comm.world_size, count, "wide")
    x, zeros = inputs[comm.rank], np.zeros(count, np.float32)
    expected, left = oracle.all_reduce(inputs, op, name, seed)
    how = name if seed is None else Compression(name, seed)
    where = f"{name} {op} {count=} {seed=}"
    source, out = guarded(kit, x, 16), guarded(kit, zeros, 4)
    assert_same(kit.read(comm.all_reduce(source.array, op, compression=how)), expected, where)
    got = comm.all_reduce(source.array, op, out=out.array, compression=how)
    assert got is out.array
    assert_same(kit.read(got), expected, where)
    work = comm.all_reduce(source.array, op, compression=how, async_op=True)
    assert_same(kit.read(work.wait()), expected, where)
    kit.write(out.array, zeros)
    with comm.group():
        comm.all_reduce(source.array, op, out=out.array, compression=how)
    assert_same(kit.read(out.array), expected, where)
    if name in BLOCKS:
        residual = guarded(kit, zeros, 8)
        options = {"compression": how, "residual": residual.array}
        got = comm.all_reduce(source.array, op, out=source.array, **options)
        assert_same(kit.read(residual.array), left[comm.rank], where)
        residual.check(where)
    else:
        got = comm.all_reduce(source.array, op, out=source.array, compression=how)
    assert_same(kit.read(got), expected, where)
    for each in (source, out):
        each.check(where)


def reduce_all(comm, kit):
    for name in COMPRESSIONS:
        for turn, count in enumerate(COUNTS):
            seed = 7 + turn if name in BLOCKS and turn % 2 else None
            reduce_one(comm, kit, name, ("sum", "avg")[turn % 2], count, seed)
    comm.check()


def reduce_lists(comm, kit):
    """Half types beside float32; each array begins a block of its own."""
    shapes, dtypes = [(3, 100), (0, 5), (257,)], ["float32", "float16", "bfloat16"]
    inputs = [
        [
            (10.0**place * inputs_of(comm.world_size, 300, seed=place)[rank][: np.prod(shape)])
            .astype(np.dtype(dtype))
            .reshape(shape)
            for place, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
        ]
        for rank in range(comm.world_size)
    ]
    starts = (0, 512, 512)
    packed = []
    for arrays in inputs:
        whole = np.zeros(512 + 257, np.float32)
        for start, x in zip(starts, arrays, strict=True):
            whole[start : start + x.size] = x.reshape(-1).astype(np.float32)
        packed.append(whole)
    expected, left = oracle.all_reduce(packed, "avg", "int8_block")
    xs = [guarded(kit, x) for x in inputs[comm.rank]]
    residuals = [guarded(kit, np.zeros(x.size, np.float32)) for x in inputs[comm.rank]]
    got = comm.all_reduce(
        [x.array for x in xs],
        "avg",
        compression="int8_block",
        residual=[residual.array for residual in residuals],
    )
    assert isinstance(got, list)
    for place, start in enumerate(starts):
        x = inputs[comm.rank][place]
        part = slice(start, start + x.size)
        assert_same(kit.read(got[place]), expected[part].astype(x.dtype).reshape(x.shape), place)
        assert_same(kit.read(residuals[place].array), left[comm.rank][part], place)
    for each in (*xs, *residuals):
        each.check()
    comm.check()


@pytest.mark.soak(quick=1)
@vendors_in_turn("world_size", [1, 2, 3], REAL)
@pytest.mark.parametrize("reduce", [reduce_all, reduce_lists])
def test_beside_the_library(gpus, reduce, world_size):
    gpus.call(world_size, reduce)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("reduce", [reduce_all, reduce_lists])
def test_through_the_direct_backend(gpus, reduce, world_size):
    gpus.call(world_size, reduce, backend="direct")


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("reduce", [reduce_all, reduce_lists])
def test_on_host_devices(gpu_ranks, reduce, world_size):
    gpus_of_host_devices(gpu_ranks).call(world_size, reduce, backend="direct")


def capture(rank):
    """A graph keeps its scratch memory and its tables, whatever comes between its replays."""
    with rank.init() as comm:
        kit, inputs = rank.kit, inputs_of(comm.world_size, 3000)
        expected, _ = oracle.all_reduce(inputs, "sum", "int8_block")
        x, y = (guarded(kit, inputs[comm.rank]) for _ in range(2))
        out = guarded(kit, np.zeros(3000, np.float32))
        comm.all_reduce(x.array, out=out.array, compression="int8_block")
        comm.check()
        stream = kit.stream()
        with stream, rank.captured(stream) as graph:
            comm.all_reduce(x.array, out=out.array, compression="int8_block")
        for _ in range(3):
            kit.write(out.array, np.zeros(3000, np.float32))
            comm.all_reduce(y.array, compression="bfloat16")
            comm.check()
            graph.launch(stream)
            with stream:
                assert_same(kit.read(out.array), expected)


def test_captured(gpus):
    gpus.call_ranks(2, capture)


def differ(rank, what):
    with rank.init() as comm:
        x = ones(rank.kit, 300)
        comm.all_reduce(x, compression="int8_block")
        comm.check()
        name, seed, given = "int8_block", None, x
        if what == "compression" and comm.rank:
            name = "float8_block"
        if what == "seed" and comm.rank:  # which ranks may differ in
            seed = 5
        if what == "list":
            given = [x, ones(rank.kit, 5)] if comm.rank else x
        if what == "none" and comm.rank:
            comm.all_reduce(given)
        else:
            comm.all_reduce(given, compression=Compression(name, seed))
        comm.check()


@pytest.mark.parametrize("what", ["compression", "seed", "list", "none"])
def test_ranks_that_differ(gpus, what):
    for reply in gpus.replies(2, differ, what):
        assert isinstance(reply, Reply)
        assert isinstance(reply.error, MismatchError if what != "seed" else type(None)), reply


def refuse(comm, kit):
    def floats(count=4, dtype="float32"):
        return guarded(kit, np.ones(count, dtype)).array

    x, plain = floats(), {"compression": "int8_block"}
    rows = [
        (floats(dtype="int32"), plain, ArgumentTypeError, "got int32"),
        (x, {"residual": floats(5), **plain}, ArgumentError, "residual has 5 elements"),
        (x, {"residual": x, **plain}, ArgumentError, "residual shares memory"),
        (x, {"residual": np.ones(4, np.float32), **plain}, ArgumentTypeError, "like x; got"),
        (np.ones(4, np.float32), {"residual": x, **plain}, ArgumentTypeError, "on the host"),
        (
            x,
            {"residual": floats(), "compression": "float16"},
            ArgumentTypeError,
            "takes no residual",
        ),
    ]
    for given, options, error, text in rows:
        try:
            comm.all_reduce(given, **options)
        except GpucollError as caught:
            assert isinstance(caught, error), caught  # noqa: PT017  (pytest.raises hides which)
            assert text in str(caught)  # noqa: PT017
        else:
            raise AssertionError(text)
    assert kit.read(comm.all_reduce(x, **plain)).tolist() == [comm.world_size] * 4
    comm.check()


def test_what_cannot_be_is_refused_before_anything_moves(gpus):
    gpus.call(2, refuse)
