"""``init(mixed=True)``: NVIDIA, AMD and CPU ranks in one communicator and in one call.

Over doubles of both vendors' drivers, Host devices, and ranks without any; no GPU is in it.
"""

from __future__ import annotations

import hashlib
import os
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.calls.gpu.cases import GpuCase
from tests.calls.gpu.mixed_ranks import as_kind
from tests.calls.gpu.test_direct import cases_of
from tests.collective_cases import MOVEMENTS, REDUCTIONS, SAME_EVERYWHERE
from tests.dtypes import any_values, assert_same, bits, dtype_of
from tests.hosts import PlayedHosts
from tests.waiting import collect, thread_names, until

import gpucoll
from gpucoll.backends.direct.pieces import SLOT_BYTES

LARGE = 3 * SLOT_BYTES // 4 + 5
"""Elements of four bytes in four pieces."""


def drawn(kinds):
    n = len(kinds)
    return [case for name in (*REDUCTIONS, *MOVEMENTS) for case in cases_of(name, n, 12)]


def run_drawn(rank, cases):
    """Run cases; return a digest of the bits of those that all ranks get alike."""
    digest = hashlib.sha256()
    with rank.init() as comm:
        for place, case in enumerate(cases):
            made = GpuCase(comm, rank.kit, case)
            result = made.run()
            made.check(result)
            if case.name in SAME_EVERYWHERE:
                digest.update(bits(rank.read(result)).tobytes() + bytes([place % 256]))
        comm.check()
    return digest.hexdigest()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("kinds", ["h", "nh", "ha", "nah", "hNa", "hnah", "dh", "hdd"])
def test_drawn_cases(mixed, kinds):
    assert len(set(mixed.call(kinds, run_drawn, drawn(kinds)))) == 1


# --- the same bits --------------------------------------------------------------------------------


def reduce_any(rank, dtypes):
    """Reduce values whose sums are rounded, by both ways of this library; return the bits."""
    found = {}
    with rank.init() as comm, rank.init(mixed=False, backend="cpu", device=None) as on_host:
        for dtype, count in dtypes:
            values = any_values(dtype, count, comm.rank)
            for op in ("sum", "avg", "max"):
                total = rank.read(comm.all_reduce(rank.array(values, dtype_of(dtype)), op))
                expected = on_host.all_reduce(values, op)
                assert_same(total, expected, f"{dtype} {op} on rank {comm.rank}")
                found[dtype, op] = hashlib.sha256(bits(total).tobytes()).hexdigest()
    return found


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("kinds", ["nah", "hhan"])
def test_the_bits_are_the_same_on_all_ranks(mixed, kinds):
    dtypes = [("float32", LARGE), ("float64", 1000), ("bfloat16", 999), ("float16", 4097)]
    first, *others = mixed.call(kinds, reduce_any, dtypes)
    assert all(found == first for found in others)


