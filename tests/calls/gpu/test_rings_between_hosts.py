"""Reductions of GPU arrays between played hosts: inside by shared memory, between around rings."""

from __future__ import annotations

import contextlib
import os
import signal

import numpy as np
import pytest
from tests import compression_oracle, oracle
from tests.calls.gpu.cases import run_cases
from tests.calls.gpu.conftest import left_on_gpu, with_communicator
from tests.calls.gpu.test_deterministic import guarded, inputs_of
from tests.calls.gpu.test_direct import cases_of
from tests.calls.gpu.test_direct_ring import noting
from tests.collective_cases import REDUCTIONS
from tests.compression.test_compression import BLOCKS
from tests.compression.test_compression import inputs_of as inputs_in
from tests.dtypes import assert_same
from tests.ranks import Ended, Reply
from tests.waiting import until

from gpucoll import Compression
from gpucoll.backends.direct import between, between_compressed, peer, pinned, ring, wires
from gpucoll.errors import (
    AbortedError,
    ArgumentTypeError,
    DeadlineError,
    GpucollError,
    PeerLostError,
)
from gpucoll.types import COMPRESSIONS

SHAPES = ["ab", "aab", "abab", "abc", "aabb", "abbcc"]


@contextlib.contextmanager
def small_arrays_go_around():
    """Small arrays go around rings, in several laps and pieces; yields which calls do."""
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (between, between_compressed):
            patch.setattr(module, "LEAST_BYTES", 1)
        patch.setattr(between, "SCRATCH_BYTES", 4096)
        patch.setattr(ring, "LEAST_CHUNK_BYTES", 64)
        patch.setattr(wires, "HALF_BYTES", 1024)
        patch.setattr(peer, "RESTART_AT", 100)  # words begin again now and then
        for collective, maker in between._MAKERS.items():
            noted = noting(maker, collective.spelled, made)
            patch.setitem(between._MAKERS, collective, noted)
        yield made


def cases(rank, drawn, options):
    with small_arrays_go_around() as made:
        options = {**options, "device": rank.rank}
        return with_communicator(rank, options, run_cases, (drawn,)), set(made)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", SHAPES)
@pytest.mark.parametrize("schedule", ["shares", "ring"])
def test_drawn_cases(gpus_on_hosts, placed, schedule):
    drawn = [case for name in REDUCTIONS for case in cases_of(name, len(placed))]
    # The sign of a complex product's zeros depends on the order.
    drawn = [case for case in drawn if not (case.op == "prod" and case.dtype.startswith("complex"))]
    options = {"backend": "direct", "direct_schedule": schedule}
    for count, made in gpus_on_hosts.call_ranks(placed, cases, drawn, options):
        assert count == len(drawn)
        assert made >= {"all_reduce", "reduce", "reduce_scatter"}


def of_lists(rank):
    """Fused lists of more than the scratch memory, in place; and a list with an empty array."""
    kit, counts = rank.kit, (5, 0, 3000, 1, 700)
    with small_arrays_go_around() as made, rank.init(**_on(rank)) as comm:
        inputs = [[inputs_of(comm.world_size, count)[r] for count in counts] for r in range(3)]
        xs = [guarded(kit, x.round()) for x in inputs[comm.rank]]
        results = comm.all_reduce([x.array for x in xs], out=[x.array for x in xs])
        for place, got in enumerate(results):
            right = oracle.all_reduce([mine[place].round() for mine in inputs])[0]
            assert_same(kit.read(got), right, f"array {place}")
        comm.check()
    return bool(made)


def _on(rank):
    return {"backend": "direct", "device": rank.rank}


def test_lists(gpus_on_hosts):
    assert gpus_on_hosts.call_ranks("aab", of_lists) == [True] * 3


def large(rank):
    """An array of several laps with the usual sizes; the same in a communicator of its parts."""
    count = 2_200_001
    with rank.init(**_on(rank)) as comm:
        for each in (comm, comm.split(0, key=-comm.rank)):
            x = guarded(rank.kit, (np.arange(count) % 1000 + each.rank).astype(np.float32))
            got = rank.kit.read(each.all_reduce(x.array, "avg"))
            assert_same(got, (np.arange(count) % 1000 + np.float32(1)).astype(np.float32), "large")
        each.close()
        facts = comm.describe().facts
    return facts["GPU path between hosts"]


def test_large(gpus_on_hosts):
    for said in gpus_on_hosts.call_ranks("aab", large):
        assert "around 1 ring(s) of 2 hosts" in said


