"""oneCCL's CPU plug-in behind gpucoll's calls: nothing is a double but the GPUs' memory."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from tests.calls.gpu.cases import run_cases
from tests.calls.gpu.host_devices import in_rank
from tests.calls.gpu.test_collectives import cases_of
from tests.collective_cases import MOVEMENTS, REDUCTIONS
from tests.doubles import run_python
from tests.hosts import PlayedHosts

from gpucoll import ReduceOp
from gpucoll.errors import DeadlineError, GpucollError, MismatchError, PeerLostError

TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
OPS = ("sum", "prod", "max", "min", "avg")


def drawn(world_size, n_cases):
    names = (*REDUCTIONS, *MOVEMENTS)
    return [case for name in names for case in cases_of(name, world_size, 3, n_cases)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_drawn_cases(oneccl, world_size):
    cases = drawn(world_size, 6)
    done = oneccl.call(world_size, run_cases, cases, backend="oneccl", timeout_s=60.0)
    assert done == [len(cases)] * world_size


def array(kit, values):
    """Return an array of this rank's device with these values."""
    made = kit.bytes_of(np.zeros(values.nbytes, np.uint8))
    made = kit.seen_as(made, values.shape, values.dtype)
    kit.write(made, values)
    return made


def reduce_each(comm, kit):
    arrays = {}
    for dtype in TYPES:
        x = array(kit, (np.arange(9) % 5 + comm.rank).astype(dtype))
        for op in (*OPS, ReduceOp.scaled_sum(2.0)):
            arrays[dtype, str(op)] = kit.read(comm.all_reduce(x, op=op)).tolist()
    return arrays


def test_every_type_and_op(oneccl):
    first, second = oneccl.call(2, reduce_each, backend="oneccl", timeout_s=60.0)
    assert first == second
    low = np.arange(9) % 5
    expected = {"sum": 2 * low + 1, "prod": low * (low + 1), "max": low + 1, "min": low}
    for dtype in TYPES:
        for op, values in expected.items():
            assert first[dtype, op] == values.astype(dtype).tolist(), (dtype, op)
        average = (2 * low + 1) / 2 if dtype.startswith("float") else (2 * low + 1) // 2
        assert first[dtype, "avg"] == average.astype(dtype).tolist(), dtype
        assert first[dtype, str(ReduceOp.scaled_sum(2.0))] == (4 * low + 2).astype(dtype).tolist()


def exchange_messages(comm, kit):
    me, other = comm.rank, 1 - comm.rank
    x, y = array(kit, np.arange(10) + 100 * me), array(kit, np.zeros(10, np.int64))
    with comm.group():
        comm.send(x, other)
        comm.recv(source=other, out=y)
    seen = [kit.read(y).tolist()]
    if me == 0:
        comm.send(x, other)
    else:
        comm.recv(source=other, out=y)
    seen.append(kit.read(y).tolist())
    with comm.group():
        total, most = comm.all_reduce(x), comm.all_reduce(y, op="max")
    return [*seen, kit.read(total).tolist(), kit.read(most).tolist()]


def test_messages_and_groups(oneccl):
    zero, one = (np.arange(10) + 100 * rank for rank in range(2))
    ours, theirs = oneccl.call(2, exchange_messages, backend="oneccl", timeout_s=60.0)
    total, most = (zero + one).tolist(), one.tolist()
    assert ours == [one.tolist(), one.tolist(), total, most]
    assert theirs == [zero.tolist(), zero.tolist(), total, most]


def split_by_parity(comm, kit):
    x = array(kit, np.array([comm.rank]))
    kit.read(comm.all_reduce(x))
    with comm.split(comm.rank % 2, key=-comm.rank) as part:
        gathered = kit.read(part.all_gather(x)).tolist()
    nobody = comm.split(None if comm.rank == 0 else 5)
    alone = nobody is None
    if nobody is not None:
        gathered += kit.read(nobody.all_gather(x)).tolist()
        nobody.close()
    return gathered, alone, kit.read(comm.all_reduce(x)).tolist()


