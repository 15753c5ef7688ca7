"""Calls with counts and with lists of blocks, once compiled code knows their kind of array."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from gpucoll.backends.cpu.host.backend import BlockMaker
from gpucoll.calls.block_lists import has_blocks, with_counts
from gpucoll.collectives import Collective
from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeadlineError,
    GpucollError,
    MismatchError,
)
from gpucoll.transport.shared.words import Call

FLOAT = np.float32
FIELDS = (
    *("collective", "root", "count", "size_bytes", "digest", "source"),
    *("destination", "n_dimensions", "largest_bytes", "n_counts"),
)
ROW_SHAPES = ((), (1,), (3,), (2, 2))
COUNTS = {
    1: ([0], [1], [5]),
    2: ([1, 1], [0, 3], [2, 0], [0, 0], [4, 7]),
    3: ([1, 1, 1], [0, 2, 5], [3, 0, 0], [0, 0, 0], [9, 1, 4]),
}


def array(rows, shape, seed=0):
    made = np.arange(rows * int(np.prod(shape)), dtype=FLOAT).reshape(rows, *shape)
    return made + FLOAT(seed)


def blocks(counts, shape):
    return [array(rows, shape, 10 * rank) for rank, rows in enumerate(counts)]


def calls_of(comm, counts, shape):
    """Return calls with these counts: ``(collective, x, keyword arguments)``."""
    size, rank, total = comm.world_size, comm.rank, sum(counts)
    last = size - 1
    mine, whole = array(counts[rank], shape, rank), array(total, shape, rank)
    out, out_list = np.zeros_like(whole), blocks(counts, shape)
    own, parts = np.zeros_like(mine), blocks(counts, shape)
    yield Collective.ALL_GATHER, mine, {"counts": counts, "out": out}
    yield Collective.ALL_GATHER, mine, {"counts": tuple(counts), "out": out.ravel()}
    yield Collective.ALL_GATHER, mine, {"out": out_list}
    yield Collective.ALL_GATHER, mine, {"counts": counts, "out": out_list}
    yield Collective.GATHER, mine, {"root": last, "counts": counts, "out": out}
    yield Collective.GATHER, mine, {"root": last, "counts": counts, "out": out_list}
    yield Collective.REDUCE_SCATTER, whole, {"op": "sum", "counts": counts, "out": own}
    yield Collective.REDUCE_SCATTER, parts, {"op": "sum", "out": own}
    yield Collective.REDUCE_SCATTER, parts, {"op": "max", "counts": counts, "out": own}
    x = whole if rank == 0 else None
    yield Collective.SCATTER, x, {"root": 0, "counts": counts, "out": own}
    x = parts if rank == 0 else None
    yield Collective.SCATTER, x, {"root": 0, "counts": counts, "out": own}
    received = [counts[rank]] * size  # each sends all `counts`
    got, got_list = array(sum(received), shape), blocks(received, shape)
    both = {"counts": counts, "receive_counts": received}
    yield Collective.ALL_TO_ALL, whole, {**both, "out": got}
    yield Collective.ALL_TO_ALL, parts, {"receive_counts": received, "out": got}
    yield Collective.ALL_TO_ALL, whole, {"counts": counts, "out": got_list}
    yield Collective.ALL_TO_ALL, parts, {"out": got_list}
    yield Collective.ALL_TO_ALL, parts, {**both, "out": got_list}


def table_at(words, field, count):
    """Return the numbers of a table of a call block; None: it has none."""
    address = int(words[field])
    if address == 0:
        return None
    return list((ctypes.c_int64 * count).from_address(address))


def described(words, collective, size):
    """Return all that a call block says of a call with counts or lists."""
    said = {name: int(words[Call.fields[name]]) for name in FIELDS}
    for place in range(min(said["n_dimensions"], 4)):
        said[f"length {place}"] = int(words[Call.dimensions + place])
    if said["n_counts"]:
        said["counts"] = table_at(words, Call.counts, size)
        said["offsets"] = table_at(words, Call.offsets, size + 1)
    else:
        said["block"] = int(words[Call.block_bytes])
        assert words[Call.offsets] == 0
    is_apart = collective in (Collective.ALL_GATHER, Collective.GATHER, Collective.ALL_TO_ALL)
    if is_apart:
        said["landings"] = table_at(words, Call.landings, size)
    said["pieces"] = table_at(words, Call.pieces, 2 * size)
    said["inputs"] = table_at(words, Call.inputs, size)
    return said


def by_python(comm, collective, x, given):
    """Return the call block that Python makes."""
    calls, rank, size = comm._collectives, comm.rank, comm.world_size
    if has_blocks(collective, x, given["out"]):
        given = with_counts(collective, x, given, rank, size)
    request = calls._prepare(collective, x, calls.parse(given)).request
    return BlockMaker(rank, size).of(request).words


def served(comm, collective, x, given):
    """Make a call by its compiled entry, and return whether that took it."""
    entry = getattr(comm, f"_quick_{collective.spelled}_blocks")
    root, out = given.get("root"), given["out"]
    if root is not None and root != comm.rank:
        x, out = (x, x) if collective == Collective.GATHER else (out, out)
    counts = given.get("counts"), given.get("receive_counts")
    return entry(x, out, given.get("op"), root, None, *counts) is not None


def learn_all(comm):
    for collective, x, given in calls_of(comm, [1] * comm.world_size, (1,)):
        comm._call(collective, x, False, None, None, **given)


@pytest.mark.ranks(1, 2, 3)
def test_compiled_code_describes_a_call_as_python_does(comm):
    learn_all(comm)
    size, n_served = comm.world_size, 0
    for counts in COUNTS[size]:
        for shape in ROW_SHAPES:
            for collective, x, given in calls_of(comm, counts, shape):
                uncounted = given.get("counts") is None and len({*counts}) > 1
                if uncounted and collective in (Collective.GATHER, Collective.SCATTER):
                    continue
                is_mine = given.get("root") in (None, comm.rank)
                if collective == Collective.SCATTER and 0 in counts:
                    continue  # a rank that gets nothing cannot tell a row: it asks Python
                if collective == Collective.GATHER and not is_mine:
                    given["out"] = None
                expected = described(by_python(comm, collective, x, given), collective, size)
                assert served(comm, collective, x, {**given, "out": given["out"]}), given
                table = comm._backend._entries[collective, True]
                op, root = given.get("op"), given.get("root")
                (block,) = [e.block for e in table._entries if (e.op, e.root) == (op, root)]
                assert described(block.words, collective, size) == expected
                n_served += 1
    assert n_served > 100


@pytest.mark.ranks(2)
def test_in_place(comm):
    rank, counts = comm.rank, [2, 3]
    before = counts[0] * rank
    for _ in range(2):  # by Python, then by compiled code
        whole = np.zeros(5, FLOAT)
        mine = whole[before : before + counts[rank]]
        mine[:] = rank + 1
        assert comm.all_gather(mine, counts=counts, out=whole) is whole
        assert whole.tolist() == [1, 1, 2, 2, 2]
        comm.reduce_scatter(whole, counts=counts, out=mine)
        assert mine.tolist() == [2.0 * (rank + 1)] * counts[rank]
        both = np.arange(2, dtype=FLOAT) + 10 * rank
        comm.all_to_all(both, send_counts=[1, 1], recv_counts=[1, 1], out=both)
        assert both.tolist() == [rank, 10 + rank]


def all_gather(comm, x, counts, **options):
    return comm.all_gather(x, counts=counts, **options)


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        ([1], ArgumentError),
        ([1, 1, 1], ArgumentError),
        ([1, -1], ArgumentError),
        ([2, 2], ArgumentError),
        ([1, 2**70], ArgumentError),
        ([True, 1], ArgumentTypeError),
        ([1.0, 1.0], ArgumentTypeError),
        (3, ArgumentTypeError),
        ("everything", ArgumentTypeError),
    ],
)
@pytest.mark.ranks(2)
def test_counts_that_are_none_are_refused_as_before(comm, counts, error):
    x = np.ones(1, FLOAT)
    for _ in range(2):
        comm.all_gather(x, counts=[1, 1])
    with pytest.raises(error, match="counts"):
        comm.all_gather(x, counts=counts)
    assert comm.all_gather(x, counts=np.array([1, 1])).tolist() == [1, 1]


def overlapping(comm):
    memory = np.zeros(6, FLOAT)
    comm.all_gather(memory[:2], counts=[2, 2], out=memory[1:5])


def of_another_dtype(comm):
    comm.all_gather(np.ones(2, FLOAT), counts=[2, 2], out=np.zeros(4))


def that_cannot_be_written(comm):
    out = np.zeros(4, FLOAT)
    out.flags.writeable = False
    comm.all_gather(np.ones(2, FLOAT), counts=[2, 2], out=out)


def with_one_block_twice(comm):
    block = np.zeros(2, FLOAT)
    comm.all_gather(np.ones(2, FLOAT), out=[block, block])


def of_too_few_blocks(comm):
    comm.all_gather(np.ones(2, FLOAT), out=[np.zeros(2, FLOAT)])


def of_other_rows(comm):
    comm.all_to_all([np.ones((2, 3), FLOAT), np.ones((2, 2), FLOAT)], out=[np.zeros(6, FLOAT)] * 2)


@pytest.mark.parametrize(
    "call",
    [
        overlapping,
        of_another_dtype,
        that_cannot_be_written,
        with_one_block_twice,
        of_too_few_blocks,
        of_other_rows,
    ],
)
@pytest.mark.ranks(2)
def test_arrays_that_cannot_serve_are_refused_as_before(comm, call):
    x = np.ones(2, FLOAT)
    for _ in range(2):
        comm.all_gather(x, counts=[2, 2])
        comm.all_gather(x, out=[np.zeros(2, FLOAT), np.zeros(2, FLOAT)])
        comm.all_to_all([x, x], out=[np.zeros(2, FLOAT), np.zeros(2, FLOAT)])
    with pytest.raises((ArgumentError, ArgumentTypeError)):
        call(comm)
    assert comm.all_gather(x, counts=[2, 2]).tolist() == [1] * 4


@pytest.mark.ranks(2)
def test_ranks_that_count_differently_are_told(comm):
    x, rank = np.ones(3, FLOAT), comm.rank
    for _ in range(2):
        comm.all_gather(x, counts=[3, 3])
        comm.all_to_all(np.ones(2, FLOAT), send_counts=[1, 1], recv_counts=[1, 1])
    with pytest.raises(MismatchError, match="counts"):
        comm.all_gather(x, counts=[3, 3 + rank] if rank == 0 else [2, 3])
    sent = [1, 1] if rank == 0 else [0, 2]
    with pytest.raises(MismatchError, match="all_to_all"):
        comm.all_to_all(np.ones(2, FLOAT), send_counts=sent, recv_counts=[1, 1])
    assert comm.all_gather(x, counts=[3, 3]).tolist() == [1] * 6


def wait_for_the_other(comm):
    x = np.ones(3, FLOAT)
    for _ in range(2):
        comm.all_gather(x, counts=[3, 3])
    if comm.rank == 0:
        with pytest.raises(DeadlineError, match="all_gather"):
            comm.all_gather(x, counts=[3, 3], timeout_s=0.2)
    else:
        with pytest.raises(GpucollError):  # until the other gives up
            comm.recv(np.empty(1), 0, timeout_s=20.0)


def test_a_deadline(ranks):
    ranks.call(2, wait_for_the_other)


@pytest.mark.ranks(2)
def test_more_kinds_than_the_table_holds(comm):
    for number in range(40):
        dtype = [np.int8, np.int16, np.int32, np.float64][number % 4]
        op = ["sum", "max", "min", "prod", "bor"][number % 4]
        x = np.full(3, comm.rank + 1, dtype)
        expected = {"sum": 3, "max": 2, "min": 1, "prod": 2}[op]
        got = comm.reduce_scatter(x, op, counts=[1, 2])
        assert got.tolist() == [expected] * (1 + comm.rank)
