"""Deadlines, losses and Ctrl-C in the middle of each kind of collective: no way waits for ever.

The kinds: what goes from all to all, from the root, to the root; small (through slots) and large
(chunk by chunk, or in one copy). Who does not wait (the sender of something small, the first ranks
of a small scan) is told later.
"""

from __future__ import annotations

import os
import re
import signal
import time

import numpy as np
import pytest
from tests.collective_cases import SINGLE_COPY_TUNING, SMALL_TUNING
from tests.faults.test_ends import errors, has_begun
from tests.ranks import Ended
from tests.waiting import SOON_S, is_broken, until

from gpucoll.errors import AbortedError, DeadlineError, PeerLostError

COUNTS = [1, 0, 5, 2]


def numbers(count):
    return np.ones(count * 4, np.float32)


KINDS = {
    "all_gather": lambda comm, n: comm.all_gather(numbers(n)),
    "all_to_all": lambda comm, n: comm.all_to_all(numbers(n)),
    "reduce_scatter": lambda comm, n: comm.reduce_scatter(numbers(n)),
    "scan": lambda comm, n: comm.scan(numbers(n)),
    "exclusive_scan": lambda comm, n: comm.exclusive_scan(numbers(n)),
    "reduce": lambda comm, n: comm.reduce(numbers(n), root=0),
    "gather": lambda comm, n: comm.gather(numbers(n), 0),
    "scatter": lambda comm, n: comm.scatter(numbers(n), 3),
    "broadcast": lambda comm, n: comm.broadcast(numbers(n), 3),
    "counts": lambda comm, n: comm.all_gather(
        np.ones(COUNTS[comm.rank] * n, np.float32), counts=[count * n for count in COUNTS]
    ),
    "auto": lambda comm, n: comm.all_to_all(
        np.ones(sum(COUNTS) * n, np.float32), send_counts=[count * n for count in COUNTS]
    ),
    "asynchronous": lambda comm, n: comm.gather(numbers(n), 0, async_op=True).wait(),
}
SIZES = {"small": 2, "large": 60_000}


def go_on(comm, kind, size):
    """Make the call; who need not wait in it does so in a barrier behind it."""
    KINDS[kind](comm, SIZES[size])
    comm.barrier()


def come_too_late(comm, kind, size):
    if comm.rank == 3:
        until(lambda: is_broken(comm))
    go_on(comm, kind, size)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_names_who_is_missing(ranks, kind, size):
    found = errors(ranks.replies(4, come_too_late, kind, size, timeout_s=0.3))

    assert {type(error) for error in found} == {DeadlineError}, found
    for error in found[:3]:
        assert re.search(r"rank 3 had not (arrived|finished)|ranks \d.*3 had not", str(error))
    assert ranks.call(4, lambda comm: comm.all_reduce(1)) == [4] * 4


def wait_to_be_killed(comm, kind, size):
    if comm.rank == 3:
        until(lambda: has_begun(comm, 0))
        os.kill(os.getpid(), signal.SIGKILL)
    go_on(comm, kind, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["all_to_all", "scan", "gather", "scatter"])
def test_a_killed_rank_is_lost(ranks, kind, size):
    start = time.monotonic()
    replies = ranks.replies(4, wait_to_be_killed, kind, size)

    assert time.monotonic() - start < SOON_S
    assert replies[3] == Ended(-signal.SIGKILL)
    for error in errors(replies[:3]):
        assert isinstance(error, PeerLostError), error
        assert "lost rank 3" in str(error)


def die_among_calls(comm, kind):
    """Rank 3 is killed at some moment of large calls, most likely while data moves."""
    if comm.rank == 3:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whatever it is doing
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    while True:
        KINDS[kind](comm, 300_000)


NEVER = f"single_copy_min_bytes={2**62}"
WAYS = {
    "staged": {"GPUCOLL_CPU_TUNING": f"{SMALL_TUNING['GPUCOLL_CPU_TUNING']},{NEVER}"},
    "copied": SINGLE_COPY_TUNING,
}


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "reduce_scatter", "scan", "gather"])
def test_a_rank_killed_while_data_moves(ranks, kind, way):
    replies = ranks.replies(4, die_among_calls, kind, environment=WAYS[way])

    assert replies[3] == Ended(-signal.SIGALRM)
    for error in errors(replies[:3]):
        assert isinstance(error, PeerLostError), error
        assert "lost rank 3" in str(error)


def interrupt_rank_0(comm, kind, size, pids):
    """Rank 0 waits for rank 3, which sends rank 0 the signal of Ctrl-C there."""
    # Rank 0 of a small exclusive_scan waits for nobody: it waits in the barrier.
    ahead = 2 if (kind, size) == ("exclusive_scan", "small") else 1
    if comm.rank == 3:
        until(lambda: has_begun(comm, 0, ahead))
        os.kill(pids[0], signal.SIGINT)
        until(lambda: is_broken(comm))
    go_on(comm, kind, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["all_to_all", "exclusive_scan", "gather", "scatter"])
def test_ctrl_c_in_a_wait(ranks, kind, size):
    pids = [rank.pid for rank in ranks.pool(4).ranks]
    start = time.monotonic()
    found = errors(ranks.replies(4, interrupt_rank_0, kind, size, pids))

    assert time.monotonic() - start < SOON_S
    assert isinstance(found[0], KeyboardInterrupt)
    for error in found[1:]:
        assert isinstance(error, AbortedError)
        assert "rank 0 was interrupted in" in str(error)
