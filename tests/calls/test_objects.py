"""Python objects between ranks: small ones in one exchange, arrays in them without being copied."""

from __future__ import annotations

import pickle
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpucoll.calls.objects import ROOM
from gpucoll.calls.parcels import LARGE_BYTES
from gpucoll.errors import ArgumentError, ArgumentTypeError, DeadlineError, MismatchError
from gpucoll.transport.shared.words import Context

LARGE = LARGE_BYTES // 8 + 3


class Unpicklable:
    def __reduce__(self):
        raise ValueError("not this one")


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return _fail, ()


def _fail():
    raise KeyError("no such thing here")


def values_of(rank):
    """Return objects of all kinds and sizes, others on each rank."""
    yield None
    yield rank
    yield {"rank": rank, "text": "é" * rank, "list": [rank] * rank}
    for size in (ROOM - 60, ROOM - 24, ROOM - 8, ROOM, ROOM + 1, LARGE_BYTES - 24, LARGE_BYTES):
        yield "x" * (size + rank)
    yield bytes(3 * LARGE_BYTES + rank)
    yield np.arange(5.0) + rank
    yield np.arange(LARGE * (rank + 1)) * 3 + rank
    yield np.asfortranarray(np.arange(12.0 + rank * 0).reshape(3, 4) + rank)
    yield np.arange(20_000.0).reshape(100, 200)[:, ::2] + rank
    yield [np.empty(0), np.ones((0, 3)), np.array(3.5 * rank)]
    yield np.arange(9).astype(ml_dtypes.bfloat16) + ml_dtypes.bfloat16(rank)
    yield {
        "large": np.full(LARGE, rank, np.int32),
        "larger": [np.full(2 * LARGE + rank, 0.5)] * (rank % 3),
        "small": [np.arange(place) for place in range(rank + 40)],
        "bytes": bytearray(b"ab" * LARGE_BYTES),
    }


def alike(a, b):
    """Return whether two objects are of one kind and value."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    return a == b


def everyones(comm):
    """Return, for each kind of object, all ranks' values."""
    return zip(*map(values_of, range(comm.world_size)), strict=True)


def exchange_all(comm):
    """Move every kind of object in every way; return how many went right."""
    last, rank, good = comm.world_size - 1, comm.rank, 0
    for values in everyones(comm):
        mine = values[rank]
        assert alike(comm.broadcast_object(mine if rank == last else None, last), values[last])
        assert alike(comm.all_gather_object(mine), [*values])
        gathered = comm.gather_object(mine, last)
        assert alike(gathered, [*values]) if rank == last else gathered is None
        assert alike(comm.scatter_object(values if rank == last else None, last), mine)
        assert alike(comm.all_reduce_object([mine], list.__add__), [*values])
        good += 1
    return good