def make_large_calls(rank):
    """Make calls of several pieces; compare with what NumPy says."""
    me, size = rank.rank, rank.world_size

    def mine(of, n=LARGE):
        return (np.arange(n) % 251 + of).astype(np.int32)

    with rank.init() as comm:
        x = rank.array(mine(me), "int32")
        assert (rank.read(comm.all_reduce(x)) == sum(mine(of) for of in range(size))).all()
        assert (rank.read(comm.broadcast(x, root=1)) == mine(1)).all()
        gathered = rank.read(comm.all_gather(x)).reshape(size, -1)
        assert all((gathered[of] == mine(of)).all() for of in range(size))
        counts = [LARGE // (of + 1) for of in range(size)]
        whole = np.concatenate([mine(of, n) for of, n in enumerate(counts)])
        part = rank.array(mine(me, counts[me]), "int32")
        assert (rank.read(comm.all_gather(part, counts="auto")) == whole).all()
        table = np.ones((size, size), int)
        table[0, 1] = LARGE  # who has fewer pieces makes empty calls to the end
        blocks = [mine(me, table[me, to]) + to for to in range(size)]
        received = comm.all_to_all(
            rank.array(np.concatenate(blocks), "int32"), send_counts=table[me].tolist()
        )
        expected = np.concatenate([mine(of, table[of, me]) + me for of in range(size)])
        assert (rank.read(received) == expected).all()
        comm.check()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("kinds", ["hn", "ahN"])
def test_arrays_of_several_pieces(mixed, kinds):
    mixed.call(kinds, make_large_calls)


# --- what host arrays have ------------------------------------------------------------------------


def pass_numbers(rank):
    with rank.init() as comm:
        ranks = comm.world_size
        # An int64 of a GPU meets an int, whose sum is exact whatever its size.
        large = 2**62
        if rank.kind == "h":
            total: Any = comm.all_reduce(large)
            assert type(total) is int
            assert total == ranks * large
            assert comm.all_reduce(1.5) == 1.5 * ranks
            assert comm.scan(np.float32(2)) == 2 * (comm.rank + 1)
            assert comm.broadcast(7, root=0) == 0
        else:
            comm.all_reduce(rank.array(large, "int64"))
            assert rank.read(comm.all_reduce(rank.array(1.5, "float64"))) == 1.5 * ranks
            assert rank.read(comm.scan(rank.array(2))) == 2 * (comm.rank + 1)
            assert rank.read(comm.broadcast(rank.array(comm.rank, "int64"), root=0)) == 0
        comm.check()


@pytest.mark.parametrize("kinds", ["nh", "nhh"])
def test_numbers(mixed, kinds):
    mixed.call(kinds, pass_numbers)


def pass_strided(rank):
    with rank.init() as comm:
        values = np.arange(24, dtype=np.float32).reshape(4, 6) + comm.rank
        whole = rank.array(values)
        expected = sum(values[:, ::2] - comm.rank + of for of in range(comm.world_size))
        if rank.kind == "h":
            x, out = whole[:, ::2], np.zeros((3, 8), np.float32)
            comm.all_reduce(x, out=out.T[::2])
            assert (out.T[::2] == expected.reshape(4, 3)).all()
            assert not out.T[1::2].any()
            work = comm.all_reduce(x, async_op=True)
            assert (work.wait() == expected).all()
        else:
            x = rank.array(values[:, ::2])
            for _ in range(2):
                assert (rank.read(comm.all_reduce(x)) == expected).all()
        comm.check()


def test_strided_arrays(mixed):
    mixed.call("hn", pass_strided)


def pass_records(rank):
    """Move what only the host's arrays can be: records."""
    with rank.init() as comm:
        kind = np.dtype([("place", "i4"), ("value", "f8")])
        mine = np.array([(comm.rank, 0.5)], kind)
        assert comm.all_gather(mine)["place"].tolist() == [*range(comm.world_size)]
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        assert comm.send_recv(mine, right, left)["place"].tolist() == [left]


def test_records_between_ranks_without_a_gpu(mixed):
    mixed.call("hN", pass_records)


def pass_lists(rank):
    with rank.init() as comm:
        ranks = comm.world_size
        xs = [rank.array(np.full(n, comm.rank + n), "int32") for n in (1, 300, 70_000)]
        xs.append(rank.array(np.full(5, 0.5)))
        total = ranks * (ranks - 1) // 2
        found = [rank.read(x) for x in comm.all_reduce(xs)]
        assert [x[0] for x in found[:3]] == [total + ranks * n for n in (1, 300, 70_000)]
        assert found[3].tolist() == [0.5 * ranks] * 5
        given = tuple(rank.array(np.zeros(n), "int32") for n in (1, 300))
        work = comm.all_reduce(given, "max", out=list(given), async_op=True)
        assert isinstance(work.wait(), tuple)
        work.synchronize()
        root = ranks - 1
        for x, n in zip(comm.broadcast(xs[:3], root=root), (1, 300, 70_000), strict=True):
            assert (rank.read(x) == root + n).all()
        reduced = comm.reduce(xs[:3], root=root)
        assert (reduced is None) == (comm.rank != root)
        if reduced is not None:
            assert rank.read(reduced[2])[-1] == total + ranks * 70_000
        comm.check()


@pytest.mark.parametrize("kinds", ["nh", "hah"])
def test_lists(mixed, kinds):
    mixed.call(kinds, pass_lists)


def pass_lists_of_numbers(rank):
    with rank.init() as comm:
        ranks = comm.world_size
        assert comm.all_reduce([2**62, 0.5, np.ones(3)])[:2] == [ranks * 2**62, 0.5 * ranks]
        found = comm.reduce([1, 2, np.ones(1)], root=1)
        assert found == ([ranks, 2 * ranks, np.full(1, ranks)] if comm.rank == 1 else None)


def test_lists_of_numbers(mixed):
    mixed.call("hNh", pass_lists_of_numbers)


def compress(rank):
    """Compress on all ranks; return the bits."""
    with rank.init() as comm:
        values = np.random.default_rng(comm.rank).uniform(-1, 1, 10_000).astype(np.float32)
        found = []
        for how in ("int8_block", "float8_block", "float16", "bfloat16"):
            found.append(rank.read(comm.all_reduce(rank.array(values), compression=how)).tobytes())
        residual = rank.array(np.zeros(10_000))
        for _ in range(2):
            result = comm.all_reduce(
                rank.array(values), compression="int8_block", residual=residual
            )
            found.append(rank.read(result).tobytes())
        comm.check()
        assert np.abs(rank.read(residual)).max() > 0
        halves = [rank.array(values[:300], "float16"), rank.array(values[:7], "float16")]
        fused = comm.all_reduce(halves, "avg", compression="int8_block", async_op=True).wait()
        comm.check()
        return [*found, *(rank.read(x).tobytes() for x in fused)]


@pytest.mark.parametrize("kinds", ["dh", "hdh"])
def test_compression(mixed, kinds):
    first, *others = mixed.call(kinds, compress)
    assert all(found == first for found in others)


def reduce_by_function(rank):
    with rank.init() as comm:
        op = gpucoll.ReduceOp.custom(lambda a, b: a if abs(a) > abs(b) else b)
        x = rank.array([comm.rank, -2 * comm.rank, 1])
        last = comm.world_size - 1
        assert rank.read(comm.all_reduce(x, op)).tolist() == [last, -2 * last, 1]
        comm.check()


@pytest.mark.soak
def test_functions_of_the_users(mixed):
    mixed.call("nha", reduce_by_function)


def pass_tensors(rank):
    torch = __import__("pytest").importorskip("torch")
    with rank.init() as comm:
        x = torch.arange(6).reshape(2, 3) + comm.rank
        total = comm.all_reduce(x)
        assert isinstance(total, torch.Tensor)
        assert total.tolist() == comm.all_reduce(x.numpy()).tolist()
        out = torch.zeros(3, 2, dtype=x.dtype)
        assert comm.all_reduce(x, out=out.t(), async_op=True).wait() is not None
        assert out.t().tolist() == total.tolist()
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        got = comm.send_recv(x, right, left, out=torch.empty_like(x))
        assert got.tolist() == (x - comm.rank + left).tolist()


@pytest.mark.soak
def test_tensors_of_pytorch(mixed):
    pytest.importorskip("torch")
    mixed.call("hNh", pass_tensors)


# --- messages, groups -----------------------------------------------------------------------------


def send_both_ways(rank):
    with rank.init() as comm:  # before any collective: the ranks are connected at once
        other = 1 - comm.rank
        for dtype, count in (("int16", 5), ("float64", 0), ("float32", LARGE), ("uint8", 1 << 20)):
            values = [any_values(dtype, count, of) for of in range(2)]
            mine = rank.array(values[comm.rank], dtype)
            for first in range(2):
                if comm.rank == first:
                    comm.send(mine, other, tag=3)
                else:
                    out = rank.array(np.zeros(count, dtype), dtype)
                    assert comm.recv(out, other, tag=3) is out
                    assert_same(rank.read(out), values[other])
            assert_same(rank.read(comm.send_recv(mine, other, other)), values[other])
            works = [comm.send(mine, other, async_op=True)]
            works.append(comm.recv(like=mine, source=other, async_op=True))
            assert_same(rank.read(works[1].wait()), values[other])
            for work in works:
                work.synchronize()
        comm.check()


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("kinds", ["nh", "ha", "Nh", "hd"])
def test_messages_both_ways(mixed, kinds):
    mixed.call(kinds, send_both_ways)


def send_in_order(rank):
    with rank.init() as comm:
        for place in range(40):
            if comm.rank == 0:
                comm.send(rank.array(np.full(10, place), "int32"), 1)
            else:
                out = rank.array(np.zeros(10), "int32")
                comm.recv(out, 0)
                assert rank.read(out).tolist() == [place] * 10
        comm.check()


@pytest.mark.parametrize("kinds", ["nh", "hn"])
def test_messages_come_in_order(mixed, kinds):
    mixed.call(kinds, send_in_order)


def receive_before_sending(rank, count):
    """Have many receives pending on both ranks before anything is sent."""
    rank.control.driver_set("work_queues", 8)
    try:
        with rank.init() as comm:
            xs = [rank.array(np.full(10, place), "int32") for place in range(count)]
            outs = [rank.array(np.zeros(10), "int32") for _ in range(count)]
            other = 1 - comm.rank
            received = [comm.recv(out, other, async_op=True) for out in outs]
            sent = [comm.send(x, other, async_op=True) for x in xs]
            for work in (*received, *sent):
                work.synchronize()
            return [int(rank.read(out)[-1]) for out in outs]
    finally:
        rank.control.driver_set("work_queues", 0)


@pytest.mark.parametrize("count", [9, 40])
def test_however_many_messages_are_pending(mixed, count):
    """A GPU's streams share eight queues: what waits in each of them would hold up all others."""
    assert mixed.call("NN", receive_before_sending, count) == [[*range(count)]] * 2


def group(rank):
    with rank.init() as comm:
        me, size = comm.rank, comm.world_size
        right, left = (me + 1) % size, (me - 1) % size
        values = np.arange(5000, dtype=np.float64)
        x, y = rank.array(values + me, "float64"), rank.array(np.full(3, me), "int32")
        with comm.group():
            total = comm.all_reduce(x, out=rank.array(np.zeros(5000), "float64"))
            comm.send(x, right)
            got = comm.recv(rank.array(np.zeros(5000), "float64"), left)
            gathered = comm.all_gather(y)
            comm.send(y, me)
            same = comm.recv(rank.array(np.zeros(3), "int32"), me)
        assert (rank.read(total) == sum(values + of for of in range(size))).all()
        assert (rank.read(got) == values + left).all()
        assert rank.read(gathered).reshape(size, 3)[:, 0].tolist() == [*range(size)]
        assert rank.read(same).tolist() == [me] * 3
        step = comm.plan_all_reduce(y, "max", out=rank.array(np.zeros(3), "int32"))
        with comm.group():
            last = step()
        assert rank.read(last).tolist() == [size - 1] * 3
        comm.check()


@pytest.mark.parametrize("kinds", ["nh", "hna"])
def test_groups(mixed, kinds):
    mixed.call(kinds, group)


def overlap(rank):
    """Start calls, and get on with other things; a pending message holds up no collective."""
    with rank.init() as comm:
        xs = [rank.array(np.full(1000, place + comm.rank)) for place in range(20)]
        other = 1 - comm.rank
        message = comm.send(xs[0], other, async_op=True) if comm.rank == 0 else None
        works = [comm.all_reduce(x, async_op=True) for x in xs]
        assert comm.all_gather_object(comm.rank) == [0, 1]
        for place, work in enumerate(works):
            work.synchronize()
            assert work.done()
            assert work.exception() is None
            assert (rank.read(work.wait()) == 2 * place + 1).all()
        comm.barrier()
        if message is None:
            assert rank.read(comm.recv(like=xs[0], source=0)).tolist() == [0] * 1000
        else:
            message.synchronize()
        comm.check()


@pytest.mark.parametrize("kinds", ["nh", "hn"])
def test_asynchronous_calls(mixed, kinds):
    mixed.call(kinds, overlap)


# --- more communicators ---------------------------------------------------------------------------


def divide(rank):
    with rank.init() as comm:
        x = rank.array(np.ones(8))
        assert rank.read(comm.all_reduce(x))[0] == 4
        with comm.duplicate() as again:
            assert rank.read(again.all_reduce(x))[0] == 4
            assert rank.read(comm.all_reduce(x))[0] == 4
        part = comm.split(None if comm.rank == 3 else comm.rank % 2, key=-comm.rank)
        if part is None:
            return ""
        with part:
            n = part.world_size
            assert rank.read(part.all_reduce(x))[0] == n
            if n == 2:
                got = part.send_recv(x, 1 - part.rank, 1 - part.rank)
                assert rank.read(got).tolist() == [1] * 8
            return dict(part.describe().facts)["mixed"]


def test_split_and_duplicate(mixed):
    even = "yes: host arrays alone on rank 0, cuda on rank 1"
    odd = "yes: rocm on rank 0"
    assert mixed.call("nahh", divide) == [even, odd, even, ""]


def describe(rank):
    with rank.init() as comm:
        return dict(comm.describe().facts)


def test_it_says_what_each_rank_has(mixed):
    for place, facts in enumerate(mixed.call("nah", describe)):
        assert facts["mixed"] == "yes: host arrays alone on rank 2, cuda on rank 0, rocm on rank 1"
        assert facts["host arrays"].startswith("backend direct: mixed=True")
        assert facts["GPU arrays"].startswith("backend direct: mixed=True: host arrays alone on")
        assert (facts["GPU"] == "none: this rank takes part with host arrays") == (place == 2)
        assert "mixed=True" in facts["GPU path through shared GPU memory"]


def choose_gpu(rank):
    with rank.init(device=5, backend="direct") as comm:  # of no account where there is no GPU
        if rank.kind == "n":
            rank.kit.use(5)
        assert rank.read(comm.all_reduce(rank.array([1.0]))) == [2]
        return dict(comm.describe().facts)["GPU"]


def test_a_rank_says_which_gpu_is_its_own(mixed):
    on_cpu, on_gpu = mixed.call("hn", choose_gpu)
    assert on_cpu.startswith("none")
    assert on_gpu.startswith("cuda:5: ")


def ask_again(rank):
    """Make communicators again and again; return what is left beside the first."""

    def once():
        with rank.init() as comm:
            x = rank.array(np.ones(1000))
            comm.all_reduce(x, async_op=True).synchronize()
            comm.send_recv(x, 1 - comm.rank, 1 - comm.rank)
            comm.all_reduce(x, out=x)
            comm.check()

    def left():
        from gpucoll.devices.host.device import opened

        device = opened(0)
        collect()
        if device is not None:  # a stream's thread ends beside
            until(lambda: device.counts()["streams"] == 1)
        counts = {} if device is None else device.counts()
        return thread_names(), len(os.listdir("/proc/self/fd")), counts

    once()
    before = left()
    for _ in range(4):
        once()
    return before, left()


def test_nothing_is_left_of_many_communicators(mixed):
    for before, after in mixed.call("nh", ask_again):
        assert after == before
        assert not [name for name in after[0] if name.startswith("gpucoll-direct")]


# --- several hosts --------------------------------------------------------------------------------


@pytest.fixture
def mixed_on_hosts(mixed, tmp_path):
    """The same on hosts that are played here."""
    hosts = PlayedHosts(mixed.pools, tmp_path)

    def call(placed: str, kinds: str, function: Any, *args: Any) -> list[Any]:
        options = {"gives": "seat", "environment": mixed.variables, "backend": "auto"}
        given = (as_kind, kinds, mixed.doubles, function, args)
        results: list[Any] = hosts.call(placed, *given, **options)
        return results

    return call


@pytest.mark.soak
@pytest.mark.parametrize(("placed", "kinds"), [("ab", "nh"), ("aab", "hna")])
def test_played_hosts(mixed_on_hosts, placed, kinds):
    cases = Random(placed).sample(drawn(kinds), 40)
    assert len(set(mixed_on_hosts(placed, kinds, run_drawn, cases))) == 1
    mixed_on_hosts(placed, kinds, make_large_calls)
    if len(kinds) == 2:
        mixed_on_hosts(placed, kinds, send_both_ways)
        mixed_on_hosts(placed, kinds, pass_numbers)
