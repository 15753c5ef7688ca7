"""Every schedule does what its collective means, for every size, and keeps the rules of steps."""

from __future__ import annotations

import itertools

import pytest
from schedules.contents import EMPTY, Contents
from schedules.simulation import run
from tests.algorithms.meanings import check

from gpucoll.algorithms import steps as rules
from gpucoll.algorithms.steps import NOBODY, WHOLE, Span, Step, block_numbers, spans
from gpucoll.algorithms.table import ALGORITHMS, Order, named
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError

SIZES = (*range(1, 18), 31, 32, 33, 64)
LOGARITHMIC = ("recursive_doubling", "halving_doubling", "bruck", "binomial_tree", "dissemination")


def spelled(algorithm):
    return f"{algorithm.collective.spelled}-{algorithm.name}"


each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=spelled)


@pytest.mark.soak(quick=17)
@each_algorithm
def test_every_size(algorithm):
    for size in SIZES:
        check(algorithm, size, root=size // 2)


@pytest.mark.parametrize("algorithm", [one for one in ALGORITHMS if one.is_rooted], ids=spelled)
def test_every_root(algorithm):
    for size in range(1, 14):
        for root in range(size):
            check(algorithm, size, root)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(
    "algorithm", [one for one in ALGORITHMS if one.name in LOGARITHMIC], ids=spelled
)
def test_many_ranks(algorithm):
    for size in (1000, 1024) if algorithm.blocks(1024) == 1 else (250, 256):
        check(algorithm, size, root=size // 3)


@pytest.mark.soak(quick=18)
@each_algorithm
def test_steps_keep_the_rules(algorithm):
    for size in SIZES:
        for rank in range(size):
            steps = algorithm.steps(rank, size, size // 3)
            for number, step in enumerate(steps):
                before = steps[number - 1] if number else None
                check_rules(step, before, rank, size, algorithm.blocks(size))


def check_rules(step, before, rank, size, blocks):
    sent, received = block_numbers(step.send), block_numbers(step.receive)
    assert rank not in (step.send_to, step.receive_from), "to oneself"
    assert NOBODY <= step.send_to < size
    assert NOBODY <= step.receive_from < size
    assert bool(sent) == (step.send_to != NOBODY)
    assert bool(received) == (step.receive_from != NOBODY)
    assert sent or received
    assert received or not step.reduces
    for numbers in (sent, received):
        assert len(set(numbers)) == len(numbers)
        assert all(0 <= number < blocks for number in numbers), "wraps, or outside"
    if not step.reduces:
        assert not set(sent) & set(received), "written while it is sent"
    elif set(sent) & set(received):
        assert step.send == step.receive
    if step.forwards:
        assert before is not None
        assert step.send == before.receive, "not what the step before received"
        assert not set(block_numbers(before.send)) & set(sent)


def test_a_ring_forwards_all_but_its_first_step():
    for rank in range(5):
        steps = named(Collective.ALL_REDUCE, "ring").steps(rank, 5)
        assert [step.forwards for step in steps] == [False] + [True] * 7


@pytest.mark.parametrize(
    "algorithm",
    [
        one
        for one in ALGORITHMS
        if one.name.startswith("chain") and one.collective is not Collective.EXCLUSIVE_SCAN
    ],
    ids=spelled,
)
def test_a_chain_forwards_whatever_it_has_just_received(algorithm):
    for root in range(5):
        for rank in range(5):
            steps = algorithm.steps(rank, 5, root)
            for before, step in itertools.pairwise(steps):
                just_came = step.send == before.receive and step.send_to != NOBODY
                assert step.forwards == just_came, (rank, root)


@pytest.mark.parametrize("size", SIZES)
def test_who_leaves_a_barrier_has_heard_of_all(size):
    schedules = named(Collective.BARRIER, "dissemination").schedules(size)
    heard = [{rank} for rank in range(size)]
    for step in range(len(schedules[0])):
        heard = [heard[rank] | heard[schedules[rank][step].receive_from] for rank in range(size)]
    assert all(known == set(range(size)) for known in heard)


def test_a_binomial_tree_keeps_rank_order_with_any_root():
    contents = Contents()
    algorithm = named(Collective.REDUCE, "binomial_tree")
    held = run(algorithm.schedules(5, 3), [[contents.leaf(rank)] for rank in range(5)], contents)
    assert contents.spelled(held[3][0]) == "(((0 1) (2 3)) 4)"


def test_a_ring_of_four_is_this():
    assert named(Collective.ALL_REDUCE, "ring").steps(1, 4)[:2] == [
        Step(2, (Span(0, 1),), 0, (Span(3, 1),), reduces=True),
        Step(2, (Span(3, 1),), 0, (Span(2, 1),), reduces=True, forwards=True),
    ]


def test_what_wraps_is_two_spans():
    assert spans(3, 4, 5) == (Span(3, 2), Span(0, 2))
    assert spans(-1, 1, 5) == (Span(4, 1),)
    assert spans(2, 0, 5) == ()


@each_algorithm
@pytest.mark.parametrize(("rank", "size"), [(0, 0), (-1, 4), (4, 4)])
def test_a_place_that_is_none(algorithm, rank, size):
    with pytest.raises(ArgumentError, match="a schedule for "):
        algorithm.steps(rank, size)


@pytest.mark.parametrize("algorithm", [one for one in ALGORITHMS if one.is_rooted], ids=spelled)
def test_a_root_that_is_none(algorithm):
    with pytest.raises(ArgumentError, match="a schedule with root 4 of 4: ranks are 0 to 3"):
        algorithm.steps(0, 4, 4)


def test_no_such_algorithm():
    with pytest.raises(ArgumentError, match="no algorithm 'tree' for scan: there are recursive_do"):
        named(Collective.SCAN, "tree")


def test_orders_are_as_promised():
    promised = {spelled(one) for one in ALGORITHMS if one.order is Order.SEQUENCE}
    assert promised == {
        "all_reduce-chain", "exclusive_scan-chain", "reduce-chain_in_sequence",
        "reduce_scatter-chain", "scan-chain",
    }  # fmt: skip
    assert rules.NOBODY == -1


def run_one_block(*schedules, empty=()):
    contents = Contents()
    held = [[EMPTY if rank in empty else contents.leaf(rank)] for rank in range(len(schedules))]
    return run(schedules, held, contents)


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ([[Step(1, WHOLE)], []], "rank 0 of 2, step 0, waits to send to 1"),
        (
            [[], [Step(receive_from=0, receive=WHOLE)]],
            "rank 1 of 2, step 0, waits to receive from 0",
        ),
        (
            [
                [Step(1, WHOLE), Step(receive_from=1, receive=WHOLE)],
                [Step(0, WHOLE), Step(receive_from=0, receive=WHOLE)],
            ],
            "never ends:\nrank 0 of 2, step 0, waits to send to 1\nrank 1 of 2, step 0",
        ),
        (
            [[Step(1, WHOLE)], [Step(receive_from=0, receive=(Span(0, 1), Span(0, 1)))]],
            "what rank 0 sends to rank 1 of 2 is 1 blocks; 2 are received",
        ),
    ],
)
def test_a_wrong_schedule_is_found(schedules, message):
    with pytest.raises(ArgumentError) as failure:
        run_one_block(*schedules)
    assert message in str(failure.value)


def test_an_empty_block_is_found():
    schedules = [[Step(1, WHOLE)], [Step(receive_from=0, receive=WHOLE)]]
    with pytest.raises(ArgumentError, match="a block into which nothing was written"):
        run_one_block(*schedules, empty={0})
