"""Lists of blocks: one array for each rank, as input or output, where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from tests import oracle
from tests.collective_cases import SINGLE_COPY_TUNING, SMALL_TUNING
from tests.guarded import Guarded

from gpucoll.errors import ArgumentError, ArgumentTypeError, GpucollError, MismatchError

NO_SINGLE_COPY = {"GPUCOLL_CPU_TUNING": f"single_copy_min_bytes={2**62}"}
SIZES = [0, 1, 3, 700, 40_000]  # rows of two float32: through slots, stages, other processes


def values(rank, rows, seed=0):
    return (np.arange(rows * 2, dtype=np.float32) * 7 + 31 * rank + seed).reshape(rows, 2) % 97


def blocks_of(x, counts):
    return [block.copy() for block in oracle.blocks(x, len(counts), counts)]


def even(comm, rows):
    return [rows] * comm.world_size


def uneven(comm, rows):
    """Return rows for each rank that differ; some have none."""
    return [rows * (rank % 3) + rank % 2 for rank in range(comm.world_size)]


COUNTS = {"even": even, "uneven": uneven}


def guarded(comm, placement, rows):
    """Return arrays with guards around them, of so many rows each."""
    how = {"allocate": lambda size: comm.empty(size, "uint8")} if placement == "shared" else {}
    return [Guarded((count, 2), np.dtype(np.float32), 4, **how) for count in rows]


class Outputs:
    """A list of guarded arrays, and what looks at them."""

    def __init__(self, comm, placement, rows):
        self.guards = guarded(comm, placement, rows)
        self.list = [guard.array for guard in self.guards]

    def check(self, given, expected):
        assert given is self.list
        for guard, values_ in zip(self.guards, expected, strict=True):
            assert np.array_equal(guard.array, values_)
            guard.check()


def check_all_gather_and_gather(comm, rows, kind, placement):
    counts = COUNTS[kind](comm, rows)
    inputs = [values(rank, count) for rank, count in enumerate(counts)]
    x = inputs[comm.rank].copy()
    for given in (None, counts) if kind == "even" else (None, counts, "auto"):
        outs = Outputs(comm, placement, counts)
        outs.check(comm.all_gather(x, out=outs.list, counts=given), inputs)
        root = comm.world_size - 1
        if kind == "uneven" and given is None and len({*counts}) > 1:
            continue  # the others do not know
        outs = Outputs(comm, placement, counts)
        gathered = comm.gather(x, root, out=outs.list, counts=given)
        if comm.rank == root:
            outs.check(gathered, inputs)
        else:
            assert gathered is None
    assert np.array_equal(x, inputs[comm.rank])


@pytest.mark.soak(quick=6)
@pytest.mark.parametrize("placement", ["private", "shared"])
@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.ranks(1, 2, 3, 4)
def test_all_gather_and_gather(comm, kind, placement):
    for rows in SIZES:
        check_all_gather_and_gather(comm, rows, kind, placement)


def check_reduce_scatter_and_scatter(comm, rows, kind, placement):
    counts = COUNTS[kind](comm, rows)
    whole = [values(rank, sum(counts)) for rank in range(comm.world_size)]
    xs = blocks_of(whole[comm.rank], counts)
    kept = [x.copy() for x in xs]
    expected = oracle.reduce_scatter(whole, counts=counts)[comm.rank]
    for given in (None, counts):
        (out,) = guarded(comm, placement, [counts[comm.rank]])
        assert comm.reduce_scatter(xs, out=out.array, counts=given) is out.array
        assert np.array_equal(out.array, expected)
        assert np.array_equal(comm.reduce_scatter(xs, counts=given), expected)
    root, known = comm.world_size - 1, None if len({*counts}) == 1 else counts
    expected = oracle.scatter(whole, root, counts)[comm.rank]
    for given in {known is None: known, False: counts, True: known}.values():
        (out,) = guarded(comm, placement, [counts[comm.rank]])
        mine = xs if comm.rank == root else None
        assert comm.scatter(mine, root, out=out.array, counts=given) is out.array
        assert np.array_equal(out.array, expected)
        assert np.array_equal(comm.scatter(xs, root, counts=given), expected)  # lists as templates
    assert all(np.array_equal(x, y) for x, y in zip(xs, kept, strict=True))


@pytest.mark.soak(quick=6)
@pytest.mark.parametrize("placement", ["private", "shared"])
@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.ranks(1, 2, 3, 4)
def test_reduce_scatter_and_scatter(comm, kind, placement):
    for rows in SIZES:
        check_reduce_scatter_and_scatter(comm, rows, kind, placement)


def check_all_to_all(comm, rows, kind, placement):
    size, rank = comm.world_size, comm.rank
    table = [COUNTS[kind](comm, rows + 2 * r) for r in range(size)]
    if kind == "even":
        table = [COUNTS[kind](comm, rows)] * size
    whole = [values(r, sum(table[r])) for r in range(size)]
    received = [table[s][rank] for s in range(size)]
    expected = blocks_of(oracle.all_to_all(whole, table)[rank], received)
    xs = blocks_of(whole[rank], table[rank])
    outs = Outputs(comm, placement, received)
    outs.check(comm.all_to_all(xs, out=outs.list), expected)
    new = comm.all_to_all(tuple(xs))
    assert type(new) is tuple
    assert all(np.array_equal(a, b) for a, b in zip(new, expected, strict=True))
    together = np.empty((sum(map(len, expected)), 2), np.float32)
    assert comm.all_to_all(xs, out=together) is together
    assert np.array_equal(together, np.concatenate(expected))
    outs = Outputs(comm, placement, received)
    outs.check(comm.all_to_all(whole[rank], send_counts=table[rank], out=outs.list), expected)
    if kind == "even":
        outs = Outputs(comm, placement, received)
        outs.check(comm.all_to_all(whole[rank], out=outs.list), expected)
        outs.check(comm.all_to_all(outs.list, out=outs.list), blocks_of(whole[rank], table[rank]))


@pytest.mark.soak(quick=6)
@pytest.mark.parametrize("placement", ["private", "shared"])
@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.ranks(1, 2, 3, 4)
def test_all_to_all(comm, kind, placement):
    for rows in SIZES:
        check_all_to_all(comm, rows, kind, placement)


@pytest.mark.ranks(1, 2, 3)
def test_in_place(comm):
    size, rank = comm.world_size, comm.rank
    for rows in (3, 40_000):
        whole = [values(r, size * rows) for r in range(size)]
        xs = blocks_of(whole[rank], even(comm, rows))
        outs = [np.zeros((rows, 2), np.float32) for _ in range(size)]
        outs[rank][:] = values(rank, rows)
        comm.all_gather(outs[rank], out=outs)
        assert all(np.array_equal(outs[r], values(r, rows)) for r in range(size))
        own = xs[rank].copy()
        assert comm.reduce_scatter(xs, out=xs[rank]) is xs[rank]
        assert np.array_equal(xs[rank], oracle.reduce_scatter(whole)[rank])
        xs[rank][:] = own
        comm.scatter(xs, 0, out=xs[0] if rank == 0 else np.empty((rows, 2), np.float32))
        outs[rank] = xs[rank]
        comm.all_to_all(xs, out=outs)
        for r in range(size):
            assert np.array_equal(outs[r], blocks_of(whole[r], even(comm, rows))[rank])


@pytest.mark.ranks(2)
def test_views_numbers_of_dimensions_and_shapes(comm):
    x = np.arange(6.0).reshape(3, 2) + 10 * comm.rank
    outs = [np.zeros((6, 2)).T[:, ::2], np.zeros(6)]  # one that is filled, one of another shape
    assert comm.all_gather(x, out=outs) is outs
    assert outs[0].ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert outs[1].tolist() == [10, 11, 12, 13, 14, 15]
    points = [np.array(1.0), np.array(2.0)]
    scalars = [np.zeros(()), np.zeros(())]
    comm.all_gather(np.array(float(comm.rank)), out=scalars)
    assert [float(each) for each in scalars] == [0.0, 1.0]
    assert comm.reduce_scatter(points).shape == ()
    assert float(comm.reduce_scatter(points)) == 2.0 * (comm.rank + 1)
    assert [float(each) for each in comm.all_to_all(points)] == [comm.rank + 1.0] * 2
    strided = [np.arange(8.0)[::2], np.arange(8.0)[1::2]]
    assert comm.reduce_scatter(strided).tolist() == [2.0 * v for v in strided[comm.rank]]
    same = [x, x]  # inputs may be one array
    assert np.array_equal(comm.scatter(same, 1), np.arange(6.0).reshape(3, 2) + 10)
    records = [np.zeros(2, "i4,f8"), np.ones(2, "i4,f8")]
    assert comm.all_to_all(records)[0].tolist() == records[comm.rank].tolist()


@pytest.mark.ranks(2, 3)
def test_a_rank_may_have_a_list_and_another_an_array(comm):
    for rows in (1, 150, 20_000):
        check_mixed(comm, rows)


def check_mixed(comm, rows):
    size, rank = comm.world_size, comm.rank
    whole = [values(r, size * rows) for r in range(size)]
    mine = blocks_of(whole[rank], even(comm, rows)) if rank else whole[0]
    expected = oracle.reduce_scatter(whole)[rank]
    assert np.array_equal(comm.reduce_scatter(mine), expected)
    shared = comm.empty((size * rows, 2), np.float32)
    shared[:] = whole[rank]
    assert np.array_equal(comm.reduce_scatter(mine if rank else shared), expected)
    gathered = np.zeros((size * rows, 2), np.float32)
    blocks = blocks_of(gathered, even(comm, rows))
    comm.all_gather(whole[rank][:rows], out=blocks if rank else gathered)
    gathered = np.concatenate(blocks) if rank else gathered
    assert np.array_equal(gathered, np.concatenate([x[:rows] for x in whole]))


def with_all_ways(comm):
    for kind in COUNTS:
        check_all_gather_and_gather(comm, 700, kind, "private")
        check_reduce_scatter_and_scatter(comm, 700, kind, "private")
        check_all_to_all(comm, 700, kind, "private")
        check_all_to_all(comm, 20_000, kind, "private")
    check_mixed(comm, 700)


@pytest.mark.parametrize("tuning", [SMALL_TUNING, SINGLE_COPY_TUNING, NO_SINGLE_COPY])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ways_that_pieces_take(ranks, world_size, tuning):
    ranks.call(world_size, with_all_ways, environment=tuning)


@pytest.mark.ranks(2)
def test_asynchronous_planned_grouped_and_with_deadlines(comm):
    other = 1 - comm.rank
    x = np.full(4, comm.rank + 1.0)
    outs, xs = [np.empty(4), np.empty(4)], [x, x + 10]
    work = comm.all_gather(x, out=outs, async_op=True)
    assert work.wait() is outs
    assert [out[0] for out in outs] == [1.0, 2.0]
    assert comm.all_to_all(xs, async_op=True).wait()[other][0] == other + 1.0 + 10 * comm.rank
    plan = comm.plan_all_to_all(xs, out=outs)
    for _ in range(3):
        x += 1
        assert plan() is outs
        assert outs[comm.rank][0] == xs[comm.rank][0]
    planned = comm.plan_reduce_scatter(xs)
    assert planned() is planned.out
    with comm.group():
        given = comm.all_gather(x, out=outs)
        assert given is outs
    assert outs[comm.rank].tolist() == x.tolist()
    assert comm.all_gather(x, out=outs, timeout_s=5.0) is outs
    with pytest.raises(ArgumentError, match="does not ask the other ranks"):
        comm.plan_all_to_all(xs)


def at_another_s_place(comm, x):
    outs = [np.ones(3), np.ones(3)]
    outs[1 - comm.rank] = x
    comm.all_gather(x, out=outs)


def partly_in_place(comm, xs):
    outs = [np.ones(3), np.ones(3)]
    outs[1 - comm.rank] = xs[1 - comm.rank]
    comm.all_to_all(xs, out=outs)


X = np.ones(3)
WRONG = {
    "too few outputs": (lambda c: c.all_gather(X, out=[X]), "must be a list of 2 arrays.*got 1"),
    "too many inputs": (lambda c: c.reduce_scatter([X] * 3), "must be a list of 2 arrays.*got 3"),
    "nothing": (lambda c: c.all_to_all([]), "x must be an array"),
    "a number": (lambda c: c.scatter([X, 3], c.rank), r"x\[1\] must be an array; got int"),
    "None": (lambda c: c.all_gather(X, out=[X, None]), r"out\[1\] must be an array; got NoneType"),
    "dtype": (lambda c: c.reduce_scatter([X, np.ones(3, "f4")]), r"x\[1\] has dtype float32"),
    "dtype of out": (
        lambda c: c.all_gather(X, out=[np.ones(3), np.ones(3, "f4")]),
        r"out\[1\] has dtype float32",
    ),
    "dtypes of x and out": (
        lambda c: c.all_gather(X, out=[np.ones(3, "f4")] * 2),
        "out has dtype float32, but x has float64",
    ),
    "shape of out": (
        lambda c: c.all_gather(X, out=[np.ones(4), np.ones(4)]),
        r"out\[0\].*4 elements.*3 elements",
    ),
    "rows": (
        lambda c: c.reduce_scatter([np.ones((2, 3)), np.ones((2, 4))]),
        r"x\[1\] has rows \(4,\), but x\[0\] has rows \(3,\)",
    ),
    "no whole rows": (
        lambda c: c.all_gather(np.ones((2, 3)), out=[np.ones(7), np.ones(6)]),
        "not a whole number of x's rows",
    ),
    "counts": (
        lambda c: c.all_to_all([X, X], send_counts=[3, 4], recv_counts=[3, 4]),
        "the blocks of x have",
    ),
    "counts of outputs": (
        lambda c: c.all_gather(X, counts=[3, 3], out=[np.ones(3), np.ones(4)]),
        r"out\[1\]",
    ),
    "a root alone": (
        lambda c: c.gather(X, c.rank, out=[np.ones(3), np.ones(4)]),
        "which the other ranks do not know",
    ),
    "overlapping outputs": (lambda c: c.all_gather(X, out=[np.ones(3)] * 2), "shares memory"),
    "in place at another's": (lambda c: at_another_s_place(c, X.copy()), "shares memory"),
    "partly in place": (
        lambda c: partly_in_place(c, [X.copy(), X.copy()]),
        r"only blocks .* are in place",
    ),
    "read-only": (
        lambda c: c.all_gather(X, out=[np.ones(3), np.broadcast_to(1.0, 3)]),
        r"out\[1\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.ranks(2)
def test_what_cannot_be(comm, name):
    call, message = WRONG[name]
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        call(comm)
    assert comm.all_reduce(1) == 2


@pytest.mark.ranks(2)
def test_what_ranks_do_not_agree_on(comm):
    rows = 3 + comm.rank
    with pytest.raises(MismatchError):
        comm.reduce_scatter([np.ones(rows), np.ones(rows)])
    with pytest.raises(MismatchError):
        comm.all_to_all([np.ones(3), np.ones(rows)], out=[np.ones(3), np.ones(3)])
    with pytest.raises(GpucollError):  # one asks for counts, one has none
        comm.all_to_all([X, X], out=[np.ones(3), np.ones(3)]) if comm.rank else comm.all_to_all(
            np.ones(6)
        )
    assert comm.all_reduce(1) == 2
