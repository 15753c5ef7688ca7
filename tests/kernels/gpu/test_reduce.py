"""The reduce kernels, compiled as host code, against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.dtypes import ALLOWED, HALF_TYPES, any_values, assert_same, dtype_of
from tests.guarded import Guarded

from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.kernels import reference
from gpucoll.kernels.gpu.reduce import reduce_arrays, ring_step
from gpucoll.kernels.gpu.source import MAX_RANKS, TILE_BYTES
from gpucoll.types import ReduceOp

pytestmark = pytest.mark.usefixtures("on_host")

N_SOURCES = (1, 2, 3, 4, 7, MAX_RANKS)


def parameter_of(dtype: str, op: str, n_sources: int) -> float:
    if op != "scaled_sum":
        return n_sources
    return 3 if dtype.startswith(("int", "uint")) else 0.7


def check(dtype, op, size, n_sources=2, n_destinations=1, offsets=(0,), *, in_place=False):
    """Reduce random bit patterns into guarded destinations, and compare."""
    where = f"{dtype} {op} {size=} {n_sources=} {n_destinations=} {offsets=} {in_place=}"
    turn = itertools.cycle(offsets)
    sources = [Guarded(size, dtype_of(dtype), next(turn)) for _ in range(n_sources)]
    for seed, source in enumerate(sources):
        source.array[...] = any_values(dtype, size, seed)
    before = [source.array.copy() for source in sources]
    parameter = parameter_of(dtype, op, n_sources)
    destinations = [Guarded(size, dtype_of(dtype), next(turn)) for _ in range(n_destinations)]
    if in_place:
        destinations[0] = sources[n_sources // 2]

    reduce_arrays(
        ReduceOp.scaled_sum(parameter) if op == "scaled_sum" else op,
        [destination.array for destination in destinations],
        [source.array for source in sources],
        divisor=parameter,
    )

    expected = reference.reduce(op, before, parameter)
    for guarded in (*destinations, *sources):
        guarded.check(where)
    for destination in destinations:
        assert_same(destination.array, expected, where)
    for source, content in zip(sources, before, strict=True):
        if source not in destinations:
            assert_same(source.array, content, f"source of {where}")


def boundaries(dtype: str) -> list[int]:
    """Return the counts around vectors, tiles, and more tiles than blocks."""
    item_bytes = dtype_of(dtype).itemsize
    vector, tile = max(1, 16 // item_bytes), 2 * TILE_BYTES // item_bytes
    near = [vector, 256, tile // 2, tile, 3 * tile]
    return sorted({0, 1, 2, 3} | {count + step for count in near for step in (-1, 0, 1)})


@pytest.mark.soak(quick=48)
@pytest.mark.parametrize(("dtype", "op"), ALLOWED)
def test_against_the_reference(dtype, op):
    turns = itertools.cycle(
        [(2, 1, (0,), False), (3, 2, (0,), False), (1, 1, (0,), False), (4, 1, (0,), True)]
    )
    item_bytes = dtype_of(dtype).itemsize
    for size, (n_sources, n_destinations, _, in_place) in zip(
        boundaries(dtype), turns, strict=False
    ):
        offset = item_bytes * (size % 5)
        check(dtype, op, size, n_sources, n_destinations, (offset,), in_place=in_place)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16", "float8_e4m3fn"])
@pytest.mark.parametrize("n_sources", N_SOURCES)
def test_numbers_of_sources_and_destinations(dtype, n_sources):
    for n_destinations, in_place in itertools.product((1, 2, MAX_RANKS), (False, True)):
        check(dtype, "sum", 4099, n_sources, n_destinations, in_place=in_place)
        check(dtype, "avg", 37, n_sources, n_destinations, in_place=in_place)


@pytest.mark.parametrize(
    "dtype", ["int8", "float16", "float8_e5m2", "float32", "float64", "complex64", "complex128"]
)
def test_every_address(dtype):
    """All arrays alike, at every address: aligned to 16 bytes, to elements, or not at all."""
    for offset in range(17):
        check(dtype, "sum", 2 * TILE_BYTES // dtype_of(dtype).itemsize + 21, 2, 2, (offset,))
        check(dtype, "prod" if dtype.startswith("complex") else "min", 33, 3, 1, (offset,))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "complex128"])
def test_arrays_at_different_addresses(dtype):
    item_bytes = dtype_of(dtype).itemsize
    for offsets in ((0, item_bytes, 3 * item_bytes), (0, 0, 16), (1, 0, 0), (5, 5, 5, 6)):
        for size in (2047, 2048, 4096, 5000):  # by elements, tiles have 2048 or 4096
            check(dtype, "prod", size, 2, 1, offsets)
        check(dtype, "sum", 5000, 3, 2, offsets, in_place=True)


def every_code(dtype: str) -> np.ndarray:
    width = dtype_of(dtype).itemsize
    return np.arange(1 << (8 * width), dtype=f"u{width}").view(dtype_of(dtype))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_every_code_of_the_half_types(dtype):
    codes = every_code(dtype)
    out = np.empty_like(codes)
    reduce_arrays("sum", [out], [codes])
    assert_same(out, codes, f"{dtype}: in and out")
    for factor in (1.5, 0.3, 1 / 3, 2.0**-9, 300.0, -1.0):
        reduce_arrays(ReduceOp.scaled_sum(factor), [out], [codes])
        assert_same(out, reference.reduce("scaled_sum", [codes], factor), f"{dtype} times {factor}")
    for shift in (1, 3, len(codes) // 2 + 1, len(codes) // 3, 12_345 % len(codes)):
        pair = [codes, np.roll(codes, shift)]
        reduce_arrays("sum", [out], pair)
        assert_same(out, reference.reduce("sum", pair), f"{dtype} plus itself rolled by {shift}")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_every_pair_of_float8(dtype, op):
    codes = every_code(dtype)
    pair = [np.repeat(codes, 256), np.tile(codes, 256)]
    out = np.empty_like(pair[0])
    reduce_arrays(op, [out], pair)
    assert_same(out, reference.reduce(op, pair), f"{dtype} {op}")


SPECIAL = (0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 5e-324, 1e-40, -1e-40, 3e38, 1e308)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [pair for pair in ALLOWED if pair[0].startswith(("float32", "float64", "complex"))],
)
def test_special_values(dtype, op):
    with np.errstate(all="ignore"):
        values = np.array(SPECIAL).astype(dtype)
        pair = [np.repeat(values, len(values)), np.tile(values, len(values))]
    for sources in (pair, pair[::-1]):
        out = np.empty_like(pair[0])
        chosen = ReduceOp.scaled_sum(2) if op == "scaled_sum" else op
        reduce_arrays(chosen, [out], sources, divisor=2)
        assert_same(out, reference.reduce(op, sources, 2), f"{dtype} {op}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_ring_step(dtype):
    received, mine, slot = (Guarded(3001, dtype_of(dtype), 4) for _ in range(3))
    received.array[...], mine.array[...] = (any_values(dtype, 3001, seed) for seed in (1, 2))
    before = [received.array.copy(), mine.array.copy()]
    expected = reference.reduce("sum", before)

    ring_step("sum", [mine.array, slot.array], received.array, mine.array)

    for guarded in (received, mine, slot):
        guarded.check()
    assert_same(mine.array, expected)
    assert_same(slot.array, expected)
    assert_same(received.array, before[0])

    last = reference.reduce("avg", [before[0], expected], 5)
    ring_step("avg", [mine.array], received.array, mine.array, is_last=True, divisor=5)
    assert_same(mine.array, last)


def zeros(count, dtype="float32"):
    return np.zeros(count, dtype)


@pytest.mark.parametrize(
    ("op", "destinations", "sources", "error", "text"),
    [
        (
            "sum",
            [zeros(3)],
            [zeros(4)],
            ArgumentError,
            "one dtype and count; they have 3 of float32, 4",
        ),
        ("sum", [zeros(3)], [zeros(3, "int8")], ArgumentError, "3 of float32, 3 of int8"),
        ("sum", [], [zeros(3)], ArgumentError, "destinations must be 1 to 16 arrays; got 0"),
        (
            "sum",
            [zeros(3)],
            [zeros(3)] * 17,
            ArgumentError,
            "sources must be 1 to 16 arrays; got 17",
        ),
        (
            "sum",
            [zeros(6)[::2]],
            [zeros(3)],
            ArgumentError,
            r"destinations\[0\] must be C-contiguous",
        ),
        ("band", [zeros(3)], [zeros(3)], ArgumentTypeError, "band is not defined for float32"),
        (
            "sum",
            [zeros(3, "M8[s]")],
            [zeros(3, "M8[s]")],
            ArgumentTypeError,
            "no reduction works on",
        ),
        ("mean", [zeros(3)], [zeros(3)], ArgumentError, "op must be"),
    ],
)
def test_refused(op, destinations, sources, error, text):
    with pytest.raises(error, match=text):
        reduce_arrays(op, destinations, sources)
