"""What an arena's books must be like at any moment."""

from __future__ import annotations

import ctypes
import os

import numpy as np

from gpucoll.memory import free_lists as lists
from gpucoll.memory.free_lists import Heap
from gpucoll.memory.heap import GRANULE_BYTES


def check_books(arena):
    """Walk over all blocks; return the free ones as (first granule, size)."""
    granules = arena.size_bytes // GRANULE_BYTES
    words = (ctypes.c_int64 * ((granules + 1) * 8)).from_address(arena._records.address)
    records = np.frombuffer(words, np.int64).reshape(-1, 8)
    free, used, kept, block, before, was_free = [], 0, 0, 0, 0, False
    while block < granules:
        record = records[block].tolist()
        size, owner, touched = record[lists.SIZE], record[lists.OWNER], record[lists.TOUCHED]
        assert size > 0
        assert record[lists.BEFORE] == before
        is_free = owner == lists.FREE
        assert not (is_free and was_free), "two free neighbours that are not one block"
        if is_free:
            assert 0 <= touched <= size
            free.append((block, size))
            kept += touched
        elif owner != lists.GONE:
            used += size
        block, before, was_free = block + size, size, is_free
    assert block == granules
    assert used == arena._heap[Heap.USED]
    assert kept == arena._heap[Heap.KEPT]
    assert listed(arena, records) == sorted(free)
    return free


def listed(arena, records):
    """Return the blocks that the free lists lead to, as (first granule, size)."""
    found = []
    for place, block in enumerate(arena._heap[Heap.LISTS :].tolist()):
        word = int(arena._heap[Heap.BITMAP + place // 64]) & (2**64 - 1)
        assert bool(word >> (place % 64) & 1) == (block != lists.NONE)
        while block != lists.NONE:
            found.append((block, int(records[block][lists.SIZE])))
            block = int(records[block][lists.NEXT])
    return sorted(found)


def taken_bytes(arena):
    """Return what the system has given the arena, in bytes."""
    return os.fstat(arena.fd).st_blocks * 512


def holds(arena, array):
    """Return whether an array lies in the arena."""
    return 0 <= array.ctypes.data - arena.mapping.address < arena.size_bytes
