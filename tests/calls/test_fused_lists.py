"""Lists of arrays in one call: all_reduce where they lie, broadcast and reduce packed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests import oracle
from tests.guarded import Guarded

from gpucoll.errors import ArgumentError, ArgumentTypeError, MismatchError, StateError

COUNTS = {
    "one": (5,),
    "small": (0, 1, 3, 64, 1000),
    "around a slot": (16383, 1, 0, 2),
    "around a chunk": (1, 20_000, 7, 40_000, 3),
    "many": tuple(1 + 37 * place % 211 for place in range(500)),
    "empty ones": (0, 0),
}
CALLS: dict[str, Callable[[list[np.ndarray]], list[Any]]] = {
    "all_reduce": functools.partial(oracle.all_reduce, op="sum"),
    "reduce": functools.partial(oracle.reduce, op="sum", root=0),
    "broadcast": functools.partial(oracle.broadcast, root=0),
}


def values(count, dtype, rank, place):
    """Return whole numbers whose sums are exact, others on every rank and in every array."""
    return ((np.arange(count) * 7 + 31 * rank + place) % 97).astype(dtype)


def inputs_of(comm, counts, dtypes):
    """Return each array's inputs on all ranks, by rank."""
    return [
        [values(count, dtypes[place % len(dtypes)], rank, place) for rank in range(comm.world_size)]
        for place, count in enumerate(counts)
    ]


def allocation(comm, placement):
    return {"allocate": lambda size: comm.empty(size, "uint8")} if placement == "shared" else {}


ONE_DTYPE, THREE = ["f4"], ["f8", "i2", "f4"]
COVERING = [
    pytest.param(counts, dtypes, placement, id=f"{name}-{len(dtypes)}-{placement}")
    for turn, (name, counts) in enumerate(COUNTS.items())
    for dtypes, placement in zip(
        (ONE_DTYPE, THREE), (("private", "shared"), ("shared", "private"))[turn % 2], strict=True
    )
]
"""Each two of counts, dtypes and placements; for all calls and all numbers of ranks."""


@pytest.mark.soak(quick=9)
@pytest.mark.parametrize(("counts", "dtypes", "placement"), COVERING)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ranks(1, 2, 3, 4)
def test_lists(comm, name, counts, dtypes, placement):
    """Twice: the second call may take the compiled entry; in place, too."""
    everyone = inputs_of(comm, counts, dtypes)
    expected = [CALLS[name](inputs)[comm.rank] for inputs in everyone]
    memory = allocation(comm, placement)
    for is_in_place in (False, True, False, True):
        mine = [
            Guarded(part[0].shape, part[0].dtype, place % 3 * part[0].itemsize, **memory)
            for place, part in enumerate(everyone)
        ]
        outs = (
            mine if is_in_place else [Guarded(x.array.shape, x.array.dtype, **memory) for x in mine]
        )
        for guarded, part in zip(mine, everyone, strict=True):
            guarded.array[:] = part[comm.rank]
        xs, out = [x.array for x in mine], [x.array for x in outs]

        results = getattr(comm, name)(xs, out=out)

        if name == "reduce" and comm.rank != 0:
            assert results is None
            for guarded, part in zip(mine, everyone, strict=True):
                np.testing.assert_array_equal(guarded.array, part[comm.rank])
        else:
            for place, (array, right) in enumerate(zip(out, expected, strict=True)):
                assert results[place] is array
                np.testing.assert_array_equal(array, right)
        for guarded in (*mine, *outs):
            guarded.check(name)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ranks(2)
def test_new_arrays_come_back_as_the_same_kind_of_sequence(comm, name):
    xs: Any = (np.ones((2, 3), "f4"), np.ones(4, "i8"), np.float32(2))
    results = getattr(comm, name)(xs)
    if name == "reduce" and comm.rank != 0:
        assert results is None
        return
    factor = 1 if name == "broadcast" else 2
    assert type(results) is tuple
    for x, result in zip(xs, results, strict=True):
        assert (type(result), result.dtype, result.shape) == (type(x), x.dtype, x.shape)
        assert (result == factor * x).all()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ranks(2)
def test_asynchronous_and_grouped(comm, name):
    xs = [np.full(30_000, comm.rank + 1.0), np.arange(3)]
    right = {"all_reduce": [3.0, 2], "reduce": [3.0, 2], "broadcast": [1.0, 1]}[name]
    gets = name != "reduce" or comm.rank == 0
    work = getattr(comm, name)(xs, async_op=True)
    with_group = [np.empty_like(x) for x in xs]
    found = work.wait()
    with comm.group():
        getattr(comm, name)(xs, out=with_group)
    for results in (found, with_group) if gets else ():
        assert (results[0] == right[0]).all()
        assert (results[1] == right[1] * xs[1]).all()


@pytest.mark.ranks(2)
def test_columns_are_packed_and_filled(comm):
    table, out = np.arange(12.0).reshape(3, 4), np.zeros((3, 4))
    results = comm.all_reduce([table[:, 1], np.ones(2)], out=[out[:, 2], np.empty(2)])
    assert out[:, 2].tolist() == [2.0, 10.0, 18.0]
    assert not out[:, [0, 1, 3]].any()
    assert results[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ranks(2)
def test_an_empty_list_or_tuple_comes_back_empty(comm, name):
    gets = name != "reduce" or comm.rank == 0
    assert getattr(comm, name)([]) == ([] if gets else None)
    assert getattr(comm, name)(()) == (() if gets else None)


@pytest.mark.ranks(2)
def test_what_cannot_be_fused_is_refused_before_anything_moves(comm):
    x, whole = np.ones(4), np.ones(6)
    with pytest.raises(ArgumentTypeError, match="out must be a list of 2 arrays"):
        comm.all_reduce([x, x + 1], out=[x])
    with pytest.raises(ArgumentError, match="share memory"):
        comm.all_reduce([whole[:4], whole[2:]], out=[whole[:4], whole[2:]])
    with pytest.raises(ArgumentError, match="arrays 0 and 1 of the list share memory"):
        comm.broadcast([x, x], out=[x, x])
    with pytest.raises(ArgumentTypeError, match="array 1 of the list"):
        comm.reduce([x, "text"])
    comm.barrier()


@pytest.mark.parametrize(
    "different",
    [
        lambda xs: xs[:-1],
        lambda xs: [*xs[:-1], xs[-1].astype("f4")],
        lambda xs: [*xs[:-1], xs[-1][:-1]],
    ],
    ids=["fewer", "another dtype", "another size"],
)
@pytest.mark.ranks(2)
def test_lists_that_differ_are_a_mismatch(comm, different):
    xs = [np.ones(3), np.ones(5)]
    with pytest.raises(MismatchError):
        comm.all_reduce(different(xs) if comm.rank else xs)
    assert comm.all_reduce(np.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.ranks(1)
def test_a_plan_takes_one_array(comm):
    with pytest.raises((ArgumentTypeError, StateError)):
        comm.plan_all_reduce([np.ones(3)])
