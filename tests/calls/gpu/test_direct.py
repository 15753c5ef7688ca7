"""The direct backend over the drivers' doubles alone: calls, messages, streams, several hosts."""

from __future__ import annotations

import functools
from random import Random

import numpy as np
import pytest
from tests.calls.gpu.cases import WAYS, run_cases
from tests.calls.gpu.conftest import Gpus, in_rank, vendors_in_turn
from tests.calls.gpu.test_messages import in_order, lists, pass_around
from tests.collective_cases import COUNTED, COUNTS, MOVEMENTS, REDUCTIONS, ROOTED, SCANS, Case
from tests.dtypes import ALLOWED

import gpucoll
from gpucoll.backends.direct import word_trial
from gpucoll.backends.direct.pieces import SLOT_BYTES
from gpucoll.devices import open_device
from gpucoll.errors import ArgumentError, BackendUnavailableError

BOTH = pytest.mark.parametrize("gpus", ["nccl", "rccl"], indirect=True)
on_one_gpu = functools.partial(in_rank, number=0)


def cases_of(name, world_size, n_cases=16):
    """Return drawn cases of one collective, of every dtype with ops that NCCL lacks, too."""
    random = Random(f"{name}-{world_size}")
    pairs = [pair for pair in ALLOWED if not (name in SCANS and pair[1] == "avg")]
    if world_size not in (1, 2, 4):  # a third is not exact
        pairs = [pair for pair in pairs if pair[1] != "avg" or pair[0].startswith(("int", "uint"))]
    random.shuffle(pairs)
    made = []
    for place in range(n_cases):
        dtype, op = pairs[place % len(pairs)]
        counts = random.choice(["", "", *COUNTS]) if name in COUNTED else ""
        case = Case(
            dtype,
            random.choice((0, 1, 2, 3, 5, 64, 257, 1000)),
            "" if name in MOVEMENTS else op,
            root=random.randrange(world_size) if name in ROOTED else -1,
            in_place=random.random() < 0.3,
            offset=random.choice((0, 0, 16)),
            seed=random.randrange(1000),
            collective=name,
            counts=counts,
            row=random.choice((0, 0, 3)),
            way=WAYS[place % len(WAYS)],
        )
        made.append(case)
    return made


def drawn(world_size):
    return [case for name in (*REDUCTIONS, *MOVEMENTS) for case in cases_of(name, world_size)]


@pytest.mark.soak(quick=1)
@vendors_in_turn("world_size", [1, 2, 3, 4])
def test_drawn_cases(gpus, world_size):
    cases = drawn(world_size)
    assert gpus.call(world_size, run_cases, cases, backend="direct") == [len(cases)] * world_size


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 7])
def test_ranks_that_share_a_gpu(gpus, world_size):
    cases = drawn(world_size)
    shared = Gpus(gpus.pools, gpus.double, on_one_gpu)
    assert (
        shared.call(world_size, run_cases, cases, backend="direct", device=0)
        == [len(cases)] * world_size
    )


