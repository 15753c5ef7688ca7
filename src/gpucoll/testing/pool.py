"""Ranks that are called together, as their owner sees them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import cloudpickle

from gpucoll.testing.rank import TRACE_SIGNAL, Reply, Request
from gpucoll.testing.recording import Recording
from gpucoll.topology.processes import process_of

CALL_TIMEOUT_S = 60.0
TRACE_TIMEOUT_S = 2.0
POLL_S = 0.01


@dataclass(frozen=True)
class Ended:
    """Takes the place of a reply: the rank's process ended with this code (-N: by signal N)."""

    exit_code: int


@dataclass(frozen=True)
class Silent:
    """Takes the place of a reply: the rank did not answer in time, and was killed."""

    limit_s: float
    trace: str
    """A traceback of each of its threads, or why there is none."""
    verdict: str = ""
    """Who made the ranks wait, as `gpucoll why` says it; empty if that is not known."""


Answer = Reply | Ended | Silent


@dataclass(frozen=True)
class RankHandle:
    """One rank's process."""

    pid: int
    connection: Connection
    stdout: Recording
    stderr: Recording
    trace: Recording

    def send(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the rank, or its group; a process that has ended gets none."""
        try:
            (os.killpg if group else os.kill)(self.pid, number)
        except ProcessLookupError:
            pass

    def written_trace(self) -> str:
        """Wait for the traceback that `TRACE_SIGNAL` requests, and return it."""
        before, deadline = "", time.monotonic() + TRACE_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            text = self.trace.text()
            if text and text == before:
                return text
            before = text
        return before or self._why_no_trace()

    def _why_no_trace(self) -> str:
        process = process_of(self.pid)
        state = "?" if process is None else process.state
        why = {"T": "the process is stopped (SIGSTOP)", "D": "the process is blocked in the kernel"}
        return f"no traceback: {why.get(state, f'the process does not respond (state {state})')}\n"

    def close(self) -> None:
        """Close the connection and the recording of the output."""
        self.connection.close()
        for recording in (self.stdout, self.stderr, self.trace):
            recording.close()


class Parent(Protocol):
    """The parent process of the ranks."""

    def exit_code(self, pid: int) -> int:
        """Wait for a rank's end and return its exit code; raise TimeoutError if it does not end."""

    def let_go(self, pids: Sequence[int]) -> None:
        """Release the process ids of ranks that have ended."""


class Pool:
    """Ranks that are called together.

    Attributes
    ----------
    ranks : sequence of RankHandle
        In rank order.
    is_damaged : bool
        Whether a rank has ended or did not answer, so that the pool must not be used again.
    """

    def __init__(self, parent: Parent, ranks: Sequence[RankHandle]) -> None:
        self._parent = parent
        self.ranks = list(ranks)
        self.is_damaged = False
        self._exit_codes: list[int] | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def start(
        self, function: Callable[..., object], *args: object, only: Sequence[int] | None = None
    ) -> None:
        """Make every rank, or only those in `only`, call ``function(rank, *args)``."""
        data = cloudpickle.dumps(Request(function, args))
        for place in range(self.world_size) if only is None else only:
            try:
                self.ranks[place].connection.send_bytes(data)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the rank has ended: `collect` reports how

    def collect(
        self, limit_s: float = CALL_TIMEOUT_S, only: Sequence[int] | None = None
    ) -> list[Answer]:
        """Wait for the answers; if a rank does not answer in time, all ranks are killed."""
        places = range(self.world_size) if only is None else only
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < len(places):
            waiting: dict[Any, int] = {
                self.ranks[place].connection: place for place in places if place not in answers
            }
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                answers.update(self._give_up(sorted(waiting.values()), limit_s))
            for link in ready:
                place = waiting[link]
                answers[place] = self._read(self.ranks[place])
        return [answers[place] for place in places]

    def exit_code(self, rank: int) -> int:
        """Wait for a rank's end and return its exit code."""
        self.is_damaged = True
        if self._exit_codes is not None:
            return self._exit_codes[rank]
        return self._parent.exit_code(self.ranks[rank].pid)

    def kill(self) -> None:
        """Kill all ranks and their children."""
        self.is_damaged = True
        for rank in self.ranks:
            rank.send(signal.SIGKILL, group=True)

    def close(self) -> list[int]:
        """Let the ranks end, or kill those of a damaged pool; return their exit codes."""
        if self._exit_codes is not None:
            return self._exit_codes
        for rank in self.ranks:
            rank.close()
        if self.is_damaged:
            self.kill()
        pids = [rank.pid for rank in self.ranks]
        try:
            self._exit_codes = [self._parent.exit_code(pid) for pid in pids]
        except TimeoutError:
            self.kill()
            raise
        self._parent.let_go(pids)
        return self._exit_codes

    def _read(self, rank: RankHandle) -> Answer:
        try:
            reply: Reply = cloudpickle.loads(rank.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.is_damaged = True
            return Ended(self._parent.exit_code(rank.pid))
        return reply

    def _verdict(self) -> str:
        from gpucoll.observe.why import told  # few runs need it

        with contextlib.suppress(Exception):  # what the test did is more important than why
            return told([rank.pid for rank in self.ranks])
        return ""

    def _give_up(self, silent: list[int], limit_s: float) -> dict[int, Answer]:
        verdict = self._verdict()
        for place in silent:
            self.ranks[place].trace.clear()
            self.ranks[place].send(TRACE_SIGNAL)
        traces = {place: self.ranks[place].written_trace() for place in silent}
        self.kill()
        return {place: Silent(limit_s, trace, verdict) for place, trace in traces.items()}
