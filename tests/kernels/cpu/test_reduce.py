"""The reduce kernels against the reference: every dtype and operation, any size and address."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from tests.dtypes import ALLOWED, HALF_TYPES, any_values, assert_same, dtype_of
from tests.guarded import Guarded

from gpucoll.kernels import reference
from gpucoll.kernels.cpu import elements
from gpucoll.kernels.cpu.addresses import reduce_kernel
from gpucoll.kernels.cpu.reduce import reduce_arrays

SIZES = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 4099)
N_SOURCES = (1, 2, 3, 4, 7, 64)


def parameter_of(dtype: str, op: str, n_sources: int) -> float:
    if op != "scaled_sum":
        return n_sources
    return 3 if dtype.startswith(("int", "uint")) else 0.7


def check(dtype, op, size, n_sources, n_destinations=1, offset=0, *, in_place=False, ahead=0):
    """Reduce random bit patterns into guarded destinations, and compare."""
    where = f"{dtype} {op} {size=} {n_sources=} {n_destinations=} {offset=} {in_place=} {ahead=}"
    sources = [Guarded(size, dtype_of(dtype), offset) for _ in range(n_sources)]
    for seed, source in enumerate(sources):
        source.array[...] = any_values(dtype, size, seed)
    before = [source.array.copy() for source in sources]
    parameter = parameter_of(dtype, op, n_sources)
    destinations = [Guarded(size, dtype_of(dtype), offset) for _ in range(n_destinations)]
    if in_place:
        destinations[0] = sources[n_sources // 2]

    reduce_arrays(
        op,
        [destination.array for destination in destinations],
        [source.array for source in sources],
        parameter,
        ahead,
    )

    expected = reference.reduce(op, before, parameter)
    for guarded in (*destinations, *sources):
        guarded.check(where)
    for destination in destinations:
        assert_same(destination.array, expected, where)
    for source, content in zip(sources, before, strict=True):
        if source not in destinations:
            assert_same(source.array, content, f"source of {where}")


@pytest.mark.soak(quick=60)
@pytest.mark.parametrize(("dtype", "op"), ALLOWED)
def test_against_the_reference(dtype, op):
    turns = zip(
        itertools.cycle(N_SOURCES[:5]),
        itertools.cycle((1, 2, 1, 3)),
        itertools.cycle((False, False, False, True, True)),
        itertools.cycle((0, 0, 512)),
        strict=False,
    )
    for size, (n_sources, n_destinations, in_place, ahead) in zip(SIZES, turns, strict=False):
        offset = dtype_of(dtype).itemsize * (size % 5)
        check(dtype, op, size, n_sources, n_destinations, offset, in_place=in_place, ahead=ahead)


@pytest.mark.parametrize(
    ("n_sources", "op"), list(itertools.product(N_SOURCES, ("sum", "max", "avg")))
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16"])
def test_numbers_of_sources_and_destinations(dtype, op, n_sources):
    for n_destinations, in_place, size in itertools.product((1, 2, 3), (False, True), (17, 257)):
        check(dtype, op, size, n_sources, n_destinations, in_place=in_place)


@pytest.mark.parametrize(
    "dtype", ["int8", "float16", "float8_e5m2", "float32", "float64", "complex64", "complex128"]
)
def test_every_address(dtype):
    for offset in range(16):
        check(dtype, "sum", 131, 3, 2, offset)
        check(dtype, "prod" if dtype.startswith("complex") else "min", 33, 2, 1, offset)


def test_sources_and_destination_differently_aligned():
    x, y, out = (Guarded(1000, np.float32, offset) for offset in (1, 6, 11))
    x.array[...] = np.arange(1000)
    y.array[...] = 3

    reduce_arrays("sum", [out.array], [x.array, y.array])

    out.check()
    assert np.array_equal(out.array, np.arange(1000) + 3)


def every_code(dtype: str) -> np.ndarray:
    width = dtype_of(dtype).itemsize
    return np.arange(1 << (8 * width), dtype=f"u{width}").view(dtype_of(dtype))


@pytest.fixture
def float16_without_instructions(monkeypatch):
    """Have the float16 kernels compiled as for a processor that cannot convert."""
    monkeypatch.setattr(elements, "host_features", frozenset)
    anew = functools.cache(reduce_kernel.__wrapped__)
    monkeypatch.setattr("gpucoll.kernels.cpu.reduce.reduce_kernel", anew)
    table = elements.elements.__wrapped__  # not the one that is kept
    monkeypatch.setattr("gpucoll.kernels.cpu.reduce.elements", table)
    assert table()["float16"].storage.width == 16


def check_conversions(dtype: str) -> None:
    """Every code goes in and out unchanged, and every kind of rounding is right."""
    codes = every_code(dtype)
    out = np.empty_like(codes)
    reduce_arrays("sum", [out], [codes])
    assert_same(out, codes, f"{dtype}: in and out")
    for factor in (1.5, 0.3, 1 / 3, 2.0**-9, 300.0, -1.0):
        reduce_arrays("scaled_sum", [out], [codes], factor)
        assert_same(out, reference.reduce("scaled_sum", [codes], factor), f"{dtype} times {factor}")
    for shift in (1, 3, len(codes) // 2 + 1, len(codes) // 3, 12_345 % len(codes)):
        pair = [codes, np.roll(codes, shift)]
        reduce_arrays("sum", [out], pair)
        assert_same(out, reference.reduce("sum", pair), f"{dtype} plus itself rolled by {shift}")


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_every_code_of_the_half_types(dtype):
    check_conversions(dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_every_pair_of_float8(dtype, op):
    codes = every_code(dtype)
    pair = [np.repeat(codes, 256), np.tile(codes, 256)]
    out = np.empty_like(pair[0])

    reduce_arrays(op, [out], pair)

    assert_same(out, reference.reduce(op, pair), f"{dtype} {op}")


def test_float16_without_the_instructions(float16_without_instructions):
    check_conversions("float16")
    for op in ("sum", "prod", "avg", "min"):
        for size in (1, 17, 1000):
            check("float16", op, size, 3)


SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 5e-324, 1e-40, -1e-40, 3e38, 1e308)


FLOAT_PAIRS = [pair for pair in ALLOWED if pair[0].startswith(("float32", "float64", "complex"))]


@pytest.mark.parametrize(("dtype", "op"), FLOAT_PAIRS)
def test_special_values(dtype, op):
    with np.errstate(all="ignore"):
        values = np.array(SPECIAL).astype(dtype)
        pair = [np.repeat(values, len(values)), np.tile(values, len(values))]
    for sources in (pair, pair[::-1]):
        out = np.empty_like(pair[0])
        reduce_arrays(op, [out], sources, 2)
        assert_same(out, reference.reduce(op, sources, 2), f"{dtype} {op}")


def test_subnormals_are_kept():
    tiny = np.full(100, 1e-45, np.float32)
    out = np.empty_like(tiny)

    reduce_arrays("sum", [out], [tiny, tiny])

    assert (out.view(np.uint32) == 2).all()


def test_a_factor_that_is_any_nan_gives_nan():
    """Rounding to bfloat16 must not carry a NaN's lower bits into its sign."""
    factor = np.array([0x7FFF_FFFF_FFFF_FFFF], np.uint64).view(np.float64)[0]
    x = np.ones(100, dtype_of("bfloat16"))
    out = np.empty_like(x)

    reduce_arrays("scaled_sum", [out], [x, x], factor)

    assert np.isnan(out.astype(np.float32)).all()
