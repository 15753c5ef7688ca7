"""What the README shows runs as it stands there: alone, on ranks, and under pytest."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpucoll.backends.precompile import ensure_compiled

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)
PROGRAMS = [block for block in BLOCKS if "def test_" not in block]
TESTS = [block for block in BLOCKS if "def test_" in block]
PROGRAM_S = 120


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """Compiled before programs are started, which on a busy machine takes minutes."""
    ensure_compiled()


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=PROGRAM_S, cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_blocks_are_found():
    assert len(PROGRAMS) == 3
    assert len(TESTS) == 1


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_programs(tmp_path, number):
    (tmp_path / "train.py").write_text(PROGRAMS[number])
    run(tmp_path, "train.py")
    if "gpucoll.launch" not in PROGRAMS[number]:
        run(tmp_path, "-m", "gpucoll", "run", "-n", "2", "train.py")


def test_the_first_says_what_it_says(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAMS[0])
    said = run(tmp_path, "-m", "gpucoll", "run", "-n", "2", "train.py")
    ends = "[3. 3. 3.] [2. 2. 2.] [1.5 1.5 1.5]"
    assert sorted(said.splitlines()) == [f"[{rank}] {rank} {ends}" for rank in range(2)]


def test_tests(tmp_path):
    (tmp_path / "test_means.py").write_text(TESTS[0])
    said = run(tmp_path, "-m", "pytest", "-q", "-p", "gpucoll.testing.plugin", "test_means.py")
    assert "2 passed" in said
