"""Merge the reports of all ranks of a test into one report for pytest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import pytest

from gpucoll.launcher.rank_process import RankEnd
from gpucoll.testing.assignment import Outcome
from gpucoll.testing.pool import Answer, Ended, Silent
from gpucoll.testing.problems import Problem, explain, own_frames, spans

Phase = Literal["setup", "call", "teardown"]
STRICT = "[XPASS(strict)]"
Judgement: TypeAlias = tuple[Literal["passed", "failed", "skipped"], Any, dict[str, Any]]
"""An outcome, its explanation in a form that pytest shows, and attributes that plugins read."""


class RankResults:
    """The results of a test on each of its ranks.

    Parameters
    ----------
    item : pytest.Item
        The test.
    answers : sequence of Answer
        The answers in rank order.
    trace : callable
        Returns the traceback that a crashed rank has written.
    """

    def __init__(
        self, item: pytest.Item, answers: Sequence[Answer], trace: Callable[[int], str]
    ) -> None:
        self._item = item
        self._world_size = len(answers)
        self._broken: list[Problem] = []
        self._reports: dict[Phase, dict[int, Any]] = {"setup": {}, "call": {}, "teardown": {}}
        self._properties: list[tuple[str, object]] = []
        for rank, answer in enumerate(answers):
            if isinstance(answer, Ended):
                self._broken.append(self._ended(rank, answer, trace(rank)))
            elif isinstance(answer, Silent):
                self._broken.append(self._silent(rank, answer))
            elif answer.error is not None:
                kind = type(answer.error).__name__
                text = str(answer.error) if isinstance(answer.error, LookupError) else answer.trace
                self._broken.append(Problem(rank, kind, str(answer.error), text))
            elif isinstance(answer.result, Outcome):
                self._take(rank, answer.result)

    def _take(self, rank: int, outcome: Outcome) -> None:
        config = self._item.config
        for data in outcome.reports:
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            if type(report) is pytest.TestReport:
                self._reports[report.when][rank] = report
            # a part of the test failed (pytest's subtests), and the rest continued
            elif report.failed:
                self._broken.append(Problem.of_report(rank, report))
            new = [item for item in report.user_properties if item not in self._properties]
            self._properties += new

    def _ended(self, rank: int, end: Ended, trace: str) -> Problem:
        code = end.exit_code
        if code < 0:
            text = str(RankEnd(rank, self._world_size, signal_number=-code))
        else:
            text = str(RankEnd(rank, self._world_size, exit_code=code))
        return Problem(rank, "crash", text, f"{text}\n{own_frames(trace) if trace else ''}")

    def _silent(self, rank: int, silent: Silent) -> Problem:
        text = f"not done after {silent.limit_s:g} s"
        trace = f"{text}; it stood at\n{own_frames(silent.trace)}"
        return Problem(rank, "hang", text, f"{trace}\n{silent.verdict}".rstrip() + "\n")

    # --- reports ----------------------------------------------------------------------------------

    def reports(self, sections: Sequence[tuple[str, str]]) -> list[pytest.TestReport]:
        """Return the test's reports, one for each phase."""
        setups = self._reports["setup"]
        is_set_up = all(report.passed for report in setups.values())
        body = {**setups, **self._reports["call"]}  # the last phase that each rank reached
        made = []
        if is_set_up:
            made.append(self._report("setup", setups, [], ()))
        phase: Phase = "call" if is_set_up else "setup"
        made.append(self._report(phase, body, self._broken, sections))
        made.append(self._report("teardown", self._reports["teardown"], [], sections))
        return made

    def _report(
        self,
        phase: Phase,
        reports: Mapping[int, pytest.TestReport],
        problems: list[Problem],
        sections: Sequence[tuple[str, str]],
    ) -> pytest.TestReport:
        outcome, longrepr, extra = self._judge(reports, problems)
        times = [(report.start, report.stop) for report in reports.values()] or [(0.0, 0.0)]
        logs: dict[tuple[str, str], list[int]] = {}
        for rank, report in reports.items():
            for section in report.sections:
                logs.setdefault(section, []).append(rank)
        return pytest.TestReport(
            nodeid=self._item.nodeid,
            location=self._item.location,
            keywords=dict.fromkeys(self._item.keywords, 1),
            outcome=outcome,
            longrepr=longrepr,
            when=phase,
            sections=[
                *((f"{title} of {spans(ranks)}", text) for (title, text), ranks in logs.items()),
                *sections,
            ],
            duration=max((report.duration for report in reports.values()), default=0.0),
            start=min(start for start, _ in times),
            stop=max(stop for _, stop in times),
            user_properties=self._properties,
            **extra,
        )

    def _judge(self, reports: Mapping[int, pytest.TestReport], broken: list[Problem]) -> Judgement:
        """Return the outcome, the explanation and further attributes of a phase."""
        expected = {
            rank: report
            for rank, report in reports.items()
            if report.skipped and hasattr(report, "wasxfail")
        }
        skipped = [rank for rank, item in reports.items() if item.skipped and rank not in expected]
        problems = broken + [
            Problem.of_report(rank, report)
            for rank, report in reports.items()
            if report.failed and not (expected and report.longreprtext.startswith(STRICT))
        ]
        problems.sort(key=lambda problem: problem.rank)
        if expected and all(problem.follows for problem in problems):
            first = next(iter(expected.values()))
            return "skipped", first.longrepr, {"wasxfail": first.wasxfail}
        if len(skipped) == self._world_size:
            return "skipped", reports[0].longrepr, {}
        if not problems and not skipped:
            unexpected = [item.wasxfail for item in reports.values() if hasattr(item, "wasxfail")]
            return "passed", None, {"wasxfail": unexpected[0]} if unexpected else {}
        remarks = []
        if skipped:
            others = spans(set(range(self._world_size)) - set(skipped))
            why: Any = reports[skipped[0]].longrepr  # a skip's: file, line, reason
            reason = why[2].removeprefix("Skipped: ")
            remarks.append(
                f"skipped on {spans(skipped)} of {self._world_size} ({reason}), but not on "
                f"{others}: skip on every rank or on none"
            )
        place = (self._item.path, (self._item.location[1] or 0) + 1)
        return "failed", explain(problems, remarks, self._world_size, place), {}
