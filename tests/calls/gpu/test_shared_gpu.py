"""Two ranks on one GPU, which NCCL allows from 2.30 on, as an experiment of its own.

Ranks are processes of their own that are killed when a call takes too long, so an attempt that
hangs ends as a failure. Everything else in this folder has one rank on a real GPU.
"""

from __future__ import annotations

import functools
import os
import signal
import time

import numpy as np
import pytest
from tests.calls.gpu.cases import run_cases
from tests.calls.gpu.conftest import Gpus, in_rank, skip_without_gpu
from tests.calls.gpu.test_collectives import cases_of
from tests.calls.gpu.test_messages import grouped, in_order, lists, mixed, pass_around
from tests.collective_cases import MOVEMENTS, REDUCTIONS
from tests.ranks import Ended, Reply
from tests.waiting import SOON_S, is_broken, until

from gpucoll.backends.choice import SHARING_VERSION, spelled
from gpucoll.errors import DeadlineError, MismatchError, PeerLostError

SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "8",  # the kernels of both ranks have to fit on the GPU at once
    "NCCL_NVLS_ENABLE": "0",
}

in_shared = functools.partial(in_rank, settings={"version": 23007}, number=0)


class SharedGpu(Gpus):
    """One GPU of which every rank has a part."""

    def world(self, world_size: int) -> int:
        return world_size

    @property
    def variables(self) -> dict[str, str]:
        return {**super().variables, **SHARING}


def version(comm, kit):
    comm.all_reduce(kit.bytes_of(np.ones(4, np.uint8)))
    return tuple(comm._gpu._connected.backend.library.version)


@pytest.fixture(params=["nccl", pytest.param("cupy", marks=pytest.mark.gpu)])
def shared(request, ranks_of_this_file, doubles):
    """Ranks on one GPU, the double's or a real one; skips where the library refuses them.

    They are of this file alone: NCCL is told once in a process to share a GPU.
    """
    if request.param == "nccl":
        return SharedGpu(ranks_of_this_file, doubles.double("nccl"), in_shared)
    skip_without_gpu("cupy")
    made = SharedGpu(ranks_of_this_file, "cupy", in_shared)
    (found,) = made.call(1, version)
    if found < SHARING_VERSION:
        pytest.skip(
            f"NCCL {spelled(found)} refuses two ranks on one GPU; {spelled(SHARING_VERSION)} and "
            "newer can be told to take them"
        )
    return made


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("name", [*REDUCTIONS, *MOVEMENTS])
def test_drawn_cases(shared, name):
    cases = cases_of(name, 2, 2)
    assert shared.call(2, run_cases, cases) == [len(cases)] * 2


@pytest.mark.parametrize("function", [pass_around, in_order, grouped, lists, mixed])
def test_messages_groups_and_lists(shared, function):
    shared.call(2, function)


def ones(kit, count):
    return kit.seen_as(kit.bytes_of(np.ones(count, np.float32).view(np.uint8)), (count,), "float32")


def end(rank, way):
    """Have rank 1 make another call, none, or die; return how rank 0 hears of it."""
    with rank.init() as comm:
        comm.all_reduce(ones(rank.kit, 8))
        comm.check()
        begun_s = time.monotonic()
        if rank.rank == 1:
            if way == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "is late":
                until(lambda: is_broken(comm))
                comm.check()
        count = 9 if rank.rank else 8
        comm.all_reduce(ones(rank.kit, count), timeout_s=0.5 if way == "is late" else 20)
        try:
            comm.check()
        finally:
            assert time.monotonic() - begun_s < SOON_S


@pytest.mark.parametrize(
    ("way", "error"),
    [("differs", MismatchError), ("is late", DeadlineError), ("dies", PeerLostError)],
)
def test_what_ends_a_call(shared, way, error):
    first, second = shared.replies(2, end, way)
    assert isinstance(first, Reply)
    assert isinstance(first.error, error), first
    assert isinstance(second, Ended if way == "dies" else Reply)
