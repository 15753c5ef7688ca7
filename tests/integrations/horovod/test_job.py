"""`init` and `shutdown`: ranks that differ, and ranks that fail alone."""

from __future__ import annotations

import pytest

BEGIN = """
import os
import numpy as np
from gpucoll.integrations.horovod import basics as hvd
from gpucoll.integrations.horovod.engine.numpy_arrays import NumpyArrays
from gpucoll.integrations.horovod.engine.request import Kind, Request
from gpucoll.integrations.horovod.process_sets import ProcessSet

place = int(os.environ["GPUCOLL_RANK"])

def request(name):
    return Request(Kind.ALLREDUCE, name, NumpyArrays(), [np.ones(8)])

def works():
    requests = [request(f"t{n}") for n in range(20)]
    engine = hvd.engine_of(0)
    for each in requests:
        engine._enqueue(each)
    for each in requests:
        engine.wait(each)
    return all(each.results[0].tolist() == [2.0] * 8 for each in requests)
"""

DIFFERENT = """
os.environ[{variable!r}] = {values!r}[place]
hvd.init()
assert works()
hvd.shutdown()
"""

TWICE = """
try:
    hvd.init(process_sets=[ProcessSet([1, 1])])
except ValueError as error:
    assert "duplicate rank: 1" in str(error)
else:
    raise AssertionError("nothing was raised")
hvd.init()
assert works()
"""

COMM = """
for comm in ([0, 0], [0, 7]):
    try:
        hvd.init(comm)
    except ValueError as error:
        assert "each once" in str(error)
    else:
        raise AssertionError("nothing was raised")
hvd.init([1, 0])
assert works()
"""

SETS = """
try:
    hvd.init(process_sets=[ProcessSet([0])] if place else [])
except ValueError as error:
    assert "rank 0: init([]); rank 1: init([[0]])" in str(error)
else:
    raise AssertionError("nothing was raised")
hvd.init(process_sets=[ProcessSet([0])])
assert works()
"""

TIMELINE = """
os.environ["HOROVOD_TIMELINE"] = "/nowhere/timeline.json"
try:
    hvd.init()
except Exception as error:
    assert ("nowhere" if place == 0 else "lost rank 0") in str(error), error
else:
    raise AssertionError("nothing was raised")
assert not hvd.is_initialized()
del os.environ["HOROVOD_TIMELINE"]
hvd.init()
assert works()
"""

LEVEL = """
import logging
os.environ["HOROVOD_LOG_LEVEL"] = "error"
hvd.init()
assert logging.getLogger("gpucoll.horovod").level == logging.ERROR
"""

SETTING = """
if place == 0:
    os.environ["HOROVOD_CYCLE_TIME"] = "fast"
    try:
        hvd.init()
    except ValueError:
        del os.environ["HOROVOD_CYCLE_TIME"]
hvd.init()
assert works()
"""

LOSS = """
import gpucoll
from gpucoll.integrations.horovod.job import Job
found = Job.{step}

def lost(job, *given):
    Job.{step} = found
    os.environ["GPUCOLL_JOIN"] = "of a newcomer"  # which the launcher gives it
    error = gpucoll.PeerLostError("rank 0 was lost while this one entered")
    if "{step}" == "agree":
        from gpucoll.integrations.horovod.exceptions import HorovodInternalError
        raise HorovodInternalError(str(error)) from error
    raise error

Job.{step} = lost
hvd.init()
assert works()
"""


@pytest.mark.parametrize(
    ("variable", "values"),
    [("HOROVOD_FUSION_THRESHOLD", ["100", "1000"]), ("HOROVOD_STALL_CHECK_DISABLE", ["0", "1"])],
)
def test_settings_that_differ_between_ranks(run_program, variable, values):
    program = BEGIN + DIFFERENT.format(variable=variable, values=values)
    done = run_program(program, 2)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", [COMM, SETS, TWICE, TIMELINE, SETTING])
def test_init_that_fails_can_be_repeated(run_program, program):
    """Ranks and process sets that cannot be; a timeline nowhere; a wrong setting."""
    done = run_program(BEGIN + program, 2)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("step", ["_place", "agree"])
def test_a_rank_that_is_lost_while_a_newcomer_enters(run_program, step):
    """The newcomer goes on with those that are left, as all do, instead of ending."""
    done = run_program(BEGIN + LOSS.format(step=step), 2)
    assert done.returncode == 0, done.stderr


def test_log_level(run_program):
    done = run_program(BEGIN + LEVEL, 1)
    assert done.returncode == 0, done.stderr
