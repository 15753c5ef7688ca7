"""`gpucoll why` on calls on GPU arrays that do not end; the GPUs are Host devices."""

from __future__ import annotations

import numpy as np
import pytest
from tests.calls.gpu.conftest import with_communicator
from tests.calls.gpu.host_devices import HostDevices, in_rank
from tests.observe.test_why import verdict_of_kind
from tests.waiting import until

CALLED = "all_reduce(op=sum, float32, shape (8,)) (#2)"


@pytest.fixture
def hanging(gpu_ranks, tmp_path):
    """Three ranks with Host devices whose second all_reduce hangs, until the test ends."""
    go, pool = tmp_path / "go", gpu_ranks.pool(3)
    devices = HostDevices()

    def start(kind, *ranks):
        arguments = {"backend": "direct"}, hang, (kind, ranks, go)
        pool.start(in_rank, devices, enter, arguments, gives="seat", environment=devices.variables)
        return [rank.pid for rank in pool.ranks]

    yield start
    go.touch()
    assert pool.results() == [6.0] * 3


def enter(rank, options, function, args):
    return with_communicator(rank, options, function, (rank, *args))


def hang(comm, kit, rank, kind, ranks, go):
    x = kit.seen_as(kit.bytes_of(np.ones(8, np.float32).view(np.uint8)), (8,), "float32")
    kit.write(x, np.full(8, 1 + comm.rank, np.float32))
    comm.all_reduce(x)
    comm.check()
    if kind == "late" and comm.rank in ranks:
        until(go.exists)
    if kind == "held" and comm.rank in ranks:
        with rank.held():
            y = comm.all_reduce(x)
            until(go.exists)
    else:
        y = comm.all_reduce(x)
        until(go.exists)
    return float(kit.read(y)[0])


def test_a_rank_that_has_not_enqueued_the_call(hanging):
    pids = hanging("late", 1)
    found, seen = verdict_of_kind(pids, "waiting", "Ranks 0, 2 have been waiting for ")
    assert found.ranks == (1,)
    assert f" s on the GPU in {CALLED} for rank 1. It is in no call of this " in found.text
    assert f"all_reduce(op=sum, float32, shape (8,)) (#1) on GPU arrays; process {pids[1]} " in (
        found.text
    )
    assert {one.stream for one in seen.ranks} == {None, "in"}


def test_a_stream_with_other_work_before_the_call(hanging):
    pids = hanging("held", 1)
    found, _ = verdict_of_kind(pids, "stream", "Ranks 0, 2 have been waiting for ")
    assert found.ranks == (1,)
    assert f" s on the GPU in {CALLED} for rank 1. It has other work on the stream " in found.text
    assert found.text.endswith(f" s (process {pids[1]}).")


def test_no_stream_advances(hanging):
    pids = hanging("held", 0, 1, 2)
    until(lambda: verdict_of_kind(pids, "stream")[0].ranks == (0, 1, 2))
