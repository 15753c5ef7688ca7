"""NumPy's arrays made within `Arena.shared_arrays`: where they lie, whatever made them."""

from __future__ import annotations

import copy
import pickle
import random
import sys

import numpy as np
import pytest
from tests.memory.arena_books import check_books, holds, taken_bytes

from gpucoll.memory.arena import ALIGNMENT_BYTES, SMALL_BYTES

N = 1000


def structured():
    return np.zeros(N, [("key", "i4"), ("value", "f8", 3)])


WAYS = {
    "empty": lambda: np.empty(N),
    "zeros": lambda: np.zeros(N),
    "full": lambda: np.full(N, 2.5),
    "arange": lambda: np.arange(N),
    "array of a list": lambda: np.array([1.5] * N),
    "ufunc": lambda: np.arange(N) * 2.0,
    "reduction": lambda: np.ones((3, N)).sum(axis=0),
    "concatenate": lambda: np.concatenate([np.ones(N), np.zeros(3)]),
    "copy": lambda: np.ones(N).copy(),
    "astype": lambda: np.ones(N).astype(np.complex64),
    "take": lambda: np.arange(N)[np.arange(N)[::-1]],
    "mask": lambda: np.arange(2 * N)[np.arange(2 * N) % 2 == 0],
    "sort": lambda: np.sort(np.arange(N)[::-1].astype(np.float64)),
    "matmul": lambda: np.ones((40, 40)) @ np.ones((40, 40)),
    "strings": lambda: np.array(["text"] * N),
    "structured": structured,
    "view": lambda: np.zeros(N)[100:900].reshape(2, 400).T,
    "deep copy": lambda: copy.deepcopy(np.arange(N)),
    "frombuffer copy": lambda: np.frombuffer(bytes(8 * N)).copy(),
}


@pytest.mark.parametrize("way", WAYS)
def test_arrays_made_inside_lie_in_the_arena(arena, way):
    expected = WAYS[way]()
    assert not holds(arena, expected)
    with arena.shared_arrays():
        array = WAYS[way]()
    assert holds(arena, array)
    if way != "empty":
        assert (array == expected).all()
    assert array.dtype == expected.dtype
    assert array.flags.writeable
    if way != "view":
        assert array.ctypes.data % ALIGNMENT_BYTES == 0


def test_outside_nothing_changes(arena):
    with arena.shared_arrays():
        inside = np.ones(N)
    for made in (inside + 1, inside.copy(), pickle.loads(pickle.dumps(inside)), np.ones(N)):
        assert not holds(arena, made)
    inside += 1
    inside[...] = inside * 2
    assert holds(arena, inside)
    assert (inside == 4).all()


def test_unpickled_arrays_are_ordinary(arena):
    """NumPy leaves them in the memory that the pickle brought; a copy of them is made inside."""
    with arena.shared_arrays():
        array = np.arange(N)
        unpickled = pickle.loads(pickle.dumps(array))
        assert (unpickled == array).all()
        assert not holds(arena, unpickled), "no longer a trap: mend the documentation"
        assert holds(arena, unpickled.copy())


def test_small_arrays_are_left_alone(arena):
    with arena.shared_arrays():
        assert not holds(arena, np.ones(SMALL_BYTES - 1, np.uint8))
        assert not holds(arena, np.zeros(()))
        assert holds(arena, np.ones(SMALL_BYTES, np.uint8))
        assert np.empty(0).size == 0
        assert np.empty((0, N)).shape == (0, N)


def test_zeros_are_zeros(arena):
    drawn = random.Random(3)
    with arena.shared_arrays():
        for _ in range(300):
            dirty = [np.full(drawn.randrange(1024, 200_000), 255, np.uint8) for _ in range(5)]
            del dirty[:: drawn.randrange(1, 4)]
            assert not np.zeros(drawn.randrange(1024, 300_000), np.uint8).any()


def test_fresh_zeros_touch_nothing(new_arena):
    arena = new_arena(1 << 33)
    with arena.shared_arrays():
        dirty = np.ones(1 << 20, np.uint8)
        del dirty
        zeros = np.zeros(1 << 32, np.uint8)
    assert zeros[-1] == 0
    assert taken_bytes(arena) <= (1 << 20) + 8192
    del zeros


def test_a_full_arena_is_no_error(arena):
    with arena.shared_arrays():
        most = np.ones(15 << 20, np.uint8)
        ones, zeros = np.ones(2 << 20, np.uint8), np.zeros(2 << 20, np.uint8)
        assert holds(arena, most)
        assert not holds(arena, ones)
        assert not holds(arena, zeros)
        del most
        ones.resize(3 << 20, refcheck=False)
        assert holds(arena, ones), "what grows moves in where there is room"
        assert ones.sum() == 2 << 20
        assert not zeros.any()


def test_resize(arena):
    with arena.shared_arrays():
        array = np.arange(10)
    sizes = [100, 5000, 5001, 300_000, 299_000, 2000, 100, 4000, 10]
    for size in sizes:
        kept = min(size, len(array))
        array.resize(size, refcheck=False)
        assert (array[:kept] == np.arange(10).tolist()[:kept] + [0] * (kept - 10)).all()
        assert not array[10:].any()
        check_books(arena)
    assert holds(arena, array)
    assert arena.used_bytes == ALIGNMENT_BYTES, "the end of a smaller block was not freed"


def test_arrays_that_grow(arena):
    with arena.shared_arrays():
        array = np.fromiter((value * value for value in range(50_000)), np.int64)
    assert holds(arena, array)
    assert (array == np.arange(50_000) ** 2).all()


def test_objects_keep_their_references(arena):
    thing = object()
    before = sys.getrefcount(thing)
    with arena.shared_arrays():
        array = np.array([thing] * N, dtype=object)
        assert holds(arena, array)
        other = array[::-1].copy()
        assert sys.getrefcount(thing) == before + 2 * N
        other[:500] = None
        other.resize(3 * N, refcheck=False)
        assert sys.getrefcount(thing) == before + N + 500
    del array, other
    assert sys.getrefcount(thing) == before


def test_tensors(arena):
    torch = pytest.importorskip("torch", reason="tensors need torch, which is not installed")
    with arena.shared_arrays():
        tensor = torch.from_numpy(np.ones(N, np.float32))
        result = tensor * 2
    assert 0 <= tensor.data_ptr() - arena.mapping.address < arena.size_bytes
    assert tensor.sum() == N
    assert not 0 <= result.data_ptr() - arena.mapping.address < arena.size_bytes
