"""Calls of a kind that was made before, and plans: fast, and as strict as the first one."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from functools import partial

import numpy as np
import pytest
from tests.calls.gpu.conftest import EVERYWHERE, REPLAYED
from tests.waiting import until

from gpucoll.backends.gpu.enqueue_words import POLLS, Step
from gpucoll.backends.nccl.library import IN_PROGRESS
from gpucoll.backends.protocol import Request
from gpucoll.collectives import Collective
from gpucoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendError,
    DeadlineError,
    GpucollError,
    MismatchError,
    StateError,
)
from gpucoll.types import ReduceOp

COUNT = 1000


def full(kit, value, count=COUNT, dtype="float32"):
    values = np.full(count, value, dtype)
    return kit.seen_as(kit.bytes_of(values.view(np.uint8)), (count,), dtype)


class Counted:
    """How many calls of kinds that are learnt from now on went in one compiled step."""

    def __init__(self, comm):
        connected = comm._gpu._connected
        self._whole, self._make = 0, connected.compiled_call
        connected.compiled_call = self._counting

    def _counting(self, *given):
        if (made := self._make(*given)) is not None:
            made[0]._enqueue = partial(self._count, made[0]._enqueue)
        return made

    def _count(self, enqueue, *arguments):
        result = enqueue(*arguments)
        # In progress: it was enqueued, and only takes long to come onto its stream.
        self._whole += result in (0, (Step.CALL << 32) | IN_PROGRESS)
        return result

    def take(self):
        """Return it, and begin again."""
        found, self._whole = self._whole, 0
        return found


def warm(comm, kit, times=8):
    """Make the events and the cached call of an all_reduce that many calls at once need."""
    comm.all_reduce(full(kit, 0, 3, "int32"), "max")  # connects
    counted, x = Counted(comm), full(kit, 0)
    for _ in range(times):
        comm.all_reduce(x, out=x)
    comm.check()
    counted.take()
    return counted


# --- the results are those of the long way --------------------------------------------------------


def repeat_every_kind(comm, kit):
    """Make each call three times on new arrays; the first goes the long way, the last does not."""
    size, rank = comm.world_size, comm.rank
    counted = warm(comm, kit)
    total = float(sum(range(1, size + 1)))
    results = []

    def three(call, expected, is_known=True):
        for place in range(3):
            comm.check()  # so that there are events
            counted.take()
            found = kit.read(call(float(place + 1)))
            results.append(np.array_equal(found, np.asarray(expected, found.dtype) * (place + 1)))
        results.append(counted.take() == is_known)

    def mine(scale, count=COUNT):
        return full(kit, scale * (rank + 1), count)

    def in_place(scale):
        x = mine(scale)
        return comm.all_reduce(x, out=x)

    def from_the_last(scale):
        x = mine(scale)
        return comm.broadcast(x, root=size - 1, out=x)

    everyone = np.repeat(np.arange(1, size + 1), COUNT)
    three(in_place, np.full(COUNT, total))
    three(lambda s: comm.all_reduce(mine(s)), np.full(COUNT, total))
    three(lambda s: comm.all_reduce(mine(s), out=full(kit, -1)), np.full(COUNT, total))
    three(lambda s: comm.all_reduce(mine(s), "max"), np.full(COUNT, size))
    three(lambda s: comm.all_reduce(mine(s), ReduceOp.MIN), np.full(COUNT, 1))
    three(lambda s: comm.all_reduce(mine(s), async_op=True).wait(), np.full(COUNT, total))
    three(lambda s: comm.all_gather(mine(s)), everyone)
    three(from_the_last, np.full(COUNT, size))
    three(lambda s: comm.reduce_scatter(mine(s, 4 * size), out=full(kit, -1, 4)), np.full(4, total))
    # These are more than one function of the library's, or have an op that is made for them.
    three(lambda s: comm.scan(mine(s)), np.full(COUNT, (rank + 1) * (rank + 2) / 2), False)
    doubled = ReduceOp.scaled_sum(2.0)
    three(lambda s: comm.all_reduce(mine(s), doubled), np.full(COUNT, 2 * total), False)
    return results


@pytest.mark.soak(quick=1)
@EVERYWHERE
def test_every_kind_of_call_again(gpus):
    for results in gpus.call(3, repeat_every_kind):
        assert results == [True] * len(results)


def repeat_while_in_progress(rank):
    with rank.init() as comm, rank.control.library_set(polls=2):
        return repeat_every_kind(comm, rank.kit)


def test_every_kind_of_call_again_where_the_library_enqueues_it_later(gpus):
    for results in gpus.call_ranks(3, repeat_while_in_progress):
        assert results == [True] * len(results)


def mix_kinds(comm, kit):
    """Use what the calls have in common with others: dtype, shape, stream, place of the output."""
    counted, size, right = warm(comm, kit), comm.world_size, []
    for _ in range(3):
        for dtype in ("float32", "float64", "int32"):
            for count in (1, 7, COUNT):
                x = full(kit, 2, count, dtype)
                comm.check()
                right.append(np.all(kit.read(comm.all_reduce(x, out=x)) == 2 * size))
    right.append(counted.take() >= 2 * 3 * 3)
    memory = full(kit, 1, 4 * COUNT)
    left, overlapping = memory[:COUNT], memory[COUNT // 2 : COUNT // 2 + COUNT]
    for _ in range(2):
        apart = memory[2 * COUNT : 3 * COUNT]
        right.append(np.all(kit.read(comm.all_reduce(left, out=apart)) == size))
    with pytest.raises(ArgumentError, match="out overlaps x"):
        comm.all_reduce(left, out=overlapping)
    same = memory[:COUNT]  # another object, the same memory: in place
    right.append(np.all(kit.read(comm.all_reduce(left, out=same)) == size))
    stream = kit.stream()
    for _ in range(3):
        with stream:
            x = full(kit, 3)
            right.append(np.all(kit.read(comm.all_reduce(x, out=x)) == 3 * size))
        x = full(kit, 3)
        right.append(np.all(kit.read(comm.all_reduce(x, out=x)) == 3 * size))
    return [bool(item) for item in right]


@EVERYWHERE
def test_nothing_is_taken_for_what_it_is_not(gpus):
    for results in gpus.call(2, mix_kinds):
        assert results == [True] * len(results)


def count_the_rows(comm, kit):
    """A call with counts is no call of the kind without, whatever else they have in common."""
    size, results = comm.world_size, []
    counted, x = warm(comm, kit), full(kit, comm.rank)
    for place in range(3):
        comm.check()
        counted.take()
        found = comm.all_gather(x)
        results.append((kit.read(found).shape, counted.take() == (place > 0)))
        found = comm.all_gather(x, counts=[COUNT] * size)
        results.append((kit.read(found).shape, counted.take() == 0))
        with pytest.raises(ArgumentError, match="counts"):
            comm.all_gather(x, counts=[COUNT - 1] * size)
    return results


def test_counts_are_not_overlooked(gpus):
    assert gpus.call(2, count_the_rows) == [[((2 * COUNT,), True)] * 6] * 2


# --- bad input stays bad --------------------------------------------------------------------------


def give_bad_arguments(comm, kit):
    warm(comm, kit)
    x, out = full(kit, 1), full(kit, 0)
    for root in (0, 0):
        comm.broadcast(x, root=root)
    comm.all_reduce(x, out=out)
    comm.all_reduce(x, out=out)
    refused = [
        (ArgumentTypeError, "root must be an int", lambda: comm.broadcast(x, root=False)),
        (ArgumentError, "root must be in", lambda: comm.broadcast(x, root=7)),
        (ArgumentError, "op", lambda: comm.all_reduce(x, "mean", out=out)),
        (ArgumentError, "op must be a ReduceOp", lambda: comm.all_reduce(x, ["sum"], out=out)),
        (
            ArgumentTypeError,
            "out has dtype",
            lambda: comm.all_reduce(x, out=full(kit, 0, COUNT, "int32")),
        ),
        (ArgumentError, "out has shape", lambda: comm.all_reduce(x, out=full(kit, 0, 9))),
        (
            ArgumentTypeError,
            "out must be of x's library",
            lambda: comm.all_reduce(x, out=np.zeros(COUNT)),
        ),
        (
            ArgumentError,
            "timeout_s must be positive",
            lambda: comm.all_reduce(x, out=out, timeout_s=0),
        ),
    ]
    for error, text, call in refused:
        with pytest.raises(error, match=text):
            call()
    rows = kit.seen_as(kit.bytes_of(np.ones(4 * COUNT, np.uint8)), (COUNT, 1), "float32")
    return kit.read(comm.all_reduce(x, out=rows)).shape, kit.read(comm.all_reduce(x))[0]


@EVERYWHERE
def test_bad_arguments_are_refused_as_the_first_time(gpus):
    size = gpus.world(2)
    assert gpus.call(2, give_bad_arguments) == [((COUNT, 1), float(size))] * size


def follow_the_stream(rank):
    """An asynchronous call again comes after what is on the caller's stream, and `wait` orders."""
    with rank.init() as comm:
        kit = rank.kit
        counted = warm(comm, kit)
        streams = [kit.stream() for _ in range(2)]
        results = []
        for place in range(4):
            x, y, later = full(kit, 0), full(kit, place), full(kit, 0)
            out = full(kit, 0)
            comm.check()
            counted.take()
            with streams[place % 2], rank.held():
                kit.copy(x, y)
                work = comm.all_reduce(x, out=out, async_op=True)
                done = work.done()
                assert work.wait() is out
                kit.copy(later, out)
            streams[place % 2].synchronize()
            results.append((kit.read(later)[0], done, counted.take()))
        return results


