"""Horovod's repository, and programs of Horovod on ranks, as users start them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
VERSION = "0.28.1"
TIMEOUT_S = 60


@pytest.fixture(scope="session")
def packages() -> Any:
    """Return the module that fetches packages of others."""
    return importlib.import_module("tests.integrations.packages")


@pytest.fixture(scope="session")
def horovod_source(packages, tmp_path_factory) -> Path:
    """Return Horovod's repository, which ``GPUCOLL_TEST_HOROVOD`` names or which is cloned.

    Its source distribution has no tests.
    """
    if named := os.environ.get("GPUCOLL_TEST_HOROVOD"):
        return Path(named)
    address = "https://github.com/horovod/horovod"
    return packages.repository_of(address, f"v{VERSION}", tmp_path_factory.mktemp("horovod"))


@pytest.fixture
def run_program(tmp_path: Path) -> Run:
    """Return a function that runs a program of Horovod: a file, or its text."""

    def run(
        program: Path | str,
        n_ranks: int,
        *arguments: str,
        environment: dict[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "program.py"
        if isinstance(program, str):
            path.write_text(program, encoding="utf-8")
        else:
            path = program
        command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "-n", str(n_ranks)]
        command += ["-m", "gpucoll.integrations.horovod", str(path), *arguments]
        variables = {**os.environ, "GPUCOLL_TIMEOUT_S": "20", **(environment or {})}
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run
