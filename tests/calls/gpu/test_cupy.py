"""What CuPy does and its look-alike does not, on a GPU: allocators, streams, exchange."""

from __future__ import annotations

import contextlib
import gc
from functools import partial

import numpy as np
import pytest
from tests.dtypes import assert_same

from gpucoll.errors import ArgumentError

pytestmark = pytest.mark.gpu

LIBRARY = "cupy"
COUNT = 1 << 18


def missing(cupy):
    return "" if cupy.cuda.is_available() else "CuPy sees no GPU"


def full(cupy, value, count=COUNT):
    return cupy.asarray(np.full(count, value, np.float32))


def allocator_of(cupy, name):
    if name == "pool":
        return contextlib.nullcontext()
    pool = cupy.cuda.MemoryAsyncPool().malloc if name == "asynchronous pool" else None
    return cupy.cuda.using_allocator(pool)


def reuse_memory(name, comm, cupy):
    """Inputs die at once, and what is made next gets their memory while the calls are under way."""
    with allocator_of(cupy, name):
        comm.all_reduce(full(cupy, 1, 3))
        works, plain = [], []
        for step in range(20):
            x = full(cupy, step)
            works.append(comm.all_reduce(x, async_op=True))
            plain.append(comm.all_reduce(x))
            del x
            full(cupy, -1)
        for step, (work, result) in enumerate(zip(works, plain, strict=True)):
            for array in (work.wait(), result):
                values = array.get()
                assert values.min() == values.max() == step
        comm.check()
        works.clear()
        plain.clear()
        gc.collect()


@pytest.mark.parametrize("name", ["pool", "asynchronous pool", "no pool"])
def test_memory_that_is_used_again(on_gpu, name):
    on_gpu(partial(reuse_memory, name))


def use_streams(comm, cupy):
    comm.all_reduce(full(cupy, 1, 3))
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(), cupy.cuda.Stream.null):
        with stream:
            for step in range(3):
                x = full(cupy, step)
                out = full(cupy, -1)
                assert comm.all_reduce(x, out=out) is out
                assert_same(out.get(), np.full(COUNT, step, np.float32))
        stream.synchronize()
        assert comm.all_reduce(x, out=x, stream=stream) is x
        stream.synchronize()
        assert_same(x.get(), np.full(COUNT, 2, np.float32))
    with cupy.cuda.Stream.ptds, pytest.raises(ArgumentError, match="per-thread default stream"):
        comm.all_reduce(x, out=x)
    comm.check()


def test_streams(on_gpu):
    on_gpu(use_streams)


def exchange(comm, cupy):
    """Memory of the vendor's library, taken over in both ways, and kept after the communicator."""
    x = full(cupy, 2, 8)
    comm.all_reduce(x)
    kept = []
    for take in (cupy.from_dlpack, cupy.asarray):
        raw = comm.empty(8, "float32", like="cuda")
        taken = take(raw)
        assert taken.data.ptr == raw.address
        taken.set(np.full(8, 3, np.float32))
        assert comm.all_reduce(taken, out=taken) is taken
        kept.append(taken[2:])
        del raw, taken
    for name in ("bfloat16", "float8_e5m2", "uint16", "complex128"):
        made = comm.empty((2, 3), name, like=x)
        assert (type(made), made.dtype, made.shape) == (cupy.ndarray, np.dtype(name), (2, 3))
        comm.broadcast(made, out=made)
    gc.collect()
    with comm.register(x):
        comm.all_reduce(x, out=x)
        comm.check()
    comm.close()
    return [part.get().tolist() for part in kept]


def test_exchange(on_gpu):
    assert on_gpu(exchange) == [[3.0] * 6] * 2
