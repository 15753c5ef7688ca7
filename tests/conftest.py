"""What holds for every test: which gpucoll is tested, and an environment without a launcher."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import gpucoll
from gpucoll.testing.server import LAUNCHER_VARIABLES
from gpucoll.version import __version__
from tests.compiling import compile_beforehand
from tests.doubles import Builder
from tests.dtypes import covering
from tests.durations import DurationRecorder
from tests.hosts import PlayedHosts
from tests.import_order import Importer, is_whole_run
from tests.passed_before import PASSED, Recorder, leave_out_passed
from tests.ranks import Pools, RankServer
from tests.run_order import longest_first
from tests.tiers import add_options, describe_left, leave_out_tiers, receive_left, send_left

# The scripts of tools/ import each other by their bare names, and so do their tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
BARE_FOLDERS = ("kernels", "backends", "bench")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"leave out the tests that a run with {PASSED}=FILE says have passed"
    parser.addoption("--without-passed", type=Path, metavar="FILE", help=text)
    add_options(parser)
    text = "write how long each test takes to tests/durations.json"
    parser.addoption("--write-durations", action="store_true", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("numprocesses", None) and is_whole_run(session.config):
        compile_beforehand(RankServer)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_tiers(config, items)
    leave_out_passed(config, items)
    if is_whole_run(config):
        longest_first(items)


def pytest_collection_finish() -> None:
    """Keep what collecting made out of later collections of garbage: each would take 0.4 s."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    send_left(session)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    receive_left(node.config, getattr(node, "workeroutput", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if line := describe_left(terminalreporter.config):
        terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    passed = os.environ.pop(PASSED, None)  # or a test that starts pytest would write over it
    if passed and not hasattr(config, "workerinput"):  # xdist's workers tell their controller
        config.pluginmanager.register(Recorder(Path(passed)))
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder())
    config.pluginmanager.register(Importer())
    # Whoever runs the tests inside a job (a batch system, torchrun) must not make `init()` join it.
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    # A script's background job begins with these ignored, and so would all that the tests start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) == signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_report_header() -> str:
    return f"gpucoll {__version__} from {Path(gpucoll.__file__).parent}"


@pytest.fixture(scope="session", autouse=True)
def no_second_copy_of_a_folder():
    """Fail where a test loaded ``kernels/`` and the like by their bare names, beside gpucoll's."""
    yield
    loaded = [name for name in BARE_FOLDERS if name in sys.modules]
    assert not loaded, f"imported by bare name, a second copy: {loaded}; import gpucoll.<name>"


@pytest.fixture(scope="session")
def rank_server():
    """The process that real ranks are forked from; see `tests.ranks`."""
    with RankServer() as server:
        yield server


@pytest.fixture(scope="session")
def ranks(rank_server):
    """Real ranks: ``ranks.call(4, function)`` returns ``function(comm)`` of each of four."""
    rank_server.compile(covering())  # once, instead of once in every rank
    pools = Pools(rank_server)
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def hosts(ranks, tmp_path_factory):
    """Ranks of hosts that are played here: ``hosts.call("aab", function)``; see `tests.hosts`."""
    return PlayedHosts(ranks, tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="session")
def hosts_with_schedules(ranks, tmp_path_factory):
    """The same, whose larger calls go by schedules; see `tests.hosts.Meeting`."""
    return PlayedHosts(ranks, tmp_path_factory.mktemp("hosts"), by_schedules=True)


@pytest.fixture(scope="session")
def doubles(tmp_path_factory):
    """Doubles of NCCL, RCCL and the GPU drivers, compiled when asked for; see `tests.doubles`."""
    return Builder(tmp_path_factory.mktemp("doubles"))


@pytest.fixture(scope="session")
def gpu_ranks(rank_server):
    """Ranks that may load doubles, which then stay in them: apart from those of other tests."""
    pools = Pools(rank_server)
    yield pools
    pools.close()
