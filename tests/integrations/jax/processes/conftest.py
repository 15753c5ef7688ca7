"""JAX programs on ranks, as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
PROGRAMS = Path(__file__).with_name("programs")
TIMEOUT_S = 120


@pytest.fixture
def run_program(tmp_path: Path) -> Run:
    """Return a function that runs a JAX program over gpucoll: a file of `PROGRAMS`, or its text."""

    def run(
        program: str,
        n_ranks: int,
        *arguments: object,
        environment: dict[str, str] | None = None,
        options: tuple[object, ...] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        path = PROGRAMS / program
        if not program.endswith(".py"):
            path = tmp_path / "program.py"
            path.write_text(program, encoding="utf-8")
        command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "-n", str(n_ranks)]
        command += map(str, (*options, path, *arguments))
        variables = {
            **os.environ,
            "GPUCOLL_JAX": "1",
            "GPUCOLL_TIMEOUT_S": "20",
            "JAX_PLATFORMS": "cpu",
            **(environment or {}),
        }
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    return run
