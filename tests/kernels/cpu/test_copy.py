"""The copy kernels: any size, any address, no byte too many."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from tests.guarded import Guarded

from gpucoll.kernels.cpu.addresses import (
    HAS_STRING_COPY,
    INTO_SLOT,
    OUT_OF_SLOT,
    PLAIN,
    copy_kernel,
    refill_kernel,
    string_copy_kernel,
)

SIZES = (*range(6), 15, 16, 17, 31, 63, 64, 65, 127, 255, 256, 257, 1000, 2047, 2048, 4099, 70_001)
KINDS = {"plain": PLAIN, "into_slot": INTO_SLOT, "out_of_slot": OUT_OF_SLOT}
KERNELS: dict[str, Callable[[], int]] = {
    name: partial(copy_kernel, kind) for name, kind in KINDS.items()
}
if HAS_STRING_COPY:
    KERNELS["string"] = string_copy_kernel


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("ahead", [0, 512])
def test_sizes_and_addresses(name, ahead):
    copy = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(KERNELS[name]())
    generator = np.random.default_rng(7)
    for size in SIZES:
        for from_offset, to_offset in ((0, 0), (1, 0), (0, 3), (13, 7)):
            source = Guarded(size, np.uint8, from_offset)
            destination = Guarded(size, np.uint8, to_offset)
            source.array[...] = content = generator.integers(0, 256, size, np.uint8)

            copy(destination.array.ctypes.data, source.array.ctypes.data, size, ahead)

            where = f"{name} {size=} {from_offset=} {to_offset=} {ahead=}"
            destination.check(where)
            source.check(where)
            assert np.array_equal(destination.array, content), where
            assert np.array_equal(source.array, content), where


@pytest.mark.parametrize("ahead", [0, 512])
def test_refill(ahead):
    """The slot's content goes out, the source's comes in, whatever the addresses."""
    refill = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(refill_kernel())
    generator = np.random.default_rng(8)
    for size in SIZES:
        for out_offset, slot_offset, in_offset in ((0, 0, 0), (1, 0, 6), (5, 3, 0)):
            destination = Guarded(size, np.uint8, out_offset)
            slot, source = Guarded(size, np.uint8, slot_offset), Guarded(size, np.uint8, in_offset)
            slot.array[...] = old = generator.integers(0, 256, size, np.uint8)
            source.array[...] = new = generator.integers(0, 256, size, np.uint8)

            addresses = [each.array.ctypes.data for each in (destination, slot, source)]
            refill(*addresses, size, ahead)

            where = f"{size=} {out_offset=} {slot_offset=} {in_offset=}"
            for guarded, content in ((destination, old), (slot, new), (source, new)):
                guarded.check(where)
                assert np.array_equal(guarded.array, content), where
