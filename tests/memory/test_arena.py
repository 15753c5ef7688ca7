"""The allocator of shared arrays: no overlap, no loss, alive as long as its arrays."""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.memory.arena_books import check_books, taken_bytes

from gpucoll.memory import heap
from gpucoll.memory.arena import ALIGNMENT_BYTES
from gpucoll.transport.shared import mapping


def test_arrays_are_aligned_and_apart(arena):
    kept: dict[int, np.ndarray] = {}
    drawn = random.Random(1)
    for turn in range(2000):
        if kept and drawn.random() < 0.5:
            value = drawn.choice(list(kept))
            array = kept.pop(value)
            assert (array == value % 251).all()
        else:
            array = arena.array((drawn.randrange(4000),), np.dtype(np.uint8))
            assert array.ctypes.data % ALIGNMENT_BYTES == 0
            array[...] = turn % 251
            kept[turn] = array
    for value, array in kept.items():
        assert (array == value % 251).all()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("seed", range(5))
def test_random_sizes_never_overlap(new_arena, seed):
    """Sizes from a granule to a fifth, full again and again: no block changes under another."""
    arena = new_arena(8 << 20, kept_bytes=1 << 20)
    drawn, refused = random.Random(seed), 0
    live: list[tuple[int, np.ndarray]] = []
    for turn in range(4000):
        if live and drawn.random() < 0.48:
            value, array = live.pop(drawn.randrange(len(live)))
            assert (array == value).all()
            del array
        else:
            try:
                array = arena.array((int(2 ** drawn.uniform(0, 20.5)),), np.dtype(np.uint8))
            except MemoryError:
                refused += 1
                continue
            value = turn % 251
            array[...] = value
            live.append((value, array))
            del array
        if turn % 50 == 0:
            check_books(arena)
    assert refused > 10
    while live:
        value, array = live.pop(drawn.randrange(len(live)))
        assert (array == value).all()
        del array
    assert arena.array((arena.size_bytes,), np.dtype(np.uint8)).nbytes == arena.size_bytes


def test_ten_thousand_holes(new_arena):
    """Every second of many blocks is free; one that fits none of the holes is still found."""
    big = new_arena(1 << 28)
    blocks = [big.array((4096,), np.dtype(np.uint8)) for _ in range(20_000)]
    del blocks[::2]
    assert len(check_books(big)) == 10_001
    array = big.array((8192,), np.dtype(np.uint8))
    assert array.ctypes.data > max(block.ctypes.data for block in blocks)
    again = big.array((4096,), np.dtype(np.uint8))
    assert again.ctypes.data < array.ctypes.data, "took fresh memory while 10000 holes would do"


def test_a_view_keeps_the_memory(arena):
    view = arena.array((1000,), np.dtype(np.float64))[500:].reshape(5, 100)
    gc.collect()
    assert arena.used_bytes == 8192
    view[...] = 3
    assert view.sum() == 1500


def test_full(arena):
    half = arena.array((8 << 20,), np.dtype(np.uint8))
    said = r"no 12582912 bytes in one piece: 8388608 of 16777216 are in use by 1 arrays\. Free"
    with pytest.raises(MemoryError, match=said):
        arena.array((12 << 20,), np.dtype(np.uint8))
    assert half.nbytes == 8 << 20


@pytest.mark.parametrize("shape", [(1 << 62,), (2**63 - 1,), (1 << 31, 1 << 31)])
def test_absurd_sizes(arena, shape):
    with pytest.raises(MemoryError, match="in one piece: 0 of 16777216"):
        arena.array(shape, np.dtype(np.uint8))


def test_threads(new_arena):
    """All take, fill, pass on and free at once: what one thread makes another one frees."""
    arena = new_arena(1 << 20)
    wrong = []
    exchanged: queue.SimpleQueue[tuple[int, np.ndarray]] = queue.SimpleQueue()

    def work(value):
        for turn in range(1000):
            try:
                array = arena.array((value * 100 + turn,), np.dtype(np.int64))
            except MemoryError:
                array = exchanged.get(timeout=10)[1]
                continue
            array[...] = value
            exchanged.put((value, array))
            del array
            if exchanged.qsize() > 8:
                other, array = exchanged.get(timeout=10)
                if not (array == other).all():
                    wrong.append(other)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval_s)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    check_books(arena)


def test_threads_without_the_interpreters_lock(arena):
    """What ctypes calls runs at the same time, as NumPy may on a free-threaded interpreter."""
    state = arena._heap.address

    def work(seed):
        drawn, held = random.Random(seed), [0] * 20
        for _ in range(5000):
            place = drawn.randrange(20)
            if held[place]:
                heap.give.ctypes(state, held[place])
            held[place] = heap.take.ctypes(state, drawn.randrange(1, 10_000))
        for address in held:
            if address:
                heap.give.ctypes(state, address)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_shared_memory_cannot_be_shrunk_under_a_peer():
    fd = mapping.create("gpucoll-test", 8192, reserve_bytes=8192)
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
    fd = mapping.create("gpucoll-test", 8192, reserve_bytes=8192)
    one, other = (mapping.Mapping(fd, 8192) for _ in range(2))
    os.close(fd)
    ctypes.c_int64.from_address(one.address + 4096).value = 42
    assert ctypes.c_int64.from_address(other.address + 4096).value == 42
    one.unmap()
    other.unmap()
    assert sorted(Path("/dev/shm").glob("gpucoll*")) == before


def test_retired_memory_is_not_given_out_again(new_arena):
    arena = new_arena(1 << 22)
    address = arena.array((1 << 10,), np.dtype("u1")).ctypes.data
    assert arena.array((1 << 10,), np.dtype("u1")).ctypes.data == address  # freed, and used again

    kept = arena.array((1 << 16,), np.dtype("u1"))
    kept[...] = 3
    arena.retire()
    assert (kept == 3).all()
    retired = range(kept.ctypes.data, kept.ctypes.data + kept.nbytes)
    kept.resize(1 << 15, refcheck=False)
    assert kept.ctypes.data == retired.start
    assert taken_bytes(arena) == 1 << 16
    del kept

    assert arena.retired_bytes == 1 << 16
    assert arena.used_bytes == 0
    assert taken_bytes(arena) == 0, "the memory of retired arrays was not given back"
    made = []
    while arena.used_bytes + arena.retired_bytes < arena.size_bytes:
        made.append(arena.array((1 << 10,), np.dtype("u1")))
        assert made[-1].ctypes.data not in retired
    with pytest.raises(MemoryError, match="65536 are retired"):
        arena.array((1,), np.dtype("u1"))