@REPLAYED
def test_an_asynchronous_call_again_follows_its_stream(gpus):
    # The first is of a new kind; the second's stream is not known yet to be the device's.
    size = gpus.world(2)
    expected = [(1.0 * size * place, False, int(place > 1)) for place in range(4)]
    assert gpus.call_ranks(2, follow_the_stream) == [expected] * size


def plan_on_another_stream(rank):
    """A plan's own output may have been somebody's whose work is still on the stream."""
    with rank.init() as comm:
        kit = rank.kit
        warm(comm, kit)
        first, second = kit.stream(), kit.stream()
        results = []
        for stream in (first, second):  # so that both are known
            with stream:
                comm.all_reduce(full(kit, 0))
        comm.check()
        for is_known in (False, True):
            x, y, z = full(kit, 1, 77), full(kit, 5, 77), full(kit, 0, 77)
            rank.control.driver_set("delay_us", 5000)
            with first:
                for _ in range(20):
                    kit.copy(z, y)
                address = z.data.ptr
                del z
                plan = comm.plan_all_reduce(x)
            assert plan.out.data.ptr == address, "the pool gives other memory: nothing is tested"
            with second:
                plan()
                if is_known:
                    plan()
                second.synchronize()
                rank.control.driver_set("delay_us", 0)
                first.synchronize()
            comm.check()
            results.append(plan.out.get()[0])
            del plan
        return results


