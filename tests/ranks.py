"""Real ranks that call functions of the tests: the engine of `gpucoll.testing`, without pytest.

>>> with RankServer() as server:
...     pools = Pools(server)
...     pools.call(4, function, 1, 2)  # function(comm, 1, 2) on each of 4 ranks: their results

Each call gets a communicator of its own. A pool that lost a rank is thrown away. A test whose body
itself runs on ranks has ``@pytest.mark.ranks``; this is for tests that look at ranks from outside.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from gpucoll import config, init
from gpucoll.api import communicator
from gpucoll.backends.choice import Wish
from gpucoll.config import environment
from gpucoll.rendezvous.job import Job
from gpucoll.testing import pool, server
from gpucoll.testing.pool import CALL_TIMEOUT_S, Answer, Ended, Silent
from gpucoll.testing.rank import RankLoop, Reply
from gpucoll.testing.session import FOLLOWERS
from tests.compiling import load_kernels, load_loops
from tests.waiting import collect

__all__ = ["Ended", "Pool", "Pools", "RankServer", "Reply", "Seat"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Options:
    """How a function is called in a rank."""

    gives: str = "communicator"
    """``"communicator"``: of all ranks, a fresh one; ``"seat"``: the rank's `Seat`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the making of the communicator and the call."""
    timeout_s: float = 20.0
    """Default deadline of the communicator's waits."""


@dataclass
class Seat:
    """A rank without a communicator: it can make one."""

    rank: int
    world_size: int
    token: str

    def init(
        self, timeout_s: float = 20.0, *, meet_s: float | None = None, **options: Any
    ) -> communicator.Communicator:
        """Join the other ranks of the pool.

        A deadline that is to run out in a test is short; `meet_s` gives busy ranks longer to meet.
        """
        os.environ[config.JOB] = self.token
        place = {"rank": self.rank, "world_size": self.world_size, **options}
        made = init(**place, timeout_s=timeout_s if meet_s is None else meet_s)
        made._group.timeout_s = timeout_s
        cast(Any, made._group)._set_timeout(timeout_s)
        return made


_failed: list[int] = []
"""In a rank: the calls that have raised since it collected garbage."""


@contextlib.contextmanager
def unchanged_environment() -> Iterator[None]:
    """Undo what a test sets: its ranks serve the next test, too."""
    before = dict(os.environ)
    try:
        yield
    finally:
        if os.environ != before:
            os.environ.clear()
            os.environ.update(before)


def call_in_rank(loop: RankLoop, number: int, options: Options, function: Any, args: Any) -> Any:
    """Call a function in a rank; `number` is the call's, the same on all ranks."""
    if _failed:  # its traceback may have kept communicators, with threads that the next one counts
        _failed.clear()
        collect()
    try:
        with unchanged_environment(), environment(options.environment):
            if options.gives == "seat":
                return function(Seat(loop.rank, loop.world_size, loop.token), *args)
            job = Job(loop.rank, loop.world_size, f"{loop.token}/{number}", "tests")
            limit = options.timeout_s
            with communicator.create(job, max(limit, 20.0), limit, Wish("cpu")) as made:
                return function(made, *args)
    except BaseException:
        _failed.append(number)
        raise


PRELOADED = (
    *("gpucoll.algorithms", "gpucoll.backends.cpu", "gpucoll.backends.direct"),
    *("gpucoll.backends.gpu", "gpucoll.backends.nccl", "gpucoll.calls"),
    *("gpucoll.devices", "gpucoll.group", "gpucoll.kernels"),
    *("gpucoll.rendezvous", "gpucoll.topology", "gpucoll.transport"),
)
NOT_PRELOADED = ("gpucoll.transport.tcp.secure", "gpucoll.transport.tcp.tls")
"""TLS: a test looks whether ranks without certificates load it."""


def prepare_for_ranks() -> None:
    """Import what ranks come to need, and compile it: each would take a while for it."""
    for package in PRELOADED:
        path = importlib.import_module(package).__path__
        for found in pkgutil.walk_packages(path, f"{package}."):
            if not found.name.startswith(NOT_PRELOADED):
                try:
                    importlib.import_module(found.name)
                except ImportError:  # it is for a library that is not installed
                    pass
    for name in ("ml_dtypes", "numba", "ssl", "tests.collective_cases", "tests.hosts"):
        importlib.import_module(name)
    load_loops()


