"""How oneCCL is found, bound and refused, over a double; what its names and codes become."""

from __future__ import annotations

import ctypes
import json

import pytest
from tests.doubles import run_python

from gpucoll import config
from gpucoll.backends.nccl.elements import lack
from gpucoll.backends.oneccl.library import ONECCL, UniqueId, set_environment, spelled
from gpucoll.types import ReduceOp

TELL = """
import json
from gpucoll.backends.oneccl import library
from gpucoll.errors import GpucollError
try:
    found = library.load()
    assert library.load() is found
    failed = found.error(11, "onecclAllReduce")
    said = [found.path, found.reason, found.version, found.notes(), type(failed).__name__]
    print(json.dumps([*said, str(failed), len(found.unique_id()), found.has("ncclGather")]))
except GpucollError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def tell(*path, **variables):
    """Load oneCCL in a new process; return what it says."""
    code = f"import sys; sys.path[:0] = {list(map(str, path))!r}\n{TELL}"
    return json.loads(run_python(code, **{"GPUCOLL_CPU_ONLY": "0", **variables}))


def test_the_copy_that_a_variable_names(doubles):
    library = str(doubles.oneccl())
    path, reason, version, notes, *said = tell(GPUCOLL_ONECCL_LIBRARY=library)
    assert (path, reason) == (library, "GPUCOLL_ONECCL_LIBRARY names it")
    assert (version, notes) == ([2022, 2, 0], [])
    text = f"onecclAllReduce: Unknown error code (code 11 of oneCCL 2022.2.0 ({library}))"
    assert said == ["BackendError", text, 4096, False]


def test_where_pip_puts_it(doubles, tmp_path):
    """pip installs the library beside the folder of the packages, which is on Python's path."""
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "lib" / "libccl.so.2").symlink_to(doubles.oneccl())
    path, reason, *_ = tell(packages)
    assert path == str(packages / "../../libccl.so.2")
    assert reason == "the wheel on Python's path"


def test_without_one():
    kind, text = tell()
    assert kind == "BackendUnavailableError"
    assert text.startswith("oneCCL is not found: no wheel on Python's path, no GPUCOLL_ONECCL_LIBR")
    assert "pip install oneccl, which brings intel-sycl-rt (oneccl-cpu has no libccl.so.2)" in text


def test_an_old_one(doubles):
    library = str(doubles.oneccl())
    given = {"GPUCOLL_ONECCL_LIBRARY": library, "ONECCL_DOUBLE_VERSION": "20211700"}
    kind, text = tell(**given)
    assert kind == "BackendUnavailableError"
    assert f"oneCCL 2021.17.0 ({library}) is too old: gpucoll needs oneCCL 2022.0.0" in text


def test_one_that_lacks_a_function(doubles):
    kind, text = tell(GPUCOLL_ONECCL_LIBRARY=str(doubles.oneccl("-DWITHOUT_SEND")))
    assert kind == "BackendUnavailableError"
    assert "lacks onecclSend, which oneCCL has had since before 2022.0.0" in text


def test_names_and_numbers():
    assert ctypes.sizeof(UniqueId) == 4096
    assert spelled("ncclAlltoAll") == "onecclAllToAll"
    assert spelled("ncclCommInitRank") == spelled("onecclCommInitRank") == "onecclCommInitRank"
    assert ONECCL.spellings["ncclAllReduce"] == ("onecclAllReduce",)
    assert "onecclSetDevice" not in ONECCL.spellings


@pytest.mark.parametrize(
    ("op", "dtype", "reason"),
    [
        (ReduceOp.SUM, "float32", ""),
        (ReduceOp.SUM, "complex64", ""),
        (ReduceOp.SUM, "float8_e4m3fn", "no such type; convert to float16"),
        (ReduceOp.SUM, "int16", "convert to int32"),
        (ReduceOp.BAND, "int32", "no bitwise"),
    ],
)
def test_what_it_lacks(op, dtype, reason):
    assert reason in lack(op, dtype, "oneCCL", (2022, 2, 0), 2)
    assert bool(reason) == bool(lack(op, dtype, "oneCCL", (2022, 2, 0), 2))


@pytest.fixture
def unset(monkeypatch):
    """The variables that gpucoll sets for oneCCL, unset for this test."""
    names = (config.CCL_ATL_TRANSPORT, config.CCL_YIELD, config.CCL_KVS_IFACE, config.FI_TCP_IFACE)
    for name in names:
        monkeypatch.setenv(name, "kept")  # so that its end is restored, too
        monkeypatch.delenv(name)
    return names


def test_settings_on_a_gpu(unset):
    set_environment("", is_on_host=False)
    assert [config.variable(name) for name in unset] == ["ofi", "", "", ""]


def test_settings_of_the_user_stand(unset, monkeypatch):
    monkeypatch.setenv(config.CCL_ATL_TRANSPORT, "mpi")
    set_environment("eth1", is_on_host=True)
    assert [config.variable(name) for name in unset] == ["mpi", "sleep", "eth1", "eth1"]


DOCTOR = """
from gpucoll.doctor.cli import main
raise SystemExit(main(["--json", "--no-self-test"]))
"""


@pytest.mark.soak
def test_doctor(doubles):
    library = str(doubles.oneccl())
    given = {"GPUCOLL_ONECCL_LIBRARY": library, "GPUCOLL_GPU_KIND": "sycl", "GPUCOLL_CPU_ONLY": "0"}
    report = json.loads(run_python(DOCTOR, **given))
    (copy,) = (copy for copy in report["libraries"] if copy["name"] == "oneCCL")
    assert copy == {
        "name": "oneCCL",
        "path": library,
        "version": "2022.2.0",
        "source": "GPUCOLL_ONECCL_LIBRARY names it",
        "is_used": True,
        "problem": None,
    }
    chosen = {row["arrays"]: row for row in report["auto"]}["GPU arrays"]
    assert chosen["backend"] == "oneccl"
    assert "never been executed on an Intel GPU" in chosen["reason"]
