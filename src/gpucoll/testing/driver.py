"""Run tests on ranks, from pytest's own process."""

from __future__ import annotations

import re
import secrets
import warnings
from pathlib import Path
from typing import Any

import pytest

from gpucoll.testing import in_ranks
from gpucoll.testing.assignment import Assignment, Outcome, key_of
from gpucoll.testing.merge import RankResults
from gpucoll.testing.pool import Answer, Pool
from gpucoll.testing.problems import spans
from gpucoll.testing.rank import Reply
from gpucoll.testing.server import START_TIMEOUT_S, RankServer
from gpucoll.testing.session_setup import SessionSetup


class RankDriver:
    """The ranks of a pytest session. They are kept, so rank r is the same process in every test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._server: RankServer | None = None
        self._pool: Pool | None = None
        self._numbers = 0
        self._is_shown = config.getoption("capture") == "no"

    def run(
        self, item: pytest.Item, world_size: int, timeout_s: float, following: pytest.Item | None
    ) -> list[pytest.TestReport]:
        """Run a test on ranks and return its reports.

        Parameters
        ----------
        item : pytest.Item
            The test.
        world_size : int
            The number of ranks.
        timeout_s : float
            How long the test may take, once every rank has imported it, in seconds.
        following : pytest.Item, optional
            The next test that runs on ranks.
        """
        self._numbers += 1
        folder = f"{re.sub(r'[^A-Za-z0-9_]', '_', item.name)[:30]}-{self._numbers}"
        asked = Assignment(
            key=key_of(item),
            file=str(item.path),
            world_size=world_size,
            timeout_s=timeout_s,
            token=secrets.token_hex(8),
            tmp_path=str(self._basetemp() / folder),
            next_key=None if following is None else key_of(following),
        )
        try:
            pool = self._ready_pool(world_size)
            answers = self._answers(pool, asked)
        except EOFError:  # the server is gone, and with it the ranks
            self._abandon()
            raise
        except BaseException:
            if self._pool is not None:
                self._pool.kill()
            raise
        self._repeat_warnings(item, answers)
        results = RankResults(item, answers, lambda rank: pool.ranks[rank].trace.text())
        return results.reports(self._sections(pool, world_size))

    def close(self) -> None:
        """Let all ranks end."""
        pool, server = self._pool, self._server
        self._pool = self._server = None
        try:
            if pool is not None:
                pool.close()
        except TimeoutError as error:
            warnings.warn(
                pytest.PytestWarning(f"ranks hang in their last teardown and are killed: {error}"),
                stacklevel=1,
            )
        finally:
            if server is not None:
                server.close()

    def _abandon(self) -> None:
        pool, server = self._pool, self._server
        self._pool = self._server = None
        if pool is not None:
            for rank in pool.ranks:
                rank.close()
        if server is not None:
            server.close()

    # --- ranks ------------------------------------------------------------------------------------

    def _ready_pool(self, world_size: int) -> Pool:
        """Return at least `world_size` ranks, each with a pytest session."""
        if self._server is None:
            self._server = RankServer()
        if self._pool is not None and self._pool.is_damaged:
            damaged, self._pool = self._pool, None
            damaged.close()
        present = self._pool.world_size if self._pool else 0
        if world_size > present:
            more = self._server.fork(
                world_size - present, first_rank=present, is_shown=self._is_shown
            )
            if self._pool is None:
                self._pool = more
            else:
                self._pool.ranks += more.ranks
            self._start_sessions(self._pool, range(present, world_size))
        assert self._pool is not None
        return self._pool

    def _start_sessions(self, pool: Pool, places: range) -> None:
        folder = self._basetemp() / "ranks" / secrets.token_hex(4)
        folder.mkdir(mode=0o700, parents=True)
        pool.start(in_ranks.start, SessionSetup.of(self._config, folder), only=places)
        for rank, answer in zip(places, pool.collect(START_TIMEOUT_S, places), strict=True):
            if answer != Reply("ready"):
                text = answer.trace if isinstance(answer, Reply) else str(answer)
                written = pool.ranks[rank].stderr.text()
                raise RuntimeError(
                    f"rank {rank} could not start a pytest session: {text}\n{written}"
                )

    def _answers(self, pool: Pool, asked: Assignment) -> list[Answer]:
        places = range(asked.world_size)
        for rank in pool.ranks:
            for recording in (rank.stdout, rank.stderr, rank.trace):
                recording.clear()
        pool.start(in_ranks.collect, asked, only=places)
        answers = pool.collect(START_TIMEOUT_S, places)
        if all(answer == Reply() for answer in answers):
            pool.start(in_ranks.run, asked, only=places)
            answers = pool.collect(asked.timeout_s, places)
            if not all(isinstance(item, Reply) and item.error is None for item in answers):
                pool.kill()
        return answers

    # --- output and warnings of ranks -------------------------------------------------------------

    def _basetemp(self) -> Path:
        folder: Path = self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        return folder

    def _sections(self, pool: Pool, world_size: int) -> list[tuple[str, str]]:
        """Return what the ranks wrote, without repeating equal texts."""
        found: dict[tuple[str, str], list[int]] = {}
        for rank, handle in enumerate(pool.ranks[:world_size]):
            for stream, recording in (("stdout", handle.stdout), ("stderr", handle.stderr)):
                if text := recording.text():
                    found.setdefault((stream, text), []).append(rank)
        return [
            (f"Captured {stream} of {spans(ranks)}", text)
            for (stream, text), ranks in sorted(found.items())
        ]

    def _repeat_warnings(self, item: pytest.Item, answers: list[Answer]) -> None:
        """Forward the ranks' warnings, without repeating equal ones."""
        seen: set[Any] = set()
        for answer in answers:
            if not isinstance(answer, Reply) or not isinstance(answer.result, Outcome):
                continue
            for shown in answer.result.warnings:
                text = re.sub(r"\d+", "", str(shown["message"]))  # remove ranks and process ids
                identity = (text, shown["filename"], shown["lineno"])
                if identity in seen:
                    continue
                seen.add(identity)
                message = warnings.WarningMessage(
                    shown["message"], type(shown["message"]), shown["filename"], shown["lineno"]
                )
                item.ihook.pytest_warning_recorded.call_historic(
                    kwargs={
                        "warning_message": message,
                        "when": "runtest",
                        "nodeid": item.nodeid,
                        "location": None,
                    }
                )
