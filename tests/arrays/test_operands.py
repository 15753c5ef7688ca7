"""What holds for arrays of every library, shown with NumPy: shapes, in place, overlap, numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.moving import move

from gpucoll.arrays.operands import (
    destination_of,
    ensure_served,
    is_sequence_of_arrays,
    prepare,
    source_of,
    template_like,
    template_of,
)
from gpucoll.arrays.overlap import overlaps
from gpucoll.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError


def test_a_template_says_what_an_array_is():
    template = template_of(np.zeros((2, 3), np.int16)[:, ::2])

    assert template[:3] == ((2, 2), "int16", 2)
    assert (template.device, template.stream, template.number) == ("cpu", 0, None)
    assert template.size_bytes == 8


@pytest.mark.parametrize("x", [3, 2.5, 1j, True, np.float32(1.5), np.uint64(2**63)])
def test_numbers(x):
    assert template_of(x).number is type(x)
    same = move(x)
    assert type(same) is type(x)
    assert same == x
    gathered = move(x, shape=(3,))
    assert type(gathered) is np.ndarray
    assert gathered.tolist() == [x] * 3


def test_the_source_is_the_array_itself_or_packed():
    x = np.arange(12).reshape(3, 4)

    assert source_of(x).buffer.address == x.ctypes.data
    packed = source_of(x.T).buffer
    assert packed.shape == (4, 3)
    assert np.array_equal(packed.owner, x.T)
    assert packed.owner.flags.c_contiguous


@pytest.mark.parametrize("shape", [(6, 2), (0, 2), (1,), ()])
def test_a_result_may_have_another_shape(shape):
    x = np.array([[1.5, 2.5]])

    assert move(x, shape=shape).shape == shape
    out = np.empty(shape)
    assert move(x, out, shape=shape) is out


def test_out_may_be_a_view_of_the_result_s_size():
    whole = np.zeros((4, 6))

    out = whole[::2, 1:4]
    assert move(np.ones(6), out) is out
    assert whole.sum() == 6
    with pytest.raises(ArgumentError, match="6 elements; the result has shape"):
        prepare(np.ones(6), out, shape=(12,))


def test_only_lasting_results_are_said_to_be():
    x, view = np.ones(4), np.ones(8)[::2]

    plain = prepare(x)
    assert plain.lasting is plain.finish()
    assert not plain.is_packed
    assert prepare(x, x).lasting is x
    assert prepare(x, view).lasting is None
    assert prepare(view).is_packed
    assert prepare(1.0).lasting is None


@pytest.mark.parametrize(
    ("shape", "strides"), [((4,), (0,)), ((3, 2), (8, 8)), ((2, 2), (8, -8)), ((4,), (4,))]
)
def test_elements_of_out_may_not_share_memory(shape, strides):
    out = np.lib.stride_tricks.as_strided(np.zeros(9)[4:], shape, strides)

    with pytest.raises(ArgumentError, match="share their memory"):
        prepare(np.ones(shape), out)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3), (8, 16)), ((2, 2), (-32, 8)), ((3, 1), (8, 0)), ((0, 3), (0, 0))],
)
def test_elements_of_out_may_lie_in_any_order(shape, strides):
    whole = np.zeros(12)
    out = np.lib.stride_tricks.as_strided(whole[4:], shape, strides)

    assert move(np.ones(shape), out) is out
    assert whole.sum() == out.size


# --- in place and overlap -------------------------------------------------------------------------


def test_in_place_is_this_rank_s_block_of_the_larger_one():
    whole = np.zeros(12)
    block = whole[4:8]
    block[:] = 7

    assert move(block, whole, shape=(12,), in_place_at=block.nbytes) is whole
    assert whole.tolist() == [7] * 12
    reduced = prepare(whole, block, shape=(4,), in_place_at=-block.nbytes)
    assert reduced.destination.address == block.ctypes.data


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (0, "without being x"),
        (8, "x must be contiguous and begin 8 bytes into out"),
        (-32, "out must be contiguous and begin 32 bytes into x"),
        (None, "this call cannot work in place"),
    ],
)
def test_every_other_overlap_is_refused(at, message):
    whole = np.zeros(12)

    with pytest.raises(ArgumentError, match=message):
        prepare(whole[4:8], whole, shape=(12,), in_place_at=at)


def test_views_are_in_place_only_as_themselves():
    whole = np.zeros((4, 4))
    left, right = whole[:, :3], whole[:, 1:]

    assert move(left, left) is left
    with pytest.raises(ArgumentError, match="without being x"):
        prepare(whole, whole.T)
    with pytest.raises(ArgumentError, match="without being in place"):
        prepare(right, left, in_place_at=8)


def test_without_a_position_not_even_x_itself_is_in_place():
    x = np.zeros(4)

    with pytest.raises(ArgumentError, match="cannot work in place"):
        prepare(x, x, in_place_at=None)
    with pytest.raises(ArgumentError, match="overlaps"):
        destination_of(template_of(x), (4,), x, x=x, in_place_at=8)
    assert destination_of(template_of(x), (4,), x).lasting is x


def pieces():
    whole = np.zeros((6, 8), np.int32)
    starts = [whole, whole[1:], whole[:, ::2], whole[:, 1::2], whole.T, whole[::-1], whole[3:, 4:]]
    return [*starts, whole[:0], whole[2:3, ::-1], whole[:3, :4].T, whole.reshape(-1)[7:9], whole[0]]


def test_overlap_is_told_as_numpy_tells_it():
    views = pieces()
    for a, b in product(views, repeat=2):
        c, d = (template_of(x).library.look(x, "x") for x in (a, b))

        assert overlaps(c, d) == np.shares_memory(a, b)


def test_too_hard_to_tell_counts_as_overlap():
    whole = np.zeros(20_000_000, np.int8)
    shape = (7, 11, 13, 17)
    a = np.lib.stride_tricks.as_strided(whole, shape, (131071, 65537, 30011, 20011))
    b = np.lib.stride_tricks.as_strided(whole[1:], shape, (131059, 65539, 30013, 20021))
    max_work: Any = 10_000
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(a, b, max_work=max_work)

    assert overlaps(*(template_of(x).library.look(x, "x") for x in (a, b)))


# --- arrays that users only describe --------------------------------------------------------------


def test_a_described_array():
    assert template_like((2, 3), "float32")[:3] == ((2, 3), "float32", 4)
    assert template_like(like=np.zeros((4,), np.int8))[:3] == ((4,), "int8", 1)
    assert template_like((2,), like=np.zeros((4,), np.int8)).shape == (2,)
    assert template_like(dtype=np.float64, like=np.zeros(4, np.int8))[:2] == ((4,), "float64")
    assert template_like(like=1.5).number is float
    structured = template_like((1,), [("a", "i4"), ("b", "f8")])
    made = destination_of(structured, structured.shape).finish()
    assert made.dtype.names == ("a", "b")


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"shape": (2,)}, ArgumentError, "give shape= and dtype="),
        ({"dtype": "int8"}, ArgumentError, "give shape= and dtype="),
        ({"shape": (2,), "dtype": "noise"}, ArgumentTypeError, "ml_dtypes"),
        ({"shape": (2,), "dtype": "O"}, ArgumentTypeError, "Python objects"),
        ({"like": [1]}, ArgumentTypeError, "like must be an array"),
    ],
)
def test_what_cannot_be_described(how, error, message):
    with pytest.raises(error, match=message):
        template_like(**how)


# --- sequences, devices ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ([np.ones(2)], True),
        ((np.ones(2), np.ones((3, 4), np.int8)), True),
        ([np.ones(2), None], True),  # whose second item is then refused by its own name
        ([b"ab", bytearray(2)], True),
        ([], False),
        ([1, 2.5], False),
        ([np.float32(1)], False),
        (["a"], False),
        ([[1, 2]], False),
        (np.ones((2, 2)), False),
        (None, False),
    ],
)
def test_sequences_of_arrays(x, expected):
    assert is_sequence_of_arrays(x) is expected


def test_errors_name_the_argument():
    with pytest.raises(ArgumentTypeError, match=r"x\[1\] must be an array"):
        template_of(None, "x[1]")
    with pytest.raises(ArgumentTypeError, match=r"x\[1\] has dtype object"):
        prepare(np.array([None]), what="x[1]")


def test_arrays_of_devices_that_no_backend_serves():
    template = template_of(np.ones(2))

    for device in ("cpu", "cuda", "cuda:1", "rocm:0"):
        ensure_served(template._replace(device=device))
    with pytest.raises(BackendUnavailableError, match="x lies on xpu:0: gpucoll moves"):
        ensure_served(template._replace(device="xpu:0"))
