"""Every function of CPython's that compiled loops name is there in every Python that is promised.

What the headers have is not enough: before 3.11 ``PyObject_CallOneArg`` was an inline function and
not exported by the interpreter, and LLVM ends the process where it does not find a function.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from gpucoll.backends import precompile
from gpucoll.kernels.cpu.jit import ExternalFunction

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import pythons  # noqa: E402

sys.path.remove(str(ROOT / "tools"))

EXPORTED = {
    "PyByteArray_AsString",
    "PyByteArray_FromStringAndSize",
    "PyBytes_AsString",
    "PyBytes_FromStringAndSize",
    "PyBytes_Size",
    "PyCapsule_GetPointer",
    "PyErr_CheckSignals",
    "PyErr_Clear",
    "PyErr_Fetch",
    "PyErr_Occurred",
    "PyErr_Restore",
    "PyEval_RestoreThread",
    "PyEval_SaveThread",
    "PyFloat_AsDouble",
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyList_GetItem",
    "PyList_Size",
    "PyLong_AsLongLong",
    "PyLong_FromLongLong",
    "PyObject_GetAttr",
    "PyObject_VectorcallDict",
    "PyThreadState_SetAsyncExc",
    "PyTuple_GetItem",
    "PyTuple_New",
    "PyTuple_SetItem",
    "PyTuple_Size",
    "Py_DecRef",
    "Py_IncRef",
}
"""Functions that Python 3.10 and 3.13 export, as ``nm -D libpython3.10.so`` and the other say."""

MISSING = (
    "import ctypes, sys; print(*(n for n in sys.argv[1:] if not hasattr(ctypes.pythonapi, n)))"
)


@pytest.fixture(scope="module")
def named():
    """The functions of CPython's that loops name, those included that most programs do not need."""
    for module in (*precompile.MODULES, *precompile.MODULES_WHEN_USED):
        importlib.import_module(module)
    return {name for name in ExternalFunction.declared if name.startswith(("Py", "_Py"))}


def test_loops_name_no_others(named):
    """One that is new here needs a look at the exported functions of the oldest Python first."""
    assert named == EXPORTED


@pytest.mark.parametrize("version", ["this", pythons.promised()[0], pythons.promised()[-1]])
def test_they_are_exported(named, version):
    python = Path(sys.executable) if version == "this" else pythons.find(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    command = [str(python), "-I", "-c", MISSING, *sorted(named)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
