"""The driver's record of a run: how each rank ended, and the result or error for the caller."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from gpucoll import DeadlineError
from gpucoll.integrations.engine.outcome import Outcome, revived

if TYPE_CHECKING:
    from gpucoll.calls.given import AnyObject

__all__ = ["Collection"]


class Collection:
    """The outcomes of a run's ranks, collected as they arrive.

    Parameters
    ----------
    world_size : int
        The number of ranks.
    elastic : bool
        Whether a run succeeds although ranks are lost, as long as another rank returns.
    timeout_s : float or None
        How long the run may take, in seconds; None for no limit.
    grace_s : float
        How long the other ranks have, after the first failure, to end by themselves, in seconds.
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
        """Add the outcome of a rank."""
        self._outcomes[outcome.rank] = outcome
        if self._is_failure(outcome) and self._grace_ends is None:
            self._grace_ends = time.monotonic() + self._grace_s

    @property
    def missing(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in range(self._world_size) if rank not in self._outcomes]

    @property
    def left_s(self) -> float | None:
        """How many seconds to wait for `missing` at most; None for no limit, 0 if time is over."""
        if not self.missing:
            return 0.0
        ends = [end for end in (self._deadline, self._grace_ends) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def results(self, ended_how: str) -> list[AnyObject]:
        """Return what each rank returned, or raise the error of the first rank that failed.

        Parameters
        ----------
        ended_how : str
            What was done about the `missing` ranks: the rest of a sentence whose subject they are.
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
        """Raise the first failure that no other rank's end caused, or else the first failure."""
        came = list(self._outcomes.values())
        failures = [outcome for outcome in came if self._is_failure(outcome)]
        if not failures and all(outcome.has_failed for outcome in came):
            failures = came  # elastic, and no rank has returned
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
