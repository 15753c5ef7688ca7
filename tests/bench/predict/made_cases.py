"""Cases with known times, as if they had been measured."""

from __future__ import annotations

import numpy as np
from tests.bench import kept_results

from gpucoll.bench.predict.composition import Case, Machine, Memory, all_reduce_s
from gpucoll.bench.predict.fitting import Observed, network_of
from gpucoll.bench.results import Measurement, Row

MESSAGE_S, BYTE_S, LARGE_S = 36e-6, 8e-9, 5e-4
TRUE_NETWORK = (MESSAGE_S, 2e-6, BYTE_S, LARGE_S)
MEMORY = Memory(4e-7, 7e-11, 5e-11, 2e-10, 64 << 10, 8 << 20, 2)
SIZES = tuple(4**step for step in range(1, 12))


def machine(memory=None):
    network, large = network_of(TRUE_NETWORK)
    return Machine(network, memory or Memory(), large)


def between_hosts(ranks=(2, 3, 4), sizes=SIZES, noise=0.0, seed=0, rounds=9):
    return [
        observed(Case(size, count, count), noise, seed, rounds) for count in ranks for size in sizes
    ]


def on_one_host(ranks=(2,), sizes=SIZES, noise=0.0, seed=0, rounds=9):
    return [
        observed(Case(size, count, 1), noise, seed, rounds) for count in ranks for size in sizes
    ]


def observed(case, noise, seed, rounds):
    """Return a case in which all ranks have the time of the model, and noise that they share."""
    time_us = float(all_reduce_s(case, machine(MEMORY if case.hosts == 1 else None))) * 1e6
    factors = np.exp(np.random.default_rng((seed, *case)).normal(0.0, noise, rounds))
    return Observed(case, np.tile(time_us * factors, (2, 1)))


def as_result(cases):
    """Return the content of a result of gpucoll-bench."""
    rows = []
    for one in cases:
        size_bytes, ranks = one.case.size_bytes, one.case.ranks
        where = ("gpucoll", "private", "all_reduce", ranks, size_bytes, size_bytes // 4)
        measured = Measurement(one.samples_us, 1, 0, one.path)
        row = Row(*where, "float32", "sum", -1, measured, None).as_json()
        rows.append({**row, "hosts": one.case.hosts})
    return {"results": rows, "limit": [], "environment": kept_results.environment()}
