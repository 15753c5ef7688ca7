"""Which processes are ranks: losses are left out, newcomers let in, and some leave.

A job's launcher is ``horovodrun``, whose news say how many ranks there shall be and who leaves; or
``gpucoll-run --elastic``, which only starts processes in the place of lost ones.
"""

from __future__ import annotations

import os
import sys
import warnings

import gpucoll
from gpucoll import config
from gpucoll.integrations.horovod import process_sets
from gpucoll.integrations.horovod.elastic.news import NEWS, PLACE, News, read_news
from gpucoll.integrations.horovod.exceptions import HorovodInternalError
from gpucoll.integrations.horovod.job import job
from gpucoll.integrations.horovod.settings import settings_of

__all__ = ["LOSSES", "goes_on_as_newcomer", "lets_newcomers_in", "reset"]

LOSSES = (gpucoll.PeerLostError, gpucoll.DeadlineError, gpucoll.AbortedError)
_DOOR = "horovod 1"
"""Where newcomers wait: in their first `init`."""
_COMING_S = 30.0
"""How long to wait for newcomers that a launcher announces; HOROVOD_START_TIMEOUT changes it."""
_LEFT = 0
"""The exit code of a rank that was to leave."""

_grown: list[gpucoll.Communicator] = []
"""The communicator that newcomers were let into, until `reset` takes it."""


def lets_newcomers_in() -> bool:
    """Let processes in that wait to join; return whether any came.

    Every rank calls it at the same place. If any came, `reset` is to be called next.

    Raises
    ------
    HorovodInternalError
        A rank is lost.
    """
    if not job.is_initialized or not (config.variable(config.JOB) or config.variable(config.MEET)):
        return False
    world = job.world
    try:
        grown = _with_newcomers(world)
    except LOSSES as error:
        raise HorovodInternalError(str(error)) from error
    if grown is world:
        return False
    _grown.append(grown)
    return True


def reset() -> None:
    """Go on with the ranks that there are now. Every one of them calls it.

    Raises
    ------
    HorovodInternalError
        A rank is lost meanwhile: call it again.
    RuntimeError
        Too few ranks are left, and not enough have come in time.
    """
    world = job.release()
    try:
        job.adopt(_grown.pop() if _grown else _renewed(world))
        process_sets.begin(())
    except LOSSES as error:
        raise HorovodInternalError(str(error)) from error


def goes_on_as_newcomer() -> bool:
    """Go on with those that are left if a rank was lost just after this process was let in.

    Return False if it was not let in, or is no newcomer.
    """
    if not (job.is_initialized and config.variable(config.JOIN)):
        return False
    while True:
        try:
            reset()
        except HorovodInternalError:  # another one is lost
            continue
        return True


def _renewed(comm: gpucoll.Communicator) -> gpucoll.Communicator:
    """Return the communicator of the ranks that are left and wanted, and of those that come."""
    settings = settings_of()
    while True:
        try:
            comm = comm.shrink(timeout_s=settings.elastic_timeout_s)
            news = comm.broadcast_object(read_news(os.environ.get(NEWS)), 0)
            comm = _without_leaving(comm, news)
            lacking = news.least - comm.world_size
            if lacking > 0:
                comm = _with_newcomers(comm, lacking, settings.elastic_timeout_s)
            elif (coming := news.size - comm.world_size) > 0:
                comm = _with_newcomers(comm, coming, settings.start_timeout_s or _COMING_S)
        except LOSSES:
            continue
        if comm.world_size < news.least:
            raise RuntimeError(
                f"{comm.world_size} ranks are left, of at least {news.least}, and not enough have "
                f"come within {settings.elastic_timeout_s:g} s (HOROVOD_ELASTIC_TIMEOUT)"
            )
        return comm


def _with_newcomers(
    comm: gpucoll.Communicator, at_most: int | None = None, wait_s: float = 0.0
) -> gpucoll.Communicator:
    """Return the communicator of these ranks and of those that come; this one if none can."""
    try:
        return comm.grow(name=_DOOR, at_most=at_most, wait_s=wait_s)
    except gpucoll.RendezvousError as error:  # on every rank
        if comm.rank == 0:
            warnings.warn(f"elastic training goes on without newcomers: {error}", RuntimeWarning, 2)
        return comm


def _without_leaving(comm: gpucoll.Communicator, news: News) -> gpucoll.Communicator:
    """Return the communicator of the ranks that stay; end this process if it is to leave."""
    leaves = os.environ.get(PLACE, "") in map(str, news.leaving)
    if not news.leaving or True not in (leaving := comm.all_gather_object(leaves)):
        return comm
    if all(leaving):
        raise RuntimeError("the launcher wants every rank to leave: the state would be lost")
    staying = comm.split(None if leaves else 0)
    comm.close()
    if staying is None:
        sys.exit(_LEFT)
    return staying