def test_a_plan_follows_the_stream_on_which_its_output_was_made(gpus):
    assert gpus.call_ranks(2, plan_on_another_stream) == [[2.0, 2.0]] * 2


def plan_that_outlives_its_stream(rank):
    with rank.init() as comm:
        kit = rank.kit
        counted = warm(comm, kit)
        first, second = kit.stream(), kit.stream()
        with first:
            plan = comm.plan_all_reduce(full(kit, 1, 77))
        comm._gpu._connected.device.destroy_stream(first.ptr)
        counted.take()
        with second:
            for _ in range(3):
                plan()
            second.synchronize()
        comm.check()
        assert counted.take() >= 2
        return plan.out.get()[0]


def test_a_plan_outlives_the_stream_on_which_its_output_was_made(gpus):
    assert gpus.call_ranks(2, plan_that_outlives_its_stream) == [2.0, 2.0]


class Foreign:
    """An array that only says where it lies, and whether it may be written."""

    def __init__(self, array, is_read_only=False):
        self.array, self.address, self.is_read_only = array, array.data.ptr, is_read_only

    @property
    def __cuda_array_interface__(self):
        data = {"data": (self.address, self.is_read_only), "version": 3}
        return {"shape": self.array.shape, "typestr": "<f4", **data}


def use_foreign_arrays(rank):
    with rank.init() as comm:
        kit = rank.kit
        counted, results = warm(comm, kit), []
        for place in range(3):
            x, out = Foreign(full(kit, place)), Foreign(full(kit, 0))
            comm.check()
            counted.take()
            assert comm.all_reduce(x, out=out) is out
            results.append((kit.read(out.array)[0], counted.take()))
        device = comm._gpu._connected.issuer.device
        freed = Foreign(full(kit, 1))
        freed.address = device.allocate(4000)
        device.free(freed.address)
        for arrays in ((freed, out), (x, freed)):
            with pytest.raises(ArgumentError, match="is not memory of a GPU of this process"):
                comm.all_reduce(arrays[0], out=arrays[1])
        with pytest.raises(ArgumentError, match="out is read-only"):
            comm.all_reduce(x, out=Foreign(out.array, is_read_only=True))
        with pytest.raises(ArgumentError, match="give out="):
            comm.all_reduce(x)
        return results


