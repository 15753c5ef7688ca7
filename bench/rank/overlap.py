"""A call that overlaps with work of its caller, and each of the two alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from gpucoll.bench.rank.library import Call, Loop
from gpucoll.bench.rank.loops import described, repeated, timed

__all__ = ["overlap"]

ELEMENTS = 2048
"""Size of the arrays for the work: they stay in the nearest cache, whatever other CPUs do."""
PASSES = 200
TRIALS = 7


def overlap(call: Call, start: partial[Any], then: str, blocking: partial[Any]) -> Loop:
    """Return the loop of the part of the pattern that the call's variant names.

    Parameters
    ----------
    start, then
        The function that starts the call, and code applied to its result, such as ``.wait()``.
    blocking
        The same call without any work.
    """
    if call.variant == "blocking":
        return repeated(blocking)
    sleeping = call.collective == "overlap_sleep"
    work = partial(time.sleep, call.work_s) if sleeping else numpy_work(call.work_s)
    if call.variant == "work":
        return timed("work()", work=work)
    statement, names = described(start)
    return timed(f"pending = {statement}\nwork()\npending{then}", work=work, **names)


def numpy_work(seconds: float) -> Callable[[], None]:
    """Return a function that keeps NumPy computing for `seconds` on one CPU, by calibration."""
    values, roots = np.linspace(1.0, 2.0, ELEMENTS), np.empty(ELEMENTS)

    def compute(passes: int) -> None:
        root = np.sqrt
        for _ in range(passes):
            root(values, roots)

    trials = []
    for _ in range(TRIALS):
        begun = time.perf_counter()
        compute(PASSES)
        trials.append(time.perf_counter() - begun)
    return partial(compute, max(1, round(seconds / min(trials) * PASSES)))
