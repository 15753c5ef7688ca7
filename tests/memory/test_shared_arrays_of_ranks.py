"""`Communicator.shared_arrays` on real ranks: calls in place, and what becomes of the arrays."""

from __future__ import annotations

import os

import numpy as np
import pytest
from tests.memory.arena_books import holds

from gpucoll.errors import AbortedError, StateError


def reduce_shared_arrays(comm):
    paths = []

    def path_of(x, out):
        total = comm.all_reduce(x, out=out)
        paths.append(comm._backend.last_path().name)
        assert (total == 3.0).all()
        return total

    with comm.shared_arrays():
        x = np.ones(10_000) * (comm.rank + 1)
        result = path_of(x, None)
        path_of(x[100:9000], result[100:9000])
        path_of(x.reshape(100, 100)[3:50], np.zeros((47, 100)))
        twin = comm.duplicate()
    path_of(x, None)  # the result is an ordinary array
    comm.barrier()
    x[...] = comm.rank + 1
    path_of(x, x)
    twin.close()
    return paths


def test_calls_on_shared_arrays_are_symmetric(ranks):
    expected = ["SYMMETRIC"] * 3 + ["STAGED", "SYMMETRIC"]
    assert ranks.call(2, reduce_shared_arrays) == [expected] * 2


def outlive(comm):
    with comm.shared_arrays():
        twin = comm.duplicate()
        x = np.ones(10_000)
        twin.all_reduce(x, out=x)
        twin.close()
        y = x + 1  # the arena stays, and the context with it
        with pytest.raises(StateError, match="is closed"):
            twin.shared_arrays()
    comm.all_reduce(y, out=y)
    symmetric = comm._backend.last_path().name
    used = comm._group.members.arena.used_bytes
    del x, y
    return symmetric, used - comm._group.members.arena.used_bytes >= 160_000, comm.all_reduce(1)


def test_arrays_outlive_their_communicator(ranks):
    assert ranks.call(2, outlive) == [("SYMMETRIC", True, 2)] * 2


def fork_inside(comm):
    """A child writes to the words of its communicators; they must be its own, if made inside."""
    with comm.shared_arrays():
        twin = comm.duplicate()
        assert not holds(comm._group.members.arena, twin._group.context)
        x = np.ones(10_000)
        twin.all_reduce(x)
        child = os.fork()
        if child == 0:
            made = np.ones(10_000)
            os._exit(0 if not holds(comm._group.members.arena, made) else 1)
        status = os.waitpid(child, 0)[1]
        total = twin.all_reduce(x)[0]
        twin.close()
    return status, total


def test_a_child_forked_inside_disturbs_nobody(ranks):
    assert ranks.call(2, fork_inside) == [(0, 2.0)] * 2


def abort_in_the_middle(comm, x):
    for turn in range(100):
        if turn == 3 and comm.rank == 0:
            comm.abort()
        comm.all_reduce(x, out=x, timeout_s=10)


def break_inside(comm):
    with comm.shared_arrays():
        x = np.ones(10_000)
        address = x.ctypes.data
        with pytest.raises(AbortedError):
            abort_in_the_middle(comm, x)
        del x
        return np.ones(10_000).ctypes.data != address


def test_after_a_broken_call_memory_is_not_used_again(ranks):
    assert ranks.call(2, break_inside) == [True] * 2
