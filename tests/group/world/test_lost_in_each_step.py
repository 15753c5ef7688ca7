"""A leader that is lost in the middle of each step of each schedule, while large arrays move."""

from __future__ import annotations

import os
import signal
import socket
import struct
from unittest import mock

import numpy as np
import pytest
from tests.ranks import Ended, Reply

from gpucoll.algorithms import choice
from gpucoll.algorithms.table import named
from gpucoll.collectives import Collective
from gpucoll.errors import DeadlineError, PeerLostError

PLACED, VICTIM = "abcd", 2
COUNT = 80_000
"""Elements of each block: all go by schedules."""
TIMEOUT_S = 20.0


@pytest.fixture
def hosts(hosts_with_schedules):
    """Hosts between which all but small calls go by schedules."""
    return hosts_with_schedules


def expected_sum(count):
    return 4 * (np.arange(count) % 100) + 6


def values(count, rank):
    return (np.arange(count) % 100 + rank).astype(np.int32)


def all_reduce(comm):
    return (comm.all_reduce(values(COUNT, comm.rank)) == expected_sum(COUNT)).all()


def reduce(comm):
    found = comm.reduce(values(COUNT, comm.rank), root=1)
    return found is None or (found == expected_sum(COUNT)).all()


def reduce_scatter(comm):
    found = comm.reduce_scatter(values(4 * COUNT, comm.rank))
    first = comm.rank * COUNT
    return (found == expected_sum(4 * COUNT)[first : first + COUNT]).all()


def broadcast(comm):
    return (comm.broadcast(values(COUNT, comm.rank), root=1) == values(COUNT, 1)).all()


def all_gather(comm):
    found = comm.all_gather(values(COUNT, comm.rank))
    return all((found[r * COUNT : (r + 1) * COUNT] == values(COUNT, r)).all() for r in range(4))


def gather(comm):
    found = comm.gather(values(COUNT, comm.rank), root=1)
    if found is None:
        return True
    parts = found.reshape(4, COUNT)
    return all((parts[r] == values(COUNT, r)).all() for r in range(4))


def scatter(comm):
    whole = values(4 * COUNT, 1) if comm.rank == 1 else None
    out = np.empty(COUNT, np.int32)
    comm.scatter(whole, out=out, root=1)
    return (out == values(4 * COUNT, 1)[comm.rank * COUNT : (comm.rank + 1) * COUNT]).all()


def all_to_all(comm):
    found = comm.all_to_all(values(4 * COUNT, comm.rank))
    mine = slice(comm.rank * COUNT, (comm.rank + 1) * COUNT)
    whole = [values(4 * COUNT, r)[mine] for r in range(4)]
    return all((found[r * COUNT : (r + 1) * COUNT] == whole[r]).all() for r in range(4))


def exclusive_scan(comm):
    found = comm.exclusive_scan(values(COUNT, comm.rank))
    before = sum((values(COUNT, rank) for rank in range(comm.rank)), np.zeros(COUNT, np.int32))
    return (found == before).all()


CALLS = {
    Collective.ALL_REDUCE: (all_reduce, "ring", "recursive_doubling", "halving_doubling", "chain"),
    Collective.REDUCE: (reduce, "binomial_tree", "chain", "chain_in_sequence"),
    Collective.REDUCE_SCATTER: (reduce_scatter, "ring", "recursive_doubling", "pairwise", "chain"),
    Collective.BROADCAST: (broadcast, "binomial_tree", "chain"),
    Collective.ALL_GATHER: (all_gather, "ring", "bruck"),
    Collective.GATHER: (gather, "direct", "binomial_tree"),
    Collective.SCATTER: (scatter, "direct", "binomial_tree"),
    Collective.ALL_TO_ALL: (all_to_all, "pairwise"),
    Collective.EXCLUSIVE_SCAN: (exclusive_scan, "recursive_doubling", "chain"),
}
SCHEDULES = [
    (call, collective, name) for collective, (call, *names) in CALLS.items() for name in names
]


def always(collective, name):
    """Return a context in which this rank takes one algorithm, whatever the size."""
    algorithm, usual = named(collective, name), choice.choose

    def choose(asked, *given, **options):
        return algorithm if asked is collective else usual(asked, *given, **options)

    return mock.patch.object(choice, "choose", choose)


