"""The files that take longest run first, so that no worker is alone with one in the end."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence

import pytest

from tests.durations import RECORD
from tests.tiers import place_of

LONG_S = 30.0
"""What a file of a longer tier is taken to need: `durations.json` records the quick one."""
APART = 12
"""Files between two with MPIs, whose ranks never sleep: side by side they starve each other."""


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by their files; every worker comes to the same order."""
    recorded = json.loads(RECORD.read_text("utf-8"))["files"]
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    items[:] = [test for name in order(list(files), recorded) for test in files[name]]


def order(files: Sequence[str], recorded: dict[str, float]) -> list[str]:
    """Return files by the time that they take, those with MPIs spread from the beginning."""
    with_mpis = [name for name in files if place_of(name) == "mpi"]
    found = [name for name in files if name not in with_mpis]
    found.sort(key=lambda name: -_seconds(name, recorded))
    for place, name in enumerate(with_mpis):
        found.insert(APART * place, name)
    return found


def _seconds(name: str, recorded: dict[str, float]) -> float:
    return recorded.get(name, 0.0) if place_of(name) == "quick" else LONG_S
