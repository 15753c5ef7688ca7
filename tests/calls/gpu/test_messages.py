"""Sends and receives, groups and lists of GPU arrays."""

from __future__ import annotations

import numpy as np
import pytest
from tests.calls.gpu.conftest import EVERYWHERE, REPLAYED
from tests.calls.gpu.failing import certainly, counted, ones
from tests.calls.gpu.kits import Guarded
from tests.dtypes import assert_same, small_values
from tests.faults.test_ends import errors

import gpucoll
from gpucoll.errors import ArgumentError, ArgumentTypeError, DeadlineError, StateError


def array(kit, dtype, count, seed, shape=None):
    values = small_values(dtype, count, seed).reshape(shape or (count,))
    made = Guarded(kit, values.shape, values.dtype)
    kit.write(made.array, values)
    return made.array, values


def poisoned(kit, dtype, shape):
    return Guarded(kit, shape, np.dtype(dtype)).array


def pass_around(comm, kit):
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    comm.all_reduce(array(kit, "int8", 1, 0)[0])
    for dtype, count in (("int16", 5), ("complex128", 1000), ("bool", 0), ("float32", 70_000)):
        mine, _ = array(kit, dtype, count, comm.rank)
        expected = small_values(dtype, count, left)
        out = poisoned(kit, dtype, (count,))
        assert comm.send_recv(mine, right, left, out) is out
        assert_same(kit.read(out), expected)
        assert_same(kit.read(comm.send_recv(mine, right, left)), expected)
        assert_same(kit.read(comm.send_recv(mine, right, left, async_op=True).wait()), expected)
        with comm.group():
            comm.send(mine, right, tag=3)
            got = comm.recv(poisoned(kit, dtype, (count,)), left, tag=3)
            same = comm.recv(like=mine, source=left, tag=3)
            comm.send(mine, right, tag=3)
        assert_same(kit.read(got), expected)
        assert_same(kit.read(same), expected)
        with comm.group(async_op=True):
            sent = comm.send(mine, right, tag=3, async_op=True)
            works = [comm.recv(like=mine, source=left, tag=3, async_op=True)]
            works.append(comm.all_gather(mine, async_op=True))
        assert sent.wait() is None
        got, gathered = (work.wait() for work in works)
        assert_same(kit.read(got), expected)
        parts = [small_values(dtype, count, rank) for rank in range(comm.world_size)]
        assert_same(kit.read(gathered), np.concatenate(parts))
        works[0].synchronize()
    comm.check()


@EVERYWHERE
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_around_the_ring(gpus, world_size):
    gpus.call(world_size, pass_around)


def in_order(comm, kit):
    comm.all_reduce(array(kit, "int8", 1, 0)[0])
    if comm.rank == 0:
        for place in range(50):
            comm.send(array(kit, "int32", 10, place)[0], 1)
        work = comm.send(array(kit, "int32", 10, 50)[0], 1, async_op=True)
        work.synchronize()
    else:
        for place in range(51):
            out = poisoned(kit, "int32", (2, 5))
            assert comm.recv(out, 0) is out
            assert_same(kit.read(out).reshape(-1), small_values("int32", 10, place))
    comm.check()


def test_messages_come_in_order(gpus):
    gpus.call(2, in_order)


def refuse_in_a_group_of_works(comm, x):
    with (
        pytest.raises(ArgumentError, match=r"all_reduce: inside group\(async_op=True\) it needs"),
        comm.group(async_op=True),
    ):
        comm.all_reduce(x)
    plan = comm.plan_all_reduce(x, out=x)
    with pytest.raises(ArgumentError, match="a plan returns no Work"), comm.group(async_op=True):
        plan()
    with pytest.raises(StateError, match="do not nest"), comm.group(async_op=True), comm.group():
        pass
    with pytest.raises(ZeroDivisionError), comm.group(async_op=True):  # noqa: PT012
        work = comm.all_reduce(x, async_op=True)
        uses = (work.wait, work.done, work.synchronize, work.exception, work.fileno)
        for use in (*uses, lambda: work.add_done_callback(print)):
            with pytest.raises(StateError, match="all_reduce has not started"):
                use()
        raise ZeroDivisionError
    with pytest.raises(StateError, match="unless that block raises"):
        work.wait()


