"""``@pytest.mark.ranks(4)``: the hooks, the marker and the fixture `comm`.

Until a test with the marker runs, it imports hardly anything except pytest.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from gpucoll import progress
from gpucoll.testing.assignment import RANK_PLUGIN

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator
    from gpucoll.testing.driver import RankDriver

WORLD_SIZE = "_gpucoll_world_size"
"""The name of the parameter of a test that runs with several numbers of ranks."""
DEFAULT_TIMEOUT_S = 60.0

_shown_before: pytest.StashKey[progress.Show] = pytest.StashKey()
_driver: pytest.StashKey[RankDriver] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini option."""
    parser.addini(
        "gpucoll_timeout_s",
        "time limit of a test with the marker `ranks`, in seconds (60)",
        default=str(DEFAULT_TIMEOUT_S),
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and let what takes long show itself in spite of captured output."""
    config.stash[_shown_before] = progress.show_by(_VisibleDisplay(config))
    config.addinivalue_line(
        "markers",
        "ranks(*world_sizes, timeout_s=60): run the test on this many ranks, each in its own "
        "process, once for each given number; the fixture `comm` is their communicator",
    )


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """Return the communicator of this test's ranks."""
    session = request.config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is None:
        pytest.fail("the fixture comm needs @pytest.mark.ranks(number of ranks)", pytrace=False)
    import gpucoll

    with gpucoll.init() as communicator:
        yield communicator
        # the test has failed already, so failures of pending works are not news
        if session.has_failed:
            with contextlib.suppress(gpucoll.GpucollError):
                communicator.close()


@pytest.fixture(name=WORLD_SIZE)
def _world_size(request: pytest.FixtureRequest) -> int:
    world_size: int = request.param
    return world_size


# --- which tests, on how many ranks ---------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and not problem_of(mark) and len(mark.args) > 1:
        metafunc.fixturenames.append(WORLD_SIZE)
        ids = [f"ranks={count}" for count in mark.args]
        metafunc.parametrize(WORLD_SIZE, mark.args, indirect=True, ids=ids)


def problem_of(mark: pytest.Mark) -> str:
    """Return what is wrong with a marker; empty if it is correct.

    A test with a wrong marker fails when it runs. An error during collection would not name the
    test, and no other test of the file would run.
    """
    counts = all(type(count) is int and count >= 1 for count in mark.args)
    timeout_s = mark.kwargs.get("timeout_s", 1)
    has_time = isinstance(timeout_s, int | float) and timeout_s > 0
    if mark.args and counts and set(mark.kwargs) <= {"timeout_s"} and has_time:
        return ""
    given = [repr(item) for item in mark.args]
    given += [f"{name}={value!r}" for name, value in mark.kwargs.items()]
    return (
        "@pytest.mark.ranks takes one or more numbers of ranks, as in ranks(4) or "
        f"ranks(2, 3, timeout_s=10); got ranks({', '.join(given)})"
    )


def world_size_of(item: pytest.Item) -> int | None:
    """Return the number of ranks of a test; None without a marker or with a wrong one."""
    mark = item.get_closest_marker("ranks")
    if mark is None or problem_of(mark):
        return None
    callspec = getattr(item, "callspec", None)
    return int(callspec.params.get(WORLD_SIZE, mark.args[0]) if callspec else mark.args[0])


def timeout_of(item: pytest.Item) -> float:
    """Return the time limit of a test, in seconds."""
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    return float(mark.kwargs.get("timeout_s") or item.config.getini("gpucoll_timeout_s"))


# --- running tests ----------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test with the marker on ranks; fixtures, body and teardown all run there."""
    mark = item.get_closest_marker("ranks")
    if mark is None or item.config.pluginmanager.has_plugin(RANK_PLUGIN):
        return None
    hook = item.ihook
    if hasattr(hook, "pytest_timeout_cancel_timer"):
        # pytest-timeout measures the time in each rank instead
        hook.pytest_timeout_cancel_timer(item=item)
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in run_on_ranks(item, mark, nextitem):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def run_on_ranks(
    item: pytest.Item, mark: pytest.Mark, nextitem: pytest.Item | None
) -> list[pytest.TestReport]:
    """Return the reports of a test."""
    reports: list[pytest.TestReport] = []

    def run() -> None:
        world_size = world_size_of(item)
        if world_size is None:
            pytest.fail(problem_of(mark), pytrace=False)
        if len(mark.args) > 1 and not hasattr(item, "callspec"):
            pytest.fail("a unittest test cannot have parameters: give a single number of ranks")
        driver = item.config.stash.get(_driver, None)
        if driver is None:
            from gpucoll.testing.driver import RankDriver

            driver = item.config.stash[_driver] = RankDriver(item.config)
        following = next_on_ranks(item, nextitem)
        reports.extend(driver.run(item, world_size, timeout_of(item), following))

    def tear_down() -> None:
        # Nothing was set up here for this test; what earlier tests have left is torn down now.
        item.session._setupstate.teardown_exact(nextitem)

    stopping = (pytest.exit.Exception, KeyboardInterrupt)
    made = pytest.CallInfo.from_call(run, "call", reraise=stopping)
    if made.excinfo is not None:
        reports.append(item.ihook.pytest_runtest_makereport(item=item, call=made))
    torn_down = pytest.CallInfo.from_call(tear_down, "teardown", reraise=stopping)
    if torn_down.excinfo is not None or made.excinfo is not None:
        reports = [report for report in reports if report.when != "teardown"]
        reports.append(item.ihook.pytest_runtest_makereport(item=item, call=torn_down))
    return reports


def next_on_ranks(item: pytest.Item, nextitem: pytest.Item | None) -> pytest.Item | None:
    """Return the next test that runs on ranks."""
    if nextitem is None or world_size_of(nextitem) is not None:
        return nextitem
    items = item.session.items
    rest = items[items.index(nextitem) :] if nextitem in items else []
    return next((later for later in rest if world_size_of(later) is not None), None)


@pytest.hookimpl(hookwrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Let the ranks end before other plugins collect their results, such as pytest-cov."""
    yield
    close(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the ranks end, unless they already have."""
    close(config)
    progress.show_by(config.stash[_shown_before])


def close(config: pytest.Config) -> None:
    """Let the ranks end."""
    driver = config.stash.get(_driver, None)
    if driver is not None:
        del config.stash[_driver]
        driver.close()


class _VisibleDisplay:
    """Shows work that takes long on pytest's own stderr: see `gpucoll.progress.Show`."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager
        self._is_worker = hasattr(config, "workerinput")
        # Workers of pytest-xdist share the terminal with their controller.
        self._display = progress.Display(in_place=False if self._is_worker else None)
        self._start = "\n" if self._is_worker else ""

    def __call__(self, text: str, stays: bool) -> None:
        """Show a text below what pytest has written."""
        if self._is_worker and text.startswith(progress.WAITING):
            return  # one of many
        capture = self._plugins.get_plugin("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            if (reporter := self._plugins.get_plugin("terminalreporter")) is not None:
                reporter.ensure_newline()
                reporter.flush()
            self._display(self._start + text, stays)
        self._start = ""
