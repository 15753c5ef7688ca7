"""What pictures show: the calls of kept results, and their times or bandwidths as series.

Nothing here needs matplotlib.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpucoll.bench.estimates import time_interval
from gpucoll.bench.figures import FIGURES, Figure
from gpucoll.bench.kept import Content, counted
from gpucoll.bench.pictures.scales import rate_text, size_label, time_label
from gpucoll.bench.results import SIDES
from gpucoll.bench.summary import (
    SIDE_TITLES,
    Entry,
    Side,
    by_size,
    call_title,
    grouped,
    is_own,
    is_part,
    samples,
    several_ranks,
    title,
)

__all__ = [
    "KINDS",
    "QUANTITIES",
    "Call",
    "Contents",
    "NothingToDrawError",
    "Point",
    "Series",
    "calls_of",
    "digest_of",
    "fullest_side",
    "label_of",
    "only_size",
    "short_names",
    "text_of",
    "types_of",
]

Contents = Content | Sequence[Content]
"""What ``gpucoll-bench --json`` wrote: the content of one file, or of several."""

LABELS: Final = {
    "impi": "Intel MPI",
    "openmpi": "Open MPI",
    "mpich": "MPICH",
    "gloo": "Gloo",
    "cupy-nccl": "NCCL (CuPy)",
    "torch-nccl": "NCCL (PyTorch)",
    "gpucoll-plan": "gpucoll plan",
    "gpucoll-list": "gpucoll list",
    "limit": "memory limit",
    "copy": "copy in the GPU",
}
KINDS: Final = ("own", "peer", "limit")
QUANTITIES: Final = {"time": "time of one call", "bus_bw": "bus bandwidth"}
LIMIT_FROM_BYTES: Final = 256 << 10
"""Below this size the loop that measures the memory limit takes longer to call than to stream."""


class NothingToDrawError(ValueError):
    """The results have nothing that the picture could show; the message says what is missing."""


@dataclass(frozen=True)
class Point:
    """A value at a size, with its 95 % interval: microseconds, GB/s, or a figure of `FIGURES`."""

    size_bytes: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """The values of one library.

    Attributes
    ----------
    title, label : str
        Its name in the table, and for people.
    kind : str
        One of `KINDS`.
    points : tuple of Point
        The smallest size first; all values are positive.
    """

    title: str
    label: str
    kind: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Call:
    """One call of the results: its entries at all sizes, and the run that measured it last."""

    title: str
    entries: list[Entry]
    limits: list[Entry]
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        """The collective or pattern."""
        name: str = self.entries[0]["collective"]
        return name

    @property
    def details(self) -> str:
        """What the title says besides the name: dtype, reduction, length of lists."""
        return self.title.removeprefix(self.name).strip(" ,")

    @property
    def processes(self) -> str:
        """Their number in words: "between 2 processes"."""
        return f"between {self.ranks} processes" if self.ranks > 1 else "in 1 process"

    @property
    def where(self) -> str:
        """Where they ran, or the kind of arrays: "on 2 CPUs of one host"."""
        array: str = self.environment.get("array", "numpy")
        if self.environment.get("test_device"):
            return "a test device, not a GPU"
        if array != "numpy":
            return f"{array} arrays"
        cpus = self.environment["usable_cpus"]
        return f"on {cpus} CPU{'s' if cpus > 1 else ''} of one host"

    @property
    def origin(self) -> str:
        """The processor, or the GPU, and the day."""
        libraries = self.environment["libraries"].values()
        gpus = [one["GPU"] for one in libraries if "GPU" in one]
        gpu = gpus[0] if gpus and not self.environment.get("test_device") else ""
        return f"{gpu or self.environment['cpu']}, {self.environment['date'][:10]}"

    def name_of_side(self, side: str) -> str:
        """Return "in place" or "out of place"; nothing if the call has only one side."""
        both = all(any(entry[one] for entry in self.entries) for one in SIDES)
        return SIDE_TITLES[side] if both else ""

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        ranks: int = self.entries[0]["ranks"]
        return ranks

    def series(self, side: str, quantity: str) -> list[Series]:
        """Return a series for each library: gpucoll's first, then the peers', then the limit.

        Libraries without a positive value are left out.
        """
        found = _values(self.entries, side, quantity)
        ordered = sorted(found, key=lambda name: not is_own(name))  # stable: else as measured
        all_series = [
            Series(name, label_of(name), "own" if is_own(name) else "peer", tuple(found[name]))
            for name in ordered
            if not is_part(name)
        ]
        for name, points in _values(self.limits, side, quantity).items():
            if name == "limit":
                points = [point for point in points if point.size_bytes >= LIMIT_FROM_BYTES]
            # a copy reads and writes, so that only its bandwidth can be compared
            if points and (name == "limit" or quantity == "bus_bw"):
                all_series.append(Series(name, label_of(name), "limit", tuple(points)))
        return [series for series in all_series if series.points]

    def figures(self) -> Iterator[tuple[Figure, list[Series]]]:
        """Yield each figure other than a time, with its series of one point at size 0."""
        having = [entry for entry in self.entries if entry.get("figures")]
        for name, figure in FIGURES.items():
            found = []
            for entry in having:
                if (value := entry["figures"].get(name, 0)) > 0:
                    point = Point(0, value, value, value)
                    kind = "own" if is_own(title(entry)) else "peer"
                    found.append(Series(title(entry), label_of(title(entry)), kind, (point,)))
            if found:
                yield figure, found


def calls_of(contents: Contents) -> dict[str, Call]:
    """Return the calls by title: collective, dtype, reduction, length of lists.

    Of several contents, those count that `kept.counted` returns: at each size the newest, with all
    its libraries. If numbers of ranks differ, titles have them, too.

    Raises
    ------
    NothingToDrawError
        There are no results.
    CannotReadError
        The contents are of different machines or kinds of arrays.
    """
    listed = [contents] if isinstance(contents, dict) else counted(contents)
    results = [entry for content in listed for entry in content["results"]]
    if not results:
        raise NothingToDrawError("nothing to draw: there are no results")
    has_ranks = several_ranks(results)
    limits = grouped((entry for content in listed for entry in content["limit"]), has_ranks)
    environments = {
        call_title(entry, has_ranks): content["environment"]
        for content in listed
        for entry in content["results"]
    }
    return {
        name: Call(name, entries, limits.get(name, []), environments[name])
        for name, entries in grouped(results, has_ranks).items()
    }


def short_names(calls: dict[str, Call]) -> dict[str, str]:
    """Return a name for each title: the collective's if only one call has it, else the title."""
    names = [call.name for call in calls.values()]
    return {
        title: call.name if names.count(call.name) == 1 else title for title, call in calls.items()
    }


