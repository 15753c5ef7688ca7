"""Memory that all ranks of a host share."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gpucoll import SharedMemoryError
from gpucoll.api.host_memory import HostMemory

SIZE = 1 << 16


def seen_by_all(comm):
    memory = HostMemory(comm, SIZE, "test")
    mine = memory.array(8 * comm.rank, (1,), np.int64)
    mine[0] = comm.rank + 1
    comm.barrier()
    seen = memory.array(0, (comm.world_size,), np.int64).tolist()
    comm.barrier()
    again = memory.kept_for(comm)
    memory.close()
    memory.close()
    kept = again.array(0, (comm.world_size,), np.int64).tolist()
    facts = again.is_new, memory.ranks, seen, kept
    again.close()
    return facts


def test_one_host(ranks):
    for is_new, there, seen, kept in ranks.call(3, seen_by_all):
        assert (is_new, there, seen, kept) == (False, [0, 1, 2], [1, 2, 3], [1, 2, 3])


def test_hosts_have_memory_of_their_own(hosts):
    results = hosts.call("aba", seen_by_all)
    assert [there for _, there, _, _ in results] == [[0, 2], [1], [0, 2]]
    assert [seen for _, _, seen, _ in results] == [[1, 0, 3], [0, 2, 0], [1, 0, 3]]


@pytest.mark.ranks(2)
def test_all_ranks_learn_that_one_cannot_have_it(comm, monkeypatch):
    def refuses(*given, **named):
        raise OSError(1, "not here")

    if comm.rank == 1:
        monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(SharedMemoryError, match=r"rank 1 of 2 has no memory for test: .*not here"):
        HostMemory(comm, SIZE, "test")
    monkeypatch.undo()
    comm.barrier()


@pytest.mark.ranks(2)
def test_nothing_is_left(comm):
    before = len(os.listdir("/proc/self/fd"))
    HostMemory(comm, SIZE, "test").close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.ranks(1)
@pytest.mark.parametrize("call", [1, 2, 3])
def test_nothing_is_left_of_one_that_was_interrupted(comm, monkeypatch, call):
    before, calls = len(os.listdir("/proc/self/fd")), iter(range(1, 9))
    gather = comm.all_gather_object

    def interrupted(given):
        if next(calls) == call:
            raise KeyboardInterrupt
        return gather(given)

    monkeypatch.setattr(comm, "all_gather_object", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HostMemory(comm, SIZE, "interrupted")
    assert len(os.listdir("/proc/self/fd")) == before
    with open("/proc/self/maps") as file:
        assert "gpucoll-interrupted" not in file.read()


@pytest.mark.ranks(1)
def test_a_size_beyond_all_addresses(comm):
    with pytest.raises(SharedMemoryError, match="rank 0 of 1 has no memory for test"):
        HostMemory(comm, 1 << 70, "test")
