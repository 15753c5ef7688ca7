"""The warm process from which ranks are forked.

It has loaded every compiled loop, but has no communicator, no thread and no code of the tests, so a
fork of it is a rank that starts in milliseconds. A rank serves calls until its socket is closed,
then runs its exit handlers and ends. A rank whose call raises SystemExit ends the interpreter
completely. If the process that started the server is gone, the server ends all ranks and itself.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import select
import signal
import socket
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest  # noqa: F401  (every rank needs it: imported here once)

import gpucoll
from gpucoll import progress
from gpucoll.kernels.cpu import cache
from gpucoll.kernels.cpu.addresses import reduce_kernel
from gpucoll.launcher.exec_rank import die_with
from gpucoll.testing.rank import RankLoop, Reply, Request

MAX_PACKET_BYTES = 60_000
MAX_DESCRIPTORS = 250


class ForkServer:
    """Forks ranks on request, and reports when one has ended.

    A rank that has ended is reaped only when the owner releases it. Until then no other process can
    get its process id, so the owner's signals and queries reach that rank.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._children: set[int] = set()
        """Ranks that have not been reaped."""
        self._running: set[int] = set()
        self._wake_reading, self._wake_writing = os.pipe()
        for end in (self._wake_reading, self._wake_writing):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writing)
        self._own = [self._wake_reading, self._wake_writing]
        self._owner: int | None = None
        try:  # a child of the owner may keep the channel open after the owner has ended
            self._owner = os.pidfd_open(os.getppid())
            self._own.append(self._owner)
        except (OSError, AttributeError):
            pass
        self._sources: list[Any] = [channel, *self._own[0::2]]

    def serve(self) -> RankLoop | None:
        """Serve until the owner is gone; in a forked child, return the loop that it is to run."""
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

    def tell(self, kind: str, content: object) -> None:
        """Send a message to the owner."""
        tell(self._channel, kind, content)

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
        progress.show_by()
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
        """Reap ranks whose end has been reported, which frees their process ids."""
        for pid in pids:
            self._children.discard(pid)
            os.waitpid(pid, 0)

    def _end_all(self) -> None:
        for pid in self._children:
            os.killpg(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)


def tell(channel: socket.socket, kind: str, content: object) -> None:
    """Send a message to the owner of the server."""
    try:
        channel.send(cloudpickle.dumps((kind, content)))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the owner is gone: the next read reports it


def lead_group(pid: int) -> None:
    """Give a rank its own process group, to end it with its children; both sides do this."""
    try:
        os.setpgid(pid, pid)
    except ProcessLookupError:  # the rank has ended already
        pass


def apart(function: Callable[..., object], *args: object) -> bool:
    """Call a function that compiles in a forked child; return whether it succeeded.

    A compiler leaves half a gigabyte in the process that has used it. A rank forked from such a
    server takes 40 ms of CPU time; one forked from a server that only loads takes 15.
    """
    server = os.getpid()
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    try:
        die_with(server)
        function(*args)
        os._exit(0)
    finally:
        os._exit(1)  # the server then fails in the same way, and says why


def load() -> None:
    """Load what every communicator needs, and the usual kernels, which take 30 ms each."""
    with gpucoll.init(rank=0, world_size=1) as alone:
        alone.barrier()
    for dtype in ("float32", "float64", "int64"):
        reduce_kernel(dtype, "sum")


def main(descriptor: int) -> None:
    """Run the server, or a rank forked from it."""
    faulthandler.enable()
    channel = socket.socket(fileno=descriptor)
    progress.show_by(lambda text, stays: tell(channel, "progress", (text, stays)))
    if not cache.is_complete():
        apart(load)
    load()
    server = ForkServer(channel)
    server.tell("ready", None)
    if loop := server.serve():
        loop.serve()
        atexit._run_exitfuncs()
        os._exit(0)  # freeing a copy of the compiler object by object takes half a second
