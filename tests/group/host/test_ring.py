"""How far a rank that waits for nobody gets ahead: the ring's length, less what may be posted."""

from __future__ import annotations

import numpy as np
import pytest
from tests.collective_cases import SMALL_TUNING

from gpucoll.errors import DeadlineError
from gpucoll.transport.shared.layout import AHEAD, RING

LATE, MOST = 1, RING - AHEAD


def run_ahead(comm, count, elements):
    """Make `count` small broadcasts while rank 1 makes none; return whether the last one ended."""
    ahead, data = comm.duplicate(), np.arange(elements, dtype="float32")
    comm.barrier()
    ended = True
    if comm.rank != LATE:
        try:
            for _ in range(count):
                ahead.broadcast(data, root=0, timeout_s=0.2)
        except DeadlineError:
            ended = False
    comm.barrier()
    ahead.close()
    return ended


@pytest.mark.parametrize("elements", [4, 8, 9, 200], ids=lambda elements: f"{4 * elements} B")
@pytest.mark.parametrize(("count", "ended"), [(MOST, True), (MOST + 1, False)])
def test_the_root_of_small_broadcasts_is_so_many_calls_ahead(ranks, count, ended, elements):
    results = ranks.call(3, run_ahead, count, elements, environment=SMALL_TUNING)

    assert results == [ended, True, ended]


def follow_the_root(comm, rounds, elements):
    """Take as many broadcasts, then as many again, each time after the root has made them all."""
    expected, taken = [], []
    for round_ in range(rounds):
        values = [round_ * RING + place for place in range(MOST)]
        if comm.rank == 0:
            for value in values:
                comm.broadcast(np.full(elements, value, "int32"), root=0)
            for rank in range(1, comm.world_size):
                comm.send(np.zeros(1), rank)
        else:
            comm.recv(np.empty(1), 0)
            for _ in values:
                out = np.full(elements, -1, "int32")
                comm.broadcast(out, root=0, out=out)
                taken.append(sorted(set(out.tolist())))
            expected += [[value] for value in values]
    return taken == expected


@pytest.mark.parametrize("elements", [1, 9, 200])
def test_what_a_root_that_is_ahead_sent_is_taken_unharmed(ranks, elements):
    assert all(ranks.call(3, follow_the_root, 7, elements))
