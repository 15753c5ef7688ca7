"""How calls are composed is what the code of ranks decides, and what it sends."""

from __future__ import annotations

import operator

import pytest

from gpucoll.bench.predict.composition import (
    SHARES,
    Case,
    Machine,
    Memory,
    all_reduce_s,
    exchange,
    way_of,
)
from gpucoll.bench.predict.simulation import Network
from gpucoll.errors import ArgumentError
from gpucoll.transport.tcp.exchange import HEADER_BYTES, PART_BYTES

KIB, MIB = 1 << 10, 1 << 20
NETWORK = Network(25e-6, 8e-9)
MEMORY = Memory(1e-6, 1e-10, 1e-10, 1e-9, 64 * KIB, 8 * MIB, 2)


@pytest.mark.parametrize(
    ("size_bytes", "ranks", "hosts", "name"),
    [
        (4, 2, 2, "exchange"),
        (128 * KIB, 2, 2, "exchange"),
        (MIB, 2, 2, "pairwise"),
        (64 * MIB, 2, 2, "ring"),
        (KIB, 16, 16, "exchange"),
        (16 * KIB, 16, 16, "pairwise"),
        (4, 10_000, 10_000, "exchange"),
        (KIB, 10_000, 10_000, "recursive_doubling"),
        (KIB, 10_000, 1250, "recursive_doubling"),
        (MIB, 1024, 1024, "halving_doubling"),
        (64 * MIB, 1024, 1024, "ring"),
    ],
)
def test_the_way_of_a_call(size_bytes, ranks, hosts, name):
    assert way_of(Case(size_bytes, ranks, hosts)).name == name


@pytest.mark.parametrize(("ranks", "hosts"), [(5, 2), (1, 2), (0, 1), (1, 0)])
def test_every_host_has_as_many_ranks(ranks, hosts):
    with pytest.raises(ArgumentError, match="as many as the others"):
        way_of(Case(4, ranks, hosts))


def test_an_exchange_sends_what_bruck_sends():
    (turns,) = exchange(5, 10).kinds
    part = PART_BYTES + 16
    sent = [turn.sends for turn, count in turns for _ in range(count)]
    assert sent == [HEADER_BYTES + count * part for count in (1, 2, 1)]


def test_one_host_has_no_network():
    machine = Machine(Network(1.0, 1.0), MEMORY)
    assert all_reduce_s(Case(KIB, 2, 1), machine) == pytest.approx(1e-6 + KIB * 1e-10)
    assert all_reduce_s(Case(KIB, 1, 1), machine) == 0


def test_hosts_of_several_ranks_take_longer_than_their_leaders_alone():
    for size in (4, 100 * KIB, 64 * MIB):
        alone = all_reduce_s(Case(size, 4, 4), Machine(NETWORK, MEMORY))
        assert alone < all_reduce_s(Case(size, 32, 4), Machine(NETWORK, MEMORY))


def test_the_shares_name_all_parameters():
    for path in (path for paths in SHARES.values() for path in paths):
        assert operator.attrgetter(path)(Machine(NETWORK, MEMORY)) >= 0
