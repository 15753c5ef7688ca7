"""Every collective over ranks of several hosts, against the oracle; the hosts are played."""

from __future__ import annotations

import hashlib
from random import Random

import numpy as np
import pytest
from tests.api import test_random_operations as random_operations
from tests.backends.cpu.test_movements import ANY_DTYPE, counted, move_any
from tests.collective_cases import (
    COLLECTIVES,
    COUNTED,
    COUNTS,
    MOVEMENTS,
    REDUCTIONS,
    SCANS,
    SMALL_TUNING,
    WAYS,
    Call,
    Case,
    check,
    draw,
)
from tests.dtypes import bits, covering

SHAPES = ["ab", "aabb", "abc", "abbb", "abab"]
"""Two hosts with a rank each, two with two, three, one rank and three, ranks not host by host."""
N_OPERATIONS = 1000


def op_for(name):
    return "sum" if name in REDUCTIONS else ""


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("placed", SHAPES)
def test_sizes_roots_placements_and_ways(hosts, placed, name):
    random = Random(f"{name} {placed}")
    cases = [
        draw(random, name, len(placed), dtype=dtype, op=op_for(name), count=count, way=way)
        for dtype in ("int8", "float32", "complex128")
        for way, counts in zip(WAYS, ((0, 1, 300), (2, 60), (1, 700), (0, 3, 2500)), strict=True)
        for count in counts
    ]

    check(hosts, placed, cases, environment=SMALL_TUNING)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("placed", ["aabb", "abab"])
def test_dtypes_and_operations(hosts, placed, name):
    random = Random(f"{name} {placed}")
    pairs = random_operations.SCANNED if name in SCANS else covering()
    cases = [
        draw(random, name, len(placed), dtype=dtype, op=op, count=(3, 70, 300)[place % 3])
        for place, (dtype, op) in enumerate(pairs)
        # Complex zeros have other signs where hosts multiply their own first.
        if place % 3 < 2 or not (op == "prod" and dtype.startswith("complex"))
    ]

    check(hosts, placed, cases, environment=SMALL_TUNING)


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("placed", SHAPES)
def test_counts(hosts, placed, name):
    random = Random(f"{name} {placed}")
    cases = [
        counted(random, name, len(placed), dtype="float32", counts=counts, count=count)
        for counts in COUNTS
        for count in (1, 25, 500)
    ]

    check(hosts, placed, cases, environment=SMALL_TUNING)


@pytest.mark.soak
@pytest.mark.parametrize("placed", ["aabb", "abc", "abab"])
def test_more_than_goes_at_once(hosts, placed):
    cases = [
        Case(
            "float32",
            400_000,
            op_for(name),
            root=1 if name in ("reduce", "broadcast", "gather", "scatter") else -1,
            collective=name,
            values="any" if name in MOVEMENTS else "small",
        )
        for name in COLLECTIVES
    ]

    check(hosts, placed, cases)


def bits_of(comm, cases):
    return [hashlib.sha256(bits(Call(comm, case).run()).tobytes()).hexdigest() for case in cases]


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_same_bits_on_every_rank(hosts, dtype, op):
    cases = [
        Case(dtype, count, op, values="any", seed=count, in_place=in_place)
        for count in (1, 9, 3001, 70_000)
        for in_place in (False, True)
    ]

    for placed in ("aabb", "abbb", "abc"):
        replies = hosts.call(placed, bits_of, [*cases, *cases])
        assert replies == [replies[0]] * len(placed)
        assert replies[0][: len(cases)] == replies[0][len(cases) :]


@pytest.mark.parametrize("kind", ANY_DTYPE)
def test_every_fixed_size_dtype_is_moved(hosts, kind):
    x = ANY_DTYPE[kind]
    alone = [np.roll(x, rank) for rank in range(2)]

    first, second = hosts.call("ab", move_any, x)

    gathered = str(x.dtype), np.concatenate(alone).tobytes()
    assert first["all_gather"] == second["all_gather"] == second["gather"] == gathered
    assert first["broadcast"] == second["broadcast"] == (str(x.dtype), alone[1].tobytes())
    assert first["scatter"] == (str(x.dtype), alone[1][:1].tobytes())
    assert second["scatter"] == (str(x.dtype), alone[1][1:].tobytes())
    for rank, got in enumerate((first, second)):
        sent = np.concatenate([each[rank : rank + 1] for each in alone])
        assert got["all_to_all"] == (str(x.dtype), sent.tobytes())


def many_operations(comm, seed):
    random_operations.Run(comm, seed).do(N_OPERATIONS)
    return comm.all_reduce(1)


@pytest.mark.soak
@pytest.mark.parametrize("placed", SHAPES[:4])
def test_random_operations(hosts, placed):
    environment = random_operations.TUNING

    replies = hosts.call(placed, many_operations, 20_301, environment=environment, limit_s=150)

    assert replies == [len(placed)] * len(placed)
