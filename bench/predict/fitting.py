"""Fit the parameters of the network and of the shared memory to measured all_reduces.

The logarithms of measured and simulated times are compared, so that each size counts as much as
another. Huber's weights keep single bad measurements from deciding. The rounds of the run are drawn
again with replacement and fitted again, which shows how certain the parameters are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpucoll.bench.estimates import Samples, resampled_times
from gpucoll.bench.predict.composition import Case, Machine, Memory, all_reduce_s
from gpucoll.bench.predict.simulation import Network, Times
from gpucoll.errors import ArgumentError

__all__ = ["Fit", "Observed", "fit_memory", "fit_network", "wider"]

Parameters = npt.NDArray[np.float64]
"""Logarithms, one row for each draw."""
Model = Callable[[Parameters], Times]
"""Returns the logarithm of the time of each case, as a column for each row of parameters."""

DRAWS: Final = 200
_HUBER: Final = 1.345
"""Residuals beyond so many standard deviations count less: 95 % as good as least squares if all
errors are normal (Huber 1964)."""
_LEAST_SPREAD: Final = 0.01
"""Errors below one percent are never outliers."""
_MOST_NOISE: Final = 0.05
"""Larger errors than this, far from the solution, give no more weight to the first guess."""
_GUESS_SPREAD: Final = 1.0
"""The standard deviation of the logarithm of a first guess. It decides what no measurement tells,
and how uncertain that is."""
_KNOWN: Final = 0.25
"""A parameter is known if the standard deviation of its logarithm is less."""
_STEP, _CLOSE = 1e-5, 1e-4
_MOST_STEPS, _MOST_AGAIN = 30, 4
"""Each draw begins at the estimate, and needs few steps from there."""


class Observed(NamedTuple):
    """A measured case.

    Attributes
    ----------
    samples_us : ndarray
        Microseconds per call, by rank and round.
    path : str
        The path through shared memory, if known.
    """

    case: Case
    samples_us: Samples
    path: str = ""

    @property
    def time_s(self) -> float:
        """The slowest rank's median."""
        return float(np.median(self.samples_us, axis=1).max()) * 1e-6


