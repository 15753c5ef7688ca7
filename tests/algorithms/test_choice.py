"""Which algorithm is taken."""

from __future__ import annotations

import pytest

from gpucoll.algorithms.choice import MOST_LINKS, RULES, choose
from gpucoll.algorithms.table import ALGORITHMS, Order, named
from gpucoll.collectives import Collective as Call
from gpucoll.errors import ArgumentError

KIB = 1024
MIB = 1024 * KIB


@pytest.mark.parametrize(
    ("collective", "size_bytes", "hosts", "name"),
    [
        (Call.ALL_REDUCE, 0, 1, "recursive_doubling"),
        (Call.ALL_REDUCE, 32 * KIB, 4, "recursive_doubling"),
        (Call.ALL_REDUCE, 32 * KIB + 1, 4, "ring"),
        (Call.ALL_REDUCE, 512 * KIB, 16, "halving_doubling"),
        (Call.ALL_REDUCE, 512 * KIB + 1, 16, "ring"),
        (Call.ALL_REDUCE, 33 * KIB, 17, "halving_doubling"),
        (Call.ALL_REDUCE, 35 * KIB, 17, "ring"),
        (Call.REDUCE_SCATTER, 8 * KIB, 4, "recursive_doubling"),
        (Call.REDUCE_SCATTER, 8 * KIB + 1, 4, "ring"),
        (Call.REDUCE_SCATTER, 32 * KIB, 64, "recursive_doubling"),
        (Call.REDUCE_SCATTER, 33 * KIB, 64, "ring"),
        (Call.ALL_GATHER, 128 * KIB, 4, "bruck"),
        (Call.ALL_GATHER, 128 * KIB + 1, 4, "ring"),
        (Call.BROADCAST, 8 * KIB, 4, "binomial_tree"),
        (Call.BROADCAST, 8 * KIB + 1, 4, "chain"),
        (Call.REDUCE, 8 * KIB, 4, "binomial_tree"),
        (Call.REDUCE, 1 * MIB, 4, "chain"),
        (Call.GATHER, 1 * MIB, 4, "direct"),
        (Call.SCATTER, 1, 4, "direct"),
        (Call.GATHER, 1 * MIB, MOST_LINKS + 2, "binomial_tree"),
        (Call.SCATTER, 1, MOST_LINKS + 2, "binomial_tree"),
        (Call.ALL_TO_ALL, 1 * KIB, 2, "pairwise"),
        (Call.ALL_TO_ALL, 4 * KIB, 4, "bruck"),
        (Call.ALL_TO_ALL, 1 * MIB, 4, "pairwise"),
        (Call.ALL_TO_ALL, 1 * MIB, MOST_LINKS + 2, "bruck"),
        (Call.SCAN, 1 * KIB, 4, "recursive_doubling"),
        (Call.SCAN, 1 * MIB, 4, "chain"),
        (Call.EXCLUSIVE_SCAN, 1 * KIB, 4, "recursive_doubling"),
        (Call.BARRIER, 0, 1024, "dissemination"),
    ],
)
def test_by_size_and_hosts(collective, size_bytes, hosts, name):
    assert choose(collective, size_bytes, hosts).name == name


@pytest.mark.parametrize(
    ("collective", "size_bytes", "hosts", "name"),
    [
        (Call.ALL_REDUCE, 1 * KIB, 4, "recursive_doubling"),
        (Call.ALL_REDUCE, 8 * MIB, 4, "halving_doubling"),
        (Call.ALL_REDUCE, 24 * KIB, 3, "recursive_doubling"),
        (Call.ALL_REDUCE, 96 * KIB, 12, "halving_doubling"),
        (Call.ALL_REDUCE, 97 * KIB, 12, "chain"),
        (Call.ALL_REDUCE, 8 * MIB, 3, "chain"),
        (Call.REDUCE_SCATTER, 8 * MIB, 3, "pairwise"),
        (Call.REDUCE_SCATTER, 8 * MIB, 200, "chain"),
        (Call.REDUCE, 8 * MIB, 3, "chain_in_sequence"),
        (Call.REDUCE, 1 * KIB, 3, "binomial_tree"),
    ],
)
def test_operations_that_do_not_commute(collective, size_bytes, hosts, name):
    assert choose(collective, size_bytes, hosts, commutative=False).name == name


@pytest.mark.parametrize("size_bytes", [0, 1, 4 * KIB, 64 * KIB, 1 * MIB, 1 << 33])
@pytest.mark.parametrize("hosts", [1, 2, 3, 8, 100, 1000])
def test_what_is_promised_is_kept(size_bytes, hosts):
    for collective in RULES:
        for commutative, ordered in ((True, False), (False, False), (False, True)):
            taken = choose(collective, size_bytes, hosts, commutative=commutative, ordered=ordered)
            needed = Order.SEQUENCE if ordered else Order.ANY if commutative else Order.RANKS
            assert taken.collective is collective
            assert taken.order >= needed or not taken.reduces
            assert taken.largest(hosts).links <= MOST_LINKS


def test_every_algorithm_has_its_rule_and_every_rule_its_algorithm():
    ruled = {named(call, rule.name).name + call.name for call in RULES for rule in RULES[call]}

    assert ruled == {one.name + one.collective.name for one in ALGORITHMS}


def test_blocks_of_different_sizes_go_straight():
    taken = choose(Call.ALL_TO_ALL, 4 * KIB, 8, equal_blocks=False)

    assert taken.name == "pairwise"


def test_too_many_links_are_refused():
    with pytest.raises(ArgumentError, match="130 hosts with blocks of different sizes"):
        choose(Call.ALL_TO_ALL, 4 * KIB, 130, equal_blocks=False)


@pytest.mark.parametrize(("size_bytes", "hosts"), [(-1, 2), (1, 0)])
def test_no_such_call(size_bytes, hosts):
    with pytest.raises(ArgumentError, match="0 or more on at least 1"):
        choose(Call.ALL_REDUCE, size_bytes, hosts)


def test_no_schedule_for_a_message():
    with pytest.raises(ArgumentError, match="no schedule for send: there are all_gather, "):
        choose(Call.SEND, 1, 2)
