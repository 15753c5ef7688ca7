"""Programs that end without `close`, and without having waited for an asynchronous call."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpucoll.backends.precompile import ensure_compiled

PROGRAM_S = 60

START = """
import sys
import gpucoll
import numpy as np

comm = gpucoll.init(timeout_s=30{options})
x = np.ones({shape})
"""
DROPPED = "comm.all_reduce(x, out=x, async_op=True)\n"
IN_A_FUNCTION = """
def train(comm):
    comm.all_reduce(x, out=x, async_op=True)
train(comm)
del comm
"""
DIFFERENT, ALIKE = "3000 + comm.rank", "3000"


@pytest.fixture(scope="module", autouse=True)
def kernels():
    ensure_compiled()


def run(tmp_path, text, shape=DIFFERENT, options=""):
    program = tmp_path / "train.py"
    program.write_text(START.format(shape=shape, options=options) + text)
    command = [sys.executable, "-m", "gpucoll", "run", "-n", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S)
    return done.returncode, done.stdout, done.stderr


SAID = "ended without having waited for an asynchronous call that failed: MismatchError"


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("text", [DROPPED, IN_A_FUNCTION])
def test_a_failure_is_said_and_ends_the_job(tmp_path, text):
    code, _, err = run(tmp_path, text)
    assert code == 1
    assert err.count(SAID) == 2


def test_without_on_async_error_it_is_said_alone(tmp_path):
    code, _, err = run(tmp_path, DROPPED, options=", on_async_error='raise'")
    assert code == 0
    assert err.count(SAID) == 2


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("text", [DROPPED, IN_A_FUNCTION])
def test_what_goes_well_needs_no_word(tmp_path, text):
    assert run(tmp_path, text, ALIKE) == (0, "", "")


def test_a_failure_that_was_seen_is_not_said_again(tmp_path):
    text = "work = " + DROPPED + "try: work.wait()\nexcept gpucoll.MismatchError: pass\n"
    assert run(tmp_path, text) == (0, "", "")


def test_an_exit_code_of_the_programs_stays(tmp_path):
    code, _, err = run(tmp_path, DROPPED + "sys.exit(3)\n", ALIKE)
    assert code == 3
    assert SAID not in err


def test_a_loss_is_said_by_the_lost(tmp_path):
    text = "if comm.rank: raise RuntimeError('the cause')\n" + DROPPED
    code, _, err = run(tmp_path, text, ALIKE)
    assert code == 1
    assert "ended without having waited" not in err
    assert err.splitlines()[-1].startswith("gpucoll-run: ")
