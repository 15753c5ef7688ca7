"""Collectives as ops of TensorFlow, in an environment that has it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")
LOST = """
import os, signal, time
import tensorflow as tf
import gpucoll, gpucoll.integrations.tensorflow as gct
comm = gpucoll.init()
x = tf.ones([4])
gct.all_reduce(x)
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
for how in gct.all_reduce, tf.function(gct.all_reduce):
    try:
        how(x)
    except tf.errors.AbortedError as error:
        print("told after", round(time.monotonic() - begin, 1), "s:", error.message)
"""


@pytest.fixture
def on_ranks(tensorflow, tmp_path):
    def run(program: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
        if isinstance(program, str):
            (tmp_path / "program.py").write_text(program, "utf-8")
            program = tmp_path / "program.py"
        command = [tensorflow.python, "-m", "gpucoll", "run", "--no-prefix", "-n", "2"]
        variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "GPUCOLL_TIMEOUT_S": "20"}
        return subprocess.run(
            [*command, str(program), *arguments],
            env=os.environ | tensorflow.variables | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,  # the first run may compile the CPU kernels
            check=False,
        )

    return run


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("collectives", ["eager", "function", "compiled"]), ("calls", [])],
    ids=["collectives", "calls"],
)
def test_what_the_ops_do(name, arguments, on_ranks):
    program = PROGRAMS / f"{name}.py"

    done = on_ranks(program, *arguments)

    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"passed (\w+)", done.stdout)
    written = re.findall(r"^def (test_\w+)\(", program.read_text("utf-8"), re.MULTILINE)
    assert sorted(passed) == sorted(2 * max(len(arguments), 1) * written)


def test_a_lost_rank_is_named(on_ranks):
    done = on_ranks(LOST)

    assert done.stdout.count("told after") == 2, done.stdout + done.stderr
    assert done.stdout.count("lost rank 1") == 2
