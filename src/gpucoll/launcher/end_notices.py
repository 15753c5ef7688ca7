"""Notify ranks that wait for others which ranks have ended; hear which processes have joined.

Without these notices, ranks would wait in `gpucoll.init` until the deadline for a rank that has
ended with exit code 0, because in that case no failure ends the job. A process of an elastic job
that was started again tells the launcher that it has become a member.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from gpucoll.errors import AuthenticationError
from gpucoll.launcher.events import EventLoop
from gpucoll.launcher.rank_process import RankEnd
from gpucoll.rendezvous.frames import peer_process
from gpucoll.rendezvous.notices import joined_place, notice, notices_address

__all__ = ["EndNotices"]

AT_ONCE = 64
TOLD_BYTES = 64


class EndNotices:
    """Sends the ends of all ranks, earlier and later ones, to each rank that connects.

    Parameters
    ----------
    loop : EventLoop
        The loop that serves the connections.
    token : str
        The job's token, from which the address is derived.
    ranks : int
        The number of ranks, which limits the number of connections.
    on_joined : callable
        Called with the local rank of each process that tells that it has joined.
    """

    def __init__(
        self,
        loop: EventLoop,
        token: str,
        ranks: int,
        on_joined: Callable[[int], None] = lambda place: None,
    ) -> None:
        self._loop = loop
        self._on_joined = on_joined
        self._most = 2 * ranks + 16
        self._told = b""
        self._asking: dict[int, socket.socket] = {}
        """Connections by process id."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(notices_address(token))
            self._listener.listen(4096)
        except OSError:
            # another process has taken the address: the ranks still have their deadlines
            self._listener.close()
        else:
            loop.add_reader(self._listener.fileno(), self._accept)

    def add(self, end: RankEnd) -> None:
        """Notify all connected ranks that a rank has ended."""
        data = notice(end.rank, end.manner)
        self._told += data
        for process in list(self._asking):
            self._send(process, data)

    def hear(self) -> None:
        """Take in what processes have told until now."""
        self._accept()
        for process, connection in list(self._asking.items()):
            try:
                connection.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            except OSError:
                pass
            self._drop(process)

    def close(self) -> None:
        """Close everything."""
        for process in list(self._asking):
            self._drop(process)
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left: give up serving instead of retrying in a loop
                self.close()
                return
            self._take_in(connection)

    def _take_in(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            process = peer_process(connection)
        except AuthenticationError:
            connection.close()
            return
        self._drop(process)  # a rank has only one connection
        if len(self._asking) >= self._most:
            self._drop(next(iter(self._asking)))
        self._asking[process] = connection
        # A rank sends at most one notice, and nothing after it: it has said it, or has gone.
        self._loop.add_reader(connection.fileno(), lambda: self._drop(process))
        self._send(process, self._told)

    def _send(self, process: int, data: bytes) -> None:
        try:
            complete = self._asking[process].send(data, socket.MSG_NOSIGNAL) == len(data)
        except OSError:
            complete = False
        if not complete:  # the rank does not read, or is gone
            self._drop(process)

    def _drop(self, process: int) -> None:
        with contextlib.suppress(KeyError):
            connection = self._asking.pop(process)
            self._loop.remove_reader(connection.fileno())
            told = b""
            with contextlib.suppress(OSError):
                told = connection.recv(TOLD_BYTES)
            connection.close()
            if (place := joined_place(told)) is not None:
                self._on_joined(place)
