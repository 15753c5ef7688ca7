"""Keras on two ranks, on each backend: TensorFlow's in an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).with_name("programs") / "training.py"
DIGITS = ROOT / "examples" / "keras" / "digits.py"
BACKENDS = ("torch", "jax", "tensorflow")
on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture
def on_two_ranks(request):
    """Return a function that runs a program with a backend of Keras, and returns its output."""

    def run(backend: str, program: Path) -> str:
        python, path = sys.executable, str(Path(gpucoll.__file__).parent.parent)
        if backend == "tensorflow":
            environment = request.getfixturevalue("tensorflow")
            python, path = environment.python, environment.variables["PYTHONPATH"]
        else:
            for needed in ("keras", backend):
                if importlib.util.find_spec(needed) is None:
                    pytest.skip(f"{needed} is not installed")
        variables = {
            "GPUCOLL_TIMEOUT_S": "60",
            "KERAS_BACKEND": backend,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        done = subprocess.run(
            [python, "-m", "gpucoll", "run", "--no-prefix", "-n", "2", str(program)],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@on_each_backend
def test_two_ranks_train_as_one_process(on_two_ranks, backend):
    output = on_two_ranks(backend, PROGRAM)

    told = re.findall(r"(?:passed|skipped) (\w+)", output)
    written = re.findall(r"^def ([a-z]+_\w+)\(\)", PROGRAM.read_text("utf-8"), re.MULTILINE)
    assert sorted(told) == sorted(2 * written)


def test_digits_are_learnt(on_two_ranks):
    pytest.importorskip("sklearn", reason="needs scikit-learn's digits")

    output = on_two_ranks("torch", DIGITS)

    assert output.rstrip().endswith("the same losses as one process alone: True")
    accuracy = re.search(r"images: ([\d.]+)% \(torch\)", output)
    assert accuracy is not None
    assert float(accuracy[1]) > 85
