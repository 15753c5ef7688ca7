"""The door of a rank 0 that is stopped: newcomers call at that of the rank 0 that follows."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
from tests.growing import begin, where
from tests.shrinking import LOSSES, results
from tests.waiting import until

import gpucoll
from gpucoll.rendezvous.door_caller import Caller


def stop_and_go_on(seat, folder, comes_before):
    """Rank 0 of 3 stops with its door open; the others let a newcomer in."""
    is_open, has_called, is_shrunk = (Path(folder, name) for name in ("open", "called", "shrunk"))
    if seat.rank == 3:
        until((is_open if comes_before else is_shrunk).exists)
        call = Caller._call

        def call_and_tell(caller):
            call(caller)
            has_called.touch()

        with mock.patch.object(Caller, "_call", call_and_tell):
            comm = gpucoll.join(**where(seat), timeout_s=20)
    else:
        comm = begin(seat, 3, timeout_s=2.0)
        assert comm.grow(**where(seat)) is comm
        if comm.rank == 0:
            is_open.touch()
            if comes_before:
                until(has_called.exists)
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(LOSSES):
            comm.barrier()
        comm = comm.shrink(timeout_s=1)
        is_shrunk.touch()
        comm = comm.grow(**where(seat), wait_s=15)
    with comm:
        return comm.rank, comm.epoch, sorted(comm.all_gather_object(seat.rank))


@pytest.mark.soak(quick=0)
@pytest.mark.parametrize("comes_before", [False, True])
@pytest.mark.parametrize("spans_hosts", [False, True])
def test_a_stopped_rank_0(rank_server, hosts, tmp_path, spans_hosts, comes_before):
    with rank_server.fork(4) as pool:
        arguments = stop_and_go_on, str(tmp_path), comes_before
        if spans_hosts:
            hosts.start(pool, "abca", *arguments, gives="seat")
        else:
            pool.start(*arguments, gives="seat")
        replies = pool.collect(only=[1, 2, 3])
        pool.kill()

    assert results(replies) == [(rank, 2, [1, 2, 3]) for rank in range(3)]