def in_order(rank):
    """With rank order, sums of floats are staged, and made by the CPU; integers still go around."""
    with small_arrays_go_around() as made, rank.init(**_on(rank), deterministic="order") as comm:
        inputs = inputs_of(comm.world_size, 6000)
        x = guarded(rank.kit, inputs[comm.rank])
        got = rank.kit.read(comm.all_reduce(x.array))
        assert_same(got, oracle.all_reduce(inputs)[0], "float32")
        assert made == []
        packed = comm.all_reduce(x.array, compression="int8_block")
        assert_same(
            rank.kit.read(packed), compression_oracle.all_reduce(inputs, "sum", "int8_block")[0]
        )
        return bytes(got.tobytes())


def test_deterministic(gpus_on_hosts):
    assert len(set(gpus_on_hosts.call_ranks("aba", in_order))) == 1


def average(rank):
    """An average within float16's range, though the sum is not."""
    with small_arrays_go_around() as made, rank.init(**_on(rank)) as comm:
        x = guarded(rank.kit, np.full(999, 40000, np.float16))
        return set(rank.kit.read(comm.all_reduce(x.array, "avg")).tolist()), made


def test_averages_of_narrow_types_are_staged(gpus_on_hosts):
    assert gpus_on_hosts.call_ranks("aab", average) == [({40000.0}, [])] * 3


def close_at_once(rank):
    """Rank 1 is slow: the others may leave before it has all of their chunks, and it gets them."""
    with small_arrays_go_around(), rank.init(**_on(rank), timeout_s=40) as comm:
        x = guarded(rank.kit, np.full(30_000, comm.rank, np.float32))
        comm.all_reduce(x.array)
        comm.check()
        rank.control.driver_set("delay_us", 500 if rank.rank == 1 else 0)
        got = comm.all_reduce(x.array)
        comm.check()
        rank.control.driver_set("delay_us", 0)
        value = set(rank.kit.read(got).tolist())
    return value, len(wires._left_in_use)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["abc", "abcdef"])
def test_who_is_through_first_leaves_nobody_behind(gpus_on_hosts, placed):
    size = len(placed)
    total = float(size * (size - 1) // 2)
    assert gpus_on_hosts.call_ranks(placed, close_at_once) == [({total}, 0)] * size


# --- compressed -----------------------------------------------------------------------------------


def compressed(rank, placed):
    """The bits are those of two quantisations of the hosts' sums; residuals lose nothing."""
    kit = rank.kit
    with small_arrays_go_around(), rank.init(**_on(rank)) as comm:
        for name in COMPRESSIONS:
            for op, count in (("sum", 5000), ("avg", 1031)):
                inputs = inputs_in(comm.world_size, count, "wide")
                sums = [
                    np.sum([x for x, at in zip(inputs, placed, strict=True) if at == host], axis=0)
                    for host in sorted(set(placed))
                ]
                expected, left = compression_oracle.all_reduce(sums, "sum", name)
                if name == "float16":  # whose range a host's sum may leave: not inside first
                    expected, left = compression_oracle.all_reduce(inputs, op, name)
                elif op == "avg":
                    expected = (expected / np.float32(comm.world_size)).astype(np.float32)
                x, where = guarded(kit, inputs[comm.rank]), f"{name} {op}"
                assert_same(
                    kit.read(comm.all_reduce(x.array, op, compression=name)), expected, where
                )
                if name not in BLOCKS:
                    continue
                residual = guarded(kit, np.zeros(count, np.float32))
                options = {"compression": name, "residual": residual.array}
                got = kit.read(comm.all_reduce(x.array, op, out=x.array, **options))
                assert_same(got, expected, where)
                lost = comm.all_gather_object(kit.read(residual.array).astype(np.float64))
                # The oracle adds the loss of a sum on another rank: one rounding differs.
                bound = 2.0**-23 * (np.abs(lost).sum(axis=0) + np.abs(left).sum(axis=0))
                assert (
                    np.abs(np.sum(lost, axis=0) - np.sum(left, axis=0, dtype=np.float64)) <= bound
                ).all(), where
                residual.check(where)
        numbers = [np.arange(700) % 50 + rank for rank in range(comm.world_size)]
        mine = numbers[comm.rank]
        x = [guarded(kit, mine[:n].astype(t)) for n, t in ((700, np.float16), (9, np.float32))]
        for y in comm.all_reduce([each.array for each in x], compression="int8_block"):
            values = kit.read(y).astype(np.float64)
            exact = np.sum(numbers, axis=0)[: values.size]
            # The bound of int8_block: here the hosts' greatest sums add up to the greatest sum.
            assert np.abs(values - exact).max() <= exact.max() / 126 + 2.0**-11 * exact.max()
        x = guarded(kit, np.full(5000, 40000, np.float32))  # two of them are beyond float16
        assert (kit.read(comm.all_reduce(x.array, "avg", compression="float16")) == 40000).all()
        lost = guarded(kit, np.zeros(5000, np.float32)).array
        with pytest.raises(ArgumentTypeError, match="takes no residual"):
            comm.all_reduce(x.array, compression="bfloat16", residual=lost)
        stochastic = Compression("float8_block", seed=5)
        x = guarded(kit, inputs[comm.rank])
        return kit.read(comm.all_reduce(x.array, compression=stochastic)).tobytes()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["aab", "abab", "aabbc"])