def test_arrays_known_by_their_interface_alone(gpus):
    assert gpus.call_ranks(2, use_foreign_arrays) == [[(0.0, 0), (2.0, 1), (4.0, 1)]] * 2


def give_freed_memory(comm, kit):
    counted = warm(comm, kit)
    x = full(kit, 1)
    address, x.data.ptr = x.data.ptr, 0
    with pytest.raises(ArgumentError, match="has no memory: was it freed"):
        comm.all_reduce(x, out=x)
    x.data.ptr = address
    counted.take()
    return kit.read(comm.all_reduce(x, out=x))[0], counted.take()


def test_an_array_without_memory(gpus):
    assert gpus.call(2, give_freed_memory) == [(2.0, 1)] * 2


# --- what is not as usual -------------------------------------------------------------------------


def capture(rank):
    with rank.init() as comm:
        kit = rank.kit
        counted = warm(comm, kit)
        x, planned = full(kit, 1), full(kit, 1)
        plan = comm.plan_all_reduce(planned, out=planned)
        stream = kit.stream()
        with stream:  # so that it is known
            comm.all_reduce(full(kit, 0))
        comm.check()
        counted.take()
        with stream, rank.captured(stream) as graph:
            comm.all_reduce(x, out=x)
            plan()
            with pytest.raises(ArgumentError, match="captured graph"):
                comm.all_reduce(x)
        whole = counted.take()
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        graph.close()
        comm.check()
        return whole, kit.read(x)[0], kit.read(planned)[0]


@REPLAYED
def test_a_capture_goes_the_long_way(gpus):
    size = gpus.world(2)
    expected = 0, float(size**2), float(size**2)
    assert gpus.call_ranks(2, capture) == [expected] * size


def collect(comm, kit):
    """Calls in a group are made at its end, whatever was made before it."""
    warm(comm, kit)
    x, planned = full(kit, 1), full(kit, 1)
    plan = comm.plan_all_reduce(planned, out=planned)
    with comm.group():
        comm.all_reduce(x, out=x)
        plan()
        before = kit.read(x)[0]
    return before, kit.read(x)[0], kit.read(planned)[0]


@EVERYWHERE
def test_in_a_group(gpus):
    size = gpus.world(2)
    assert gpus.call(2, collect) == [(1.0, float(size), float(size))] * size


def outlive(rank):
    with rank.init() as comm:
        kit = rank.kit
        warm(comm, kit)
        gc.collect()  # what other tests have left would wait for what is held
        with rank.control.held():
            x = full(kit, 3)
            alive = weakref.ref(x._memory)
            comm.all_reduce(x, out=x)
            del x
            gc.collect()
            first = alive() is not None
        comm.check()
        until(lambda: alive() is None)
        return first


