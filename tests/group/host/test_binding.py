"""Ranks that their launcher has not bound are bound to CPUs of their own where asked for."""

from __future__ import annotations

import os
import threading

import pytest

from gpucoll.group.host import binding
from gpucoll.topology import usable_cpus


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ([{0, 1}, {0, 1}], [{0}, {1}]),
        ([{0, 1, 2, 3}, {0, 1, 2, 3}], [{0, 1}, {2, 3}]),
        ([{0, 1}, {4, 5}, {0, 1}, {4, 5}], [{0}, {4}, {1}, {5}]),  # by nodes
        ([{0, 1}, {0, 1}, {0, 1}], [None] * 3),  # too few
        ([{0, 1}, {1, 2}], [None] * 2),  # no part that is clear
        ([{3}, {0, 1}], [{3}, {0, 1}]),
    ],
)
def test_parts(allowed, expected, tmp_path):
    sets = [frozenset(cpus) for cpus in allowed]
    assert [binding.own_cpus(sets, rank, tmp_path) for rank in range(len(sets))] == expected


def test_what_is_said():
    four = frozenset({0, 1, 2, 5})
    assert binding.describe([frozenset({3}), four], 1) == "0-2,5, for this rank alone"
    assert binding.describe([four, four], 0) == (
        "0-2,5, shared by 2 ranks; gpucoll.init(bind=True) gives each its own"
    )
    assert binding.describe([four] * 5, 0) == "0-2,5, shared by 5 ranks"
    assert binding.describe([four, frozenset({5, 6})], 0) == "0-2,5, shared by 2 ranks"


def init_and_look(seat, bind, before, environment):
    """Bind or not: the CPUs of this thread and of another one, and what is said."""
    mine = os.sched_getaffinity(0)
    seen, is_bound, may_end = {}, threading.Event(), threading.Event()

    def wait_beside():
        seen["native"] = threading.get_native_id()
        is_bound.set()
        may_end.wait(60)

    beside = threading.Thread(target=wait_beside)
    try:
        os.environ.update(environment)
        os.sched_setaffinity(0, before or mine)
        beside.start()
        assert is_bound.wait(20)
        with seat.init(bind=bind) as comm:
            said = comm.describe().facts["CPUs"]
            again = comm.duplicate()
            said_again = again.describe().facts["CPUs"]
            again.close()
            total = comm.all_reduce(1)
        return (
            os.sched_getaffinity(0),
            os.sched_getaffinity(seen["native"]),
            said,
            said_again,
            total,
        )
    finally:
        may_end.set()
        beside.join(20)
        os.sched_setaffinity(0, mine)
        for name in environment:
            del os.environ[name]


def look(rank_server, ranks, bind, before=None, environment=None):
    with rank_server.fork(ranks) as pool:
        pool.start(init_and_look, bind, before, environment or {}, gives="seat")
        replies = pool.collect()
    for reply in replies:
        assert reply.error is None, reply
        assert reply.result[4] == ranks
    return [reply.result[:4] for reply in replies]


needs_two = pytest.mark.skipif(len(usable_cpus()) < 2, reason="needs two CPUs")


@needs_two
def test_each_rank_gets_its_own(rank_server):
    replies = look(rank_server, 2, bind=True)
    assert not replies[0][0] & replies[1][0]
    for mine, beside, said, said_again in replies:
        assert mine == beside
        assert said.endswith(", bound by init, for this rank alone")
        assert said_again.endswith(", for this rank alone")


def test_nobody_is_bound_unasked(rank_server):
    for mine, beside, said, _ in look(rank_server, 2, bind=False):
        assert mine == beside == usable_cpus()
        assert "shared by 2 ranks" in said


def test_more_ranks_than_cpus(rank_server):
    ranks = len(usable_cpus()) + 1
    for mine, _, said, _ in look(rank_server, ranks, bind=True):
        assert mine == usable_cpus()
        assert said.endswith("not bound, because they cannot be divided among these ranks")


def test_not_where_the_environment_forbids(rank_server):
    environment = {"GPUCOLL_BIND": "none"}
    for mine, _, said, _ in look(rank_server, 2, bind=True, environment=environment):
        assert mine == usable_cpus()
        assert said.endswith("not bound, because GPUCOLL_BIND is none")


def test_a_rank_alone_stays_where_it_is(rank_server):
    cpu = {min(usable_cpus())}
    ((mine, _, said, _),) = look(rank_server, 1, bind=True, before=cpu)
    assert mine == cpu
    assert said == f"{min(cpu)}, for this rank alone"
