"""Numba's device arrays, over the double of the driver and on a real GPU; without its compiler."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import numpy as np
import pytest
from tests.calls.gpu import numba_double
from tests.calls.gpu.conftest import skip_without_gpu
from tests.dtypes import assert_same, small_values

from gpucoll import config
from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailableError,
    DeadlineError,
    StateError,
)
from gpucoll.types import DTYPES

SHAPES = ((), (1,), (0,), (2, 0, 3), (5, 7))
BUFFERLESS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Dtypes whose arrays NumPy shows nobody: Numba copies their bytes."""

pytest.importorskip("numba.cuda", reason="Numba is not installed")


def in_rank(seat, double, function, args):
    cuda: Any = importlib.import_module("numba.cuda")
    if double is not None:
        double.load()
        cuda = numba_double.install(seat.rank)
    elif not importlib.import_module("numba.cuda.cudadrv.driver").driver.is_available:
        return "Numba finds no driver"  # its own is_available asks for a compiler, too
    with seat.init() as comm:
        return function(comm, cuda, *args)


@pytest.fixture(params=["double", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request, rank_server):
    """Call ``function(comm, cuda, *args)`` on two ranks over the double, or on one with a GPU."""
    double, world_size, variables = None, 1, {config.CPU_ONLY: "0"}
    if request.param == "gpu":
        skip_without_gpu("numba.cuda")
        pools = request.getfixturevalue("ranks_of_this_file")
    else:
        pools, world_size = request.getfixturevalue("gpu_ranks"), 2
        double = request.getfixturevalue("doubles").double("nccl")
        variables = {**double.variables, config.GPU_KIND: "cuda"}

    def call(function, *args):
        arguments = in_rank, double, function, args
        options = {"gives": "seat", "environment": variables, "limit_s": 20 if double else 60}
        results = pools.call(world_size, *arguments, **options)
        if isinstance(results[0], str):
            pytest.skip(results[0])
        return results

    return call


def put(cuda, values, stream: Any = 0):
    """Return a device array of these values, which are there when it returns."""
    if values.dtype.name in BUFFERLESS:
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        made = cuda.to_device(data, stream=stream).view(values.dtype)
    else:
        made = cuda.to_device(values, stream=stream)
    if stream:
        stream.synchronize()
    return made


def read(x):
    """Return an array's values, once its stream is done."""
    if x.stream:
        x.stream.synchronize()
    if x.dtype.name in BUFFERLESS:
        return x.view(np.uint8).copy_to_host().view(x.dtype)
    return x.copy_to_host()


def full(cuda, value, count=1000):
    return put(cuda, np.full(count, value, np.float32))


def use_every_dtype(comm, cuda):
    moved = 0
    for dtype in DTYPES:
        mine = small_values(dtype, 12, comm.rank)
        x = put(cuda, mine)
        gathered = comm.all_gather(x)
        assert type(gathered) is type(x)
        parts = [small_values(dtype, 12, rank) for rank in range(comm.world_size)]
        assert_same(read(gathered), np.concatenate(parts), dtype)
        if dtype in ("int32", "uint8", "float16", "float32", "float64", "bfloat16", "complex64"):
            expected = sum(parts[1:], parts[0])
            assert_same(read(comm.all_reduce(x)), expected.astype(mine.dtype), dtype)
        assert_same(read(x), mine, dtype)
        moved += 1
    comm.check()
    return moved


def test_dtypes(run):
    assert set(run(use_every_dtype)) == {len(DTYPES)}


def use_every_shape(comm, cuda):
    for shape in SHAPES:
        x, out = put(cuda, np.full(shape, 3.0)), put(cuda, np.zeros(shape))
        assert comm.all_reduce(x, out=out) is out
        made = comm.all_reduce(x)
        assert made.shape == shape
        assert made.dtype == np.float64
        for result in (out, made):
            assert_same(read(result), np.full(shape, 3.0 * comm.world_size), shape)
        assert comm.all_reduce(x, out=x) is x
        assert_same(read(x), np.full(shape, 3.0 * comm.world_size), shape)
    comm.check()


def test_shapes(run):
    run(use_every_shape)


def call_in_every_way(comm, cuda):
    size = comm.world_size
    x, out = full(cuda, 2), full(cuda, 0)
    comm.all_reduce(x)
    results = [comm.all_reduce(x, out=out) for _ in range(3)][-1:]
    work = comm.all_reduce(x, async_op=True)
    results.append(work.wait())
    work.synchronize()
    plan = comm.plan_all_reduce(x, out=full(cuda, 0))
    plan()
    results.append(plan())
    with comm.group():
        results.append(comm.all_reduce(x, out=full(cuda, 0)))
    results += comm.all_reduce([x, x])
    comm.check()
    got = [read(result) for result in results]
    assert all((values == 2.0 * size).all() for values in got)
    comm.broadcast(x, out=x)
    received = comm.send_recv(x, (comm.rank + 1) % size, (comm.rank - 1) % size)
    assert (read(received) == 2).all()
    scanned = comm.scan(x)
    assert (read(scanned) == 2.0 * (comm.rank + 1)).all()
    block = comm.reduce_scatter(full(cuda, 1, 4 * size))
    assert_same(read(block), np.full(4, size, np.float32))
    return len(got)


def test_every_way_to_call(run):
    assert set(run(call_in_every_way)) == {6}


def use_streams(comm, cuda):
    size = comm.world_size
    comm.all_reduce(full(cuda, 1))
    for stream in (cuda.stream(), cuda.stream(), cuda.default_stream()):
        for value in (1, 2):  # the second time goes the short way
            bound = put(cuda, np.full(1000, value, np.float32), stream)
            made = comm.all_reduce(bound)
            assert made.stream is stream
            assert (read(made) == value * size).all()
            assert comm.all_reduce(bound, out=bound) is bound
            assert (read(bound) == value * size).all()
        with stream.auto_synchronize():
            plain, out = full(cuda, 3), full(cuda, 0)
            assert comm.all_reduce(plain, out=out, stream=stream) is out
        assert (read(out) == 3 * size).all()
    owner = cuda.stream()
    foreign = cuda.external_stream(int(owner))
    comm.all_reduce(out, out=out, stream=foreign)
    foreign.synchronize()
    assert (read(out) == 3 * size * size).all()
    with pytest.raises(ArgumentError, match="per-thread default stream cannot be used"):
        comm.all_reduce(out, stream=cuda.per_thread_default_stream())
    comm.check()


def test_streams(run):
    run(use_streams)


def refuse(comm, cuda):
    x = full(cuda, 1, 12)
    comm.all_reduce(x)
    row = cuda.to_device(np.broadcast_to(np.ones(3, np.float32), (4, 3)))
    with pytest.raises(ArgumentError, match="share their memory"):
        comm.all_reduce(x, out=row)
    with pytest.raises(ArgumentTypeError, match="out must be of x's library, a Numba device"):
        comm.all_reduce(x, out=np.zeros(12, np.float32))
    with pytest.raises(ArgumentError, match="out overlaps x"):
        comm.all_reduce(x[:6], out=x[3:9])
    with pytest.raises(BackendUnavailableError, match="host memory, which cannot"):
        comm.register(np.ones(3))
    part = x[3:9]
    assert comm.all_reduce(part, out=part) is part
    expected = np.ones(12, np.float32)
    expected[3:9] = comm.world_size
    assert_same(read(x), expected)


def test_what_is_refused(run):
    run(refuse)


def use_views(comm, cuda):
    """Arrays that Numba packs and fills by a kernel of its own."""
    if not cuda.is_available():
        return "Numba has no compiler"
    size = comm.world_size
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    whole = put(cuda, values)
    row = cuda.to_device(np.broadcast_to(values[0], (4, 6)))
    for _ in range(2):
        assert_same(read(comm.all_reduce(whole[:, ::2])), values[:, ::2] * size)
        assert_same(read(comm.all_reduce(row)), np.broadcast_to(values[0], (4, 6)) * size)
    filled = put(cuda, np.full((4, 6), -1, np.float32))
    out = filled[:, 1::2]
    assert comm.all_reduce(whole[:, ::2], out=out) is out
    expected = np.full((4, 6), -1, np.float32)
    expected[:, 1::2] = values[:, ::2] * size
    assert_same(read(filled), expected)
    stream = cuda.stream()
    bound = put(cuda, values, stream)
    assert_same(read(comm.all_reduce(bound[1:, 3:])), values[1:, 3:] * size)
    comm.check()
    return True


def test_views(run):
    assert set(run(use_views)) == {True}


def use_memory(comm, cuda):
    size = comm.world_size
    x = full(cuda, 1)
    with pytest.raises(StateError, match="not connected yet"):
        comm.empty(3, like=x)
    comm.all_reduce(x)
    with comm.register(x):
        comm.all_reduce(x, out=x)
        comm.check()
    kept = comm.empty((2, 500), like=x)
    assert type(kept) is type(x)
    kept.copy_to_device(np.ones((2, 500), np.float32))
    comm.all_reduce(kept, out=kept)
    half = comm.empty(4, "bfloat16", like=x)
    assert half.dtype.name == "bfloat16"
    assert comm.empty(0, like=x).shape == (0,)
    row = kept[1]
    del kept
    gc.collect()
    comm.check()
    comm.close()
    return bool((read(row) == size).all())


def test_registered_memory_outlives_the_communicator(run):
    assert set(run(use_memory)) == {True}


def let_go_while_a_call_hangs(comm, cuda):
    """Giving memory back waits for the GPU, which waits for a rank that never comes."""
    x, last = full(cuda, 1, 200_000), full(cuda, 2)
    comm.all_reduce(x, out=x)
    comm.check()
    comm.all_reduce(last, out=last)
    if comm.rank == 0:
        comm.send(x, 1, timeout_s=0.5)  # nobody receives it
        del last
        gc.collect()
        with pytest.raises(DeadlineError, match=r"waited 0\.5 s in send"):
            comm.check()


@pytest.mark.parametrize("run", ["double"], indirect=True)
def test_memory_is_let_go_beside_what_looks_for_deadlines(run):
    run(let_go_while_a_call_hangs)
