"""The warm process that ranks are forked from.

It has loaded every compiled loop and has neither a communicator nor a thread nor any code of the
tests, so a fork of it is a rank that starts in milliseconds. A rank serves calls until its socket
is closed, runs what is registered for the exit and leaves; one whose call raises SystemExit goes
through the interpreter's whole end. When the process that started the server has gone, the server
ends all ranks and itself.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import select
import signal
import socket
from typing import Any

import cloudpickle
import pytest  # noqa: F401  (every rank needs it: imported here once)

import gpucoll
from gpucoll.kernels.cpu.addresses import reduce_kernel
from gpucoll.launcher.exec_rank import die_with
from gpucoll.testing.rank import RankLoop, Reply, Request

MAX_PACKET_BYTES = 60_000
MAX_DESCRIPTORS = 250


class ForkServer:
    """Forks ranks when asked to, and says when one has ended.

    One that has ended is waited for only when the owner lets go of it: until then nobody else gets
    its process number, so that the owner's signals and questions mean that rank.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._children: set[int] = set()
        """Ranks that nobody has waited for."""
        self._running: set[int] = set()
        self._wake_reading, self._wake_writing = os.pipe()
        for end in (self._wake_reading, self._wake_writing):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writing)
        self._own = [self._wake_reading, self._wake_writing]
        self._owner: int | None = None
        try:  # a child of the owner may hold the channel open when the owner has gone
            self._owner = os.pidfd_open(os.getppid())
            self._own.append(self._owner)
        except (OSError, AttributeError):
            pass
        self._sources: list[Any] = [channel, *self._own[0::2]]

    def serve(self) -> RankLoop | None:
        """Serve until the owner has gone; in a forked child, return what the child is to do."""
        while True:
            ready: list[Any]
            ready, _, _ = select.select(self._sources, [], [])
            if self._wake_reading in ready:
                self._notice_ends()
            data = b""
            if self._channel in ready:
                data, fds, _, _ = socket.recv_fds(self._channel, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
            elif self._owner not in ready:
                continue
            if not data:
                self._end_all()
                return None
            kind, content = pickle.loads(data)
            if kind == "call":
                self._call(content)
            elif kind == "let go":
                self._let_go(content)
            elif loop := self._fork(content, fds):
                return loop

    def tell(self, kind: str, content: Any) -> None:
        """Send the owner a message."""
        try:
            self._channel.send(cloudpickle.dumps((kind, content)))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the owner has gone: the next read says so

    def _call(self, data: bytes) -> None:
        request: Request = cloudpickle.loads(data)
        try:
            self.tell("called", Reply(request.function(*request.args)))
        except Exception as error:
            self.tell("called", Reply(error=error))

    def _fork(self, content: tuple[int, str], fds: list[int]) -> RankLoop | None:
        first_rank, token = content
        pids = []
        for place, fd in enumerate(fds):
            pid = os.fork()
            if pid == 0:
                self._become_rank([other for other in fds if other != fd])
                return RankLoop(socket.socket(fileno=fd), first_rank + place, len(fds), token)
            lead_group(pid)
            pids.append(pid)
            self._children.add(pid)
            self._running.add(pid)
        for fd in fds:
            os.close(fd)
        self.tell("forked", pids)
        return None

    def _become_rank(self, others: list[int]) -> None:
        die_with(self._pid)
        lead_group(0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._channel.close()
        for fd in (*others, *self._own):
            os.close(fd)

    def _notice_ends(self) -> None:
        try:
            while os.read(self._wake_reading, 4096):
                pass
        except BlockingIOError:
            pass
        for pid in sorted(self._running):
            if end := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._running.discard(pid)
                is_killed = end.si_code != os.CLD_EXITED
                self.tell("ended", (pid, -end.si_status if is_killed else end.si_status))

    def _let_go(self, pids: list[int]) -> None:
        """Wait for ranks whose end has been told: their numbers are free then."""
        for pid in pids:
            self._children.discard(pid)
            os.waitpid(pid, 0)

    def _end_all(self) -> None:
        for pid in self._children:
            os.killpg(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def lead_group(pid: int) -> None:
    """Let a rank be ended together with what its tests started; done by both sides, at once."""
    try:
        os.setpgid(pid, pid)
    except ProcessLookupError:  # it has ended already
        pass


def main(descriptor: int) -> None:
    """Be the server, or a rank forked from it."""
    faulthandler.enable()
    with gpucoll.init(rank=0, world_size=1) as alone:  # loads what every communicator needs
        alone.barrier()
    for dtype in ("float32", "float64", "int64"):
        reduce_kernel(
            dtype, "sum"
        )  # the usual ones: 30 ms each, once instead of once in every rank
    server = ForkServer(socket.socket(fileno=descriptor))
    server.tell("ready", None)
    if loop := server.serve():
        loop.serve()
        atexit._run_exitfuncs()
        os._exit(0)  # to take a copy of the compiler apart object by object takes half a second
