"""The CPU backend's own refusals."""

from __future__ import annotations

import pytest

from gpucoll.backends.cpu import precompile
from gpucoll.errors import ArgumentTypeError
from gpucoll.types import Collective, ReduceOp


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_avg_over_more_ranks_than_the_dtype_can_count(dtype):
    precompile.load()
    from gpucoll.backends.cpu.blocks import BlockMaker

    with pytest.raises(ArgumentTypeError, match=f"avg of {dtype} over 128 ranks"):
        BlockMaker(0, 128).plain(Collective.ALL_REDUCE, dtype, 1, ReduceOp.AVG)
