"""Ranks that find themselves on one CPU stop spinning there, and spin again when they are apart."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gpucoll.topology import usable_cpu_count, usable_cpus
from gpucoll.transport.shared.flags import SHARING_SPINS
from gpucoll.transport.shared.words import Context

pytestmark = pytest.mark.skipif(usable_cpu_count() < 2, reason="needs two CPUs")

CALLS = 2000


def call_until(comm, condition):
    """Make small calls until it holds on all ranks; return whether it came to that."""
    data = np.ones(1, np.float32)
    for _ in range(CALLS):
        for _ in range(10):
            comm.all_reduce(data, "max", out=data)
        if comm.all_reduce(int(condition()), "min"):
            return True
    return False


def meet_on_one_cpu(comm):
    context, cpus = comm._group.context, os.sched_getaffinity(0)
    first, *_, last = sorted(cpus)
    spins = int(context[Context.full_spins])
    found = [spins > SHARING_SPINS]
    try:
        for _ in range(2):
            os.sched_setaffinity(0, {last})
            comm.barrier()
            found.append(call_until(comm, lambda: context[Context.spins] == SHARING_SPINS))
            os.sched_setaffinity(0, {first if comm.rank == 0 else last})
            comm.barrier()
            found.append(call_until(comm, lambda: context[Context.spins] == spins))
            comm.barrier()
    finally:
        os.sched_setaffinity(0, cpus)
    return found


def test_two_ranks_that_meet_on_one_cpu(ranks):
    for found in ranks.call(2, meet_on_one_cpu):
        assert found == [True] * 5


def wait_alone(comm):
    """What the words say of a rank that has its CPU for itself."""
    os.sched_setaffinity(0, {sorted(usable_cpus())[comm.rank]})
    try:
        alone = call_until(comm, lambda: not comm._group.context[Context.sharing])
        words = comm._group.context
        return alone, words[Context.spins] == words[Context.full_spins]
    finally:
        os.sched_setaffinity(0, usable_cpus())


def test_ranks_with_a_cpu_each_spin_as_they_did(ranks):
    assert ranks.call(2, wait_alone) == [(True, True)] * 2


def more_ranks_than_cpus(comm):
    context = comm._group.context
    data = np.ones(1, np.float32)
    for _ in range(100):
        comm.all_reduce(data, "max", out=data)
    return int(context[Context.sharing]), int(context[Context.spins])


def test_ranks_that_share_by_their_number_look_for_nobody(ranks):
    """They spin little from the beginning, and yield before they sleep."""
    for sharing, spins in ranks.call(usable_cpu_count() + 1, more_ranks_than_cpus):
        assert (sharing, spins) == (0, SHARING_SPINS)
