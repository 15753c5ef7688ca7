"""A schedule between hosts of several ranks, with a step inside each before and after."""

from __future__ import annotations

import pytest
from schedules.hierarchy import Inside, predict_call

from gpucoll.algorithms.table import named
from gpucoll.bench.predict.simulation import Network
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError

GIGABIT = Network.of_rate(25e-6, 125e6)


def test_one_rank_of_each_host_carries_everything():
    ring = named(Collective.ALL_REDUCE, "ring")
    inside = Inside(1e-5, 1e10)
    alone = predict_call(ring, 1 << 25, 2, 1, GIGABIT, inside)
    shared = predict_call(ring, 1 << 25, 2, 4, GIGABIT, inside)

    assert alone.before_s == alone.after_s == 0
    assert shared.between_s == alone.between_s
    assert shared.before_s == shared.after_s == pytest.approx(1e-5 + (1 << 25) / 1e10)
    assert shared.total_s > alone.total_s


@pytest.mark.parametrize(("hosts", "ranks"), [(0, 1), (1, 0)])
def test_no_such_hosts(hosts, ranks):
    ring = named(Collective.ALL_REDUCE, "ring")
    with pytest.raises(ArgumentError, match="at least 1 of both"):
        predict_call(ring, 1, hosts, ranks, GIGABIT, Inside())


def test_no_such_inside():
    with pytest.raises(ArgumentError, match="inside a host"):
        Inside(0, 0)
