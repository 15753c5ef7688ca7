"""Predicted times: where a formula is known they are that; and wrong schedules are found."""

from __future__ import annotations

import pytest
from schedules.contents import Contents
from schedules.hierarchy import Inside, block_sizes, carriers, predict_call, run_all_reduce
from schedules.timing import Network, predict
from tests.algorithms.test_schedules import each_algorithm

from gpucoll.algorithms.steps import WHOLE, Span, Step
from gpucoll.algorithms.table import Order, named
from gpucoll.collectives import Collective
from gpucoll.errors import ArgumentError

ALPHA, RATE = 1e-3, 1e6
NETWORK = Network(ALPHA, RATE)
BYTES = 480_000


def seconds(collective, name, size, size_bytes=BYTES, root=0):
    algorithm = named(collective, name)
    return predict(
        algorithm.schedules(size, root), block_sizes(algorithm, size_bytes, size), NETWORK
    )


@pytest.mark.parametrize("size_bytes", [480, 480_000])
@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_a_ring_is_one_stream(size, size_bytes):
    """Each step forwards: either its bytes or its latency count, and the other one once."""
    block_s = size_bytes / size / RATE
    steps = 2 * (size - 1)
    wanted = max(steps * block_s + ALPHA, steps * ALPHA + block_s)
    assert seconds(Collective.ALL_REDUCE, "ring", size, size_bytes) == pytest.approx(wanted)


@each_algorithm
def test_alone_there_is_nothing_to_do(algorithm):
    assert predict(algorithm.schedules(1), 100, NETWORK) == 0


@pytest.mark.parametrize(("size", "steps"), [(2, 1), (4, 2), (16, 4)])
def test_recursive_doubling_sends_all_in_each_step(size, steps):
    wanted = steps * (ALPHA + BYTES / RATE)
    assert seconds(Collective.ALL_REDUCE, "recursive_doubling", size) == pytest.approx(wanted)


@pytest.mark.parametrize(("size", "steps"), [(5, 4), (12, 5), (17, 6)])
def test_a_size_that_is_no_power_of_two_takes_up_to_two_steps_more(size, steps):
    took = seconds(Collective.ALL_REDUCE, "recursive_doubling", size)
    assert steps * BYTES / RATE < took <= steps * (ALPHA + BYTES / RATE)


@pytest.mark.parametrize(("size", "steps"), [(2, 1), (8, 3), (64, 6)])
def test_halving_doubling_has_few_steps_and_few_bytes(size, steps):
    """The first step of the doubling forwards what the last of the halving has reduced."""
    wanted = (2 * steps - 1) * ALPHA + 2 * (size - 1) * BYTES / size / RATE
    assert seconds(Collective.ALL_REDUCE, "halving_doubling", size) == pytest.approx(wanted)


@pytest.mark.parametrize("collective", [Collective.BROADCAST, Collective.REDUCE, Collective.SCAN])
@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_a_chain_forwards_while_it_receives(collective, size):
    wanted = (size - 1) * ALPHA + BYTES / RATE
    assert seconds(collective, "chain", size) == pytest.approx(wanted)


def test_without_forwarding_each_hop_of_a_chain_takes_all_its_bytes():
    forwarded = named(Collective.BROADCAST, "chain").schedules(4)
    stored = [[Step(s.send_to, s.send, s.receive_from, s.receive) for s in o] for o in forwarded]

    assert predict(stored, BYTES, NETWORK) == pytest.approx(3 * (ALPHA + BYTES / RATE))


def test_the_root_of_a_tree_sends_or_receives_all_in_each_of_its_steps():
    """The last one that it sends to is a leaf; the others have passed it on by then."""
    wanted = 3 * BYTES / RATE + ALPHA
    assert seconds(Collective.REDUCE, "binomial_tree", 8) == pytest.approx(wanted)
    assert wanted <= seconds(Collective.BROADCAST, "binomial_tree", 8) <= wanted + 2 * ALPHA


def test_a_root_sends_one_message_after_the_other():
    schedules = [
        [Step(1, WHOLE), Step(2, WHOLE)],
        [Step(receive_from=0, receive=WHOLE)],
        [Step(receive_from=0, receive=WHOLE)],
    ]
    assert predict(schedules, BYTES, NETWORK) == pytest.approx(2 * BYTES / RATE + ALPHA)


def test_a_receiver_takes_one_message_after_the_other():
    schedules = [
        [Step(receive_from=1, receive=WHOLE), Step(receive_from=2, receive=WHOLE)],
        [Step(0, WHOLE)],
        [Step(0, WHOLE)],
    ]
    assert predict(schedules, BYTES, NETWORK) == pytest.approx(2 * BYTES / RATE + ALPHA)


