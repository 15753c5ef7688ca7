"""Kernels of gradient descent against NumPy: each operation rounded in the accumulator's dtype."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpucoll.kernels.cpu.addresses import descent_kernel

HELD = {"float64": np.float64}
"""Dtypes that are not computed in float32."""
COUNTS = (0, 1, 7, 8, 9, 15, 16, 17, 33, 64)
RATE, EPSILON = 0.3, 1e-3
GUARD = 3


def dtype_of(name):
    return (
        np.dtype(getattr(ml_dtypes, name)) if name.startswith(("b", "float8")) else np.dtype(name)
    )


def run(name, row, gradient, sums, parameters):
    """Run the kernel in place on arrays of any alignment."""
    addresses = [array.ctypes.data for array in (row, row if sums is None else sums)]
    destinations = np.array(addresses, np.int64)
    sources = np.array([row.ctypes.data, gradient.ctypes.data], np.int64)
    kernel = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)(descent_kernel(name, sums is not None))
    words = (destinations.ctypes.data, 1, sources.ctypes.data, 2, row.size)
    kernel(*words, parameters.ctypes.data, 0)


def misaligned(values, by):
    """Return a copy that begins `by` bytes into a block, with guards, and the block."""
    block = np.full(values.nbytes + by + 2 * GUARD * values.itemsize, 7, np.uint8)
    begin = by + GUARD * values.itemsize
    view = block[begin : begin + values.nbytes].view(values.dtype)
    view[:] = values
    return view, block, (begin, begin + values.nbytes)


@pytest.mark.parametrize("has_sums", [False, True])
@pytest.mark.parametrize(
    "name", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
)
def test_against_numpy(name, has_sums):
    dtype, held = dtype_of(name), HELD.get(name, np.float32)
    parameters = np.array([RATE, EPSILON], held)
    rate, epsilon = parameters
    generator = np.random.default_rng(len(name))
    for count in COUNTS:
        for by in (0, 1):
            row = generator.normal(size=count).astype(dtype)
            gradient = generator.normal(size=count).astype(dtype)
            sums: Any = generator.random(count).astype(held)
            wide: Any = row.astype(held)
            slope: Any = gradient.astype(held)
            expected_sums = sums + slope * slope
            change = rate * slope
            if has_sums:
                change /= np.sqrt(expected_sums) + epsilon
            expected = (wide - change).astype(dtype)

            here, block, (begin, end) = misaligned(row, by)
            own_sums, sums_block, (first, last) = misaligned(sums, by)
            run(name, here, misaligned(gradient, by)[0], own_sums if has_sums else None, parameters)
            assert here.tobytes() == expected.tobytes(), (count, by)
            assert (block[:begin] == 7).all()
            assert (block[end:] == 7).all()
            assert own_sums.tobytes() == (expected_sums if has_sums else sums).tobytes()
            assert (sums_block[:first] == 7).all()
            assert (sums_block[last:] == 7).all()
