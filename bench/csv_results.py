"""The results as CSV (RFC 4180), with a line for each library, size and side."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from gpucoll.bench.figures import FIGURES
from gpucoll.bench.results import PERCENTILES, SIDES, Results, Row

__all__ = ["COLUMNS", "csv_text"]

COLUMNS = (
    "collective", "library", "placement", "ranks", "size_bytes", "count", "dtype", "redop", "root",
    "list_length", "side", "time_us", "alg_bw_gb_s", "bus_bw_gb_s", "cpu_us", "wrong", "path",
    "reps", "samples", *(f"{name}_us" for name in PERCENTILES), "single_calls",
)  # fmt: skip
"""The columns that every file has, in this order."""


def csv_text(results: Results) -> str:
    """Return the whole file: a header, the results in the order of measurement, then the limits.

    A program's figures other than times follow `COLUMNS`, each in a column of its own; there are
    none if only calls were measured. What does not exist is empty.
    """
    rows = [*results.rows, *results.limits]
    figures = [name for name in FIGURES if any(name in row.figures for row in rows)]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*COLUMNS, *figures])
    writer.writeheader()
    for row in rows:
        writer.writerows(_lines(row))
    return text.getvalue()


def _lines(row: Row) -> Iterator[dict[str, Any]]:
    """Yield a line for each side; one without a side if a row has only figures."""
    common = {
        "collective": row.collective,
        "library": row.library,
        "placement": row.placement,
        "ranks": row.ranks,
        "size_bytes": row.size_bytes,
        "count": row.count,
        "dtype": row.dtype,
        "redop": row.redop,
        "root": row.root,
        "list_length": row.list_length,
        **row.figures,
    }
    sides = [(name, side) for name in SIDES if (side := row.side(name)) is not None]
    if not sides:
        yield common
    for name, side in sides:
        algorithm, bus = row.bandwidths(side)
        yield common | {
            "side": name,
            "time_us": side.time_us,
            "alg_bw_gb_s": algorithm,
            "bus_bw_gb_s": bus,
            "cpu_us": side.cpu_us,
            "wrong": side.wrong,
            "path": side.path,
            "reps": side.reps,
            "samples": side.samples.shape[1],
            **{f"{name}_us": us for name, us in (side.percentiles_us or {}).items()},
            "single_calls": None if side.single_us is None else len(side.single_us),
        }
