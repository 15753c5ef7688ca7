"""What the driver has of a run: how each rank ended, and what follows from it for the caller."""

from __future__ import annotations

import time
from typing import Any

from gpucoll import DeadlineError
from gpucoll.integrations.engine.outcome import Outcome, revived

__all__ = ["Collection"]


class Collection:
    """The ends of a run's ranks, as they come in.

    Parameters
    ----------
    world_size : int
        How many there are.
    elastic : bool
        Whether a lost rank is no failure as long as another one returns.
    timeout_s : float or None
        How long the run may take, in seconds; None: any time.
    grace_s : float
        How long the other ranks have to end by themselves after the first failure.
    """

    def __init__(
        self, world_size: int, elastic: bool, timeout_s: float | None, grace_s: float
    ) -> None:
        self._world_size, self._elastic, self._grace_s = world_size, elastic, grace_s
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._grace_ends: float | None = None
        self._outcomes: dict[int, Outcome] = {}

    def add(self, outcome: Outcome) -> None:
        """Take how a rank ended."""
        self._outcomes[outcome.rank] = outcome
        if self._is_failure(outcome) and self._grace_ends is None:
            self._grace_ends = time.monotonic() + self._grace_s

    @property
    def missing(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self._world_size) if rank not in self._outcomes]

    @property
    def left_s(self) -> float | None:
        """How long to wait for `missing`, in seconds, at most; None: any time; 0: no longer."""
        if not self.missing:
            return 0.0
        ends = [end for end in (self._deadline, self._grace_ends) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def results(self, ended_how: str) -> list[Any]:
        """Return what each rank returned, or raise what the first one that failed did.

        Parameters
        ----------
        ended_how : str
            What became of the `missing` ranks: the rest of a sentence about them.
        """
        missing = self.missing
        if missing and self._grace_ends is None:
            raise DeadlineError(
                f"{_ranks(missing)} of {self._world_size} had not ended after "
                f"{self._timeout_s:g} s: {ended_how}"
            )
        self._raise_first(f"\n{_ranks(missing)} {ended_how}" if missing else "")
        return [
            outcome.error(self._world_size) if outcome.has_failed else outcome.result
            for outcome in (self._outcomes[rank] for rank in range(self._world_size))
        ]

    def _is_failure(self, outcome: Outcome) -> bool:
        return outcome.has_failed and not (self._elastic and outcome.is_lost)

    def _raise_first(self, further: str) -> None:
        """Raise the first failure that is a rank's own, or else the first."""
        came = list(self._outcomes.values())
        failures = [outcome for outcome in came if self._is_failure(outcome)]
        if not failures and all(outcome.has_failed for outcome in came):
            failures = came  # elastic, and nobody is left
        if not failures:
            return
        first = next((outcome for outcome in failures if not outcome.follows), failures[0])
        error = first.error(self._world_size)
        if further:
            error.args = (f"{error}{further}",)
        if (raised := revived(first)) is not None:
            raise raised from error
        raise error


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
