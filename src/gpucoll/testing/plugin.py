"""``@pytest.mark.ranks(4)``: the hooks, the marker and the fixture `comm`.

Imports next to nothing but pytest until a test with the marker runs.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from gpucoll.testing.assignment import RANK_PLUGIN

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator
    from gpucoll.testing.driver import RankDriver

WORLD_SIZE = "_gpucoll_world_size"
"""The parameter of a test that runs on several numbers of ranks."""
DEFAULT_TIMEOUT_S = 60.0

_driver: pytest.StashKey[RankDriver] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini option."""
    parser.addini(
        "gpucoll_timeout_s",
        "how long a test with the marker `ranks` may take, in seconds (60)",
        default=str(DEFAULT_TIMEOUT_S),
    )


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker."""
    config.addinivalue_line(
        "markers",
        "ranks(*world_sizes, timeout_s=60): run the test on so many ranks, each in its own "
        "process, once for each number given; the fixture `comm` is their communicator",
    )


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    """Return the communicator of the ranks of this test."""
    session = request.config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is None:
        pytest.fail("the fixture comm needs @pytest.mark.ranks(number of ranks)", pytrace=False)
    import gpucoll

    with gpucoll.init() as communicator:
        yield communicator
        if session.has_failed:  # then what it left under way failed, which is no news
            with contextlib.suppress(gpucoll.GpucollError):
                communicator.close()


@pytest.fixture(name=WORLD_SIZE)
def _world_size(request: pytest.FixtureRequest) -> Any:
    return request.param


# --- which tests, on how many ranks ---------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None and not problem_of(mark) and len(mark.args) > 1:
        metafunc.fixturenames.append(WORLD_SIZE)
        ids = [f"ranks={count}" for count in mark.args]
        metafunc.parametrize(WORLD_SIZE, mark.args, indirect=True, ids=ids)


def problem_of(mark: pytest.Mark) -> str:
    """Return what is wrong with a marker; empty where nothing is.

    The test fails with it when its turn comes. An error while tests are collected would not say
    which test it is, and no other test of the file would run.
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
    """Return on how many ranks a test runs; None for one without ranks, or with a wrong marker."""
    mark = item.get_closest_marker("ranks")
    if mark is None or problem_of(mark):
        return None
    callspec = getattr(item, "callspec", None)
    return int(callspec.params.get(WORLD_SIZE, mark.args[0]) if callspec else mark.args[0])


def timeout_of(item: pytest.Item) -> float:
    """Return how long a test may take, in seconds."""
    mark = item.get_closest_marker("ranks")
    assert mark is not None
    return float(mark.kwargs.get("timeout_s") or item.config.getini("gpucoll_timeout_s"))


# --- running them ---------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test that has the marker on ranks; fixtures, body and teardown all run there."""
    mark = item.get_closest_marker("ranks")
    if mark is None or item.config.pluginmanager.has_plugin(RANK_PLUGIN):
        return None
    hook = item.ihook
    if hasattr(hook, "pytest_timeout_cancel_timer"):
        hook.pytest_timeout_cancel_timer(item=item)  # it keeps the time in each rank
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
            pytest.fail("a test of unittest has no parameters: give one number of ranks")
        driver = item.config.stash.get(_driver, None)
        if driver is None:
            from gpucoll.testing.driver import RankDriver

            driver = item.config.stash[_driver] = RankDriver(item.config)
        following = next_on_ranks(item, nextitem)
        reports.extend(driver.run(item, world_size, timeout_of(item), following))

    def tear_down() -> None:
        # Nothing was set up for this test here; what tests before it left has its end now.
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
    """Let the ranks leave before others look at what they left (pytest-cov does)."""
    yield
    close(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the ranks leave, if they have not."""
    close(config)


def close(config: pytest.Config) -> None:
    """Let the ranks leave."""
    driver = config.stash.get(_driver, None)
    if driver is not None:
        del config.stash[_driver]
        driver.close()
