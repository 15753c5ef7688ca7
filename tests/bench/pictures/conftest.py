"""Results as gpucoll-bench writes them, made without measuring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpucoll.bench.results import Measurement, Results, Row

ENVIRONMENT = {
    "cpu": "A <CPU> & more",
    "ranks": 2,
    "usable_cpus": 2,
    "array": "numpy",
    "libraries": {"gpucoll": {"library": "gpucoll 1"}},
    "date": "2030-01-02T03:04:05+00:00",
}


def row(
    library: str,
    size_bytes: int,
    time_us: float | None,
    *,
    collective: str = "all_reduce",
    placement: str = "private",
    ranks: int = 2,
    in_place: float | None = None,
    **others: Any,
) -> Row:
    """Return a row; the rounds of rank 0 spread by a tenth around its time."""

    def side(time: float | None) -> Measurement | None:
        spread = np.array([0.9, 1.0, 1.1, 1.0, 0.95])
        return None if time is None else Measurement(np.full((ranks, 5), time) * spread, 3, 0)

    return Row(
        library, placement, collective, ranks, size_bytes, size_bytes // 4, "float32", "sum", -1,
        side(time_us), side(in_place), **others,
    )  # fmt: skip


def content(*rows: Row, limits: tuple[Row, ...] = (), **environment: Any) -> dict[str, Any]:
    """Return what the JSON file would hold."""
    return Results({**ENVIRONMENT, **environment}, list(rows), list(limits)).as_json()


@pytest.fixture
def make():
    """Return the functions `row` and `content`."""
    return row, content
