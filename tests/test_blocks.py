"""Blocks: the same words for Python and for compiled loops."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll.blocks import Block, Field, Words, word, words
from gpucoll.codes import Codes
from gpucoll.kernels.cpu.jit import compiled, inline
from gpucoll.kernels.cpu.memory import exchange64


class Answer(Codes):
    NOTHING = -1
    FIVE = 5


class Inner(Block):
    first: int
    second: int


class Outer(Block):
    rank: int
    inner: Field[Inner]
    table: Field[Words]
    clock: Field[Words] = words(3)
    tail: int = word(8)
    last: int


@inline
def add(outer: Outer, more: int) -> int:
    outer.rank += more
    return outer.rank


@compiled
def visit(outer: Outer, index: int) -> int:
    if not outer.inner or not Outer(outer.address).table:
        return Answer.NOTHING
    outer.inner.second = outer.inner.first + Outer.n_bytes
    outer.clock[index] = outer.table[index]
    exchange64(outer.at.tail, max(Answer.FIVE, index))
    return add(outer, 2) + outer.last


def test_layout():
    assert (Outer.n_words, Outer.n_bytes) == (10, 80)
    outer = Outer.new()
    assert outer.clock.address == outer.address + 24
    assert outer.at.tail == outer.address + 64
    with pytest.raises(AttributeError):
        getattr(outer.at, "head")  # noqa: B009  # mypy refuses the plain form


def test_python_and_a_loop_see_the_same():
    outer, inner, table = Outer.new(), Inner.new(), np.arange(10, 13)
    assert visit.ctypes(outer.address, 1) == -1
    outer.inner, outer.rank, outer.last = inner, 40, -7
    assert not outer.table
    outer.table = Words(table.ctypes.data)
    inner.first = 3

    assert visit.ctypes(outer.address, 1) == 42 - 7

    assert (outer.rank, outer.tail, inner.second) == (42, 5, 83)
    assert [outer.clock[index] for index in range(3)] == [0, 11, 0]
    assert outer.inner.address == inner.address
    assert add(outer, 1) == 43  # as plain Python, without a compiler


def test_words_have_bounds_where_they_are_known():
    outer = Outer.new()
    outer.clock[2] = 1
    with pytest.raises(IndexError, match="word 3 of 3"):
        outer.clock[3] = 1
    with pytest.raises(IndexError, match="word -1 of 3"):
        outer.clock[-1]


def test_a_block_over_an_array():
    array = np.zeros(4, np.int64)
    inner = Inner.over(array[2:])
    inner.second = 9
    assert array.tolist() == [0, 0, 0, 9]
    array[2:][Inner.first] = 4
    assert inner.first == 4
    assert not Inner(0)
