"""Changes between two runs: their intervals, and which of hundreds are real.

Rounds of two runs are not paired, so each run is resampled alone. Rounds do not show how much two
runs of an unchanged program differ: memory lies elsewhere, the machine is in another state. Times
that gpucoll's code has no part in (those of peers and limits: controls) show it, if both runs have
them. See `docs/decisions/0105-two-runs.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.bench.estimates import RESAMPLES, Ratio, Samples, resampled_times, time_us

__all__ = ["Change", "Pair", "Run", "changes", "spread"]

ERROR_RATE = 0.05
"""How often a comparison of equal runs finds a change, and the share of false ones among many."""
LEAST_CONTROLS = 8
"""Number of controls from which their spread is known."""
RESOLUTION = 1e-3
"""Relative differences of times below this are rounding; it keeps spreads above 0."""
TO_DEVIATION = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""

Logs = npt.NDArray[np.float64]


class Run(NamedTuple):
    """The samples of a call in one run, and those of what it is divided by."""

    own: Samples
    references: tuple[Samples, ...] = ()
    """Several: the best of them."""

    @property
    def time_us(self) -> float:
        """The time of a call, or its ratio to the best reference."""
        return time_us(self.own) / min(map(time_us, self.references), default=1.0)

    def rounds(self) -> Logs:
        """Return the logarithm of each round's time: the slowest rank's, over the reference's."""
        found: Logs = np.log(self.own.max(axis=0))
        if self.references:
            found = found - np.log(min(self.references, key=time_us).max(axis=0))
        return found

    def resampled(self, generator: np.random.Generator) -> Logs:
        """Return the logarithms of `time_us` of resampled rounds."""
        rounds = self.own.shape[1]
        drawn = generator.integers(rounds, size=(RESAMPLES, rounds))
        found: Logs = np.log(resampled_times(self.own, drawn))
        if self.references:
            others = [resampled_times(one, drawn) for one in self.references]
            found = found - np.log(np.min(others, axis=0))
        return found


@dataclass(frozen=True)
class Pair:
    """A call in two runs."""

    base: Run
    new: Run

    @property
    def log_ratio(self) -> float:
        """The logarithm of new over base."""
        return float(np.log(self.new.time_us / self.base.time_us))

    def resampled(self, generator: np.random.Generator) -> Logs:
        """Return resampled values of `log_ratio`."""
        return self.new.resampled(generator) - self.base.resampled(generator)


class Change(NamedTuple):
    """New over base of one call, and whether it is slower (1), faster (-1) or neither (0)."""

    ratio: Ratio
    p_value: float
    """How likely equal runs are to differ by as much in this direction."""
    verdict: int


def changes(
    pairs: Sequence[Pair], controls: Sequence[Pair] = (), threshold: float = 0.0
) -> list[Change]:
    """Return the change of each call.

    A call is slower if two conditions hold: its whole 95 % interval is above 1 + `threshold`, and
    it is among those that the procedure of Benjamini and Hochberg finds in permutations. With equal
    runs, these find anything in at most 5 % of comparisons, however many calls are compared. If
    some calls really changed, at most 5 % of those found are expected to be equal. The same for
    faster. It costs 400 resamples and as many permutations of the rounds of each call.
    """
    generator = np.random.default_rng(0)  # the same files always give the same answer
    between = spread(controls) or 0.0

    def shifts() -> Logs:
        """Return differences between runs. They are not normal, since `between` is an estimate."""
        return between * generator.standard_t(max(1, len(controls) // 3), size=RESAMPLES)

    observed, permuted = [], []
    for pair in pairs:
        base, new = pair.base.rounds(), pair.new.rounds()
        observed.append(statistic(base[None], new[None], between)[0])
        every = np.tile(np.concatenate([base, new]), (RESAMPLES, 1))
        mixed = generator.permuted(every, axis=1)
        first, second = mixed[:, : len(base)], mixed[:, len(base) :]
        permuted.append(statistic(first, second + shifts()[:, None], between))
    slower = p_values(np.array(observed), np.ravel(permuted))
    faster = p_values(-np.array(observed), -np.ravel(permuted))
    found = []
    for pair, up, down, is_up, is_down in zip(
        pairs, slower, faster, discoveries(slower), discoveries(faster), strict=True
    ):
        drawn = pair.resampled(generator) + shifts()
        low, high = np.exp(np.percentile(drawn, (2.5, 97.5)))
        ratio = Ratio(float(np.exp(pair.log_ratio)), float(low), float(high))
        verdict = int(is_up and low > 1 + threshold) - int(is_down and high < 1 / (1 + threshold))
        found.append(Change(ratio, float(min(up, down)), verdict))
    return found


def spread(controls: Sequence[Pair]) -> float | None:
    """Return the standard deviation of log ratios between the runs, beyond that between rounds.

    It is around 0, so it includes what all controls have in common. A median over the controls is
    robust against single ones that changed. None if there are fewer than 8.
    """
    if len(controls) < LEAST_CONTROLS:
        return None
    generator = np.random.default_rng(1)
    drawn = np.array([one.resampled(generator) for one in controls])
    # both by the same robust estimate: rounds with outliers would hide the rest in a variance
    within = np.median(np.abs(drawn - np.median(drawn, axis=1, keepdims=True)))
    total = np.median([abs(one.log_ratio) for one in controls])
    between = np.sqrt(max(0.0, total**2 - within**2))
    return float(TO_DEVIATION * between)


def statistic(base: Logs, new: Logs, between: float) -> Logs:
    """Return Welch's statistic of each row, with the spread between runs in the denominator."""
    variance: Any = between**2 + RESOLUTION**2
    for one in (base, new):
        rounds = one.shape[1]
        variance = variance + (np.var(one, axis=1, ddof=1) / rounds if rounds > 1 else np.inf)
    found: Logs = (new.mean(axis=1) - base.mean(axis=1)) / np.sqrt(variance)
    return found


def p_values(observed: Logs, permuted: Logs) -> Logs:
    """Return the share of the permuted statistics, of all calls together, at or above each."""
    ordered = np.sort(permuted)
    above = len(ordered) - np.searchsorted(ordered, observed - 1e-9)
    found: Logs = np.divide(1.0 + above, 1.0 + len(ordered), dtype=np.float64)
    return found


def discoveries(values: Logs) -> npt.NDArray[np.bool_]:
    """Return which p-values the procedure of Benjamini and Hochberg rejects at 5 %."""
    order = np.argsort(values)
    allowed = ERROR_RATE * np.arange(1, len(values) + 1) / max(1, len(values))
    below = np.flatnonzero(values[order] <= allowed)
    found = np.zeros(len(values), dtype=bool)
    if len(below):
        found[order[: below[-1] + 1]] = True
    return found
