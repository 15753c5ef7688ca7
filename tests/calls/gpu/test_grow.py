"""`grow` where GPUs are connected: those of all ranks connect anew, newcomers' too."""

from __future__ import annotations

import os

import numpy as np
from tests.calls.gpu.conftest import in_rank
from tests.calls.gpu.failing import ones

import gpucoll
from gpucoll import config


def grow_and_go_on(rank):
    os.environ[config.JOB] = rank.seat.token
    if rank.seat.rank == 2:
        comm = gpucoll.join(timeout_s=20)
    else:
        comm = gpucoll.init(rank=rank.seat.rank, world_size=2, timeout_s=20, name="old")
        comm.all_reduce(ones(rank.kit))
        comm.check()
        comm = comm.grow(wait_s=20)
    with comm:
        left = rank.control.communicators
        total = comm.all_reduce(ones(rank.kit))
        comm.check()
        values = rank.kit.read(total)
        return left, rank.control.communicators, np.asarray(values).tolist()


def test_the_gpus_connect_anew(rank_server, gpus):
    with rank_server.fork(3) as pool:
        pool.start(
            in_rank, gpus.double, grow_and_go_on, (), gives="seat", environment=gpus.variables
        )
        replies = pool.collect()

    for reply in replies:
        assert reply.error is None, reply.trace
        assert reply.result == (0, 1, [3.0] * 8)
