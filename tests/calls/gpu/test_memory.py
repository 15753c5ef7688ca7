"""Memory that the vendor's library knows: comm.empty(like=), comm.register."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from tests.calls.gpu.conftest import REPLAYED

from gpucoll.arrays.device_array import DeviceArray
from gpucoll.errors import ArgumentError, BackendUnavailableError, StateError


def ones(kit, count=4):
    values = np.ones(count, np.float32)
    return kit.seen_as(kit.bytes_of(values.view(np.uint8)), (count,), "float32")


def use(comm, kit):
    with pytest.raises(StateError, match=r"not connected yet\. Pass device="):
        comm.empty(3, like=ones(kit))
    comm.all_reduce(ones(kit))
    results = []
    for shape, dtype in (((3, 4), "float32"), (0, "int8"), ((), "float64"), (5, "bool")):
        x = comm.empty(shape, dtype, like=ones(kit))
        assert type(x) is type(ones(kit))
        lengths = (shape,) if isinstance(shape, int) else shape
        assert tuple(x.shape) == lengths
        kit.write(x, np.ones(lengths, dtype))
        out = comm.empty(shape, dtype, like=x)
        assert comm.all_reduce(x, "max", out=out) is out
        results.append(bool((kit.read(out) == 1).all()))
    raw = comm.empty(8, "float32", like="cuda")
    assert type(raw) is DeviceArray
    comm.broadcast(raw, out=raw)
    with pytest.raises(ArgumentError, match="negative length"):
        comm.empty(-1, like=raw)
    host = comm.empty(3, like=np.zeros(2))
    assert type(host) is np.ndarray
    comm.check()
    return results


@REPLAYED
def test_arrays_in_registered_memory(gpus):
    assert gpus.call(2, use) == [[True] * 4] * gpus.world(2)


def outlive(rank):
    """Whoever dies first, registrations and memory are given back."""
    with rank.init(device=rank.rank) as comm:
        kept = comm.empty(1000, like=ones(rank.kit))
        comm.all_reduce(kept, out=kept)
        before = rank.control.count("memory")
        for _ in range(5):
            x = comm.empty(1000, like=kept)
            comm.all_reduce(x, out=x)
            comm.check()
            del x
        gc.collect()
        comm.empty(1, like=kept)  # gives back what has died
        grown = rank.control.count("memory") - before
        with comm.register(ones(rank.kit)) as registered:
            mine = registered.is_open
            comm.check()
        n_open = rank.control.registrations
        twice = comm.register(kept)
        twice.close()
        twice.close()
        left_open = comm.register(ones(rank.kit))
    rank.kit.write(kept, np.full(1000, 3, np.float32))
    states = [mine, registered.is_open, left_open.is_open, rank.control.registrations]
    last = rank.kit.read(kept)[-1]
    memory = rank.control.count("memory")
    del kept
    gc.collect()
    assert rank.control.count("memory") == memory  # a graph may be captured where this is called
    with rank.init(device=rank.rank) as comm:
        comm.all_reduce(ones(rank.kit))
        comm.check()
    assert rank.control.count("memory") < memory
    return states, last, grown <= 1 << 22, n_open >= 1


def test_who_dies_first(gpus):
    expected = ([True, False, False, 0], 3.0, True, True)
    assert gpus.call_ranks(2, outlive) == [expected] * 2


def refuse(comm, kit):
    x = ones(kit, 8)
    comm.all_reduce(x)
    with pytest.raises(BackendUnavailableError, match="lies in host memory, which cannot"):
        comm.register(np.ones(3))
    with pytest.raises(ArgumentError, match="array is not contiguous"):
        comm.register(x[::2])
    comm.close()
    with pytest.raises(StateError, match="is closed"):
        comm.register(x)
    with pytest.raises(StateError, match="is closed"):
        comm.empty(3, like=x)


def test_what_is_refused(gpus):
    gpus.call(1, refuse)


def without_gpus(comm):
    with pytest.raises(BackendUnavailableError, match="has no backend for GPU arrays"):
        comm.empty(3, like="cuda")


def test_without_gpus(ranks):
    ranks.call(1, without_gpus)
