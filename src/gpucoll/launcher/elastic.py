"""An elastic job's rules: what is started again, after which pause, and when the job has failed.

A place is a number from 0 on, of the first process that was started there: a process that is
started again takes the place of one that failed, on the same CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["DEFAULT_RESTARTS", "Elastic", "Members"]

SOON_S = 5.0
"""A process that fails sooner after its start may be one of many that do."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
DEFAULT_RESTARTS = 10


class Elastic(NamedTuple):
    """The options of an elastic job."""

    least: int
    """The job has failed when fewer members are left, on all hosts together."""
    most: int
    """The number of places, on all hosts together."""
    restarts: int = DEFAULT_RESTARTS
    """How many processes are started again on this host; after that, places stay empty."""


class Members:
    """The members of an elastic job among the processes of this host, and what their ends mean.

    A first process is a member from its start. A process that was started again is a member from
    the moment at which it tells the launcher that it has joined the others.

    Parameters
    ----------
    elastic : Elastic
        The job's options.
    places : iterable of int
        The places of this host.
    """

    def __init__(self, elastic: Elastic, places: Iterable[int]) -> None:
        self.elastic = elastic
        self._here = set(places)
        self._elsewhere = elastic.most - len(self._here)
        """Members on other hosts, of whose ends this launcher does not learn."""
        self._started_s = dict.fromkeys(self._here, time.monotonic())
        self._failed_soon = dict.fromkeys(self._here, 0)
        """How many processes of a place have failed soon after their start, one after the other."""
        self._restarts = 0

    @property
    def any_here(self) -> bool:
        """Whether there are members on this host."""
        return bool(self._here)

    def join(self, place: int) -> None:
        """Count the process in a place as a member."""
        self._here.add(place)

    def leave(self, place: int) -> bool:
        """Count out the process of a place, which has ended; return whether it was a member."""
        was_member = place in self._here
        self._here.discard(place)
        return was_member

    def obstacle(self) -> str:
        """Return why a failure ends the job; empty: it goes on."""
        left = len(self._here) + self._elsewhere
        if left < self.elastic.least:
            return f"fewer than {self.elastic.least} members are left"
        if self.is_used_up and not self._here:
            return f"--restarts {self._restarts} is used up, and no member is left on this host"
        return ""

    @property
    def is_used_up(self) -> bool:
        """Whether no process is started again any more, so that places stay empty."""
        return self._restarts >= self.elastic.restarts

    def pause_s(self, place: int) -> float:
        """Count a start in this place, and return the pause before it, in seconds."""
        now = time.monotonic()
        is_soon = now - self._started_s[place] < SOON_S
        failures = self._failed_soon[place] = self._failed_soon[place] + 1 if is_soon else 0
        pause_s = (
            min(FIRST_PAUSE_S * 2.0 ** (failures - 2), LONGEST_PAUSE_S) if failures > 1 else 0.0
        )
        self._started_s[place] = now + pause_s
        self._restarts += 1
        return pause_s
