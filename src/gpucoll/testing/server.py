"""The owner's side of the fork server: start it, request ranks, receive their ends."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import cloudpickle

from gpucoll import config, progress
from gpucoll.testing.measuring import STARTED_BY_ENVIRONMENT
from gpucoll.testing.pool import Pool, RankHandle
from gpucoll.testing.rank import Request
from gpucoll.testing.recording import Recording

if TYPE_CHECKING:
    from gpucoll.calls.given import AnyObject

START_TIMEOUT_S = 240.0
"""It may have to compile the loops and to import the tests' modules."""
ANSWER_TIMEOUT_S = 60.0
MAX_PACKET_BYTES = 60_000

LAUNCHER_VARIABLES = (
    config.RANK,
    config.WORLD_SIZE,
    config.LOCAL_RANK,
    config.LOCAL_WORLD_SIZE,
    config.JOB,
    config.JOIN,
    config.MEET,
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    *config.MPI_AND_SLURM,
)
"""Variables of a surrounding job (a batch system, torchrun), which `init` must not join."""

ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
"""Several ranks share few CPUs, where threads of a library in each rank would compete."""


def rank_environment() -> dict[str, str]:
    """Return the environment of the server, which its ranks inherit."""
    dropped = {*LAUNCHER_VARIABLES, *STARTED_BY_ENVIRONMENT}
    kept = {name: text for name, text in os.environ.items() if name not in dropped}
    return {**dict.fromkeys(ONE_THREAD, "1"), **kept, config.CPU_ONLY: "1"}


class RankServer:
    """The warm process from which ranks are forked. It ends with its owner, and its ranks with it.

    Raises
    ------
    EOFError
        The server has ended; the message contains its output.
    TimeoutError
        The server does not answer.
    """

    pool_type: type[Pool] = Pool

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._output = Recording("rank-server")
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from gpucoll.testing import fork_server\n"
            f"fork_server.main({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output.descriptor,
                stderr=self._output.descriptor,
                # so that Ctrl-C in the tests' terminal does not reach the ranks
                start_new_session=True,
                env=rank_environment(),
            )
        self._exit_codes: dict[int, int] = {}
        try:
            self._expect("ready", START_TIMEOUT_S)
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[..., object], *args: object) -> AnyObject:
        """Call a function in the server, for all ranks that are forked afterwards."""
        data = cloudpickle.dumps(Request(function, args))
        self._channel.send(pickle.dumps(("call", data)))
        reply = self._expect("called", START_TIMEOUT_S)
        if reply.error is not None:
            raise reply.error
        return reply.result

    def fork(self, count: int, *, first_rank: int = 0, is_shown: bool = False) -> Pool:
        """Fork new ranks.

        Parameters
        ----------
        count : int
            The number of ranks.
        first_rank : int
            The number of the first one.
        is_shown : bool
            Whether their output goes where this process's goes, instead of being recorded.
        """
        pairs = [socket.socketpair() for _ in range(count)]
        try:
            request = pickle.dumps(("fork", (first_rank, secrets.token_hex(8))))
            socket.send_fds(self._channel, [request], [theirs.fileno() for _, theirs in pairs])
        finally:
            for _, theirs in pairs:
                theirs.close()
        pids = self._expect("forked", ANSWER_TIMEOUT_S)
        ranks = [
            self._handle(pid, ours, is_shown) for pid, (ours, _) in zip(pids, pairs, strict=True)
        ]
        return self.pool_type(self, ranks)

    def _handle(self, pid: int, link: socket.socket, is_shown: bool) -> RankHandle:
        recordings = [Recording(name) for name in ("stdout", "stderr", "trace")]
        outputs = [1, 2] if is_shown else [item.descriptor for item in recordings[:2]]
        socket.send_fds(link, [b"!"], [*outputs, recordings[2].descriptor])
        return RankHandle(pid, Connection(link.detach()), *recordings)

    def exit_code(self, pid: int, timeout_s: float = ANSWER_TIMEOUT_S) -> int:
        """Wait for a rank's end and return its exit code."""
        deadline = time.monotonic() + timeout_s
        while pid not in self._exit_codes:
            self._receive(deadline, f"the end of process {pid}")
        return self._exit_codes[pid]

    def let_go(self, pids: Sequence[int]) -> None:
        """Release ranks that have ended, which frees their process ids."""
        for pid in pids:
            del self._exit_codes[pid]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the server has ended
            self._channel.send(pickle.dumps(("let go", list(pids))))

    def close(self) -> None:
        """End the server, and with it all ranks."""
        self._channel.close()
        try:
            self._process.wait(ANSWER_TIMEOUT_S)
        finally:
            self._process.kill()
            self._output.close()

    def _expect(self, kind: str, timeout_s: float) -> AnyObject:
        deadline = time.monotonic() + timeout_s
        while True:
            got, content = self._receive(deadline, kind)
            if got == kind:
                return content

    def _receive(self, deadline: float, what: str) -> tuple[str, AnyObject]:
        left = max(deadline - time.monotonic(), 0)
        if not select.select([self._channel], [], [], left)[0]:
            raise TimeoutError(f"rank server: no {what!r}; it wrote: {self._output.text()}")
        data = self._channel.recv(MAX_PACKET_BYTES)
        if not data:
            raise EOFError(f"the rank server has ended; it wrote: {self._output.text()}")
        kind, content = pickle.loads(data)
        if kind == "ended":
            self._exit_codes[content[0]] = content[1]
        if kind == "progress":
            progress.show(*content)
        return kind, content
