"""How NCCL and RCCL are found, bound and refused, over doubles; and what their codes become."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.doubles import run_python

from gpucoll.backends.nccl.library import NCCL, RCCL
from gpucoll.backends.nccl.prototypes import PROTOTYPES

VENDORS = pytest.mark.parametrize("vendor", ["nccl", "rccl"])

TELL = """
import json, sys, ctypes
from gpucoll.backends.nccl import library
from gpucoll.errors import GpucollError
for path in sys.argv[2:]:
    ctypes.CDLL(path)
try:
    found = library.load(sys.argv[1])
    assert library.load(sys.argv[1]) is found
    said = [found.path, found.reason, found.version, found.notes(), list(found.absent)]
except GpucollError as error:
    said = [type(error).__name__, str(error)]
print(json.dumps(said))
"""


SETTLED = {"HSA_NO_SCRATCH_RECLAIM": "1"}
"""An environment that gives no cause for notes."""


def tell(vendor, *loaded, path=(), **variables):
    """Load a vendor's library in a new process; return what it says."""
    code = f"import sys; sys.path[:0] = {list(map(str, path))!r}; sys.argv[1:] = "
    code += f"{[vendor, *map(str, loaded)]!r}\n{TELL}"
    return json.loads(run_python(code, **{"GPUCOLL_CPU_ONLY": "0", **SETTLED, **variables}))


@pytest.fixture
def wheel(doubles, vendor, tmp_path):
    """A folder for Python's path with the vendor's wheel in it."""
    double = doubles.double(vendor, without=("ncclScatter",))  # another file than the others
    (pattern,) = (NCCL if vendor == "nccl" else RCCL).wheels
    file = pattern.replace("*", "_gfx942")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).symlink_to(double.library)
    return tmp_path / file


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.soak(quick=1)
@VENDORS
def test_order(doubles, vendor, wheel, tmp_path):
    double, other = doubles.double(vendor), doubles.double(vendor, without=("ncclGather",))
    variable = (NCCL if vendor == "nccl" else RCCL).variable
    every = {"path": [tmp_path], variable: str(other.library), **double.search_path}

    path, reason, *_ = tell(vendor, double.library, **every)
    assert (path, reason) == (str(double.library), "this process had loaded it already")

    path, reason, *_ = tell(vendor, **every)
    assert (path, reason) == (str(other.library), f"{variable} names it")

    del every[variable]
    path, reason, *_ = tell(vendor, **every)
    assert (path, reason) == (str(wheel), "the wheel on Python's path")


@VENDORS
def test_the_loader_comes_last(doubles, vendor):
    double = doubles.double(vendor)
    code = f"""
import sys
from gpucoll.backends.nccl import library
sys.path = [folder for folder in sys.path if "site-packages" not in folder]  # no wheels
found = list(library.candidates(library.VENDORS[{vendor!r}]))
path, reason = found[0]
print(reason, library.Library(library.VENDORS[{vendor!r}], found[0]).path)
"""
    said = run_python(code, GPUCOLL_CPU_ONLY="0", **double.search_path)
    assert said.strip() == f"the system's loader finds it {double.library}"


@VENDORS
def test_a_second_copy_is_told(doubles, vendor):
    double, other = doubles.double(vendor), doubles.double(vendor, without=("ncclGather",))
    variable = (NCCL if vendor == "nccl" else RCCL).variable

    path, _, _, notes, _ = tell(
        vendor, double.library, other.library, **{variable: str(other.library)}
    )
    assert path == str(other.library)  # both are loaded: the one that is asked for
    (note,) = notes
    assert "2 copies" in note
    assert str(double.library) in note

    path, _, _, notes, _ = tell(vendor, double.library, **{variable: str(other.library)})
    assert path == str(double.library)
    (note,) = notes
    assert f"{variable}={other.library} was not followed" in note


@VENDORS
def test_the_environment_is_looked_at(doubles, vendor):
    double = doubles.double(vendor)
    *_, notes, _ = tell(vendor, double.library, NCCL_COMM_BLOCKING="1")
    assert notes[0].startswith("NCCL_COMM_BLOCKING=1: ")
    *_, notes, _ = tell(vendor, double.library, HSA_NO_SCRATCH_RECLAIM="0")
    said = [note for note in notes if note.startswith("HSA_NO_SCRATCH_RECLAIM is not set: ")]
    assert len(said) == (vendor == "rccl")


# --- what is refused ------------------------------------------------------------------------------


