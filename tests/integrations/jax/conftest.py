"""Programs on ranks with JAX, as users start them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")
Run = Callable[..., str]


@pytest.fixture
def run_ranks():
    """Return a function that runs a program on ranks and returns what it prints."""
    if importlib.util.find_spec("jax") is None:  # not imported: that takes a second
        pytest.skip("JAX is not installed")

    def run_ranks(n_ranks, *arguments, environment=None, timeout_s=120):
        command = [sys.executable, "-m", "gpucoll", "run", "--no-prefix", "-n", str(n_ranks)]
        done = subprocess.run(
            [*command, *map(str, arguments)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not done.returncode, done.stdout[-6000:]
        return done.stdout

    return run_ranks
