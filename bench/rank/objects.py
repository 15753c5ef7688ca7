"""Collectives of Python objects; each object contains part of an array, so it can be checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpucoll.bench.rank.library import Array, Call, Loop
from gpucoll.bench.rank.loops import keeping, timed

__all__ = ["objects"]

LARGE_BYTES = 1024
"""From this size on an object contains a NumPy array; smaller objects contain bytes."""


def objects(call: Call, rank: int, ranks: int, function: Callable[..., Any]) -> Loop | None:
    """Return the loop around ``function(object)``, or ``function(object, root)``, of a library.

    A scatter gets the list of the ranks' objects on the root, None elsewhere.
    """
    if call.in_place:
        return None
    rooted = call.collective != "all_gather_object"
    given: list[Any] = [None]
    kept: list[Any] = [None]
    statement = f"kept[0] = function(given[0]{', root' if rooted else ''})"
    loop = timed(statement, function=function, given=given, kept=kept, root=call.root)
    is_scatter = call.collective == "scatter_object"
    gives = call.root == rank or call.collective in ("gather_object", "all_gather_object")

    def run(reps: int) -> float:
        if gives:
            parts = np.split(call.source, ranks if is_scatter else 1)
            packets = [packed(part) for part in parts]
            given[0] = packets if is_scatter else packets[0]
        return loop(reps)

    return keeping(run, kept, lambda result: unpack(result, call.destination))


def packed(values: Array) -> dict[str, Any]:
    """Return an object that contains the values."""
    data = values if values.nbytes >= LARGE_BYTES else values.tobytes()
    return {"id": 7, "name": "job 7", "data": data}


def unpack(result: Any, destination: Array) -> None:
    """Write the contents of an object, or of a list of objects, to an array."""
    results = result if isinstance(result, list) else [result]
    for one, part in zip(results, np.split(destination, len(results)), strict=True):
        data = one["data"]
        part[:] = np.frombuffer(data, part.dtype) if isinstance(data, bytes) else data
