"""`shrink` where GPUs are connected: those of the ranks that are left connect anew."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from tests.calls.gpu.conftest import in_rank
from tests.calls.gpu.failing import ones
from tests.ranks import Ended

from gpucoll.errors import PeerLostError


def call_until_lost(comm, kit):
    while True:
        comm.all_reduce(ones(kit))
        comm.check()


def lose_and_go_on(rank):
    with rank.init(meet_s=20) as comm:
        comm.all_reduce(ones(rank.kit))
        comm.check()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError):
            call_until_lost(comm, rank.kit)
        made = comm.shrink()
    with made:
        left = rank.control.communicators
        total = made.all_reduce(ones(rank.kit))
        made.check()
        values = rank.kit.read(total)
        return left, rank.control.communicators, made.former_ranks, np.asarray(values).tolist()


def test_the_gpus_connect_anew(rank_server, gpus):
    with rank_server.fork(3) as pool:
        pool.start(
            in_rank, gpus.double, lose_and_go_on, (), gives="seat", environment=gpus.variables
        )
        first, killed, last = pool.collect()

    assert isinstance(killed, Ended)
    for reply in (first, last):
        assert reply.error is None, reply.trace
        assert reply.result == (0, 1, (0, 2), [2.0] * 8)
