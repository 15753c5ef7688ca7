"""A pytest session in a rank.

It collects and runs the tests that the driver names, and returns pytest's own reports. So fixtures,
hooks, warnings, assertion rewriting and other plugins work in a rank as usual; the driver
(`gpucoll.testing.driver`) only decides which test is next.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpucoll import config
from gpucoll.api import communicator
from gpucoll.errors import AbortedError, DeadlineError, PeerLostError
from gpucoll.rendezvous.meeting_numbers import forget_meetings
from gpucoll.testing import measuring
from gpucoll.testing.assignment import RANK_PLUGIN, Assignment, Outcome, key_of
from gpucoll.testing.rank import RankLoop, Reply
from gpucoll.testing.session_setup import SessionSetup

FOLLOWERS = (AbortedError, DeadlineError, PeerLostError)
"""What a rank raises if another rank failed or did not arrive."""


class RankSession:
    """The plugin of a rank's pytest session."""

    def __init__(self, loop: RankLoop) -> None:
        self._loop = loop
        self._items: dict[str, pytest.Item] = {}
        self._files: set[str] = set()
        self._problems: list[str] = []
        self._reports: list[dict[str, Any]] = []
        self._warnings: list[dict[str, Any]] = []
        self._before: set[communicator.Communicator] = set()
        self.assignment: Assignment | None = None
        self.has_failed = False
        """Whether the test failed, so that its communicators were aborted."""

    # --- the driver's requests --------------------------------------------------------------------

    def collect(self, assignment: Assignment) -> None:
        """Import the test's file and find the test."""
        if assignment.file not in self._files:
            self._problems.clear()
            self._config.args = [assignment.file]
            self._config.hook.pytest_collection(session=self._session)
            if self._problems:
                raise LookupError("\n".join(self._problems))
            self._files.add(assignment.file)
        if assignment.key not in self._items:
            raise LookupError(
                f"{assignment.key} was not found when this rank collected {assignment.file}: the "
                "tests of a file must be the same in every process (no random parameters)"
            )

    def run(self, assignment: Assignment) -> Outcome:
        """Run a collected test: setup, call and teardown."""
        item = self._items[assignment.key]
        self._reports, self._warnings = [], []
        self.assignment, self.has_failed = assignment, False
        self._before = set(communicator._open)
        forget_meetings()  # each test is a job of its own, whatever this rank did before
        following: Any = None
        if assignment.next_key is not None:  # a test of another file shares only the session
            following = self._items.get(assignment.next_key, self._session)
        with config.environment(self._variables(assignment)):
            # A rank without a part in the tests between may still hold fixtures of another file.
            self._session._setupstate.teardown_exact(item)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
        return Outcome(self._reports, self._warnings)

    def _variables(self, assignment: Assignment) -> dict[str, str]:
        rank, world_size = str(self._loop.rank), str(assignment.world_size)
        return {
            config.RANK: rank,
            config.LOCAL_RANK: rank,
            config.WORLD_SIZE: world_size,
            config.LOCAL_WORLD_SIZE: world_size,
            config.JOB: assignment.token,
            # Half of the test's time: a rank that waits in vain reports for which rank, before the
            # test ends.
            config.TIMEOUT_S: repr(assignment.timeout_s / 2),
        }

    # --- pytest's hooks ---------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Serve the driver until it closes the connection."""
        self._session, self._config = session, session.config
        self._loop.watch()  # pytest has redirected tracebacks of crashes
        self._loop.tell(Reply("ready"))
        self._loop.serve()
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Store every test before other plugins deselect some: the driver has already selected."""
        self._items.update((key_of(item), item) for item in items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Store the reason why a file could not be collected."""
        if not report.passed:
            self._problems.append(report.longreprtext)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Add the driver's details about an exception."""
        outcome: Any = yield
        report = outcome.get_result()
        if call.excinfo is not None:
            report.gpucoll_kind = call.excinfo.typename
            report.gpucoll_follows = follows_another(call.excinfo.value)
            for opened in set(communicator._open) - self._before:
                opened._group.note_exception(call.excinfo.value)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store a report; a rank that failed aborts its communicators, to notify the others."""
        if type(report) is pytest.TestReport and not report.passed and report.when != "teardown":
            self.has_failed = True
            for opened in set(communicator._open) - self._before:
                opened.abort()
        hook = self._config.hook
        self._reports.append(hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        """Store a warning of a test."""
        if when != "config":
            shown = {
                "message": warning_message.message,
                "filename": warning_message.filename,
                "lineno": warning_message.lineno,
            }
            self._warnings.append(shown)

    @pytest.fixture
    def tmp_path(self) -> Path:
        """One folder shared by all ranks of a test."""
        assert self.assignment is not None
        path = Path(self.assignment.tmp_path)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path


class Terminal:
    """The terminal for other plugins such as pytest-timeout: writes to the rank's stderr.

    It forwards to pytest's reporter but hides its hooks, since a rank reports nothing itself.
    """

    def __init__(self, rank_config: pytest.Config) -> None:
        from _pytest.terminal import TerminalReporter

        self._reporter = TerminalReporter(rank_config, sys.stderr)

    def __getattr__(self, name: str) -> Any:  # of the reporter
        return getattr(self._reporter, name)


def start(loop: RankLoop, setup: SessionSetup) -> None:
    """Run a pytest session until the driver closes the connection."""
    from _pytest.config import Config

    os.chdir(setup.folder)
    sys.argv[:] = setup.argv
    with measuring.measured(setup.coverage):
        rank_config = Config.fromdictargs(setup.options_of(loop.rank), setup.arguments)
        # Other plugins recognise by it that this process does not write reports.
        rank_config.workerinput = setup.workerinput  # type: ignore[attr-defined]
        rank_config.args = []  # files are collected when they are needed
        loop.session = RankSession(loop)
        rank_config.pluginmanager.register(loop.session, RANK_PLUGIN)
        rank_config.pluginmanager.register(Terminal(rank_config), "terminalreporter")
        rank_config.hook.pytest_cmdline_main(config=rank_config)


def follows_another(error: BaseException | None) -> bool:
    """Return whether another rank's failure caused an exception or one in its chain."""
    while error is not None:
        if isinstance(error, FOLLOWERS):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
