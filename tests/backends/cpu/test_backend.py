"""The CPU backend's own refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from gpucoll import progress
from gpucoll.backends import precompile
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentTypeError
from gpucoll.kernels.cpu import cache, jit
from gpucoll.types import ReduceOp


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_avg_over_more_ranks_than_the_dtype_can_count(dtype):
    precompile.load()
    from gpucoll.backends.cpu.host.backend import BlockMaker

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


def test_functions_are_counted_here_and_where_the_other_process_writes(monkeypatch, tmp_path):
    module = types.ModuleType("loops")
    for number in range(3):
        loop = jit.Loop(lambda: None)
        loop.__module__ = "loops"
        setattr(module, f"loop_{number}", loop)
    monkeypatch.setitem(sys.modules, "loops", module)
    monkeypatch.setattr(jit, "compile_module", lambda _: None)
    compiler = precompile._Compiler(["loops"])
    assert compiler.extent(None) == ""
    compiler.compile("loops")
    assert compiler.extent(None) == "0 of 3 functions"
    module.loop_1.numba = "compiled"
    assert compiler.extent(tmp_path) == "1 of 3 functions"
    for name in ("a.nbc", "b.nbc", "b.nbi"):
        (tmp_path / name).touch()
    assert compiler.extent(tmp_path) == "2 of 3 functions"


def test_the_process_that_compiles_gets_the_terminal(monkeypatch, tmp_path):
    (tmp_path / "compiles.py").write_text(
        "import os, sys; sys.stderr.write(f'{os.isatty(2)}\\n'); sys.exit(3)"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(precompile, "_NAME", "compiles")
    monkeypatch.setattr(cache, "is_complete", lambda: False)
    monkeypatch.setenv("TERM", "xterm")
    said: list[str] = []
    before = progress.show_by()
    master, slave = os.openpty()
    with open(master, "rb", buffering=0) as screen, open(slave, "w") as stderr:
        for stream in (sys.stderr, stderr):
            monkeypatch.setattr(sys, "stderr", stream)
            with pytest.raises(subprocess.CalledProcessError):
                precompile.ensure_compiled(said.append)
        assert screen.read(100) == b"True\r\n"
    progress.show_by(before)
    assert said == ["False"]
