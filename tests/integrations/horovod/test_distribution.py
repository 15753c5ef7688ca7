"""The distribution gpucoll-horovod: built, installed beside gpucoll, and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll

SOURCE = Path(__file__).parents[3] / "packages" / "gpucoll-horovod"
PROGRAM = """
import horovod, sys
import horovod.common.exceptions as exceptions
from horovod.common import basics as hvd
assert horovod.__name__ == "gpucoll.integrations.horovod", horovod
assert exceptions.HorovodInternalError.__module__ == "gpucoll.integrations.horovod.exceptions"
hvd.init()
print(hvd.rank(), hvd.size())
hvd.shutdown()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Return the folder into which the built wheel is installed."""
    folder = tmp_path_factory.mktemp("distribution")
    shutil.copytree(SOURCE, folder / "source")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    for command in (
        ["wheel", "--no-build-isolation", "--no-deps", "-w", str(folder), str(folder / "source")],
        ["install", "--no-index", "--no-deps", "--target", str(folder / "target"), "--find-links"],
    ):
        last = [str(folder), "gpucoll-horovod", "--pre"] if command[0] == "install" else []
        done = subprocess.run(
            [*pip, *command, *last], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
    return folder / "target"


def run(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that finds what is installed."""
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version():
    text = (SOURCE / "pyproject.toml").read_text("utf-8")
    assert f'version = "{gpucoll.__version__}"' in text


def test_its_module_is_the_one_for_children():
    """Processes that a program spawns find a copy."""
    ours = Path(gpucoll.__file__).parent / "integrations" / "horovod" / "for_children" / "horovod"
    copies = [SOURCE / "src" / "horovod" / "__init__.py", ours / "__init__.py"]
    assert copies[0].read_text("utf-8") == copies[1].read_text("utf-8")


@pytest.mark.soak
def test_a_plain_interpreter(installed, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run(installed, sys.executable, "-m", "gpucoll", "run", "-n", "2", str(program))
    assert sorted(done.stdout.split("\n")) == ["", "[0] 0 2", "[1] 1 2"], done.stderr
    done = run(installed, sys.executable, "-m", "horovod.runner.launch", "--check-build")
    assert "[X] Gloo" in done.stdout, done.stderr


@pytest.mark.soak
def test_the_command(installed, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    horovodrun = str(installed / "bin" / "horovodrun")
    done = run(installed, horovodrun, "-np", "2", sys.executable, str(program))
    assert sorted(done.stdout.split("\n")) == ["", "[0] 0 2", "[1] 1 2"], done.stderr
    shell = f'exec "{sys.executable}" {program}'
    done = run(installed, horovodrun, "-np", "1", "sh", "-c", shell)
    assert done.stdout == "[0] 0 1\n", done.stderr
