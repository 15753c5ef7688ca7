"""Every collective at the sizes around which the CPU backend changes its way, in all manners."""

from __future__ import annotations

from random import Random

import pytest
from tests.collective_cases import (
    COLLECTIVES,
    PLACEMENTS,
    REDUCTIONS,
    SMALL_TUNING,
    SPREAD,
    check,
    counts_around,
    draw,
    thresholds,
)
from tests.dtypes import dtype_of

WORLD_SIZES = (1, 2, 3, 4, 7)
NEW = [name for name in COLLECTIVES if name not in ("all_reduce", "broadcast")]
"""Those two have files of their own."""
SMALL_CHUNK_BYTES = 4096


def small_thresholds(name, world_size):
    """Return the sizes of an input, or of a block, where `SMALL_TUNING` changes the way."""
    if name not in SPREAD:
        return (32, 256, 1024, *(step * SMALL_CHUNK_BYTES for step in (1, 2, 3)))
    lane = SMALL_CHUNK_BYTES // world_size & ~255
    whole = (32, 256, 1024)  # thresholds on the blocks together
    return (*(size // world_size for size in whole), lane, 2 * lane, 3 * lane)


def op_for(name):
    return "sum" if name in REDUCTIONS else ""


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", NEW)
def test_sizes_around_small_thresholds(ranks, world_size, name):
    random = Random(f"{name} {world_size}")
    cases = [
        draw(random, name, world_size, dtype=dtype, count=count, op=op_for(name), row=0)
        for dtype in ("int8", "bfloat16", "complex128")
        for count in counts_around(small_thresholds(name, world_size), dtype_of(dtype).itemsize)
        for _ in range(3)
    ]

    paths = check(ranks, world_size, cases, environment=SMALL_TUNING)

    large = {"STAGED"}
    if (name, world_size) == ("exclusive_scan", 2) and "SINGLE_COPY" in paths:
        large = {"SINGLE_COPY"}  # one reader, where the kernel lets it
    assert world_size == 1 or paths == {"ONE_SHOT", "SYMMETRIC"} | large


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", NEW)
def test_sizes_around_the_real_thresholds(ranks, world_size, name):
    random = Random(f"{name} {world_size}")
    sizes = ranks.call(world_size, thresholds)[0]
    if name in SPREAD:
        sizes = [size // world_size for size in sizes]
    cases = [
        draw(random, name, world_size, dtype="float32", count=count, op=op_for(name), row=0)
        for count in counts_around(sizes, 4)
    ]

    check(ranks, world_size, cases)


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", NEW)
def test_misaligned_to_every_element_size(ranks, world_size, name):
    random = Random(f"{name} {world_size}")
    cases = [
        draw(
            random,
            name,
            world_size,
            dtype=dtype,
            count=count,
            op=op_for(name),
            offset=offset,
            placement=placement,
        )
        for dtype in ("int16", "float64")
        for offset in range(1, 16, 2)
        for count in (5, 700)
        for placement in PLACEMENTS[:2]
    ]

    check(ranks, world_size, cases, environment=SMALL_TUNING)
