"""The driver's commands to a Dask worker: begin a rank, return how it ended, give it up.

They run in the worker's event loop, through ``client.run``, alongside its tasks; the rank has a
thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from gpucoll import __version__
from gpucoll.integrations.dask.store import Store
from gpucoll.integrations.engine.outcome import Outcome, here, without_result
from gpucoll.integrations.engine.rank_call import Run, call

if TYPE_CHECKING:
    from distributed import Worker

    from gpucoll import Communicator

__all__ = ["UNKNOWN", "Order", "Station", "begin", "describe", "ended", "give_up"]

UNKNOWN = b""
"""The answer of `ended` if this process does not know the run: it was restarted since."""
_ASK_S = 20.0
"""How many seconds a worker holds the driver's question back while its rank runs."""
_ORPHAN_S = 120.0
"""If the driver asks nothing for this many seconds, it is lost."""


@dataclass(frozen=True)
class Station:
    """Where a worker runs."""

    host: str
    pid: int
    version: str

    def __str__(self) -> str:
        return f"host {self.host}, process {self.pid}"


@dataclass(frozen=True)
class Order:
    """A run, as all workers receive it.

    All workers must be able to load it: Dask logs an object that a worker cannot load, and this one
    contains the secret.
    """

    run: Run
    """The run without its options."""
    ranks: Mapping[str, int]
    """Ranks by the worker's address."""
    body: bytes = field(repr=False)
    """Pickle of the run's options, function, args and kwargs."""


class _Rank:
    """A rank of a run on this worker."""

    def __init__(self, order: Order, worker: Worker) -> None:
        self.run = order.run
        self._rank = order.ranks[worker.address]
        self._body = order.body
        self._store = Store(
            worker.scheduler.address, worker.security, order.run.secret, lambda: self._is_given_up
        )
        self._is_given_up = False
        self._communicator: Communicator | None = None
        self._loop = asyncio.get_running_loop()
        self.has_ended = asyncio.Event()
        self.outcome = UNKNOWN
        self.last_asked = time.monotonic()
        self.thread = threading.Thread(target=self._main, name=order.run.name, daemon=True)
        self.watch: asyncio.Task[None]

    def give_up(self) -> None:
        """End the rank when it next uses the store or its communicator."""
        self._is_given_up = True
        communicator = self._communicator
        if communicator is not None:
            with contextlib.suppress(Exception):  # the communicator may be closing
                communicator.abort()

    def _main(self) -> None:
        try:
            outcome = self._called()
        finally:
            self._communicator = None
            self._store.close()
        try:
            self.outcome = _pickled(outcome)
        finally:
            with contextlib.suppress(RuntimeError):  # the worker has closed
                self._loop.call_soon_threadsafe(self.has_ended.set)

    def _called(self) -> Outcome:
        try:
            options, function, args, kwargs = pickle.loads(self._body)
        except BaseException as error:
            how = (
                "cannot load the function or its arguments: modules that they refer to must be "
                f"importable there ({type(error).__name__}: {error})"
            )
            return without_result(self._rank, here(), how)
        run = replace(self.run, options=options)
        return call(run, self._rank, self._store, function, args, kwargs, self._joined)

    def _joined(self, communicator: Communicator) -> None:
        self._store.close()
        self._communicator = communicator
        if self._is_given_up:
            communicator.abort()


_ranks: dict[str, _Rank] = {}
"""The ranks of this process, by the run's name."""


def describe() -> Station:
    """Return where this worker runs."""
    return Station(socket.gethostname(), os.getpid(), __version__)


async def begin(order: Order, dask_worker: Worker) -> None:
    """Start this worker's rank of a run."""
    rank = _ranks[order.run.name] = _Rank(order, dask_worker)
    rank.thread.start()
    rank.watch = asyncio.create_task(_watch(rank))


async def ended(name: str) -> bytes | None:
    """Return the pickled outcome of this worker's rank; None if it has not ended yet."""
    rank = _ranks.get(name)
    if rank is None:
        return UNKNOWN
    rank.last_asked = time.monotonic()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(rank.has_ended.wait(), _ASK_S)
    rank.last_asked = time.monotonic()
    return rank.outcome if rank.has_ended.is_set() else None


async def give_up(name: str) -> None:
    """End this worker's rank as far as possible, and forget it: the run is over."""
    if (rank := _ranks.pop(name, None)) is not None:
        rank.watch.cancel()
        await asyncio.to_thread(rank.give_up)


async def _watch(rank: _Rank) -> None:
    """Give the rank up when the driver no longer asks for it."""
    while (left_s := rank.last_asked + _ORPHAN_S - time.monotonic()) > 0:
        await asyncio.sleep(left_s)
    _ranks.pop(rank.run.name, None)
    await asyncio.to_thread(rank.give_up)


def _pickled(outcome: Outcome) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(outcome))
    except Exception as error:
        how = (
            f"returned a {type(outcome.result).__name__}, which cannot be pickled "
            f"({type(error).__name__}: {error})"
        )
        return pickle.dumps(without_result(outcome.rank, outcome.where, how))
