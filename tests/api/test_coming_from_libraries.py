"""The rows of other libraries' names: their code runs beside gpucoll's, or its names exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests import mpis

import gpucoll
from gpucoll.api.coming_from import rows

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.coming_from"
VARIABLES = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1", "JAX_PLATFORMS": "cpu"}


def test_mpi4py_gives_the_same():
    mpi = mpis.installed("mpich")
    if mpi is None:
        pytest.skip("mpich is not installed (see GPUCOLL_TEST_MPI in tests/README.md)")

    code, output = mpi.run(2, "-m", MODULE, "mpi4py")

    assert code == 0, output


@pytest.mark.parametrize("library", ["torch.distributed", "Horovod", "JAX"])
def test_the_library_gives_the_same(library):
    module = "jax" if library == "JAX" else "torch"
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    path = os.pathsep.join([str(ROOT), str(Path(gpucoll.__file__).parent.parent)])
    command = [sys.executable, "-W", "ignore", "-m", "gpucoll", "run", "-n", "2", "-m", MODULE]
    done = subprocess.run(
        [*command, library],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **VARIABLES},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout


def roots(library: str) -> dict[str, Any]:
    """Return what the first parts of the names in a library's code stand for."""
    if library == "cupyx.distributed":
        cupyx = pytest.importorskip("cupyx.distributed", reason="CuPy is not installed")
        return {"cupyx": sys.modules["cupyx"], "comm": cupyx.NCCLBackend}
    if library == "cupy.cuda.nccl":
        nccl = pytest.importorskip("cupy.cuda.nccl", reason="CuPy is not installed")
        if not nccl.available:
            pytest.skip("CuPy finds no NCCL")
        return {"nccl": nccl, "comm": nccl.NcclCommunicator}
    if library == "nccl4py":
        nccl = pytest.importorskip(
            "nccl.core", reason="nccl4py is not installed", exc_type=ImportError
        )
        return {"nccl": nccl, "comm": nccl.Communicator}
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    utilities = importlib.import_module("jax.experimental.multihost_utils")
    return {"jax": jax, "multihost_utils": utilities}


@pytest.mark.parametrize("library", ["cupyx.distributed", "cupy.cuda.nccl", "nccl4py", "JAX"])
def test_the_names_exist(library):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, where there is no GPU
        known = roots(library)

        for row in rows():
            if row.library == library:
                for node in ast.walk(ast.parse(row.there)):
                    if isinstance(node, ast.Attribute):
                        assert resolved(node, known) is not None, row.there


def resolved(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return what a dotted name stands for, or None."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(resolved(node.value, known), node.attr, None)
    return None