def stop_after(comm, n_steps, what):
    """Have this leader take part in so many steps of its next transfer, and then do something."""
    bulk = comm._group.bulk
    begin, finish = bulk.begin, bulk.finish

    def begin_some(schedule, *given, **options):
        def make(*place):
            return schedule.make(*place)[:n_steps]

        return begin(schedule._replace(make=make), *given, **options)

    def finish_some(*_):
        assert finish().status == 0
        what()
        raise AssertionError("what was to be done has not ended this")

    bulk.begin, bulk.finish = begin_some, finish_some


def kill_this():
    os.kill(os.getpid(), signal.SIGKILL)


def call_twice(call, comm):
    """Whoever needs no more of the victim gets through the first call."""
    for _ in range(2):
        assert call(comm), "wrong numbers"


def call_until_lost(comm, call, collective, name, n_steps):
    with always(collective, name):
        assert call(comm)  # opens the connections
        if comm.rank == VICTIM:
            stop_after(comm, n_steps, kill_this)
        with pytest.raises(PeerLostError) as caught:
            call_twice(call, comm)
        return str(caught.value)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(("call", "collective", "name"), SCHEDULES)
def test_a_leader_killed_in_each_step(hosts, call, collective, name):
    algorithm = named(collective, name)
    n_all = len(algorithm.steps(VICTIM, len(PLACED), 1))
    assert n_all

    for n_steps in range(n_all + 1):
        replies = hosts.replies(PLACED, call_until_lost, call, collective, name, n_steps)

        for rank, reply in enumerate(replies):
            if rank == VICTIM:
                assert isinstance(reply, Ended)
                continue
            assert isinstance(reply, Reply)
            assert reply.error is None, (n_steps, reply.trace)
            assert f"lost rank {VICTIM}" in reply.result


# --- other ends -----------------------------------------------------------------------------------


def await_the_end(comm):
    comm._group.links.wait(lambda: comm._group.is_aborted, TIMEOUT_S)
    comm._group.raise_if_aborted()


def reset_in_the_middle(comm, n_steps):
    assert all_reduce(comm)
    bulk = comm._group.bulk

    def reset():
        for end in bulk._ends.sockets.values():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        bulk.close_connections()
        await_the_end(comm)

    was_told = []
    if comm.rank == VICTIM:
        stop_after(comm, n_steps, reset)
    else:
        close = bulk.close_connections

        def close_noting():
            was_told.append(comm._group.is_aborted)
            close()

        bulk.close_connections = close_noting
    with pytest.raises(PeerLostError) as caught:
        call_twice(all_reduce, comm)
    assert all(was_told), "closed before the others were told why"
    return str(caught.value)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("n_steps", [0, 1, 5])
def test_connections_that_are_reset(hosts, n_steps):
    """Nobody says why they ended: who saw it tells the others, and closes its own after that."""
    texts = hosts.call(PLACED, reset_in_the_middle, n_steps)

    assert all(" lost rank " in text for text in texts)
    told = [text for rank, text in enumerate(texts) if rank != VICTIM]
    assert all(f"lost rank {VICTIM}" in text for text in told), texts


def stop_in_the_middle(comm, n_steps):
    """Rank 2 stops; the others' deadline ends the call, and then rank 0 lets it go on."""
    assert all_reduce(comm)
    pid = comm.all_gather_object(os.getpid())[VICTIM]

    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)
        await_the_end(comm)

    if comm.rank == VICTIM:
        stop_after(comm, n_steps, stop)
    elif comm.rank == 0:
        comm._group.timeout_s = 1.0
    try:
        with pytest.raises(DeadlineError) as caught:
            call_twice(all_reduce, comm)
        return str(caught.value)
    finally:
        if comm.rank == 0:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("n_steps", [1, 4])
def test_a_leader_that_is_stopped(hosts, n_steps):
    replies = hosts.call(PLACED, stop_in_the_middle, n_steps)

    for text in replies:
        assert "rank 2" in text
        assert "did not answer (stopped, or their host is cut off)" in text
