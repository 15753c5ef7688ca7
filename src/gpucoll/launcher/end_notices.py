"""Tell ranks that wait for others which of them have ended: a rank that is gone never comes.

Without it, ranks would wait in `gpucoll.init` for one that had ended with exit code 0 until the
deadline; no failure ends the job then.
"""

from __future__ import annotations

import contextlib
import socket

from gpucoll.errors import AuthenticationError
from gpucoll.launcher.events import EventLoop
from gpucoll.launcher.rank_process import RankEnd
from gpucoll.rendezvous.frames import peer_process
from gpucoll.rendezvous.notices import notice, notices_address

__all__ = ["EndNotices"]

AT_ONCE = 64


class EndNotices:
    """Sends each rank that asks the ends of the others, those before and those after.

    Parameters
    ----------
    loop : EventLoop
        Serves it.
    token : str
        The job's token: the address is named after it.
    ranks : int
        How many there are; about as many connections are kept.
    """

    def __init__(self, loop: EventLoop, token: str, ranks: int) -> None:
        self._loop = loop
        self._most = 2 * ranks + 16
        self._told = b""
        self._asking: dict[int, socket.socket] = {}
        """By process."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind(notices_address(token))
            self._listener.listen(4096)
        except OSError:
            self._listener.close()  # somebody has the address: the ranks have their deadlines
        else:
            loop.add_reader(self._listener.fileno(), self._accept)

    def add(self, end: RankEnd) -> None:
        """Tell of a rank that has ended."""
        data = notice(end.rank, end.manner)
        self._told += data
        for process in list(self._asking):
            self._send(process, data)

    def close(self) -> None:
        """Let go of everything."""
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
            except OSError:  # no descriptor left: not served rather than asked again and again
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
        self._drop(process)  # a rank has one connection
        if len(self._asking) >= self._most:
            self._drop(next(iter(self._asking)))
        self._asking[process] = connection
        # Nobody sends anything here: what can be read is the other end's leaving.
        self._loop.add_reader(connection.fileno(), lambda: self._drop(process))
        self._send(process, self._told)

    def _send(self, process: int, data: bytes) -> None:
        try:
            complete = self._asking[process].send(data, socket.MSG_NOSIGNAL) == len(data)
        except OSError:
            complete = False
        if not complete:  # it does not read, or is gone
            self._drop(process)

    def _drop(self, process: int) -> None:
        with contextlib.suppress(KeyError):
            connection = self._asking.pop(process)
            self._loop.remove_reader(connection.fileno())
            connection.close()
