"""An arena and the system: memory that is kept and given back, and processes that are forked."""

from __future__ import annotations

import os
import random
import select
import threading
import warnings

import numpy as np
import pytest
from tests.memory.arena_books import check_books, holds, taken_bytes

from gpucoll.memory.arena import process_arena


def test_what_is_kept_is_counted_and_limited(new_arena):
    arena = new_arena(1 << 26, kept_bytes=1 << 20)
    small = [arena.array((1 << 18,), np.dtype(np.uint8)) for _ in range(3)]
    for array in small:
        array[...] = 1
    assert arena.kept_bytes == 0
    del array, small
    assert arena.kept_bytes == 3 << 18 == taken_bytes(arena)

    large = arena.array((1 << 25,), np.dtype(np.uint8))
    assert arena.kept_bytes == 0, "what was kept is taken first"
    large[...] = 1
    assert taken_bytes(arena) == 1 << 25
    del large
    assert arena.kept_bytes <= 1 << 20
    assert taken_bytes(arena) == arena.kept_bytes > 0
    check_books(arena)

    untouched = arena.array((1 << 25,), np.dtype(np.uint8))
    assert taken_bytes(arena) <= 1 << 20
    assert not untouched[1 << 20 :].any(), "given back, so zero"
    del untouched


def test_the_last_page_is_given_back_too(new_arena):
    """An array ends inside of a page that nobody else uses."""
    arena = new_arena(1 << 22, kept_bytes=0)
    array = arena.array((5000,), np.dtype(np.uint8))
    array[...] = 1
    assert taken_bytes(arena) == 8192
    del array
    assert taken_bytes(arena) == arena.kept_bytes == 0


def test_neighbours_survive_what_is_given_back(new_arena):
    """Blocks that begin and end inside of pages, and nothing kept: every free gives pages back."""
    arena = new_arena(1 << 22, kept_bytes=0)
    drawn = random.Random(7)
    live = [arena.array((drawn.randrange(1, 30_000),), np.dtype(np.uint8)) for _ in range(200)]
    for value, array in enumerate(live):
        array[...] = value + 1
    kept = list(enumerate(live))[::2]
    del live, array
    for value, array in kept:
        assert (array == value + 1).all()
    check_books(arena)
    with arena.shared_arrays():
        zeros = [np.zeros(drawn.randrange(1024, 30_000), np.uint8) for _ in range(100)]
    assert not any(array.any() for array in zeros)


def test_memory_that_cannot_be_given_back_is_kept(new_arena):
    """A file system without holes: zeros are still zeros, and nothing is tried again."""
    arena = new_arena(1 << 22, kept_bytes=0)
    arena.array((1 << 20,), np.dtype(np.uint8))[...] = 9
    assert arena.kept_bytes == 0
    arena._heap.base += 1  # no page begins there: madvise refuses
    array = arena.array((1 << 20,), np.dtype(np.uint8))
    array[...] = 9
    del array
    assert arena.kept_bytes == 1 << 20
    with arena.shared_arrays():
        assert not np.zeros(1 << 20, np.uint8).any()
    check_books(arena)


def test_a_forked_child_leaves_the_arena_alone(arena):
    array = arena.array((1000,), np.dtype(np.float64))
    array[...] = 5

    def in_child(child_array):
        with pytest.raises(MemoryError, match="forked"):
            arena.array((10,), np.dtype(np.uint8))
        child_array.resize(3000, refcheck=False)
        assert not holds(arena, child_array)
        assert child_array[:1000].sum() == 5000
        own = process_arena()
        assert own is not arena
        assert holds(own, own.array((10,), np.dtype(np.uint8)))

    before = arena._heap.words.copy()
    assert run_in_child(in_child, array) == "fine"
    assert (arena._heap.words == before).all()
    assert (array == 5).all()
    assert array.ctypes.data == arena.mapping.address


@pytest.mark.soak
def test_forks_while_threads_take_and_free(arena):
    """The lock may be held at the moment of a fork: the child never waits for it."""
    ended = threading.Event()

    def work():
        while not ended.is_set():
            arena.array((4096,), np.dtype(np.uint8))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(30):
            with arena.shared_arrays():
                assert run_in_child(child_allocates, arena, [np.zeros(5000)]) == "fine"
    finally:
        ended.set()
        thread.join(10)


def child_allocates(arena, inherited):
    inherited.clear()
    made = [np.ones(5000) for _ in range(20)]
    assert not any(holds(arena, array) for array in made)


def run_in_child(function, *args):
    """Fork; return "fine" or the child's error."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks of processes with threads
        child = os.fork()
    if child == 0:
        said = b"fine"
        try:
            function(*args)
        except BaseException as error:
            said = repr(error).encode()[:4000]
        os.write(writing, said)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert select.select([pipe], [], [], 20)[0], "the child hangs"
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer
