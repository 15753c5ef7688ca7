"""How far predictions are from what was measured but kept from the fit.

Held-out sizes: every second size is predicted by a fit to the others, and the other way round.
Held-out ranks: the cases of few ranks are fitted, and those of more ranks predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from gpucoll.bench.predict.composition import Case, Machine, Memory, all_reduce_s
from gpucoll.bench.predict.fitting import (
    DRAWS,
    Fit,
    Observed,
    fit_memory,
    fit_network,
    network_of,
    wider,
)
from gpucoll.bench.predict.simulation import Network, Times
from gpucoll.errors import ArgumentError

__all__ = [
    "FITTED_RANKS",
    "Level",
    "Validation",
    "grown",
    "held_out_ranks",
    "held_out_sizes",
    "interval",
]

FITTED_RANKS: Final = 4
"""Cases of up to so many ranks are fitted when those of more ranks are held out."""
_LEAST_SIZES: Final = 4
_PERCENT: Final = (2.5, 97.5)


@dataclass(frozen=True)
class Level:
    """A fit of one level, and the machine with its draws.

    Parameters
    ----------
    fit : Fit
        The parameters.
    machine : Machine
        Arrays: the estimate first, then each draw.
    spread : float
        The standard deviation of the logarithm of the predictions' errors, as cross-validation
        finds it in the fitted cases.
    """

    fit: Fit
    machine: Machine
    spread: float = 0.0


@dataclass
class Validation:
    """Predictions of cases that were held out.

    Attributes
    ----------
    errors, scaled : list of float
        Logarithms of predicted over measured times; `scaled` are those of the nearest fitted case,
        scaled by its bus bandwidth.
    covered : list of bool
        Whether the measured time is in the interval of 95 %.
    """

    errors: list[float] = field(default_factory=list)
    scaled: list[float] = field(default_factory=list)
    covered: list[bool] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The geometric mean of the errors' factors, minus 1."""
        return mean_error(self.errors)

    @property
    def scaled_error(self) -> float:
        """The same for the scaled measurement."""
        return mean_error(self.scaled)

    @property
    def coverage(self) -> float:
        """The fraction of the cases that the intervals cover."""
        return sum(self.covered) / len(self.covered) if self.covered else math.nan


def mean_error(errors: Sequence[float]) -> float:
    """Return the geometric mean of the factors of some errors, minus 1."""
    return math.expm1(float(np.mean(np.abs(errors)))) if errors else math.nan


def fitted(seen: Sequence[Observed], memory: Memory | None = None, draws: int = DRAWS) -> Level:
    """Fit the level that the cases measure: the shared memory of one host, or the network."""
    if seen[0].case.hosts == 1:
        fit, found = fit_memory(seen, draws)
        return Level(fit, Machine(Network(0.0, 0.0), found))
    fit = fit_network(seen, memory, draws)
    network, large = network_of(fit.values.T)
    return Level(fit, Machine(network, memory or Memory(), large))


def level_of(seen: Sequence[Observed], memory: Memory | None = None) -> Level:
    """Return `fitted`, with the spread of errors that cross-validation finds.

    If cases of several numbers of ranks were measured, each number is predicted from the others;
    otherwise every second size is predicted.
    """
    counts = sorted({one.case.ranks for one in seen})
    errors: list[float] = []
    if len(counts) > 1:
        for count in counts:
            rest = [one for one in seen if one.case.ranks != count]
            errors += errors_of(fitted(rest, memory, 0), [o for o in seen if o.case.ranks == count])
    else:
        for own, others in halves(seen):
            errors += errors_of(fitted(own, memory, 0), others)
    level = fitted(seen, memory)
    spread = math.sqrt(float(np.mean(np.square(errors)))) * wider(len(errors)) if errors else 0.0
    return Level(level.fit, level.machine, spread)


def halves(seen: Sequence[Observed]) -> list[tuple[list[Observed], list[Observed]]]:
    """Return every second size and the others, and the other way round; none of few sizes."""
    sizes = sorted({one.case.size_bytes for one in seen})
    if len(sizes) < _LEAST_SIZES:
        return []
    even = [one for one in seen if sizes.index(one.case.size_bytes) % 2 == 0]
    odd = [one for one in seen if sizes.index(one.case.size_bytes) % 2]
    return [(even, odd), (odd, even)]


def errors_of(level: Level, cases: Sequence[Observed]) -> list[float]:
    """Return the logarithms of predicted over measured times."""
    times = [np.ravel(all_reduce_s(one.case, level.machine))[0] for one in cases]
    return [math.log(time / one.time_s) for time, one in zip(times, cases, strict=True)]


def grown(spread: float, ranks: int, most_ranks: int) -> float:
    """Return the spread for more ranks than were measured: once more with each doubling.

    Cross-validation compares neighbouring numbers of ranks; what the model lacks grows with the
    distance.
    """
    return spread * (1 + max(math.log2(ranks / most_ranks), 0.0))


def interval(times: Times, spread: float) -> tuple[float, float]:
    """Return the 95 % interval of a predicted time, by its draws and the errors of predictions."""
    draws = np.log(np.ravel(times)[1:])
    errors = np.random.default_rng(len(draws)).normal(0.0, spread, len(draws))
    low, high = np.exp(np.percentile(draws + errors, _PERCENT)) if len(draws) else (times[0],) * 2
    estimate = float(np.ravel(times)[0])
    return min(float(low), estimate), max(float(high), estimate)


def held_out_sizes(seen: Sequence[Observed], memory: Memory | None = None) -> Validation:
    """Predict every second size from the others, and the other way round."""
    found = Validation()
    for own, others in halves(seen):
        _compare(found, own, others, memory)
    return found


def held_out_ranks(seen: Sequence[Observed], memory: Memory | None = None) -> Validation:
    """Predict the cases of more than `FITTED_RANKS` ranks from those of up to so many."""
    own = [one for one in seen if one.case.ranks <= FITTED_RANKS]
    others = [one for one in seen if one.case.ranks > FITTED_RANKS]
    found = Validation()
    if len({one.case.size_bytes for one in own}) > 1 and others:
        _compare(found, own, others, memory)
    return found


def _compare(
    found: Validation, own: Sequence[Observed], others: Sequence[Observed], memory: Memory | None
) -> None:
    level, most_ranks = level_of(own, memory), max(one.case.ranks for one in own)
    for one in others:
        times = np.atleast_1d(all_reduce_s(one.case, level.machine))
        low, high = interval(times, grown(level.spread, one.case.ranks, most_ranks))
        found.cases.append(one.case)
        found.errors.append(math.log(float(times[0]) / one.time_s))
        found.scaled.append(math.log(scaled_s(own, one.case) / one.time_s))
        found.covered.append(low <= one.time_s <= high)


def scaled_s(seen: Sequence[Observed], case: Case) -> float:
    """Return the time of the nearest measured case, scaled by its bus bandwidth.

    The nearest has the next lower size, or else the lowest, and the most ranks.
    """
    if not seen:
        raise ArgumentError("nothing was measured that could be scaled")
    lower = [one for one in seen if one.case.size_bytes <= case.size_bytes]
    size = max((one.case.size_bytes for one in lower), default=min(o.case.size_bytes for o in seen))
    near = max((o for o in seen if o.case.size_bytes == size), key=lambda one: one.case.ranks)
    return near.time_s * _bus_bytes(case) / _bus_bytes(near.case)


def _bus_bytes(case: Case) -> float:
    return case.size_bytes * 2 * (case.ranks - 1) / case.ranks
