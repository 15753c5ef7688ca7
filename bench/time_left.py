"""An estimate of the time that a run still takes, from the sizes that it has measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Bounds", "Done", "Step", "TimeLeft", "text_of"]

NEAR = 2.0
"""Bounds with at most this ratio are a basis for an estimate."""
GROWS = 1.5
"""What takes this much longer than before is expected to grow further."""
LATENCY_BYTES = 256 << 10
"""Below this size differences between calls say little of larger ones: latency dominates."""


class Step(NamedTuple):
    """What is measured between two lines of the table: ``call`` or a program's name, and a size."""

    kind: str
    size_bytes: int


class Bounds(NamedTuple):
    """A time in seconds that lies between the two; infinity if nothing is known."""

    low: float
    high: float

    def estimate(self) -> float | None:
        """Return the geometric mean; None if the bounds are too far apart to name one time."""
        if self.high > NEAR * self.low:
            return None
        return math.sqrt(self.low * self.high)


@dataclass(frozen=True)
class Done:
    """A measured step: all its seconds, those before its first round, and those of each call."""

    step: Step
    seconds: float
    preparing_s: float
    calls_s: Sequence[float]


class TimeLeft:
    """Predicts steps from those before them.

    A step takes as long as one of the same size. Beyond the largest size a call is assumed to take
    at most as much more as the size is larger, and at least what the last two sizes show if they
    are extended in a straight line, unless they hardly differ. Both hold for latency plus time per
    byte, but not where arrays leave a cache.

    Parameters
    ----------
    sampling : callable
        Maps the seconds of a call to the seconds of all its samples.
    """

    def __init__(self, sampling: Callable[[float], float]) -> None:
        self._sampling = sampling
        self._done: list[Done] = []

    def add(self, done: Done) -> None:
        """Learn from a step."""
        self._done.append(done)

    def of_steps(self, steps: Iterable[Step]) -> Bounds:
        """Return the time of several steps."""
        found = [self.of_step(step) for step in steps]
        return Bounds(sum(one.low for one in found), sum(one.high for one in found))

    def of_step(self, step: Step) -> Bounds:
        """Return the time of one step; nothing is known if no step of its kind was measured."""
        alike = [done for done in self._done if done.step.kind == step.kind]
        if not alike:
            return Bounds(0.0, math.inf)
        last = max(alike, key=lambda done: done.step.size_bytes)
        if last.step.size_bytes >= step.size_bytes:
            nearest = min(reversed(alike), key=lambda done: abs(log_ratio(done.step, step)))
            return Bounds(nearest.seconds, nearest.seconds)
        at = self._done.index(last)
        before = self._done[at - 1] if at else last
        return self._larger(before, last, step.size_bytes)

    def _larger(self, before: Done, last: Done, size_bytes: int) -> Bounds:
        """Return the time at a larger size than that of `last`."""
        sizes = (before.step.size_bytes, last.step.size_bytes, size_bytes)
        preparing_s = last.preparing_s
        if last.preparing_s > GROWS * self._done[0].preparing_s:
            preparing_s = straight(before.preparing_s, last.preparing_s, *sizes)
        low = high = last.seconds - last.preparing_s + preparing_s
        previous = before.calls_s if len(before.calls_s) == len(last.calls_s) else last.calls_s
        for earlier_s, call_s in zip(previous, last.calls_s, strict=True):
            is_growing = call_s > GROWS * earlier_s and last.step.size_bytes >= LATENCY_BYTES
            least_s = straight(earlier_s, call_s, *sizes) if is_growing else call_s
            most_s = call_s * size_bytes / max(last.step.size_bytes, 1)
            low += self._sampling(least_s) - self._sampling(call_s)
            high += self._sampling(most_s) - self._sampling(call_s)
        # single calls end where they would take too long, so a larger size may take less time
        return Bounds(max(min(low, high), 0.0), max(low, high, 0.0))


def log_ratio(one: Step, other: Step) -> float:
    """Return the logarithm of the ratio of two sizes; no size counts as one byte."""
    return math.log(max(one.size_bytes, 1) / max(other.size_bytes, 1))


def straight(earlier: float, last: float, size_earlier: int, size_last: int, size: int) -> float:
    """Extend the line through two measured points; it does not fall, and is not above the origin's.

    The line through the origin and the last point is the steepest that latency plus time per byte
    can have.
    """
    slope = (last - earlier) / (size_last - size_earlier) if size_last > size_earlier else 0.0
    slope = min(max(slope, 0.0), last / max(size_last, 1))
    return last + slope * (size - size_last)


def text_of(seconds: float) -> str:
    """Return a time as people would say it: no more exact than an estimate is."""
    if seconds < 10:
        return "less than 10 s left"
    if seconds < 57.5:
        return f"about {5 * round(seconds / 5)} s left"
    if seconds < 90 * 60:
        return f"about {max(1, round(seconds / 60))} min left"
    return f"about {seconds / 3600:.1f} h left"