def refuse(comm, kit):
    x, _ = array(kit, "float32", 4, 0)
    with pytest.raises(StateError, match="not connected yet, and only two ranks make"):
        comm.send(x, (comm.rank + 1) % comm.world_size)
    comm.all_reduce(x)
    for call in (
        lambda: comm.recv(x, gpucoll.ANY_SOURCE),
        lambda: comm.recv(x, 0, gpucoll.ANY_TAG),
        lambda: comm.send_recv(x, 0, gpucoll.ANY_SOURCE),
    ):
        with pytest.raises(ArgumentError, match="must name its source and tag"):
            call()
    with pytest.raises(ArgumentError, match="this rank itself would wait for ever"):
        comm.send(x, comm.rank)
    with pytest.raises(ArgumentError, match="dest must be in"):
        comm.send(x, 7)
    with pytest.raises(ArgumentError, match="inside group"), comm.group():
        comm.all_reduce(x, async_op=True)
    refuse_in_a_group_of_works(comm, x)
    y = poisoned(kit, "float32", (4,))
    for uses in (
        lambda: comm.all_reduce(y),
        lambda: comm.broadcast(y, out=y),
        lambda: comm.send(y[2:], 1 - comm.rank),
    ):
        with pytest.raises(ArgumentError, match=r"call 1 .* share memory"), comm.group():  # noqa: PT012
            comm.all_reduce(x, out=y)
            uses()
    with pytest.raises(ArgumentTypeError, match="filled at the end"), comm.group():
        comm.all_reduce(
            x, out=kit.seen_as(kit.bytes_of(np.zeros(32, np.uint8)), (8,), "float32")[::2]
        )
    return kit.read(comm.all_reduce(x)).tolist()


def test_what_is_refused(gpus):
    gpus.call(2, refuse)


def never_received(rank):
    with rank.init() as comm:
        comm.all_reduce(array(rank.kit, "int8", 1, 0)[0])
        comm.check()
        if rank.rank == 0:
            comm.send(array(rank.kit, "float64", 70_000, 0)[0], 1, timeout_s=0.3)
            with pytest.raises(DeadlineError, match=r"waited 0.3 s in send on the GPU"):
                comm.check()


def test_a_message_that_nobody_receives_is_a_deadline(gpus):
    assert gpus.replies(2, never_received)[0].error is None


def grouped(comm, kit):
    rank, size = comm.rank, comm.world_size
    x, _ = array(kit, "float64", 6, rank)
    y, _ = array(kit, "int32", 3, rank)
    host = np.full(3, float(rank))
    calls = 0
    with comm.group():
        total = comm.all_reduce(x)
        gathered = comm.all_gather(y)
        on_host = comm.all_reduce(host)
        moved = comm.send_recv(
            y, (rank + 1) % size, (rank - 1) % size, poisoned(kit, "int32", (3,))
        )
        step = comm.broadcast(x, out=poisoned(kit, "float64", (6,)))
        calls += 1
    comm.check()
    inputs = [small_values("float64", 6, place) for place in range(size)]
    assert_same(kit.read(total), sum(inputs[1:], inputs[0]))
    parts = [small_values("int32", 3, place) for place in range(size)]
    assert_same(kit.read(gathered), np.concatenate(parts))
    assert_same(kit.read(moved), parts[(rank - 1) % size])
    assert_same(kit.read(step), inputs[0])
    return on_host.tolist()


@EVERYWHERE
def test_a_group_is_one_group_of_the_library(gpus):
    size = gpus.world(3)
    assert gpus.call(3, grouped) == [[float(sum(range(size)))] * 3] * size


