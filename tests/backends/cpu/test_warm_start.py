"""A rank with compiled kernels imports no compiler, unless it must compile or may not load."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpucoll.backends import precompile
from gpucoll.kernels.cpu.cache import cache_folder

BEGIN = """\
import sys
import numpy as np
import gpucoll

def loaded():
    return [name for name in ("numba", "llvmlite") if name in sys.modules]

with gpucoll.init(rank=0, world_size=1) as comm:
    x = np.arange(4, dtype=np.float32)
    assert comm.all_reduce(x).tolist() == [0, 1, 2, 3]
"""
USUAL = """\
    for dtype in (np.float32, np.float64, np.int32, np.int64):
        for op in ("sum", "prod", "min", "max", "avg"):
            assert comm.all_reduce(np.ones(3, dtype), op=op).tolist() == [1, 1, 1]
    assert comm.all_reduce(3) == 3
    comm.barrier()
    assert comm.broadcast(x.astype(np.int8)).tolist() == [0, 1, 2, 3]
    assert comm.all_gather(x).tolist() == [0, 1, 2, 3]
    assert comm.all_to_all(x).tolist() == [0, 1, 2, 3]
    assert comm.broadcast_object({"a": 1}) == {"a": 1}
    assert comm.all_reduce([x, x + 1])[1].tolist() == [1, 2, 3, 4]
    comm.all_reduce(x, async_op=True).wait()
    with gpucoll.init(rank=0, world_size=1) as other, other.shared_arrays():
        assert other.all_reduce(np.ones(100_000))[-1] == 1
    assert comm.plan_all_reduce(x)().tolist() == [0, 1, 2, 3]
    work = comm.send(x, 0, async_op=True)
    assert comm.recv(source=0).tolist() == [0, 1, 2, 3]
    work.wait()
    print(loaded())
"""
OTHERS = """\
    assert comm.all_reduce(x.astype(np.uint8)).tolist() == [0, 1, 2, 3]
    assert comm.scan(x).tolist() == [0, 1, 2, 3]
    assert comm.all_reduce(x, compression="float16").tolist() == [0, 1, 2, 3]
    print(loaded())
    op = gpucoll.ReduceOp.custom(lambda a, b: a if a > b else b)
    assert comm.all_reduce(x, op=op).tolist() == [0, 1, 2, 3]
    assert comm.all_reduce(x).tolist() == [0, 1, 2, 3]
    print(loaded())
"""


@pytest.fixture(scope="module", autouse=True)
def warm():
    precompile.ensure_compiled()


def said(code, **environment):
    """Return what a process of its own prints, having said nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_what_most_programs_do():
    assert said(BEGIN + USUAL) == ["[]"]


def test_a_rank_imports_no_more_than_it_uses():
    heavy = [
        *("hashlib", "importlib.metadata", "secrets", "shutil", "subprocess", "tempfile"),
        *("gpucoll.backends.gpu.compiled_call", "gpucoll.backends.gpu.monitor"),
        *("gpucoll.kernels.cpu.custom", "gpucoll.kernels.cpu.reduce", "gpucoll.launcher"),
    ]
    code = f"import sys, numpy\nbefore = {{*sys.modules}}\n{BEGIN}"
    code += f"print([name for name in {heavy!r} if name in sys.modules and name not in before])"
    assert said(code) == ["[]"]


@pytest.mark.soak
def test_other_kernels_are_compiled_when_they_are_needed():
    """And kept: the next process imports no compiler; a custom operation needs Numba each time."""
    for path in cache_folder().glob("gpucoll_*.so"):
        path.unlink()
    assert said(BEGIN + OTHERS) == ["['llvmlite']", "['numba', 'llvmlite']"]
    assert said(BEGIN + OTHERS) == ["[]", "['numba', 'llvmlite']"]


@pytest.mark.soak
def test_a_kernel_whose_file_is_damaged_is_compiled_again():
    assert said(BEGIN + OTHERS)
    (path,) = cache_folder().glob("gpucoll_scan_sum_float32.so")
    os.truncate(path, path.stat().st_size - 1)
    assert said(BEGIN + OTHERS)[0] == "['llvmlite']"
    assert said(BEGIN + OTHERS)[0] == "[]"


@pytest.mark.soak
def test_where_the_library_cannot_be_loaded():
    """Loops are loaded one by one, kernels compiled; nothing else differs."""
    refuse = (
        "from gpucoll.kernels.cpu import library\n"
        "def refuse(path): raise OSError('failed to map segment from shared object')\n"
        "library._load_in_place = library._load_from_memory = refuse\n"
    )
    everything = refuse + BEGIN + USUAL + OTHERS
    assert said(everything) == ["['numba', 'llvmlite']"] * 3


def test_where_it_lies_on_a_file_system_without_execution():
    refuse = (
        "from gpucoll.kernels.cpu import library\n"
        "def refuse(path): raise OSError('failed to map segment from shared object')\n"
        "library._load_in_place = refuse\n"
    )
    assert said(refuse + BEGIN + USUAL) == ["[]"]
