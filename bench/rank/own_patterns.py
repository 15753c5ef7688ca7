"""Patterns, written with gpucoll's own calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gpucoll.bench.rank.inputs import ASYNC, plain
from gpucoll.bench.rank.jobs import RESULT, STOP, TASK, Job, JobMessages, Jobs
from gpucoll.bench.rank.library import Call, Loop
from gpucoll.bench.rank.loops import keeping, ping_pong, repeated, timed
from gpucoll.bench.rank.objects import objects
from gpucoll.bench.rank.overlap import overlap

__all__ = ["pattern"]

Method = Callable[[Call], "partial[Any]"]


def pattern(comm: Any, call: Call, method: Method) -> Loop | None:
    """Return the loop of a pattern; None if it has no such side.

    Parameters
    ----------
    comm : Communicator
    call : Call
        A call on arrays of their own dtype.
    method : callable
        Maps a collective's call to the method and its arguments.
    """
    name = call.collective
    if name.startswith((ASYNC, "overlap")):
        blocking = method(replace(call, collective=plain(name)))
        start = partial(blocking, async_op=True)
        if name.startswith(ASYNC):
            return repeated(start, then=".wait()")
        return overlap(call, start, ".wait()", blocking) if call.in_place else None
    if name.endswith("_object"):
        return objects(call, comm.rank, comm.world_size, getattr(comm, name))
    if name == "producer_consumer":
        return Jobs(comm.rank, comm.world_size, messages_of(comm))
    return None if call.in_place else between_two(comm, call)


def between_two(comm: Any, call: Call) -> Loop:
    """Return the loop of messages."""
    if call.collective == "isend_irecv":
        return both_ways(comm, call)
    kept: list[Any] = [None]
    receiving = "kept[0] = receive(source=other)"
    if call.collective == "probe_recv":
        receiving = "probe(other)\nreceive(destination, other)"
    loop = ping_pong(
        comm.rank,
        comm.send,
        comm.recv,
        call.source,
        call.destination,
        receiving=receiving,
        probe=comm.probe,
        kept=kept,
    )

    def copy(received: Any) -> None:
        call.destination[:] = received

    return keeping(loop, kept, copy)


def both_ways(comm: Any, call: Call) -> Loop:
    """Return the loop that receives from one rank while sending to another, and waits for both."""
    import gpucoll

    return timed(
        "receiving = receive(destination, before, async_op=True)\n"
        "wait_all([receiving, send(source, after, async_op=True)])",
        wait_all=getattr(gpucoll, "wait_all", wait_one_by_one),
        receive=comm.recv,
        send=comm.send,
        source=call.source,
        destination=call.destination,
        after=(comm.rank + 1) % comm.world_size,
        before=(comm.rank - 1) % comm.world_size,
    )


def wait_one_by_one(works: list[Any]) -> None:
    """Wait for each Work."""
    for work in works:
        work.wait()


def messages_of(comm: Any) -> JobMessages:
    """Return how jobs are sent: as objects, if this version has messages of objects."""
    return ObjectMessages(comm) if hasattr(comm, "send_object") else ArrayMessages(comm)


class ObjectMessages:
    """Jobs as messages of Python objects."""

    def __init__(self, comm: Any) -> None:
        from gpucoll.types import ANY_SOURCE, ANY_TAG

        self._comm, self._anybody, self._anything = comm, ANY_SOURCE, ANY_TAG

    def give(self, job: Job | None, worker: int) -> None:
        """Send a job to a rank, or None if there are no more."""
        self._comm.send_object(job, worker, STOP if job is None else TASK)

    def take_result(self) -> tuple[Job, int]:
        """Return the next result of any rank, and that rank."""
        result, message = self._comm.recv_object(self._anybody, RESULT, info=True)
        return result, message.source

    def take_job(self) -> Job | None:
        """Return the job that rank 0 has sent."""
        job: Job | None = self._comm.recv_object(0, self._anything)
        return job

    def give_result(self, result: Job) -> None:
        """Send a result to rank 0."""
        self._comm.send_object(result, 0, RESULT)


class ArrayMessages:
    """Jobs as arrays of bytes, which are received without knowing their size."""

    def __init__(self, comm: Any) -> None:
        from gpucoll.types import ANY_SOURCE, ANY_TAG

        self._comm, self._anybody, self._anything = comm, ANY_SOURCE, ANY_TAG

    def give(self, job: Job | None, worker: int) -> None:
        """Send a job to a rank, or None if there are no more."""
        self._comm.send(pickled(job), worker, STOP if job is None else TASK)

    def take_result(self) -> tuple[Job, int]:
        """Return the next result of any rank, and that rank."""
        source = self._comm.probe(self._anybody, RESULT).source
        result: Job = pickle.loads(self._comm.recv(source=source, tag=RESULT))
        return result, source

    def take_job(self) -> Job | None:
        """Return the job that rank 0 has sent."""
        tag = self._comm.probe(0, self._anything).tag
        job: Job | None = pickle.loads(self._comm.recv(source=0, tag=tag))
        return job

    def give_result(self, result: Job) -> None:
        """Send a result to rank 0."""
        self._comm.send(pickled(result), 0, RESULT)


def pickled(job: Job | None) -> Any:
    """Return an object as an array of bytes."""
    return np.frombuffer(pickle.dumps(job), np.uint8)
