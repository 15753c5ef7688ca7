"""Predictions, with their intervals, what dominates them, and how they were validated."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple

import numpy as np

from gpucoll.bench.predict.composition import SHARES, Case, Machine, Memory, all_reduce_s, way_of
from gpucoll.bench.predict.fitting import Observed
from gpucoll.bench.predict.simulation import Network, Times
from gpucoll.bench.predict.validation import (
    Level,
    Validation,
    grown,
    held_out_ranks,
    held_out_sizes,
    interval,
    level_of,
)

__all__ = ["Known", "Predicted", "learn", "predict"]

ASSUMED_LINK: Final = (25e-6, 10e9 / 8)
"""Latency in seconds and bytes per second of a network that was neither measured nor given."""
_STEP: Final = 1e-6


@dataclass(frozen=True)
class Known:
    """What is known of the hosts and their network, and how.

    Attributes
    ----------
    machine : Machine
        Arrays: the estimate first, then each draw.
    network, memory : Level or None
        The fits; None: given or assumed, or not needed.
    sizes, ranks : Validation
        How held-out sizes and ranks were predicted, on the level that was measured.
    most_ranks : int
        The most ranks that were measured.
    source : str
        Where the network's parameters come from: "measured", "given" or "assumed".
    """

    machine: Machine
    network: Level | None
    memory: Level | None
    sizes: Validation
    ranks: Validation
    most_ranks: int
    source: str


def learn(seen: Sequence[Observed], link: tuple[float, float] | None = None) -> Known:
    """Fit all that was measured.

    Parameters
    ----------
    seen : sequence of Observed
        Cases on one host, on several hosts, or both.
    link : (float, float), optional
        Latency in seconds and bytes per second of the network between hosts; it goes before what
        was measured.
    """
    here = [one for one in seen if one.case.hosts == 1]
    between = [one for one in seen if one.case.hosts > 1] if link is None else []
    memory = level_of(here) if here else None
    shared = None if memory is None else memory.machine.memory
    estimate = None if shared is None else _first(shared)
    network = level_of(between, estimate) if between else None
    if network is None:
        latency, rate = link or ASSUMED_LINK
        machine = Machine(Network(latency, 1 / rate), shared or Memory())
    else:
        machine = replace(network.machine, memory=shared or Memory())
    validated = between or here
    return Known(
        machine,
        network,
        memory,
        held_out_sizes(validated, estimate if between else None),
        held_out_ranks(validated, estimate if between else None),
        max((one.case.ranks for one in seen), default=1),
        "given" if link else "measured" if between else "assumed",
    )


def _first(memory: Memory) -> Memory:
    """Return the estimate of a fitted memory."""
    values = {field.name: np.ravel(getattr(memory, field.name))[0] for field in fields(memory)}
    return replace(memory, **values)


class Predicted(NamedTuple):
    """A predicted time.

    Attributes
    ----------
    time_s, low_s, high_s : float
        The time in seconds, and its 95 % interval.
    shares : dict of str to float
        Which fraction of it is due to what; together 1.
    way : str
        The schedule of the call.
    """

    case: Case
    time_s: float
    low_s: float
    high_s: float
    shares: dict[str, float]
    way: str

    @property
    def dominated_by(self) -> str:
        """The largest share."""
        return max(self.shares, key=self.shares.__getitem__)


def predict(case: Case, known: Known) -> Predicted:
    """Predict an all_reduce.

    A time is proportional to all parameters together: so the sum over the parameters of their value
    times the slope is the time (Euler), and each term is a parameter's share.
    """
    network, memory = known.machine.network, known.machine.memory
    count = max(np.size(network.latency_s), np.size(memory.latency_s))
    machine = _more_columns(known.machine, count)
    times = np.broadcast_to(all_reduce_s(case, machine), (count + len(SHARES),))
    estimate = float(times[0])
    shares = {
        name: max((float(times[count + place]) / estimate - 1) / _STEP, 0.0) if estimate else 0.0
        for place, name in enumerate(SHARES)
    }
    inside = shares["shared memory"]
    spreads = [(known.memory, inside), (known.network, 1 - inside)]
    parts = [level.spread * share for level, share in spreads if level is not None]
    spread = grown(math.hypot(*parts), case.ranks, known.most_ranks)
    low, high = interval(times[:count], spread)
    way = way_of(case).name if case.hosts > 1 else "shared memory"
    return Predicted(case, estimate, low, high, shares, way)


def _more_columns(machine: Machine, count: int) -> Machine:
    """Return a machine with a further column for each share, in which its parameters are larger."""

    def column(path: str) -> Times:
        values = np.ravel(np.asarray(operator.attrgetter(path)(machine), np.float64))
        values = np.resize(values, count) if len(values) == 1 else values
        factors = [1 + _STEP * (path in paths) for paths in SHARES.values()]
        return np.concatenate((values, values[0] * np.array(factors)))

    levels: dict[str, dict[str, Any]] = {"network": {}, "memory": {}}
    for path in (path for paths in SHARES.values() for path in paths):
        level, _, name = path.partition(".")
        if name:
            levels[level][name] = column(path)
    return Machine(
        replace(machine.network, **levels["network"]),
        replace(machine.memory, **levels["memory"]),
        column("large_s"),
    )