def test_compressed(gpus_on_hosts, placed):
    assert len(set(gpus_on_hosts.call_ranks(placed, compressed, placed))) == 1


# --- failures -------------------------------------------------------------------------------------


def one_is_missing(rank):
    """Rank 1 makes no call: the others end at their deadline, and nothing is left."""
    before = left_on_gpu(rank)[0]
    with rank.init(**_on(rank), timeout_s=20) as comm:
        x = guarded(rank.kit, np.ones(300_000, np.float32))
        comm.all_reduce(x.array)
        comm.check()
        if rank.rank == 1:
            with pytest.raises(GpucollError):
                until(comm.check)
        else:
            comm.all_reduce(x.array, timeout_s=0.3)
            with pytest.raises((DeadlineError, PeerLostError, AbortedError)):
                comm.check()
    return left_on_gpu(rank)[0] - before


@pytest.mark.parametrize("placed", ["ab", "aab"])
def test_a_rank_that_does_not_call(gpus_on_hosts, placed):
    assert gpus_on_hosts.call_ranks(placed, one_is_missing) == [0] * len(placed)


def one_is_killed(rank):
    with rank.init(**_on(rank), timeout_s=20) as comm:
        x = guarded(rank.kit, np.ones(5_000_000, np.float32))
        comm.all_reduce(x.array)
        comm.check()
        if rank.rank == 1:
            comm.all_reduce(x.array)
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(x.array)
        comm.all_reduce(x.array)
        comm.check()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aab"])
def test_a_rank_that_is_killed(gpus_on_hosts, placed):
    first, killed, *others = gpus_on_hosts.replies(placed, one_is_killed)
    assert isinstance(killed, Ended)
    for reply in (first, *others):
        assert isinstance(reply, Reply)
        assert isinstance(reply.error, PeerLostError), reply


def no_page_locked_memory(rank):
    """One rank gets no slots; nothing of what the ranks have allocated is left."""
    before = rank.control.count("memory")
    made: list[pinned.Slots] = []

    def slots(*args):
        if rank.rank == 1 and made:
            raise MemoryError("no more page-locked memory")
        made.append(pinned.Slots(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wires, "Slots", slots)
        with rank.init(**_on(rank)) as comm:
            said = comm.describe().facts["GPU path between hosts"]
    return said, rank.control.count("memory") - before, {each.address for each in made}


def test_a_rank_without_page_locked_memory(gpus_on_hosts):
    said = "staged: rank 0: rank 1: no more page-locked memory"
    for facts in gpus_on_hosts.call_ranks("ab", no_page_locked_memory):
        assert facts[:2] == (said.replace("rank 0: ", ""), 0)
        assert len(facts[2]) >= 1


def no_shared_memory(rank):
    """Where GPUs of one host do not share memory, all ranks are told, and reductions are staged."""
    if rank.rank == 1:
        rank.control.driver_set("export_error", 801)
    try:
        with rank.init(**_on(rank)) as comm:
            x = guarded(rank.kit, np.full(300_000, comm.rank, np.float32))
            got = rank.kit.read(comm.all_reduce(x.array))
            assert (got == 3).all()
            for _ in range(2):  # the thread of messages has not ended with the rings
                to, of = (comm.rank + 1) % 3, (comm.rank - 1) % 3
                assert (rank.kit.read(comm.send_recv(x.array, to, of)) == of).all()
            return comm.describe().facts["GPU path between hosts"]
    finally:
        rank.control.driver_set("export_error", 0)


def test_gpus_that_do_not_share_memory(gpus_on_hosts):
    said = gpus_on_hosts.call_ranks("aab", no_shared_memory)
    assert len(set(said)) == 1
    assert said[0].startswith("staged: rank 0: rank 1: memory of cuda:1 cannot be exported")
