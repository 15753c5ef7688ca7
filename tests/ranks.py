"""Real ranks for tests, reused from test to test: a call on four of them takes milliseconds.

>>> with RankServer() as server:
...     pools = Pools(server)
...     pools.call(4, function, 1, 2)  # function(comm, 1, 2) on each of 4 ranks: their results

Each call gets a communicator of its own, a duplicate of the pool's. A pool that lost a rank is
thrown away. Every wait has a deadline, here and in the ranks.
"""

from __future__ import annotations

import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from gpucoll.errors import AbortedError, DeadlineError, PeerLostError
from tests.rank_server import MAX_PACKET_BYTES, Reply, Request

ROOT = Path(__file__).resolve().parent.parent
CALL_TIMEOUT_S = 60.0
START_TIMEOUT_S = 240.0
"""The loops may have to be compiled."""
FOLLOWERS = (AbortedError, PeerLostError, DeadlineError)
"""What ranks raise since another one failed."""


@dataclass(frozen=True)
class Ended:
    """In the place of a reply: the rank's process ended, with this exit code (-N: by signal N)."""

    exit_code: int


class RankError(Exception):
    """A rank's traceback, as the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RankServer:
    """The warm process that ranks are forked from."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output = os.memfd_create("rank-output")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,  # Ctrl-C in the tests' terminal is not for the ranks
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        self._exit_codes: dict[int, int] = {}
        self._warm: set[tuple[str, str]] = set()
        self._expect("ready", START_TIMEOUT_S)

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def compile(self, kernels: Iterable[tuple[str, str]]) -> None:
        """Compile (dtype, operation) kernels once, for all ranks that are forked from here on."""
        missing = sorted(set(kernels) - self._warm)
        if missing:
            self._channel.send(pickle.dumps(("kernels", missing)))
            self._expect("warm", START_TIMEOUT_S)
            self._warm.update(missing)

    def fork(self, world_size: int) -> Pool:
        """Return new ranks."""
        pairs = [socket.socketpair() for _ in range(world_size)]
        token = secrets.token_hex(8)
        try:
            request = pickle.dumps(("fork", token))
            socket.send_fds(self._channel, [request], [theirs.fileno() for _, theirs in pairs])
        finally:
            for _, theirs in pairs:
                theirs.close()
        pids = self._expect("forked", CALL_TIMEOUT_S)
        connections = [Connection(ours.detach()) for ours, _ in pairs]
        return Pool(self, [Rank(pid, link) for pid, link in zip(pids, connections, strict=True)])

    def exit_code(self, pid: int, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """Wait for a rank's end and return its exit code."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._exit_codes:
            self._receive(deadline, f"the end of process {pid}")
        return self._exit_codes[pid]

    def output(self) -> str:
        """Return what the server and its ranks wrote so far; the last of it, where it is long."""
        size = os.fstat(self._output).st_size
        return os.pread(self._output, 20_000, max(size - 20_000, 0)).decode(errors="replace")

    def close(self) -> None:
        """End the server, and with it all ranks."""
        self._channel.close()
        self._process.wait(CALL_TIMEOUT_S)
        os.close(self._output)

    def _expect(self, kind: str, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            got, content = self._receive(deadline, kind)
            if got == kind:
                return content

    def _receive(self, deadline: float, what: str) -> tuple[str, Any]:
        left = max(deadline - time.monotonic(), 0)
        if not select.select([self._channel], [], [], left)[0]:
            raise TimeoutError(f"rank server: no {what!r}; it wrote: {self.output()}")
        data = self._channel.recv(MAX_PACKET_BYTES)
        if not data:
            raise EOFError(f"the rank server has ended; it wrote: {self.output()}")
        kind, content = pickle.loads(data)
        if kind == "ended":
            self._exit_codes[content[0]] = content[1]
        return kind, content


@dataclass(frozen=True)
class Rank:
    """One rank's process."""

    pid: int
    connection: Connection

    def send(self, number: int) -> None:
        """Send a signal; a process that has ended gets none."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass


class Pool:
    """The ranks of one world."""

    def __init__(self, server: RankServer, ranks: Sequence[Rank]) -> None:
        self._server = server
        self.ranks = ranks
        self.is_damaged = False
        """Whether a rank has ended, or did not answer: not to be used again."""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def start(
        self, function: Callable[..., Any], *args: Any, only: Sequence[int] = (), **options: Any
    ) -> None:
        """Have every rank (or `only` some) call ``function(who, *args)``; `collect` the replies."""
        data = cloudpickle.dumps(Request(function, args, **options))
        for place, rank in enumerate(self.ranks):
            if not only or place in only:
                rank.connection.send_bytes(data)

    def collect(
        self, limit_s: float = CALL_TIMEOUT_S, only: Sequence[int] = ()
    ) -> list[Reply | Ended]:
        """Wait for every rank's reply, or end."""
        places = list(only) or list(range(self.world_size))
        replies: dict[int, Reply | Ended] = {}
        deadline = time.monotonic() + limit_s
        while len(replies) < len(places):
            open_links: dict[Any, int] = {
                self.ranks[at].connection: at for at in places if at not in replies
            }
            ready = wait(list(open_links), max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(self._explain_hang(sorted(open_links.values()), limit_s))
            for link in ready:
                place = open_links[link]
                replies[place] = self._read(self.ranks[place])
        return [replies[place] for place in places]

    def call(
        self, function: Callable[..., Any], *args: Any, limit_s: float = CALL_TIMEOUT_S, **options
    ) -> list[Any]:
        """Call ``function(comm, *args)`` on every rank; return the results, or raise an error."""
        self.start(function, *args, **options)
        return results(self.collect(limit_s), self._server)

    def exit_code(self, rank: int) -> int:
        """Wait for a rank's end and return its exit code."""
        self.is_damaged = True
        return self._server.exit_code(self.ranks[rank].pid)

    def hang_up(self) -> None:
        """Tell the ranks to leave; those of a damaged pool are ended."""
        for rank in self.ranks:
            rank.connection.close()
            if self.is_damaged:
                rank.send(signal.SIGKILL)

    def close(self) -> list[int]:
        """Let the ranks leave; return their exit codes."""
        self.hang_up()
        return [self._server.exit_code(rank.pid) for rank in self.ranks]

    def _read(self, rank: Rank) -> Reply | Ended:
        try:
            reply: Reply = cloudpickle.loads(rank.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.is_damaged = True
            return Ended(self._server.exit_code(rank.pid))
        return reply

    def _explain_hang(self, silent: list[int], limit_s: float) -> str:
        self.is_damaged = True
        for place in silent:
            self.ranks[place].send(signal.SIGUSR1)  # a traceback of each thread
        for place in silent:
            select.select([self.ranks[place].connection], [], [], 0.2)  # time to write it
        for rank in self.ranks:
            rank.send(signal.SIGKILL)
        return (
            f"ranks {silent} of {self.world_size} did not answer within {limit_s:g} s; "
            f"what ranks wrote last:\n{self._server.output()}"
        )


def results(replies: Sequence[Reply | Ended], server: RankServer) -> list[Any]:
    """Return the ranks' results, or raise the error that the others' errors follow from."""
    failed = []
    for rank, reply in enumerate(replies):
        if isinstance(reply, Ended):
            text = f"rank {rank} ended with exit code {reply.exit_code}:\n{server.output()}"
            raise RankError(text)
        if reply.error is not None:
            failed.append((isinstance(reply.error, FOLLOWERS), rank, reply))
    if failed:
        _, rank, reply = min(failed, key=lambda item: item[:2])
        assert reply.error is not None
        raise reply.error from RankError(f"on rank {rank}:\n{reply.trace}")
    return [reply.result for reply in replies if isinstance(reply, Reply)]


class Pools:
    """A pool for each number of ranks, made when needed and again when one was damaged."""

    def __init__(self, server: RankServer) -> None:
        self.server = server
        self._pools: dict[int, Pool] = {}

    def pool(self, world_size: int) -> Pool:
        """Return the ranks that are kept for this world size."""
        kept = self._pools.get(world_size)
        if kept is None or kept.is_damaged:
            if kept is not None:
                kept.close()
            self._pools[world_size] = kept = self.server.fork(world_size)
        return kept

    def call(self, world_size: int, function: Callable[..., Any], *args: Any, **options) -> list:
        """Call ``function(comm, *args)`` on each of `world_size` ranks; return the results."""
        return self.pool(world_size).call(function, *args, **options)

    def replies(
        self, world_size: int, function: Callable[..., Any], *args: Any, **options
    ) -> list[Reply | Ended]:
        """The same, but return how it went on each rank."""
        pool = self.pool(world_size)
        pool.start(function, *args, **options)
        return pool.collect()

    def close(self) -> None:
        """Let all ranks leave."""
        for pool in self._pools.values():
            pool.hang_up()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
