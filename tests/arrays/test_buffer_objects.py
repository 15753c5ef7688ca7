"""bytes, bytearray, array.array, memoryview and other objects with the buffer protocol."""

from __future__ import annotations

import array
import ctypes
import mmap

import numpy as np
import pytest
from tests.moving import move

from gpucoll.arrays.operands import destination_of, prepare, template_like, template_of
from gpucoll.errors import ArgumentError, ArgumentTypeError


@pytest.mark.parametrize(
    "x", [b"abc", bytearray(b"abc"), array.array("d", [1.5, 2.5]), array.array("q", [3])]
)
def test_the_result_is_of_the_same_type(x):
    same = move(x)
    assert type(same) is type(x)
    assert same == x
    assert same is not x
    twice = move(x, shape=(2 * len(x),))
    assert type(twice) is type(x)
    assert twice == x + x
    assert getattr(twice, "typecode", None) == getattr(x, "typecode", None)


def test_memoryviews():
    x = memoryview(bytearray(range(12))).cast("h", (2, 3))

    same = move(x)
    assert type(same) is memoryview
    assert same.tolist() == x.tolist()
    whole = bytearray(8)
    out = memoryview(whole)[::2]
    assert move(memoryview(b"abcdefgh")[::2], out) is out
    assert whole == b"a\0c\0e\0g\0"


def test_others_come_back_as_numpy_arrays():
    result = move((ctypes.c_float * 2)(1.5, 2.5))
    assert type(result) is np.ndarray
    assert result.tolist() == [1.5, 2.5]
    with mmap.mmap(-1, 16) as x:
        x[:2] = b"ab"
        result = move(x)
        assert result[:3].tolist() == [97, 98, 0]
        assert move(b"z" * 16, x) is x
        assert x[:] == b"z" * 16


def test_the_input_is_not_copied():
    x = bytearray(b"abc")

    assert move(x, x) is x
    with pytest.raises(ArgumentError, match="out overlaps x"):
        prepare(memoryview(x)[:2], memoryview(x)[1:])
    x += b"d"  # nothing holds its memory any more


@pytest.mark.parametrize(
    ("x", "out", "error", "message"),
    [
        (b"abc", bytes(3), ArgumentError, "out is read-only"),
        (b"abc", np.zeros(3, np.uint8), ArgumentTypeError, "out must be of x's library"),
        (
            b"abc",
            array.array("b", b"abc"),
            ArgumentTypeError,
            "out has dtype int8, but x has uint8",
        ),
        (np.zeros(2, ">f4").data, None, ArgumentTypeError, "byte order"),
    ],
)
def test_refused(x, out, error, message):
    with pytest.raises(error, match=message):
        prepare(x, out)


def test_bytes_have_one_dimension():
    with pytest.raises(ArgumentError, match="a bytearray has one dimension"):
        prepare(bytearray(4), shape=(2, 2))


def test_described():
    template = template_like((3,), "float32", like=array.array("d"))
    made = destination_of(template, (3,)).finish()
    assert (type(made), made.typecode, len(made)) == (array.array, "f", 3)
    assert template_of(template_like((2,), like=b"").native[1]() + b"ab").shape == (2,)
    with pytest.raises(ArgumentTypeError, match="a bytearray cannot hold"):
        template_like((3,), "int16", like=bytearray())
    with pytest.raises(ArgumentTypeError, match="array cannot hold elements of dtype 'complex64'"):
        template_like((3,), "complex64", like=array.array("d"))
