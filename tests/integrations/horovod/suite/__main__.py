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
import threading
import unittest.mock
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gpucoll.integrations.horovod.alias import install


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

    def pytest_collection_finish(self, session: Any) -> None:
        """Hide torch's Muon from tests that try every class of torch.optim, whatever it wants.

        It is newer than Horovod, and refuses the parameters of these tests: no matrices.
        """
        if (torch := sys.modules.get("torch")) and hasattr(torch.optim, "Muon"):
            torch.optim.Muon.__module__ = "hidden"

    def pytest_collectreport(self, report: Any) -> None:
        """Write why a file was not read."""
        if report.outcome != "passed":
            self.write("collection", report.outcome, str(report.longrepr))


def stand_in() -> None:
    """Provide what Horovod's tests import beside Horovod's API: mock, and two small functions."""
    if importlib.util.find_spec("mock") is None:
        sys.modules["mock"] = unittest.mock
    threads, places = "horovod.runner.util.threads", "horovod.runner.common.util.env"
    for module in (threads, places):
        parts = module.split(".")
        for name in (".".join(parts[:n]) for n in range(2, len(parts) + 1)):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError:
                sys.modules[name] = ModuleType(name)
    vars(sys.modules[threads]).setdefault("in_thread", in_thread)
    vars(sys.modules[places]).setdefault("get_env_rank_and_size", rank_and_size)


def in_thread(target: Callable[..., object], args: Sequence[object] = ()) -> threading.Thread:
    """Start a daemon thread, as the runner's function of this name does."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def rank_and_size() -> tuple[int, int]:
    """Return what the launcher said, before Horovod is initialized."""
    return int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])


def main(outcomes: str, file: str, arguments: list[str]) -> int:
    install()
    stand_in()
    rank = os.environ["GPUCOLL_RANK"]
    sys.path.pop(0)  # this folder
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:gpucoll", "-p", "no:xdist"]
    options += ["--rootdir", str(Path(file).parents[1]), "-c", os.devnull, "--tb=short"]
    plugin = Outcomes(Path(outcomes + rank))
    return int(pytest.main([*options, *arguments, file], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
