"""What the kernels make of GPU arrays, the CPU makes of host arrays: the same bits."""

from __future__ import annotations

import numpy as np
import pytest
from tests.dtypes import HALF_TYPES, any_values, assert_same, dtype_of
from tests.guarded import Guarded

from gpucoll.kernels.block_message import BLOCK, message_bytes
from gpucoll.kernels.cpu import convert as host_convert
from gpucoll.kernels.cpu import quantise as host_quantise
from gpucoll.kernels.gpu import pack, quantise

pytestmark = pytest.mark.usefixtures("on_host")

BLOCKS = 1000
OPTIONS = {"blocks": BLOCKS, "sequence": 9, "first_block": 77}


@pytest.mark.parametrize("seed", [None, 1 << 60], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("block_format", quantise.FORMATS)
def test_quantise(block_format, seed):
    x = any_values("float32", BLOCK * BLOCKS, 1)
    x[~np.isfinite(x)] = 3
    x[5] = np.nan
    ours, theirs = (Guarded(message_bytes(BLOCKS), np.uint8).array for _ in range(2))
    quantise.quantise(x, ours, block_format, seed=seed, **OPTIONS)
    host_quantise.quantise(x, theirs, block_format, seed=seed, **OPTIONS)
    assert_same(ours, theirs)

    back, again = np.empty_like(x), np.empty_like(x)
    quantise.dequantise(ours, back, block_format, blocks=BLOCKS)
    host_quantise.dequantise(theirs, again, block_format, blocks=BLOCKS)
    assert_same(back, again)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_cast(dtype):
    x = any_values("float32", 1_000_000, 2)
    ours, theirs = (np.empty(x.size, dtype_of(dtype)) for _ in range(2))
    pack.cast(x, ours)
    host_convert.cast(x, theirs)
    assert_same(ours, theirs)
