"""What a deadline, a hang and an error of oneCCL become, over a double of it with one rank."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from tests.backends.oneccl.conftest import variables_of
from tests.backends.oneccl.test_real import array, close
from tests.calls.gpu.host_devices import HostDevices, _HostGpus, in_rank
from tests.doubles import run_python

from gpucoll.backends.oneccl import communicator, thread
from gpucoll.config import environment
from gpucoll.errors import BackendError, BackendUnavailableError, DeadlineError


@pytest.fixture
def oneccl(oneccl_ranks, doubles):
    variables = variables_of(doubles.oneccl(), doubles.oneccl().parent)
    return _HostGpus(oneccl_ranks, HostDevices(variables=variables), in_rank)


def use_it(comm, kit):
    x = array(kit, np.arange(5.0))
    seen = [kit.read(comm.all_reduce(x)).tolist(), kit.read(comm.all_reduce(x, op="avg")).tolist()]
    with comm.group():
        first, second = comm.all_reduce(x), comm.broadcast(x, root=0)
    facts = comm.describe().facts
    return [*seen, kit.read(first).tolist(), kit.read(second).tolist()], facts


def test_it_works(oneccl):
    ((seen, facts),) = oneccl.call(1, use_it, backend="oneccl")
    assert seen == [np.arange(5.0).tolist()] * 4
    assert facts["GPU arrays"] == "backend oneccl: asked for"
    assert "never been executed on an Intel GPU" in facts["note"]
    assert "stay until the process ends" in facts["GPU: a deadline"]
    assert facts["emulated by sends and receives"] == "Gather"


def hang_in_init(rank):
    begun_s = time.monotonic()
    late = pytest.raises(DeadlineError, match=r"waited 0\.5 s in connecting the GPUs")
    with environment({"ONECCL_DOUBLE": "hang=onecclCommInitRank"}), late:
        rank.init(backend="oneccl", timeout_s=0.5)
    return time.monotonic() - begun_s


def test_hanging_while_it_connects(oneccl):
    (took_s,) = oneccl.call_ranks(1, hang_in_init)
    assert took_s < 15


def hang_in_a_call(rank):
    comm, kit = rank.init(backend="oneccl", timeout_s=20.0), rank.kit
    x, before = array(kit, np.arange(5.0)), len(communicator._left)
    with environment({"ONECCL_DOUBLE": "hang=onecclAllReduce"}):
        work = comm.all_reduce(x, out=x, async_op=True, timeout_s=0.5)
        with pytest.raises(DeadlineError, match=r"waited 0\.5 s in all_reduce"):
            work.synchronize()
    with pytest.raises(DeadlineError):
        comm.all_reduce(x)
    close(comm)
    assert len(communicator._left) == before + 1  # the array that the call may still write
    del work, x
    gc.collect()
    with rank.init(backend="oneccl") as comm:
        return kit.read(comm.all_reduce(array(kit, np.ones(3)))).tolist()


def test_hanging_in_a_call(oneccl):
    assert oneccl.call_ranks(1, hang_in_a_call) == [[1.0] * 3]


def hang_in_close(rank, function):
    comm, kit = rank.init(backend="oneccl", timeout_s=20.0), rank.kit
    kit.read(comm.all_reduce(array(kit, np.ones(3))))
    begun_s = time.monotonic()
    with environment({"ONECCL_DOUBLE": f"hang={function}"}):
        comm.close()
    return time.monotonic() - begun_s


@pytest.mark.soak
@pytest.mark.parametrize("function", ["onecclCommFinalize", "onecclCommDestroy"])
def test_hanging_in_close(oneccl, function):
    (took_s,) = oneccl.call_ranks(1, hang_in_close, function)
    assert 4 < took_s < 15


def crowd(rank):
    """More calls than there are words for streams, on two streams and in groups of both."""
    kit = rank.kit
    n_words, thread._N_WORDS = thread._N_WORDS, 4
    try:
        with rank.init(backend="oneccl", timeout_s=20.0) as comm:
            x = array(kit, np.arange(5.0))
            out = [array(kit, np.zeros(5)) for _ in range(60)]
            first, second = kit.stream(), kit.stream()
            kit.read(x)  # it was written on the current stream
            for place in range(0, 60, 3):
                comm.all_reduce(x, out=out[place], stream=first)
                with comm.group():
                    comm.all_reduce(x, out=out[place + 1], stream=first)
                    comm.all_reduce(x, out=out[place + 2], stream=second)
            comm.check()
            first.synchronize()
            second.synchronize()
            return [kit.read(each).tolist() for each in out]
    finally:
        thread._N_WORDS = n_words


def test_many_calls_on_several_streams(oneccl):
    assert oneccl.call_ranks(1, crowd) == [[np.arange(5.0).tolist()] * 60]


def fail_in_init(rank):
    with environment({"ONECCL_DOUBLE": "fail=onecclCommInitRank"}):
        text = r"onecclCommInitRank: Unknown error code: as a test wants it \(code 11 of oneCCL"
        with pytest.raises(BackendUnavailableError, match=text) as caught:
            rank.init(backend="oneccl")
    assert "dpctl" not in str(caught.value)  # Host devices need none


def test_failing_while_it_connects(oneccl):
    oneccl.call_ranks(1, fail_in_init)


def fail_in_a_call(rank):
    comm, kit = rank.init(backend="oneccl", timeout_s=20.0), rank.kit
    x = array(kit, np.ones(3))
    with environment({"ONECCL_DOUBLE": "fail=onecclAllReduce"}):
        comm.all_reduce(x)
        text = r"onecclAllReduce: Unknown error code: as a test wants it \(code 11 of oneCCL"
        with pytest.raises(BackendError, match=text):
            comm.check()
    close(comm)


def test_failing_in_a_call(oneccl):
    oneccl.call_ranks(1, fail_in_a_call)


ENDS = """
import numpy as np
import gpucoll
from gpucoll.errors import DeadlineError
from gpucoll.testing import device_arrays as da
comm = gpucoll.init(backend="oneccl", timeout_s=0.5)
import os
os.environ["ONECCL_DOUBLE"] = "hang=onecclAllReduce"
comm.all_reduce(da.asarray(np.ones(4)))
try:
    comm.check()
except DeadlineError as error:
    print("late")
"""


def test_a_process_whose_call_hangs_ends(doubles):
    library = doubles.oneccl()
    given = {**variables_of(library, library.parent), "GPUCOLL_RANK": "0"}
    assert run_python(ENDS, **given, GPUCOLL_WORLD_SIZE="1") == "late\n"