def test_split(oneccl):
    results = oneccl.call(3, split_by_parity, backend="oneccl", timeout_s=60.0)
    assert results == [([2, 0], True, [3]), ([1, 1, 2], False, [3]), ([2, 0, 1, 2], False, [3])]


def call_something_else(rank):
    kit = rank.kit
    x = array(kit, np.zeros(4))
    comm = rank.init(backend="oneccl", timeout_s=20.0)
    kit.read(comm.all_reduce(x))
    if rank.rank:
        comm.all_reduce(x, op="max")
    else:
        comm.all_reduce(x)
    with pytest.raises(MismatchError, match="op=max"):
        comm.check()
    close(comm)
    return True


def close(comm):
    """Close a communicator that is broken, which must not take long."""
    begun_s = time.monotonic()
    try:
        comm.close()
    except GpucollError:
        comm.close()
    assert time.monotonic() - begun_s < 15


def test_mismatch(oneccl):
    assert oneccl.call_ranks(2, call_something_else) == [True, True]


def lose_one(rank):
    comm, kit = rank.init(backend="oneccl", timeout_s=30.0), rank.kit
    x = array(kit, np.ones(4))
    kit.read(comm.all_reduce(x))
    if rank.rank:
        os._exit(3)
    begun_s = time.monotonic()
    comm.all_reduce(x)
    with pytest.raises(PeerLostError, match="rank 1"):
        comm.check()
    close(comm)
    return time.monotonic() - begun_s


def test_a_lost_rank(oneccl):
    first, lost = oneccl.replies(2, lose_one)
    assert lost.exit_code == 3
    assert first.error is None
    assert first.result < 15


def come_alone(rank):
    kit = rank.kit
    x = array(kit, np.zeros(4))
    comm = rank.init(backend="oneccl", timeout_s=20.0)
    kit.read(comm.all_reduce(x))
    if rank.rank == 0:
        work = comm.all_reduce(x, async_op=True, timeout_s=1.0)
        with pytest.raises(DeadlineError, match="rank 0 of 2 waited 1 s in all_reduce"):
            work.synchronize()
    else:
        time.sleep(3)
    close(comm)
    comm = rank.init(backend="oneccl", timeout_s=20.0)  # a new one works in the same processes
    kit.write(x, np.full(4, rank.rank + 1.0))
    total = kit.read(comm.all_reduce(x)).tolist()
    comm.close()
    return total


def test_a_deadline_gives_the_communicator_up(oneccl):
    assert oneccl.call_ranks(2, come_alone) == [[3.0] * 4] * 2


def reduce_between_hosts(rank):
    with rank.init(backend="oneccl", timeout_s=30.0, device=rank.rank) as comm:
        x = array(rank.kit, np.full(5, comm.rank + 1.0))
        return rank.kit.read(comm.all_reduce(x)).tolist()


def test_between_hosts(oneccl, tmp_path):
    """Hosts that are played on this machine: the id and the comparison go between hosts."""
    played = PlayedHosts(oneccl.pools, tmp_path)
    given = in_rank, oneccl.double, reduce_between_hosts, ()
    options = {"gives": "seat", "environment": oneccl.variables, "backend": "oneccl"}
    assert played.call("aab", *given, **options) == [[6.0] * 5] * 3


BENCH = """
from gpucoll.bench import cli
arguments = "all_reduce -b 1K -e 1K --array host-device --backend oneccl --ranks 2".split()
raise SystemExit(cli.main([*arguments, "-n", "2", "--rounds", "3"]))
"""


def test_bench(oneccl):
    out = run_python(BENCH, **oneccl.variables)
    (row,) = (row for row in out.splitlines() if row.endswith(" gpucoll"))
    assert row.split()[:4] == ["1024", "256", "float32", "sum"]
    assert "# Out of bounds values : 0 OK" in out
