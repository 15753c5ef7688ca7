"""A plugin of pytest for runs with faults: it writes down how tests end, and leaves some out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

LOG = os.environ.pop("MUTATION_LOG", "")
"""Empty in the workers of pytest-xdist, whose controller hears of all tests."""
LEAVE_OUT = os.environ.get("MUTATION_LEAVE_OUT", "")


def _write(event: str, test: str) -> None:
    if LOG:
        with open(LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps([event, test]) + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests by name."""
    names = set(Path(LEAVE_OUT).read_text(encoding="utf-8").splitlines()) if LEAVE_OUT else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note a test that begins."""
    _write("begun", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that passed, failed or ended."""
    if report.failed:
        _write("timeout" if "Failed: Timeout" in str(report.longrepr) else "test", report.nodeid)
    elif report.when == "call" and report.passed:
        _write("passed", report.nodeid)
    if report.when == "teardown":
        _write("ended", report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be collected."""
    if report.failed:
        _write("test", report.nodeid)
