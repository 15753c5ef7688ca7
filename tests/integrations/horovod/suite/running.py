"""Run a file of Horovod's tests on ranks, and compare how they went with what is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpucoll

_PROGRAM = Path(__file__).with_name("__main__.py")
MOST_AGAIN = 3
_WORST_FIRST = ("failed", "passed", "skipped")


@dataclass
class Outcomes:
    """How the tests of a file went, and what the ranks wrote.

    A test has failed if it did on any rank, or if a rank ended in it; it was skipped if all ranks
    skipped it.
    """

    went: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    output: str = ""

    def counts(self) -> Counter[str]:
        """Return how many passed, failed and were skipped."""
        return Counter(self.went.values())

    def differences(self, left_out: dict[str, str]) -> list[str]:
        """Return a line for each test that is not as `left_out`, names and reasons, has it."""
        lines = [
            f"{test} failed: {self.reasons[test][-1500:]}"
            for test, outcome in self.went.items()
            if outcome == "failed" and test not in left_out
        ]
        lines += [
            f"{test} is listed ({reason}), and {self.went.get(test, 'was not run')}"
            for test, reason in left_out.items()
            if self.went.get(test) not in ("failed", "skipped")
        ]
        if not self.went:
            lines.append("no test ran")
        return lines


def run_twice(file: Path, n_ranks: int, left_out: dict[str, str], **options: Any) -> Outcomes:
    """Run a file of tests, and once more those that failed and are not `left_out`.

    Some of Horovod's tests measure times, which fail under load.
    """
    outcomes = run(file, n_ranks, **options)
    failed = [
        test
        for test, outcome in outcomes.went.items()
        if outcome == "failed" and test not in left_out and "::" in test
    ]
    if 0 < len(failed) <= MOST_AGAIN:
        names = " or ".join(test.rpartition("::")[2] for test in failed)
        again = run(file, n_ranks, "-k", names, **options)
        for test in failed:
            outcomes.went[test] = again.went.get(test, "failed")
            outcomes.reasons[test] = again.reasons.get(test, "the rank ended before it told")
        outcomes.output += again.output
    return outcomes


def run(
    file: Path,
    n_ranks: int,
    *arguments: str,
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
    timeout_s: float = 240,
) -> Outcomes:
    """Run a file of Horovod's tests.

    Parameters
    ----------
    file : path
        Such as ``.../test/parallel/test_torch.py``.
    n_ranks : int
    *arguments : str
        For pytest, such as ``-k``.
    python : str
        The Python of the ranks.
    environment : dict, optional
        Variables of the ranks.
    timeout_s : float
        After this time the ranks are ended, and what they have not told is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        begin = f"{folder}/outcomes-"
        command = [python, "-m", "gpucoll", "run", "--no-prefix", "-n", str(n_ranks)]
        command += [str(_PROGRAM), begin, str(file), *arguments]
        places = [str(Path(gpucoll.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        output = _output_of(
            command,
            {
                **os.environ,
                "GPUCOLL_TIMEOUT_S": "30",
                "PYTHONPATH": os.pathsep.join(filter(None, places)),
                "TMPDIR": folder,
                **(environment or {}),
            },
            timeout_s,
            folder,
        )
        ranks = [_read(Path(f"{begin}{rank}")) for rank in range(n_ranks)]
    return _together(ranks, output)


def _output_of(
    command: Sequence[str], environment: dict[str, str], timeout_s: float, folder: str
) -> str:
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # it and its ranks can be ended together
    )
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # gpucoll run ends its ranks
        try:
            return process.communicate(timeout=20)[0] + f"\nended after {timeout_s} s"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0] + f"\nkilled after {timeout_s} s"


def _read(path: Path) -> dict[str, tuple[str, str]]:
    """Return outcome and reason of each test on one rank: the worst of its subtests and phases."""
    told: dict[str, tuple[str, str]] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        test, outcome, reason = json.loads(line)
        before = told.get(test, (_WORST_FIRST[-1], ""))
        told[test] = min((outcome, reason), before, key=lambda each: _WORST_FIRST.index(each[0]))
    return told


def _together(ranks: list[dict[str, tuple[str, str]]], output: str) -> Outcomes:
    result = Outcomes(output=output)
    for test in dict.fromkeys(test for rank in ranks for test in rank):
        told = [rank.get(test, ("failed", "the rank ended before it told")) for rank in ranks]
        worst = min(told, key=lambda each: _WORST_FIRST.index(each[0]))
        result.went[test] = worst[0]
        result.reasons[test] = "\n".join(
            f"rank {rank}: {each[1]}" for rank, each in enumerate(told) if each[0] == worst[0]
        )
    return result
