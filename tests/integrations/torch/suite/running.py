"""Run PyTorch's tests in this process, and say how each went."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import tempfile
import time
import unittest
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integrations.torch.suite.cases import case_of
from tests.integrations.torch.suite.opened import DECORATORS, TIMEOUT_S, load


@dataclass(frozen=True)
class Outcome:
    """How a test went: "passed", "failed" or "skipped"; why; what its ranks wrote, if it failed."""

    test: str
    outcome: str
    reason: str = ""
    output: str = ""
    duration_s: float = 0.0


class Outcomes(unittest.TestResult):
    """Collects outcomes, and prints a line for each test that ran."""

    def __init__(self, log: Path, out: Any) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []
        self._log, self._out = log, out
        self._begin = 0.0

    def startTest(self, test: Any) -> None:  # noqa: N802
        self._log.write_text("")
        self._begin = time.monotonic()

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self._add(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._add(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self._add(test, "failed", str(err[1]))

    addError = addFailure  # noqa: N815

    def _add(self, test: Any, outcome: str, reason: str = "") -> None:
        name = test.id().rpartition(".")[2]
        failed = outcome == "failed"
        output = self._log.read_text(errors="replace") if failed else ""
        output = f"{reason}\n{output}" if failed else ""
        line = last_error(reason) if failed else reason
        taken_s = time.monotonic() - self._begin
        self.outcomes.append(Outcome(name, outcome, line, output, taken_s))
        if outcome != "skipped":
            print(f"{outcome} {name} ({taken_s:.1f} s) {line}", file=self._out, flush=True)


def last_error(text: str) -> str:
    """Return the line that names the error of the first rank that had one, in PyTorch's report."""
    first = re.split(r"\n(?=Process \d+ exited )", text.strip())[0]
    lines = first.splitlines() or [""]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return errors[-1] if errors else lines[-1]


def run(backend: str, world_size: int, pattern: str, out: Any) -> list[Outcome]:
    """Run the tests whose names contain `pattern`; print lines to `out`."""
    with tempfile.TemporaryDirectory(prefix="distributed-tests-") as folder:
        usual, tempfile.tempdir = tempfile.tempdir, folder  # PyTorch leaves files there
        try:
            return _run(backend, world_size, pattern, Path(folder) / "log", out)
        finally:
            tempfile.tempdir = usual


def _load_what_ranks_need() -> None:
    """Load (where it has to be, compile) what each rank would, once for all of them."""
    import torch
    from torch import distributed as dist

    importlib.import_module("gpucoll.integrations.torch")
    dist.init_process_group("gpucoll", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    n_threads = len(os.listdir("/proc/self/task"))
    if n_threads > 1:
        raise RuntimeError(f"{n_threads} threads in the process that ranks are to be forked from")


def _run(backend: str, world_size: int, pattern: str, log: Path, out: Any) -> list[Outcome]:
    module = load(backend, world_size)
    logging.getLogger(DECORATORS).setLevel(logging.ERROR)  # each process that it starts
    if backend == "gpucoll":
        _load_what_ranks_need()
    case = case_of(module, log, limit_s=TIMEOUT_S)
    names = unittest.TestLoader().getTestCaseNames(case)
    chosen = [case(name) for name in names if pattern in name]
    results = Outcomes(log, out)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        unittest.TestSuite(chosen).run(results)
    return results.outcomes
