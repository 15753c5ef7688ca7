"""Kernels of users' operations against a loop in NumPy: dtypes, sizes, addresses, overlap."""

from __future__ import annotations

import ctypes
import functools
import math

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") and the float8 ones known)
import numba
import numpy as np
import pytest
from tests.dtypes import HALF_TYPES, any_values, assert_same, dtype_of, small_values
from tests.guarded import Guarded

from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels import reference
from gpucoll.kernels.cpu.convert import cast_array
from gpucoll.kernels.cpu.custom import BLOCK, custom_kernel
from gpucoll.kernels.cpu.identities import exact_identity
from gpucoll.types import DTYPES, ReduceOp

SIZES = (0, 1, 255, 256, 257, 1000)
N_SOURCES = 4


def combine(a, b):
    return a + b + a


def twice(a, b):
    return 2 * a + b


COMBINE = ReduceOp.custom(combine)
TWICE = ReduceOp.custom(twice)


def prefixes(inputs, function=combine):
    """Return what the inputs up to each one make, in the accumulator's dtype rounded once."""
    dtype = inputs[0].dtype
    held = np.dtype(np.float32) if dtype.name in HALF_TYPES else dtype
    with np.errstate(all="ignore"):
        totals = [inputs[0].astype(held)]
        for value in inputs[1:]:
            totals.append(np.asarray(function(totals[-1], value.astype(held))).astype(held))
        return [total.astype(dtype) for total in totals]


def run(op, dtype, which, destinations, sources):
    """Call a kernel as compiled loops do."""
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)
    kernel = prototype(custom_kernel(op, dtype, which).address)
    tables = [
        np.array([guarded.array.ctypes.data for guarded in group], np.int64)
        for group in (destinations, sources)
    ]
    size = sources[0].array.size
    addresses = [table.ctypes.data for table in tables]
    kernel(addresses[0], len(destinations), addresses[1], len(sources), size, 0, 0)


def sources_of(dtype, size, offset=0, make=small_values):
    sources = [Guarded(size, dtype_of(dtype), offset + place) for place in range(N_SOURCES)]
    for seed, source in enumerate(sources):
        source.array[...] = make(dtype, size, seed)
    return sources, [source.array.copy() for source in sources]


def check(guarded, where):
    for each in guarded:
        each.check(where)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce(dtype):
    for size in SIZES:
        for in_place in (False, True):
            where = f"{dtype} {size=} {in_place=}"
            sources, inputs = sources_of(dtype, size, make=any_values)
            destinations = [Guarded(size, dtype_of(dtype), offset) for offset in (0, 3)]
            if in_place:
                destinations[0] = sources[2]

            run(COMBINE, dtype, "reduce", destinations, sources)

            expected = prefixes(inputs)[-1]
            for destination in destinations:
                assert_same(destination.array, expected, where)
            check((*sources, *destinations), where)
            for source, before in zip(sources, inputs, strict=True):
                if source not in destinations:
                    assert_same(source.array, before, f"source of {where}")


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("dtype", ["bool", "int16", "uint64", "bfloat16", "float64", "complex64"])
@pytest.mark.parametrize("which", ["scan", "exclusive_scan"])
def test_scans(dtype, which):
    for size in SIZES:
        for in_place in (False, True):
            where = f"{dtype} {which} {size=} {in_place=}"
            sources, inputs = sources_of(dtype, size)
            destinations = sources
            if not in_place:
                destinations = [Guarded(size, dtype_of(dtype), 1) for _ in sources]
            untouched = destinations[0].array.copy()

            run(COMBINE, dtype, which, destinations, sources)

            expected = prefixes(inputs)
            if which == "exclusive_scan":
                expected = [untouched, *expected[:-1]]
            for place, destination in enumerate(destinations):
                assert_same(destination.array, expected[place], f"{where}, {place}")
            check((*sources, *destinations), where)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("dtype", ["int8", "float16", "float8_e5m2", "float64", "complex128"])
def test_every_address(dtype):
    for offset in range(17):
        sources, inputs = sources_of(dtype, BLOCK + 7, offset)
        destination = Guarded(BLOCK + 7, dtype_of(dtype), 16 - offset)

        run(COMBINE, dtype, "reduce", [destination], sources)

        assert_same(destination.array, prefixes(inputs)[-1], f"{dtype} {offset=}")
        check((*sources, destination), f"{dtype} {offset=}")


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("dtype", ["int32", "float32", "float8_e4m3fn"])
def test_the_same_as_the_built_in_operation(dtype):
    """Also for every NaN, infinity and subnormal, and the rounding of half types."""
    sources, inputs = sources_of(dtype, 3000, make=any_values)
    destination = Guarded(3000, dtype_of(dtype))
    for name, function in (("sum", lambda a, b: a + b), ("prod", lambda a, b: a * b)):
        run(ReduceOp.custom(function), dtype, "reduce", [destination], sources)
        assert_same(destination.array, reference.reduce(name, inputs), f"{name} of {dtype}")


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float32", "bfloat16", "complex64"])
def test_wider_results_are_narrowed(dtype):
    sources, inputs = sources_of(dtype, 300)
    destination = Guarded(300, dtype_of(dtype))

    run(TWICE, dtype, "reduce", [destination], sources)

    assert_same(destination.array, prefixes(inputs, twice)[-1], dtype)


