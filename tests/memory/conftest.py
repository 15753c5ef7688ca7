"""Arenas for tests: of any size, and at the end everything must have come back."""

from __future__ import annotations

import gc
import os

import pytest
from tests.memory.arena_books import check_books

from gpucoll.memory.arena import ALIGNMENT_BYTES, Arena


@pytest.fixture
def new_arena():
    """Make arenas: ``new_arena(size_bytes, kept_bytes=...)``."""
    made = []

    def make(size_bytes, **options):
        made.append(Arena(size_bytes, **options))
        return made[-1]

    yield make
    gc.collect()
    for arena in made:
        assert arena.used_bytes == 0, "an array was never freed"
        free = check_books(arena)
        if not arena.retired_bytes:
            assert free == [(0, arena.size_bytes // ALIGNMENT_BYTES)], "not in one piece again"
        arena.mapping.unmap()
        arena._records.unmap()
        os.close(arena.fd)


@pytest.fixture
def arena(new_arena):
    return new_arena(16 << 20)
