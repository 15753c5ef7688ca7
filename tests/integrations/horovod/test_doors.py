"""How a program of Horovod finds this package: by its name, under `python -m`."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import horovod
import horovod.common.exceptions
from horovod.common import exceptions
from gpucoll.integrations.horovod.exceptions import HorovodInternalError
assert horovod.common.exceptions is exceptions
assert exceptions.HorovodInternalError is HorovodInternalError
assert horovod.__spec__.name == "gpucoll.integrations.horovod"
assert horovod.__version__ >= "0.28"
assert sys.argv[1:] == ["--epochs", "3"]
for name in ("horovod.nothing", "horovod.common.nothing"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert name in str(error) and "exceptions" in str(error), error
    else:
        raise AssertionError(name)
"""


def door(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the door with arguments."""
    command = [sys.executable, "-m", "gpucoll.integrations.horovod", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_modules_have_horovods_names(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    done = door(str(program), "--epochs", "3")
    assert done.returncode == 0, done.stderr


def test_a_real_horovod_is_not_loaded(tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("raise SystemExit('the real one')")
    program = tmp_path / "program.py"
    program.write_text("import horovod; print(horovod.__name__)", encoding="utf-8")
    done = door(str(program))
    assert done.stdout.strip() == "gpucoll.integrations.horovod", done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_processes_find_them(tmp_path, method):
    """As those that load data for PyTorch do, which import the program again."""
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import multiprocessing
import horovod.common.exceptions
def name(_): return horovod.__name__
if __name__ == "__main__":
    with multiprocessing.get_context("{method}").Pool(1) as pool:
        print(*pool.map_async(name, [0]).get(30))
""",
        encoding="utf-8",
    )
    done = door(str(program))
    assert done.stdout.strip() == "gpucoll.integrations.horovod", done.stderr[-2000:]


def test_usage():
    assert door().returncode == 2
    assert door("-m").returncode == 2
    assert "gpucoll-run -n 4 -m gpucoll.integrations.horovod" in door("--help").stdout


def test_too_late():
    text = "import sys; sys.modules['horovod'] = sys; "
    text += "from gpucoll.integrations.horovod import alias; alias.install()"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert "horovod is imported already" in done.stderr


def test_every_framework_has_these_names():
    names = importlib.import_module("gpucoll.integrations.horovod.names")
    assert [name for name in names.__all__ if not hasattr(names, name)] == []
    assert {"Average", "ProcessSet", "rank", "HorovodInternalError"} <= {*names.__all__}