def test_arrays_live_until_their_work_is_done(gpus):
    assert gpus.call_ranks(2, outlive) == [True] * 2


def after_the_end(rank):
    comm = rank.init()
    kit = rank.kit
    warm(comm, kit)
    x = full(kit, 1)
    plan = comm.plan_all_reduce(x, out=x)
    plan()
    comm.close()
    for call in (plan, lambda: comm.all_reduce(x, out=x)):
        with pytest.raises(StateError, match="is closed"):
            call()
    return rank.control.communicators


def test_after_close(gpus):
    assert gpus.call_ranks(2, after_the_end) == [0] * 2


def in_a_fork(rank):
    with rank.init() as comm:
        kit = rank.kit
        warm(comm, kit)
        x = full(kit, 1)
        plan = comm.plan_all_reduce(x, out=x)
        child = os.fork()
        if not child:
            refused = 0
            calls = [plan]
            calls += [lambda: comm.all_reduce(x), lambda: comm.all_reduce(x, async_op=True)]
            for call in calls:
                try:
                    call()
                except StateError as error:
                    refused += "forked" in str(error)
            os._exit(refused)
        _, status = os.waitpid(child, 0)
        plan()
        return os.waitstatus_to_exitcode(status), kit.read(x)[0]


def test_in_a_forked_child(gpus):
    assert gpus.call_ranks(2, in_a_fork) == [(3, 2.0)] * 2


def in_two_threads(comm, kit):
    warm(comm, kit)
    x = full(kit, 1)
    plan = comm.plan_all_reduce(x, out=x)
    found = []

    def other():
        for call in (plan, lambda: comm.all_reduce(x, out=x)):
            try:
                call()
            except StateError as error:
                found.append("another thread" in str(error))

    with comm._gpu._alone():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    return found


def test_a_second_thread_is_refused(gpus):
    assert gpus.call(2, in_two_threads) == [[True, True]] * 2


# --- what goes wrong ------------------------------------------------------------------------------


def make_different_calls(rank, kind):
    with rank.init() as comm:
        kit = rank.kit
        warm(comm, kit)
        x, y = full(kit, 1), full(kit, 1, 9)
        plans = comm.plan_all_reduce(x, out=x), comm.plan_all_reduce(y, out=y)
        comm.all_reduce(y, out=y)
        comm.check()
        if kind == "plan":
            plans[rank.rank == 1]()
        else:
            z = y if rank.rank == 1 else x
            comm.all_reduce(z, out=z)
        comm.check()


def differ(rank, kind):
    with pytest.raises(MismatchError, match="rank"):
        make_different_calls(rank, kind)
    return rank.control.communicators


@pytest.mark.parametrize("kind", ["plan", "call"])
def test_ranks_that_differ(gpus, kind):
    assert gpus.call_ranks(3, differ, kind) == [0] * 3


def come_or_not(rank, kind):
    with rank.init() as comm:
        kit = rank.kit
        warm(comm, kit)
        x = full(kit, 1)
        plan = comm.plan_all_reduce(x, out=x)
        comm._group.timeout_s = 0.2
        if rank.rank == 0 and kind == "plan":
            plan()
        elif rank.rank == 0:
            comm.all_reduce(x, out=x)
        else:
            issuer = comm._gpu._connected.issuer
            until(lambda: issuer.look() or issuer.failure is not None)
        comm.check()


def come_late(rank, kind):
    with pytest.raises(DeadlineError if rank.rank == 0 else GpucollError):
        come_or_not(rank, kind)
    return rank.control.communicators


@pytest.mark.parametrize("kind", ["plan", "call"])
def test_a_rank_that_does_not_come(gpus, kind):
    assert gpus.call_ranks(2, come_late, kind) == [0] * 2


