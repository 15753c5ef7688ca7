"""Environments of their own for frameworks that want other packages than these tests run on."""

from __future__ import annotations

import fcntl
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
        An empty folder.
    shared : path, optional
        Where to make it, once for all processes that pass the same folder, unless the folder that
        ``GPUCOLL_TEST_ENVIRONMENTS`` names has one. Default: `folder`.
    """

    def __init__(self, name: str, folder: Path, shared: Path | None = None) -> None:
        kept = Path(os.environ.get("GPUCOLL_TEST_ENVIRONMENTS", "/nowhere")) / name
        self.python = str(kept / "bin" / "python")
        if not kept.exists():
            self.python = _made_once(name, (shared or folder) / f"environment-{name}")
        alone = folder / "gpucoll"
        alone.mkdir(parents=True)
        (alone / "gpucoll").symlink_to(Path(gpucoll.__file__).parent)
        self.variables = {"PYTHONPATH": str(alone)}
        """With these, its Python finds gpucoll, and no other package of these tests' Python."""


def _made_once(name: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait for as long as an installation may take
        if not (folder / "made").exists():
            _made(name, folder)
            (folder / "made").touch()
    return str(folder / "bin" / "python")


def _made(name: str, folder: Path) -> None:
    python = str(folder / "bin" / "python")
    # Most modules of these packages are never imported: to compile them takes half of the time.
    install = [python, "-m", "pip", "install", "-q", "--no-compile"]
    install += ["-r", str(_REQUIREMENTS / f"{name}.txt")]
    for command in ([sys.executable, "-m", "venv", str(folder)], install):
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_S, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"the packages of {name} could not be installed within {INSTALL_S} s")
        if done.returncode:
            pytest.skip(f"the packages of {name} cannot be had: {done.stderr.strip()[-300:]}")
