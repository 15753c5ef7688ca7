"""Patterns, as programs for mpi4py write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gpucoll.bench.rank.inputs import ASYNC, plain
from gpucoll.bench.rank.jobs import RESULT, STOP, TASK, Job, Jobs
from gpucoll.bench.rank.library import Call, Loop
from gpucoll.bench.rank.loops import keeping, ping_pong, repeated, timed
from gpucoll.bench.rank.objects import objects
from gpucoll.bench.rank.overlap import overlap

__all__ = ["pattern"]

Method = Callable[[Call], "partial[Any] | None"]

OBJECTS = {
    "broadcast_object": "bcast",
    "gather_object": "gather",
    "scatter_object": "scatter",
    "all_gather_object": "allgather",
}


def pattern(mpi: Any, call: Call, method: Method, described: Callable[[Any], Any]) -> Loop | None:
    """Return the loop of a pattern; None if it has no such side.

    Parameters
    ----------
    mpi : module
        mpi4py's MPI module.
    call : Call
    method : callable
        Maps a collective's call to the method and its arguments, or to None if there is none.
    described : callable
        Maps an array to its buffer description.
    """
    comm, name = mpi.COMM_WORLD, call.collective
    if name.startswith((ASYNC, "overlap")):
        blocking = method(replace(call, collective=plain(name)))
        if blocking is None:
            return None
        start = started(comm, blocking)
        if name.startswith(ASYNC):
            return repeated(start, then=".Wait()")
        return overlap(call, start, ".Wait()", blocking) if call.in_place else None
    if name in OBJECTS:
        function = getattr(comm, OBJECTS[name])
        return objects(call, comm.Get_rank(), comm.Get_size(), function)
    if name == "producer_consumer":
        return Jobs(comm.Get_rank(), comm.Get_size(), Objects(mpi))
    return None if call.in_place else between_two(mpi, call, described)


def started(comm: Any, call: partial[Any]) -> partial[Any]:
    """Return the nonblocking form of a method, such as ``Iallreduce`` for ``Allreduce``."""
    name = "I" + call.func.__name__.lower()
    return partial(getattr(comm, name), *call.args, **call.keywords)


def between_two(mpi: Any, call: Call, described: Callable[[Any], Any]) -> Loop:
    """Return the loop of messages."""
    comm = mpi.COMM_WORLD
    rank, ranks = comm.Get_rank(), comm.Get_size()
    source, destination = described(call.source), described(call.destination)
    if call.collective == "isend_irecv":
        return timed(
            "wait_all([receive(destination, before), send(source, after)])",
            wait_all=mpi.Request.Waitall,
            receive=comm.Irecv,
            send=comm.Isend,
            source=source,
            destination=destination,
            after=(rank + 1) % ranks,
            before=(rank - 1) % ranks,
        )
    kept: list[Any] = [None]
    receiving = "probe(other)\nreceive(destination, other)"
    if call.collective == "recv_unknown":
        receiving = (
            "probe(other, 0, status)\n"
            "kept[0] = received = empty(count(datatype), dtype)\n"
            "receive([received, datatype], other)"
        )
    status = mpi.Status()
    loop = ping_pong(
        rank,
        comm.Send,
        comm.Recv,
        source,
        destination,
        receiving=receiving,
        probe=comm.Probe,
        status=status,
        count=status.Get_count,
        datatype=source[1],
        empty=np.empty,
        dtype=call.source.dtype,
        kept=kept,
    )

    def copy(received: Any) -> None:
        call.destination[:] = received

    return keeping(loop, kept, copy)


class Objects:
    """Jobs as messages of Python objects in mpi4py."""

    def __init__(self, mpi: Any) -> None:
        self._comm, self._status = mpi.COMM_WORLD, mpi.Status()
        self._anybody, self._anything = mpi.ANY_SOURCE, mpi.ANY_TAG

    def give(self, job: Job | None, worker: int) -> None:
        """Send a job to a rank, or None if there are no more."""
        self._comm.send(job, worker, STOP if job is None else TASK)

    def take_result(self) -> tuple[Job, int]:
        """Return the next result of any rank, and that rank."""
        result = self._comm.recv(None, self._anybody, RESULT, self._status)
        return result, self._status.source

    def take_job(self) -> Job | None:
        """Return the job that rank 0 has sent."""
        job: Job | None = self._comm.recv(None, 0, self._anything)
        return job

    def give_result(self, result: Job) -> None:
        """Send a result to rank 0."""
        self._comm.send(result, 0, RESULT)
