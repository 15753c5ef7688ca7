"""The workers of pytest-xdist import test modules in different orders, to share what that costs.

On a fresh checkout pytest compiles every test module, because it rewrites their asserts: 12 s of
CPU time, and as much again in each further worker, where all meet the same module at the same time.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
FOLDER = Path(__file__).resolve().parent


class Importer:
    """A plugin that imports all test modules when collecting begins, where there are workers.

    A run of some files does not need it, and does nothing.
    """

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Begin at a place of this worker's own; what is imported is there when it is collected."""
        number, count = worker()
        if count == 1 or not isinstance(collector, pytest.Session):
            return
        if is_whole_run(collector.config):
            for name in rotated(module_names(), number, count):
                with suppress(Exception, pytest.skip.Exception):  # collecting meets and reports it
                    importlib.import_module(name)


def is_whole_run(config: pytest.Config) -> bool:
    """Return whether all test modules are collected."""
    return [Path(argument).resolve() for argument in config.args] == [FOLDER]


def module_names() -> list[str]:
    """Return the names of all test modules, sorted."""
    files = sorted(path.relative_to(FOLDER.parent) for path in FOLDER.rglob("test_*.py"))
    return [".".join(file.with_suffix("").parts) for file in files]


def worker() -> tuple[int, int]:
    """Return this worker's number, and how many there are: (0, 1) without pytest-xdist."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return int(name.removeprefix("gw")), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def rotated(names: Sequence[T], number: int, count: int) -> list[T]:
    """Return all names, beginning with the `number`-th of `count` parts."""
    first = number * len(names) // count
    return [*names[first:], *names[:first]]
