"""What tests show of calls beside NCCL holds of direct, too: aborts, Ctrl-C, the end; memory."""

from __future__ import annotations

from typing import Any

import pytest
from tests.calls.gpu.conftest import Rank, in_rank
from tests.calls.gpu.failing import ones
from tests.calls.gpu.test_giving_up import abort_in_the_middle, interrupt, use_from_a_second_thread
from tests.calls.gpu.test_repeated_calls import after_the_end, outlive
from tests.calls.gpu.test_unasked import never_ask
from tests.ranks import Ended
from tests.waiting import SOON_S

from gpucoll import ReduceOp
from gpucoll.errors import ArgumentTypeError

MEMORY_BYTES = 1 << 32
"""What a GPU of the double has."""


class DirectSeat:
    """A rank whose communicators are made with the direct backend."""

    def __init__(self, seat: Any) -> None:
        self._seat = seat
        self.rank, self.world_size = seat.rank, seat.world_size

    def init(self, **options: Any) -> Any:
        return self._seat.init(**{"backend": "direct", "device": self.rank, **options})


def directly(rank, function, *args):
    return function(Rank(DirectSeat(rank.seat), rank.kit, rank.control), *args)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("gpus", ["nccl", "rccl"], indirect=True)
def test_abort(gpus):
    told = gpus.call_ranks(3, directly, abort_in_the_middle)
    assert told == ["told", "aborted", "told"]


def test_ctrl_c_in_a_wait(gpus):
    assert gpus.call_ranks(2, directly, interrupt)[0] < SOON_S


def test_a_second_thread_and_after_close(gpus):
    gpus.call_ranks(2, directly, use_from_a_second_thread)
    assert gpus.call_ranks(2, directly, after_the_end) == [0] * 2


def test_arrays_live_until_their_work_is_done(gpus):
    assert gpus.call_ranks(2, directly, outlive) == [True] * 2


@pytest.mark.soak
def test_a_failure_that_nobody_asks_for(rank_server, gpus):
    assert gpus.call_ranks(2, directly, never_ask, "raise") == ["told"] * 2
    with rank_server.fork(2) as pool:
        arguments = gpus.double, directly, (never_ask, "exit")
        pool.start(in_rank, *arguments, gives="seat", environment=gpus.variables)
        first, second = pool.collect()
        output = pool.output()
    assert isinstance(first, Ended)
    assert first.exit_code == 70
    assert second.result == "told"
    assert "rank 0 of 2 is ended, because a call on GPU arrays failed" in output


# --- memory, operations ---------------------------------------------------------------------------


def reduce_with_little_memory(rank, limit_bytes):
    """Rank 1's GPU has no room for what ranks share, then none for what a call needs."""
    kit, control = rank.kit, rank.control
    if rank.rank == 1:
        control.driver_set("memory", control.count("memory") + limit_bytes)
    try:
        with rank.init(backend="direct", device=rank.rank) as comm:
            x = ones(kit, 1000)
            assert (kit.read(comm.all_reduce(x)) == comm.world_size).all()
            said = comm.describe().facts["GPU path through shared GPU memory"]
            large = ones(kit, 1 << 20)
            if comm.rank == 1:
                with pytest.raises(MemoryError, match="bytes") as caught:
                    comm.all_reduce(large, out=large, compression="int8_block")
                text = str(caught.value)
            else:
                text = ""
            comm.barrier()
            assert (kit.read(comm.all_reduce(x)) == comm.world_size).all()
            comm.check()
            return said, text
    finally:
        if rank.rank == 1:
            control.driver_set("memory", MEMORY_BYTES)


def test_a_gpu_with_little_memory(gpus):
    """Calls go through host memory then; what needs memory on the GPU says how much."""
    (said, _), (other, text) = gpus.call_ranks(2, reduce_with_little_memory, 6 << 20)
    assert said.startswith("none: ")
    assert other.startswith("none: ")
    assert "rank 1" in said
    assert "cuda:1" in text


def reduce_by_what_cannot_be_compiled(rank):
    with rank.init() as comm:
        x = ones(rank.kit, 10)
        comm.all_reduce(x)
        op = ReduceOp.custom(lambda a, b: open(str(a) + str(b)))  # noqa: SIM115
        with pytest.raises(ArgumentTypeError):
            comm.all_reduce(x, op)
        own = ReduceOp.custom(lambda a, b: a + b + a * b)
        total = rank.kit.read(comm.all_reduce(x, own))
        comm.check()
        return total.tolist()


@pytest.mark.soak
def test_an_operation_of_the_users(gpus):
    """Through direct it is the CPU's; what cannot be compiled is refused, and breaks nothing."""
    assert gpus.call_ranks(2, directly, reduce_by_what_cannot_be_compiled) == [[3.0] * 10] * 2
