"""The tests' own ranks do what the tests rely on."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.ranks import Ended, Reply


def whoami(comm):
    return comm.rank, comm.world_size, os.getpid()


def test_ranks_are_numbered_and_reused(ranks):
    first, second = (ranks.call(3, whoami) for _ in range(2))

    assert [item[:2] for item in first] == [(0, 3), (1, 3), (2, 3)]
    assert first == second


def test_the_first_cause_is_raised_and_the_ranks_go_on(ranks):
    def fail_on_one(comm):
        if comm.rank == 1:
            raise KeyError("this one")
        comm.barrier()

    with pytest.raises(KeyError, match="this one"):
        ranks.call(3, fail_on_one)
    assert ranks.call(3, lambda comm: comm.all_reduce(comm.rank)) == [3, 3, 3]


def test_an_ended_rank_is_reported_and_replaced(ranks):
    def end_one(comm):
        if comm.rank == 0:
            raise SystemExit(7)
        return comm.rank

    before = ranks.call(2, whoami)
    replies = ranks.replies(2, end_one)

    assert replies == [Ended(7), Reply(1)]
    after = ranks.call(2, whoami)
    assert {item[2] for item in before}.isdisjoint(item[2] for item in after)


def test_the_environment_holds_for_the_call_only(ranks):
    def read(comm):
        return os.environ.get("GPUCOLL_CPU_TUNING"), str(comm.describe())

    changed = ranks.call(2, read, environment={"GPUCOLL_CPU_TUNING": "chunk_bytes=4096"})
    plain = ranks.call(2, read)

    assert all(text == "chunk_bytes=4096" and "chunks of 4096" in table for text, table in changed)
    assert all(text is None and "chunks of 4096" not in table for text, table in plain)


def test_arrays_travel(ranks):
    sums = ranks.call(2, lambda comm, x: comm.all_reduce(x + comm.rank), np.arange(3))

    assert all(np.array_equal(total, [1, 3, 5]) for total in sums)
