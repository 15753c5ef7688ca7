"""JAX arrays: on the host, and on a real GPU. They cannot be written, and know no streams."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
from tests.dtypes import assert_same, small_values

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import DTYPES

WIDE = ("int64", "uint64", "float64", "complex128")
"""Off in JAX unless asked for."""
SUMMED = ("int8", "int32", "uint32", "float16", "bfloat16", "float32", "complex64")
SHAPES = ((), (1,), (0,), (2, 0, 3), (5, 7))

LIBRARY = "jax"
VARIABLES = {
    "host": {"JAX_PLATFORMS": "cpu"},
    "gpu": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # the GPU is not for JAX alone
}

pytest.importorskip("jax", reason="JAX is not installed")


def missing(jax):
    return "JAX has no plugin for this GPU" if jax.default_backend() == "cpu" else ""


def use_every_dtype(comm, jax):
    moved = 0
    for dtype in (name for name in DTYPES if name not in WIDE):
        parts = [small_values(dtype, 12, rank) for rank in range(comm.world_size)]
        x = jax.numpy.asarray(parts[comm.rank])
        assert x.dtype == dtype
        gathered = comm.all_gather(x)
        assert isinstance(gathered, jax.Array)
        assert gathered.devices() == x.devices()
        assert_same(np.asarray(gathered), np.concatenate(parts), dtype)
        if dtype in SUMMED:
            expected = sum(parts[1:], parts[0]).astype(parts[0].dtype)
            assert_same(np.asarray(comm.all_reduce(x)), expected, dtype)
        assert_same(np.asarray(x), parts[comm.rank], dtype)
        moved += 1
    comm.check()
    return moved


def test_dtypes(host_or_gpu):
    assert set(host_or_gpu(use_every_dtype)) == {len(DTYPES) - len(WIDE)}


def use_every_shape(comm, jax):
    for shape in SHAPES:
        for value in (1.0, 2.0):
            result = comm.all_reduce(jax.numpy.full(shape, value))
            expected = np.full(shape, value * comm.world_size, np.float32)
            assert_same(np.asarray(result), expected, shape)
    comm.check()


def test_shapes(host_or_gpu):
    host_or_gpu(use_every_shape)


def use_at_once(comm, jax):
    """What is not there yet is waited for, and results are there when the call returns."""
    size, rank = comm.world_size, comm.rank
    values = jax.numpy.arange(1 << 16, dtype="float32") % 7
    kept = []
    for step in range(5):
        x = jax.jit(lambda a, step=step: a * 2 + step + rank)(values)
        total = comm.all_reduce(x)
        del x
        kept.append((step, total, jax.numpy.sum(total + 1)))
    plain = np.arange(1 << 16, dtype=np.float32) % 7
    for step, total, summed in kept:
        expected = (plain * 2 + step) * np.float32(size) + np.float32(sum(range(size)))
        assert_same(np.asarray(total), expected, step)
        assert summed == (expected + 1).sum()  # below 2 ** 24: exact in any order
    comm.check()


def call_in_every_way(comm, jax):
    size, rank = comm.world_size, comm.rank
    x = jax.numpy.full(1000, 2.0)
    work = comm.all_reduce(x, async_op=True)
    results = [work.wait()]
    work.synchronize()
    first, second = comm.all_reduce([x, x + 1])
    results += [first, second - size]
    results.append(comm.all_reduce(x, "max") * size)
    results.append(comm.broadcast(x * (rank + 1), root=size - 1))
    assert all(bool((result == 2.0 * size).all()) for result in results)
    assert (comm.scan(x) == 2.0 * (rank + 1)).all()
    block = comm.reduce_scatter(jax.numpy.arange(4.0 * size))
    assert (block == size * (jax.numpy.arange(4.0) + 4 * rank)).all()
    received = comm.send_recv(x + rank, (rank + 1) % size, (rank - 1) % size)
    assert (received == 2.0 + (rank - 1) % size).all()
    assert (comm.all_to_all(jax.numpy.arange(2.0 * size)).shape) == (2 * size,)
    gathered = comm.gather(x[:3])
    assert (gathered is None) == (rank != 0)
    assert comm.scatter(jax.numpy.arange(3.0 * size)).tolist() == [3.0 * rank + n for n in range(3)]
    comm.check()
    return len(results)


def test_every_way_to_call(host_or_gpu):
    assert set(host_or_gpu(call_in_every_way)) == {5}


def test_used_at_once(host_or_gpu):
    host_or_gpu(use_at_once)


def refuse(comm, jax):
    x = jax.numpy.ones(8)
    comm.all_reduce(x)
    with pytest.raises(ArgumentTypeError, match="JAX arrays are immutable: omit out="):
        comm.all_reduce(x, out=jax.numpy.zeros(8))
    with pytest.raises(ArgumentError, match="which excludes numbers and JAX arrays"):
        comm.plan_all_reduce(x)

    @jax.jit
    def compiled(traced):
        with pytest.raises(ArgumentTypeError, match="x is being traced"):
            comm.all_reduce(traced)
        return traced

    compiled(x)
    donated = jax.numpy.ones(8)
    donated.delete()
    with pytest.raises(ArgumentTypeError, match="x was deleted"):
        comm.all_reduce(donated)
    columns = jax.numpy.arange(6.0).reshape(2, 3).T
    assert (comm.all_reduce(columns) == comm.world_size * columns).all()
    assert (comm.all_reduce(x) == comm.world_size).all()
    comm.check()


def test_what_is_refused(host_or_gpu):
    host_or_gpu(refuse)


def own_layout(comm, jax):
    layout = importlib.import_module("jax.experimental.layout")
    rows = jax.numpy.arange(6.0).reshape(2, 3)
    columns = jax.device_put(rows, layout.Format(layout.Layout((1, 0)), rows.sharding))
    assert (comm.all_reduce(columns) == comm.world_size * rows).all()
    comm.check()


def test_a_layout_that_a_user_asked_for(host_or_gpu):
    host_or_gpu(own_layout)


def use_memory(comm, jax):
    """Memory of the vendor's library, that JAX takes over and gives back."""
    x = jax.numpy.ones(1000)
    comm.all_reduce(x)
    raw = comm.empty(1000, "float32", like=x)
    address = raw.address
    taken = jax.dlpack.from_dlpack(raw)
    assert taken.unsafe_buffer_pointer() == address
    assert taken.devices() == x.devices()
    del raw
    received = comm.broadcast(taken)  # of whatever is there
    bits = [jax.lax.bitcast_convert_type(array, "int32") for array in (taken, received)]
    comm.check()
    return bool((bits[0] == bits[1]).all())


@pytest.mark.parametrize("host_or_gpu", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)
def test_registered_memory(host_or_gpu):
    assert set(host_or_gpu(use_memory)) == {True}
