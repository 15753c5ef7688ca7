"""Runs a file of Horovod's tests on this rank: ``OUTCOMES FILE [arguments of pytest ...]``.

Each test that has ended is a line of JSON in OUTCOMES followed by the rank's number: the name
without its file, "passed", "failed" or "skipped", and why. This program needs no other file of
these tests, so that it runs in environments of other Pythons, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest


class Outcomes:
    """A plugin of pytest that writes how each test went."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("w", encoding="utf-8")

    def write(self, test: str, outcome: str, reason: str) -> None:
        """Write a line, at once: a later test may end this process."""
        print(json.dumps([test, outcome, reason]), file=self._file, flush=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write a line for each phase that decides: a failed one, a skip, the test's own end."""
        if report.when == "call" or report.outcome != "passed":
            test = report.nodeid.partition("::")[2]
            reason = report.longrepr
            if report.skipped and isinstance(reason, tuple):
                reason = reason[2]
            self.write(test, report.outcome, str(reason or ""))

    def pytest_collectreport(self, report: Any) -> None:
        """Write why a file was not read."""
        if report.outcome != "passed":
            self.write("collection", report.outcome, str(report.longrepr))


def main(outcomes: str, file: str, arguments: list[str]) -> int:
    try:
        alias = importlib.import_module("gpucoll.integrations.horovod.alias")
    except ModuleNotFoundError:
        alias = importlib.import_module("alias_for_now")
    alias.install()
    if importlib.util.find_spec("mock") is None:
        sys.modules["mock"] = unittest.mock
    rank = os.environ["GPUCOLL_RANK"]
    os.environ.setdefault("HOROVOD_RANK", rank)
    os.environ.setdefault("HOROVOD_SIZE", os.environ["GPUCOLL_WORLD_SIZE"])
    sys.path.pop(0)  # this folder
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:gpucoll", "-p", "no:xdist"]
    options += ["--rootdir", str(Path(file).parents[1]), "-c", os.devnull, "--tb=short"]
    plugin = Outcomes(Path(outcomes + rank))
    return int(pytest.main([*options, *arguments, file], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
