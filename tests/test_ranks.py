"""The tests' own ranks do what the tests rely on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from gpucoll import progress
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


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def test_a_process_number_is_nobody_elses_until_the_rank_is_let_go(rank_server):
    pool = rank_server.fork(2)
    ended, other = (rank.pid for rank in pool.ranks)
    pool.ranks[0].send(signal.SIGKILL)

    assert pool.exit_code(0) == -signal.SIGKILL
    rank_server.call(os.getpid)
    assert state_of(ended) == "Z"  # the kernel gives its number to nobody
    assert pool.close()[0] == -signal.SIGKILL
    assert pool.close() == pool.close()
    rank_server.call(os.getpid)  # by then it has let go of them
    assert {state_of(ended), state_of(other)}.isdisjoint("Z")
    with pytest.raises(TimeoutError):  # what was known of these numbers is forgotten
        rank_server.exit_code(ended, timeout_s=0)


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


def test_what_takes_long_in_the_server_shows_itself_here(rank_server):
    shown = []
    before = progress.show_by(lambda *text: shown.append(text))
    rank_server.call(progress.show, "compiling", False)
    rank_server.call(progress.say, "compiled")
    progress.show_by(before)
    assert shown == [("compiling", False), ("compiled", True)]
