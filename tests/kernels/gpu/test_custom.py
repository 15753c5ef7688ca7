"""A user's operation: compiled to PTX without a GPU, its arithmetic run by Numba's simulator."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numba
import pytest
from tests.kernels.gpu.device import require_numba_cuda

from gpucoll.errors import ArgumentTypeError, BackendUnavailableError
from gpucoll.kernels.gpu.custom import custom_kernel
from gpucoll.types import DTYPES, ReduceOp

CAPABILITIES = ((7, 5), (9, 0), (12, 0))


@numba.njit
def doubled(x):
    return x + x


def combine(a, b):
    return a * b + doubled(a)


@pytest.fixture
def compile_kernel(monkeypatch):
    """Return `custom_kernel` for a machine without a driver; skip where Numba cannot compile."""
    require_numba_cuda()
    from numba.cuda import dispatcher
    from numba.cuda.cudadrv import nvvm

    try:
        nvvm.NVVM()
    except Exception as error:
        pytest.skip(f"numba-cuda finds no NVVM ({error}): pip install nvidia-nvvm")

    def compile_for(op, dtype, n_destinations=1, n_sources=2, is_aligned=True, capability=(9, 0)):
        # A function that a kernel calls is compiled for the current device, which is not there.
        device = SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(dispatcher, "get_current_device", lambda: device)
        return custom_kernel(op, dtype, n_destinations, n_sources, is_aligned, capability)

    custom_kernel.cache_clear()
    return compile_for


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiles_for_every_dtype(compile_kernel, dtype):
    kernel = compile_kernel(ReduceOp.custom(combine), dtype, n_sources=3, n_destinations=2)
    assert f".visible .entry {kernel.name}(" in kernel.ptx
    words = re.findall(r"\.param \.(\w+) " + kernel.name, kernel.ptx)
    assert words == ["u64"] * 6
    assert ".local" not in kernel.ptx
    assert not re.search(r"\bfma\.|\.ftz|\b(?:add|mul)\.f(?:32|64)", kernel.ptx)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiles_for_every_device(compile_kernel, capability):
    kernel = compile_kernel(ReduceOp.custom(combine), "bfloat16", capability=capability)
    assert f".target sm_{capability[0]}{capability[1]}" in kernel.ptx


def test_elements_are_read_whole_where_they_are_aligned(compile_kernel):
    op = ReduceOp.custom(combine)
    assert "ld.global.u8" not in compile_kernel(op, "float32").ptx
    assert "ld.global.u8" in compile_kernel(op, "float32", is_aligned=False).ptx


def test_sixteen_sources(compile_kernel):
    kernel = compile_kernel(ReduceOp.custom(lambda a, b: max(a, b)), "float64", 2, 16)
    assert len(re.findall(r"\bld\.global\.\w*64\b", kernel.ptx)) >= 16
    assert ".local" not in kernel.ptx


def test_mathematics(compile_kernel):
    op = ReduceOp.custom(lambda a, b: max(a, b) + math.log1p(math.exp(-abs(a - b))))
    assert compile_kernel(op, "float64").ptx


@pytest.mark.parametrize(
    ("function", "dtype", "text"),
    [
        (lambda a, b: a / b, "int32", "its function returns float64"),
        (lambda a, b: a.missing, "int8", "Unknown attribute 'missing'"),
    ],
)
def test_refused_as_on_the_cpu(compile_kernel, function, dtype, text):
    with pytest.raises(ArgumentTypeError, match=text):
        compile_kernel(ReduceOp.custom(function), dtype)


def test_without_numba_cuda(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match="numba-cuda, which is not installed"):
        custom_kernel.__wrapped__(ReduceOp.custom(combine), "int8", 1, 2, True, (9, 0))


def test_a_compiler_that_is_broken_is_not_the_users_fault(compile_kernel, monkeypatch):
    from numba import cuda

    def compile_ptx(*given, **options):
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

    monkeypatch.setattr(cuda, "compile_ptx", compile_ptx)
    expected = r"does not work here \(numba-cuda \S+ with numpy \S+\): module 'numpy' has"
    with pytest.raises(BackendUnavailableError, match=expected):
        compile_kernel(ReduceOp.custom(combine), "float32")


def test_the_user_keeps_numbas_compiler(compile_kernel):
    from numba.cuda.cudadrv import nvvm

    before = nvvm.compile_ir
    compile_kernel(ReduceOp.custom(combine), "float32")
    assert nvvm.compile_ir is before
    assert not isinstance(before, functools.partial)


SIMULATION = """
import json
import numpy as np
from numba import cuda
from gpucoll.kernels.gpu.numba_kernel import make_kernel

COUNT, N_SOURCES = 1000, 4
arrays = {}
def address_of(array):
    arrays[array.ctypes.data] = array
    return array.ctypes.data
def load(address, index):
    return arrays[address][index]
def store(address, index, value):
    arrays[address][index] = value

def combine(a, b):
    return a - 2 * b  # the order matters

generator = np.random.default_rng(1)
sources = [generator.integers(-99, 99, COUNT).astype(np.float64) for _ in range(N_SOURCES)]
expected = sources[0]
for source in sources[1:]:
    expected = combine(expected, source)
made = [np.full(COUNT + 2, 7.5) for _ in range(2)]
inner = [each[1:-1] for each in made]
kernel = make_kernel(load, store, np.float64, combine)
simulated = cuda.jit(kernel)
for blocks, threads in ((1, 32), (3, 64), (40, 32)):
    for each in inner:
        each[...] = 0
    to, of = (tuple(map(address_of, group)) for group in (inner, sources))
    simulated[blocks, threads](COUNT, to, of)
    for whole, each in zip(made, inner):
        assert np.array_equal(each, expected), (blocks, threads)
        assert whole[0] == whole[-1] == 7.5
print(json.dumps("every element once, left to right"))
"""


def test_simulated():
    pytest.importorskip("numba.cuda")
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SIMULATION],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == "every element once, left to right"
