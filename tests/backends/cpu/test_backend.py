"""The CPU backend's own refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpucoll.backends import precompile
from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.cpu import cache
from gpucoll.types import Collective, ReduceOp


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_avg_over_more_ranks_than_the_dtype_can_count(dtype):
    precompile.load()
    from gpucoll.backends.cpu.host.blocks import BlockMaker

    with pytest.raises(ArgumentTypeError, match=f"avg of {dtype} over 128 ranks"):
        BlockMaker(0, 128).plain(Collective.ALL_REDUCE, dtype, 1, ReduceOp.AVG)


def test_compiling_is_shared_by_two_processes_also_where_the_module_is_a_script(
    monkeypatch, tmp_path
):
    name, started = precompile.__name__, []
    monkeypatch.setattr(precompile, "__name__", "__main__")
    monkeypatch.setattr(subprocess, "Popen", lambda line, **_: started.append(line))
    precompile._Compiler().compile_elsewhere(tmp_path)
    assert started == [
        [sys.executable, "-m", name, str(tmp_path), *precompile.MODULES[-cache.N_ELSEWHERE :]]
    ]
