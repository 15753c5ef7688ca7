"""The results of a run, and their JSON."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpucoll.bench.estimates import Samples, time_us
from gpucoll.bench.patterns import MEASURED

__all__ = [
    "LEAST_SINGLE_CALLS",
    "LIMITS",
    "OWN",
    "PARTS",
    "PERCENTILES",
    "SIDES",
    "Measurement",
    "Results",
    "Row",
    "write_whole",
]

SIDES = ("out_of_place", "in_place")
OWN = ("gpucoll", "gpucoll-plan", "gpucoll-list")
"""The table's names for gpucoll's calls; peers' calls have the peers' names."""
LIMITS = ("limit", "copy")
"""The limits that a call is compared with: that of the host memory, or a copy in rank 0's GPU."""
PARTS = ("blocking", "work")
"""Placements that are a part of a pattern, measured alone and not compared with peers."""
PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
"""Percentiles of calls that are timed alone: each is the time of one of these calls."""
LEAST_SINGLE_CALLS = 200
"""Calls from which two are above the 99th percentile."""


@dataclass(frozen=True)
class Measurement:
    """One case's samples.

    Attributes
    ----------
    samples : array
        Microseconds per call, by rank and round.
    reps : int
        Calls in a sample.
    wrong : int or None
        Number of wrong elements over all ranks; None if nothing was checked.
    path : str
        The path that the call took through the library, if known.
    cpu_samples : array or None
        Microseconds of CPU time per call, over all threads of a rank, by rank and round.
    single_us : array or None
        The slowest rank's microseconds of each call that was timed alone; empty if they would
        have taken too long, None if nobody asked for them.
    """

    samples: Samples
    reps: int
    wrong: int | None
    path: str = ""
    cpu_samples: Samples | None = None
    single_us: Samples | None = None

    @property
    def time_us(self) -> float:
        """The slowest rank's median."""
        return time_us(self.samples)

    @property
    def percentiles_us(self) -> dict[str, float] | None:
        """Percentiles of the calls that were timed alone; None if there are too few of them."""
        if self.single_us is None or len(self.single_us) < LEAST_SINGLE_CALLS:
            return None
        found = np.percentile(self.single_us, list(PERCENTILES.values()), method="inverted_cdf")
        return {name: round(float(us), 4) for name, us in zip(PERCENTILES, found, strict=True)}

    @property
    def cpu_us(self) -> float | None:
        """The CPU time per call of the rank that takes most."""
        return None if self.cpu_samples is None else time_us(self.cpu_samples)


@dataclass(frozen=True)
class Row:
    """One line of the table: a library's call at one size, with one or both sides.

    `figures` are a pattern's results other than times: see `figures.FIGURES`. With a `list_length`,
    size and count are those of each array, but times are those of the whole list.
    """

    library: str
    placement: str
    collective: str
    ranks: int
    size_bytes: int
    count: int
    dtype: str
    redop: str
    root: int
    out_of_place: Measurement | None
    in_place: Measurement | None
    list_length: int = 1
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The row's name in the table."""
        return self.library if self.placement == "private" else f"{self.library} {self.placement}"

    @property
    def path(self) -> str:
        """The path that its calls took, if known; both paths if the two sides differ."""
        sides = [side for side in (self.out_of_place, self.in_place) if side and side.path]
        return "/".join(dict.fromkeys(side.path for side in sides))

    @property
    def wrong(self) -> int:
        """The number of wrong elements on both sides."""
        return sum(side.wrong or 0 for side in (self.out_of_place, self.in_place) if side)

    def side(self, name: str) -> Measurement | None:
        """Return ``out_of_place`` or ``in_place``."""
        return self.out_of_place if name == "out_of_place" else self.in_place

    @property
    def is_part(self) -> bool:
        """Whether the row is a part of a pattern, measured alone."""
        return self.placement in PARTS

    def bandwidths(self, side: Measurement) -> tuple[float, float] | tuple[None, None]:
        """Return algorithm and bus bandwidth in GB/s; None if they are meaningless.

        For a copy within a GPU: what it copies, and what it reads and writes.
        """
        if self.library == "copy":
            copied = self.size_bytes / side.time_us / 1e3
            return copied, 2 * copied
        traits = MEASURED[self.collective]
        return traits.bandwidths(self.size_bytes * self.list_length, side.time_us, self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return the entry of ``results``."""
        return {
            "library": self.library,
            "collective": self.collective,
            "placement": self.placement,
            "ranks": self.ranks,
            "size": self.size_bytes,
            "count": self.count,
            "type": self.dtype,
            "redop": self.redop,
            "root": self.root,
            "list_length": self.list_length,
            "out_of_place": self._side_as_json(self.out_of_place),
            "in_place": self._side_as_json(self.in_place),
            **({"figures": self.figures} if self.figures else {}),
        }

    def _side_as_json(self, side: Measurement | None) -> dict[str, Any] | None:
        if side is None:
            return None
        algorithm, bus = self.bandwidths(side)
        single: dict[str, Any] = {}
        if side.single_us is not None:
            found = side.percentiles_us
            single["single_calls"] = found and {"calls": len(side.single_us), **found}
        return {
            "time": side.time_us,
            "alg_bw": algorithm,
            "bus_bw": bus,
            "cpu_time": side.cpu_us,
            "nwrong": side.wrong,
            "path": side.path,
            "reps": side.reps,
            "samples_us": [[round(value, 4) for value in rank] for rank in side.samples.tolist()],
            **single,
        }


@dataclass
class Results:
    """All results of one run.

    Attributes
    ----------
    rows : list of Row
        In the order of measurement.
    limits : list of Row
        The memory limit at each size, under a library name of `LIMITS`.
    environment : dict
        The machine, the versions and the command.
    failures : list of str
        Peers that were given up during the run.
    """

    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    limits: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """The number of wrong elements over all rows."""
        return sum(row.wrong for row in self.rows)

    def bus_bandwidths(self) -> dict[str, float]:
        """Return the average bus bandwidth in GB/s of each library and placement."""
        found: dict[str, list[float]] = {}
        for row in self.rows:
            for side in (row.out_of_place, row.in_place):
                bus = row.bandwidths(side)[1] if side is not None else None
                if bus is not None:
                    found.setdefault(row.title, []).append(bus)
        return {title: sum(values) / len(values) for title, values in found.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return {
            "results": [row.as_json() for row in self.rows],
            "limit": [row.as_json() for row in self.limits],
            "environment": {**self.environment, "failures": self.failures},
        }

    def write(self, path: Path) -> None:
        """Write the JSON file completely or not at all."""
        write_whole(path, compact(json.dumps(self.as_json(), indent=1)) + "\n")


def compact(text: str) -> str:
    """Put each innermost list of indented JSON on one line: a line for each rank's samples.

    A list that spans lines cannot be part of a string, since JSON escapes line ends there.
    """
    return re.sub(r'\[\n[^][{}"]*\]', lambda found: f"[{' '.join(found[0][1:-1].split())}]", text)


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all; line ends stay as they are.

    What is no regular file, as a pipe or ``/dev/null``, is written to and not replaced.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
        return
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        error.filename = str(path)  # not the temporary name
        raise
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
