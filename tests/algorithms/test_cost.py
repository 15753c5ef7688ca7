"""What schedules cost: counted from their steps, and as the formulas say."""

from __future__ import annotations

import pytest
from tests.algorithms.test_schedules import LOGARITHMIC, SIZES, each_algorithm, spelled

from gpucoll.algorithms.cost import Cost, cost_of, divide, largest
from gpucoll.algorithms.steps import Span, Step
from gpucoll.algorithms.table import ALGORITHMS, named
from gpucoll.collectives import Collective


@each_algorithm
def test_no_rank_exceeds_the_formula_and_one_reaches_it(algorithm):
    for size in SIZES:
        counted = largest(cost_of(steps, 3) for steps in algorithm.schedules(size))
        assert counted == algorithm.largest(size).times(3), size


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=spelled)
def test_links_grow_as_the_logarithm_or_not_at_all(algorithm):
    links = [algorithm.largest(size).links for size in (16, 256, 1024)]
    if algorithm.name in LOGARITHMIC:
        assert links[0] <= 2 * 4
        assert links[1] <= 2 * 8
        assert links[2] <= 2 * 10
    elif algorithm.name in ("pairwise", "direct"):
        assert links == [15, 255, 1023]
    else:
        assert links == [2, 2, 2]


@pytest.mark.parametrize(
    "algorithm", [one for one in ALGORITHMS if one.name not in ("pairwise", "direct")], ids=spelled
)
def test_at_1024_ranks_a_few_of_them(algorithm):
    most = algorithm.largest(1024)
    for rank in (0, 1, 511, 1023):
        cost = cost_of(algorithm.steps(rank, 1024), 1)
        assert cost.steps <= most.steps
        assert cost.sent_bytes <= most.sent_bytes
        assert cost.received_bytes <= most.received_bytes
        assert cost.links <= most.links


def test_a_ring_of_four():
    assert cost_of(named(Collective.ALL_REDUCE, "ring").steps(2, 4), 256) == Cost(
        steps=6, sent_bytes=1536, received_bytes=1536, links=2
    )


def test_all_to_all_with_blocks_of_any_size():
    def between(rank: int, peer: int) -> int:
        return (3 * rank + 5 * peer) % 7

    algorithm = named(Collective.ALL_TO_ALL, "pairwise")
    for rank in range(6):
        sizes = [between(rank, peer) for peer in range(6)] + [
            between(peer, rank) for peer in range(6)
        ]
        cost = cost_of(algorithm.steps(rank, 6), sizes)
        assert cost.sent_bytes == sum(sizes[:6]) - sizes[rank]
        assert cost.received_bytes == sum(sizes[6:]) - sizes[rank]


def test_blocks_of_their_own_size():
    steps = [Step(1, (Span(0, 2), Span(3, 1)), 2, (Span(1, 2),)), Step(1, (Span(0, 1),))]

    assert cost_of(steps, [1, 10, 100, 1000]) == Cost(2, 1012, 110, 2)
    assert cost_of([], 5) == Cost()


@pytest.mark.parametrize(
    ("size_bytes", "blocks", "sizes"),
    [(10, 4, [3, 3, 2, 2]), (0, 3, [0, 0, 0]), (2, 3, [1, 1, 0]), (6, 1, [6])],
)
def test_divide(size_bytes, blocks, sizes):
    assert divide(size_bytes, blocks) == sizes
