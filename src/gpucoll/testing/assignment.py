"""What the driver of a test and its ranks tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

RANK_PLUGIN = "gpucoll-rank"
"""The plugin that a pytest session in a rank has, and no other session."""


@dataclass(frozen=True)
class Assignment:
    """One test, as each of its ranks is told of it."""

    key: str
    file: str
    world_size: int
    timeout_s: float
    token: str
    """What the ranks of this test, and of no other, meet by."""
    tmp_path: str
    next_key: str | None
    """The next test: what it shares with this one is not torn down. None: everything is."""


@dataclass(frozen=True)
class Outcome:
    """How a test went on one rank: pytest's reports, as plain data, and the warnings."""

    reports: list[dict[str, Any]]
    warnings: list[dict[str, Any]]


def key_of(item: pytest.Item) -> str:
    """Return what names a test in every process (its nodeid may get additions, as by xdist)."""
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.name}"
