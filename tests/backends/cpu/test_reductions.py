"""reduce, reduce_scatter, scan and exclusive_scan: dtypes, operations, the same bits on any way."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tests import oracle
from tests.collective_cases import PLACEMENTS, REDUCTIONS, SCANS, SMALL_TUNING, Case, check, draw
from tests.dtypes import assert_same, covering, op_of
from tests.guarded import Guarded

from gpucoll.kernels import reference
from gpucoll.kernels.cpu.addresses import HAS_STRING_COPY

NEW = [name for name in REDUCTIONS if name != "all_reduce"]
COUNTS = (3, 70, 700, 2500)


def pairs_of(name):
    """Return pairs of dtype and operation; the scans' kernels are compiled in every rank: fewer."""
    pairs = covering(10**6) if name in SCANS else covering()
    return [pair for pair in pairs if name != "exclusive_scan" or pair[1] != "avg"]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("name", NEW)
def test_dtypes_and_operations(ranks, world_size, name):
    random = Random(f"{name} {world_size}")
    cases = [
        draw(random, name, world_size, dtype=dtype, op=op, count=COUNTS[place % 4])
        for place, (dtype, op) in enumerate(pairs_of(name))
    ]

    check(ranks, world_size, cases, environment=SMALL_TUNING)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    "tuning",
    [
        "one_shot_bytes=64,chunk_bytes=4096",
        "one_shot_bytes=1048576,chunk_bytes=4096,symmetric_min_bytes=1048576",
        "one_shot_bytes=2048,chunk_bytes=8192,symmetric_min_bytes=0,prefetch_bytes=0",
    ],
)
@pytest.mark.parametrize("world_size", [3, 7])
def test_bits_depend_on_neither_placement_nor_tuning(ranks, world_size, tuning):
    """Whatever the way, they are those of the reference: rank order, one rounding."""
    cases = [
        Case(
            dtype,
            count,
            op,
            root=1 if name == "reduce" else -1,
            placement=placement,
            in_place=placement == "symmetric",
            values="any",
            seed=3,
            collective=name,
        )
        for name in NEW
        for dtype, op in (("float32", "sum"), ("bfloat16", "sum"), ("float64", "prod"))
        for count in (9, 900, 3001)
        for placement in PLACEMENTS
    ]

    check(ranks, world_size, cases, environment={"GPUCOLL_CPU_TUNING": tuning})


@pytest.mark.skipif(not HAS_STRING_COPY, reason="stores of x86-64")
@pytest.mark.parametrize("fills", ["nontemporal_fills=1", "nontemporal_fills=2,n_stages=4"])
@pytest.mark.parametrize("name", ["reduce", "exclusive_scan"])
def test_one_of_two_ranks_gives_all_that_it_has(ranks, name, fills):
    """The other one reduces alone, with the same bits; lists, too."""
    tuning = f"one_shot_bytes=64,chunk_bytes=8192,single_copy_min_bytes={1 << 30},{fills}"
    random = Random(f"{name} {fills}")
    cases = [
        draw(random, name, 2, dtype=dtype, op=op, count=count)
        for dtype, op in (("float32", "sum"), ("bfloat16", "avg"), ("int64", "max"))
        for count in (17, 2048, 2049, 13_000)
        if (name, op) != ("exclusive_scan", "avg")
        for _ in range(4)
    ]

    assert "STAGED" in check(ranks, 2, cases, environment={"GPUCOLL_CPU_TUNING": tuning})


@pytest.mark.parametrize("name", SCANS)
def test_half_types_are_rounded_at_each_prefix_and_not_between(ranks, name):
    values = (2048, 1, 1, 1)  # float16: 2048 + 1 is 2048, 2048 + 2 is 2050, 2048 + 3 is 2052

    def scan(comm):
        return float(getattr(comm, name)(np.array([values[comm.rank]], np.float16))[0])

    prefixes = [2048, 2048, 2050, 2052]
    expected = prefixes if name == "scan" else [0, *prefixes[:3]]
    assert ranks.call(4, scan) == expected


def test_a_scan_averages_over_the_ranks_so_far(ranks):
    def average(comm):
        x = np.array([comm.rank + 1])
        return comm.scan(x * 1.0, "avg").tolist(), comm.scan(-x, "avg").tolist()

    # -1, -3/2, -6/3, -10/4: integers are rounded toward zero
    assert ranks.call(4, average) == [([1], [-1]), ([1.5], [-1]), ([2], [-2]), ([2.5], [-2])]


def identities_of(comm, pairs, count):
    got = []
    for dtype, op in pairs:
        x = np.ones(count, dtype)
        out = comm.exclusive_scan(x, op_of(op))
        if comm.rank == 0:
            expected = np.empty_like(x)
            expected[...] = reference.identity(op, x.dtype)
            assert_same(out, expected, f"{dtype} {op}")
            got.append(op)
    return len(got)


@pytest.mark.parametrize("count", [0, 1, 33, 5000])
def test_rank_0_of_an_exclusive_scan_gets_the_identity(ranks, count):
    pairs = pairs_of("exclusive_scan")

    replies = ranks.call(2, identities_of, pairs, count, environment=SMALL_TUNING)

    assert replies == [len(pairs), 0]


NUMBERS = {"int": 3, "float": 2.5, "bool": True, "complex": 1 + 2j, "numpy": np.float32(1.5)}


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_go_in_and_come_out(ranks, kind):
    value = NUMBERS[kind]

    def reduce_it(comm):
        found = {
            "reduce": comm.reduce(value, "sum", 1),
            "scan": comm.scan(value, "prod"),
            "exclusive_scan": comm.exclusive_scan(value),
        }
        assert found.pop("reduce") is None or comm.rank == 1
        return [(type(result), result) for result in (*found.values(), comm.reduce(value))]

    inputs = [np.asarray(value)] * 3
    replies = ranks.call(3, reduce_it)

    for rank, results in enumerate(replies):
        expected = (
            oracle.scan(inputs, "prod")[rank],
            oracle.exclusive_scan(inputs)[rank],
            oracle.reduce(inputs)[rank],
        )
        for (kind_of_result, result), right in zip(results, expected, strict=True):
            if right is None:
                assert result is None
            else:
                assert kind_of_result is type(value)
                assert result == right


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_but_the_block_is_written_in_place(ranks, world_size):
    """A reduce_scatter whose blocks have rows: the other blocks stay as they were."""
    cases = [
        Case(
            "float32",
            count,
            "max",
            placement=placement,
            in_place=True,
            row=5,
            collective="reduce_scatter",
        )
        for count in (1, 40, 900)
        for placement in PLACEMENTS
    ]

    check(ranks, world_size, cases, environment=SMALL_TUNING)


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.ranks(2)
def test_large_exclusive_scans_of_two_ranks(comm, is_in_place):
    """Rank 1 reads rank 0's input part by part, which in place is overwritten right behind it."""
    part = 64 << 10
    for count in (part, part + 1, 3 * part, 3 * part + 7, 17_000):
        x = Guarded(count, "float32", offset=4)
        out = x if is_in_place else Guarded(count, "float32")
        x.array[:] = np.arange(count) % 1000 + comm.rank
        comm.exclusive_scan(x.array, "max", out=out.array)
        right = np.arange(count) % 1000 if comm.rank else np.full(count, -np.inf)
        np.testing.assert_array_equal(out.array, right)
        x.check()
        out.check()
        total = comm.all_reduce(np.full(100_000, comm.rank + 1.0))  # chunks are counted alike
        assert (total == 3).all()
