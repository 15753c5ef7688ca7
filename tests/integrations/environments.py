"""Environments of their own for frameworks that want other packages than these tests run on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll

_REQUIREMENTS = Path(__file__).with_name("requirements")
INSTALL_S = 180


class Environment:
    """A virtual environment with what ``requirements/NAME.txt`` lists, and with this gpucoll.

    Parameters
    ----------
    name : str
    folder : path
        Where to make it, unless the folder that ``GPUCOLL_TEST_ENVIRONMENTS`` names has one.
    """

    def __init__(self, name: str, folder: Path) -> None:
        kept = Path(os.environ.get("GPUCOLL_TEST_ENVIRONMENTS", "/nowhere")) / name
        self.python = str(kept / "bin" / "python")
        if not kept.exists():
            self.python = _made(name, folder / "environment")
        alone = folder / "gpucoll"
        alone.mkdir(parents=True)
        (alone / "gpucoll").symlink_to(Path(gpucoll.__file__).parent)
        self.variables = {"PYTHONPATH": str(alone)}
        """With these, its Python finds gpucoll, and no other package of these tests' Python."""


def _made(name: str, folder: Path) -> str:
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "-r", str(_REQUIREMENTS / f"{name}.txt")]
    for command in ([sys.executable, "-m", "venv", str(folder)], install):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"the packages of {name} could not be installed within {INSTALL_S} s")
        if done.returncode:
            pytest.skip(f"the packages of {name} cannot be had: {done.stderr.strip()[-300:]}")
    return python