def types_of(calls: Iterable[Call]) -> list[str]:
    """Return the dtypes and reductions of several calls, or how many if they are many."""
    entries = [entry for call in calls for entry in call.entries]
    texts: list[str] = []
    for key, words in (("type", "dtypes"), ("redop", "reductions")):
        found = [word for word in dict.fromkeys(entry[key] for entry in entries) if word != "none"]
        texts += found if len(found) <= 3 else [f"{len(found)} {words}"]
    return texts


def fullest_side(call: Call) -> str:
    """Return the side with the most libraries; out of place if both have as many."""
    return max(SIDES, key=lambda side: len({title(e) for e in call.entries if e[side]}))


def label_of(name: str) -> str:
    """Return a library's name for people, by its name in the table."""
    library, _, placement = name.partition(" ")
    return f"{LABELS.get(library, library)} {placement}".strip()


def text_of(value: float, quantity: str) -> str:
    """Format a value of a quantity."""
    return time_label(value) if quantity == "time" else rate_text(value)


def only_size(series: Sequence[Series]) -> str:
    """Return the size of series that have one alone: "of 4 KiB", or nothing if it is 0."""
    size_bytes = series[0].points[0].size_bytes
    return f"of {size_label(size_bytes)}" if size_bytes else ""


def digest_of(function: Callable[..., object], *given: object, **named: object) -> str:
    """Return a digest of a picture's function and arguments, results included, without drawing.

    Two pictures with the same digest show the same. `to_svg` writes it into the picture.
    """
    bound = inspect.signature(function).bind(*given, **named)
    bound.apply_defaults()
    what = [function.__name__, bound.arguments]
    text = json.dumps(what, sort_keys=True, separators=(",", ":"), default=vars)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _values(entries: list[Entry], side: str, quantity: str) -> dict[str, list[Point]]:
    """Return the positive values by title, the smallest size first."""
    found: dict[str, list[Point]] = {}
    for size_bytes, sides in sorted(by_size(entries, side).items()):
        for name, one in sides.items():
            points = found.setdefault(name, [])
            if (one[quantity] or 0) > 0 and one["time"] > 0:
                points.append(_point(size_bytes, one, quantity))
    return found


def _point(size_bytes: int, side: Side, quantity: str) -> Point:
    low, high = time_interval(samples(side))
    low, high = min(low, side["time"]), max(high, side["time"])
    if quantity == "time":
        return Point(size_bytes, side["time"], low, high)
    moved = side[quantity] * side["time"]
    return Point(size_bytes, side[quantity], moved / high, moved / low if low > 0 else moved / high)
