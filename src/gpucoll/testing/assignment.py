"""The messages between the driver of a test and its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

RANK_PLUGIN = "gpucoll-rank"
"""The name of a plugin that only the pytest session of a rank has."""


@dataclass(frozen=True)
class Assignment:
    """One test, as each of its ranks receives it."""

    key: str
    file: str
    world_size: int
    timeout_s: float
    token: str
    """The name by which the ranks of this test, and no others, meet."""
    tmp_path: str
    next_key: str | None
    """The next test. Fixtures that it shares with this one are not torn down; None: all are."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test on one rank: pytest's reports as plain data, and the warnings."""

    reports: list[dict[str, Any]]
    warnings: list[dict[str, Any]]


def key_of(item: pytest.Item) -> str:
    """Return a name of a test that is the same in every process; plugins may change nodeids."""
    assert item.parent is not None
    return f"{item.parent.nodeid}::{item.name}"
