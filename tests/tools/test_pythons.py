"""The Pythons that the README names, and where they are found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import pythons  # noqa: E402

sys.path.remove(str(ROOT / "tools"))


def command(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine with neither a PATH nor a pyenv."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def test_the_readme_names_them():
    assert pythons.promised()[0] == "3.10"
    versions = pythons.promised("3.8\n## Platforms\nPython 3.9 (NumPy 1.25), 3.13\n## On\n3.14\n")
    assert versions == ["3.9", "3.13"]
    with pytest.raises(ValueError, match="names no version"):
        pythons.promised("Python 3.10")


def test_one_on_the_path(machine):
    assert pythons.find("3.10") is None
    path = command(machine / "bin/python3.10", "echo 3.10")
    assert pythons.find("3.10") == path


def test_a_command_that_does_not_run_is_passed_over(machine):
    """As pyenv's for a version that nobody has chosen."""
    command(machine / "bin/python3.10", "echo 'pyenv: python3.10: command not found' >&2; exit 127")
    assert pythons.find("3.10") is None
    for patch in ("9", "13"):
        command(machine / f"pyenv/versions/3.10.{patch}/bin/python3", "echo 3.10")
    assert pythons.find("3.10") == machine / "pyenv/versions/3.10.13/bin/python3"


def test_one_of_another_version_is_passed_over(machine):
    command(machine / "bin/python3.10", "echo 3.11")
    assert pythons.find("3.10") is None
