"""The all_reduces in a result of gpucoll-bench, as cases to fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpucoll.bench import kept
from gpucoll.bench.predict.composition import Case
from gpucoll.bench.predict.fitting import Observed
from gpucoll.errors import ArgumentError

__all__ = ["observed_in", "read"]


def read(path: Path) -> list[Observed]:
    """Return the measured all_reduces of a file; ArgumentError if it has none."""
    try:
        found = observed_in(kept.read(path))
    except kept.CannotReadError as error:
        raise ArgumentError(f"--from {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ArgumentError(f"--from {path}: its all_reduces cannot be fitted: {error}") from error
    if not found:
        raise ArgumentError(f"--from {path}: it has no all_reduce of gpucoll on several ranks")
    return found


def observed_in(content: Mapping[str, Any]) -> list[Observed]:
    """Return the all_reduces of private arrays in the content of a result.

    If several dtypes or reductions were measured, those of the first one.
    """
    found: list[Observed] = []
    kind: tuple[str, str] | None = None
    for row in content["results"]:
        what = (row["library"], row["collective"], row["placement"], row.get("list_length", 1))
        side = row["out_of_place"] or row["in_place"]
        if what != ("gpucoll", "all_reduce", "private", 1) or not side or row["ranks"] < 2:
            continue
        kind = kind or (row["type"], row["redop"])
        if (row["type"], row["redop"]) == kind:
            hosts = row.get("hosts", content["environment"].get("hosts", 1))
            case = Case(int(row["size"]), int(row["ranks"]), int(hosts))
            samples = np.array(side["samples_us"], np.float64)
            if samples.min() <= 0:
                raise ValueError("samples_us that are not above 0")
            if case.size_bytes < 1 or case.hosts < 1 or case.ranks % case.hosts:
                raise ValueError("a size below 1, or ranks that hosts do not share")
            found.append(Observed(case, samples, side.get("path", "")))
    return found
