"""Large arrays between hosts: over connections of their own, by schedules; the hosts are played."""

from __future__ import annotations

import weakref
from random import Random
from unittest import mock

import numpy as np
import pytest
from tests.backends.cpu.test_movements import counted
from tests.collective_cases import COLLECTIVES, COUNTED, ROOTED, SCANS, Case, check, draw

from gpucoll import ReduceOp
from gpucoll.algorithms import choice
from gpucoll.algorithms.table import named
from gpucoll.backends.cpu.world.sizes import PIECE_BYTES, PIECES
from gpucoll.group.world.exchanges import MOST_BYTES

SHAPES = ["ab", "aabb", "abc", "abbb", "abab", "abca", "aabcb"]
"""Also ranks that are not host by host, and hosts with one, two and three ranks."""
LARGE = [*COLLECTIVES]


@pytest.fixture(params=["pairwise", "schedules"])
def hosts(request):
    """Hosts between which these arrays go pairwise, or by schedules."""
    is_pairwise = request.param == "pairwise"
    return request.getfixturevalue("hosts" if is_pairwise else "hosts_with_schedules")


def has_bulk(comm):
    """Return whether this rank has connections for large arrays."""
    bulk = comm._group.bulk
    return bulk is not None and bool(bulk._ends.sockets)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("placed", SHAPES)
def test_every_large_collective(hosts, placed, name):
    random = Random(f"{name} {placed}")
    op = "sum" if name.startswith(("all_reduce", "reduce")) or name in SCANS else ""
    cases = [
        draw(random, name, len(placed), dtype=dtype, op=op, count=count)
        for dtype in ("int8", "float64")
        for count in (4097, 33_000, 100_000)
    ]

    check(hosts, placed, cases)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("name", ROOTED)
def test_every_root(hosts, name):
    placed = "abbac"
    op = "max" if name == "reduce" else ""
    cases = [
        Case("float32", count, op, root=root, collective=name, seed=root, in_place=bool(root % 2))
        for root in range(len(placed))
        for count in (9001, 80_001)
    ]

    check(hosts, placed, cases)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("counts", ["none", "one", "gaps", "steep"])
def test_counts_that_differ(hosts, name, counts):
    for placed in ("abc", "abab"):
        random = Random(f"{name} {placed}")
        cases = [
            counted(random, name, len(placed), dtype="float32", counts=counts, count=count)
            for count in (4000, 20_000)
        ]

        check(hosts, placed, cases)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("op", ["avg", "scaled_sum", "land", "min", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "float16", "bool"])
def test_operations_that_need_more_than_a_kernel(hosts, op, dtype):
    if dtype == "bool" and op in ("avg", "scaled_sum"):
        return
    cases = [
        Case(dtype, 8 * count, op, root=root, collective=name, seed=count)
        for count in (5000, 50_000)
        for name, root in (("all_reduce", -1), ("reduce", 1), ("reduce_scatter", -1))
        if not (op == "prod" and dtype != "int32")
    ]

    check(hosts, "aabc", cases)