def test_a_comparison_gives_zero_or_one():
    both = ReduceOp.custom(lambda a, b: a != 0 and b != 0)
    sources, inputs = sources_of("float32", 300)
    destination = Guarded(300, np.float32)
    run(both, "float32", "reduce", [destination], sources)
    assert_same(destination.array, reference.reduce("land", inputs), "land")


def test_division_by_zero_is_numpys():
    op = ReduceOp.custom(lambda a, b: a / b)
    destination, sources = Guarded(2, np.float64), [Guarded(2, np.float64) for _ in range(2)]
    sources[0].array[...], sources[1].array[...] = (1, 0), (0, 0)
    run(op, "float64", "reduce", [destination], sources)
    assert np.array_equal(destination.array, [np.inf, np.nan], equal_nan=True)


def test_what_numba_has_compiled_serves_too():
    @numba.njit
    def add_logarithms(a, b):
        return max(a, b) + math.log1p(math.exp(-abs(a - b)))

    destination, sources = Guarded(1, np.float64), [Guarded(1, np.float64) for _ in range(2)]
    sources[0].array[...], sources[1].array[...] = 1000, 1000

    run(ReduceOp.custom(add_logarithms), "float64", "reduce", [destination], sources)

    assert destination.array[0] == 1000 + math.log(2)


@functools.cache
def divide():
    """Return a function that can raise, and is compiled so before gpucoll sees it."""
    compiled = numba.njit(lambda a, b: a / b)
    compiled(np.float32(1), np.float32(1))
    return compiled


def call_python(a, b):
    print(a)
    return b


DIVIDE = divide()

REFUSED = [
    (lambda a, b: a / b, "int32", "for two values of int32 its function returns float64"),
    (lambda a, b: a / b, "uint64", "numpy.uint64(10)"),
    (lambda a, b: abs(a) + 1j, "float32", "its function returns complex"),
    (lambda a, b: None, "float32", "its function returns none"),
    (lambda a, b: 7, "float16", "its function returns int64"),
    (lambda a, b: a.missing, "int8", "Unknown attribute 'missing' of type int8"),
    (lambda a, b: a + "x", "int8", "add(int8,"),
    (lambda a, b: DIVIDE(a, b), "float32", "can raise an exception"),
    (lambda a, b: np.zeros(3).sum() + a, "float64", "can raise an exception"),
    (call_python, "float64", "needs Python"),
]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(("function", "dtype", "reason"), REFUSED)
def test_refused(function, dtype, reason):
    with pytest.raises(ArgumentTypeError) as caught:
        custom_kernel(ReduceOp.custom(function), dtype)
    text = str(caught.value)
    assert reason in text
    assert dtype in text
    assert len(text) < 300
    assert "\n" not in text


def test_what_has_changed_before_it_was_compiled_is_refused():
    scale = 2

    def scaled(a, b):
        return a + scale * b

    op = ReduceOp.custom(scaled)
    scale = 3

    with pytest.raises(ArgumentTypeError, match="have changed since"):
        custom_kernel(op, "float64")
    custom_kernel(ReduceOp.custom(scaled), "float64")


def test_compiled_once():
    assert custom_kernel(COMBINE, "int8") is custom_kernel(ReduceOp.custom(combine), "int8")


def test_its_code_is_vectorised():
    add = ReduceOp.custom(lambda a, b: a + b)
    code = custom_kernel(add, "float32").owner._library.get_asm_str()
    assert any(name in code for name in ("addps", "fadd\tv")), code


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_casts_of_every_code(dtype):
    width = dtype_of(dtype).itemsize
    codes = np.arange(1 << (8 * width), dtype=f"u{width}")
    wide = cast_array(codes, dtype, narrows=False)
    assert_same(wide, codes.view(dtype_of(dtype)).astype(np.float32), dtype)
    back = cast_array(wide, dtype, narrows=True)
    assert_same(back.view(dtype_of(dtype)), codes.view(dtype_of(dtype)), dtype)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0, "float32"),
        (-np.inf, "float16"),
        (448, "float8_e4m3fn"),
        (float("nan"), "bfloat16"),
        (np.float32(0.1), "float32"),
        (1 << 63, "uint64"),
        (True, "bool"),
        (1.0, "int8"),
        (1j, "complex64"),
    ],
)
def test_identities(value, dtype):
    made = exact_identity(value, dtype, "op").view(dtype_of(dtype))
    assert_same(made, np.array([value]).astype(dtype_of(dtype)), dtype)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (0.1, "float32"),
        (1e300, "float32"),
        (-np.inf, "float8_e4m3fn"),
        (300, "uint8"),
        (-1, "uint8"),
        (1.5, "int32"),
        (np.inf, "int32"),
        (2, "bool"),
        (1j, "float64"),
        ("x", "float32"),
        ((1 << 53) + 1, "float64"),
    ],
)
def test_identities_that_are_not_exact(value, dtype):
    with pytest.raises(ArgumentTypeError, match=f"not exactly a value of {dtype}"):
        exact_identity(value, dtype, "op")


def test_no_identity():
    with pytest.raises(ArgumentTypeError, match="identity="):
        exact_identity(None, "float32", "op")
