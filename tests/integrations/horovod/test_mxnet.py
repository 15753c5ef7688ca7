"""``horovod.mxnet`` in an environment of its own: our checks, and Horovod's own tests."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.integrations.horovod.suite import left_out
from tests.integrations.horovod.suite.running import run

PROGRAMS = Path(__file__).with_name("programs")
LOST = """
import os, signal, sys, time
import mxnet as mx
import horovod.mxnet as hvd
hvd.init()
x = mx.nd.ones((4,))
hvd.allreduce_(x, name="first")
x.wait_to_read()
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    hvd.allreduce_(x, name="second")
    x.wait_to_read()
except mx.base.MXNetError as error:
    print("rank 0 was told after", round(time.monotonic() - begin, 1), "s:", error)
    sys.exit(0 if "rank 1" in str(error) else 1)
"""


UNFINISHED = """
import mxnet as mx
import horovod.mxnet as hvd
hvd.init()
arrays = [mx.nd.ones((1 << 20,)) for _ in range(4)]
for number in range(4) if hvd.rank() else reversed(range(4)):
    hvd.allreduce_(arrays[number], name=f"last.{number}")
"""


@pytest.fixture
def on_two_ranks(mxnet, tmp_path):
    def run_program(program: Path | str) -> subprocess.CompletedProcess[str]:
        if isinstance(program, str):
            (tmp_path / "program.py").write_text(program, "utf-8")
            program = tmp_path / "program.py"
        command = [mxnet.python, "-m", "gpucoll", "run", "--no-prefix", "-n", "2"]
        command += ["-m", "gpucoll.integrations.horovod", str(program)]
        variables = {**os.environ, **mxnet.variables, "GPUCOLL_TIMEOUT_S": "20"}
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=100, check=False
        )

    return run_program


def test_calls_that_horovods_tests_leave_out(on_two_ranks):
    program = PROGRAMS / "mxnet_calls.py"

    done = on_two_ranks(program)

    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"passed (\w+)", done.stdout)
    written = re.findall(r"^def ([a-z]+_\w+)\(\)", program.read_text("utf-8"), re.MULTILINE)
    assert sorted(passed) == sorted(2 * written)


def test_a_lost_rank_is_named(on_two_ranks):
    done = on_two_ranks(LOST)

    assert "rank 0 was told" in done.stdout, done.stdout + done.stderr
    assert "rank 1" in done.stdout


def test_a_program_may_end_before_its_last_calls(on_two_ranks):
    done = on_two_ranks(UNFINISHED)

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_test_mxnet1(mxnet, horovod_source):
    file = horovod_source / "test" / "parallel" / "test_mxnet1.py"

    outcomes = run(file, 2, python=mxnet.python, environment=mxnet.variables)

    assert not outcomes.differences(left_out.MXNET), outcomes.output[-4000:]
    assert outcomes.counts()["passed"] >= 57