def refuse(rank, kind, plans):
    """The library refuses the call on one rank: the others hear of it."""
    with rank.init() as comm:
        kit = rank.kit
        warm(comm, kit)
        x = full(kit, 1)
        plan = comm.plan_all_reduce(x, out=x)
        plans.append(plan)
        comm.barrier()
        if rank.rank == 0:
            rank.control.fail_at(1, code=3, function="ncclAllReduce")
        if kind == "plan":
            plan()
        else:
            comm.all_reduce(x, out=x)
        comm.check()


def fail_inside(rank, kind):
    plans: list = []
    with pytest.raises(BackendError if rank.rank == 0 else GpucollError) as caught:
        refuse(rank, kind, plans)
    rank.control.fail_at(0, code=0)
    with pytest.raises(GpucollError):
        plans[0]()
    return "ncclAllReduce" in str(caught.value), rank.control.communicators


@pytest.mark.parametrize("kind", ["plan", "call"])
def test_the_library_refuses(gpus, kind):
    (named, left), (_, left_too) = gpus.call_ranks(2, fail_inside, kind)
    assert named
    assert left == left_too == 0


def be_in_progress(rank, polls):
    """The library is still busy when its function returns: it is waited for, then marked."""
    with rank.init() as comm:
        kit = rank.kit
        warm(comm, kit)
        x = full(kit, 1)
        plan = comm.plan_all_reduce(x, out=x)
        with rank.control.library_set(polls=polls):
            for _ in range(3):
                plan()
                comm.all_reduce(x, out=x)
        comm.check()
        plan()
        return kit.read(x)[0]


@pytest.mark.parametrize("polls", [5, 2 * POLLS])
def test_a_library_in_progress(gpus, polls):
    assert gpus.call_ranks(2, be_in_progress, polls) == [128.0] * 2


def enqueue_late(rank):
    """The work comes onto its stream long after the library returned."""
    with rank.init() as comm:
        kit = rank.kit
        x = full(kit, 1)
        plan = comm.plan_all_reduce(x, out=x)
        with rank.control.library_set(job_us=3000):
            for _ in range(2):
                plan()
            works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(2)]
        for work in works:
            work.synchronize()
        return kit.read(x)[0]


def test_work_that_comes_late_onto_its_stream(gpus):
    assert gpus.call_ranks(2, enqueue_late) == [16.0] * 2


# --- without a compiled step ----------------------------------------------------------------------


def repeat_without_one(comm, kit):
    """What is enqueued is made once for each pair of arrays; others get what is theirs."""
    size, rank = comm.world_size, comm.rank
    total = float(sum(range(1, size + 1)))
    comm.all_reduce(full(kit, 0, 3, "int32"), "max")
    connected = comm._gpu._connected
    made: list[Request] = []
    launches = connected.launches

    def counted(requests, messages):
        made.extend(each for each in requests if each.collective == Collective.SCAN)
        return launches(requests, messages)

    connected.launches = counted
    x, y, z = (full(kit, value) for value in (rank + 1, 7, rank + 1))
    for collective, right in ((comm.all_reduce, total), (comm.scan, sum(range(1, rank + 2)))):
        for source, out in ((x, y), (x, y), (z, y), (x, y), (z, y)):
            kit.write(out, np.zeros(COUNT, np.float32))
            assert collective(source, out=out) is out
            assert (kit.read(out) == right).all()
            work = collective(source, out=out, async_op=True)
            assert (kit.read(work.wait()) == right).all()
        assert (kit.read(collective(x)) == right).all()
        assert (kit.read(x) == rank + 1).all()
    for array, given in ((x, {"out": full(kit, 0, COUNT - 1)}), (x, {"op": "no op"})):
        with pytest.raises(GpucollError):
            comm.scan(array, **given)
    comm.check()
    return len(made)


@pytest.mark.parametrize("backend", ["direct", "auto"])
def test_calls_without_a_compiled_step(gpus, backend):
    """Scans beside NCCL are put together; everything is through the direct backend."""
    for n_made in gpus.call(2, repeat_without_one, backend=backend):
        assert n_made <= 6
