"""Casts of arrays against ml_dtypes and NumPy."""

from __future__ import annotations

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from tests.dtypes import HALF_TYPES, any_values, assert_same, dtype_of
from tests.guarded import Guarded

from gpucoll.kernels import reference_compression as reference
from gpucoll.kernels.conversion import CONVERTIBLE
from gpucoll.kernels.cpu import elements
from gpucoll.kernels.cpu.accumulate import add_scaled, narrow
from gpucoll.kernels.cpu.addresses import convert_kernel
from gpucoll.kernels.cpu.convert import cast

COUNTS = (0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 255, 1000)


def all_values(dtype: str) -> np.ndarray:
    """Return every value of a half type."""
    item_bytes = dtype_of(dtype).itemsize
    return np.arange(1 << 8 * item_bytes, dtype=f"u{item_bytes}").view(dtype_of(dtype))


def near_values_of(dtype: str) -> np.ndarray:
    """Return every value of a half type, what lies half way between two, and the neighbours."""
    with np.errstate(invalid="ignore"):
        values = all_values(dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)]).astype(np.float64)
    beyond = 2 * values[-1] - values[-2]  # where the next one would be
    values = np.concatenate([[-beyond], values, [beyond]])
    half = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    up, down = (np.nextafter(half, np.float32(to)) for to in (np.inf, -np.inf))
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 2.0**-149], np.float32)
    with np.errstate(over="ignore"):
        return np.concatenate([values.astype(np.float32), half, up, down, special])


def converted(x: np.ndarray, dtype: str, offsets: tuple[int, int] = (0, 0)) -> np.ndarray:
    source = Guarded(x.size, x.dtype, offsets[0])
    source.array[...] = x
    destination = Guarded(x.size, dtype_of(dtype), offsets[1])
    cast(source.array, destination.array)
    source.check()
    destination.check()
    return destination.array


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_every_value_and_what_lies_between(dtype):
    near, values = near_values_of(dtype), all_values(dtype)

    assert_same(converted(near, dtype), reference.convert(near, dtype))
    assert_same(converted(values, "float32"), reference.convert(values, "float32"))


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_other_widths_of_vectors_without_special_instructions(monkeypatch, dtype, width):
    monkeypatch.setattr(elements, "host_features", frozenset)
    plain = elements.elements.__wrapped__
    monkeypatch.setattr("gpucoll.kernels.cpu.convert.elements", plain)
    monkeypatch.setattr("gpucoll.kernels.cpu.convert.vector_bytes", lambda: width)
    anew = convert_kernel.__wrapped__
    monkeypatch.setattr("gpucoll.kernels.cpu.convert.convert_kernel", anew)

    near, values = near_values_of(dtype), all_values(dtype)
    assert_same(converted(near, dtype), reference.convert(near, dtype))
    assert_same(converted(values, "float32"), reference.convert(values, "float32"))


@pytest.mark.parametrize("dtype", CONVERTIBLE)
@pytest.mark.parametrize("source_dtype", CONVERTIBLE)
def test_pairs_counts_and_addresses(source_dtype, dtype):
    for turn, count in enumerate(COUNTS):
        x = any_values(source_dtype, count, count)
        offsets = (turn % 4, (turn // 2) % 3)
        got = converted(x, dtype, offsets)
        assert_same(got, reference.convert(x, dtype), f"{count=} {offsets=}")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_scaled_arrays_are_added_with_two_roundings(dtype):
    wide = "float64" if dtype == "float64" else "float32"
    for turn, count in enumerate(COUNTS):
        source = Guarded(count, dtype_of(dtype), turn % 4)
        source.array[...] = any_values(dtype, count, count)
        total = Guarded(count, np.dtype(wide), (turn // 2) % 3)
        for factor, is_first in ((0.1, True), (3, False), (1.7e-3, False)):
            before = total.array.copy()
            address = source.array.ctypes.data
            add_scaled(total.array, address, dtype, factor, is_first=is_first)
            expected = (
                reference.convert(source.array, wide, factor)
                if is_first
                else reference.add_scaled(before, source.array, factor)
            )
            assert_same(total.array, expected, f"{count=} {factor=}")
            source.check()
            total.check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrowing_to_an_address(dtype):
    x, made = any_values("float32", 1000, 1), np.empty(1000, dtype_of(dtype))
    narrow(x, made.ctypes.data, dtype)
    assert_same(made, reference.convert(x, dtype))
