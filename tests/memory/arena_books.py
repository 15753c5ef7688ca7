"""What an arena's books must be like at any moment."""

from __future__ import annotations

import os

from gpucoll.memory import heap as lists
from gpucoll.memory.heap import GRANULE_BYTES


def check_books(arena):
    """Walk over all blocks; return the free ones as (first granule, size)."""
    granules = arena.size_bytes // GRANULE_BYTES
    free, used, kept, block, before, was_free = [], 0, 0, 0, 0, False
    while block < granules:
        record = lists.record_of(arena._heap, block)
        size, touched = record.size, record.touched
        assert size > 0
        assert record.before == before
        is_free = record.owner == lists.FREE
        assert not (is_free and was_free), "two free neighbours that are not one block"
        if is_free:
            assert 0 <= touched <= size
            free.append((block, size))
            kept += touched
        elif record.owner != lists.GONE:
            used += size
        block, before, was_free = block + size, size, is_free
    assert block == granules
    assert used == arena._heap.used
    assert kept == arena._heap.kept
    assert listed(arena) == sorted(free)
    return free


def listed(arena):
    """Return the blocks that the free lists lead to, as (first granule, size)."""
    found, heap = [], arena._heap
    for place in range(lists.N_LISTS):
        block = heap.lists[place]
        assert bool(heap.bitmap[place // 64] >> (place % 64) & 1) == (block != lists.NONE)
        while block != lists.NONE:
            record = lists.record_of(heap, block)
            found.append((block, record.size))
            block = record.next
    return sorted(found)


def taken_bytes(arena):
    """Return what the system has given the arena, in bytes."""
    return os.fstat(arena.fd).st_blocks * 512


def holds(arena, array):
    """Return whether an array lies in the arena."""
    return 0 <= array.ctypes.data - arena.mapping.address < arena.size_bytes
