"""A user's program on NumPy arrays, which mypy and pyright accept as it stands.

tests/test_typed.py runs both. An error that a line ignores is one that they must report: both
complain of a comment that ignores nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import gpucoll
from gpucoll import Communicator, Message, Plan, ReduceOp, Work
from gpucoll.tables import Published, Table

Floats = npt.NDArray[np.float32]


def collectives(comm: Communicator, x: Floats) -> Floats:
    assert_type(comm.all_reduce(x), Floats)
    assert_type(comm.all_reduce(x, "max", out=x, timeout_s=2.0), Floats)
    assert_type(comm.all_reduce([x, x]), list[Floats])
    assert_type(comm.all_reduce(3), int)
    assert_type(comm.reduce(x, root=0), Floats | None)
    assert_type(comm.gather(x), Floats | None)
    assert_type(comm.all_gather(x, counts=[4, 4]), Floats)
    assert_type(comm.broadcast_object({"step": 3}), dict[str, int])
    assert_type(comm.all_gather_object(comm.rank), list[int])
    assert_type(comm.rank, int)
    whole = comm.gather(x)
    return x if whole is None else whole


def asynchronous(comm: Communicator, x: Floats) -> Floats:
    work = comm.all_reduce(x, async_op=True)
    assert_type(work, Work[Floats])
    assert_type(work.wait(timeout_s=1.0), Floats)
    assert_type(work.done(), bool)
    plan = comm.plan_all_reduce(x, out=x)
    assert_type(plan, Plan[Floats])
    assert_type(plan(), Floats)
    gpucoll.wait_all([work])
    return work.wait()


async def awaited(comm: Communicator, x: Floats) -> Floats:
    return await comm.all_reduce(x, async_op=True)


def messages(comm: Communicator, x: Floats) -> None:
    comm.send(x, 1, tag=3)
    assert_type(comm.recv(out=x, source=0), Floats)
    value, message = comm.recv(out=x, info=True)
    assert_type(value, Floats)
    assert_type(message, Message)
    assert_type(message.source, int)


def errors(comm: Communicator, x: Floats) -> Communicator:
    try:
        comm.all_reduce(x, op=ReduceOp.MAX)
    except gpucoll.PeerLostError as error:
        assert_type(error, gpucoll.PeerLostError)
        return comm.shrink()
    except gpucoll.DeadlineError:
        raise
    return comm


def tables(comm: Communicator, ids: npt.NDArray[np.int64], weights: dict[str, Floats]) -> None:
    with Table(comm, 1000, 8, update="adagrad") as table:
        rows = table.pull(ids)
        table.push(ids, rows)
    with Published(comm, like=weights) as published:
        published.publish(weights)
        version, arrays = published.latest(newer_than=0, wait=True)
        assert_type(version, int)
        if arrays is not None:
            assert_type(arrays["w"], Any)


def mistakes(comm: Communicator, x: Floats) -> None:
    comm.all_reduce("text")  # type: ignore[type-var]  # no array
    comm.all_reduce(x, timeout=3.0)  # type: ignore[call-overload]  # it is called timeout_s
    comm.reduce(x).sum()  # type: ignore[union-attr]  # None on other ranks
    comm.Allreduce(x)  # type: ignore[attr-defined]  # a name of mpi4py's


def program(comm: Communicator, n: int) -> Floats:
    return comm.all_reduce(np.ones(n, np.float32))


def main() -> None:
    with gpucoll.init(timeout_s=5.0) as comm:
        collectives(comm, np.ones(4, np.float32))
    assert_type(gpucoll.launch(program, 2, (4,)), list[Floats])
