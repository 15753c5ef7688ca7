"""Simulated times are those of formulas, where there is one; and wrong schedules are found."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from tests.algorithms.test_schedules import each_algorithm

from gpucoll.algorithms.steps import WHOLE, Span, Step, power_below
from gpucoll.algorithms.table import ALGORITHMS, named
from gpucoll.bench.predict.behaviour import ROTATED, Turn, behaviour_of, in_turn, of_schedules
from gpucoll.bench.predict.composition import pairwise
from gpucoll.bench.predict.simulation import PASSED_ON_BYTES, Network, simulate
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError
from gpucoll.transport.tcp.stream_loop import LEAST_PASSED_ON

WHOLE_MESSAGES = Network(1e-3, 1e-6, 1e-5, 0.0, 1e-8, math.inf)
"""Nothing is forwarded or reduced before all of it has arrived: the case of the formulas."""
OVERHEAD, BETA, GAMMA = 1e-5, 1e-6, 1e-8
ALPHA = 1e-3 + 2 * OVERHEAD
SIZES = (*range(2, 65), 127, 128, 129)
LARGE = (1000, 1023, 1024, 4095, 4096, 9973, 10_000)
EXACT = 1e-7


def seconds(collective, name, ranks, size_bytes, network=WHOLE_MESSAGES, root=0):
    algorithm = named(collective, name)
    return simulate(
        behaviour_of(algorithm, ranks, root), size_bytes / algorithm.blocks(ranks), network
    )


def check(found, wanted):
    assert found == pytest.approx(wanted, rel=EXACT)


def test_blocks_are_passed_on_as_the_loop_does():
    assert PASSED_ON_BYTES == LEAST_PASSED_ON


def check_ring(ranks):
    block = 480_000 / ranks
    wanted = 2 * (ranks - 1) * (ALPHA + block * BETA) + (ranks - 1) * block * GAMMA
    check(seconds(Collective.ALL_REDUCE, "ring", ranks, 480_000), wanted)


def time_of_doubling(ranks, size_bytes):
    """Return when the last rank has the result, by a recursion over all places at once."""
    paired = power_below(ranks)
    rest, places = ranks - paired, np.arange(paired)
    late = places < rest
    own = np.where(late, ALPHA + size_bytes * (BETA + GAMMA), 0.0)
    free = np.where(late, ALPHA - OVERHEAD + size_bytes * BETA, 0.0)
    for bit in range(paired.bit_length() - 1):
        first = np.maximum(own[places ^ (1 << bit)] + ALPHA - OVERHEAD, free)
        free = first + size_bytes * BETA
        own = np.maximum(own, free + OVERHEAD + size_bytes * GAMMA)
    return max(own.max(), (own + ALPHA + size_bytes * BETA)[late].max(initial=0.0))


def check_recursive_doubling(ranks):
    found = seconds(Collective.ALL_REDUCE, "recursive_doubling", ranks, 5_000)
    step = ALPHA + 5_000 * (BETA + GAMMA)
    if ranks == power_below(ranks):
        check(found, (ranks.bit_length() - 1) * step)
    else:
        assert found <= (ranks.bit_length() + 1) * step
        check(found, time_of_doubling(ranks, 5_000))


def time_of_a_tree(ranks, alpha, byte_s):
    """Return when the last rank has a root's message: each hop adds a bit to the rank's number."""
    bits = (ranks - 1).bit_length()

    def below(first, width_bits):
        sent, last = 0, 0.0
        for bit in reversed(range(width_bits)):
            if first + (1 << bit) < ranks:
                sent += 1
                last = max(last, sent * byte_s + alpha + below(first + (1 << bit), bit))
        return last

    return below(0, bits)


def check_tree(ranks):
    for size_bytes in (10, 5_000):
        wanted = time_of_a_tree(ranks, ALPHA, size_bytes * BETA)
        check(seconds(Collective.BROADCAST, "binomial_tree", ranks, size_bytes), wanted)
        if ranks == power_below(ranks):
            check(wanted, (ranks.bit_length() - 1) * (ALPHA + size_bytes * BETA))


CHECKS = (check_ring, check_recursive_doubling, check_tree)


@pytest.mark.parametrize("check_one", CHECKS)
def test_the_formula_of_each_number_of_ranks(check_one):
    for ranks in SIZES:
        check_one(ranks)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", LARGE)
@pytest.mark.parametrize("check_one", CHECKS)
def test_the_formula_of_many_ranks(check_one, ranks):
    check_one(ranks)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_halving_doubling(ranks):
    steps, share = ranks.bit_length() - 1, (ranks - 1) / ranks * 480_000
    wanted = 2 * steps * ALPHA + 2 * share * BETA + share * GAMMA
    check(seconds(Collective.ALL_REDUCE, "halving_doubling", ranks, 480_000), wanted)


@pytest.mark.parametrize("ranks", [2, 3, 8, 33, 200])
@pytest.mark.parametrize("collective", [Collective.BROADCAST, Collective.REDUCE, Collective.SCAN])
def test_a_chain_forwards_byte_by_byte(collective, ranks):
    network = Network(1e-3, 1e-6, chunk_bytes=0)
    wanted = (ranks - 1) * 1e-3 + 480_000 * 1e-6
    check(seconds(collective, "chain", ranks, 480_000, network), wanted)


@pytest.mark.parametrize("size_bytes", [480, 480_000])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_a_ring_that_forwards_byte_by_byte_is_one_stream(ranks, size_bytes):
    block_s, steps = size_bytes / ranks * 1e-6, 2 * (ranks - 1)
    wanted = max(steps * block_s + 1e-3, steps * 1e-3 + block_s)
    network = Network(1e-3, 1e-6, chunk_bytes=0)
    check(seconds(Collective.ALL_REDUCE, "ring", ranks, size_bytes, network), wanted)


def test_blocks_larger_than_a_chunk_are_passed_on_chunk_by_chunk():
    network, ranks, block = Network(1e-3, 1e-6, chunk_bytes=1000), 5, 4000
    steps = 2 * (ranks - 1)
    wanted = max(steps * block * 1e-6 + 1e-3, steps * (1e-3 + 1e-3) + (block - 1000) * 1e-6)
    check(seconds(Collective.ALL_REDUCE, "ring", ranks, block * ranks, network), wanted)


def test_pieces_of_a_ring_follow_each_other_on_its_connections():
    ring = named(Collective.ALL_REDUCE, "ring")
    one = simulate(behaviour_of(ring, 6), 10, WHOLE_MESSAGES)
    several = simulate(behaviour_of(ring, 6), 10, WHOLE_MESSAGES, [0.0] * 3)
    assert 3 * (one - ALPHA) < several <= 3 * one


@pytest.mark.parametrize("ranks", [2, 3, 5, 16])
def test_a_pairwise_call_moves_the_bytes_of_a_ring_with_two_latencies(ranks):
    share, network = 480_000 / ranks, Network(1e-3, 1e-6, 1e-5, chunk_bytes=math.inf)
    wanted = 2 * (ranks - 1) * share * 1e-6 + 2 * ALPHA
    check(simulate(pairwise(ranks, 1), share, network), wanted)


def test_messages_leave_at_least_a_gap_apart():
    network = Network(1e-3, 0.0, 0.0, 1e-4)
    turns = in_turn([Turn(1.0, 1.0, waits=False)] * 5)
    check(simulate(turns, 1, network), 1e-3 + 4e-4)


@pytest.mark.parametrize(
    "algorithm", [one for one in ALGORITHMS if (one.collective, one.name) in ROTATED],
    ids=lambda one: f"{one.collective.spelled}-{one.name}",
)  # fmt: skip
def test_one_rank_stands_for_all_where_all_do_the_same(algorithm):
    for ranks in (*range(2, 14), 16, 31):
        network = random_network(random.Random(ranks))
        every = of_schedules(algorithm.schedules(ranks), 1)
        for starts in ([0.0], [0.0, 1e-4, 2e-3]):
            one = simulate(behaviour_of(algorithm, ranks), 700, network, starts)
            check(one, simulate(every, 700, network, starts))


def random_network(draw):
    def number(most):
        return draw.choice([0.0, draw.uniform(0.0, most)])

    chunk = draw.choice([0.0, 100.0, 65536.0, math.inf])
    return Network(number(1e-3), number(1e-6), number(1e-4), number(1e-4), number(1e-6), chunk)


@pytest.mark.soak(quick=20)
@each_algorithm
def test_more_bytes_and_slower_networks_never_take_less_time(algorithm):
    for seed in range(8):
        draw = random.Random(f"{algorithm.name} {seed}")
        ranks = draw.randint(2, 20)
        network, behaviour = random_network(draw), behaviour_of(algorithm, ranks, ranks // 3)
        slower = np.array([1.0, draw.uniform(1.0, 2.0)])
        times = {
            name: getattr(network, name) * slower
            for name in ("latency_s", "seconds_per_byte", "overhead_s", "gap_s")
        }
        both = Network(
            **times,
            reduce_s_per_byte=network.reduce_s_per_byte * slower,
            chunk_bytes=network.chunk_bytes,
        )
        before = 0.0
        for size in (0, 1, 10, 99, 100, 101, 1e4, 65536, 65537, 1e6):
            fast, slow = np.broadcast_to(simulate(behaviour, size, both), 2)
            assert before * (1 - EXACT) <= fast <= slow * (1 + EXACT)
            check(fast, float(simulate(behaviour, size, network)))
            before = fast


@each_algorithm
def test_alone_there_is_nothing_to_do(algorithm):
    assert simulate(behaviour_of(algorithm, 1), 100, WHOLE_MESSAGES) == 0


@each_algorithm
def test_what_is_sent_is_received_with_blocks_of_any_size(algorithm):
    if algorithm.equal_blocks or algorithm.numbering is not None:
        return  # blocks of one size, or with other numbers on each rank
    for ranks in (1, 2, 5, 8, 13):
        sizes = [(7 * block + 3) % 5 for block in range(algorithm.blocks(ranks))]
        every = of_schedules(algorithm.schedules(ranks, ranks // 2), sizes)
        assert simulate(every, 1, WHOLE_MESSAGES) >= 0


@pytest.mark.parametrize(
    "schedules",
    [
        [[Step(1, WHOLE), Step(2, WHOLE)], *[[Step(receive_from=0, receive=WHOLE)]] * 2],
        [[Step(receive_from=rank, receive=WHOLE) for rank in (1, 2)], *[[Step(0, WHOLE)]] * 2],
    ],
)
def test_a_rank_sends_and_receives_one_message_after_the_other(schedules):
    check(simulate(of_schedules(schedules, 1), 5_000, WHOLE_MESSAGES), ALPHA + 2 * 5_000 * BETA)


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ([[Step(1, WHOLE)], []], "sends what nobody receives"),
        ([[], [Step(receive_from=0, receive=WHOLE)]], "it never ends"),
        (
            [[Step(1, WHOLE)], [Step(receive_from=0, receive=(Span(0, 2),))]],
            "1 bytes are sent where 3 are received",
        ),
        (
            [
                [Step(receive_from=1, receive=WHOLE), Step(1, WHOLE)],
                [Step(receive_from=0, receive=WHOLE), Step(0, WHOLE)],
            ],
            "it never ends",
        ),
    ],
)
def test_a_wrong_schedule_is_found(schedules, message):
    with pytest.raises(ArgumentError, match=message):
        simulate(of_schedules(schedules, [1, 2]), 1, WHOLE_MESSAGES)


@pytest.mark.parametrize("wrong", [(-1, 1), (float("nan"), 1), (0, math.inf), (0, [1.0, -1.0])])
def test_no_such_network(wrong):
    with pytest.raises(ArgumentError, match="0 or more is needed"):
        Network(*wrong)


def test_no_such_bandwidth():
    with pytest.raises(ArgumentError, match="more than 0 is needed"):
        Network.of_rate(0, 0)