@pytest.mark.parametrize("tuning", ["", "single_copy_min_bytes=4611686018427387904", "small"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_objects_of_all_kinds(ranks, world_size, tuning):
    if tuning == "small":
        tuning = "one_shot_bytes=64,rooted_bytes=64"
    environment = {"GPUCOLL_CPU_TUNING": tuning} if tuning else {}
    found = ranks.call(world_size, exchange_all, environment=environment)
    assert found == [len([*values_of(0)])] * world_size


@pytest.mark.ranks(2)
def test_a_small_object_takes_one_exchange(comm):
    def taken(call):
        before = int(comm._group.context[Context.sequence])
        call()
        return int(comm._group.context[Context.sequence]) - before

    small, large = list(range(100)), np.ones(LARGE)
    items = [small, small] if comm.rank == 0 else None
    assert taken(lambda: comm.broadcast_object(small)) == 1
    assert taken(lambda: comm.all_gather_object(small)) == 1
    assert taken(lambda: comm.gather_object(small)) == 1
    assert taken(lambda: comm.scatter_object(items)) == 1
    assert taken(lambda: comm.all_reduce_object(small, list.__add__)) == 1
    assert taken(lambda: comm.broadcast_object(large)) == 2


@pytest.mark.ranks(2)
def test_who_gave_an_object_keeps_it_and_others_get_their_own(comm):
    mine = {"a": np.ones(LARGE), "b": np.ones(3), "c": np.ones(2 * LARGE)}
    given = comm.broadcast_object(mine)
    assert (given is mine) == (comm.rank == 0)
    if comm.rank == 1:
        for array in given.values():
            assert array.flags.writeable
            assert array.ctypes.data % 8 == 0
            array += 1
    gathered = comm.all_gather_object(mine)
    assert gathered[comm.rank] is mine
    gathered[1 - comm.rank]["a"][:] = 5
    comm.barrier()
    assert mine["a"].max() == 1.0
    items = [np.ones(LARGE), np.ones(LARGE)]
    received = comm.scatter_object(items if comm.rank == 1 else None, 1)
    assert (received is items[1]) == (comm.rank == 1)
    frozen = np.ones(LARGE)
    frozen.flags.writeable = False
    assert not comm.broadcast_object(frozen).flags.writeable


@pytest.mark.ranks(3)
def test_a_broadcast_by_an_entry_fails_as_the_first_one_does(comm):
    assert [comm.broadcast_object("first", root) for root in range(3)] == ["first"] * 3
    assert [*comm._objects.broadcasts] == [0, 1, 2]
    value = Unpicklable() if comm.rank == 1 else None
    with pytest.raises(ArgumentTypeError, match="rank 1 of 3: this Unpicklable cannot be pickled"):
        comm.broadcast_object(value, 1)
    with pytest.raises(MismatchError, match=r"all_gather_object.*broadcast_object"):
        comm.all_gather_object(1) if comm.rank == 1 else comm.broadcast_object(1, 1)
    with pytest.raises(MismatchError, match="root=2"):
        comm.broadcast_object(1, 2 if comm.rank == 2 else 0)
    for root in (True, 1.0, "1", None):
        with pytest.raises(ArgumentTypeError, match="root must be an int"):
            comm.broadcast_object(1, root)
    with pytest.raises(ArgumentError, match=r"root must be in 0\.\.2; got 3"):
        comm.broadcast_object(1, 3)
    with pytest.raises(ArgumentTypeError, match="inside group"), comm.group():
        comm.broadcast_object(1)
    assert comm.broadcast_object(comm.rank, np.int64(2)) == 2
    large = comm.broadcast_object(np.full(LARGE, comm.rank), 1)
    assert large.shape == (LARGE,)
    assert set(large.tolist()) == {1}
    assert comm.broadcast_object([comm.rank], 1) == [1]


@pytest.mark.ranks(2)
def test_the_deadline_of_a_broadcast_by_an_entry(comm):
    assert comm.broadcast_object("first") == "first"
    comm._group._set_timeout(0.2)
    if comm.rank == 0:
        with pytest.raises(DeadlineError, match="broadcast_object"):
            comm.broadcast_object("second")
    else:
        time.sleep(0.5)


@pytest.mark.ranks(3)
def test_a_function_may_change_what_it_gets(comm):
    mine = [comm.rank]

    def extend(left, right):
        left += right
        return left

    assert comm.all_reduce_object(mine, extend) == [0, 1, 2]
    assert mine == [comm.rank]


CALLS = {
    "broadcast_object": lambda comm, value: comm.broadcast_object(value, 1),
    "all_gather_object": lambda comm, value: comm.all_gather_object(value),
    "gather_object": lambda comm, value: comm.gather_object(value, 0),
    "scatter_object": lambda comm, value: comm.scatter_object([value] * 3, 1),
    "all_reduce_object": lambda comm, value: comm.all_reduce_object(value, list.__add__),
}


@pytest.mark.parametrize("size", [1, 5000, LARGE_BYTES])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ranks(3)
def test_every_rank_is_told_of_what_cannot_be_pickled(comm, name, size):
    value = Unpicklable() if comm.rank == 1 else ["x" * size]
    for _ in range(2):
        with pytest.raises(ArgumentTypeError, match="cannot be pickled: not this one") as caught:
            CALLS[name](comm, value)
        assert f"{name} on rank {comm.rank} of 3" in str(caught.value)
        assert f"{name} on rank 1 of 3: this Unpicklable" in str(caught.value)
    assert comm.all_reduce(1) == 3
    with pytest.raises(ArgumentTypeError, match="function cannot be pickled"):
        comm.all_gather_object(lambda: 0)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.ranks(3)
def test_what_cannot_be_unpickled_is_the_receiver_s_error(comm, name):
    value = [Unreadable(), np.ones(LARGE)] if comm.rank == 1 else [1]
    receives = comm.rank != 1 and (name != "gather_object" or comm.rank == 0)
    if receives or name == "all_reduce_object":  # which gets copies of its own objects, too
        with pytest.raises(KeyError, match="no such thing here"):
            CALLS[name](comm, value)
    else:
        CALLS[name](comm, value)
    assert comm.all_reduce(1) == 3


class Talkative:
    """Calls a collective where it is unpickled, on every rank but that which sent it."""

    comm: Any = None

    def __init__(self, text):
        self.text = text

    def __reduce__(self):
        return Talkative.read, (self.text,)

    @staticmethod
    def read(text):
        assert Talkative.comm.all_gather_object("inner" * 100)[0] == "inner" * 100
        return text


@pytest.mark.ranks(2)
def test_unpickling_may_call_another_collective(comm):
    Talkative.comm = comm
    try:
        found = comm.broadcast_object(Talkative("outer"))
        if comm.rank == 0:
            comm.all_gather_object("inner" * 100)
        else:
            assert found == "outer"
    finally:
        Talkative.comm = None


@pytest.mark.ranks(2)
def test_objects_behind_asynchronous_calls(comm):
    x = np.ones(200_000)
    works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
    assert comm.all_gather_object(comm.rank) == [0, 1]
    assert all(work.wait()[0] == 2.0 for work in works)
    assert pickle.loads(pickle.dumps(comm.broadcast_object({"a": 1}))) == {"a": 1}