def test_flows_share_a_nic_and_not_a_link():
    schedules = named(Collective.ALL_REDUCE, "ring").schedules(2)
    shared = Network(0.0, RATE, nic_bytes_per_s=2 * RATE)

    assert predict(schedules, 1000, shared, flows=1) == pytest.approx(2000 / RATE)
    assert predict(schedules, 1000, shared, flows=2) == pytest.approx(2000 / RATE)
    assert predict(schedules, 1000, shared, flows=4) == pytest.approx(4000 / RATE)


@each_algorithm
def test_what_is_sent_is_received_with_blocks_of_any_size(algorithm):
    if algorithm.equal_blocks or algorithm.numbering is not None:
        return  # blocks of one size, or with other numbers on each rank
    for size in (1, 2, 5, 8, 13):
        sizes = [(7 * block + 3) % 5 for block in range(algorithm.blocks(size))]
        assert predict(algorithm.schedules(size, size // 2), sizes, NETWORK) >= 0


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ([[Step(1, WHOLE)], []], "sends what nobody receives"),
        ([[], [Step(receive_from=0, receive=WHOLE)]], "it never ends"),
        (
            [[Step(1, WHOLE)], [Step(receive_from=0, receive=(Span(0, 2),))]],
            "1 bytes are sent where 3 are received",
        ),
    ],
)
def test_a_wrong_schedule_is_found(schedules, message):
    with pytest.raises(ArgumentError, match=message):
        predict(schedules, [1, 2], NETWORK)


@pytest.mark.parametrize("wrong", [(-1, 1), (float("nan"), 1), (0, 0), (0, -1), (0, 1, 0)])
def test_no_such_network(wrong):
    with pytest.raises(ArgumentError, match="needed"):
        Network(*wrong)


def test_ranks_of_a_host_share_its_nic():
    ring = named(Collective.ALL_REDUCE, "ring")
    gigabit = Network(25e-6, 125e6, 125e6)
    inside = Inside(1e-5, 1e10)
    alone = predict_call(ring, 1 << 25, 2, 1, gigabit, inside)
    shared = predict_call(ring, 1 << 25, 2, 4, gigabit, inside)

    assert alone.before_s == alone.after_s == 0
    assert shared.between_s == pytest.approx(alone.between_s, rel=1e-3)
    assert shared.before_s == shared.after_s == pytest.approx(1e-5 + (1 << 25) / 1e10)
    assert shared.total_s > alone.total_s


def test_only_one_rank_of_a_host_carries_what_is_small():
    doubling = named(Collective.ALL_REDUCE, "recursive_doubling")
    gigabit = Network(25e-6, 125e6, 125e6)

    one, four = (predict_call(doubling, 1024, 4, n, gigabit, Inside()) for n in (1, 4))

    assert one.between_s == four.between_s


def test_who_carries():
    assert [carriers(size, 8) for size in (0, 32 << 10, (32 << 10) + 1)] == [1, 1, 8]


@pytest.mark.parametrize(("hosts", "ranks"), [(0, 1), (1, 0)])
def test_no_such_hosts(hosts, ranks):
    ring = named(Collective.ALL_REDUCE, "ring")
    with pytest.raises(ArgumentError, match="at least 1 of both"):
        predict_call(ring, 1, hosts, ranks, NETWORK, Inside())


def test_no_such_inside():
    with pytest.raises(ArgumentError, match="inside a host"):
        Inside(0, 0)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    ("name", "hosts", "slices"),
    [
        ("recursive_doubling", 1024, range(8)),
        ("chain", 1024, range(8)),
        ("halving_doubling", 128, range(2)),
        ("ring", 128, range(1)),
    ],
)
def test_eight_ranks_on_each_of_many_hosts(name, hosts, slices):
    algorithm, contents = named(Collective.ALL_REDUCE, name), Contents()
    results = run_all_reduce(algorithm, hosts, 8, contents, slices)
    for part, held in zip(slices, results, strict=True):
        assert all(blocks == held[0] for blocks in held), "not the same order on all hosts"
        for block in (0, len(held[0]) - 1):
            found = contents.contributions(held[0][block])
            ranks = [rank for ranks, *_ in found for rank in ranks]
            assert {tuple(slice_and_block) for _, *slice_and_block in found} == {(part, block)}
            assert sorted(ranks) == list(range(8 * hosts))
            assert ranks == sorted(ranks) or algorithm.order is Order.ANY