@VENDORS
def test_no_library(vendor, tmp_path):
    variable = (NCCL if vendor == "nccl" else RCCL).variable
    kind, message = tell(vendor, **{variable: str(tmp_path / "none.so")})
    assert kind == "BackendUnavailableError"
    assert f"cannot be loaded from {tmp_path}/none.so ({variable} names it)" in message


@VENDORS
@pytest.mark.parametrize(("code", "spelled"), [(21705, "2.17.5"), (2708, "2.7.8")])
def test_too_old(doubles, vendor, code, spelled):
    double = doubles.double(vendor)
    kind, message = tell(vendor, double.library, NCCL_DOUBLE_VERSION=str(code))
    name = vendor.upper()
    assert kind == "BackendUnavailableError"
    assert f"{name} {spelled} ({double.library}) is too old" in message
    assert f"needs {name} 2.18.0 or newer. It is used because this process had loaded" in message


@pytest.mark.soak(quick=1)
@VENDORS
def test_missing_functions(doubles, vendor):
    absent = ("ncclMemAlloc", "ncclGather", "ncclScatter", "ncclCommWindowRegister")
    double = doubles.double(vendor, without=(*absent, "ncclAllToAll"))
    *_, listed = tell(vendor, double.library)
    assert set(absent) <= set(listed)
    assert ("ncclAlltoAll" in listed) == (vendor == "rccl")


@pytest.mark.soak(quick=1)
@VENDORS
def test_a_lying_version(doubles, vendor):
    """It says that it is new, and has functions of an old one: symbols decide."""
    double = doubles.double(vendor, without=("ncclGather", "ncclCommRegister"))
    _, _, version, _, listed = tell(vendor, double.library, NCCL_DOUBLE_VERSION="29999")
    assert version == [2, 99, 99]
    assert {"ncclGather", "ncclCommRegister", "ncclCommDeregister"} <= set(listed)

    double = doubles.double(vendor, without=("ncclCommSplit",))
    kind, message = tell(vendor, double.library, NCCL_DOUBLE_VERSION="22907")
    assert kind == "BackendUnavailableError"
    assert "lacks ncclCommSplit" in message


def test_no_nccl_at_all():
    """A library of that name which is something else."""
    name = "libc.so.6"
    kind, message = tell("nccl", GPUCOLL_NCCL_LIBRARY=name)
    assert kind == "BackendUnavailableError"
    assert "does not tell its version: it is no NCCL" in message


def test_cpu_only():
    kind, message = tell("nccl", GPUCOLL_CPU_ONLY="1")
    assert (kind, "keeps this process to the CPU" in message) == ("BackendUnavailableError", True)


# --- functions and errors -------------------------------------------------------------------------


def use(seat, double):
    double.load()
    from gpucoll.backends.nccl import library
    from gpucoll.errors import BackendUnavailableError

    found = library.load(double.vendor)
    assert str(found.functions.ncclGetErrorString(4)).startswith("b'invalid argument")
    first, second = found.unique_id(), found.unique_id()
    assert len(first) == 128
    assert first != second
    errors = {}
    for code in range(1, 10):
        error = found.error(code, "ncclAllReduce")
        errors[code] = type(error).__name__
        assert str(error).startswith("ncclAllReduce: ")
        assert f"(code {code} of {double.vendor.upper()} " in str(error)
    found.check(0, "nothing")
    with pytest.raises(BackendUnavailableError, match="which came with"):
        library.Functions(found, {}).ncclScatter(None, 0)
    with pytest.raises(AttributeError, match="not in the table"):
        found.functions.ncclNothing()
    assert found.has("ncclAlltoAll")
    return errors


@VENDORS
def test_functions_and_errors(gpu_ranks, doubles, vendor):
    double = doubles.double(vendor)
    (errors,) = gpu_ranks.call(1, use, double, gives="seat", environment=double.variables)
    special = {6: "PeerLostError", 8: "DeadlineError"}
    assert errors == {code: special.get(code, "BackendError") for code in range(1, 10)}


def test_each_function_stands_once_in_the_table():
    for table in (NCCL.prototypes, RCCL.prototypes):
        names = [row.name for row in table]
        assert len(names) == len(set(names))
        assert {row.name for row in PROTOTYPES} <= set(names)


def test_nothing_is_loaded_by_importing():
    code = """
import sys
import gpucoll.backends.nccl.library, gpucoll.devices
from gpucoll.devices.foreign_library import loaded_copies
print(loaded_copies("lib(nccl|rccl|cuda|amdhip).*"), "cupy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[] False", done.stderr
