"""What passed in one environment need not run again in another that has more installed.

``GPUCOLL_TEST_PASSED=FILE pytest`` writes down which tests passed, and ``pytest
--without-passed=FILE`` runs all others: what was skipped for want of a library, failed, or was not
there. `.ci/run` does so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

PASSED = "GPUCOLL_TEST_PASSED"


class Recorder:
    """Writes the names of the tests that passed, one a line, as they pass."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)  # whole lines, if it is killed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._file.write(f"{report.nodeid}\n")

    def pytest_unconfigure(self) -> None:
        self._file.close()


def leave_out_passed(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the file of ``--without-passed`` names."""
    path = config.getoption("--without-passed")
    if path is None:
        return
    passed = set(path.read_text(encoding="utf-8").splitlines())
    left_out = [item for item in items if item.nodeid in passed]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid not in passed]
