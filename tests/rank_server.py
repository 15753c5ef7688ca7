"""Where the tests' ranks come from: one warm process that forks them, and what a rank then does.

Run by `tests.ranks` as ``python -m tests.rank_server DESCRIPTOR``. The server has loaded every
compiled loop and has neither a communicator nor a thread, so a fork of it is a rank
that starts in milliseconds. A rank serves calls until its socket is closed, runs what is registered
for the exit (gpucoll's part in that is tested) and leaves; one whose call raises SystemExit goes
through the interpreter's whole end.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import pytest  # noqa: F401  (test modules need it: imported here once, not in every rank)

import gpucoll
from gpucoll import config
from gpucoll.backends.cpu import precompile
from gpucoll.kernels.cpu.reduce import reduce_kernel

MAX_PACKET_BYTES = 60_000
MAX_DESCRIPTORS = 250


@dataclass(frozen=True)
class Request:
    """What a rank is asked to do: call ``function(who, *args)``."""

    function: Any
    args: tuple[Any, ...] = ()
    gives: str = "communicator"
    """``"communicator"``: who is a fresh duplicate; ``"seat"``: who is the rank's `Seat`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the making of the communicator and the call."""
    timeout_s: float = 20.0
    """Default deadline of the communicator's waits."""


@dataclass(frozen=True)
class Reply:
    """How a call went on one rank."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass
class Seat:
    """A rank without a communicator: it can make one."""

    rank: int
    world_size: int
    token: str

    def init(self, timeout_s: float = 20.0, **options: Any) -> gpucoll.Communicator:
        """Join the other ranks of the pool."""
        os.environ[config.JOB] = self.token
        place = {"rank": self.rank, "world_size": self.world_size, **options}
        return gpucoll.init(**place, timeout_s=timeout_s)


class RankLoop:
    """Serves one rank's calls."""

    def __init__(self, connection: Connection, seat: Seat) -> None:
        self._connection = connection
        self._seat = seat
        self._base: gpucoll.Communicator | None = None

    def serve(self) -> None:
        """Answer requests until the other end is closed."""
        while True:
            try:
                data = self._connection.recv_bytes()
            except EOFError:
                return
            reply = self._answer(data)
            try:
                self._connection.send_bytes(cloudpickle.dumps(reply))
            except BrokenPipeError:
                return
            except Exception:  # an unpicklable result or error: its text will do
                text = traceback.format_exc()
                self._connection.send_bytes(pickle.dumps(Reply(error=RuntimeError(text))))

    def _answer(self, data: bytes) -> Reply:
        try:
            request: Request = cloudpickle.loads(data)
            with environment(request.environment):
                if request.gives == "seat":
                    return Reply(request.function(self._seat, *request.args))
                with self._fresh(request.timeout_s) as communicator:
                    return Reply(request.function(communicator, *request.args))
        except SystemExit:
            raise
        except BaseException as error:
            return Reply(error=error, trace=traceback.format_exc())

    def _fresh(self, timeout_s: float) -> gpucoll.Communicator:
        if self._base is None:
            self._base = self._seat.init()
        made = self._base.duplicate()
        # A duplicate has its parent's deadline; a test may want a shorter one.
        made._group.timeout_s = timeout_s
        made._group._set_timeout(timeout_s)
        return made


@contextmanager
def environment(changes: dict[str, str]):
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Server:
    """Forks ranks when asked to, and says when one has ended."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: set[int] = set()
        self._wake_reading, self._wake_writing = os.pipe()
        for end in (self._wake_reading, self._wake_writing):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writing)
        self._sources: list[Any] = [channel, self._wake_reading]

    def serve(self) -> RankLoop | None:
        """Serve until the driver has gone; in a forked child, return what the child is to do."""
        while True:
            ready: list[Any]
            ready, _, _ = select.select(self._sources, [], [])
            if self._wake_reading in ready:
                self._reap()
            if self._channel in ready:
                data, fds, _, _ = socket.recv_fds(self._channel, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
                if not data:
                    self._end_all()
                    return None
                kind, argument = pickle.loads(data)
                if kind == "kernels":
                    for dtype, operation in argument:
                        reduce_kernel(dtype, operation)
                    self._tell("warm", None)
                elif loop := self._fork(argument, fds):
                    return loop

    def _tell(self, kind: str, content: Any) -> None:
        try:
            self._channel.send(pickle.dumps((kind, content)))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the driver has gone: the next read says so

    def _fork(self, token: str, fds: list[int]) -> RankLoop | None:
        pids = []
        for rank, fd in enumerate(fds):
            pid = os.fork()
            if pid == 0:
                self._become_rank([other for other in fds if other != fd])
                return RankLoop(Connection(fd), Seat(rank, len(fds), token))
            pids.append(pid)
            self._children.add(pid)
        for fd in fds:
            os.close(fd)
        self._tell("forked", pids)
        return None

    def _become_rank(self, others: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._channel.close()
        for fd in (*others, self._wake_reading, self._wake_writing):
            os.close(fd)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)

    def _reap(self) -> None:
        try:
            while os.read(self._wake_reading, 4096):
                pass
        except BlockingIOError:
            pass
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._children.discard(pid)
            self._tell("ended", (pid, os.waitstatus_to_exitcode(status)))

    def _end_all(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def main() -> None:
    """Be the server, or a rank forked from it."""
    faulthandler.enable()
    precompile.load()
    with gpucoll.init(rank=0, world_size=1) as alone:  # compiles what every communicator needs
        alone.barrier()
    server = Server(socket.socket(fileno=int(sys.argv[1])))
    server._tell("ready", None)
    if loop := server.serve():
        loop.serve()
        atexit._run_exitfuncs()
        os._exit(0)  # to take a copy of the compiler apart object by object takes half a second


if __name__ == "__main__":
    # As the module that pickled requests name, so that their classes are these.
    from tests import rank_server

    rank_server.main()
