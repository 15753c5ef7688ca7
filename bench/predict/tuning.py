"""Which limits between the schedules of an all_reduce would be better, by the simulation.

gpucoll's limits (`gpucoll.algorithms.choice.RULES`) are the same on all ranks because they are a
part of the program. No file changes them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from gpucoll.algorithms.table import named
from gpucoll.bench.predict.composition import Case, Machine, schedule_s, way_of
from gpucoll.collectives import Collective
from gpucoll.transport.tcp.exchange_words import Route

__all__ = ["best_limits", "gain", "lines"]

SCHEDULES: Final = ("recursive_doubling", "halving_doubling", "ring")
"""From those for small arrays to those for large ones."""
SIZES: Final = tuple(256 << step for step in range(19))
"""Limits are found with every second size, and tried with the others."""
_LEAST_GAIN: Final = 0.05
"""Less is not more than the simulation's own error."""

Times = Mapping[int, Mapping[str, float]]
"""By size in bytes and by schedule: seconds."""


def best_limits(times: Times) -> tuple[float, float]:
    """Return the largest sizes for the first and for the second schedule that take least time."""
    limits = [
        (first, last) for first, last in itertools.product((0, *times), repeat=2) if first <= last
    ]
    return min(
        limits, key=lambda limit: sum(math.log(_taken(times, size, limit)) for size in times)
    )


def _taken(times: Times, size: int, limits: tuple[float, float]) -> float:
    return times[size][SCHEDULES[sum(size > limit for limit in limits)]]


def gain(times: Times, now: Mapping[int, str], limits: tuple[float, float]) -> float:
    """Return the geometric mean of the time now over the time with other limits, minus 1."""
    ratios = [math.log(times[size][now[size]] / _taken(times, size, limits)) for size in times]
    return math.expm1(float(np.mean(ratios))) if ratios else 0.0


def lines(machine: Machine, cases: Sequence[Case]) -> Iterator[str]:
    """Yield a line for each number of hosts: better limits, or that there are none."""
    yield "#"
    yield "# limits of the schedules, by the simulation; nothing is written"
    for ranks, hosts in dict.fromkeys((case.ranks, case.hosts) for case in cases):
        yield f"# {ranks} ranks on {hosts} hosts: {_advice(machine, ranks, hosts)}"


def _advice(machine: Machine, ranks: int, hosts: int) -> str:
    large = [Case(size, ranks, hosts) for size in SIZES] if hosts > 1 else []
    large = [case for case in large if way_of(case).route == Route.LARGE]
    if len(large) < 4:
        return "none: calls of these sizes need no schedule"
    now = {case.size_bytes: way_of(case).name for case in large}
    times = {
        case.size_bytes: {
            name: float(np.ravel(schedule_s(case, named(Collective.ALL_REDUCE, name), machine))[0])
            for name in SCHEDULES
        }
        for case in large
    }
    fitted = {size: times[size] for size in list(times)[::2]}
    held_out = {size: times[size] for size in list(times)[1::2]}
    limits = best_limits(fitted)
    gained = gain(held_out, now, limits)
    if gained < _LEAST_GAIN:
        return f"none: the best others would gain {gained:.1%} on held-out sizes"
    first, last = (f"{int(limit)} B" for limit in limits)
    return (
        f"{SCHEDULES[0]} to {first}, {SCHEDULES[1]} to {last}, then {SCHEDULES[2]}: predicted to "
        f"gain {gained:.0%} on held-out sizes; measure it before you change `RULES`"
    )
