"""``timeout_s=`` of calls that compiled entries serve."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tests.waiting import is_broken, until

from gpucoll.errors import DeadlineError, MismatchError
from gpucoll.transport.shared.words import Context

CALLS = {
    "all_reduce": lambda comm, **how: comm.all_reduce(np.ones(4), **how),
    "reduce": lambda comm, **how: comm.reduce(np.ones(4), **how),
    "reduce_scatter": lambda comm, **how: comm.reduce_scatter(np.ones(4), **how),
    "scan": lambda comm, **how: comm.scan(np.ones(4), **how),
    "exclusive_scan": lambda comm, **how: comm.exclusive_scan(np.ones(4), **how),
    "broadcast": lambda comm, **how: comm.broadcast(np.ones(4), **how),
    "all_gather": lambda comm, **how: comm.all_gather(np.ones(4), **how),
    "gather": lambda comm, **how: comm.gather(np.ones(4), **how),
    "scatter": lambda comm, **how: comm.scatter(np.ones(4), **how),
    "all_to_all": lambda comm, **how: comm.all_to_all(np.ones(4), **how),
    "list": lambda comm, **how: comm.all_reduce([np.ones(4), np.ones(3)], **how)[0],
}


def only_quick(comm):
    """Forbid calls to go through Python."""

    def refuse(*_, **__):
        raise AssertionError("the compiled entry did not serve this call")

    comm._call = refuse


def deadline(comm):
    return [int(comm._group.context[field]) for field in (Context.timeout_ns, Context.slice_ns)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ranks(2)
def test_calls_with_a_deadline_are_quick(comm, name):
    expected, usual = CALLS[name](comm), deadline(comm)
    only_quick(comm)
    for timeout_s in (None, 7, 7.5, 1e6):
        if name == "scatter" and comm.rank == 1:  # a template goes through Python
            continue
        assert np.array_equal(CALLS[name](comm, timeout_s=timeout_s), expected)
        assert deadline(comm) == usual


def come_too_late(comm, name, timeout_s):
    """Rank 1 comes when the others have given up; return what is said, how long it took."""
    CALLS[name](comm, timeout_s=10.0)
    CALLS[name](comm, timeout_s=10.0)
    usual = deadline(comm)
    comm.barrier()
    only_quick(comm)
    if comm.rank == 1:
        until(lambda: is_broken(comm))
    start = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        CALLS[name](comm, timeout_s=timeout_s)
    return str(caught.value), time.monotonic() - start, deadline(comm) == usual


@pytest.mark.parametrize("timeout_s", [0.25, 1e-6, 1])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "list"])
def test_the_deadline_is_the_call_s_own(ranks, name, timeout_s):
    said, took_s, is_usual = zip(*ranks.call(3, come_too_late, name, timeout_s), strict=True)

    if timeout_s > 0.01:  # or the others have not arrived either
        assert all("rank 1 had not arrived" in said[rank] for rank in (0, 2))
        assert any(f"waited {timeout_s:g} s" in each for each in said)
    assert max(took_s) < 10
    assert all(is_usual)


@pytest.mark.parametrize("wrong", [0, -1, -0.5, float("nan"), float("inf"), 1e7, 10**400, "1", 1j])
@pytest.mark.ranks(2)
def test_what_is_no_deadline(comm, wrong):
    x, usual = np.ones(3), deadline(comm)
    comm.all_reduce(x)
    with pytest.raises((ValueError, TypeError), match="timeout_s"):
        comm.all_reduce(x, timeout_s=wrong)
    assert deadline(comm) == usual
    assert comm.all_reduce(x, timeout_s=np.float64(3)).tolist() == [2.0] * 3
    assert comm.all_reduce(x, timeout_s=True).tolist() == [2.0] * 3


@pytest.mark.ranks(2)
def test_the_usual_deadline_comes_back_after_an_error(comm):
    usual = deadline(comm)
    for count in (3, 4):
        comm.all_reduce(np.ones(count, np.float32))
    with pytest.raises(MismatchError):
        comm.all_reduce(np.ones(3 + comm.rank, np.float32), timeout_s=9.0)
    assert deadline(comm) == usual
    assert comm.all_reduce(np.ones(3, np.float32), timeout_s=9.0).tolist() == [2.0] * 3
