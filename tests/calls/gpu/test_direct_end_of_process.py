"""Forked children, and processes that end, while calls of the direct backend are under way."""

from __future__ import annotations

import gc
import os
import time

import pytest
from tests.calls.gpu.failing import ones
from tests.calls.gpu.host_devices import HostDevices, gpus_of_host_devices, in_rank
from tests.ranks import Ended
from tests.waiting import SOON_S

from gpucoll.errors import GpucollError


def fork_with_calls_pending(comm, kit):
    """The child gets an error, drops the communicator and ends; the parents go on."""
    x = ones(kit, 1000)
    comm.all_reduce(x)
    comm.check()
    work = comm.all_reduce(x, async_op=True)
    child = os.fork()
    if not child:
        try:
            comm.all_reduce(x)
        except GpucollError as error:
            del comm, work
            gc.collect()
            os._exit(7 if "fork" in str(error) else 8)
        finally:
            os._exit(9)
    begun_s = time.monotonic()
    _, status = os.waitpid(child, 0)
    assert time.monotonic() - begun_s < SOON_S
    assert os.waitstatus_to_exitcode(status) == 7
    assert kit.read(work.wait()).tolist() == [comm.world_size] * 1000
    assert kit.read(comm.all_reduce(x)).tolist() == [comm.world_size] * 1000
    comm.check()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_touches_nobody(gpu_ranks):
    gpus_of_host_devices(gpu_ranks).call(2, fork_with_calls_pending, backend="direct")


def end_with_a_call_pending(rank):
    comm = rank.init(backend="direct", timeout_s=20)
    comm.all_reduce(ones(rank.kit))
    comm.check()
    if rank.rank == 0:
        comm.all_reduce(ones(rank.kit, 1000))  # which rank 1 never makes
        raise SystemExit(5)
    begun_s = time.monotonic()
    with pytest.raises(GpucollError):  # noqa: PT012
        while True:
            comm.recv(ones(rank.kit), 0)
            comm.check()
    return time.monotonic() - begun_s


def test_an_interpreter_that_ends_with_a_call_pending(rank_server):
    devices = HostDevices()
    with rank_server.fork(2) as pool:
        arguments = devices, end_with_a_call_pending, ()
        pool.start(in_rank, *arguments, gives="seat", environment=devices.variables)
        ended, told = pool.collect(30)
    assert isinstance(ended, Ended)
    assert told.error is None, told.trace
    assert told.result < SOON_S
