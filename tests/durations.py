"""``pytest --write-durations`` writes how long tests take to ``tests/durations.json``.

``test_durations.py`` holds the quick tier to its limits by this record. A run of some files renews
their entries; a run of all (the README's command with this option, on an idle machine, when
kernels are compiled) renews the record.
"""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "durations.json"
LONG_S = 0.5
"""Tests above it are recorded by name."""


class DurationRecorder:
    """Adds up the durations of a run's tests, and writes them when it ends.

    Parameters
    ----------
    record : Path
        The file; entries of files that this run does not touch stay as they are.
    """

    def __init__(self, record: Path = RECORD) -> None:
        self._record = record
        self._files: dict[str, float] = defaultdict(float)
        self._tests: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase of a test."""
        self.add(report.nodeid, report.when == "call", report.duration)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the record."""
        self.write(session.config.getoption("numprocesses", None) or 1)

    def add(self, test: str, is_body: bool, duration_s: float) -> None:
        """Add a phase to the test's file, and note the test itself if its body takes long."""
        self._files[_file_of(test)] += duration_s
        if is_body and duration_s > LONG_S:
            self._tests[test] = round(duration_s, 2)

    def write(self, n_workers: int) -> None:
        """Write what was added beside what the record holds of other files."""
        old = json.loads(self._record.read_text("utf-8")) if self._record.exists() else {}
        files = {**old.get("files", {}), **{name: round(s, 2) for name, s in self._files.items()}}
        files = {name: s for name, s in sorted(files.items()) if (ROOT / name).exists()}
        others = {*files} - {*self._files}
        long = {
            name: s for name, s in old.get("long_tests", {}).items() if _file_of(name) in others
        }
        content: dict[str, Any] = {
            "date": date.today().isoformat(),
            "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
            "workers": n_workers,
            "sum_s": round(sum(files.values()), 1),
            "files": files,
            "long_tests": dict(sorted({**long, **self._tests}.items())),
        }
        self._record.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _file_of(test: str) -> str:
    return test.partition("::")[0]
