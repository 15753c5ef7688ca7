"""The allocator of shared arrays: no overlap, no loss, alive as long as its arrays."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest

from gpucoll.transport import shared_memory
from gpucoll.transport.arena import ALIGNMENT_BYTES, Arena

SIZE_BYTES = 1 << 20


@pytest.fixture
def arena():
    made = Arena(SIZE_BYTES)
    yield made
    gc.collect()
    made._settle()
    assert made.used_bytes == 0
    assert made._holes == [(0, SIZE_BYTES)], "what was freed did not become one piece again"
    made.mapping.unmap()
    os.close(made.fd)


def test_arrays_are_aligned_and_apart(arena):
    kept: dict[int, np.ndarray] = {}
    drawn = random.Random(1)
    for turn in range(2000):
        if kept and drawn.random() < 0.5:
            value, array = kept.popitem()
            assert (array == value % 251).all()
        else:
            array = arena.array((drawn.randrange(4000),), np.dtype(np.uint8))
            assert array.ctypes.data % ALIGNMENT_BYTES == 0
            array[...] = turn % 251
            kept[turn] = array
    for value, array in kept.items():
        assert (array == value % 251).all()


def test_a_view_keeps_the_memory(arena):
    view = arena.array((1000,), np.dtype(np.float64))[500:].reshape(5, 100)
    gc.collect()
    assert arena.used_bytes == 8192
    view[...] = 3
    assert view.sum() == 1500


def test_full(arena):
    half = arena.array((SIZE_BYTES // 2,), np.dtype(np.uint8))
    with pytest.raises(MemoryError, match=r"no 786432 bytes in one piece: 524288 of 1048576 are"):
        arena.array((SIZE_BYTES * 3 // 4,), np.dtype(np.uint8))
    assert half.nbytes == SIZE_BYTES // 2


def test_threads(arena):
    wrong = []

    def work(value):
        for _ in range(300):
            array = arena.array((value * 100,), np.dtype(np.int64))
            array[...] = value
            if not (array == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_shared_memory_cannot_be_shrunk_under_a_peer():
    fd = shared_memory.create("gpucoll-test", 8192, reserve=True)
    try:
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, 4096)
        assert os.fstat(fd).st_size == 8192
    finally:
        os.close(fd)


def test_shared_memory_without_memfd(monkeypatch):
    def forbidden(*_):
        raise OSError(1, "not permitted")

    before = sorted(Path("/dev/shm").glob("gpucoll*"))
    monkeypatch.setattr(os, "memfd_create", forbidden)
    fd = shared_memory.create("gpucoll-test", 8192, reserve=True)
    one, other = (shared_memory.Mapping(fd, 8192) for _ in range(2))
    os.close(fd)
    ctypes.c_int64.from_address(one.address + 4096).value = 42
    assert ctypes.c_int64.from_address(other.address + 4096).value == 42
    one.unmap()
    other.unmap()
    assert sorted(Path("/dev/shm").glob("gpucoll*")) == before


def test_retired_memory_is_not_given_out_again():
    arena = Arena(1 << 22)
    address = arena.array((1 << 10,), np.dtype("u1")).ctypes.data
    assert arena.array((1 << 10,), np.dtype("u1")).ctypes.data == address  # freed, and used again

    kept = arena.array((1 << 10,), np.dtype("u1"))
    arena.retire()
    address = kept.ctypes.data
    del kept

    assert arena.array((1 << 10,), np.dtype("u1")).ctypes.data != address
