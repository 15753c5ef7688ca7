"""What passed is left out of a later run, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.passed_before import PASSED

ROOT = Path(__file__).parents[1]


def run_pytest(*arguments, **environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    given = {**os.environ, "PYTEST_ADDOPTS": "", **environment}
    done = subprocess.run(
        command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.soak
def test_what_passed_is_left_out(tmp_path):
    path, file = tmp_path / "passed", "tests/topology/test_readers.py"
    code, text = run_pytest(file, **{PASSED: str(path)})
    assert code == 0, text
    names = path.read_text().splitlines()
    assert names
    assert all(name.startswith(f"{file}::") for name in names)

    assert PASSED not in os.environ  # it would be told to whatever is started here

    path.write_text("".join(f"{name}\n" for name in names[1:]))
    code, text = run_pytest(file, f"--without-passed={path}", "--collect-only")
    assert code == 0, text
    assert names[0] in text
    assert not [name for name in names[1:] if name in text.splitlines()]
