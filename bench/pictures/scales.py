"""Logarithmic axes: where their ticks are, how values read, and how labels keep apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from gpucoll.bench.summary import size_text

__all__ = ["rate_text", "size_label", "size_ticks", "spread", "time_label", "value_ticks"]

_UNITS: Final = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"), (1e-3, "ns"))
_MANTISSAS: Final = (
    (1.0,),
    (1.0, 3.0),
    (1.0, 2.0, 5.0),
    (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0),
)


def time_label(time_us: float) -> str:
    """Format a time with two digits and its unit."""
    scale, unit = next((one for one in _UNITS if time_us >= one[0]), _UNITS[-1])
    return f"{float(f'{time_us / scale:.2g}'):g} {unit}"


def rate_text(rate_gb_s: float) -> str:
    """Format a bandwidth with two digits; 1 GB is 1e9 bytes."""
    for scale, unit in ((1e3, "TB/s"), (1.0, "GB/s"), (1e-3, "MB/s"), (1e-6, "kB/s")):
        if rate_gb_s >= scale:
            return f"{float(f'{rate_gb_s / scale:.2g}'):g} {unit}"
    return f"{rate_gb_s * 1e9:.2g} B/s"


def size_label(size_bytes: int) -> str:
    """Format a size with its unit."""
    words = size_text(size_bytes)
    return f"{words}B" if " " in words else f"{words} B"


def size_ticks(sizes_bytes: Sequence[int], most: int) -> list[int]:
    """Return at most `most` sizes: the smallest, and its products with powers of a power of two.

    The largest size is among them if that costs few of the others. `sizes_bytes` are positive, the
    smallest first.
    """
    first, last = sizes_bytes[0], sizes_bytes[-1]
    doublings = math.floor(math.log2(last / first))
    least = next(step for step in range(1, doublings + 2) if doublings // step < max(most, 1))
    step = next((step for step in range(least, 2 * least) if doublings % step == 0), least)
    return [first << power for power in range(0, doublings + 1, step)]


def value_ticks(least: float, most: float, number: int) -> list[float]:
    """Return at most about `number` round values between two positive ones, at least two."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    for mantissas in _MANTISSAS:
        found = [m * 10.0**power for power in powers for m in mantissas]
        found = [value for value in found if least <= value <= most]
        if len(found) >= 2:
            return found[:: -(-len(found) // number)]
    return [least, most]


def spread(wanted: Sequence[float], pitch: float) -> list[float]:
    """Return places at least `pitch` apart, as near to ascending ones as that allows."""
    groups: list[list[float]] = []  # neighbours that touch share their mean displacement
    for place in wanted:
        groups.append([place])
        while len(groups) > 1 and _last(groups[-2], pitch) + pitch > _first(groups[-1], pitch):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_first(group, pitch) + n * pitch for group in groups for n in range(len(group))]


def _first(group: list[float], pitch: float) -> float:
    return sum(group) / len(group) - pitch * (len(group) - 1) / 2


def _last(group: list[float], pitch: float) -> float:
    return sum(group) / len(group) + pitch * (len(group) - 1) / 2
