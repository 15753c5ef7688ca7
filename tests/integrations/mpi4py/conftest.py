"""Programs of mpi4py on ranks, as users start them."""

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
TIMEOUT_S = 60


@pytest.fixture(scope="session")
def packages() -> Any:
    """Return the module that fetches packages of others; this folder's name is mpi4py's."""
    return importlib.import_module("tests.integrations.packages")


@pytest.fixture
def run_program(tmp_path: Path) -> Run:
    """Return a function that runs a program: a file, or its text."""

    def run(
        program: Path | str,
        n_ranks: int,
        *arguments: str,
        environment: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        if program == "-m":  # the arguments name a module
            path = Path(program)
        elif isinstance(program, str):
            path = tmp_path / "program.py"
            path.write_text(program, encoding="utf-8")
        else:
            path = program
        command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "-n", str(n_ranks)]
        command += ["-m", "gpucoll.integrations.mpi4py", str(path), *arguments]
        variables = {**os.environ, "GPUCOLL_TIMEOUT_S": "20", **(environment or {})}
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    return run
