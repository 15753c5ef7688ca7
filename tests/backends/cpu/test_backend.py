"""The CPU backend's own refusals."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from gpucoll.backends.cpu import precompile
from gpucoll.errors import ArgumentTypeError
from gpucoll.types import ReduceOp


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_avg_over_more_ranks_than_the_dtype_can_count(dtype):
    precompile.load()
    from gpucoll.backends.cpu.backend import CpuBackend

    group = SimpleNamespace(world_size=128, context=np.zeros(64, np.int64), is_running=False)
    backend = CpuBackend(group)  # type: ignore[arg-type]

    with pytest.raises(ArgumentTypeError, match=f"avg of {dtype} over 128 ranks"):
        backend.learn_all_reduce(np.dtype(dtype), "avg", ReduceOp.AVG)