def connect_in_a_group(rank):
    with rank.init() as comm:
        with comm.group():
            y = comm.all_reduce(array(rank.kit, "int32", 3, 0)[0])
        starts = rank.control.calls("ncclGroupStart")
        step = comm.plan_all_reduce(array(rank.kit, "int32", 3, 0)[0])
        with comm.group():
            planned = step()
            comm.all_reduce(array(rank.kit, "int32", 3, 0)[0])
        comm.check()
        assert rank.control.calls("ncclGroupStart") == starts + 1
        return (rank.kit.read(y) == 2 * small_values("int32", 3, 0)).all(), (
            rank.kit.read(planned) == rank.kit.read(y)
        ).all()


def test_the_first_call_may_be_in_a_group_and_plans_take_part(gpus):
    assert gpus.call_ranks(2, connect_in_a_group) == [(True, True)] * 2


LISTS = [("float32", (3, 4)), ("int64", (5,)), ("float32", ()), ("float32", (0,)), ("int64", (2,))]


def lists(comm, kit):
    def values(rank):
        return [
            small_values(dtype, int(np.prod(shape)), 10 * rank + place).reshape(shape)
            for place, (dtype, shape) in enumerate(LISTS)
        ]

    inputs = [values(rank) for rank in range(comm.world_size)]
    xs = []
    for value in inputs[comm.rank]:
        made = Guarded(kit, value.shape, value.dtype).array
        kit.write(made, value)
        xs.append(made)
    sums = [sum(items[1:], items[0]) for items in zip(*inputs, strict=True)]
    last = comm.world_size - 1
    for results, expected in (
        (comm.all_reduce(xs), sums),
        (comm.all_reduce(tuple(xs), async_op=True).wait(), sums),
        (comm.broadcast(xs, last), inputs[last]),
        (comm.reduce(xs, root=last), sums if comm.rank == last else None),
        (comm.all_reduce(xs, out=xs), sums),
    ):
        if expected is None:
            assert results is None
            continue
        for got, right in zip(results, expected, strict=True):
            assert_same(kit.read(got), np.asarray(right, kit.read(got).dtype))
    comm.check()


@EVERYWHERE
@pytest.mark.parametrize("world_size", [1, 3])
def test_lists(gpus, world_size):
    gpus.call(world_size, lists)


def mixed(comm, kit):
    """Host and GPU arrays on one communicator, asynchronous ones among them."""
    results = []
    for place in range(20):
        x, _ = array(kit, "float32", 5, place)
        host = comm.all_reduce(np.full(3, 1.0 + place), async_op=place % 3 == 0)
        gpu = comm.all_reduce(x, async_op=place % 2 == 0)
        comm.barrier()
        results.append(comm.all_gather_object(place))
        total = gpu.wait() if place % 2 == 0 else gpu
        assert_same(kit.read(total), comm.world_size * small_values("float32", 5, place))
        assert (host.wait() if place % 3 == 0 else host)[0] == comm.world_size * (1.0 + place)
    return len(results)


@REPLAYED
def test_host_and_gpu_arrays_on_one_communicator(gpus):
    assert gpus.call(2, mixed) == [20] * gpus.world(2)


def send_both_ways(rank, backend, how):
    def calls(comm, kit):
        x, y = (ones(kit, 4_000_000) for _ in range(2))  # more than is held on the way
        certainly(comm, comm.all_reduce, ones(kit))
        if how == "grouped":
            with comm.group():
                comm.send(x, 1 - comm.rank)
                comm.recv(y, 1 - comm.rank)
        elif how == "started together":
            with comm.group(async_op=True):
                comm.send(x, 1 - comm.rank, async_op=True)
                comm.recv(y, 1 - comm.rank, async_op=True)
        else:
            comm.send(x, 1 - comm.rank, async_op=True)
            comm.recv(y, 1 - comm.rank, async_op=True)
        comm.check()

    return counted(rank, calls, timeout_s=0.5 if how == "alone" else 20, backend=backend)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("backend", ["nccl", "direct"])
def test_two_ranks_that_both_send_first_are_told_to_group(gpus, backend):
    gpus.call_ranks(2, send_both_ways, backend, "grouped")
    gpus.call_ranks(2, send_both_ways, backend, "started together")
    for error in errors(gpus.replies(2, send_both_ways, backend, "alone")):
        assert isinstance(error, DeadlineError), error
        assert r"put messages that go both ways into group()" in str(error)
