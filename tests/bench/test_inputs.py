from __future__ import annotations

from functools import reduce

import ml_dtypes
import numpy as np
import pytest

from gpucoll.bench.collectives import COLLECTIVES, DTYPES, REDOPS, allows
from gpucoll.bench.rank import inputs

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


def real_dtype(dtype):
    return np.dtype(getattr(ml_dtypes, dtype) if dtype in inputs.STORAGE else dtype)


def given(redop, dtype, ranks):
    """Return each rank's input, in the dtype itself."""
    wide = [inputs.values(redop, dtype, rank, ranks) for rank in range(ranks)]
    return [inputs.encode(one, dtype).view(real_dtype(dtype)) for one in wide]


def whole(redop, dtype, ranks):
    """Return one period of the reduction over all ranks."""
    (expected,) = inputs.expected("all_reduce", redop, dtype, 0, 0, ranks, 0)
    return expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_exact_in_every_order(dtype, ranks):
    arrays = given("sum", dtype, ranks)
    expected = inputs.encode(whole("sum", dtype, ranks), dtype)
    for order in (arrays, arrays[::-1]):
        total = reduce(lambda x, y: (x + y).astype(x.dtype), order)
        np.testing.assert_array_equal(total.view(expected.dtype), expected)


@pytest.mark.parametrize("ranks", [1, 2, 5, 64])
@pytest.mark.parametrize(
    ("dtype", "redop"),
    [(d, o) for d in DTYPES for o in REDOPS if d not in FLOAT8 and o != "sum" and allows(d, o)],
)
def test_every_reduction_is_as_numpy_has_it(dtype, redop, ranks):
    arrays = given(redop, dtype, ranks)
    result = reduce(lambda x, y: inputs.FOLDS[redop](x, y).astype(x.dtype), arrays)
    if redop == "avg":
        result = (result // ranks if result.dtype.kind in "iu" else result / ranks).astype(
            arrays[0].dtype
        )
    if redop in inputs.LOGICAL:
        result = (result != 0).astype(result.dtype)
    expected = inputs.encode(whole(redop, dtype, ranks), dtype)
    np.testing.assert_array_equal(result, expected.view(real_dtype(dtype)))


@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "complex64"])
def test_the_ranks_bring_different_values(dtype):
    first, second = given("sum", dtype, 2)
    assert np.any(first != second)
    assert len(np.unique(first.view(inputs.storage(dtype)))) > 40


def test_broadcast_expects_the_roots_values():
    (expected,) = inputs.expected("broadcast", "none", "float32", 2, 0, 4, 100)
    np.testing.assert_array_equal(expected, inputs.values("sum", "float32", 2, 4))


def test_a_block_is_a_part_of_the_whole():
    block, ranks = 700, 3  # does not divide the period
    reduced = np.resize(whole("sum", "float32", ranks), block * ranks)
    for rank in range(ranks):
        (part,) = inputs.expected("reduce_scatter", "sum", "float32", 0, rank, ranks, block)
        mine = reduced[rank * block : (rank + 1) * block]
        np.testing.assert_array_equal(np.resize(part, block), mine)


@pytest.mark.parametrize(
    ("collective", "receivers"),
    [("reduce", [2]), ("gather", [2]), ("scatter", [0, 1, 2, 3]), ("exclusive_scan", [1, 2, 3]),
     ("ping_pong", [0, 1]), ("stream", [1])],
)  # fmt: skip
def test_nothing_is_expected_where_nothing_comes(collective, receivers):
    redop = "sum" if COLLECTIVES[collective].reduces else "none"
    found = [inputs.expected(collective, redop, "int32", 2, rank, 4, 8) for rank in range(4)]
    assert [rank for rank in range(4) if found[rank]] == receivers


@pytest.mark.parametrize(
    ("collective", "first", "second"),
    [("all_reduce", 12, 12), ("all_gather", 4, 12), ("scatter", 12, 4)],
)
def test_in_place_the_smaller_array_is_a_block_of_the_larger(collective, first, second):
    lengths = inputs.lengths(collective, 12, 3)
    assert lengths == (first, second)
    arrays = [np.zeros(length) for length in lengths]
    source, destination = inputs.in_place_pair(arrays[0], arrays[1], block=1)
    assert (source.size, destination.size) == (first, second)
    large, small = (source, destination) if first > second else (destination, source)
    assert large is arrays[0] or large is arrays[1]
    place = 0 if first == second else 4 * 8
    assert small.ctypes.data - large.ctypes.data == place


@pytest.mark.parametrize("count", [0, 1, 1012, 1013, 1014, 5000])
def test_each_wrong_element_is_counted(count):
    period = inputs.encode(inputs.values("sum", "float32", 0, 2), "float32")
    array = np.empty(count, np.float32)
    inputs.fill(array, period)
    assert inputs.count_wrong(array, [period]) == 0
    spoilt = sorted({0, count // 2, count - 1} & set(range(count)))
    array[spoilt] = np.nan
    assert inputs.count_wrong(array, [period]) == len(spoilt)


def test_a_chunk_in_the_wrong_place_is_wrong():
    period = inputs.encode(inputs.values("sum", "float32", 0, 2), "float32")
    array = np.empty(1 << 16, np.float32)
    inputs.fill(array, period)
    array[: 1 << 14] = array[1 << 14 : 2 << 14].copy()
    assert inputs.count_wrong(array, [period]) > 1 << 13


def test_parts_are_counted_each_against_its_own():
    array = np.repeat(np.array([1, 2, 3], np.float32), 2000)
    periods = [np.full(inputs.PERIOD, value, np.float32) for value in (1, 2, 3)]
    assert inputs.count_wrong(array, periods) == 0
    assert inputs.count_wrong(array, periods[::-1]) == 4000
    assert inputs.count_wrong(array, []) == 0


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "bool"])
def test_a_result_that_was_never_written_is_wrong(dtype):
    array = np.empty(5000, inputs.storage(dtype))
    inputs.poison(array)
    period = inputs.encode(whole("sum", dtype, 2), dtype)
    assert inputs.count_wrong(array, [period]) > 4900


def test_bandwidths_are_nccl_tests():
    # 1e6 bytes in 100 us are 10 GB/s; an all_reduce sends 2 (n-1)/n of them over each link.
    assert COLLECTIVES["all_reduce"].bandwidths(1_000_000, 100.0, 4) == (10.0, 15.0)
    assert COLLECTIVES["all_reduce"].bandwidths(1_000_000, 100.0, 1) == (10.0, 0.0)
    assert COLLECTIVES["broadcast"].bandwidths(1_000_000, 100.0, 4) == (10.0, 10.0)
    assert COLLECTIVES["barrier"].bandwidths(0, 100.0, 4) == (0.0, 0.0)
    for name in ("all_gather", "gather", "reduce_scatter", "scatter", "all_to_all"):
        assert COLLECTIVES[name].bandwidths(1_000_000, 100.0, 4) == (10.0, 7.5)
    for name in ("reduce", "scan", "exclusive_scan", "send_recv", "ping_pong", "stream"):
        assert COLLECTIVES[name].bandwidths(1_000_000, 100.0, 4) == (10.0, 10.0)


@pytest.mark.parametrize(
    ("name", "size_bytes", "elements"),
    [("all_reduce", 1, 1), ("all_reduce", 47, 11), ("gather", 4, 3), ("gather", 47, 9),
     ("barrier", 64, 0)],
)  # fmt: skip
def test_blocks_have_one_length_and_are_never_empty(name, size_bytes, elements):
    assert COLLECTIVES[name].elements(size_bytes, "float32", 3) == elements