@dataclass(frozen=True)
class Fit:
    """Fitted parameters: their names, and their values, the estimate first and then each draw."""

    names: tuple[str, ...]
    values: npt.NDArray[np.float64]
    is_measured: tuple[bool, ...]
    """Whether the measurements determine the parameter; otherwise it is near the first guess."""

    def value(self, name: str) -> float:
        """Return the estimate of a parameter."""
        return float(self.values[0, self.names.index(name)])

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 95 % interval of a parameter."""
        low, high = np.percentile(self.values[1:, self.names.index(name)], (2.5, 97.5))
        return float(low), float(high)

    def column(self, name: str) -> Times:
        """Return the values of a parameter, the estimate first."""
        return self.values[:, self.names.index(name)]


def wider(count: int) -> float:
    """Return by how much an interval of `count` values is wider than that of a normal distribution.

    It is the 97.5 % quantile of Student's distribution over that of the normal one, by its series
    (Abramowitz, Stegun 26.7.5), and the standard deviation's correction for few values.
    """
    if count < 2:
        return math.inf
    z, free = 1.959964, count - 1
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return student / z * math.sqrt(count / free)


def _fitted(
    model: Model, wanted: Times, start: Parameters, guess: Parameters, most_steps: int = _MOST_STEPS
) -> Parameters:
    """Return the parameters with the least weighted squares, for each column of `wanted`."""
    found, count = start.copy(), start.shape[1]
    for _ in range(most_steps):
        moved = [found, *(found + _STEP * (np.arange(count) == one) for one in range(count))]
        times = model(np.concatenate(moved)).reshape(len(wanted), count + 1, len(found))
        errors = (wanted - times[:, 0]).T  # by draw and case
        slopes = ((times[:, 1:] - times[:, :1]) / _STEP).transpose(2, 0, 1)
        spread = np.maximum(1.4826 * np.median(np.abs(errors), axis=1), _LEAST_SPREAD)
        large = np.maximum(np.abs(errors) / (_HUBER * spread[:, None]), 1.0)
        weighted = slopes / large[:, :, None]
        prior = np.square(np.minimum(spread, _MOST_NOISE) / _GUESS_SPREAD)[:, None]
        square = weighted.transpose(0, 2, 1) @ slopes + prior[:, :, None] * np.eye(count)
        down = (weighted.transpose(0, 2, 1) @ errors[:, :, None])[:, :, 0]
        change = np.linalg.solve(square, (down + prior * (guess - found))[:, :, None])[:, :, 0]
        found = found + np.clip(change, -1.0, 1.0)
        if np.abs(change).max() < _CLOSE:
            break
    return found


def _fit(
    names: Sequence[str], model: Model, seen: Sequence[Observed], guess: Sequence[float], draws: int
) -> Fit:
    """Return the fit of a model to what was measured."""
    times = np.log([[one.time_s for one in seen]]).T
    first = np.log([guess])
    best = _fitted(model, times, first, first)
    known = tuple(map(bool, _uncertainty(model, times, best) < _KNOWN))
    if draws == 0:
        return Fit(tuple(names), np.exp(best), known)
    random = np.random.default_rng(len(seen))
    drawn = np.log([_drawn(one, random, draws) for one in seen])
    guesses = first + random.normal(0.0, _GUESS_SPREAD, (draws, len(names)))
    again = _fitted(model, drawn, np.tile(best, (draws, 1)), guesses, _MOST_AGAIN)
    rounds = min(one.samples_us.shape[1] for one in seen)
    again = best + (again - best) * min(wider(rounds), 10.0)
    return Fit(tuple(names), np.exp(np.concatenate((best, again))), known)


def _uncertainty(model: Model, times: Times, best: Parameters) -> Times:
    """Return the standard deviation of the logarithm of each parameter, by the slopes there."""
    here, count = model(best), best.shape[1]
    slopes = [model(best + _STEP * (np.arange(count) == one)) - here for one in range(count)]
    jacobian = np.concatenate(slopes, axis=1) / _STEP
    spread = max(1.4826 * float(np.median(np.abs(times - here))), _LEAST_SPREAD)
    square = jacobian.T @ jacobian / spread**2 + np.eye(count) / _GUESS_SPREAD**2
    return np.sqrt(np.diag(np.linalg.inv(square)))


def _drawn(one: Observed, random: np.random.Generator, draws: int) -> Times:
    """Return the time of a case in each draw of its rounds."""
    rounds = one.samples_us.shape[1]
    return resampled_times(one.samples_us, random.integers(rounds, size=(draws, rounds))) * 1e-6


# --- the network ----------------------------------------------------------------------------------

NETWORK: Final = ("message_s", "overhead_s", "seconds_per_byte", "large_s")
"""``message_s`` is a small message from program to program: the latency and the overhead of both
ends. Measurements determine it well, and the overhead alone hardly ever."""
_FIRST_NETWORK: Final = (50e-6, 2e-6, 1e-9, 5e-4)


def network_of(values: Any) -> tuple[Network, Times]:
    """Return the network, and what large calls cost in addition, by parameters in their order.

    A rank that is busy with each message for its overhead sends no two of them in less: the gap is
    the overhead.
    """
    message, overhead, per_byte, large = values
    overhead = np.minimum(overhead, message / 2)
    return Network(message - 2 * overhead, per_byte, overhead, overhead), large


def fit_network(seen: Sequence[Observed], memory: Memory | None = None, draws: int = DRAWS) -> Fit:
    """Fit the network to cases on several hosts.

    Parameters
    ----------
    seen : sequence of Observed
        Cases of at least two sizes.
    memory : Memory, optional
        The shared memory inside the hosts, if these have several ranks.
    draws : int
        How often the rounds are drawn again; 0 gives the estimate alone.
    """
    _check(seen)

    def model(parameters: Parameters) -> Times:
        network, large = network_of(np.exp(parameters.T))
        machine = Machine(network, memory or Memory(), large)
        return np.log(
            [np.broadcast_to(all_reduce_s(one.case, machine), len(parameters)) for one in seen]
        )

    return _fit(NETWORK, model, seen, _FIRST_NETWORK, draws)


# --- the shared memory ----------------------------------------------------------------------------

MEMORY: Final = ("latency_s", "slot_s_per_byte", "stage_s_per_byte", "memory_s_per_byte")
_FIRST_MEMORY: Final = (1e-6, 1e-10, 1e-10, 2e-10)


def fit_memory(seen: Sequence[Observed], draws: int = DRAWS) -> tuple[Fit, Memory]:
    """Fit the shared memory to cases on one host; return the fit, and the memory with its draws.

    The size from which the arrays do not fit into the caches is the one with the least errors.
    """
    _check(seen)
    ranks = min(one.case.ranks for one in seen)
    first = Memory(ranks=ranks, slot_bytes=_slot_bytes(seen, ranks))
    totals = sorted({one.case.size_bytes * one.case.ranks for one in seen})
    edges = [math.sqrt(one * other) for one, other in itertools.pairwise(totals)]
    candidates = [math.inf, *(edge for edge in edges if edge > 2 * first.slot_bytes)]
    times = np.log([[one.time_s for one in seen]]).T
    errors: dict[float, float] = {}
    for edge in candidates:
        model = _memory_model(seen, replace(first, cached_bytes=edge))
        best = _fitted(model, times, np.log([_FIRST_MEMORY]), np.log([_FIRST_MEMORY]))
        errors[edge] = float(np.abs(times - model(best)).sum())
    memory = replace(first, cached_bytes=min(errors, key=errors.__getitem__))
    fit = _fit(MEMORY, _memory_model(seen, memory), seen, _FIRST_MEMORY, draws)
    columns: dict[str, Any] = {name: fit.column(name) for name in MEMORY}
    return fit, replace(memory, **columns)


def _slot_bytes(seen: Sequence[Observed], ranks: int) -> int:
    """Return the largest array that goes through slots: gpucoll's table, unless paths refute it."""
    one_shot = [one.case.size_bytes for one in seen if one.path == "one-shot"]
    staged = [one.case.size_bytes for one in seen if one.path == "staged"]
    most = (64 if ranks == 2 else 32) << 10
    return max(min(most, min(staged, default=most + 1) - 1), max(one_shot, default=0))


def _memory_model(seen: Sequence[Observed], memory: Memory) -> Model:
    def model(parameters: Parameters) -> Times:
        values: dict[str, Any] = dict(zip(MEMORY, np.exp(parameters.T), strict=True))
        here = replace(memory, **values)
        return np.log([here.all_reduce_s(one.case.size_bytes, one.case.ranks) for one in seen])

    return model


def _check(seen: Sequence[Observed]) -> None:
    sizes = {one.case.size_bytes for one in seen}
    if len(sizes) < 2:
        raise ArgumentError(
            f"a fit needs all_reduces of at least 2 sizes; got {len(sizes)}: measure from -b 4 to "
            "-e 64M"
        )
