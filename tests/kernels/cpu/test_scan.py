"""The scan kernels and identities against the reference: every dtype and operation."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from tests.dtypes import ALLOWED, any_values, assert_same, covering, dtype_of, small_values
from tests.guarded import Guarded

from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels import reference
from gpucoll.kernels.cpu.addresses import (
    REDUCE_ARGUMENTS,
    parameter_for,
    parts_per_element,
    scan_kernel,
)
from gpucoll.kernels.cpu.identities import identity_of

SIZES = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 4099)
N_SOURCES = (1, 2, 3, 4, 7)


def scan_arrays(op, destinations, sources, parameter, *, exclusive):
    """Run the kernel; `avg` gets its table of divisors."""
    dtype = sources[0].dtype.name
    values = range(1, len(sources) + 1) if op == "avg" else [parameter]
    held = parameter_for(dtype, values)
    tables = [
        np.array([array.ctypes.data for array in group], np.int64)
        for group in (destinations, sources)
    ]
    prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * REDUCE_ARGUMENTS)
    prototype(scan_kernel(dtype, op, exclusive))(
        tables[0].ctypes.data,
        len(destinations),
        tables[1].ctypes.data,
        len(sources),
        sources[0].size * parts_per_element(dtype),
        held.ctypes.data,
        0,
    )


def check(dtype, op, size, n_sources, offset=0, *, in_place=False, exclusive=False):
    """Scan random bit patterns into guarded destinations, and compare."""
    where = f"{dtype} {op} {size=} {n_sources=} {offset=} {in_place=} {exclusive=}"
    sources = [Guarded(size, dtype_of(dtype), offset) for _ in range(n_sources)]
    for seed, source in enumerate(sources):
        source.array[...] = any_values(dtype, size, seed)
    before = [source.array.copy() for source in sources]
    parameter = 3 if dtype.startswith(("int", "uint")) else 0.7
    destinations = sources
    if not in_place:
        destinations = [Guarded(size, dtype_of(dtype), offset) for _ in range(n_sources)]
    untouched = destinations[0].array.copy()

    scan_arrays(
        op,
        [destination.array for destination in destinations],
        [source.array for source in sources],
        parameter,
        exclusive=exclusive,
    )

    expected = reference.scan(op, before, parameter)
    if exclusive:  # the backend fills in the identity
        expected = [untouched, *expected[:-1]]
    for guarded in (*destinations, *sources):
        guarded.check(where)
    for place, destination in enumerate(destinations):
        assert_same(destination.array, expected[place], f"destination {place} of {where}")
    for source, content in zip(sources, before, strict=True):
        if not in_place:
            assert_same(source.array, content, f"source of {where}")


@pytest.mark.soak(quick=13)
@pytest.mark.parametrize(
    ("dtype", "op", "exclusive"),
    [(*pair, False) for pair in ALLOWED]
    + [(*pair, True) for pair in covering(5) if pair[1] != "avg"],
)
def test_against_the_reference(dtype, op, exclusive):
    turns = zip(SIZES, itertools.cycle(N_SOURCES), itertools.cycle((False, True)), strict=False)
    for size, n_sources, in_place in turns:
        offset = dtype_of(dtype).itemsize * (size % 5)
        check(dtype, op, size, n_sources, offset, in_place=in_place, exclusive=exclusive)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float8_e5m2", "float64", "complex64"])
def test_every_address(dtype):
    for offset, exclusive in itertools.product(range(16), (False, True)):
        check(dtype, "sum", 131, 3, offset, exclusive=exclusive)
        check(dtype, "prod", 33, 2, offset, in_place=True, exclusive=exclusive)


@pytest.mark.parametrize("exclusive", [False, True])
def test_sixty_four_sources(exclusive):
    for dtype, op in (("float32", "sum"), ("bfloat16", "prod"), ("int16", "max")):
        check(dtype, op, 257, 64, exclusive=exclusive)


# --- identities ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "op"), ALLOWED)
def test_an_identity_changes_nothing(dtype, op):
    if op == "avg":
        with pytest.raises(ArgumentTypeError, match="avg has no identity"):
            identity_of(dtype, op)
        return
    x = small_values(dtype, 50, 7)
    identity = np.empty_like(x)
    identity[...] = reference.identity(op, x.dtype)

    assert identity[:1].tobytes() == identity_of(dtype, op).tobytes()
    assert_same(reference.reduce(op, [identity, x]), reference.reduce(op, [x]))
