"""Python's ints are reduced exactly, whatever comes out; NumPy's numbers wrap."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
import pytest

from gpucoll.calls.exact_integers import exact_result
from gpucoll.errors import ArgumentError, ArgumentTypeError
from gpucoll.types import ReduceOp

MOST, LEAST = 2**63 - 1, -(2**63)
VALUES = {
    "small": [3, -5, 7, 0, 2, 9, -1],
    "largest": [MOST] * 7,
    "least": [LEAST] * 7,
    "mixed": [MOST, LEAST, -1, 2**62, 3**39, -(3**39), 1],
    "cancelling": [MOST, MOST, LEAST, LEAST, 5, 6, 7],
}


def truncated(total, count):
    return total // count if total >= 0 else -(-total // count)


OPS: dict[str, Any] = {
    "sum": sum,
    "prod": math.prod,
    "avg": lambda values: truncated(sum(values), len(values)),
    "min": min,
    "max": max,
    "band": lambda values: int(np.bitwise_and.reduce(np.array(values))),
    "bxor": lambda values: int(np.bitwise_xor.reduce(np.array(values))),
    "lor": lambda values: int(any(values)),
}


class Colour(enum.IntEnum):
    RED = 2**62


@pytest.mark.parametrize(
    ("op", "values", "result"),
    [
        ("sum", [2**62, 2**62], 2**63),
        ("prod", [2**40, -(2**40)], -(2**80)),
        ("avg", [-3, 0], -1),
        ("avg", [2**62 + 1, 2**62 + 2, 2**62 + 4], 2**62 + 2),
        (ReduceOp.scaled_sum(4), [2**62, 1], 2**64 + 4),
        (ReduceOp.scaled_sum(0), [2**62, 1], 0),
    ],
)
def test_what_is_computed(op, values, result):
    assert exact_result(ReduceOp.parse(op), values) == result


def reduce_ints(comm, op, name):
    x = VALUES[name][comm.rank]
    found = [comm.all_reduce(x, op), comm.all_reduce(x, op, async_op=True).wait()]
    found += [comm.reduce(x, op, comm.world_size - 1), comm.scan(x, op)]
    found.append(None if op in ("avg", "max", "min") else comm.exclusive_scan(x, op))
    assert {type(each) for each in found} <= {int, type(None)}
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", VALUES)
def test_every_reduction_of_ints_is_exact(ranks, world_size, op, name):
    replies = ranks.call(world_size, reduce_ints, op, name)

    values = VALUES[name][:world_size]
    total = OPS[op](values)
    for rank, (blocking, asynchronous, reduced, scanned, exclusive) in enumerate(replies):
        assert blocking == asynchronous == total
        assert reduced == (total if rank == world_size - 1 else None)
        assert scanned == OPS[op](values[: rank + 1])
        if exclusive is not None and rank:
            assert exclusive == OPS[op](values[:rank])
    if op in ("sum", "prod"):
        assert replies[0][-1] == (op == "prod")


def meet_other_kinds(comm):
    """An int on rank 0; on the others numbers and arrays of the same dtype, which wrap."""
    kinds = [2**62, np.int64(2**62), np.array(2**62), Colour.RED]
    mine = kinds[comm.rank]
    results = [comm.all_reduce(mine), comm.scan(mine), comm.all_reduce(mine, "prod")]
    return results, [type(each) for each in results]


def test_ints_meet_numbers_and_arrays_of_int64(ranks):
    replies = ranks.call(4, meet_other_kinds)

    for rank in (0, 3):
        assert replies[rank] == ([2**64, (rank + 1) * 2**62, 2**248], [int] * 3)
    assert replies[1][0] == [0, LEAST, 0]
    assert replies[1][1] == [np.int64] * 3
    assert [int(each) for each in replies[2][0]] == [0, 3 * 2**62 - 2**64, 0]


def in_lists(comm):
    x, y = np.ones(3), np.array([1, MOST])
    number = 2**62 if comm.rank else np.int64(2**62)
    found = comm.all_reduce([x, 2**62, y, number, 1.5])
    assert found[0].tolist() == [2] * 3
    assert found[2].tolist() == [2, -2]
    reduced = comm.reduce((y, MOST), root=1)
    if comm.rank == 1:
        assert (reduced[0].tolist(), reduced[1]) == ([2, -2], 2 * MOST)
    brought = comm.broadcast([x, comm.rank + 5])
    return found[1], found[3], found[4], reduced is None, brought[1]


def test_ints_in_lists_are_exact(ranks):
    replies = ranks.call(2, in_lists)

    assert replies[0] == (2**63, np.int64(LEAST), 3.0, True, 5)
    assert replies[1] == (2**63, 2**63, 3.0, False, 5)


EVERYTHING_SHARED = {"GPUCOLL_CPU_TUNING": "symmetric_min_bytes=0"}


def in_shared_arrays(comm):
    with comm.shared_arrays():
        return comm.all_reduce(2**62), comm.all_reduce(np.int64(2**62)), comm.scan(2**62)


@pytest.mark.parametrize("tuning", [{}, EVERYTHING_SHARED])
def test_ints_where_new_arrays_are_shared(ranks, tuning):
    replies = ranks.call(2, in_shared_arrays, environment=tuning)

    assert replies == [(2**63, LEAST, 2**62), (2**63, LEAST, 2**63)]


def beside_shared_memory(comm):
    x = comm.empty((), "int64")
    x[...] = 1
    try:
        result = str(comm.all_reduce(x, out=x) if comm.rank else comm.all_reduce(1))
    except ArgumentError as error:
        result = str(error)
    return result, comm.all_reduce(2**62)


def test_an_int_beside_an_array_in_shared_memory(ranks):
    assert ranks.call(2, beside_shared_memory) == [("2", 2**63)] * 2

    replies = ranks.call(2, beside_shared_memory, environment=EVERYTHING_SHARED)
    assert replies[1] == ("2", 2**63)
    assert replies[0][0].startswith("x is an int, but other ranks passed an array in shared mem")
    assert replies[0][1] == 2**63


CALLS = {
    "all_reduce": lambda comm, x: comm.all_reduce(x, "max"),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "all_gather": lambda comm, x: comm.all_gather(x),
    "scan": lambda comm, x: comm.scan(x),
    "list": lambda comm, x: comm.all_reduce([np.ones(2), x]),
    "asynchronous": lambda comm, x: comm.all_reduce(x, async_op=True),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ranks(2)
def test_an_int_beyond_int64_is_refused(comm, name):
    place = "x[1]" if name == "list" else "x"
    with pytest.raises(ArgumentTypeError) as caught:
        CALLS[name](comm, 2**63)
    assert str(caught.value).endswith(
        f"{place} is an int that int64 does not hold; in collectives Python's ints travel as "
        "int64, whatever the other ranks pass: pass numpy.uint64(x) on every rank, or a float, or "
        "use all_reduce_object"
    )
    with pytest.raises(ArgumentTypeError, match="an int that 64 bits do not hold"):
        CALLS[name](comm, -(2**63) - 1)
    assert comm.all_reduce(np.uint64(2**63 + comm.rank), "max") == 2**63 + 1
    assert comm.all_reduce_object(2**70, int.__add__) == 2**71


@pytest.mark.soak(quick=1)
@pytest.mark.ranks(2)
def test_bools_stay_bools_and_custom_ops_wrap(comm):
    assert comm.all_reduce(True) is True
    add = ReduceOp.custom(lambda a, b: a + b)
    assert comm.all_reduce(2**62, add) == LEAST