def sizes_around(comm, limits):
    found = []
    for limit in limits:
        for size in (limit - 4, limit, limit + 4):
            x = np.arange(size // 4, dtype=np.int32) + comm.rank
            total = comm.all_reduce(x, op="sum")
            expected = comm.world_size * np.arange(size // 4) + sum(range(comm.world_size))
            copied = comm.broadcast(x.copy(), root=1)
            found.append((total == expected).all() and (copied == np.arange(size // 4) + 1).all())
            x = np.resize(x, x.size // comm.world_size * comm.world_size)
            block = comm.reduce_scatter(x, op="sum")
            begin = comm.rank * block.size
            found.append((block == comm.all_reduce(x, op="sum")[begin : begin + block.size]).all())
            gathered = comm.all_gather(block)
            found.append((gathered.ravel()[begin : begin + block.size] == block).all())
            reduced = comm.reduce(x, op="sum", root=comm.world_size - 1)
            found.append(reduced is None or (reduced.ravel() == gathered.ravel()).all())
    return found


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aab", "abcd"])
def test_sizes_at_which_the_way_changes(hosts, placed):
    limits = [
        MOST_BYTES // len(placed) // 4 * 4,
        MOST_BYTES,
        *(2048 * len(placed), 32 * 1024 * len(placed)),
        *(PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES, PIECES * PIECE_BYTES),
    ]

    for found in hosts.call(placed, sizes_around, limits):
        assert all(found)


def average_of_large_halves(comm):
    x = np.full(50_000, 60_000, np.float16)
    return float(comm.all_reduce(x, op="avg").max())


def test_an_average_whose_sum_a_half_type_cannot_hold(hosts):
    assert hosts.call("abc", average_of_large_halves) == [60_000] * 3


def first_operand(comm):
    keeps_left = ReduceOp.custom(lambda a, b: a, commutative=False)
    adds = ReduceOp.custom(lambda a, b: a + b, identity=0)
    x = np.full(60_000, comm.rank + 1, np.float32)
    left, total = comm.all_reduce(x, op=keeps_left), comm.all_reduce(x, op=adds)
    return set(left), set(total), has_bulk(comm)


@pytest.mark.soak
def test_operations_of_users(hosts, hosts_with_schedules):
    expected = {1.0}, {6.0}, hosts is hosts_with_schedules

    assert hosts.call("abc", first_operand) == [expected] * 3


def composed(comm, count):
    """Compose functions x -> factor x + summand: associative, and the order matters."""
    op = ReduceOp.custom(
        lambda a, b: complex(a.real * b.real, a.imag * b.real + b.imag), commutative=False
    )
    inputs = [
        np.random.default_rng(rank).integers(-2, 3, (count, 2)).astype(float).view(complex)[:, 0]
        for rank in range(comm.world_size)
    ]
    expected = inputs[0].copy()
    for each in inputs[1:]:
        expected = expected.real * each.real + 1j * (expected.imag * each.real + each.imag)
    x = inputs[comm.rank]
    block = np.split(expected, comm.world_size)[comm.rank]
    results = [
        (comm.all_reduce(x, op=op), expected),
        (comm.reduce_scatter(x, op=op), block),
        *((comm.reduce(x, op=op, root=root), expected) for root in range(comm.world_size)),
    ]
    return [bool((got == right).all()) for got, right in results if got is not None]


@pytest.mark.soak
@pytest.mark.parametrize("placed", ["ab", "abc", "aabcc", "abab"])
def test_what_does_not_commute(hosts, placed):
    for count in (600 * len(placed), 9000 * len(placed)):
        assert all(all(found) for found in hosts.call(placed, composed, count))


def list_of_arrays(comm):
    arrays = [np.full(size, comm.rank, np.float32) for size in (3, 50_000, 7)]
    return [set(each) for each in comm.all_reduce(arrays)]


def test_a_list_of_arrays(hosts):
    assert hosts.call("aab", list_of_arrays) == [[{3.0}] * 3] * 3


def python_ints(comm):
    return comm.all_reduce(2**62 + comm.rank), has_bulk(comm)


def test_small_calls_open_nothing_more(hosts):
    assert hosts.call("ab", python_ints) == [(2**63 + 1, False)] * 2


def kept_arrays(comm):
    found = []
    for count in (10, 50_000):
        x = np.ones(count, np.float32)
        comm.all_reduce(x)
        comm.broadcast(x, root=0)
        still_there = weakref.ref(x)
        del x
        found.append(still_there())
    return found


def test_no_array_is_kept_after_its_call(hosts):
    assert hosts.call("aab", kept_arrays) == [[None, None]] * 3


def many_kinds_of_calls(comm):
    return all(
        (comm.all_reduce(np.ones(count, np.float32)) == comm.world_size).all()
        for count in [*range(300), *range(300)]
    )


def test_more_kinds_of_calls_than_are_remembered(hosts):
    assert hosts.call("ab", many_kinds_of_calls) == [True] * 2


def exchange_blocks(comm, count):
    x = np.arange(comm.world_size * count, dtype=np.int32) + 1000 * comm.rank
    found = comm.all_to_all(x).reshape(comm.world_size, count)
    mine = np.arange(comm.rank * count, (comm.rank + 1) * count)
    return all((found[rank] == mine + 1000 * rank).all() for rank in range(comm.world_size))


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("name", ["bruck", "pairwise"])
@pytest.mark.parametrize("placed", ["ab", "abcde", "aabbcc", "abcabc", "aabccc"])
def test_all_to_all_by_each_algorithm(hosts, placed, name):
    """Beside what rules say; hosts that differ in their ranks have one only."""
    for found in hosts.call(placed, exchange_blocks_by, name, 3001):
        assert found


def exchange_blocks_by(comm, name, count):
    with mock.patch.object(choice, "choose", lambda collective, *_: named(collective, name)):
        return exchange_blocks(comm, count)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("placed", ["ab", "aab", "abb", "aabbc", "abab"])
@pytest.mark.parametrize("op", ["sum", "max", "avg", "scaled_sum", "land"])
def test_large_scans(hosts, placed, op):
    names = ["scan"] if op == "avg" else SCANS
    cases = [
        Case("float32", count, op, collective=name, seed=count, in_place=in_place)
        for name in names
        for count, in_place in ((5000, False), (60_000, True))
    ]

    check(hosts, placed, cases)


def scan_in_order(comm):
    """The last rank's value, and how often something was before it: it does not commute."""
    op = ReduceOp.custom(lambda a, b: a * 10 + b, commutative=False, identity=0)
    x = np.full(30_000, comm.rank + 1, np.float64)
    return [set(found.tolist()) for found in (comm.scan(x, op=op), comm.exclusive_scan(x, op=op))]


@pytest.mark.soak
def test_scans_of_operations_that_do_not_commute(hosts):
    """Hosts of one rank each: a * 10 + b is associative from the left alone."""
    found = hosts.call("abc", scan_in_order)

    assert found == [[{1.0}, {0.0}], [{12.0}, {1.0}], [{123.0}, {12.0}]]
