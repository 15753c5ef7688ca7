"""The reference against values worked out by hand: it is what everything else is compared with."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.dtypes import ALLOWED, assert_same, small_values

from gpucoll.kernels import reference

INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("op", "sources", "expected"),
    [
        ("sum", [[100], [100]], [-56]),
        ("prod", [[100], [3]], [44]),
        ("min", [[-3], [2]], [-3]),
        ("max", [[-3], [2]], [2]),
        ("band", [[6], [3]], [2]),
        ("bor", [[6], [3]], [7]),
        ("bxor", [[6], [3]], [5]),
        ("land", [[6, 0], [3, 3]], [1, 0]),
        ("lor", [[6, 0], [0, 0]], [1, 0]),
        ("lxor", [[6, 6, 0], [3, 0, 0]], [0, 1, 0]),
    ],
)
def test_int8(op, sources, expected):
    result = reference.reduce(op, [np.array(source, np.int8) for source in sources])

    assert_same(result, np.array(expected, np.int8))


@pytest.mark.parametrize(("total", "expected"), [(7, 3), (-7, -3), (6, 3), (-1, 0)])
def test_integer_average_rounds_toward_zero(total, expected):
    sources = [np.array([total], np.int32), np.zeros(1, np.int32)]

    assert reference.reduce("avg", sources, 2) == [expected]


def test_bool_as_numpy():
    x, y = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)

    for op in ("sum", "max", "bor", "lor"):
        assert_same(reference.reduce(op, [x, y]), x | y, op)
    for op in ("prod", "min", "band", "land"):
        assert_same(reference.reduce(op, [x, y]), x & y, op)
    for op in ("bxor", "lxor"):
        assert_same(reference.reduce(op, [x, y]), x ^ y, op)


def test_half_types_are_rounded_once():
    # 2048 + 1 + 1: rounded after each step float16 would stay at 2048.
    sources = [np.array([value], np.float16) for value in (2048, 1, 1)]
    assert reference.reduce("sum", sources) == np.float16(2050)

    sources = [np.array([value], ml_dtypes.bfloat16) for value in (256, 1, 1)]
    assert reference.reduce("sum", sources) == ml_dtypes.bfloat16(258)


def test_float8_overflows_as_ml_dtypes_converts():
    largest = np.array([448], ml_dtypes.float8_e4m3fn)

    assert np.isnan(reference.reduce("sum", [largest, largest]).astype(np.float32))


@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_and_signed_zeros(op):
    x = np.array([NAN, 1, 0.0, -0.0, -INF, INF], np.float32)
    y = np.array([1, NAN, -0.0, 0.0, INF, -INF], np.float32)
    best = -INF if op == "min" else INF

    expected = np.array([NAN, NAN, 0.0, -0.0, best, best], np.float32)
    assert_same(reference.reduce(op, [x, y]), expected)


def test_sums_go_left_to_right():
    sources = [np.array([value], np.float32) for value in (2**24, 1, 1, -(2**24))]

    assert reference.reduce("sum", sources) == [0]


def test_complex_product_and_scale():
    x, y = np.array([1 + 2j], np.complex64), np.array([3 - 1j], np.complex64)

    assert reference.reduce("prod", [x, y]) == [5 + 5j]
    assert reference.reduce("scaled_sum", [x, y], 0.5) == [2 + 0.5j]
    assert reference.reduce("avg", [x, y], 2) == [2 + 0.5j]


@pytest.mark.parametrize(("dtype", "op"), ALLOWED)
def test_dtype_and_shape_stay_and_sources_too(dtype, op):
    sources = [small_values(dtype, 6, seed).reshape(2, 3) for seed in (1, 2)]
    copies = [source.copy() for source in sources]

    result = reference.reduce(op, sources, 2)

    assert result.dtype == sources[0].dtype
    assert result.shape == (2, 3)
    for source, copy in zip(sources, copies, strict=True):
        assert_same(source, copy)
        assert not np.shares_memory(result, source)


# --- scans --------------------------------------------------------------------------------------


def test_scans_by_hand():
    sources = [np.array([value], np.int32) for value in (1, 2, 4, -10)]

    assert [int(x[0]) for x in reference.scan("sum", sources)] == [1, 3, 7, -3]
    assert [int(x[0]) for x in reference.scan("avg", sources)] == [1, 1, 2, 0]
    assert [int(x[0]) for x in reference.scan("scaled_sum", sources, 2)] == [2, 6, 14, -6]
    assert [int(x[0]) for x in reference.exclusive_scan("prod", sources)] == [1, 1, 2, 8]


def test_half_types_are_rounded_at_each_prefix_and_not_between():
    sources = [np.array([value], np.float16) for value in (2048, 1, 1, 1)]

    assert [float(x[0]) for x in reference.scan("sum", sources)] == [2048, 2048, 2050, 2052]


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        ("sum", "float32", 0),
        ("scaled_sum", "int8", 0),
        ("lxor", "bool", False),
        ("prod", "complex64", 1),
        ("land", "int8", 1),
        ("band", "int8", -1),
        ("band", "uint16", 65535),
        ("band", "bool", True),
        ("min", "int8", 127),
        ("max", "int64", -(2**63)),
        ("min", "bool", True),
        ("max", "bool", False),
        ("min", "float64", INF),
        ("max", "float16", -INF),
        ("min", "bfloat16", INF),
        ("max", "float8_e5m2", -INF),
        ("min", "float8_e4m3fn", 448),
        ("max", "float8_e4m3fn", -448),
    ],
)
def test_identities(op, dtype, expected):
    assert reference.identity(op, np.dtype(dtype)).astype(complex) == expected
