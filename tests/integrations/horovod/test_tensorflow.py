"""``horovod.tensorflow`` and ``horovod.keras``, in an environment of their own."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.integrations.horovod.suite import left_out
from tests.integrations.horovod.suite.running import run

PROGRAMS = Path(__file__).with_name("programs")
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}
KERAS_2 = {"TF_USE_LEGACY_KERAS": "1"}
LOST = """
import os, signal, sys, time
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
how = tf.function(hvd.allreduce) if sys.argv[1] == "graph" else hvd.allreduce
x = tf.ones([4])
how(x)
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    how(x)
except tf.errors.UnknownError as error:
    print("rank 0 was told after", round(time.monotonic() - begin, 1), "s:", error.message)
"""


@pytest.fixture
def on_ranks(tensorflow, tmp_path):
    def run_program(
        program: Path | str, *arguments: str, ranks: Sequence[str] = ("-n", "2"), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        if isinstance(program, str):
            (tmp_path / "program.py").write_text(program, "utf-8")
            program = tmp_path / "program.py"
        command = [tensorflow.python, "-m", "gpucoll", "run", "--no-prefix", *ranks]
        command += ["-m", "gpucoll.integrations.horovod", str(program), *arguments]
        environment = {**os.environ, **tensorflow.variables, **QUIET, "GPUCOLL_TIMEOUT_S": "20"}
        return subprocess.run(
            command,
            env=environment | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run_program


@pytest.mark.parametrize(
    ("name", "n_ranks", "variables"),
    [
        ("tensorflow_ops", 1, {}),
        ("tensorflow_calls", 2, {}),
        ("keras_training", 2, {}),
        ("keras_training", 2, KERAS_2),
    ],
    ids=["ops", "calls", "keras 3", "keras 2"],
)
def test_what_horovods_tests_leave_out(name, n_ranks, variables, on_ranks):
    program = PROGRAMS / f"{name}.py"

    done = on_ranks(program, ranks=["-n", str(n_ranks)], **variables)

    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"passed (\w+)", done.stdout)
    written = re.findall(r"^def (\w+_\w+)\(\):", program.read_text("utf-8"), re.MULTILINE)
    assert sorted(passed) == sorted(n_ranks * written)


@pytest.mark.parametrize("how", ["graph", "eager"])
def test_a_lost_rank_is_named(how, on_ranks):
    done = on_ranks(LOST, how)

    assert "rank 0 was told" in done.stdout, done.stdout + done.stderr
    assert "rank 1" in done.stdout


def test_elastic_training_goes_on_without_a_rank(on_ranks):
    ranks = ["--elastic", "2:3", "--restarts", "0"]

    done = on_ranks(PROGRAMS / "elastic_tensorflow.py", ranks=ranks)

    expected = f"trained by {[3] * 5 + [2] * 25}"
    assert done.stdout.count(expected) == 2, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["tensorflow2_keras_mnist", "tensorflow2_mnist"])
def test_examples_of_horovod_run_unchanged(name, on_ranks, horovod_source):
    example = horovod_source / "examples" / "tensorflow2" / f"{name}.py"

    done = on_ranks(PROGRAMS / "digits_example.py", str(example), **KERAS_2)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "loss" in done.stdout.lower()


@pytest.mark.parametrize(
    ("file", "n_passed"),
    [
        ("test_tensorflow", 143),
        ("test_tensorflow_process_sets", 28),
        ("test_tensorflow_process_sets_dynamic", 1),
        ("test_tensorflow2_keras", 13),
        ("test_tensorflow2_keras_process_sets", 1),
    ],
)
def test_horovods_own(file, n_passed, tensorflow, horovod_source):
    path = horovod_source / "test" / "parallel" / f"{file}.py"
    environment = {**tensorflow.variables, **QUIET, **KERAS_2}

    outcomes = run(path, 2, python=tensorflow.python, environment=environment, timeout_s=500)

    assert not outcomes.differences(left_out.TENSORFLOW.get(file, {})), outcomes.output[-4000:]
    assert outcomes.counts()["passed"] >= n_passed