def large(comm, kit):
    """Make calls of several pieces; compare with what NumPy says."""
    me, size = comm.rank, comm.world_size
    count = 3 * SLOT_BYTES // 4 + 5

    def mine(rank, n=count):
        return (np.arange(n) % 251 + rank).astype(np.int32)

    def given(values):
        return kit.seen_as(kit.bytes_of(values.view(np.uint8)), values.shape, values.dtype)

    x = given(mine(me))
    total = sum(mine(rank) for rank in range(size))
    assert (kit.read(comm.all_reduce(x)) == total).all()
    assert (kit.read(comm.broadcast(x, root=1)) == mine(1)).all()
    gathered = kit.read(comm.all_gather(x)).reshape(size, -1)
    assert all((gathered[rank] == mine(rank)).all() for rank in range(size))
    counts = [count // (rank + 1) for rank in range(size)]
    gathered = kit.read(comm.all_gather(given(mine(me, counts[me])), counts=counts))
    assert (gathered == np.concatenate([mine(r, n) for r, n in enumerate(counts)])).all()
    # One pair alone has much for each other: the others agree on its number of pieces.
    table = np.ones((size, size), int)
    table[0, 1] = count
    blocks = [mine(me, table[me, to]) + to for to in range(size)]
    received = comm.all_to_all(
        given(np.concatenate(blocks)),
        send_counts=table[me].tolist(),
        recv_counts=table[:, me].tolist(),
    )
    expected = np.concatenate([mine(of, table[of, me]) + me for of in range(size)])
    assert (kit.read(received) == expected).all()
    out = given(np.zeros(count, np.int32))
    neighbour = kit.read(comm.send_recv(x, (me + 1) % size, (me - 1) % size, out=out))
    assert (neighbour == mine((me - 1) % size)).all()
    comm.check()


@pytest.mark.soak(quick=1)
@BOTH
@pytest.mark.parametrize("world_size", [2, 3])
def test_arrays_of_several_pieces(gpus, world_size):
    gpus.call(world_size, large, backend="direct")


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(
    ("world_size", "function"),
    [(1, pass_around), (2, pass_around), (3, pass_around), (2, in_order), (3, lists)],
)
def test_messages_and_lists(gpus, world_size, function):
    gpus.call(world_size, function, backend="direct")


def user_op(comm, kit):
    op = gpucoll.ReduceOp.custom(lambda a, b: a if abs(a) > abs(b) else b)
    values = np.array([comm.rank, -2 * comm.rank, 1], np.float32)
    x = kit.seen_as(kit.bytes_of(values.view(np.uint8)), (3,), "float32")
    last = comm.world_size - 1
    assert kit.read(comm.all_reduce(x, op)).tolist() == [last, -2 * last, 1]


@pytest.mark.soak
def test_users_ops(gpus):
    gpus.call(2, user_op, backend="direct")


def change_streams(comm, kit):
    """Make calls on streams in turn; each must see what the one before has left."""
    streams = [kit.stream() for _ in range(3)]
    x = kit.seen_as(kit.bytes_of(np.ones(4, np.int64).view(np.uint8)), (4,), "int64")
    for place in range(12):
        comm.all_reduce(x, out=x, stream=streams[0])
        y = kit.seen_as(kit.bytes_of(np.full(4, place, np.int64).view(np.uint8)), (4,), "int64")
        result = comm.all_reduce(y, stream=streams[1 + place % 2])
        streams[1 + place % 2].synchronize()
        assert kit.read(result).tolist() == [place * comm.world_size] * 4
    streams[0].synchronize()
    assert kit.read(x).tolist() == [comm.world_size**12] * 4
    comm.check()


def test_streams_in_turn(gpus):
    gpus.call(2, change_streams, backend="direct")


def divide(comm, kit):
    x = kit.bytes_of(np.ones(8, np.uint8))
    assert kit.read(comm.all_reduce(x))[0] == comm.world_size
    with comm.duplicate() as other:
        assert kit.read(other.all_reduce(x))[0] == comm.world_size
        assert kit.read(comm.all_reduce(x))[0] == comm.world_size
    part = comm.split(None if comm.rank == 2 else 0)
    if part is not None:
        way = "GPU path through shared GPU memory"
        assert part.describe().facts[way] == comm.describe().facts[way]
        assert part.describe().facts[way].startswith("collectives")
        with part:
            assert kit.read(part.all_reduce(x))[0] == 2
    assert "staged through page-locked host memory" in str(comm.describe())


def test_split_and_duplicate(gpus):
    gpus.call(3, divide, backend="direct")


def refuse_capture(rank):
    with rank.init(backend="direct") as comm:
        x = rank.kit.bytes_of(np.ones(8, np.uint8))
        comm.all_reduce(x, out=x)
        comm.check()
        stream = rank.kit.stream()
        with stream, rank.captured(stream), pytest.raises(ArgumentError, match="captured graph"):
            comm.all_reduce(x, out=x)
        comm.check()


def test_captured_graphs_are_refused(gpus):
    gpus.call_ranks(2, refuse_capture)


def cannot_wait(rank, setting, value, usual):
    known = vars(open_device("rocm", rank.rank))  # devices are kept as long as a process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_trial, "LIMIT_S", 0.2)
        if rank.rank == 1:
            rank.control.driver_set(setting, value)
            known.pop("can_wait_for_values", None)
        try:
            with pytest.raises(BackendUnavailableError) as error:
                rank.init(backend="direct")
        finally:
            rank.control.driver_set(setting, usual)
            known.pop("can_wait_for_values", None)
    for device, stream in word_trial._stuck:  # as if it had gone on
        device.destroy_stream(stream)
    word_trial._stuck.clear()
    with rank.init(backend="direct") as comm:
        comm.all_reduce(rank.kit.bytes_of(np.ones(4, np.uint8)))
        comm.check()
    return str(error.value)


@pytest.mark.parametrize("gpus", ["rccl"], indirect=True)
@pytest.mark.parametrize(
    ("setting", "value", "usual", "reason"),
    [
        ("wait_values", 0, 1, "its driver reports that its streams cannot wait for words"),
        ("wait_error", 1, 0, "its driver reports that its streams do not wait for words: code"),
        ("hold", 1, 0, "a stream did not go on in 0.2 s once its word was there"),
    ],
)
def test_a_gpu_that_cannot_wait_is_refused_alike(gpus, setting, value, usual, reason):
    message, same = gpus.call_ranks(2, cannot_wait, setting, value, usual)
    assert message == same
    assert f"rank 1: rocm:1 (Double of a GPU, driver 6.4): {reason}" in message


def on_hosts(rank):
    with rank.init(backend="direct", device=rank.rank) as comm:
        make_calls(comm, rank.kit)


def make_calls(comm, kit):
    x = kit.seen_as(kit.bytes_of(np.arange(5000, dtype=np.int32).view(np.uint8)), (5000,), "int32")
    total = comm.all_reduce(x)
    comm.check()
    assert (kit.read(total) == np.arange(5000) * comm.world_size).all()
    large(comm, kit)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aab"])
def test_played_hosts(gpus_on_hosts, placed):
    gpus_on_hosts.call_ranks(placed, on_hosts)