class RankError(Exception):
    """A rank's traceback, as the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Pool(pool.Pool):
    """The ranks of one world."""

    _calls = 0

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        only: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        """Have every rank (or `only` some) call ``function(who, *args)``; `collect` the replies."""
        self._calls += 1
        call = (call_in_rank, self._calls, Options(**options), function, args)
        super().start(*call, only=only or None)

    def collect(
        self, limit_s: float = CALL_TIMEOUT_S, only: Sequence[int] | None = None
    ) -> list[Answer]:
        """Wait for every rank's reply, or end."""
        answers = super().collect(limit_s, only or None)
        silent = {rank: item for rank, item in enumerate(answers) if isinstance(item, Silent)}
        if silent:
            failed = [item for item in answers if isinstance(item, Reply) and item.error]
            traces = "\n".join(
                [f"rank {rank}: {item.trace}" for rank, item in silent.items()]
                + [f"another rank had failed:\n{item.trace}" for item in failed]
            )
            raise TimeoutError(
                f"ranks {[*silent]} of {self.world_size} did not answer within {limit_s:g} s:\n"
                f"{traces}{self.output()}"
            )
        return answers

    def call(
        self, function: Callable[..., Any], *args: Any, limit_s: float = CALL_TIMEOUT_S, **options
    ) -> list[Any]:
        """Call ``function(comm, *args)`` on every rank; return the results, or raise an error."""
        self.start(function, *args, **options)
        return self.results(limit_s)

    def results(self, limit_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Wait for what every rank returns, or raise an error of one."""
        answers = self.collect(limit_s)
        failed = []
        for rank, answer in enumerate(answers):
            if isinstance(answer, Ended):
                text = f"rank {rank} ended with exit code {answer.exit_code}:\n{self.output()}"
                raise RankError(text)
            if isinstance(answer, Reply) and answer.error is not None:
                failed.append((isinstance(answer.error, FOLLOWERS), rank, answer))
        if failed:
            _, rank, first = min(failed, key=lambda item: item[:2])
            assert first.error is not None
            raise first.error from RankError(f"on rank {rank}:\n{first.trace}")
        return [answer.result for answer in answers if isinstance(answer, Reply)]

    def output(self) -> str:
        """Return what the ranks wrote."""
        return "".join(rank.stdout.text() + rank.stderr.text() for rank in self.ranks)


def _be_there(loop: RankLoop) -> None:
    """Do nothing: a rank that answers has started."""


class RankServer(server.RankServer):
    """The warm process that ranks are forked from."""

    pool_type = Pool
    _warm: frozenset[tuple[str, str]] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.call(prepare_for_ranks)

    def fork(self, count: int, **options: Any) -> Pool:
        """Return new ranks, all of which have started: deadlines are short on a busy machine."""
        made = super().fork(count, **options)
        assert isinstance(made, Pool)
        pool.Pool.start(made, _be_there)
        made.collect()
        return made

    def compile(self, kernels: Iterable[tuple[str, str]]) -> None:
        """Compile (dtype, operation) kernels once, for all ranks that are forked from here on."""
        missing = sorted(set(kernels) - self._warm)
        if missing:
            self.call(load_kernels, missing)
            self._warm |= set(missing)


class Pools:
    """A pool for each number of ranks, made when needed and again when one was damaged."""

    def __init__(self, rank_server: RankServer) -> None:
        self._server = rank_server
        self._pools: dict[int, Pool] = {}

    def pool(self, world_size: int) -> Pool:
        """Return the ranks that are kept for this world size."""
        kept = self._pools.get(world_size)
        if kept is None or kept.is_damaged:
            if kept is not None:
                kept.close()
            self._pools[world_size] = kept = self._server.fork(world_size)
        return kept

    def call(self, world_size: int, function: Callable[..., Any], *args: Any, **options) -> list:
        """Call ``function(comm, *args)`` on each of `world_size` ranks; return the results."""
        return self.pool(world_size).call(function, *args, **options)

    def replies(
        self, world_size: int, function: Callable[..., Any], *args: Any, **options
    ) -> list[Answer]:
        """The same, but return how it went on each rank."""
        kept = self.pool(world_size)
        kept.start(function, *args, **options)
        return kept.collect()

    def close(self) -> None:
        """Let all ranks leave."""
        for kept in self._pools.values():
            kept.close()
        self._pools.clear()
