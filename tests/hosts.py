"""Ranks on several hosts, which are played on this machine: they connect over loopback TCP.

>>> hosts = PlayedHosts(Pools(server), tmp_path)
>>> hosts.call("aab", function, 1)  # function(comm, 1) on ranks 0 and 1 of one host, 2 of another

A word says where the ranks are: its letter r names rank r's host. Ranks whose ``GPUCOLL_HOST_ID``
differ are on different hosts for gpucoll, share no memory, and meet over TCP. All else is as in
`tests.ranks`, whose ranks these are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from gpucoll import config, init
from gpucoll.api.communicator import Communicator
from gpucoll.config import environment
from gpucoll.group.world import exchanges
from gpucoll.testing.pool import CALL_TIMEOUT_S, Answer
from gpucoll.transport.shared.words import Context
from tests.ranks import Pool, Pools, Seat

SECRET = "the secret of these tests, which is long enough"


@dataclass(frozen=True)
class Meeting:
    """How the ranks of one call meet."""

    placed: str
    """By rank, its host's letter."""
    meet: str
    timeout_s: float = 20.0
    """Default deadline of the communicator's waits."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the making of the communicator and the call, on every rank."""
    backend: str = "cpu"
    """What the communicator is asked for."""
    by_schedules: bool = False
    """Whether calls above 256 KiB are large, as they are at far larger sizes otherwise."""

    def limits(self) -> Any:
        """Return a context with the limits that decide how calls go between hosts."""
        if not self.by_schedules:
            return contextlib.nullcontext()
        return mock.patch.multiple(exchanges, MOST_BYTES=256 << 10, MOST_PAIRWISE_BYTES=0)

    def variables(self, rank: int) -> dict[str, str]:
        """Return what makes a rank one of its host."""
        return {
            config.HOST_ID: f"host {self.placed[rank]}",
            config.SECRET: SECRET,
            config.INTERFACES: "lo",
            **self.environment,
        }


@dataclass
class HostSeat:
    """A rank of a host without a communicator: it can make one."""

    rank: int
    world_size: int
    meeting: Meeting

    def init(self, timeout_s: float | None = None, *, meet_s: float = 20.0, **given: Any) -> Any:
        """Join the others; the deadline of later waits is shorter than that for meeting them."""
        place = {"rank": self.rank, "world_size": self.world_size, "meet": self.meeting.meet}
        made = init(**{**place, "timeout_s": meet_s, "backend": self.meeting.backend, **given})
        limit_s = self.meeting.timeout_s if timeout_s is None else timeout_s
        made._group.timeout_s = limit_s
        host: Any = getattr(made._group, "host", made._group)
        for context in (host.context, *host._beside):
            context[Context.timeout_ns] = int(1e9 * limit_s)
        return made


def _call(seat: Seat, meeting: Meeting, function: Any, args: Any, gives: str) -> Any:
    with environment(meeting.variables(seat.rank)), meeting.limits():
        mine = HostSeat(seat.rank, seat.world_size, meeting)
        if gives == "seat":
            return function(mine, *args)
        made: Communicator
        with mine.init() as made:
            return function(made, *args)


class PlayedHosts:
    """Calls functions on ranks that are placed on hosts.

    Parameters
    ----------
    pools : Pools
        The ranks.
    folder : Path
        Where they meet: each call by a file of its own.
    by_schedules : bool
        See `Meeting`.
    """

    def __init__(self, pools: Pools, folder: Path, *, by_schedules: bool = False) -> None:
        self._pools = pools
        self._folder = folder
        self._by_schedules = by_schedules
        self._numbers = itertools.count()

    def pool(self, placed: str) -> Pool:
        """Return the ranks that are kept for so many."""
        return self._pools.pool(len(placed))

    def start(
        self,
        pool: Pool,
        placed: str,
        function: Callable[..., Any],
        *args: Any,
        gives: str = "communicator",
        only: Sequence[int] | None = None,
        meet: str = "",
        **options: Any,
    ) -> None:
        """Have every rank (or `only` some) call ``function(who, *args)``; `collect` the replies.

        Parameters
        ----------
        gives : str
            ``"communicator"``: of all ranks, a fresh one; ``"seat"``: the rank's `HostSeat`.
        """
        meet = meet or f"file://{self._folder}/meeting{next(self._numbers)}"
        meeting = Meeting(placed, meet, by_schedules=self._by_schedules, **options)
        pool.start(_call, meeting, function, args, gives, gives="seat", only=only)

    def call(
        self,
        placed: str,
        function: Callable[..., Any],
        *args: Any,
        limit_s: float = CALL_TIMEOUT_S,
        **options: Any,
    ) -> list[Any]:
        """Call ``function(comm, *args)`` on every rank; return the results, or raise an error."""
        pool = self.pool(placed)
        self.start(pool, placed, function, *args, **options)
        return pool.results(limit_s)

    def replies(
        self, placed: str, function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Answer]:
        """The same, but return how it went on each rank."""
        pool = self.pool(placed)
        self.start(pool, placed, function, *args, **options)
        return pool.collect()
